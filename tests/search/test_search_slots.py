"""A search's slots: asked for, told what to hold, silent, idle, ended."""

from __future__ import annotations

from typing import Any

import pytest

from dike.exceptions import InfeasibleError
from executor.slot_order import SlotOrder
from framework import events
from framework.search.fleet import SILENCE_S
from framework.search.slots import REPEAT_S
from tests.search.search_stage import fail, node, stored


def test_as_many_slots_as_there_are_trials_or_room(begin: Any) -> None:
    stage = begin(trials=3)
    assert len(stage.offer(agents=2, cpus=2)) == 3
    assert {info["executor"]["executor_id"]["value"] for info in stage.mesos.accepted} == {
        "s.slot-0",
        "s.slot-1",
        "s.slot-2",
    }
    order = SlotOrder.decode(stage.mesos.accepted[0]["data"])
    assert (order.script, order.preload, order.gpu_devices) == ("train.py", ("tensorflow",), ())
    assert stage.mesos.calls[-1] == "suppress"


def test_max_slots_bounds_them(begin: Any) -> None:
    stage = begin(trials=4, max_slots=1)
    assert len(stage.offer(agents=2)) == 1


def test_a_slot_is_a_gpu_where_there_are_any_with_its_share_of_the_cpus(begin: Any) -> None:
    stage = begin(nodes=[node("agent-0", 8, 2)], trials=4)
    slots = stage.offer(cpus=8, gpus=2)
    assert len(slots) == 2
    for info, slot in zip(stage.mesos.accepted, slots, strict=True):
        pieces = info["resources"] + info["executor"]["resources"]
        amounts = {name: sum(p["scalar"]["value"] for p in pieces if p["name"] == name) for name in ("cpus", "gpus")}
        assert amounts == {"cpus": pytest.approx(4), "gpus": 1}
        # This Mesos isolates GPUs by itself: the slot uses whatever it sees.
        assert SlotOrder.decode(info["data"]).gpu_devices is None
        assert slot.slot.gpu_devices


def test_a_slot_that_fits_no_agent_is_refused(begin: Any) -> None:
    stage = begin(nodes=[node("agent-0", 0.5)])
    with pytest.raises(InfeasibleError, match="--slot-cpus"):
        stage.offer(cpus=0.5)


def test_a_lost_message_is_repeated_until_the_slot_has_answered(begin: Any) -> None:
    stage = begin()
    slot = stage.offer(cpus=1)[0]
    stage.mesos.messages.clear()
    stage.tick(REPEAT_S / 2)
    assert not stage.mesos.messages
    stage.tick(REPEAT_S)
    assert slot.wanted.run is not None
    slot.train()
    stage.mesos.messages.clear()
    stage.tick(2 * REPEAT_S)
    assert not stage.mesos.messages


def test_finished_trials_leave_and_idle_slots_end_at_once(begin: Any, storage: str) -> None:
    stage = begin(trials=2)
    first, second = stage.offer(cpus=2)
    for slot in (first, second):
        slot.train()
        slot.report(10, 0.5)
    first.end("finished", last={"step": 10, "train_s": 10.0, "value": 0.25})
    assert first.wanted.leave
    assert not second.wanted.leave
    first.update("TASK_FINISHED")
    assert not stage.search.done
    second.end("finished")
    second.update("TASK_FINISHED")
    stage.tick(0.1)
    assert stage.search.done
    assert stage.search.result.complete
    assert stage.search.result.best.number == 0
    assert {number: record.value for number, record in stored(storage).items()} == {0: 0.25, 1: 0.5}


def test_a_trial_that_waits_keeps_a_slot_alive(begin: Any) -> None:
    stage = begin(trials=2, max_slots=1)
    slot = stage.offer(cpus=1)[0]
    slot.train()
    slot.report(1, 1.0)
    slot.end("finished")
    assert not slot.wanted.leave
    assert slot.wanted.run.key == (1, 0)


def test_a_lost_call_for_offers_is_made_again(begin: Any) -> None:
    stage = begin(trials=2, max_slots=2)
    first, _ = stage.offer(cpus=2)
    first.train()
    revive, stage.mesos.reviveOffers = stage.mesos.reviveOffers, stage.mesos.refuse
    first.update("TASK_LOST", source="SOURCE_MASTER", message="gone")
    stage.tick(0.1)
    stage.mesos.reviveOffers = revive
    stage.mesos.calls.clear()
    stage.tick(0.1)
    assert stage.mesos.calls == ["revive"]


def test_silence_while_the_master_was_away_is_not_held_against_slots(begin: Any) -> None:
    stage = begin(trials=1)
    slot = stage.offer(cpus=1)[0]
    slot.train()
    stage.search.handle(events.Disconnected())
    stage.tick(SILENCE_S + 10)
    stage.search.handle(events.Subscribed("F", "127.0.0.1:5050"))
    stage.tick(0.1)
    assert stage.mesos.killed == []


def test_an_agent_is_tried_again_after_its_cool_down(begin: Any) -> None:
    stage = begin(nodes=[node("agent-0"), node("agent-1")], trials=1, blacklist_s=100.0)
    for _ in range(2):
        slot = stage.offer(cpus=1)[0]
        fail(stage, slot)
        slot.update("TASK_FINISHED")
    assert stage.offer(cpus=1) == []
    stage.tick(101)
    assert len(stage.offer(cpus=1)) == 1


def test_the_only_agent_is_not_left_out(begin: Any) -> None:
    stage = begin(nodes=[node("agent-0")], trials=1)
    for _ in range(2):
        slot = stage.offer(cpus=1)[0]
        fail(stage, slot)
        slot.update("TASK_FINISHED")
    assert len(stage.offer(cpus=1)) == 1


def test_a_slot_that_does_not_end_is_killed(begin: Any) -> None:
    stage = begin(trials=1, suspend_timeout_s=5.0)
    slot = stage.offer(cpus=1)[0]
    slot.train()
    stage.search.cancel()
    stage.tick(0.1)
    stage.tick(5 + 10 + 5)
    stage.tick(0.1)
    assert stage.mesos.killed == ["s.slot-0"]


def test_a_silent_slot_is_killed(begin: Any) -> None:
    stage = begin(trials=1)
    slot = stage.offer(cpus=1)[0]
    slot.train()
    stage.tick(SILENCE_S - 1)
    slot.say()
    stage.tick(SILENCE_S - 1)
    assert stage.mesos.killed == []
    stage.tick(2)
    assert stage.mesos.killed == ["s.slot-0"]


def test_tasks_that_are_not_ours_are_ended(begin: Any) -> None:
    stage = begin()
    stage.search.handle(
        events.StatusUpdate({"task_id": {"value": "old"}, "agent_id": {"value": "S0"}, "state": "TASK_RUNNING"})
    )
    assert stage.mesos.killed == ["old"]
