"""What is known of the agents without waiting for the master, and what of them other frameworks hold."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from framework.mesos.offers import by_agent, cluster_of
from framework.scheduler.agents import (
    FRAMEWORKS_INTERVAL_S,
    MAX_STALENESS_S,
    REFRESH_S,
    USAGE_WINDOW_S,
    AgentDirectory,
    AgentFacts,
    OtherFrameworksUsage,
)
from framework.scheduler.amounts import subtract
from framework.scheduler.constraints import parse_constraints
from framework.scheduler.offer_pool import OLD_OFFER_S, SETTLE_S, LastOffer, OfferPool
from tests.mesos.fake_mesos import FakeMesos
from tests.waiting import wait_until

DEADLINE_S = 60.0


def answering_here(reply: Callable[[], dict[str, Any] | None]) -> Callable[[str], dict[str, Any] | None]:
    """A master that answers this thread only: what is asked in the background may come at any time, or late."""
    here = threading.current_thread()
    return lambda path: reply() if threading.current_thread() is here else None


def slave(name: str, agent_id: str, **more: Any) -> dict[str, Any]:
    resources = {"cpus": 4.0, "mem": 8192.0, "disk": 10_000.0, "gpus": 1.0, "ports": "[31000-31009]"}
    values = {"id": agent_id, "hostname": name, "active": True, "resources": resources, "attributes": {"rack": name}}
    return {**values, "unreserved_resources": resources, "used_resources": {"cpus": 1.0}, **more}


def test_no_request_waits_for_a_master_that_hangs() -> None:
    answers = threading.Event()
    asked: list[str] = []

    def ask(path: str) -> dict[str, Any]:
        asked.append(path)
        assert answers.wait(DEADLINE_S)
        return {"slaves": [slave("a", "S0")]}

    now_s = 0.0
    directory = AgentDirectory(ask, clock=lambda: now_s)
    assert directory.current() is None
    wait_until(lambda: asked, "a question")
    now_s += 10 * REFRESH_S
    assert directory.current() is None
    assert directory.nodes(parse_constraints([])) is None
    assert asked == ["/slaves"], "one question at a time"
    answers.set()
    # What was asked long ago is asked once more.
    wait_until(lambda: directory.current() and len(asked) == 2, "an answer, and the second question")
    directory.current()
    assert len(asked) == 2, "the answer is fresh"
    now_s += REFRESH_S
    wait_until(lambda: directory.current() and len(asked) > 2, "the next question")
    directory.close()


@pytest.mark.slow
def test_the_master_is_asked_once_however_many_ask_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    asked: list[str] = []
    told: list[str] = []
    meeting = threading.Barrier(2)

    def ask(path: str) -> dict[str, Any]:
        asked.append(path)
        return {"slaves": [{"active": True}]}

    def tell(text: str, error: BaseException) -> None:
        told.append(text)
        with contextlib.suppress(threading.BrokenBarrierError):
            meeting.wait(0.5)

    def look() -> None:
        wait_until(lambda: directory.current() or told, "a question that had no answer")
        directory.current()

    monkeypatch.setattr("framework.scheduler.agents.logger.warning", tell)
    directory = AgentDirectory(ask, clock=lambda: now_s)
    directory.current()
    now_s += REFRESH_S
    with ThreadPoolExecutor(2) as pool:
        for one in [pool.submit(look) for _ in range(2)]:
            one.result(DEADLINE_S)
    assert len(told) == 1
    wait_until(lambda: len(asked) == 2, "the next question")
    directory.close()


def test_an_answer_that_makes_no_sense_leaves_what_was_known(caplog: pytest.LogCaptureFixture) -> None:
    reply: dict[str, Any] | None = {"slaves": [slave("a", "S0")]}
    now_s = 0.0
    directory = AgentDirectory(lambda path: reply, clock=lambda: now_s)
    directory.refresh()
    reply = None
    directory.refresh()
    reply = {"slaves": [{"active": True}]}

    def told() -> bool:
        nonlocal now_s
        # Regardless of the number of looks: an old answer is used only up to its maximum age.
        now_s = min(now_s + REFRESH_S, MAX_STALENESS_S - 1)
        assert [one.node for one in directory.current() or ()] == ["a"]
        return "cannot be read" in caplog.text

    wait_until(told, "a log record")
    directory.close()


def test_agents_are_named_and_those_that_are_gone_remembered() -> None:
    reply = {"slaves": [slave("a", "x-S0"), slave("b", "x-S1"), slave("b", "x-S2"), slave("c", "x-S3", active=False)]}
    directory = AgentDirectory(answering_here(lambda: reply))
    directory.refresh()
    assert [one.node for one in directory.current() or ()] == ["a", "b/S1", "b/S2"]
    admitted = directory.nodes(parse_constraints(["rack:IS:a"]))
    assert [(node.name, node.gpus) for node in admitted or ()] == [("a", 1)]
    reply["slaves"] = [slave("a", "x-S9")]
    directory.refresh()
    assert [one.agent_id for one in directory.current() or ()] == ["x-S9"]
    assert sorted(one.node for one in directory.gone) == ["b/S1", "b/S2"]
    assert not any(one.is_registered for one in directory.gone)
    directory.close()


def test_an_agent_whose_neighbour_is_gone_is_called_otherwise_and_still_there() -> None:
    reply = {"slaves": [slave("b", "x-S1"), slave("b", "x-S2")]}
    directory = AgentDirectory(lambda path: reply)
    directory.refresh()
    reply["slaves"] = [slave("b", "x-S2")]
    directory.refresh()
    assert [(one.agent_id, one.node) for one in directory.current() or ()] == [("x-S2", "b")]
    assert [one.agent_id for one in directory.gone] == ["x-S1"]
    directory.close()


def test_what_looks_like_others_for_a_moment_only_is_not() -> None:
    agent = AgentFacts("S0", "a", "a", total={"cpus": 4.0}, used={"cpus": 3.0})
    others = OtherFrameworksUsage()
    for second, ours in enumerate([3.0, 0.0, 0.0, 3.0]):
        others.observe([agent], {"S0": {"cpus": ours}}, float(second))
    assert others.all == {}
    for second in range(int(2 * USAGE_WINDOW_S) + 5):
        others.observe([agent], {"S0": {"cpus": 1.0}}, 10.0 + second)
    assert others.all == {"S0": {"cpus": 2.0}}
    assert subtract(agent.total, others.all["S0"]) == {"cpus": 2.0}


def test_agents_of_one_host_that_registered_at_different_masters_have_names_of_their_own() -> None:
    ids = ["aaaa-S0", "bbbb-S0", "bbbb-S1"]
    directory = AgentDirectory(lambda path: {"slaves": [slave("host", one) for one in ids]})
    directory.refresh()
    nodes = directory.nodes(parse_constraints([])) or []
    directory.close()
    assert [node.name for node in nodes] == ["host/S1", "host/aaaa-S0", "host/bbbb-S0"]
    cluster_of(nodes)

    offers = [
        {**FakeMesos().offer(number), "id": {"value": str(number)}, "hostname": "host", "agent_id": {"value": one}}
        for number, one in enumerate(["aaaa-S1", *ids, "aaaa-S0"])
    ]
    agents = by_agent(offers)
    cluster_of(agent.node_class() for agent in agents)
    assert [agent.node for agent in agents] == ["host", "host/S0", "host/S1", "host/bbbb-S0"]


def test_what_a_silent_master_said_is_not_believed_for_ever() -> None:
    now_s = 0.0
    reply: dict[str, Any] | None = {"slaves": [slave("a", "S0")]}
    directory = AgentDirectory(answering_here(lambda: reply), clock=lambda: now_s)
    directory.refresh()
    reply = None
    now_s += MAX_STALENESS_S - 1
    assert directory.current()
    now_s += 2
    assert directory.current() is None
    assert directory.nodes(parse_constraints([])) is None
    reply = {"slaves": [slave("b", "S1")]}
    directory.refresh()
    assert [one.node for one in directory.current() or ()] == ["b"]
    assert [one.node for one in directory.gone] == ["a"]
    directory.close()


def test_what_others_hold_is_found_out_in_the_background() -> None:
    now_s = 0.0
    asked: list[str] = []
    others = {"id": "G", "name": "spark", "active": True, "connected": True, "used_resources": {"cpus": 3.0}}
    replies: dict[str, Any] = {
        "/slaves": {"slaves": [slave("a", "S0", reserved_resources={"other": {"cpus": 2.0, "mem": 8.0}})]},
        "/frameworks": {"frameworks": [{"id": "F", "name": "dike", "used_resources": {"cpus": 1.0}}, others]},
        "/metrics/snapshot": {},
    }
    loop = threading.current_thread()
    may_answer = threading.Event()

    def ask(path: str) -> Any:
        assert threading.current_thread() is not loop or path == "/slaves"
        asked.append(path)
        assert path == "/slaves" or may_answer.wait(DEADLINE_S)
        return replies[path]

    directory = AgentDirectory(ask, clock=lambda: now_s)
    directory.refresh()
    directory.current()
    assert "/frameworks" not in asked, "there was no request for it"
    assert directory.demand("F") is None
    may_answer.set()

    def known() -> bool:
        nonlocal now_s
        now_s += REFRESH_S
        return directory.demand("F") is not None

    wait_until(known, "the demand")
    demand = directory.demand("F")
    assert demand is not None
    assert dict(demand.total) == {"cpus": 6.0, "mem": 8200.0, "gpus": 1.0}
    assert [(one.id, one.used["cpus"], one.is_requesting) for one in demand.others] == [("G", 3.0, True)]
    assert demand.ours["cpus"] == 1.0

    replies["/frameworks"] = None
    now_s += max(FRAMEWORKS_INTERVAL_S, MAX_STALENESS_S)
    asked.clear()
    wait_until(lambda: directory.demand("F") is None and "/frameworks" in asked, "an answer without demand")
    directory.close()
    assert "/metrics/snapshot" not in asked, "a master that does not answer gets no further requests"


def test_offers_of_agents_that_are_gone_are_forgotten() -> None:
    pool = OfferPool()
    offer = FakeMesos().offer(0)
    pool.add([offer], 0.0)
    long_ago_s = time.time() - OLD_OFFER_S
    pool.last = {one: LastOffer(free={}, time_s=long_ago_s) for one in ("S0", "known", "gone")}
    pool.last["new"] = LastOffer({}, time.time())
    pool.forget_gone_agents({"known"})
    assert set(pool.last) == {"S0", "known", "new"}, "that of agent S0 is in hand"
    pool.forget_gone_agents(None)
    assert set(pool.last) == {"S0", "new"}


def test_offers_of_agents_that_are_nobody_elses_are_complete_once_all_is_offered() -> None:
    mesos = FakeMesos()
    pool, shared = OfferPool(agents=2), OfferPool()

    def add(*offers: dict[str, Any], now_s: float) -> tuple[bool, bool]:
        for one in (pool, shared):
            one.add(offers, now_s)
        return pool.is_settled(now_s), shared.is_settled(now_s)

    assert add(mesos.offer(0), now_s=0.0) == (False, False)
    assert add(mesos.offer(1), now_s=0.1) == (True, False)
    assert shared.is_settled(0.1 + SETTLE_S)
    for one in (pool, shared):
        one.take(lambda offer: True)
    # Tasks end one by one, and their resources are offered in pieces.
    assert add(mesos.offer(0), mesos.offer(1, cpus=1), now_s=10.0) == (False, False)
    assert add(mesos.offer(1, cpus=3), now_s=10.1) == (True, False)
