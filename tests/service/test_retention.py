"""Old jobs are forgotten, with all that is kept of them; no other is."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from sqlalchemy import insert

from framework.scheduler.records import JobKind, JobRecord, JobState
from framework.search.tables import SEARCHES
from framework.service.retention import removing_old_jobs
from framework.service.store import ServiceStore
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
                values = {"name": name, "spec": '{"field": "of another version"}', "created_s": 0.0}
                connection.execute(insert(SEARCHES).values(values))
        with removing_old_jobs(store, keep_s=7 * DAY_S, every_s=0.05):
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
        with removing_old_jobs(store, keep_s=7 * DAY_S, every_s=0.05):
            wait_until(lambda: store.job("old") is None, "the end of the old job's records")
            # One that ends later is found as well.
            store.change_job("young", ended_s=now_s - 8 * DAY_S)
            wait_until(lambda: store.job("young") is None, "the same of the other")
        assert [job.id for job in store.jobs()] == ["running"]
        assert [store.bundle(name) for name in ("old", "young", "running")] == [None, None, b"bundle"]
        assert store.history.events("old") == []
        assert len(store.history.events("running")) == 1
