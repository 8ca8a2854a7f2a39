# make demo   install into .venv and run the main job on the private Mesos
# make test   install the test needs and run everything that CI runs
# make test-fast      the tests that start no process, open no socket and are not slow: a loop of a minute
# make test-thorough  everything, with all examples of all properties; DIKE_TEST_SEED=N repeats those of a run
# make fuzz   more than 10,000 made-up command lines, requests, files and messages, other ones each time
# make bench-solver   measure all that is claimed of the solver; writes benchmarks/results/solver.md
# make bench-search   measure all that is claimed of searches; writes benchmarks/results/search.md
# make chaos  a random fault every few seconds while jobs run, CHAOS_FAULTS times; prints what it does
# make wheel  write Dike's packages into dist/, for pip install dist/*.whl on other machines
# make clean  remove all that make has made; checkpoints in dike-runs/ are left alone
PYTHON ?= python3
CHAOS_FAULTS ?= 210
VENV   ?= .venv
BIN    := $(VENV)/bin
# Tests that start processes wait for them much of the time, so more of them than there are cores go at once. A file's
# tests stay in one process: what they share is made once. The files' order is that of tests/conftest.py.
PYTEST := $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder --numprocesses
PIP    := $(BIN)/python -m pip --disable-pip-version-check
# The tests start hundreds of Python processes; without bytecode each would compile all that it imports.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test suite test-fast test-thorough fuzz chaos lint bench bench-solver bench-search wheel clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed-examples
	@echo "This shows a cluster: two workers and a parameter server (--strategy ps). A model as small as this one trains"
	@echo "faster in one process, which 'dike run examples/digits_cnn.py' would choose."
	$(BIN)/dike run --strategy ps --min-workers 2 examples/digits_cnn.py

# The type checker takes one core for a while, and tests wait now and then.
test: $(VENV)/.installed-test
	$(MAKE) --no-print-directory --jobs 2 lint suite

suite: $(VENV)/.installed-test
	$(PYTEST) 5

test-fast: $(VENV)/.installed-test
	$(PYTEST) 2 --dist worksteal --fast

test-thorough: lint
	$(PYTEST) 5 --hypothesis-profile thorough

fuzz: $(VENV)/.installed-test
	$(PYTEST) 2 --timeout 0 --hypothesis-profile fuzz $(wildcard tests/*/test_*fuzz*.py)

chaos: $(VENV)/.installed-test
	DIKE_CHAOS_FAULTS=$(CHAOS_FAULTS) $(BIN)/python -m pytest -s tests/faults/test_chaos.py tests/cluster/test_cluster_chaos.py

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks

bench-solver: $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks solver

bench-search: $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks search

# One stamp for each extra: an install runs again only when the metadata changes.
$(VENV)/.installed-%: setup.cfg pyproject.toml $(wildcard compat/http_parser/*.* compat/http_parser/http_parser/*.py)
	@echo "installing Dike and its '$*' needs into $(VENV)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip
	$(PIP) install --quiet ./compat/http_parser
	$(PIP) install --quiet --editable ".[$*]"
	touch $@

# The second package is one that pymesos needs and that no longer builds from where it is published.
wheel: $(VENV)/.installed-examples
	$(PIP) wheel --quiet --no-deps --wheel-dir dist . ./compat/http_parser

clean:
	rm -rf $(VENV) build dist *.egg-info compat/http_parser/build compat/http_parser/*.egg-info
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis
