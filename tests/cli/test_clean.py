"""`dike clean` removes only old checkpoints of ended runs and searches, and only with `--yes`."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dike.exceptions import BadInputError, DikeError
from framework.cli import app
from framework.project.run_folders import LOCK, TRASH, RunFolders, mark_in_use
from framework.search.records import TrialRecord, TrialState
from framework.search.store import Store
from tests.search.stored_search import SPEC

DAY_S = 24 * 3600.0
OLD_S = time.time() - 40 * DAY_S


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty `dike-runs/` in the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dike-runs").mkdir()
    return tmp_path / "dike-runs"


def add_files(folder: Path, *names: str, written_s: float = OLD_S) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(1000))
        os.utime(path, (written_s, written_s))


def add_run(runs: Path, name: str, **changes: Any) -> Path:
    """What a `dike run` of that name has left."""
    add_files(runs / name, "fit-0/ckpt-7.data", **changes)
    with mark_in_use(runs / name, name, make=True):
        pass
    os.utime(runs / name / LOCK, (OLD_S, OLD_S))
    return runs / name


def add_search(runs: Path, name: str, failure: str = "", **states: TrialState) -> Store:
    """A search that has ended, its trials each worse than the one before, their checkpoints, and their function."""
    store = Store(f"sqlite:///{runs}/searches.db")
    add_files(runs / name / "function", "train-0.function")
    script = str(runs / name / "function" / "train-0.function")
    store.create_search(dataclasses.replace(SPEC, name=name, script=script, checkpoint_dir=str(runs / name)))
    with store.lock(name, last_sign_s=OLD_S):
        for number, state in enumerate(states.values()):
            store.save_trial(TrialRecord(number, {}, state, value=float(number)))
            add_files(runs / name / f"trial-{number}", f"run-0-step-{number}/dike-trial.json", "run-0.log")
        store.finish_search(failure)
    return store


def clean(*arguments: str) -> dict[str, Any]:
    """What is printed as JSON, with the paths alone in the place of the folders."""
    done = CliRunner().invoke(app, ["clean", *arguments, "--format", "json"], catch_exceptions=False)
    found: dict[str, Any] = json.loads(done.stdout)
    return {**found, "folders": [folder["path"] for folder in found["folders"]]}


def test_without_yes_it_only_lists_what_it_would_remove(runs: Path) -> None:
    add_run(runs, "old")
    add_files(runs / ".hidden", "fit-0/ckpt-7.data")
    add_run(runs, "young", written_s=time.time() - 20 * DAY_S)
    said = CliRunner().invoke(app, ["clean"]).stdout
    size = 1000 + len("old\n")
    assert f"│ old    │ {size} B │" in said
    assert "young" not in said
    assert said.endswith(
        f"dike: left alone: 1 (written to since)\ndike: nothing is removed; with --yes these {size} B are\n"
    )
    assert clean() == {
        "folder": "dike-runs",
        "removed": False,
        "size_bytes": size,
        "folders": ["old"],
        "left": {"written to since": 1},
        "errors": {},
    }
    assert (runs / "old").is_dir()
    assert CliRunner().invoke(app, ["clean", "--yes"]).stdout.endswith(f"dike: removed: {size} B\n")
    assert sorted(path.name for path in runs.iterdir()) == [".hidden", "young"]
    assert clean("--older-than", "10d", "-y")["folders"] == ["young"]
    assert CliRunner().invoke(app, ["clean"]).stdout == "dike: there is nothing to remove\n"


def test_what_scripts_have_written_goes_only_if_that_is_asked_for(runs: Path) -> None:
    folder = add_run(runs, "old")
    results = ("outputs/model.keras", "dike-outputs.json", "failed/chief-0-attempt-0/stderr")
    add_files(folder, *results)
    assert clean("--yes")["size_bytes"] == 1000
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == {LOCK, *results}
    assert clean("--yes")["folders"] == []
    assert clean("--yes", "--outputs")["size_bytes"] == 3000 + len("old\n")
    assert list(runs.iterdir()) == []


def test_what_runs_or_is_not_known_to_have_ended_is_left_alone(runs: Path, tmp_path: Path) -> None:
    folder = add_run(runs, "running")
    add_files(runs / "before-there-was-a-lock", "fit-0/ckpt-7.data")
    # A service continues this job in the same folder.
    claim = add_run(runs, "taken-over") / "dike-claim.json"
    claim.write_text(json.dumps({"job": "somebody-else", "attempt": 0}))
    os.utime(claim, (OLD_S, OLD_S))
    (runs / "linked").symlink_to(add_run(tmp_path, "elsewhere"))
    left = {"in use": 2, "neither a run of dike run nor a search in the database": 1}
    with mark_in_use(folder, "again", make=False):
        os.utime(folder / LOCK, (OLD_S, OLD_S))
        found = clean("--yes")
        assert (found["folders"], found["left"]) == ([], left)
    os.utime(folder / LOCK, (OLD_S, OLD_S))
    # The claim names the job that used the folder last.
    (folder / "dike-claim.json").write_text(json.dumps({"job": "again", "attempt": 0}))
    os.utime(folder / "dike-claim.json", (OLD_S, OLD_S))
    assert clean("--yes")["folders"] == ["running"]
    assert (tmp_path / "elsewhere" / "fit-0" / "ckpt-7.data").is_file()


def test_a_search_keeps_its_best_trial_and_those_that_may_resume(runs: Path) -> None:
    ended = {"failed": TrialState.FAILED, "best": TrialState.FINISHED, "worse": TrialState.FINISHED}
    with closing(add_search(runs, "digits", **ended, open=TrialState.SUSPENDED)) as store:
        left = {"the best trial of its search": 1, "trials that --resume can continue": 1}
        before = clean()
        assert (before["folders"], before["left"]) == (["digits/trial-0", "digits/trial-2"], left)
        with store.lock("digits", last_sign_s=OLD_S):
            assert clean("--yes")["left"] == {"in use": 1}
        found = clean("--yes")
        assert (found["folders"], found["left"], found["size_bytes"]) == (before["folders"], left, 2000)
        assert sorted(path.parent.name for path in (runs / "digits").glob("trial-*/run-0-step-*")) == [
            *("trial-1", "trial-3")
        ]
        add_files(runs / "digits" / "trial-0", "run-1-step-9/dike-trial.json")
        assert clean()["folders"] == ["digits/trial-0"], "it is as old as before"
        # The search was resumed in the meantime.
        with store.lock("digits"):
            pass
        assert clean()["left"] == {"written to since": 1}
    # Without the database, the best trial is unknown.
    (runs / "searches.db").rename(runs / "other.db")
    assert clean("--older-than", "0s")["left"] == {"neither a run of dike run nor a search in the database": 1}
    found = clean("--older-than", "0s", "--storage", "sqlite:///dike-runs/other.db")
    assert found["folders"] == ["digits/trial-0"]


def test_the_function_of_a_search_is_removed_when_no_trial_can_resume(runs: Path) -> None:
    states = {"best": TrialState.FINISHED, "worse": TrialState.STOPPED}
    add_search(runs, "complete", **states).close()
    add_search(runs, "ended-early", "interrupted", **states).close()
    assert clean("--yes")["folders"] == ["complete/function", "complete/trial-1", "ended-early/trial-1"]
    assert [path.parent.parent.name for path in runs.glob("*/function/*")] == ["ended-early"]


def test_a_folder_without_a_run_is_not_marked(tmp_path: Path) -> None:
    with mark_in_use(tmp_path / "of the user", "run", make=False):
        assert list(tmp_path.iterdir()) == []
    runs = tmp_path / "runs"
    with mark_in_use(runs / "planned", "planned", make=True), RunFolders(runs).lock_idle("planned") as run:
        assert run is None
    # Nothing came of it.
    assert list(runs.iterdir()) == []
    (tmp_path / "file").touch()
    refused = pytest.raises(BadInputError, match=r"cannot be written to .*; name another folder with --checkpoint-dir")
    with refused, mark_in_use(tmp_path / "file" / "run", "run", make=True):
        pass


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("nowhere",), "The folder nowhere does not exist; name the folder that"),
        (
            ("--older-than", "30"),
            "'30' is not a value of --older-than: a time is a number with d, h",
        ),
        (("--storage", "sqlite:///nowhere.db"), "There is no database of searches at nowhere.db"),
    ],
)
def test_bad_input_is_refused(runs: Path, arguments: tuple[str, ...], told: str) -> None:
    with pytest.raises(BadInputError, match=told):
        clean(*arguments)


def test_what_cannot_be_removed_is_said(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_run(runs, "a")
    add_run(runs, "b")
    remove = RunFolders.remove

    def refuse(folders: RunFolders, *path: str) -> None:
        if path == ("a",):
            raise PermissionError(13, "Permission denied")
        remove(folders, *path)

    monkeypatch.setattr(RunFolders, "remove", refuse)
    with pytest.raises(DikeError, match=r"What is in dike-runs/a cannot be removed: Permission denied\."):
        clean("--yes")
    assert [path.name for path in runs.iterdir()] == ["a"]
    monkeypatch.undo()
    monkeypatch.chdir(runs.parent)
    (runs / TRASH).symlink_to(runs.parent)
    with pytest.raises(DikeError, match=rf"What is in dike-runs/{TRASH} cannot be removed: "):
        clean("--yes")


def test_a_run_s_folder_is_for_its_own_account_and_its_mark_no_link(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        with mark_in_use(tmp_path / "runs" / "train-1", "train-1", make=True):
            assert [stat.S_IMODE(one.stat().st_mode) for one in (tmp_path / "runs", tmp_path / "runs" / "train-1")] == [
                0o700,
                0o700,
            ]
    finally:
        os.umask(previous)
    (tmp_path / "precious").write_text("precious")
    (tmp_path / LOCK).symlink_to(tmp_path / "precious")
    with (
        pytest.raises(BadInputError, match="Checkpoints cannot be written"),
        mark_in_use(tmp_path, "train-2", make=True),
    ):
        pass
    assert (tmp_path / "precious").read_text() == "precious"
