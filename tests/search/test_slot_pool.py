"""The slots of a search: launched, given runs, drained, given back to others."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from dike.exceptions import InfeasibleError
from executor.slot_order import SlotOrder
from executor.trial_messages import Usage
from framework.mesos import events
from framework.mesos.driver import CallRefusedError, MasterUnavailableError
from framework.mesos.offers import NO_OFFER_TIMEOUT_S, by_agent
from framework.mesos.tasks import executor_of
from framework.scheduler.agents import no_matching_agent_error
from framework.scheduler.job import RETRY_OFFERS_S, Need, Preemptible
from framework.scheduler.reconciler import INITIAL_RETRY_S
from framework.scheduler.records import JobState
from framework.search.controller import MAX_FAILED_EXECUTORS
from framework.search.records import TrialState
from framework.search.recovery import SearchState
from framework.search.slot_pool import MAX_SILENCE_S, MEASURING_S, slots_on
from framework.search.slots import ACKNOWLEDGE_INTERVAL_S, RESEND_INTERVAL_S
from solver import NodeClass
from tests.search.search_stage import QUANTUM_S, FakeSlot, SearchStage, fail, node, stored


def test_as_many_slots_as_there_are_trials_or_room(begin: Any) -> None:
    stage = begin(trials=3)
    assert len(stage.offer(agents=2, cpus=2)) == 3
    order = SlotOrder.decode(stage.mesos.accepted[0]["data"])
    assert (order.script, order.preload, order.gpu_devices) == ("train.py", ("tensorflow",), ())
    assert stage.mesos.calls[-1] == "suppress"


def executors(stage: SearchStage) -> list[str]:
    return [executor_of(info) for info in stage.mesos.accepted]


def amounts(pieces: Iterable[dict[str, Any]]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for piece in pieces:
        total[piece["name"]] += piece["scalar"]["value"]
    return {name: round(amount, 3) for name, amount in total.items()}


@pytest.mark.parametrize(
    ("gpus", "suspend", "expected"),
    [(0, "auto", [0, 0, 2, 2]), (0, "checkpoint", [0, 1, 2, 3]), (2, "auto", [0, 1, 2, 3])],
)
def test_slots_without_gpus_share_an_executor_on_their_agent(
    begin: Any, gpus: int, suspend: str, expected: list[int]
) -> None:
    stage = begin(trials=4, suspend=suspend)
    stage.offer(agents=2, cpus=2, gpus=gpus)
    assert executors(stage) == [f"s.slot-{number}" for number in expected]


def test_slots_come_and_go_in_an_executor_and_what_it_has_for_itself_counts_once(begin: Any) -> None:
    stage = begin(trials=9)
    first, second = stage.offer(cpus=2)
    own = amounts(stage.mesos.accepted[0]["executor"]["resources"])
    whole = {"cpus": 1.0, "mem": 1024.0}
    part = {name: round(whole[name] - own[name], 3) for name in whole}
    # As much is free as the one that is gone had; Mesos takes no other executor of that id (`FakeMesos`).
    first.update("TASK_FINISHED")
    stage.offer(cpus=part["cpus"])
    assert stage.offer(cpus=part["cpus"]) == []
    second.update("TASK_FINISHED")
    third, fourth = stage.fakes[2], stage.offer(cpus=1)[0]
    assert executors(stage) == ["s.slot-0"] * 4
    assert [amounts(info["resources"]) for info in stage.mesos.accepted] == [part, whole, part, whole]
    assert stage.scheduler.job("s").tasks["s.slot-3"].executor_id == "s.slot-0"
    # No task joins an executor whose slots are to leave, or have left.
    third.slot.request_end()
    fourth.slot.request_end()
    fifth = stage.offer(cpus=1)[0]
    for slot in (third, fourth, fifth):
        slot.update("TASK_FINISHED")
    stage.offer(cpus=1)
    assert executors(stage)[4:] == ["s.slot-4", "s.slot-5"]


def test_slots_of_a_service_before_are_in_their_executors_and_new_ones_begin_another(begin: Any) -> None:
    stage = begin(trials=3)
    stage.offer(cpus=2)
    state = stage.search.to_state()
    slots = SearchState.from_json(state).slots
    assert [slot.executor_id for slot in slots] == ["s.slot-0", "s.slot-0"]
    (agent,) = by_agent([stage.mesos.offer(cpus=1)])
    (new,), _ = slots_on(stage.launch, agent, 0, 2, 1, (), slots, {})
    assert new.executor_id == "s.slot-2"


TERMINATED = {"source": "SOURCE_AGENT", "reason": "REASON_EXECUTOR_TERMINATED", "message": "Executor terminated"}


@pytest.mark.parametrize(
    ("state", "status"),
    [
        ("TASK_DROPPED", TERMINATED),
        ("TASK_FAILED", TERMINATED),
        ("TASK_ERROR", {"source": "SOURCE_MASTER", "reason": "REASON_TASK_INVALID", "message": "Total resources ..."}),
    ],
)
def test_a_slot_that_is_too_late_for_an_executor_starts_another_one(
    begin: Any, state: str, status: dict[str, str]
) -> None:
    stage = begin(nodes=[node("agent-0"), node("agent-1")], trials=2)
    first = stage.offer(cpus=1)[0]
    first.train()
    stage.scheduler.handle(events.OffersArrived((stage.mesos.offer(cpus=1),)))
    stage.tick(1.0)
    late = FakeSlot(stage, stage.search.slots[1])
    late.update(state, **status)
    assert not any("not installed" in note or "launches nothing" in note for note in stage.observer.notes)
    stage.offer(cpus=1)
    assert executors(stage) == ["s.slot-0", "s.slot-0", "s.slot-2"]


@pytest.mark.parametrize("is_seen", [True, False])
def test_the_end_of_an_executor_is_one_failure(begin: Any, is_seen: bool) -> None:
    stage = begin(nodes=[node("agent-0"), node("agent-1"), node("agent-2")], trials=2)
    for attempt in range(MAX_FAILED_EXECUTORS):
        assert not stage.search.done
        stage.scheduler.handle(events.OffersArrived((stage.mesos.offer(attempt, cpus=2),)))
        stage.tick(1.0)
        slots = [FakeSlot(stage, slot) for slot in stage.search.slots]
        assert len({slot.slot.executor_id for slot in slots}) == 1
        if is_seen:
            slots[1].update("TASK_STARTING")
        for slot in slots:
            slot.update("TASK_FAILED", **TERMINATED)
    stage.tick(0.1)
    assert stage.search.done
    assert ("not installed" in stage.search.result.failure) is not is_seen
    left_out = [note for note in stage.observer.notes if "an executor did not start" in note]
    assert len(left_out) == (0 if is_seen else MAX_FAILED_EXECUTORS)


def test_max_slots_bounds_them(begin: Any) -> None:
    stage = begin(trials=4, max_slots=1)
    assert len(stage.offer(agents=2)) == 1


@pytest.mark.parametrize(("suspend", "mem_share"), [("checkpoint", 0.125), ("auto", 0.5)])
def test_a_slot_is_a_gpu_where_there_are_any_with_its_share_of_the_rest(
    begin: Any, suspend: str, mem_share: float
) -> None:
    stage = begin(nodes=[node("agent-0", 8, 2)], trials=4, suspend=suspend)
    slots = stage.offer(cpus=8, gpus=2)
    assert len(slots) == 2
    for info, slot in zip(stage.mesos.accepted, slots, strict=True):
        # Only trials that stay in memory need more of that than they have asked for.
        assert amounts(info["resources"] + info["executor"]["resources"]) == {
            "cpus": 4,
            "mem": mem_share * 8192,
            "gpus": 1,
        }
        # This Mesos isolates GPUs by itself: the slot uses whatever it sees.
        assert SlotOrder.decode(info["data"]).gpu_devices is None
        assert slot.slot.gpu_devices


def test_whether_a_slot_has_a_gpu_is_not_decided_before_there_are_agents(begin: Any) -> None:
    agents: list[NodeClass] = []
    stage = begin(nodes=lambda: list(agents), patient=True)
    stage.tick(NO_OFFER_TIMEOUT_S)
    assert stage.observer.waits == ["No agent is registered with the Mesos master."]
    agents.append(node("agent-0", cpus=8, gpus=2))
    assert all(fake.slot.gpu_devices for fake in stage.offer(cpus=8, gpus=2))


def test_a_slot_that_fits_no_agent_is_refused(begin: Any) -> None:
    stage = begin(nodes=[node("agent-0", 0.5)])
    with pytest.raises(InfeasibleError, match="--slot-cpus"):
        stage.offer(cpus=0.5)


def test_a_lost_message_is_repeated_until_the_slot_has_answered(begin: Any) -> None:
    stage = begin()
    slot = stage.offer(cpus=1)[0]
    stage.mesos.messages.clear()
    stage.tick(RESEND_INTERVAL_S / 2)
    assert not stage.mesos.messages
    stage.tick(RESEND_INTERVAL_S)
    assert slot.wanted.run is not None
    slot.train()
    stage.mesos.messages.clear()
    stage.tick(2 * RESEND_INTERVAL_S)
    assert not stage.mesos.messages


@pytest.mark.slow
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


@pytest.mark.slow
def test_silence_while_the_master_was_away_is_not_held_against_slots(begin: Any) -> None:
    stage = begin(trials=1)
    slot = stage.offer(cpus=1)[0]
    slot.train()
    stage.scheduler.handle(events.Disconnected())
    stage.tick(MAX_SILENCE_S + 10)
    stage.scheduler.handle(events.Subscribed("F", "127.0.0.1:5050"))
    stage.tick(0.1)
    assert stage.mesos.killed == []


def test_an_agent_is_tried_again_after_its_cool_down(begin: Any) -> None:
    stage = begin(nodes=[node("agent-0"), node("agent-1")], trials=1, agent_cooldown_s=100.0)
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
    stage.tick(MAX_SILENCE_S - 1)
    slot.say()
    stage.tick(MAX_SILENCE_S - 1)
    assert stage.mesos.killed == []
    stage.tick(2)
    assert stage.mesos.killed == ["s.slot-0"]


@pytest.mark.slow
def test_tasks_that_are_not_ours_are_ended(begin: Any) -> None:
    stage = begin()
    stage.scheduler.handle(
        events.StatusUpdate({"task_id": {"value": "old"}, "agent_id": {"value": "S0"}, "state": "TASK_RUNNING"})
    )
    stage.tick()
    assert stage.mesos.killed == ["old"]


def test_it_wants_slots_as_long_as_there_is_use_for_more(begin: Any) -> None:
    stage = begin(trials=3, max_slots=2)
    assert stage.search.need is Need.START
    first, second = stage.offer(cpus=2)
    assert stage.search.need is Need.NOTHING
    first.update("TASK_LOST", source="SOURCE_MASTER")
    assert stage.search.need is Need.START
    stage.search.cancel()
    assert stage.search.need is Need.NOTHING
    second.update("TASK_FINISHED")


def test_searches_of_equal_slots_fit_the_same_offers(begin: Any) -> None:
    stage = begin(nodes=[node("agent-0"), node("agent-1")], trials=1)
    key = stage.search.equivalence_class
    assert key == ("slot", 1.0, 1024.0, None)
    for _ in range(2):
        slot = stage.offer(cpus=1)[0]
        slot.train()
        slot.report(1, 1.0)
        slot.end("failed", message="ValueError: no")
        slot.update("TASK_FINISHED")
    # Now it takes no offers of one agent, which others may.
    assert stage.search.equivalence_class is None
    stage.tick(301)
    assert stage.search.equivalence_class == key


def test_slots_on_agents_that_others_need_suspend_their_trials_and_end(begin: Any, storage: str) -> None:
    stage = begin(trials=2)
    assert isinstance(stage.search, Preemptible)
    here, there = stage.offer(agents=2, cpus=1)
    for slot in (here, there):
        slot.train()
        slot.report(5, 1.0)
    for _ in range(2):
        stage.search.preempt(frozenset({"S0", "elsewhere"}))
        stage.tick(0.1)
        assert [slot.wanted.leave for slot in (here, there)] == [True, False]
    here.end("suspended", checkpoint="/c/run-0-step-5", step=5)
    here.update("TASK_FINISHED")
    assert stored(storage)[0].state is TrialState.SUSPENDED
    assert stage.search.need is Need.START
    (back,) = stage.offer(cpus=1, first=5)
    assert back.wanted.run.trial.resume_from == "/c/run-0-step-5"


@pytest.mark.parametrize("reason", ["room", "exclusion"])
def test_of_slots_that_end_together_one_keeps_what_cannot_be_saved(begin: Any, reason: str) -> None:
    stage = begin(nodes=[node("agent-0", 3), node("agent-1")], trials=4)
    slots = stage.offer(cpus=3)
    for slot in slots:
        slot.train()
        slot.report(1, 1.0)
    # The fourth trial is paused, and may resume in any of the slots.
    left = ((3, 0),)
    stage.trials[3].runs, stage.trials[3].state = 1, TrialState.SUSPENDED

    def end_them() -> list[bool]:
        if reason == "room":
            stage.search.preempt(frozenset({"S0"}))
        else:
            stage.search._pool.exclude_agent(slots[0].slot, "it is broken")
        stage.tick(0.1)
        return [slot.wanted.leave for slot in slots]

    slots[0].say(paused=left, unsaved=left)
    slots[1].say(preemptible=False)
    assert stage.search.preemptible_tasks() == {"s.slot-2"}
    slots[1].say(paused=left, unsaved=left, preemptible=True)
    assert stage.search.preemptible_tasks() == {"s.slot-0", "s.slot-2"}
    slots[2].say(paused=left, unsaved=left)
    assert stage.search.preemptible_tasks() == {"s.slot-0", "s.slot-1"}
    for _ in range(2):
        assert end_them() == [True, True, False]
    assert stage.search.preemptible_tasks() == {"s.slot-0", "s.slot-1"}
    slots[2].say(paused=left, unsaved=())
    assert end_them() == [True, True, True]


def test_no_slot_ends_whose_memory_is_needed_for_what_cannot_be_saved(begin: Any) -> None:
    stage = begin(trials=3)
    slots = stage.offer(cpus=2)
    for slot in slots:
        slot.train()
    stage.trials[2].runs, stage.trials[2].state = 1, TrialState.SUSPENDED
    for rss_mib, can_end in ((300, True), (600, False)):
        for slot in slots:
            left = {"paused": ((2, 0),), "unsaved": ((2, 0),), "unsaved_bytes": 400 << 20}
            slot.say(**left, usage=Usage(rss_bytes=rss_mib << 20))
        assert len(stage.search.preemptible_tasks()) == (1 if can_end else 0)


def test_a_trial_that_cannot_be_suspended_keeps_its_slot(begin: Any) -> None:
    stage = begin(trials=1)
    (slot,) = stage.offer(cpus=1)
    slot.train()
    slot.say(preemptible=False)
    assert stage.search.preemptible_tasks() == frozenset()
    stage.search.preempt(frozenset({"S0"}))
    stage.tick(0.1)
    assert not slot.wanted.leave
    slot.say(preemptible=True)
    assert stage.search.preemptible_tasks() == {slot.slot.task_id}
    stage.search.preempt(frozenset({"S0"}))
    stage.tick(0.1)
    assert slot.wanted.leave
    assert stage.search.preemptible_tasks() == {slot.slot.task_id}, "it is ending"


@pytest.mark.parametrize("error", [MasterUnavailableError("gone"), CallRefusedError("HTTP 403")])
def test_what_became_of_slots_that_may_have_been_launched_is_asked(begin: Any, error: Exception) -> None:
    stage = begin(trials=1)

    def fail(*arguments: Any) -> None:
        raise error

    accept, stage.mesos.acceptOffers = stage.mesos.acceptOffers, fail
    stage.scheduler.handle(events.OffersArrived((stage.mesos.offer(cpus=1),)))
    stage.tick(1.0)
    stage.mesos.acceptOffers = accept
    (slot,) = stage.search.slots
    assert stage.search.need is Need.NOTHING
    stage.tick(INITIAL_RETRY_S)
    assert {slot.task_id: "S0"} in stage.mesos.reconciled
    FakeSlot(stage, slot).update("TASK_LOST", source="SOURCE_MASTER")
    assert stage.search.need is Need.START
    assert [new.slot.id for new in stage.offer(cpus=1)] == [1]


def test_slots_are_in_the_state_before_the_master_is_asked_for_them(begin: Any) -> None:
    stage = begin(trials=2)
    seen = []
    accept = stage.mesos.acceptOffers

    def look(*arguments: Any) -> None:
        seen.append(stage.search.to_state())
        accept(*arguments)

    stage.mesos.acceptOffers = look
    stage.offer(agents=2, cpus=1)
    assert [[slot["task_id"] for slot in state["slots"]] for state in seen] == [
        ["s.slot-0", "s.slot-1"],
        ["s.slot-0", "s.slot-1"],
    ]
    assert [state["next_slot"] for state in seen] == [2, 2]


@pytest.mark.slow
def test_reports_that_were_lost_on_their_way_are_sent_again(begin: Any, storage: str) -> None:
    stage = begin(trials=1)
    slot = stage.offer(cpus=1)[0]
    slot.train()
    slot.report(1, 1.0)
    stage.tick(2)
    slot.make(2, 0.5)
    slot.report(3, 0.25)
    assert stage.trials[0].step == 1
    stage.tick(RESEND_INTERVAL_S)
    assert slot.wanted.acknowledged_reports == ((0, 0, 1),)
    slot.send_reports(first=1)
    assert [reading.step for reading in stage.trials[0].readings] == [1, 2, 3]
    slot.make(4, 0.125)
    slot.end("finished")
    assert stage.trials[0].state is TrialState.RUNNING, "its last report is missing"
    slot.say(number=slot.wanted.number)
    slot.send_reports(0, (0, 0))
    slot.say()
    assert stage.trials[0].state is TrialState.FINISHED
    # What came twice counts once.
    assert [reading.step for reading in stored(storage)[0].readings] == [1, 2, 3, 4]


def test_an_end_is_believed_after_a_while_without_its_last_reports(begin: Any) -> None:
    stage = begin(trials=1)
    slot = stage.offer(cpus=1)[0]
    slot.train()
    slot.make(1, 1.0)
    slot.end("finished")
    assert stage.trials[0].state is TrialState.RUNNING
    stage.tick(11)
    slot.say()
    assert stage.trials[0].state is TrialState.FINISHED


def test_a_slot_is_told_now_and_then_what_it_need_not_keep(begin: Any) -> None:
    stage = begin(trials=1)
    slot = stage.offer(cpus=1)[0]
    slot.train()
    slot.report(1, 1.0)
    stage.mesos.messages.clear()
    stage.tick(ACKNOWLEDGE_INTERVAL_S / 2)
    assert not stage.mesos.messages
    stage.tick(ACKNOWLEDGE_INTERVAL_S)
    assert slot.wanted.acknowledged_reports == ((0, 0, 1),)
    stage.mesos.messages.clear()
    stage.tick(ACKNOWLEDGE_INTERVAL_S)
    assert not stage.mesos.messages, "nothing was received since"


def test_a_patient_search_waits_for_agents_that_can_hold_its_slots(begin: Any) -> None:
    stage = begin(nodes=[node("agent-0", 0.5)], patient=True)
    assert stage.offer(cpus=0.5) == []
    assert "--slot-cpus" in stage.observer.waits[-1]
    with pytest.raises(InfeasibleError):
        begin(nodes=[node("agent-0", 0.5)], name="other").offer(cpus=0.5)


@pytest.mark.slow
def test_constraints_that_no_agent_meets_are_told(begin: Any) -> None:
    def no_agents() -> list[NodeClass]:
        raise no_matching_agent_error(["rack:IS:r7"])

    stage = begin(nodes=no_agents, patient=True)
    stage.tick(NO_OFFER_TIMEOUT_S + 1)
    assert stage.observer.waits == ["No agent meets --constraint rack:IS:r7."]


def test_how_it_ended_is_told_apart(begin: Any) -> None:
    killed = begin(trials=1)
    killed.offer(cpus=1)
    killed.search.cancel()
    killed.fakes[0].update("TASK_FINISHED")
    killed.tick(0.1)
    assert killed.search.outcome().state is JobState.KILLED
    failed = begin(trials=1, name="failed", timeout_s=5.0)
    failed.tick(6)
    failed.tick(0.1)
    assert failed.search.outcome().state is JobState.FAILED
    assert "--timeout" in failed.search.outcome().failure
    finished = begin(trials=1, name="finished")
    slot = finished.offer(cpus=1)[0]
    slot.train()
    slot.report(1, 0.5)
    slot.end("finished")
    slot.update("TASK_FINISHED")
    finished.tick(QUANTUM_S)
    outcome = finished.search.outcome()
    assert (outcome.state, outcome.failure) == (JobState.FINISHED, "")
    assert outcome.result is not None
    assert outcome.result["best"]["value"] == 0.5


def gpus_of(stage: SearchStage) -> list[tuple[str, int]]:
    """Agent and device of each slot."""
    return [(slot.agent_id, *slot.gpu_devices) for slot in stage.search.slots]


def test_slots_share_a_gpu_that_their_executor_holds(begin: Any) -> None:
    stage = begin(nodes=[node("agent-0", 8, 2)], trials=9, slots_per_gpu="2")
    first, *others = stage.offer(cpus=8, gpus=2)
    assert gpus_of(stage) == [("S0", 0), ("S0", 1), ("S0", 0), ("S0", 1)]
    assert executors(stage) == ["s.slot-0", "s.slot-1", "s.slot-0", "s.slot-1"]
    for info in stage.mesos.accepted:
        assert "gpus" not in amounts(info["resources"])
        assert amounts(info["executor"]["resources"])["gpus"] == 1
        order = SlotOrder.decode(info["data"])
        assert (order.slots_per_gpu, order.cpus) == (2, 2)
        assert order.environment["TF_FORCE_GPU_ALLOW_GROWTH"] == "true"
    # The GPU stays with the executor, and its next slot has as much of the rest as the last one.
    first.update("TASK_FINISHED")
    assert not stage.offer(cpus=1)
    stage.offer(cpus=2)
    assert executors(stage)[4:] == ["s.slot-0"]
    assert SlotOrder.decode(stage.mesos.accepted[-1]["data"]).cpus == 2
    # A trial that is still leaving uses memory.
    others[0].slot.request_end()
    assert not stage.offer(cpus=2)
    others[0].update("TASK_FINISHED")
    stage.tick(RETRY_OFFERS_S)
    stage.offer(cpus=2)
    assert executors(stage)[5:] == ["s.slot-1"]


def test_few_trials_have_a_gpu_each_before_any_share_one(begin: Any) -> None:
    stage = begin(nodes=[node(f"agent-{n}", 2, 1) for n in range(2)], trials=3, slots_per_gpu="4")
    stage.offer(agents=2, gpus=1)
    assert sorted(slot.agent_id for slot in stage.search.slots) == ["S0", "S0", "S1"]


def test_slots_without_gpus_ignore_how_many_share_one(begin: Any) -> None:
    stage = begin(trials=2, slots_per_gpu="2")
    assert [fake.slot.slots_per_gpu for fake in stage.offer(cpus=2)] == [1, 1]
    assert stage.observer.notes == ["the slots have no GPU, so --slots-per-gpu has no effect"]
    assert stage.search.slots[0].executor_id == stage.search.slots[1].executor_id


@pytest.mark.parametrize(
    ("model", "used", "expected", "note"),
    [
        (
            "V100",
            3 * 2**30,
            4,
            "4 slots share each GPU from now on: the first trials use up to 3.0 GiB of its 16.0 GiB",
        ),
        ("V100", 9 * 2**30, 1, "each slot has a GPU of its own: the first trials use up to 9.0 GiB of its 16.0 GiB"),
        ("V100", None, 1, "--slots-per-gpu auto leaves one slot per GPU, because the GPU memory of trials is unknown"),
        (
            "",
            3 * 2**30,
            1,
            "--slots-per-gpu auto leaves one slot per GPU, because the memory of this model of GPU (gpu_model) is "
            "unknown",
        ),
    ],
)
def test_the_first_trials_tell_how_many_share_a_gpu(
    begin: Any, model: str, used: int | None, expected: int, note: str
) -> None:
    stage = begin(nodes=[node("agent-0", 8, 1)], trials=9, slots_per_gpu="auto")
    (first,) = stage.offer(cpus=8, gpus=1, gpu_model=model)
    first.train()
    first.say(usage=Usage(gpu_mem_bytes=used))
    stage.tick(MEASURING_S - 1)
    assert note not in stage.observer.notes
    stage.tick(1)
    assert stage.observer.notes.count(note) == 1
    assert first.slot.leaving == (expected > 1)
    if expected == 1:
        return
    stage.tick(1)
    first.end("suspended", checkpoint="trial-0/run-0-step-5", step=5)
    first.update("TASK_FINISHED")
    new = stage.offer(cpus=8, gpus=1, gpu_model=model)
    assert len(new) == expected
    assert {fake.slot.executor_id for fake in new} == {"s.slot-1"}
    resumed = [fake.wanted.run for fake in new]
    assert "trial-0/run-0-step-5" in [run.trial.resume_from for run in resumed if run is not None]


def test_the_end_of_a_trial_tells_it_at_once(begin: Any) -> None:
    stage = begin(nodes=[node("agent-0", 8, 1)], trials=9, slots_per_gpu="auto")
    (first,) = stage.offer(cpus=8, gpus=1, gpu_model="V100")
    first.train()
    first.end("finished", usage=Usage(gpu_mem_bytes=6 * 2**30))
    assert any(note.startswith("2 slots share each GPU") for note in stage.observer.notes)


def test_a_suspended_trial_does_not_tell_how_many_share_a_gpu(begin: Any) -> None:
    stage = begin(nodes=[node("agent-0", 8, 1)], trials=9, slots_per_gpu="auto")
    (first,) = stage.offer(cpus=8, gpus=1, gpu_model="V100")
    first.train()
    first.end("suspended", checkpoint="trial-0/run-0-step-5", step=5, usage=Usage(gpu_mem_bytes=2**30))
    assert stage.observer.notes == []


def test_a_slot_of_before_that_cannot_end_shares_its_gpu_with_none(begin: Any) -> None:
    stage = begin(nodes=[node("agent-0", 8, 2)], trials=9, slots_per_gpu="auto")
    first, second = stage.offer(cpus=8, gpus=2, gpu_model="V100")
    for slot in (first, second):
        slot.train()
    first.say(preemptible=False, usage=Usage(gpu_mem_bytes=3 * 2**30))
    stage.tick(MEASURING_S)
    assert (first.slot.leaving, second.slot.leaving) == (False, True)
    stage.tick(1)
    second.end("suspended", checkpoint="trial-1/run-0-step-5", step=5)
    second.update("TASK_FINISHED")
    new = stage.offer(cpus=4, gpus=1, gpu_model="V100")
    assert [fake.slot.executor_id for fake in new] == ["s.slot-2"] * 4
    assert not {fake.slot.gpu_devices for fake in new} & {first.slot.gpu_devices}


def test_a_slot_of_a_failed_trial_is_replaced_on_the_same_gpu(begin: Any) -> None:
    stage = begin(nodes=[node("agent-0", 8, 1)], trials=3, slots_per_gpu="2")
    first, second = stage.offer(cpus=8, gpus=1)
    second.train()
    fail(stage, first)
    assert first.slot.leaving
    first.update("TASK_FINISHED")
    stage.offer(cpus=4)
    assert executors(stage) == ["s.slot-0"] * 3


def test_a_new_service_launches_slots_into_the_executors_that_have_the_gpus(begin: Any) -> None:
    stage = begin(nodes=[node("agent-0", 8, 1)], trials=9, slots_per_gpu="2")
    stage.offer(cpus=8, gpus=1)
    state = SearchState.from_json(json.loads(json.dumps(stage.search.to_state())))
    assert state.executors == {"s.slot-0": stage.mesos.accepted[0]["executor"]}
    (agent,) = by_agent([stage.mesos.offer(cpus=4)])
    (new,), _ = slots_on(stage.launch, agent, 1, 2, 1, (), state.slots[:1], state.executors, 2)
    assert (new.executor_id, new.gpu_devices, new.cpus) == ("s.slot-0", (0,), 4)


def test_machines_are_asked_for_by_the_gpu(begin: Any) -> None:
    stage = begin(nodes=[node("agent-0", 8, 1)], trials=9, slots_per_gpu="2")
    stage.offer(cpus=8, gpus=1)
    assert stage.search.missing_tasks() == 4


def test_a_new_service_keeps_how_many_share_a_gpu(begin: Any) -> None:
    stage = begin(nodes=[node("agent-0", 8, 1)], trials=9, slots_per_gpu="2")
    stage.offer(cpus=8, gpus=1)
    slots = SearchState.from_json(stage.search.to_state()).slots
    assert [(slot.slots_per_gpu, slot.cpus, slot.mem_mib) for slot in slots] == [(2, 4, 4096)] * 2
