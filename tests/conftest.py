"""Settings of all tests; a test without a mark can neither start a process nor open a socket."""

from __future__ import annotations

import functools
import gc
import multiprocessing.process
import os
import random
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from framework.embedded.library import cached_library
from tests.running import Dike, run_dike
from tests.warm import ENVIRONMENT, FOLDER_VARIABLE, GC_THRESHOLD, read_migrations_once

# Nothing of what is imported and collected is garbage: to look for some again and again takes a fifth of the time.
gc.disable()

# The tests have clusters, services and databases of their own, whichever the user has named for daily work.
for name in ("DIKE_MASTER", "DIKE_STATE", "DIKE_STORAGE", "DIKE_SERVICE", "DIKE_TOKEN", "DIKE_USERS", "DIKE_LOG"):
    os.environ.pop(name, None)
os.environ["DIKE_PRIVATE"] = "1"  # whichever cluster this machine is in

# Each run tries other examples, by a seed that it prints (`SEED_VARIABLE`), the same one in all of its processes.
# A slow machine is not a failure. `max_examples` is a percentage: see `tests/properties.py`.
_COMMON: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow],
    "database": None,
    "derandomize": False,
    "print_blob": True,
}
settings.register_profile("standard", max_examples=10, **_COMMON)
settings.register_profile("thorough", max_examples=100, **_COMMON)
settings.register_profile("fuzz", max_examples=400, **_COMMON)
settings.load_profile("standard")

SEED_VARIABLE = "DIKE_TEST_SEED"
"""Seed of the examples of all properties; a fresh one if it is not set."""

_LONG = (
    "training/test_run.py",
    "roles/test_roles_keras.py",
    "faults/test_faults.py",
    "trial/test_keras_fit.py",
    "search/test_tune.py",
    "training/test_plain_run.py",
    "roles/test_roles_graph.py",
    "dike/test_capture.py",
    "dike/test_namespace.py",
    "service/test_allocation_run.py",
    "faults/test_chaos.py",
    "cli/test_service_commands.py",
    "executor/test_trial_slot.py",
    "search/test_study.py",
)
"""Files that take longest begin first, in this order, so that none is left alone at the end."""

_MEMORY = Path("/dev/shm")
_MEMORY_BYTES = 4 << 30
"""The tests' files take a third of that at most."""

_OPEN_MARKS = ("integration", "mesos", "tensorflow", "gpu")
_CLOSED_EVENTS = (
    "subprocess.Popen",
    "os.system",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "socket.bind",
    "socket.connect",
    "multiprocessing",
)
_closed: str | None = None
"""The test that runs, if it may neither start processes nor open sockets."""


def _refuse(event: str, _: tuple[Any, ...]) -> None:
    if _closed is not None and event in _CLOSED_EVENTS:
        raise RuntimeError(f"{_closed} does '{event}': mark it `integration`, or do without (CONTRIBUTING.md, 'Tests')")


sys.addaudithook(_refuse)


def _refuse_processes() -> None:
    # These are started past all that is audited.
    start = multiprocessing.process.BaseProcess.start

    def checked(process: multiprocessing.process.BaseProcess) -> None:
        _refuse("multiprocessing", ())
        start(process)

    multiprocessing.process.BaseProcess.start = checked  # type: ignore[method-assign]


_refuse_processes()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fast", action="store_true", help="only tests that start no process, open no socket and are not slow"
    )


@pytest.hookimpl(tryfirst=True)  # before Hypothesis reads its seed
def pytest_configure(config: pytest.Config) -> None:
    config.option.hypothesis_seed = os.environ[SEED_VARIABLE] = _seed(config)
    if not hasattr(config, "workerinput"):  # the processes that it starts have its environment
        # No test looks at what a machine has lost that lost its power, and to write for that takes a fifth of all.
        root = str(_MEMORY) if "TMPDIR" not in os.environ and _has_room(_MEMORY) else tempfile.gettempdir()
        folder = tempfile.TemporaryDirectory(prefix="dike-tests-", dir=root)
        # What a test that fails has left stays where it is; all else goes.
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", root)
        os.environ[FOLDER_VARIABLE] = os.environ["TMPDIR"] = tempfile.tempdir = folder.name
        config.add_cleanup(folder.cleanup)
    ENVIRONMENT.update(os.environ)


def _seed(config: pytest.Config) -> str:
    seed = config.option.hypothesis_seed or os.environ.get(SEED_VARIABLE) or str(random.SystemRandom().randrange(10**9))
    if not seed.isdecimal():
        raise pytest.UsageError(f"{SEED_VARIABLE} is '{seed}', which is not a number.")
    return str(seed)


def pytest_report_header(config: pytest.Config) -> str:
    return f"examples of properties: {SEED_VARIABLE}={config.option.hypothesis_seed}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Where tests have failed, also without a header."""
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        terminalreporter.write_line(f"{SEED_VARIABLE}={config.option.hypothesis_seed} repeats the examples of this run")


def _has_room(folder: Path) -> bool:
    """Whether a file system can hold the files of all tests, and the programs that they start."""
    if not os.access(folder, os.W_OK | os.X_OK):
        return False
    found = os.statvfs(folder)
    return not found.f_flag & os.ST_NOEXEC and found.f_bavail * found.f_frsize >= _MEMORY_BYTES


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `--fast`, files with nothing for it are not even imported."""
    if not config.getoption("--fast") or not collection_path.name.startswith("test_"):
        return None
    marked = re.search(r"^pytestmark = (\[[^\]]*\]|.*)", collection_path.read_text(encoding="utf-8"), re.MULTILINE)
    return True if marked and re.search(rf"mark\.({'|'.join(_OPEN_MARKS)})\b", marked[1]) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=_turn)
    if config.getoption("--fast"):
        left_out = [item for item in items if _is_open(item) or item.get_closest_marker("slow")]
        items[:] = [item for item in items if item not in set(left_out)]
        config.hook.pytest_deselected(items=left_out)


def _turn(item: pytest.Item) -> tuple[int, bool]:
    """Long files, the others that start processes, then the rest."""
    file = f"{item.path.parent.name}/{item.path.name}"
    return _LONG.index(file) if file in _LONG else len(_LONG), not _is_open(item)


def pytest_collection_finish(session: pytest.Session) -> None:
    # What has been imported and collected is there to the end: no collection goes through it.
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    gc.enable()
    if "tensorflow" in sys.modules:
        raise pytest.UsageError("A test module imports TensorFlow as it is collected, which takes seconds.")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    global _closed
    _closed = None if _is_open(item) else item.nodeid
    try:
        return (yield)
    finally:
        _closed = None


def _is_open(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(mark) for mark in _OPEN_MARKS)


@pytest.fixture(scope="session", autouse=True)
def migrations_are_read_once() -> None:
    read_migrations_once()


@pytest.fixture(scope="session", autouse=True)
def no_profiles_of_earlier_runs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Of the user's cache only Mesos is used: the profiles in there are of the same scripts."""
    cache, own = cached_library().parent, tmp_path_factory.mktemp("cache")
    cache.mkdir(parents=True, exist_ok=True)
    (own / cache.name).symlink_to(cache)
    os.environ["DIKE_CACHE"] = str(own)


@pytest.fixture(scope="session", autouse=True)
def keys_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What an account writes down for itself once, such as the key that it signs with, is no matter of the user's."""
    os.environ["XDG_CONFIG_HOME"] = str(tmp_path_factory.mktemp("config"))


@pytest.fixture
def dike(tmp_path: Path) -> Dike:
    """Runs `dike ARGUMENTS...` in a folder of its own and waits for its end."""
    return functools.partial(run_dike, cwd=tmp_path)


@pytest.fixture
def examples() -> Path:
    return Path(__file__).parents[1] / "examples"
