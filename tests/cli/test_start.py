"""How a command starts: its imports, its help texts, its shell completion."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from dike._version import __version__
from framework.cli import SUBCOMMANDS, app
from framework.search.records import Parameter, SearchSpec, TrialRecord, TrialState
from framework.search.store import Store
from tests.service.api_stage import TOKENS, ApiStage, api_stage

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
RESNET = ROOT / "benchmarks" / "data" / "profiles" / "resnet50.json"
CLUSTER = ROOT / "examples" / "clusters" / "five-k80.yaml"
TIMEOUT_S = 120.0
Done = subprocess.CompletedProcess[str]
NEVER = {"tensorflow", "keras", "tf_keras", "optuna", "networkx", "pymesos", "fastapi", "matplotlib", "pandas"}
"""What no command may import that runs nothing."""
LISTS = NEVER | {"numpy", "pulp", "highspy", "sqlalchemy.orm"}
"""Nor a command that lists what there is."""
ALL = LISTS | {"sqlalchemy", "httpx", "kazoo", "psutil", "rich", "yaml", "multiprocessing"}
"""Nor one that only says what can be typed."""
HELP = {"solver.cli", "solver.cli.help"}
COMMANDS = tuple(get_command(app).commands)  # type: ignore[attr-defined]


def start(*arguments: str | Path, folder: Path, **environment: str) -> tuple[Done, set[str]]:
    """Runs `dike ARGUMENTS...`; what came of it, and the modules that were imported."""
    report = folder / "modules"
    program = (
        "import atexit, sys\n"
        "from pathlib import Path\n"
        f"atexit.register(lambda: Path({str(report)!r}).write_text(' '.join(sys.modules)))\n"
        "sys.argv[0] = 'dike'\n"
        "from framework.cli import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    return done, set(report.read_text().split())


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("--version",),
        *((name, "--help") for name in COMMANDS),
        *(("mesos", name, "--help") for name in ("up", "status", "down")),
        *(("users", name, "--help") for name in ("add", "rotate", "remove", "list")),
    ],
    ids=" ".join,
)
def test_what_can_be_typed_is_said_without_the_libraries_of_the_work(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    done, modules = start(*arguments, folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert modules & ALL == set()


def test_nothing_is_imported_to_list_the_commands(tmp_path: Path) -> None:
    done, modules = start("--help", folder=tmp_path)
    assert all(f"\n  {name} " in done.stdout for name in COMMANDS)
    assert {name for name in modules if name.startswith(("solver.", "executor", "framework.service"))} == HELP
    assert "pydantic" not in modules


@pytest.fixture
def searches(tmp_path: Path) -> str:
    """A database with a search."""
    url = f"sqlite:///{tmp_path}/searches.db"
    parameters = (Parameter("lr", (0.1, 0.2)),)
    spec = SearchSpec("lrs", "/scripts/train.py", (), {}, parameters, "grid", trial_count=2)
    with closing(Store(url)) as store:
        store.create_search(spec)
        store.save_trial(TrialRecord(0, {"lr": 0.1}, TrialState.FINISHED, step=100, loss=0.5, value=0.5))
    return url


LISTED = (("trials",), ("trials", "lrs"), ("timeline", "lrs"), ("clean", "."))


@pytest.mark.parametrize("arguments", LISTED, ids=" ".join)
def test_searches_are_listed_without_what_runs_them(arguments: tuple[str, ...], searches: str, tmp_path: Path) -> None:
    done, modules = start(*arguments, "--storage", searches, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "sqlalchemy" in modules
    assert modules & (LISTS | {"httpx"}) == set()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ApiStage]:
    with api_stage(tmp_path) as stage:
        yield stage


@pytest.mark.parametrize(
    "arguments",
    [("jobs",), ("jobs", "last"), ("agents",), ("logs", "last"), ("explain", "last"), ("kill", "last")],
    ids=" ".join,
)
def test_a_service_is_asked_without_what_it_is_made_of(
    arguments: tuple[str, ...], service: ApiStage, tmp_path: Path
) -> None:
    service.submit()
    access = {"DIKE_SERVICE": service.url, "DIKE_TOKEN": TOKENS["alice"]}
    done, modules = start(*arguments, folder=tmp_path, **access)
    assert done.returncode == 0, done.stderr
    assert "httpx" in modules
    assert modules & (LISTS | {"sqlalchemy"}) == set()


def test_a_plan_is_made_without_what_runs_it(tmp_path: Path) -> None:
    done, modules = start("plan", RESNET, "--cluster", CLUSTER, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "samples/s" in done.stdout
    assert modules & (NEVER | {"sqlalchemy", "httpx", "kazoo", "solver.methods", "solver.jobs"}) == set()


def test_the_list_has_the_first_sentence_of_what_each_command_says_of_itself() -> None:
    runner = CliRunner()
    lines = runner.invoke(app, ["--help"]).stdout.partition("Train:\n")[2].splitlines()
    listed = dict(line.split(maxsplit=1) for line in lines if line.startswith("  "))
    assert sorted(listed) == sorted(COMMANDS)
    for name, text in listed.items():
        own = " ".join(runner.invoke(app, [name, "--help"]).stdout.split())
        assert f"{text}." in own


@pytest.mark.parametrize("name", COMMANDS)
def test_each_option_of_a_command_with_many_stands_under_one_title(name: str) -> None:
    place = next(command for commands in SUBCOMMANDS.values() for command in commands if command.name == name)
    context = place.make_context(name, [], resilient_parsing=True)
    panels = getattr(context.command, "panels", {})
    shown = [option for names in panels.values() for option in names]
    options = {one.name for one in context.command.params if one.param_type_name == "option" and not one.hidden}
    assert len(set(shown)) == len(shown)
    assert not panels or set(shown) == options
    assert panels or len(options) <= 9, "give the module PANELS"


def test_the_version_names_those_of_the_libraries_that_matter() -> None:
    said = CliRunner().invoke(app, ["--version"]).stdout
    assert said.startswith(f"dike {__version__} (Python 3.")
    assert f"TensorFlow {version('tensorflow')}, Keras {version('keras')}" in said


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("dike pl", ["plot", "plan"]),
        ("dike mesos ", ["up", "status", "down"]),
        ("dike jobs --st", ["--state"]),
        ("dike jobs --state f", ["finished", "failed"]),
        ("dike plan --objective ", ["throughput", "traffic"]),
        ("dike run --checkpoint-i", ["--checkpoint-interval"]),
        ("dike --v", ["--version"]),
    ],
)
def test_a_shell_completes_commands_options_and_values(typed: str, completed: list[str], tmp_path: Path) -> None:
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split(" ")) - 1)}
    done, modules = start(folder=tmp_path, _DIKE_COMPLETE="complete_bash", **words)
    assert done.stdout.split() == completed
    assert modules & ALL == set()


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_are_told_what_it_means(shell: str, tmp_path: Path) -> None:
    wish = {"_TYPER_COMPLETE_ARGS": "dike plo", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    done, modules = start(folder=tmp_path, _DIKE_COMPLETE=f"complete_{shell}", **wish)
    assert "plot" in done.stdout
    assert "Draws a search" in done.stdout
    assert modules & (ALL - {"rich"}) == set()


def test_bash_completes_once_that_is_installed(tmp_path: Path) -> None:
    own = Path(sys.executable).parent
    environment = {**os.environ, "HOME": str(tmp_path), "PATH": f"{own}{os.pathsep}{os.environ['PATH']}"}

    def bash(script: str) -> Done:
        return subprocess.run(
            ["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=True
        )

    bash("dike --install-completion; true")  # a shell that has nothing more to do would become the command
    asked = "source ~/.bashrc; COMP_WORDS=(dike pl); COMP_CWORD=1; _dike_completion dike; echo ${COMPREPLY[*]}"
    assert bash(asked).stdout.split() == ["plot", "plan"]
