"""A service writes its database as long as it holds the lease of it: on SQLite and PostgreSQL."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import delete, update
from sqlalchemy.exc import OperationalError

from dike.exceptions import BadInputError
from framework.mesos.driver import Driver, FrameworkSettings
from framework.mesos.events import EventScheduler
from framework.scheduler import lease
from framework.scheduler.journal import LeaseLostError, ServiceLeaseLostError
from framework.scheduler.records import JobKind, JobRecord
from framework.search.store import Store
from framework.search.tables import SEARCHES
from framework.service.recorder import JobRecorder
from framework.service.store import ServiceStore
from framework.service.tables import SERVICES
from tests.search.postgresql_server import PostgresqlServer, postgresql_server
from tests.search.search_stage import search_spec
from tests.waiting import DEADLINE_S, wait_until


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresqlServer]:
    with postgresql_server() as running:
        yield running


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.integration)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/service.db"
    server: PostgresqlServer = request.getfixturevalue("server")
    return server.emptied()


def take_over(store: ServiceStore) -> None:
    """Does what a service on another machine would."""
    with store.database.engine.begin() as connection:
        connection.execute(update(SERVICES).values(owner="stranger", owner_machine="elsewhere", owner_host="elsewhere"))


def test_a_service_that_was_taken_over_writes_nothing_any_more(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "HEARTBEAT_S", 0.05)
    lost: list[str] = []
    with closing(ServiceStore(url)) as store, store.database.lock(lost.append):
        store.set_framework_id("first")
        take_over(store)
        with pytest.raises(ServiceLeaseLostError, match="was taken over by process"):
            store.set_framework_id("second")
        assert store.framework_id() == "first"
        wait_until(lambda: lost, "the loss of the lease")


def test_who_waits_gets_the_lease_when_it_is_free(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "HEARTBEAT_S", 0.05)
    notes: list[str] = []
    with closing(ServiceStore(url)) as first, closing(ServiceStore(url)) as second:

        def stand_by() -> None:
            with second.database.lock(notes.append, notes.append):
                second.set_framework_id("second")

        with first.database.lock(notes.append):
            thread = threading.Thread(target=stand_by)
            thread.start()
            wait_until(lambda: notes, "a note")
            first.set_framework_id("first")
        thread.join(DEADLINE_S)
        assert second.framework_id() == "second"
    assert len(notes) == 1
    assert f"run by process {os.getpid()}" in notes[0]


def test_who_was_stopped_for_long_asks_before_it_subscribes_again(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "HEARTBEAT_S", 1000.0)
    monkeypatch.setattr(lease, "STALE_S", 1000.0)
    lost: list[str] = []
    with closing(ServiceStore(url)) as store, store.database.lock(lost.append) as held:
        take_over(store)
        # The lease cannot be taken over yet: it was renewed a moment ago.
        assert held.ensure_owned()
        monkeypatch.setattr(lease, "STALE_S", 0.0)
        assert not held.ensure_owned()
        assert len(lost) == 1
        driver = Driver(FrameworkSettings("test", "nobody"), "127.0.0.1:1", EventScheduler(), held.ensure_owned)
        assert driver.gen_request() == b""
        monkeypatch.setattr(lease, "STALE_S", 1000.0)
        assert b"SUBSCRIBE" in driver.gen_request()


def test_who_was_stopped_and_holds_it_still_may_go_on(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(ServiceStore(url)) as store, store.database.lock(lambda reason: None) as held:
        monkeypatch.setattr(lease, "STALE_S", 0.0)
        assert held.ensure_owned()


@contextlib.contextmanager
def held_together(url: str, folder: Path, *names: str) -> Iterator[tuple[ServiceStore, Store]]:
    """A service's store, and the last of these searches, whose leases share the service's heartbeat."""
    with closing(ServiceStore(url)) as store, contextlib.ExitStack() as held:
        for name in names:
            searches = Store(url, engine=store.database.engine)
            searches.create_search(search_spec(folder, name=name))
            held.enter_context(searches.lock(name, store.database.shared.heartbeat))
        yield store, searches


@pytest.mark.slow
def test_leases_that_share_a_heartbeat_are_lost_one_by_one(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "HEARTBEAT_S", 0.05)
    with held_together(url, tmp_path, "kept", "taken") as (store, searches):
        with store.database.engine.begin() as connection:
            of = SEARCHES.c.name == "taken"
            connection.execute(update(SEARCHES).where(of).values(owner="stranger", owner_machine="elsewhere"))
        seen_s = searches.last_heartbeat_s("taken")
        first_s = searches.last_heartbeat_s("kept") or 0.0
        with pytest.raises(LeaseLostError, match="search 'taken' was taken over"):
            searches.finish_search()
        wait_until(lambda: (searches.last_heartbeat_s("kept") or 0.0) > first_s, "a heartbeat of the other")
        assert searches.last_heartbeat_s("taken") == seen_s


@pytest.mark.slow
def test_a_row_that_is_gone_stops_no_other_heartbeat(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "HEARTBEAT_S", 0.05)
    with held_together(url, tmp_path, "gone", "kept") as (store, searches):
        with store.database.engine.begin() as connection:
            connection.execute(delete(SEARCHES).where(SEARCHES.c.name == "gone"))
        first_s = searches.last_heartbeat_s("kept") or 0.0
        wait_until(lambda: (searches.last_heartbeat_s("kept") or 0.0) > first_s, "a heartbeat of the other")


def test_what_tasks_write_can_be_kept(url: str) -> None:
    with closing(ServiceStore(url)) as store:
        job = JobRecord("job", JobKind.TRAINING, "ann", "train.py", {}, bundle_token="t" * 32)
        store.add_job(job, b"")
        recorder = JobRecorder(store, "job")
        recorder.output("worker:0", "stdout", "a\0b \U0001f600")
        recorder.write()
        assert [chunk.text for chunk in store.history.output("job")] == ["a\ufffdb \U0001f600"]


def test_a_lease_that_could_not_be_given_back_is_nobody_s(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OperationalError("UPDATE", {}, Exception("database or disk is full"))

    with closing(Store(url)) as store:
        store.create_search(search_spec(Path("nowhere"), trials=1))
        name = store.spec.name
        held = store.lock(name)
        held.__enter__()
        with closing(Store(url)) as other, pytest.raises(BadInputError, match="is being run by process"):
            other.lock(name).__enter__()
        with monkeypatch.context() as patch:
            patch.setattr(lease, "_update_owned", full)
            with pytest.raises(BadInputError, match="cannot be used"):
                held.__exit__(None, None, None)
        with store.lock(name):
            pass
