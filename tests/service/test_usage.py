"""What users' jobs have used: hours of GPUs and CPUs by week, kept when jobs are deleted."""

from __future__ import annotations

import contextlib
import datetime
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from framework.scheduler.records import JobKind, JobRecord, JobState, TaskRecord
from framework.service import store as store_module
from framework.service import usage as usage_module
from framework.service.metrics import ServiceMetrics
from framework.service.store import ServiceStore
from framework.service.usage import Usage, totals, week_of
from tests.service.api_stage import api_stage

pytestmark = pytest.mark.integration

HOUR_S = 3600.0
MONDAY = datetime.datetime(2026, 11, 23, tzinfo=datetime.UTC)
THIS_WEEK, LAST_WEEK = MONDAY.date(), MONDAY.date() - datetime.timedelta(weeks=1)


def at(hours: float) -> float:
    """So many hours after the Monday of this week."""
    return MONDAY.timestamp() + hours * HOUR_S


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServiceStore]:
    clock = types.SimpleNamespace(time=lambda: at(20), sleep=time.sleep)
    monkeypatch.setattr(store_module, "time", clock)
    monkeypatch.setattr(usage_module, "time", clock)
    with contextlib.closing(ServiceStore(f"sqlite:///{tmp_path}/service.db")) as made:
        for user in ("ann", "bob"):
            record = JobRecord(f"of-{user}", JobKind.TRAINING, user, "t.py", {}, submitted_s=at(0), bundle_token=user)
            made.add_job(record, b"")
        yield made


def task(user: str, number: int, begin: float, end: float | None = None, gpus: float = 1.0) -> TaskRecord:
    return TaskRecord(
        f"{user}.{number}",
        f"of-{user}",
        "S0",
        "agent-0",
        "10.0.0.1",
        "worker:0",
        "running" if end is None else "finished",
        {"cpus": 2.0, "gpus": gpus},
        at(begin),
        None if end is None else at(end),
        executor_id="e",
    )


def test_tasks_count_by_week_once_and_still_running_ones_too(store: ServiceStore) -> None:
    store.start_job("of-ann", at(2))
    store.save([task("ann", 0, -10), task("ann", 1, 4), task("bob", 0, 18, gpus=0.0)], {})
    for _ in range(2):  # an update of Mesos may arrive twice
        store.save([task("ann", 0, -10, 6)], {})
    assert store.usage(weeks=2) == [
        Usage("ann", THIS_WEEK, 1, gpu_hours=6 + 16, cpu_hours=2 * (6 + 16), waited_hours=2.0),
        Usage("bob", THIS_WEEK, cpu_hours=4.0),
        Usage("ann", LAST_WEEK, gpu_hours=10.0, cpu_hours=20.0),
    ]
    assert [row.user for row in store.usage(weeks=1, user="bob")] == ["bob"]
    assert totals(store.usage(weeks=2))["ann"] == Usage("ann", LAST_WEEK, 1, 32.0, 64.0, 2.0)


def test_usage_is_kept_when_jobs_are_deleted_and_when_mesos_forgets_the_framework(store: ServiceStore) -> None:
    store.save([task("ann", 0, 10), task("bob", 0, 12)], {})
    store.save([task("ann", 0, 10, 12)], {})
    store.forget_framework()
    before = store.usage(weeks=1)
    assert [(row.user, row.gpu_hours) for row in before] == [("bob", 8.0), ("ann", 2.0)]
    for name in ("of-ann", "of-bob"):
        store.change_job(name, state=JobState.FINISHED, ended_s=at(20))
    assert store.delete_jobs(at(21)) == 2
    assert store.usage(weeks=1) == before


def test_weeks_begin_on_monday() -> None:
    assert [week_of(at(hours)) for hours in (-0.1, 0.0, 167.9)] == [LAST_WEEK, THIS_WEEK, THIS_WEEK]


def test_prometheus_has_totals(store: ServiceStore) -> None:
    store.save([task("ann", 0, 10)], {})
    store.save([task("ann", 0, 10, 12)], {})
    text = ServiceMetrics(store).text(by_user=True).decode()
    assert 'dike_user_gpu_seconds_total{user="ann"} 7200.0' in text
    assert 'dike_user_cpu_seconds_total{user="ann"} 14400.0' in text


def test_only_administrators_see_others(tmp_path: Path) -> None:
    with api_stage(tmp_path) as stage:
        now_s = time.time()
        for user in ("alice", "bob"):
            record = JobRecord(f"of-{user}", JobKind.TRAINING, user, "t.py", {}, submitted_s=now_s, bundle_token=user)
            stage.store.add_job(record, b"")
            stage.store.start_job(record.id, now_s)
        seen: dict[str, Any] = {}
        for user in ("alice", "root"):
            with stage.client(user) as client:
                rows = client.get("/api/v1/usage", params={"weeks": 1}).json()["usage"]
            seen[user] = sorted(row["user"] for row in rows)
        assert seen == {"alice": ["alice"], "root": ["alice", "bob"]}
        with stage.client("alice") as client:
            assert client.get("/api/v1/usage", params={"weeks": 0}).status_code == 422
