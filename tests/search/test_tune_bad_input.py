"""What `dike tune` cannot use gets one sentence and exit code 2, before or after its first process."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from framework.search.records import Parameter, SearchSpec
from framework.search.store import Store
from tests.running import run_dike

pytestmark = pytest.mark.integration

COUNTING = Path(__file__).parent / "scripts" / "counting.py"

Tune = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def tune(tmp_path: Path) -> Tune:
    return functools.partial(run_dike, "tune", cwd=tmp_path)


def sentence(done: subprocess.CompletedProcess[str]) -> str:
    """The one sentence of a refusal."""
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("dike: ")
    assert last.endswith((".", "?"))
    return last


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        (("--param", "lr"), "lr"),
        (("--param", "lr="), "lr"),
        (("--param", "lr=5:1"), "lr"),
        (("--param", "lr=0:1:log"), "lr"),
        (("--param", "lr=1:2:3:4"), "lr"),
        (("--param", "lr=0.1", "--param", "lr=0.2"), "lr"),
        ((), "--param"),
        (("--space", "missing.yaml"), "missing.yaml"),
        (("--param", "lr=0.1", "--policy", "hermess"), "hermes"),
        (("--param", "lr=0.1", "--metric", "val_accuracy"), "--mode max"),
        (("--param", "lr=0.1", "--mode", "max"), "--metric"),
        (("--param", "lr=0.1", "--milestones", "half:20s"), "--milestones"),
        (("--param", "lr=0.1", "--warm-start-from", "x", "--policy", "asha"), "--policy dike"),
        (("--param", "lr=0.1", "--storage", "nonsense://x"), "nonsense"),
        (("--param", "lr=0.1", "--storage", "sqlite:////no/such/folder/x.db"), "/no/such/folder"),
        (("--param", "lr=0.1", "--name", "a/b"), "a/b"),
        (("--param", "lr=1e-5:1e-1:log", "--sampler", "grid"), "lr"),
        (("--param", "lr=0.1", "--sampler", "nsga2"), "nsgaii"),
        (("--param", "lr=0.1", "--stop", "patience"), "--stop patience=10"),
        (("--param", "lr=0.1", "--image", "x"), "--master"),
        (("--param", "lr=0.1", "--master", "127.0.0.1:1", "--connect-timeout", "0.2"), "127.0.0.1:1"),
    ],
)
def test_options_that_cannot_be_used(tune: Tune, arguments: tuple[str, ...], culprit: str) -> None:
    assert culprit in sentence(tune(COUNTING, *arguments))


def test_a_script_that_is_not_there(tune: Tune) -> None:
    assert "nowhere.py" in sentence(tune("nowhere.py", "--param", "lr=0.1"))
    assert "script" in sentence(tune("--param", "lr=0.1"))


def spec(name: str, folder: Path) -> SearchSpec:
    return SearchSpec(
        name=name,
        script=str(COUNTING),
        arguments=(),
        flags={"lr": "--lr"},
        space=(Parameter("lr", choices=(0.1,)),),
        sampler="grid",
        trial_count=1,
        checkpoint_dir=str(folder),
    )


def test_resume_of_an_unknown_name_suggests_the_nearest(tune: Tune, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/s.db"
    store = Store(url)
    store.create_search(spec("digits", tmp_path))
    store.close()
    assert "digits" in sentence(tune("--resume", "digist", "--storage", url))
    assert "--resume digits" in sentence(tune(COUNTING, "--param", "lr=0.1", "--name", "digits", "--storage", url))


def test_resume_takes_no_other_search_with_it(tune: Tune) -> None:
    assert "the script" in sentence(tune(COUNTING, "--resume", "digits", "--param", "lr=0.1"))
    assert "--seed" in sentence(tune("--resume", "digits", "--slots", "1", "--seed", "1"))


def test_checkpoints_that_cannot_be_written(tune: Tune, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "file/x" in sentence(tune(COUNTING, "--param", "lr=0.1", "--checkpoint-dir", "file/x"))


@pytest.mark.mesos
def test_searches_that_share_a_folder_for_checkpoints(tune: Tune, tmp_path: Path) -> None:
    one = ("--param", "lr=0.1", "--slot-mem", "256", "--name", "one", "--checkpoint-dir", "shared")
    steps = ("--", "--steps", "5")
    assert tune(COUNTING, *one, *steps).returncode == 0
    folder = tmp_path / "shared" / "one"
    kept = {path: path.read_bytes() for path in folder.glob("trial-0/run-*/**/*") if path.is_file()}
    assert kept
    text = sentence(tune(COUNTING, *one, "--storage", "sqlite:///other.db", *steps))
    assert f"{folder} holds trials of another search" in text
    assert {path: path.read_bytes() for path in kept} == kept


def test_two_processes_do_not_run_one_search(tune: Tune, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/s.db"
    store = Store(url)
    store.create_search(spec("digits", tmp_path))
    with store.lock("digits"):
        assert "is being run" in sentence(tune("--resume", "digits", "--storage", url))
    store.close()


@pytest.mark.mesos
def test_a_script_that_refuses_its_arguments_shows_its_usage(tune: Tune) -> None:
    options = ("--slot-mem", "256", "--policy", "fifo", "--name", "mine")
    done = tune(COUNTING, "--param", "steps=2,3", *options)
    assert sentence(done)
    assert "usage: " in done.stdout + done.stderr
    assert "required: --lr" in done.stdout + done.stderr
    # Nothing came of it, so its name is free again.
    assert "--lr" in sentence(tune(COUNTING, "--param", "lr=a,b", *options))


@pytest.mark.mesos
def test_a_metric_that_is_never_reported_is_named_with_those_that_are(tune: Tune) -> None:
    options = ("--slot-mem", "256", "--policy", "fifo", "--metric", "f1", "--mode", "max")
    text = sentence(tune(COUNTING, "--param", "lr=0.1,0.2", *options, "--", "--steps", "5"))
    assert "'f1'" in text
    assert "accuracy" in text
