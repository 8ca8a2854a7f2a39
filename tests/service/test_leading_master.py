"""After an election among the masters the one that leads now is asked, also by those who look at the service."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from framework import events
from framework.elastic.demand import demand_on
from framework.events import EventScheduler
from framework.master import LeadingMaster, Master
from tests.service.api_stage import api_stage, played_master, wait_until


def test_the_address_follows_the_election_where_zookeeper_names_it() -> None:
    leading = LeadingMaster(Master("zk://zoo:2181/mesos", "one", 5050, "1.11.0"))
    assert (leading.address, leading.version) == ("one:5050", "1.11.0")
    leading.subscribed_at("two:5051", "1.12.0")
    assert (leading.address, leading.version) == ("two:5051", "1.12.0")
    leading.subscribed_at("three:5050", "")
    assert (leading.address, leading.version) == ("three:5050", "1.12.0")


def test_a_master_that_the_user_named_is_kept() -> None:
    leading = LeadingMaster(Master("gateway:5050", "gateway", 5050, "1.11.0"))
    leading.subscribed_at("inside:5050", "1.12.0")
    assert (leading.address, leading.version) == ("gateway:5050", "1.12.0")


def test_a_subscription_tells_the_masters_version() -> None:
    scheduler = EventScheduler()
    scheduler.registered(None, {"value": "F"}, {"hostname": "two", "port": 5050, "version": "1.11.0"})
    assert scheduler.events.get() == events.Subscribed("F", "two:5050", version="1.11.0")


def test_a_service_asks_the_new_master(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        stage = stack.enter_context(api_stage(tmp_path))
        client = stack.enter_context(stage.client())
        second = stack.enter_context(played_master(["late-0"]))

        def agents() -> list[str]:
            there = client.get("/api/v1/cluster").raise_for_status().json()["agents"] or []
            return [agent["node"] for agent in there if agent["active"]]

        wait_until(lambda: agents() == ["agent-0", "agent-1"])
        stage.inbox.put(events.Disconnected())
        stage.inbox.put(events.Subscribed("F-1", second.address, version="1.12.0"))
        wait_until(lambda: agents() == ["late-0"])
        view = client.get("/api/v1/cluster").json()
        assert (view["master"], view["mesos_version"]) == (second.address, "1.12.0")


def test_a_master_that_does_not_answer_is_not_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(Master, "ask", lambda self, path: asked.append(path))
    assert demand_on(Master("one:5050", "one", 5050, "1.11.0"), "F") is None
    assert asked == ["/slaves"]
