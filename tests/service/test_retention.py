"""Old jobs are forgotten, with all that is kept of them, and their checkpoints removed; no other is."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert

from dike.exceptions import BadInputError
from framework.project.run_folders import TRASH, Content, RunFolders
from framework.scheduler.records import JobKind, JobRecord, JobState, TaskRecord
from framework.search.tables import SEARCHES
from framework.service.retention import Checkpoints, RetentionPolicy, removing_old_jobs
from framework.service.serve import ServeRequest, serve
from framework.service.store import ServiceStore
from tests.trees import make_deep, removed_afterwards
from tests.waiting import wait_until

DAY_S = 24 * 3600.0


def test_a_search_that_cannot_be_read_is_in_no_other_ones_way(tmp_path: Path) -> None:
    with contextlib.closing(ServiceStore(f"sqlite:///{tmp_path}/service.db")) as store:
        for name in ("old", "broken"):
            ended = {"state": JobState.FINISHED, "ended_s": time.time() - 10 * DAY_S}
            record = JobRecord(name, JobKind.SEARCH, "ann", "train.py", {}, bundle_token=name, state_data={}, **ended)
            store.add_job(record, b"bundle")
        with store.database.engine.execution_options(dike_writes=True).begin() as connection:
            for name in ("broken", "of dike tune"):
                values = {"name": name, "spec": '{"field": "of another version"}', "options": "{}", "created_s": 0.0}
                connection.execute(insert(SEARCHES).values(values))
        with removing_old_jobs(store, RetentionPolicy(7 * DAY_S), interval_s=0.05):
            wait_until(lambda: store.job("old") is None, "the end of the old job's records")
        assert [job.id for job in store.jobs()] == ["broken"]


def test_jobs_are_forgotten_a_while_after_their_end(tmp_path: Path) -> None:
    now_s = time.time()
    with contextlib.closing(ServiceStore(f"sqlite:///{tmp_path}/service.db")) as store:
        for name, state, ended_s in (
            ("old", JobState.FINISHED, now_s - 10 * DAY_S),
            ("young", JobState.FAILED, now_s - DAY_S),
            ("running", JobState.RUNNING, None),
        ):
            record = JobRecord(
                name, JobKind.TRAINING, "ann", "train.py", {}, state=state, ended_s=ended_s, bundle_token=name
            )
            store.add_job(record, b"bundle")
            store.history.add_events(name, [("note", name)])
        with removing_old_jobs(store, RetentionPolicy(7 * DAY_S), interval_s=0.05):
            wait_until(lambda: store.job("old") is None, "the end of the old job's records")
            # One that ends later is found as well.
            store.change_job("young", ended_s=now_s - 8 * DAY_S)
            wait_until(lambda: store.job("young") is None, "the same of the other")
        assert [job.id for job in store.jobs()] == ["running"]
        assert [store.bundle(name) for name in ("old", "young", "running")] == [None, None, b"bundle"]
        assert store.history.events("old") == []
        assert len(store.history.events("running")) == 1


NOW_S = time.time()
OLD_S = NOW_S - 40 * DAY_S
FILES = {"dike-model.json": 10, "fit-0/ckpt-7.index": 100, "fit-0/ckpt-7.data": 1000}
RESULTS = {"outputs/model.keras": 5, "dike-outputs.json": 6, "failed/worker-0-attempt-0/stderr": 7}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ServiceStore]:
    with contextlib.closing(ServiceStore(f"sqlite:///{tmp_path}/service.db")) as opened:
        yield opened


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "shared"
    path.mkdir()
    with removed_afterwards(path):
        yield path


def add_files(folder: Path, sizes: dict[str, int] = FILES, written_s: float = OLD_S) -> None:
    for name, size in sizes.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))
        os.utime(path, (written_s, written_s))


def claim(folder: Path, job: str) -> None:
    (folder / "dike-claim.json").write_text(json.dumps({"job": job, "attempt": 0}))
    os.utime(folder / "dike-claim.json", (OLD_S, OLD_S))


def add_job(store: ServiceStore, root: Path, name: str, **changes: Any) -> Path:
    """A job that ended long ago if nothing else is said, and has checkpoints below the root."""
    values: dict[str, Any] = {
        "request": {"kind": "training"},
        "state": JobState.FINISHED,
        "ended_s": OLD_S,
        "state_data": {"checkpoint_dir": f"{root}/{name}"},
        **changes,
    }
    store.add_job(JobRecord(name, JobKind.TRAINING, "ann", "train.py", bundle_token=name, **values), b"bundle")
    add_files(root / name)
    return root / name


def remove_old(store: ServiceStore, root: Path, ended_before_s: float = NOW_S - 30 * DAY_S) -> list[str]:
    """Removes what is old; returns the remaining names below the root."""
    Checkpoints(store, root, ended_before_s).remove_old(lambda: False)
    return sorted(entry.name for entry in root.iterdir())


def test_old_checkpoints_are_removed_and_it_is_said_how_many_bytes(
    store: ServiceStore, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "framework.service.retention")
    old = add_job(store, root, "old")
    claim(old, "old")
    # Without outputs the record of them is of no use.
    add_files(old, {"dike-outputs.json": 20})
    named_s = OLD_S - 3600
    named = f"mine-{time.strftime('%Y%m%d-%H%M%S', time.gmtime(named_s))}"
    add_job(store, root, "mine", request={"name": "mine"}, submitted_s=named_s)
    (root / "mine").rename(root / named)
    store.change_job("mine", state_data={"checkpoint_dir": f"{root}/{named}"})
    young = add_job(store, root, "young", ended_s=NOW_S - 20 * DAY_S)
    policy = RetentionPolicy(60 * DAY_S, 30 * DAY_S, root)
    with removing_old_jobs(store, policy, interval_s=0.05):
        wait_until(lambda: len(store.history.events("mine") + store.history.events("old")) == 2, "the removal")
        assert young.is_dir()
        # One that ends, or gets old, later is found as well.
        store.change_job("young", ended_s=NOW_S - 31 * DAY_S)
        wait_until(lambda: store.history.events("young"), "the removal of the other")
    assert list(root.iterdir()) == []
    assert re.findall(r"checkpoints of job (\w+) removed: (\S+ \w+)", caplog.text) == [
        *(("mine", "1.1 KiB"), ("old", "1.1 KiB")),
        ("young", "1.1 KiB"),
    ]
    [event] = store.history.events("old")
    assert event.text == "its checkpoints are removed, 1.1 KiB: they were old"
    assert len(store.jobs()) == 3, "jobs are kept for as long as --keep says"


def test_what_scripts_have_written_and_printed_stays(store: ServiceStore, root: Path) -> None:
    folder = add_job(store, root, "old")
    add_files(folder, RESULTS, NOW_S)
    assert remove_old(store, root) == ["old"]
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == set(RESULTS)
    # Nothing more is to be done, nor said.
    assert remove_old(store, root) == ["old"]
    assert len(store.history.events("old")) == 1


def test_checkpoints_that_somebody_may_want_stay(store: ServiceStore, root: Path) -> None:
    add_job(store, root, "running", state=JobState.RUNNING, ended_s=None)
    # Its end was written down, and its tasks have not ended.
    add_job(store, root, "ending")
    store.save([TaskRecord("T", "ending", "S", "node", "127.0.0.1", "worker:0", "running", executor_id="E")], {})
    # Users name folders: their own, and those of earlier jobs.
    add_job(store, root, "in-a-folder-of-its-user", request={"checkpoint_dir": f"{root}/in-a-folder-of-its-user"})
    claim(add_job(store, root, "taken-over"), "somebody-else")
    add_files(add_job(store, root, "written-to"), {"fit-1/ckpt-8": 1}, NOW_S)
    for name, kind in (("gone-on-with", "training"), ("searched", "search")):
        add_job(store, root, name)
        used = {"checkpoint_dir": f"{root}/{name}/{kind}"}
        request = {"kind": kind, **(used if kind == "training" else {"spec": used})}
        add_job(store, root, f"by-{kind}", request=request, state=JobState.QUEUED, ended_s=None)
    # A folder that the service has not made, of a job that had another one, or never one, or of no job at all.
    add_job(store, root, "elsewhere", state_data={"checkpoint_dir": "/elsewhere/elsewhere"})
    add_job(store, root, "never-ran", state_data=None)
    add_files(root / "no-job")
    names = sorted(entry.name for entry in root.iterdir())
    assert remove_old(store, root) == names
    assert all((root / name / "fit-0/ckpt-7.data").is_file() for name in names)
    # A job may have the root itself: its checkpoints are in folders that are no job's.
    add_job(store, root, "old")
    in_root = {"checkpoint_dir": f"{root}/"}
    add_job(store, root, "in-root", request=in_root, state=JobState.RUNNING, ended_s=None)
    assert remove_old(store, root) == sorted([*names, "in-root"])


def test_no_link_leads_out_of_the_root(
    store: ServiceStore, root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    treasure = tmp_path / "treasure"
    add_files(treasure)
    whole, part = add_job(store, root, "whole"), add_job(store, root, "part")
    whole.rename(tmp_path / "moved")
    whole.symlink_to(treasure)
    (part / "fit-0/link").symlink_to(treasure)
    (part / "link").symlink_to(treasure)
    for link in (part / "fit-0/link", part / "link"):
        os.utime(link, (OLD_S, OLD_S), follow_symlinks=False)
    assert remove_old(store, root) == ["whole"]
    # Not where what is removed is moved to, either.
    add_job(store, root, "other")
    (root / TRASH).symlink_to(treasure)
    assert remove_old(store, root) == [TRASH, "other", "whole"]
    assert f"leftovers of an earlier removal in {root} are not removed: " in caplog.text
    assert f"the checkpoints in {root}/other are not removed: " in caplog.text
    (root / TRASH).unlink()
    assert remove_old(store, root) == ["whole"]
    assert sorted(path.name for path in treasure.rglob("*") if path.is_file()) == sorted(
        Path(one).name for one in FILES
    )


def test_a_removal_that_was_cut_short_is_taken_up(store: ServiceStore, root: Path) -> None:
    add_files(root / TRASH / "0123456789abcdef")
    (root / TRASH / "fedcba9876543210").mkdir()
    assert remove_old(store, root) == []
    Checkpoints(store, root / "not-made-yet", NOW_S).remove_old(lambda: False)
    # A removal that is asked to end leaves the rest to the next one.
    add_job(store, root, "old")
    Checkpoints(store, root, NOW_S).remove_old(lambda: True)
    assert (root / "old" / "fit-0").is_dir()


def test_checkpoints_that_cannot_be_removed_are_in_no_others_way(
    store: ServiceStore, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a-locked", "old"):
        add_job(store, root, name)
    look = RunFolders.content

    def refused(folders: RunFolders, *path: str) -> Content | None:
        if path == ("a-locked",):
            raise PermissionError(13, "Permission denied", "fit-0")
        return look(folders, *path)

    monkeypatch.setattr(RunFolders, "content", refused)
    assert remove_old(store, root) == ["a-locked"]
    assert f"the checkpoints in {root}/a-locked are not removed: [Errno 13] Permission denied: 'fit-0'" in caplog.text
    assert store.history.events("a-locked") == []


def test_no_tree_is_too_deep_to_be_removed_nor_keeps_others_from_it(
    store: ServiceStore, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    for name in ("a-deep", "old", "young"):
        folder = add_job(store, root, name)
        if name != "old":
            make_deep(folder, content=b"123")
    # Its folders are old, and the file at the bottom is not.
    assert remove_old(store, root, NOW_S - 30 * DAY_S) == ["a-deep", "young"]
    assert len(store.history.events("old")) == 1
    store.change_job("young", ended_s=time.time() + DAY_S)
    assert remove_old(store, root, time.time() + DAY_S / 2) == ["young"]
    [event] = store.history.events("a-deep")
    assert event.text == "its checkpoints are removed, 1.1 KiB: they were old"
    # Left by an earlier removal, and one that cannot be removed before it.
    (root / TRASH / "0123").mkdir(parents=True)
    make_deep(root / TRASH / "0123")
    (root / TRASH / "0000").touch()
    assert remove_old(store, root) == [TRASH, "young"]
    assert os.listdir(root / TRASH) == ["0000"]
    assert f"leftovers of an earlier removal in {root} are not removed" in caplog.text
    store.change_job("young", ended_s=OLD_S)
    assert remove_old(store, root, time.time() + DAY_S) == [TRASH]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"keep_checkpoints_s": 31 * DAY_S}, "--keep-checkpoints is longer than --keep"),
        ({"keep_checkpoints_s": DAY_S, "checkpoint_root": "gs://bucket/dike"}, "not what is at gs://bucket/dike"),
    ],
)
def test_what_cannot_be_kept_so_is_refused(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    request = ServeRequest(state=f"sqlite:///{tmp_path}/service.db", **changes)
    with pytest.raises(BadInputError, match=told):
        serve(request, lambda *_: contextlib.nullcontext(), print)
    assert list(tmp_path.iterdir()) == []
