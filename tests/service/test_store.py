"""The database of a service: what is written is there, in order, and nothing else."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import event
from sqlalchemy.engine import Connection

from dike.exceptions import BadInputError
from framework.scheduler.records import JobKind, JobRecord, JobState, ProgressPoint, TaskRecord
from framework.service import history, queries
from framework.service.store import DELETE_BATCH, ServiceStore
from framework.service.users import NO_LIMITS, OverLimitError, UserLimits


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/service.db"


@pytest.fixture
def store(url: str) -> Iterator[ServiceStore]:
    with contextlib.closing(ServiceStore(url)) as opened:
        yield opened


def job(name: str, user: str = "ann", **changes: object) -> JobRecord:
    record = JobRecord(name, JobKind.TRAINING, user, "train.py", {"kind": "training"}, bundle_token=f"token-{name}")
    return replace(record, **changes)  # type: ignore[arg-type]


def task(name: str, job_id: str = "one", **changes: object) -> TaskRecord:
    place = ("S0", "agent-0", "127.0.0.1")
    record = TaskRecord(name, job_id, *place, "worker:0", "intended", {"cpus": 1.5}, 10.0, executor_id=f"{job_id}.E")
    return replace(record, **changes)  # type: ignore[arg-type]


def test_a_job_is_read_as_it_was_written(store: ServiceStore, url: str) -> None:
    written = job("one", constraints=("rack:IN:a,b",), submitted_s=5.5, result={"steps": 3}, state_data={"a": [1]})
    store.add_job(written, b"archive")
    with contextlib.closing(ServiceStore(url)) as other:
        assert other.job("one") == written
        assert other.bundle("token-one") == b"archive"
        assert other.bundle("token-two") is None
        assert other.job("two") is None


def test_who_stands_by_is_told_so_and_who_does_not_how_to(store: ServiceStore, url: str) -> None:
    def waits(reason: str) -> None:
        raise BlockingIOError(reason)

    with contextlib.closing(ServiceStore(url)) as other, store.database.lock(pytest.fail):
        with pytest.raises(BlockingIOError, match="; this one stands by until that ends"):
            other.database.lock(pytest.fail, waits).__enter__()
        with pytest.raises(BadInputError, match="with --standby"):
            other.database.lock(pytest.fail).__enter__()


def test_jobs_keep_the_order_of_their_arrival(store: ServiceStore) -> None:
    for number, user in enumerate(("ann", "bob", "ann", "ann")):
        store.add_job(job(f"job-{number}", user, submitted_s=float(-number)), b"")
    assert [one.id for one in store.jobs()] == ["job-3", "job-2", "job-1", "job-0"]
    assert [one.id for one in store.jobs(user="ann", limit=2)] == ["job-3", "job-2"]
    assert [one.id for one in store.jobs(user="ann", before="job-2")] == ["job-0"]
    store.change_job("job-1", state=JobState.RUNNING)
    store.change_job("job-0", state=JobState.FAILED)
    assert [one.id for one in store.open_jobs()] == ["job-1", "job-2", "job-3"]
    assert [one.id for one in store.jobs(states=[JobState.FAILED, JobState.RUNNING])] == ["job-1", "job-0"]
    with store.database.reading() as connection:
        counts = queries.job_counts(connection)
    assert counts == {
        (JobKind.TRAINING, state): count
        for state, count in ((JobState.QUEUED, 2), (JobState.RUNNING, 1), (JobState.FAILED, 1))
    }


def test_a_name_is_given_once(store: ServiceStore) -> None:
    store.add_job(job("one"), b"first")
    with pytest.raises(BadInputError, match="already"):
        store.add_job(job("one", bundle_token="other"), b"second")
    assert store.bundle("token-one") == b"first"
    assert store.bundle("other") is None


def test_tasks_and_state_are_written_together(store: ServiceStore) -> None:
    store.add_job(job("one"), b"")
    store.add_job(job("two"), b"")
    store.save([task("b", launched_s=2.0), task("a", launched_s=1.0), task("c", "two")], {"one": {"attempt": 1}})
    assert [each.task_id for each in store.tasks(job_id="one")] == ["a", "b"]
    assert store.tasks(job_id="one")[0] == task("a", launched_s=1.0)
    ended = task("a", launched_s=1.0, state="finished", ended_s=3.0)
    store.save([ended], {})
    assert store.tasks(job_id="one")[0] == ended
    assert [each.task_id for each in store.tasks(live_only=True)] == ["b", "c"]
    found = store.job("one")
    assert found is not None
    assert found.state_data == {"attempt": 1}


def test_what_cannot_be_written_whole_is_not_written_at_all(store: ServiceStore) -> None:
    store.add_job(job("one"), b"")
    broken = task("b", resources={"cpus": object()})
    with pytest.raises(TypeError):
        store.save([task("a"), broken], {"one": {"attempt": 1}})
    assert store.tasks() == []
    found = store.job("one")
    assert found is not None
    assert found.state_data is None


def test_what_is_written_together_is_one_transaction_of_its_thread(store: ServiceStore) -> None:
    begun = 0

    def count(connection: Connection) -> None:
        nonlocal begun
        begun += 1

    for name in ("one", "two"):
        store.add_job(job(name), b"")
    event.listen(store.database.engine, "begin", count)
    with store.database.joint_transaction():
        pass
    assert begun == 0
    with store.database.joint_transaction():
        for name in ("one", "two"):
            store.history.add_events(name, [("note", name)])
            store.history.add_output(name, [("worker:0", "stdout", name)])
        with ThreadPoolExecutor() as pool:
            # Another thread sees nothing of it yet.
            assert pool.submit(store.history.events, "one").result() == []
    assert begun == 2
    assert [store.history.events(name)[0].text for name in ("one", "two")] == ["one", "two"]

    def fail() -> None:
        with store.database.joint_transaction():
            store.history.add_events("one", [("note", "lost")])
            store.save([task("b", resources={"cpus": object()})], {})

    with pytest.raises(TypeError):
        fail()
    assert len(store.history.events("one")) == 1
    store.history.add_events("one", [("note", "kept")])
    assert len(store.history.events("one")) == 2


def test_events_and_output_are_read_on_from_where_one_was(store: ServiceStore) -> None:
    for name in ("one", "two"):
        store.add_job(job(name), b"")
    store.history.add_events("one", [("note", "a"), ("waiting", "b")])
    store.history.add_events("two", [("note", "c")])
    store.history.add_events("one", [("ended", "d")])
    first, *rest = store.history.events("one")
    assert [(event.kind, event.text) for event in rest] == [("waiting", "b"), ("ended", "d")]
    assert store.history.events("one", after=first.number) == rest
    assert store.history.events("one", after=first.number, limit=1) == rest[:1]
    store.history.add_output("one", [("chief:0", "stdout", "x\n"), ("worker:0", "stderr", "y\n")])
    first_chunk, second = store.history.output("one")
    assert (first_chunk.task, first_chunk.stream, first_chunk.text) == ("chief:0", "stdout", "x\n")
    assert store.history.output("one", after=first_chunk.number) == [second]
    assert store.history.output("two") == []


@pytest.mark.slow
def test_of_much_output_the_end_is_kept(store: ServiceStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "OUTPUT_LIMIT_CHARACTERS", 1000)
    store.add_job(job("one"), b"")
    store.add_job(job("two"), b"")
    store.history.add_output("two", [("chief:0", "stdout", "kept")])
    for number in range(500):
        store.history.add_output("one", [("chief:0", "stdout", f"{number:09}\n")])
    note, *kept = "".join(chunk.text for chunk in store.history.output("one")).splitlines()
    assert note.startswith("dike: older output was deleted: a service keeps the newest ")
    assert 400 / 10 <= len(kept) <= 1000 / 10
    assert kept == [f"{number:09}" for number in range(500 - len(kept), 500)]
    assert len(store.history.output("two")) == 1


def written(store: ServiceStore, job_id: str) -> list[str]:
    """The lines of a job's output."""
    return "".join(chunk.text for chunk in store.history.output(job_id)).splitlines()


def lines(first: int, last: int) -> list[str]:
    return [f"€{number:06}" for number in range(first, last)]


def test_of_a_user_s_output_the_newest_is_kept(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # More than the user may have: no job is ever over it.
    monkeypatch.setattr(history, "OUTPUT_LIMIT_CHARACTERS", 2000)
    limits = {"ann": UserLimits(output_bytes=1000)}
    cut = "dike: older output was deleted: the limit of ann's kept output, set by the service's operator, is 1000 B."
    with contextlib.closing(ServiceStore(url, lambda user: limits.get(user, NO_LIMITS))) as store:
        for name, user in (("old", "ann"), ("new", "ann"), ("other", "bob")):
            store.add_job(job(name, user), b"")
        # Ten bytes each, of eight characters.
        for line in lines(0, 100):
            store.history.add_output("other", [("worker:0", "stdout", f"{line}\n")])
        for line in lines(0, 60):
            store.history.add_output("old", [("worker:0", "stdout", f"{line}\n")])
        for line in lines(60, 100):
            store.history.add_output("new", [("worker:0", "stdout", f"{line}\n")])
        assert (written(store, "old"), written(store, "new")) == (lines(0, 60), lines(60, 100))
        # One more than there is room for; whichever job it is of, the oldest goes.
        store.history.add_output("new", [("worker:0", "stdout", f"{lines(100, 101)[0]}\n")])
        assert written(store, "old") == [cut, *lines(26, 60)]
        assert written(store, "new") == lines(60, 101)
        assert {chunk.task for chunk in store.history.output("old")} == {"dike", "worker:0"}
        # The output of a single task contains the note, too.
        with store.database.reading() as connection:
            of_a_task = queries.output(connection, "old", after=0, task="worker:1", limit=None)
        assert [chunk.text for chunk in of_a_task] == [f"{cut}\n"]
        for line in lines(101, 1000):
            store.history.add_output("new", [("worker:0", "stdout", f"{line}\n")])
        assert written(store, "old") == [cut]
        note, *kept = written(store, "new")
        assert note == cut
        assert 70 <= len(kept) <= 100
        assert kept == lines(1000 - len(kept), 1000)
        assert written(store, "other") == lines(0, 100)
        # A limit that is lowered, or raised, holds from the next output on; so does what jobs leave that are removed.
        limits["ann"] = UserLimits(output_bytes=0)
        store.history.add_output("new", [("worker:0", "stdout", "gone\n")])
        assert written(store, "new") == [cut.replace("1000 B", "0 B")]
        del limits["ann"]
        store.history.add_output("new", [("worker:0", "stdout", "kept\n" * 300)])
        assert written(store, "new") == [cut.replace("1000 B", "0 B"), *["kept"] * 300]


def test_what_removed_jobs_have_left_gives_room_again(url: str) -> None:
    with contextlib.closing(
        ServiceStore(url, lambda _: UserLimits(open_jobs=2, output_bytes=1000, bundle_bytes=10))
    ) as store:
        for name in ("old", "new"):
            store.add_job(job(name, ended_s=1.0 if name == "old" else None, state=JobState.RUNNING), b"12345")
            store.history.add_output(name, [("worker:0", "stdout", f"{line}\n") for line in lines(0, 50)])
        store.change_job("old", state=JobState.FINISHED)
        with pytest.raises(OverLimitError, match="limit of bundles"):
            store.add_job(job("more"), b"12345")
        assert store.delete_jobs(2.0) == 1
        store.history.add_output("new", [("worker:0", "stdout", f"{line}\n") for line in lines(50, 100)])
        assert written(store, "new") == lines(0, 100)
        store.add_job(job("more"), b"12345")


def test_a_user_has_as_many_open_jobs_and_bundles_as_the_operator_allows(url: str) -> None:
    limits = {"ann": UserLimits(open_jobs=2, bundle_bytes=3 * 2**20)}
    with contextlib.closing(ServiceStore(url, lambda user: limits.get(user, NO_LIMITS))) as store:
        for name in ("one", "two"):
            store.add_job(job(name), bytes(2**20))
        with pytest.raises(OverLimitError) as raised:
            store.add_job(job("three"), b"")
        assert str(raised.value) == (
            "The limit of open jobs that the service's operator has set for ann is 2, and 2 are open; wait for the end "
            "of one, end one with dike kill, or ask for more."
        )
        assert store.job("three") is None
        for number in range(3):
            store.add_job(job(f"of-bob-{number}", "bob"), bytes(2**21))
        store.change_job("one", state=JobState.KILLED)
        with pytest.raises(OverLimitError) as raised:
            store.add_job(job("three"), bytes(2**20 + 1))
        assert str(raised.value) == (
            "The limit of bundles that the service's operator has set for ann is 3.0 MiB, 2.0 MiB are used, and this "
            "one has 1.0 MiB; send less, or ask for more."
        )
        store.add_job(job("three"), bytes(2**20))
        # Nor may an ended job be reopened while as many others are open.
        with pytest.raises(OverLimitError, match="limit of open jobs"):
            store.reopen_job("one", "again")
        store.change_job("two", state=JobState.KILLED)
        assert store.reopen_job("one", "again")
        assert not store.reopen_job("one", "again")


def test_jobs_that_come_at_once_share_what_is_left(url: str) -> None:
    def add(number: int) -> bool:
        try:
            opened.add_job(job(f"job-{number}"), b"")
        except OverLimitError:
            return False
        return True

    with (
        contextlib.closing(ServiceStore(url, lambda user: UserLimits(open_jobs=3))) as opened,
        ThreadPoolExecutor(8) as threads,
    ):
        assert sum(threads.map(add, range(16))) == 3


def test_steps_that_are_trained_again_replace_what_was_said_of_them(store: ServiceStore) -> None:
    store.add_job(job("one"), b"")
    points = [ProgressPoint(step, 10.0 * step, loss) for step, loss in ((1, 3.0), (2, 2.0), (3, 1.0))]
    store.history.add_progress("one", points)
    store.history.add_progress("one", [ProgressPoint(2, 50.0, math.nan)])
    first, second = store.history.progress("one")
    assert first == points[0]
    assert second.step == 2
    assert second.loss is not None
    assert math.isnan(second.loss)
    assert [point.step for point in store.history.progress("one", after_step=1)] == [2]


def test_a_step_that_is_trained_again_and_again_counts_once(
    store: ServiceStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "PROGRESS_LIMIT", 20)
    store.add_job(job("one"), b"")
    store.history.add_progress("one", [ProgressPoint(step, float(step)) for step in range(10)])
    for time_s in range(100):
        store.history.add_progress("one", [ProgressPoint(9, float(time_s))])
    assert [point.step for point in store.history.progress("one")] == list(range(10))


def test_old_jobs_go_with_all_that_is_kept_of_them(store: ServiceStore) -> None:
    for name, ended_s in (("old", 10.0), ("new", 30.0), ("open", None)):
        store.add_job(job(name, ended_s=ended_s), b"x")
        store.save([task(f"{name}-task", name, ended_s=ended_s)], {})
        store.history.add_events(name, [("note", "a")])
        store.history.add_output(name, [("chief:0", "stdout", "x")], {(f"{name}-task", "stdout"): 1})
        store.history.add_progress(name, [ProgressPoint(1, 1.0)])
    for number in range(DELETE_BATCH):
        store.add_job(job(f"old-{number}", ended_s=10.0), b"x")
    assert store.delete_jobs(20.0) == DELETE_BATCH + 1
    assert [one.id for one in store.jobs()] == ["open", "new"]
    assert {each.job_id for each in store.tasks()} == {"open", "new"}
    assert not store.history.events("old")
    assert not store.history.output("old")
    assert (store.history.received("old"), store.history.received("new")) == ({}, {"new-task": {"stdout": 1}})
    assert not store.history.progress("old")
    assert store.bundle("token-old") is None
    assert store.bundle("token-open") == b"x"


def test_a_job_is_kept_as_long_as_something_of_it_may_run(store: ServiceStore) -> None:
    store.add_job(job("one", ended_s=10.0), b"x")
    store.save([task("a", ended_s=5.0), task("b")], {})
    assert store.delete_jobs(20.0) == 0
    assert [each.task_id for each in store.tasks()] == ["a", "b"]
    assert store.bundle("token-one") == b"x"
    store.save([task("b", ended_s=15.0)], {})
    assert store.delete_jobs(20.0) == 1
    assert store.tasks() == []


def test_a_task_of_a_forgotten_job_is_not_written(store: ServiceStore) -> None:
    store.add_job(job("one"), b"")
    store.save([task("late", "forgotten"), task("a")], {"one": {"attempt": 1}})
    assert [each.task_id for each in store.tasks()] == ["a"]


def test_the_framework_id_outlives_the_service(store: ServiceStore, url: str) -> None:
    assert store.framework_id() is None
    store.set_framework_id("F-1")
    with contextlib.closing(ServiceStore(url)) as other:
        assert other.framework_id() == "F-1"


def test_of_many_events_the_end_is_kept(store: ServiceStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "EVENTS_LIMIT", 20)
    store.add_job(job("one"), b"")
    for number in range(100):
        store.history.add_events("one", [("note", str(number))])
    kept = [int(event.text) for event in store.history.events("one")]
    assert 10 <= len(kept) <= 20
    assert kept == list(range(100 - len(kept), 100))


def test_of_much_progress_every_second_point_goes(store: ServiceStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "PROGRESS_LIMIT", 20)
    store.add_job(job("one"), b"")
    for step in range(1, 101):
        store.history.add_progress("one", [ProgressPoint(step, float(step))])
        assert store.history.progress("one")[-1].step == step
    steps = [point.step for point in store.history.progress("one")]
    assert 10 <= len(steps) <= 20
    assert min(steps) <= 100 // 10
    assert steps == sorted(steps)
