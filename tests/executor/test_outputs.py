"""What a script writes comes back to its run's folder, and is there again after a restart: real files."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path

import pytest

from executor import outputs
from executor.outputs import Outputs, list_files, open_output, read_limit, read_record

LONG_AGO_NS = 1_000_000_000


class Run:
    """A script's working folder, and the folder of its run."""

    def __init__(self, folder: Path, store: str, number: int = 0, owner: str = "job", **environment: str) -> None:
        self.workspace = folder
        folder.mkdir(parents=True)
        for name in ("train.py", "data.csv"):
            (folder / name).write_text(name)
            os.utime(folder / name, ns=(LONG_AGO_NS, LONG_AGO_NS))
        self.outputs = Outputs(folder, store, owner, number, environment)
        self.store = Path(store.removeprefix("file://"))

    def write(self, path: str, text: str) -> None:
        target = self.workspace / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    @property
    def brought_back(self) -> dict[str, str]:
        place = self.store / outputs.FOLDER
        return {path: (place / path).read_text() for path, _ in list_files(place)}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "work", str(tmp_path / "run"))


def test_what_is_new_or_changed_comes_back_and_nothing_else(run: Run) -> None:
    run.outputs.restore()
    run.write("model.keras", "weights")
    run.write("logs/a/events", "1")
    run.write("data.csv", "changed")
    run.write("__pycache__/train.cpython-311.pyc", "no")
    (run.workspace / "link").symlink_to("/etc/passwd")
    run.outputs.save()
    assert run.brought_back == {"model.keras": "weights", "logs/a/events": "1", "data.csv": "changed"}
    record = read_record(str(run.store))
    assert record is not None
    assert (record.owner, record.number, len(record.kept), record.left_behind) == ("job", 0, 3, {})


def test_what_the_script_removes_is_removed(run: Run) -> None:
    run.outputs.restore()
    run.write("ck/1", "1")
    run.outputs.save()
    (run.workspace / "ck/1").rename(run.workspace / "ck-2")
    run.outputs.save()
    assert run.brought_back == {"ck-2": "1"}
    assert not (run.store / "outputs/ck").exists()


def test_a_working_folder_that_somebody_has_deleted_is_not_the_script_s_doing(run: Run, tmp_path: Path) -> None:
    run.outputs.restore()
    run.write("history.csv", "epoch 1\n")
    run.outputs.save()
    shutil.rmtree(run.workspace)
    run.outputs.save()
    assert run.brought_back == {"history.csv": "epoch 1\n"}
    again = Run(tmp_path / "elsewhere", str(run.store), number=1)
    again.outputs.restore()
    assert {path for path, _ in list_files(again.workspace)} == {"train.py", "data.csv", "history.csv"}


def test_the_next_attempt_finds_what_was_written(run: Run, tmp_path: Path) -> None:
    run.outputs.restore()
    run.write("history.csv", "epoch 1\n")
    run.write("data.csv", "changed")
    run.outputs.save()

    again = Run(tmp_path / "elsewhere", str(run.store), number=1)
    again.outputs.restore()
    assert (again.workspace / "history.csv").read_text() == "epoch 1\n"
    assert (again.workspace / "data.csv").read_text() == "changed"
    again.write("history.csv", "epoch 1\nepoch 2\n")
    (again.workspace / "data.csv").unlink()
    again.outputs.save()
    assert again.brought_back == {"history.csv": "epoch 1\nepoch 2\n"}


def test_what_travelled_and_was_removed_stays_away_until_the_user_changes_it(run: Run, tmp_path: Path) -> None:
    run.outputs.restore()
    (run.workspace / "data.csv").unlink()
    run.outputs.save()
    assert run.brought_back == {}

    again = Run(tmp_path / "again", str(run.store), number=1)
    again.outputs.restore()
    assert [path for path, _ in list_files(again.workspace)] == ["train.py"]
    again.outputs.save()

    edited = Run(tmp_path / "edited", str(run.store), number=2)
    edited.write("data.csv", "corrected by the user")
    edited.outputs.restore()
    assert (edited.workspace / "data.csv").read_text() == "corrected by the user"

    # One that is written anew is an output, and one of those is removed for good.
    third = Run(tmp_path / "third", str(run.store), number=3)
    third.outputs.restore()
    third.write("data.csv", "written anew")
    third.outputs.save()
    assert third.brought_back == {"data.csv": "written anew"}
    (third.workspace / "data.csv").unlink()
    third.outputs.save()
    last = Run(tmp_path / "last", str(run.store), number=4)
    last.outputs.restore()
    assert (last.brought_back, (last.workspace / "data.csv").exists()) == ({}, False)


def test_a_file_that_travels_and_is_newer_stays(run: Run, tmp_path: Path) -> None:
    run.outputs.restore()
    run.write("data.csv", "changed by the script")
    run.outputs.save()
    again = Run(tmp_path / "elsewhere", str(run.store), owner="another job")
    later_ns = (run.workspace / "data.csv").stat().st_mtime_ns + 10**9
    again.write("data.csv", "corrected by the user")
    os.utime(again.workspace / "data.csv", ns=(later_ns, later_ns))
    again.outputs.restore()
    assert (again.workspace / "data.csv").read_text() == "corrected by the user"


def test_an_attempt_that_is_presumed_dead_writes_no_more(run: Run, tmp_path: Path) -> None:
    run.outputs.restore()
    run.write("model.keras", "old")
    again = Run(tmp_path / "elsewhere", str(run.store), number=1)
    again.outputs.restore()
    again.write("model.keras", "new")
    again.outputs.save()
    run.outputs.save()
    assert again.brought_back == {"model.keras": "new"}


def test_what_is_over_the_limit_is_left_behind_and_named(tmp_path: Path) -> None:
    run = Run(tmp_path / "work", str(tmp_path / "run"), **{outputs.LIMIT_VARIABLE: "1K"})
    run.outputs.restore()
    run.write("a-large-one", "x" * 1000)
    run.write("small", "x" * 100)
    run.outputs.save()
    assert run.brought_back == {"small": "x" * 100}
    record = read_record(str(run.store))
    assert record is not None
    assert record.left_behind == {"a-large-one": "1000 bytes, over the limit"}
    assert (list(record.kept), record.size_bytes, record.limit_bytes) == (["small"], 100, 1024)


def test_a_file_that_grows_over_the_limit_is_kept_as_it_was(tmp_path: Path) -> None:
    run = Run(tmp_path / "work", str(tmp_path / "run"), **{outputs.LIMIT_VARIABLE: "1K"})
    run.outputs.restore()
    run.write("log", "x")
    run.outputs.save()
    run.write("log", "x" * 2000)
    run.outputs.save()
    assert run.brought_back == {"log": "x"}
    record = read_record(str(run.store))
    assert record is not None
    assert record.left_behind == {"log": "2000 bytes, over the limit; an older version is kept"}
    assert run.outputs.left_behind


def test_files_of_somebody_else_in_that_place_are_left_alone(tmp_path: Path) -> None:
    theirs = tmp_path / "run" / "outputs" / "results.bin"
    theirs.parent.mkdir(parents=True)
    theirs.write_bytes(bytes(5000))
    run = Run(tmp_path / "work", str(tmp_path / "run"), **{outputs.LIMIT_VARIABLE: "1K"})
    run.outputs.restore()
    assert not (run.workspace / "results.bin").exists()
    run.write("mine", "1")
    run.outputs.save()
    assert theirs.read_bytes() == bytes(5000)
    # A lower limit takes nothing away that an earlier run was allowed.
    again = Run(tmp_path / "again", str(tmp_path / "run"), 1, **{outputs.LIMIT_VARIABLE: "0"})
    again.outputs.restore()
    again.outputs.save()
    assert (tmp_path / "run" / "outputs" / "mine").read_text() == "1"


def test_a_job_that_has_not_claimed_the_folder_writes_nothing(run: Run, tmp_path: Path) -> None:
    def claim(job: str, attempt: int) -> None:
        run.store.mkdir(exist_ok=True)
        (run.store / "dike-claim.json").write_text(json.dumps({"job": job, "attempt": attempt}))

    claim("job", 0)
    run.outputs.restore()
    other = Run(tmp_path / "other", str(run.store), owner="another job")
    other.outputs.restore()
    other.write("theirs", "1")
    other.outputs.save()
    run.write("ours", "1")
    run.outputs.save()
    assert run.brought_back == {"ours": "1"}
    claim("another job", 0)
    run.write("ours", "2")
    run.outputs.save()
    other.outputs.save()
    assert run.brought_back == {"ours": "1", "theirs": "1"}


def test_an_attempt_that_comes_late_takes_nothing_over(run: Run, tmp_path: Path) -> None:
    newer = Run(tmp_path / "newer", str(run.store), number=1)
    newer.outputs.restore()
    newer.write("model", "new")
    newer.outputs.save()
    run.outputs.restore()
    run.write("model", "old")
    run.outputs.save()
    newer.write("model", "newer")
    newer.outputs.save()
    assert newer.brought_back == {"model": "newer"}


def test_one_file_that_cannot_be_restored_does_not_end_the_others(run: Run, tmp_path: Path) -> None:
    run.outputs.restore()
    for name in "abc":
        run.write(name, name)
    run.outputs.save()
    again = Run(tmp_path / "again", str(run.store), 1)
    (again.workspace / "b" / "inside").mkdir(parents=True)
    again.outputs.restore()
    assert [(again.workspace / name).read_text() for name in "ac"] == ["a", "c"]
    again.write("d", "d")
    again.outputs.save()
    assert (run.store / "outputs" / "d").read_text() == "d"


def test_a_file_that_is_being_written_does_not_replace_a_whole_one(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.outputs.restore()
    run.write("model.keras", "whole")
    run.outputs.save()
    run.write("model.keras", "ha")
    copyfile = shutil.copyfile

    def while_it_is_written(source: Path, target: Path) -> Path:
        copied = copyfile(source, target)
        Path(source).write_text("half of it, and more")
        return copied

    monkeypatch.setattr(shutil, "copyfile", while_it_is_written)
    run.outputs.save()
    assert run.brought_back == {"model.keras": "whole"}
    monkeypatch.undo()
    run.outputs.save()
    assert run.brought_back == {"model.keras": "half of it, and more"}


def test_what_a_process_that_was_killed_has_left_half_copied_is_removed(run: Run) -> None:
    run.store.mkdir()
    (run.store / ".dike-outputs-job-0123").write_text("half")
    run.outputs.restore()
    run.write("model.keras", "1")
    run.outputs.save()
    assert sorted(path.name for path in run.store.iterdir()) == ["dike-outputs.json", "outputs"]


@pytest.mark.parametrize("what", ["pipe", "link", "folder", "nonsense", "not text"])
def test_whatever_stands_in_the_place_of_the_record_is_no_record(tmp_path: Path, what: str) -> None:
    place = tmp_path / outputs.RECORD
    match what:
        case "pipe":
            os.mkfifo(place)
        case "link":
            place.symlink_to("/dev/zero")
        case "folder":
            place.mkdir()
        case "nonsense":
            place.write_text("[" * 10_000)
        case _:
            place.write_bytes(b"\xff\xfe")
    assert read_record(str(tmp_path)) is None


def test_a_file_that_cannot_be_copied_does_not_keep_the_others_out(run: Run) -> None:
    run.outputs.restore()
    # In the place of the file is a folder that holds something.
    (run.store / "outputs/b/inside").mkdir(parents=True)
    for name in "abc":
        run.write(name, name)
    run.outputs.save()
    assert {name: (run.store / "outputs" / name).read_text() for name in "ac"} == {"a": "a", "c": "c"}
    record = read_record(str(run.store))
    assert record is not None
    assert list(record.left_behind) == ["b"]


def test_a_damaged_record_harms_nothing(run: Run) -> None:
    run.store.mkdir()
    (run.store / outputs.RECORD).write_text("[1, {")
    run.outputs.restore()
    run.write("model.keras", "weights")
    run.outputs.save()
    assert run.brought_back == {"model.keras": "weights"}


def test_saving_while_the_script_writes_ends_with_what_it_has_written_last(run: Run) -> None:
    run.outputs.restore()
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            run.write("log", f"{number}\n" * 1000)

    writer = threading.Thread(target=write)
    writer.start()
    for _ in range(50):
        run.outputs.save_soon()
    stop.set()
    writer.join()
    run.outputs.save()
    assert run.brought_back == {"log": (run.workspace / "log").read_text()}


@pytest.mark.tensorflow
def test_a_folder_that_only_tensorflow_reaches(tmp_path: Path) -> None:
    run = Run(tmp_path / "work", f"file://{tmp_path}/run")
    run.outputs.restore()
    run.write("model.keras", "weights")
    run.write("logs/a", "1")
    run.outputs.save()
    assert run.brought_back == {"model.keras": "weights", "logs/a": "1"}

    again = Run(tmp_path / "elsewhere", f"file://{tmp_path}/run", number=1)
    again.outputs.restore()
    assert (again.workspace / "model.keras").read_text() == "weights"
    again.write("model.keras", "new")
    again.outputs.save()
    run.write("model.keras", "old")
    run.outputs.save()
    assert run.brought_back == {"model.keras": "new", "logs/a": "1"}
    assert json.loads((tmp_path / "run" / outputs.RECORD).read_text())["number"] == 1


def test_limits_are_read() -> None:
    assert [read_limit(text) for text in ("500M", "1.5GiB", "12", "2 kb", "none")] == [
        500 * 2**20,
        3 * 2**29,
        12,
        2048,
        None,
    ]
    for wrong in ("", "M", "-1G", "12 apples"):
        with pytest.raises(ValueError, match="such as 500M"):
            read_limit(wrong)


def test_an_output_is_opened_only_where_no_link_leads_elsewhere(run: Run, tmp_path: Path) -> None:
    run.outputs.restore()
    run.write("logs/a", "1")
    run.outputs.save()
    place = run.store / "outputs"
    (tmp_path / "secret").write_text("secret")
    (place / "link").symlink_to(tmp_path / "secret")
    (place / "folder").symlink_to(tmp_path)
    os.mkfifo(place / "pipe")
    with open_output(str(run.store), "logs/a", "job") as file:
        assert file.read() == b"1"
    for path in ("link", "folder/secret", "../dike-outputs.json", "/etc/passwd", "pipe", "logs", "", "logs/a/b", "no"):
        with pytest.raises(FileNotFoundError):
            open_output(str(run.store), path, "job")
    with pytest.raises(FileNotFoundError):
        open_output(str(run.store), "logs/a", "another job")
    (tmp_path / "other").mkdir()
    shutil.copy(run.store / outputs.RECORD, tmp_path / "other")
    (tmp_path / "other/outputs").symlink_to(place)
    with pytest.raises(FileNotFoundError):
        open_output(str(tmp_path / "other"), "logs/a", "job")


def test_what_could_not_be_brought_back_stays_in_the_same_working_folder(tmp_path: Path) -> None:
    run = Run(tmp_path / "work", str(tmp_path / "run"), **{outputs.LIMIT_VARIABLE: "1K"})
    given = dict(list_files(run.workspace))
    run.outputs.restore(given)
    run.write("log.csv", "1")
    run.outputs.save()
    run.write("log.csv", "2" * 2000)
    changed_ns = (run.workspace / "log.csv").stat().st_mtime_ns + 10**9
    os.utime(run.workspace / "log.csv", ns=(changed_ns, changed_ns))
    run.outputs.save()
    again = Outputs(run.workspace, str(tmp_path / "run"), "job", 1, {outputs.LIMIT_VARIABLE: "1K"})
    again.restore(given)
    assert (run.workspace / "log.csv").read_text() == "2" * 2000
    again.save()
    record = read_record(str(run.store))
    assert record is not None
    assert record.left_behind == {"log.csv": "2000 bytes, over the limit; an older version is kept"}
    assert run.brought_back["log.csv"] == "1"
    assert "log.csv" in record.kept
