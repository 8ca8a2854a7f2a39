"""What is known of the agents without waiting for the master, and what of them other frameworks hold."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from framework.service.agents import REFRESH_S, AgentDirectory, AgentFacts
from framework.service.constraints import parse_constraints
from framework.service.others import WINDOW_S, Others, left_of

DEADLINE_S = 60.0


def slave(name: str, agent_id: str, **more: Any) -> dict[str, Any]:
    resources = {"cpus": 4.0, "mem": 8192.0, "disk": 10_000.0, "gpus": 1.0, "ports": "[31000-31009]"}
    values = {"id": agent_id, "hostname": name, "active": True, "resources": resources, "attributes": {"rack": name}}
    return {**values, "unreserved_resources": resources, "used_resources": {"cpus": 1.0}, **more}


def eventually(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_nobody_waits_for_a_master_that_hangs() -> None:
    answers = threading.Event()
    asked: list[str] = []

    def ask(path: str) -> dict[str, Any]:
        asked.append(path)
        assert answers.wait(DEADLINE_S)
        return {"slaves": [slave("a", "S0")]}

    now_s = 0.0
    directory = AgentDirectory(ask, clock=lambda: now_s)
    assert directory.current() is None
    eventually(lambda: asked)
    now_s += 10 * REFRESH_S
    assert directory.current() is None
    assert directory.nodes(parse_constraints([])) is None
    assert asked == ["/slaves"], "one question at a time"
    answers.set()
    eventually(lambda: directory.current())
    count = len(asked)
    directory.current()
    assert len(asked) == count, "the answer is fresh"
    now_s += REFRESH_S
    directory.current()
    eventually(lambda: len(asked) > count)
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
        now_s += REFRESH_S
        assert [one.node for one in directory.current() or ()] == ["a"]
        return "cannot be read" in caplog.text

    eventually(told)
    directory.close()


def test_agents_are_named_and_those_that_are_gone_remembered() -> None:
    reply = {"slaves": [slave("a", "x-S0"), slave("b", "x-S1"), slave("b", "x-S2"), slave("c", "x-S3", active=False)]}
    directory = AgentDirectory(lambda path: reply)
    directory.refresh()
    assert [one.node for one in directory.current() or ()] == ["a", "b/S1", "b/S2"]
    admitted = directory.nodes(parse_constraints(["rack:IS:a"]))
    assert [(node.name, node.gpus) for node in admitted or ()] == [("a", 1)]
    reply["slaves"] = [slave("a", "x-S9")]
    directory.refresh()
    assert [one.agent_id for one in directory.current() or ()] == ["x-S9"]
    assert sorted(one.node for one in directory.gone) == ["b/S1", "b/S2"]
    assert not any(one.is_there for one in directory.gone)
    directory.close()


def test_what_looks_like_others_for_a_moment_only_is_not() -> None:
    agent = AgentFacts("S0", "a", "a", total={"cpus": 4.0}, used={"cpus": 3.0})
    others = Others()
    for second, ours in enumerate([3.0, 0.0, 0.0, 3.0]):
        others.observe([agent], {"S0": {"cpus": ours}}, float(second))
    assert others.all == {}
    for second in range(int(2 * WINDOW_S) + 5):
        others.observe([agent], {"S0": {"cpus": 1.0}}, 10.0 + second)
    assert others.all == {"S0": {"cpus": 2.0}}
    assert left_of(agent, others.all["S0"]) == {"cpus": 2.0}
