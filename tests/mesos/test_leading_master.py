"""After an election, requests go to the new leading master, also for clients of the service."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from framework.mesos import events
from framework.mesos.events import EventScheduler
from framework.mesos.master import LeadingMaster, Master
from framework.scheduler import standalone
from framework.scheduler.agents import admitted_agents
from framework.scheduler.demand import query_demand
from framework.scheduler.job import Message, Need
from framework.scheduler.mesos_access import MesosAccess
from framework.scheduler.standalone import StandaloneJob, run_standalone
from tests.mesos.fake_mesos import FakeMesos
from tests.service.api_stage import api_stage, fake_master
from tests.waiting import wait_until


def test_the_address_follows_the_election_where_zookeeper_names_it() -> None:
    leading = LeadingMaster(Master("zk://zoo:2181/mesos", "one", 5050, "1.11.0"))
    assert (leading.address, leading.version) == ("one:5050", "1.11.0")
    leading.on_subscribed("two:5051", "1.12.0")
    assert (leading.address, leading.version) == ("two:5051", "1.12.0")
    leading.on_subscribed("three:5050", "")
    assert (leading.address, leading.version) == ("three:5050", "1.12.0")


def test_a_master_that_the_user_named_is_kept() -> None:
    leading = LeadingMaster(Master("gateway:5050", "gateway", 5050, "1.11.0"))
    leading.on_subscribed("inside:5050", "1.12.0")
    assert (leading.address, leading.version) == ("gateway:5050", "1.12.0")


def test_a_subscription_tells_the_masters_version() -> None:
    scheduler = EventScheduler()
    scheduler.registered(None, {"value": "F"}, {"hostname": "two", "port": 5050, "version": "1.11.0"})
    assert scheduler.events.get() == events.Subscribed("F", "two:5050", version="1.11.0")


@pytest.mark.integration
def test_a_service_asks_the_new_master(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        stage = stack.enter_context(api_stage(tmp_path))
        client = stack.enter_context(stage.client())
        second = stack.enter_context(fake_master(["late-0"]))

        def agents() -> list[str]:
            there = client.get("/api/v1/cluster").raise_for_status().json()["agents"] or []
            return [agent["node"] for agent in there if agent["active"]]

        wait_until(lambda: agents() == ["agent-0", "agent-1"], "the agents of the one master")
        stage.inbox.put(events.Disconnected())
        stage.inbox.put(events.Subscribed("F-1", second.address, version="1.12.0"))
        wait_until(lambda: agents() == ["late-0"], "those of the other")
        view = client.get("/api/v1/cluster").json()
        assert (view["master"], view["mesos_version"]) == (second.address, "1.12.0")


class FakeDriver(FakeMesos):
    """A connection over which the next master takes the framework in."""

    def __init__(self, next_master: str, scheduler: EventScheduler) -> None:
        super().__init__()
        self.framework_id = "F"
        self._next_master = next_master
        self._scheduler = scheduler

    def start(self) -> None:
        self._scheduler.events.put(events.Subscribed("F", self._next_master))

    def stop(self, failover: bool) -> None:
        """There is nothing to stop."""

    def join(self) -> None:
        """Nor to wait for."""


class FakeJob:
    """A job that looks at all agents once it is subscribed, and has ended then."""

    need = Need.NOTHING
    equivalence_class = None

    def __init__(self, master: LeadingMaster) -> None:
        self._master = master
        self.done = False
        self.agents: list[str] = []

    def wanted_tasks(self) -> frozenset[str]:
        return frozenset()

    def messages(self) -> list[Message]:
        return []

    def handle(self, event: events.Event) -> None:
        self.agents = [node.name for node in admitted_agents(self._master, ()) or ()]
        self.done = True

    def tick(self) -> None:
        """It has ended."""

    def to_state(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        """It holds nothing."""


@pytest.mark.integration
def test_a_job_without_a_service_asks_the_new_master(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_master(["early-0"]) as first, fake_master(["late-0"]) as second:
        leading = LeadingMaster(dataclasses.replace(first, uri="zk://zoo:2181/mesos"))
        assert [node.name for node in leading.agents() or ()] == ["early-0"]
        monkeypatch.setattr(standalone, "Driver", lambda _, uri, scheduler: FakeDriver(second.address, scheduler))
        job = StandaloneJob("job", lambda handle: FakeJob(leading), 1.0, lambda _: None, lambda: None)
        assert run_standalone(job, MesosAccess(), leading).agents == ["late-0"]


def test_a_master_that_does_not_answer_is_not_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(Master, "ask", lambda self, path: asked.append(path))
    assert query_demand(LeadingMaster(Master("one:5050", "one", 5050, "1.11.0")), "F") is None
    assert asked == ["/slaves"]
