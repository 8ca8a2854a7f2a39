"""A search that shares a service: what it wants, what it gives back, what is asked of its slots again."""

from __future__ import annotations

from typing import Any

import pytest

from dike.exceptions import InfeasibleError
from framework.driver import CallRefusedError, MasterUnavailableError, OffersGoneError
from framework.gathering import NO_OFFER_S
from framework.job_plan import no_agent_meets
from framework.search.fleet import UNSEEN_S
from framework.search.records import TrialState
from framework.search.slots import CONFIRM_S, REPEAT_S
from framework.service.records import JobState
from framework.service.tenant import Need, Vacating
from solver import NodeClass
from tests.search.search_stage import QUANTUM_S, node, stored


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
    key = stage.search.demand_key
    assert key == ("slot", 1.0, 1024.0, None)
    for _ in range(2):
        slot = stage.offer(cpus=1)[0]
        slot.train()
        slot.report(1, 1.0)
        slot.end("failed", message="ValueError: no")
        slot.update("TASK_FINISHED")
    # Now it takes no offers of one agent, which others may.
    assert stage.search.demand_key is None
    stage.tick(301)
    assert stage.search.demand_key == key


def test_slots_on_agents_that_others_need_suspend_their_trials_and_end(begin: Any, storage: str) -> None:
    stage = begin(trials=2)
    assert isinstance(stage.search, Vacating)
    here, there = stage.offer(agents=2, cpus=1)
    for slot in (here, there):
        slot.train()
        slot.report(5, 1.0)
    for _ in range(2):
        stage.search.vacate(frozenset({"S0", "elsewhere"}))
        stage.tick(0.1)
        assert [slot.wanted.leave for slot in (here, there)] == [True, False]
    here.end("suspended", checkpoint="/c/run-0-step-5", step=5)
    here.update("TASK_FINISHED")
    assert stored(storage)[0].state is TrialState.SUSPENDED
    assert stage.search.need is Need.START
    (back,) = stage.offer(cpus=1, first=5)
    assert back.wanted.run.trial.resume_from == "/c/run-0-step-5"


def test_a_trial_that_cannot_be_suspended_keeps_its_slot(begin: Any) -> None:
    stage = begin(trials=1)
    (slot,) = stage.offer(cpus=1)
    slot.train()
    slot.say(preemptible=False)
    assert stage.search.vacatable() == frozenset()
    stage.search.vacate(frozenset({"S0"}))
    stage.tick(0.1)
    assert not slot.wanted.leave
    slot.say(preemptible=True)
    assert stage.search.vacatable() == {slot.slot.task_id}
    stage.search.vacate(frozenset({"S0"}))
    stage.tick(0.1)
    assert slot.wanted.leave
    assert stage.search.vacatable() == {slot.slot.task_id}, "it is ending"


@pytest.mark.parametrize("error", [MasterUnavailableError("gone"), CallRefusedError("HTTP 403")])
def test_what_became_of_slots_that_may_have_been_launched_is_asked(begin: Any, error: Exception) -> None:
    stage = begin(trials=1)

    def fail(*arguments: Any) -> None:
        raise error

    accept, stage.mesos.acceptOffers = stage.mesos.acceptOffers, fail
    (slot,) = stage.offer(cpus=1)
    stage.mesos.acceptOffers = accept
    slot.update("TASK_STAGING")
    assert stage.search.need is Need.NOTHING
    stage.tick(UNSEEN_S + 1)
    assert stage.mesos.reconciled == [{"s.slot-0": "S0"}]
    slot.update("TASK_LOST", source="SOURCE_MASTER")
    assert stage.search.need is Need.START
    assert [new.slot.id for new in stage.offer(cpus=1)] == [1]


def test_slots_whose_offers_were_withdrawn_never_were(begin: Any) -> None:
    stage = begin(trials=1)

    def fail(*arguments: Any) -> None:
        raise OffersGoneError("withdrawn")

    accept, stage.mesos.acceptOffers = stage.mesos.acceptOffers, fail
    assert stage.offer(cpus=1) == []
    assert stage.search.to_state()["slots"] == []
    stage.mesos.acceptOffers = accept
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
        ["s.slot-0"],
        ["s.slot-0", "s.slot-1"],
    ]
    assert [state["next_slot"] for state in seen] == [1, 2]


def test_reports_that_were_lost_on_their_way_are_sent_again(begin: Any, storage: str) -> None:
    stage = begin(trials=1)
    slot = stage.offer(cpus=1)[0]
    slot.train()
    slot.report(1, 1.0)
    stage.tick(2)
    slot.make(2, 0.5)
    slot.report(3, 0.25)
    assert stage.trials[0].step == 1
    stage.tick(REPEAT_S)
    assert slot.wanted.known_reports == ((0, 0, 1),)
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
    stage.tick(CONFIRM_S / 2)
    assert not stage.mesos.messages
    stage.tick(CONFIRM_S)
    assert slot.wanted.known_reports == ((0, 0, 1),)
    stage.mesos.messages.clear()
    stage.tick(CONFIRM_S)
    assert not stage.mesos.messages, "nothing has come since"


def test_a_patient_search_waits_for_agents_that_can_hold_its_slots(begin: Any) -> None:
    stage = begin(nodes=[node("agent-0", 0.5)], patient=True)
    assert stage.offer(cpus=0.5) == []
    assert "--slot-cpus" in stage.watcher.waits[-1]
    with pytest.raises(InfeasibleError):
        begin(nodes=[node("agent-0", 0.5)], name="other").offer(cpus=0.5)


def test_constraints_that_no_agent_meets_are_told(begin: Any) -> None:
    def no_agents() -> list[NodeClass]:
        raise no_agent_meets(["rack:IS:r7"])

    stage = begin(nodes=no_agents, patient=True)
    stage.tick(NO_OFFER_S + 1)
    assert stage.watcher.waits == ["No agent meets --constraint rack:IS:r7."]


def test_how_it_ended_is_told_apart(begin: Any) -> None:
    killed = begin(trials=1)
    killed.offer(cpus=1)
    killed.search.cancel()
    killed.played[0].update("TASK_FINISHED")
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
