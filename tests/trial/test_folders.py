"""Checkpoint folders: complete or not there, the newest found, the superfluous removed."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import os
import shutil
import struct
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from dike import checkpoints
from dike.arrays import dump_arrays
from dike.exceptions import BadInputError
from dike.trial import export, folders, script_api
from dike.trial.runtime import TrialRuntime
from dike.trial.search_result import TrialResult
from dike.trial.spec import TrialSpec
from tests.trees import make_deep


def _write(folder: Path, run: int, step: int, **meta: object) -> str:
    path = str(folder / f"run-{run}-step-{step}")
    folders.write(path, {"state": f"{run}/{step}".encode()}, {"kind": "test", "step": step, "train_s": 1.5, **meta})
    return path


def test_the_last_complete_checkpoint_is_found_whole_or_not_and_runs_are_counted(tmp_path: Path) -> None:
    assert folders.last_written(str(tmp_path / "nowhere")) == (None, 0)
    first = _write(tmp_path, 0, 10)
    assert folders.last_written(str(tmp_path)) == (first, 1)
    (tmp_path / "run-1-step-20").mkdir()  # killed while it was written
    assert folders.last_written(str(tmp_path)) == (first, 2)
    damaged = _write(tmp_path, 2, 30)
    (Path(damaged) / "state").write_bytes(b"something else")
    assert folders.last_written(str(tmp_path)) == (damaged, 3)
    # The model at a job's end cannot be resumed from.
    _write(tmp_path, 3, 40, kind=folders.MODEL)
    assert folders.last_written(str(tmp_path)) == (damaged, 4)


@pytest.mark.parametrize("name", ["fit-0/ckpt-3.index", "model.ckpt-7.index"])
def test_checkpoints_of_jobs_with_parameter_servers_are_told_by_their_names(name: str, tmp_path: Path) -> None:
    _write(tmp_path, 0, 10)
    assert not checkpoints.has_checkpoints(str(tmp_path))
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    assert checkpoints.has_checkpoints(f"{tmp_path}/")


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    meta, read = folders.read(_write(tmp_path, 0, 3, note="n"))

    assert meta == {"kind": "test", "step": 3, "train_s": 1.5, "note": "n"}
    assert read("state") == b"0/3"


def test_a_checkpoint_without_its_last_file_is_none(tmp_path: Path) -> None:
    path = _write(tmp_path, 1, 20)
    (tmp_path / "run-1-step-20" / folders.META).unlink()

    with pytest.raises(BadInputError, match=r"no complete checkpoint in '.*run-1-step-20'"):
        folders.read(path)


def test_the_newest_is_the_complete_one_of_the_highest_step(tmp_path: Path) -> None:
    newest = _write(tmp_path, 0, 100)
    _write(tmp_path, 1, 20)
    (tmp_path / "run-1-step-300").mkdir()
    (tmp_path / "something-else").mkdir()

    assert folders.newest(str(tmp_path)) == newest
    assert folders.newest(str(tmp_path / "nowhere")) is None


@pytest.mark.parametrize("is_there", [True, False])
def test_a_run_resumes_from_the_newest_where_its_own_is_gone(
    tmp_path: Path, is_there: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    other = _write(tmp_path, 0, 7) if is_there else None
    wanted = str(tmp_path / "run-1-step-9")
    spec = TrialSpec(search="s", number=0, run=2, parameters={}, folder=str(tmp_path), resume_from=wanted)

    assert folders.checkpoint_to_resume(spec) == other
    assert f"no complete checkpoint in '{wanted}'" in capsys.readouterr().err


DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "shorter": ("state is not what was written", lambda path: (path / "state").write_bytes(b"1/")),
    "changed": ("state is not what was written", lambda path: (path / "state").write_bytes(b"1/8")),
    "gone": ("state: No such file", lambda path: (path / "state").unlink()),
    "a script's file": ("files/weights is not what", lambda path: (path / "files" / "weights").write_bytes(b"")),
    "not text": ("no complete checkpoint", lambda path: (path / folders.META).write_bytes(b"\xff\xfe")),
    "not JSON": ("no complete checkpoint", lambda path: (path / folders.META).write_bytes(b"{")),
    "other JSON": ("has unexpected content", lambda path: (path / folders.META).write_text('{"sums": [1]}')),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint_costs_no_more_than_itself(
    tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    older = _write(tmp_path, 1, 7)
    damaged = tmp_path / "run-1-step-9"
    with folders.staging_folder(str(damaged / "files")) as folder:
        Path(folder, "weights").write_bytes(b"0123")
    _write(tmp_path, 1, 9)
    spec = TrialSpec(search="s", number=0, run=2, parameters={}, folder=str(tmp_path), resume_from=str(damaged))
    assert folders.checkpoint_to_resume(spec) == str(damaged)
    said, damage = DAMAGES[how]
    damage(damaged)

    assert folders.checkpoint_to_resume(spec) == older
    told = capsys.readouterr().err
    assert said in told
    assert f"resuming from '{older}'" in told


def test_what_needs_a_damaged_checkpoint_is_damaged(tmp_path: Path) -> None:
    oldest = _write(tmp_path, 0, 1)
    _write(tmp_path, 0, 2)
    newest = _write(tmp_path, 1, 3, needs=["run-0-step-2"])
    assert folders.newest(str(tmp_path)) == newest
    (tmp_path / "run-0-step-2" / "state").unlink()
    assert folders.newest(str(tmp_path)) == oldest


def test_a_checkpoint_copied_without_its_checksums_can_be_resumed_from(tmp_path: Path) -> None:
    path = _write(tmp_path, 0, 1)
    Path(path, folders.META).write_text('{"kind": "test", "step": 1, "train_s": 1.5}')
    assert folders.newest(str(tmp_path)) == path


def test_a_copy_of_another_trial_has_its_checkpoint_what_that_needs_and_its_best_model(tmp_path: Path) -> None:
    other, own = tmp_path / "trial-3", tmp_path / "trial-1"
    _write(other, 0, 5)
    path = _write(other, 4, 30, needs=["run-0-step-5"])
    _write(other, 3, 20)
    folders.write(str(other / "best-run-2-step-9"), {"state": b"best"}, {"kind": "test", "step": 9})
    _write(own, 0, 5)
    _write(own, 2, 25)
    folders.write(str(own / "best-run-1-step-7"), {"state": b"own"}, {"kind": "test", "step": 7})
    spec = TrialSpec("s", 1, 5, {}, str(own), resume_from=path)

    adopted = folders.adopt(spec)

    assert _names(own) == {"run-0-step-5", "run-4-step-30", "best-run-2-step-9"}
    assert adopted.resume_from == str(own / "run-4-step-30")
    assert not adopted.copies
    assert folders.problem(adopted.resume_from) == ""
    meta, read = folders.read(adopted.resume_from)
    assert (meta[folders.COPIED], read("state")) == (True, b"4/30")
    assert folders.read(str(own / "run-0-step-5"))[1]("state") == b"0/5"
    assert folders.COPIED not in folders.read(path)[0], "the other trial's own stays"


@pytest.mark.parametrize("damage", [lambda path: shutil.rmtree(path), lambda path: (path / "state").write_bytes(b"x")])
def test_a_copy_of_a_checkpoint_that_is_gone_or_damaged_leaves_the_trials_own(
    damage: Callable[[Path], object], tmp_path: Path
) -> None:
    path = _write(tmp_path / "trial-3", 4, 30)
    own = _write(tmp_path / "trial-1", 2, 25)
    damage(Path(path))
    spec = TrialSpec("s", 1, 5, {}, str(tmp_path / "trial-1"), resume_from=path)
    assert folders.adopt(spec) == spec
    assert folders.checkpoint_to_resume(spec) == own


def test_old_checkpoints_are_removed_unless_they_are_needed(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        _write(tmp_path, 0, step)
    newest = _write(tmp_path, 0, 6, needs=["run-0-step-2"])

    folders.prune(newest)

    assert _names(tmp_path) == {f"run-0-step-{step}" for step in (2, 4, 5, 6)}


def test_a_run_removes_nothing_of_a_later_one(tmp_path: Path) -> None:
    _write(tmp_path, 0, 1)
    _write(tmp_path, 1, 2, needs=["run-0-step-1"])
    for step in (3, 4, 5, 6):
        _write(tmp_path, 0, step)

    folders.prune(str(tmp_path / "run-0-step-6"))

    assert _names(tmp_path) == {"run-0-step-1", "run-1-step-2", *(f"run-0-step-{step}" for step in (4, 5, 6))}


def test_a_full_disk_costs_a_checkpoint_and_not_the_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "run-0-step-5"
    meta = {"kind": "test", "step": 5, "train_s": 1.0}
    with monkeypatch.context() as patch:
        patch.setattr(folders, "sync", full)
        assert not checkpoints.skip_if_disk_full(lambda: folders.write(str(path), {"state": b"1"}, meta))
    assert "no room for a checkpoint (No space left on device)" in capsys.readouterr().err
    assert not path.exists(), "half of it would take the room of the next"
    assert checkpoints.skip_if_disk_full(lambda: folders.write(str(path), {"state": b"1"}, meta))
    assert folders.newest(str(tmp_path)) == str(path)
    with pytest.raises(PermissionError):
        checkpoints.skip_if_disk_full(lambda: (_ for _ in ()).throw(PermissionError(errno.EACCES, "denied")))


def test_a_suspension_is_tried_again_when_there_may_be_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "DISK_FULL_RETRY_S", 0.0)

    def full() -> None:
        raise OSError(errno.EDQUOT, "quota")

    trial = TrialRuntime(TrialSpec(search="s", number=0, run=0, parameters={}, folder="nowhere"))
    trial.suspend_requested = True
    asked = threading.Event()
    monkeypatch.setattr(trial, "_request_suspension", asked.set)
    assert not trial.unless_full(full)
    assert not trial.suspend_requested
    assert asked.wait(60)


def test_what_cannot_be_done_without_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "DISK_FULL_RETRY_S", 0.0)
    left = [OSError(errno.ENOSPC, "full")] * 3

    def write() -> None:
        if left:
            raise left.pop()

    checkpoints.retry_while_disk_full(write)
    left[:] = [OSError(errno.ENOSPC, "full")]
    monkeypatch.setattr(checkpoints, "DISK_FULL_TIMEOUT_S", -1.0)
    with pytest.raises(OSError, match="full"):
        checkpoints.retry_while_disk_full(write)


def _best(folder: Path, run: int, step: int) -> None:
    folders.write(str(folder / f"best-run-{run}-step-{step}"), {}, {"kind": "script", "step": step, "train_s": 1.0})


def test_a_first_run_clears_what_an_earlier_search_has_kept_and_nothing_of_its_successors(tmp_path: Path) -> None:
    _best(tmp_path, 3, 80)
    trial = TrialRuntime(TrialSpec(search="s", number=0, run=0, parameters={}, folder=str(tmp_path)))
    trial.training(preemptible=True)
    assert _names(tmp_path) == set()
    # It has lost touch; its successor has kept a better one.
    _best(tmp_path, 1, 300)
    _best(tmp_path, 0, 90)
    _best(tmp_path, 0, 120)
    trial.training(preemptible=False)
    folders.prune_best(str(tmp_path / "best-run-0-step-120"))
    assert _names(tmp_path) == {"best-run-1-step-300", "best-run-0-step-120"}


def test_a_step_that_is_best_twice_is_saved_into_an_empty_folder(tmp_path: Path) -> None:
    trial = TrialRuntime(TrialSpec(search="s", number=0, run=0, parameters={}, folder=str(tmp_path)))
    best = tmp_path / "best-run-0-step-1"
    seen: list[tuple[list[str], str]] = []

    def save(folder: str) -> None:
        seen.append((os.listdir(folder), folders.problem(str(best))))
        Path(folder, f"weights-{len(seen)}").touch()

    script = script_api._ScriptTrial(trial)
    script.register(script_api._Hooks(save, lambda folder: None))
    script.report(1, {"loss": 0.5})
    script.report(1, {"loss": 0.4})
    assert seen == [([], f"there is no complete checkpoint in '{best}'")] * 2
    assert os.listdir(best / "script") == ["weights-2"]
    assert folders.problem(str(best)) == ""


def _script_model(folder: Path) -> export.StoredModel:
    path = folder / "run-0-step-5"
    with folders.staging_folder(str(path / export.SCRIPT)) as script:
        Path(script, "weights").write_bytes(b"1")
    folders.write(str(path), {}, {"kind": "script", "step": 5, "train_s": 1.0})
    return export.find_model(str(folder), None, None)


def test_a_folder_is_exported_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, target = _script_model(tmp_path / "trial"), tmp_path / "out"

    def copy_half(source: BinaryIO, target: BinaryIO) -> None:
        target.write(b"1")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfileobj", copy_half)
        with pytest.raises(BadInputError, match=r"written to '.*out': No space left on device\.$"):
            export.export(kept, str(target))
    assert [path.name for path in tmp_path.iterdir()] == ["trial"]
    export.export(kept, f"{target}/")
    assert [path.name for path in target.iterdir()] == ["weights"]
    with pytest.raises(BadInputError, match="exists already"):
        export.export(kept, str(target))
    (target / "weights").write_bytes(b"other")
    (target / "mine").touch()
    export.export(kept, str(target), force=True)
    assert (target / "weights").read_bytes() == b"1"
    assert {path.name for path in target.iterdir()} == {"weights", "mine"}


def test_an_export_names_the_options_of_its_caller(tmp_path: Path) -> None:
    kept, target = _script_model(tmp_path / "trial-0"), str(tmp_path / "out")
    trial = TrialResult(0, {}, "finished", 5, 0.5, 0.5, {}, None, 1.0, 1.0, 1, "", folder=str(tmp_path / "trial-0"))
    trial.export(target)
    with pytest.raises(BadInputError, match=r"exists already; name another with path, or .* with force=True\.$"):
        trial.export(target)
    with pytest.raises(BadInputError, match=r"exists already; name another with -o, or .* with --force\.$"):
        export.export(kept, target)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(BadInputError, match=r"is a file; name another with path\.$"):
        trial.export(file)
    for act in (lambda: trial.export(target, epoch="best"), lambda: trial.load_into(None, epoch="best")):
        with pytest.raises(BadInputError, match=r"select the last one with epoch='last'\.$"):
            act()
    with pytest.raises(BadInputError, match=r"select the last one with --epoch last\.$"):
        export.find_model(trial.folder, "best", None)
    with pytest.raises(BadInputError, match="and set checkpoint_dir to"):
        dataclasses.replace(trial, folder=str(tmp_path / "trial-1")).load_into(None)


def test_a_checkpoint_that_goes_while_it_is_exported_is_said_to_be_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = folders.problem

    def checked_then_pruned(path: str) -> str:
        found = check(path)
        shutil.rmtree(path, ignore_errors=True)
        return found

    for target, file in (("out", {}), ("out.keras", {export.VARIABLES: b""})):
        kept = _script_model(tmp_path / "trial")
        if file:
            folders.write(kept.path, file, {"kind": "fit", "step": 5, "train_s": 1.0})
            kept = export.find_model(str(tmp_path / "trial"), None, None)
        with monkeypatch.context() as patch:
            patch.setattr(folders, "problem", checked_then_pruned)
            with pytest.raises(BadInputError, match=r"no complete checkpoint in '.*run-0-step-5'"):
                export.export(kept, str(tmp_path / target))
        assert not (tmp_path / target).exists()


def test_of_several_sessions_the_one_that_trains_is_exported(tmp_path: Path) -> None:
    path = tmp_path / "trial" / "run-0-step-5"
    for number in range(2):
        (path / f"session-{number}").mkdir(parents=True)
        (path / f"session-{number}" / "variables.index").write_bytes(b"%d" % number)
    meta = {"kind": "graph", "step": 5, "train_s": 1.0, "sessions": {"0": {}, "1": {}}, "trainee": 1}
    folders.write(str(path), {}, meta)
    export.export(export.find_model(str(tmp_path / "trial"), None, None), str(tmp_path / "out"))
    assert (tmp_path / "out" / "model.ckpt.index").read_bytes() == b"1"


@pytest.mark.parametrize(("numbers", "newer"), [([90, 101], None), ([101, 120], 120), ([], None)])
def test_a_newer_checkpoint_of_a_job_than_its_model_is_said(
    tmp_path: Path, numbers: list[int], newer: int | None
) -> None:
    meta = {"kind": "fit", "step": 100, "train_s": 1.0, "checkpoint": 101}
    folders.write(str(tmp_path / "run-0-step-100"), {}, meta)
    (tmp_path / "fit-10").mkdir()
    for number in numbers:
        (tmp_path / "fit-10" / f"ckpt-{number}.index").touch()
    kept = export.find_job_model(str(tmp_path))
    assert (kept.step, kept.newer_step) == (100, newer)


def _zipped(compression: int = zipfile.ZIP_STORED, **members: bytes | str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name.replace("__", "."), content)
    return file.getvalue()


def _places(groups: object) -> dict[str, str]:
    return {"dike-places__json": json.dumps({"problem": "", "groups": groups}), "config__json": "{}"}


def _no_numbers(folder: Path) -> None:
    np.savez(folder / "variables.npz", v=np.array([{}], dtype=object), allow_pickle=True)


def _a_huge_array(folder: Path) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (2**50,)})
    (folder / "variables.npz").write_bytes(_zipped(**{"float64:v__npy": header.getvalue()}))


def _overlapping(folder: Path) -> None:
    content = _zipped(a=bytes(10_000))
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        (folder / "variables.npz").write_bytes(content)
        entry = content[archive.start_dir : content.index(b"PK\x05\x06")]
    end = content[content.index(b"PK\x05\x06") :]
    many = 100
    counted = end[:8] + struct.pack("<HHL", many, many, many * len(entry)) + end[16:]
    (folder / "variables.npz").write_bytes(content[: content.index(entry)] + many * entry + counted)


_KERAS = {"kind": "keras", "step": 1}
_GOOD = _zipped(**_places({"a": {"name": "a", "variables": {"0": "v"}}}))
_VALUES = dump_arrays({"v": np.ones(3)})
_SCRIPT = {"kind": "script", "step": 1}

LEFT_BY_OTHERS: dict[str, tuple[object, dict[str, bytes], Callable[[Path], object] | None]] = {
    "no kind": ({"step": 1}, {}, None),
    "no step": ({"kind": "script"}, {}, None),
    "a list": ([], {}, None),
    "a kind that is none": ({"kind": [1], "step": 1}, {}, None),
    "a step that is none": ({"kind": "script", "step": "x"}, {}, None),
    "a value that is none": ({**_SCRIPT, "value": "x"}, {}, None),
    "sums of a device": ({**_SCRIPT, "sums": {"../" * 20 + "dev/zero": [1, 2]}}, {}, None),
    "sums of a link": ({**_SCRIPT, "sums": {"x": [0, 0]}}, {}, lambda at: (at / "x").symlink_to("/dev/zero")),
    "needs others": ({**_SCRIPT, "needs": ["../../../x"]}, {}, None),
    "needs a number": ({**_SCRIPT, "needs": 5}, {}, None),
    "nested": ("[" * 100_000, {}, None),
    "a pipe": (None, {}, lambda at: os.mkfifo(at / folders.META)),
    "a device": (None, {}, lambda at: (at / folders.META).symlink_to("/dev/zero")),
    "a hole": (None, {}, lambda at: (_touched(at / folders.META), os.truncate(at / folders.META, 2**33))),
    "a secret": (_SCRIPT, {"script/a": b"x"}, lambda at: (at / "script" / "key").symlink_to("../../secret")),
    "a secret folder": (_SCRIPT, {}, lambda at: (at / "script").symlink_to("..")),
    "endless": (_SCRIPT, {"script/a": b"x"}, lambda at: (at / "script" / "key").symlink_to("/dev/zero")),
    "a script's pipe": (_SCRIPT, {"script/a": b"x"}, lambda at: os.mkfifo(at / "script" / "pipe")),
    "a script's depth": (_SCRIPT, {"script/a": b"x"}, lambda at: make_deep(at / "script", 400)),
    "no layout": (_KERAS, {"variables.npz": _VALUES}, None),
    "no archive": (_KERAS, {"model.zip": b"garbage"}, None),
    "no places": (_KERAS, {"model.zip": _zipped(a=b"1")}, None),
    "places 5": (_KERAS, {"model.zip": _zipped(**{"dike-places__json": "5"})}, None),
    "places []": (_KERAS, {"model.zip": _zipped(**_places([1])), "variables.npz": _VALUES}, None),
    "no variable": (_KERAS, {"model.zip": _GOOD, "variables.npz": dump_arrays({})}, None),
    "no variables": (_KERAS, {"model.zip": _GOOD, "variables.npz": b"x"}, None),
    "objects": (_KERAS, {"model.zip": _GOOD}, _no_numbers),
    "a huge array": (_KERAS, {"model.zip": _GOOD}, _a_huge_array),
    "entries in one place": (_KERAS, {"model.zip": _GOOD}, _overlapping),
    "a layout that is a pipe": (_KERAS, {"variables.npz": _VALUES}, lambda at: os.mkfifo(at / "model.zip")),
    "a bomb": (_KERAS, {"model.zip": _zipped(zipfile.ZIP_DEFLATED, x=bytes(10**6)), "variables.npz": _VALUES}, None),
    "a session elsewhere": ({"kind": "graph", "step": 1, "trainee": "0/../../secrets"}, {}, None),
    "a session that is not named": ({"kind": "graph", "step": 1}, {}, None),
}


def _touched(path: Path) -> Path:
    path.touch()
    return path


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", LEFT_BY_OTHERS)
def test_what_others_have_left_is_exported_as_one_sentence(tmp_path: Path, what: str) -> None:
    meta, files, change = LEFT_BY_OTHERS[what]
    folder = tmp_path / "runs" / "run"
    path = folder / "run-0-step-1"
    path.mkdir(parents=True)
    (folder / "secret").write_text("secret")
    (folder / "secrets").mkdir()
    (folder / "secrets" / "variables.index").write_text("secret")
    for name, content in files.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(content)
    if meta is not None:
        (path / folders.META).write_text(meta if isinstance(meta, str) else json.dumps(meta))
    if change is not None:
        change(path)
    is_keras = isinstance(meta, dict) and meta.get("kind") == "keras"
    with pytest.raises(BadInputError) as caught:
        export.export(export.find_job_model(str(folder)), str(tmp_path / ("out.keras" if is_keras else "out")))
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == ["runs"]


def test_a_checkpoint_is_looked_at_once_however_often_it_is_needed(tmp_path: Path) -> None:
    for step in range(1, 40):
        _write(tmp_path, 0, step, needs=[f"run-0-step-{min(step + 1, 39)}"] * 3)
    assert folders.problem(str(tmp_path / "run-0-step-1")) == ""
    (tmp_path / "run-0-step-39" / "state").unlink()
    assert "run-0-step-39' is damaged" in folders.problem(str(tmp_path / "run-0-step-1"))


def test_links_of_a_scripts_own_do_not_damage_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "run-0-step-5"
    (tmp_path / "data").write_text("data")
    with folders.staging_folder(str(path / export.SCRIPT)) as script:
        Path(script, "weights").write_bytes(b"1")
        Path(script, "latest").symlink_to("weights")
        Path(script, "data").symlink_to(tmp_path / "data")
        Path(script, "gone").symlink_to("nothing")
    folders.write(str(path), {}, {"kind": "script", "step": 5, "train_s": 1.0})
    assert folders.newest(str(tmp_path)) == str(path)
    with pytest.raises(
        BadInputError, match=r"cannot be exported: (data leads out of its folder|gone is a link to nothing); nothing"
    ):
        export.export(export.find_model(str(tmp_path), None, None), str(tmp_path / "out"))
