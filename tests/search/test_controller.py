"""A search from its first slot to its last trial: what it decides, how runs and slots end, what it does about it."""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path
from typing import Any

import optuna
import pytest

from dike.exceptions import BadInputError
from dike.trial.spec import TrialSpec
from executor.slot_order import SlotOrder
from executor.trial_messages import Losses, RunEnd, RunKey, SlotStatus, TrialRun, Usage
from framework.mesos import events
from framework.policies.trials.interface import Choice
from framework.search.controller import MAX_FAILED_EXECUTORS
from framework.search.optuna_study import Study
from framework.search.records import MAX_FAILURES, Parameter, SearchOutcome, TrialRecord, TrialState, trials_to_resume
from framework.search.recovery import SearchState, restore_runs
from framework.search.slots import ActiveRun, Slot, prefer_paused
from framework.search.store import Store
from framework.search.trials import MAX_LOST_RUNS, TrialTracker, trial_arguments
from tests.search.search_stage import QUANTUM_S, FakeSlot, SearchStage, fail, node, search_spec, stored


def suspend_in_memory_alone(slot: FakeSlot, *others: RunKey) -> None:
    """The run in a slot, which cannot be saved, stays there."""
    key = slot.key
    slot.status = dataclasses.replace(slot.status, paused=(*others, key), unsaved=(*others, key), pausable=False)
    slot.end("suspended", suspend_s=0.1)


def train_unsaved(slot: FakeSlot) -> RunKey:
    run = slot.wanted.run
    assert run is not None
    left = tuple(key for key in slot.status.unsaved if key[0] != run.key[0])
    status = {"training": True, "preemptible": False, "pausable": True, "paused": left, "unsaved": left}
    slot.say(number=slot.wanted.number, run=run.key, **status)
    slot.stage.tick()
    return run.key


def test_an_unsaved_trial_resumes_where_it_is_paused(begin: Any, storage: str) -> None:
    stage = begin(trials=3, policy="rr")
    first, second = stage.offer(cpus=2)
    assert (train_unsaved(first), train_unsaved(second)) == ((0, 0), (1, 0))
    first.report(1, 2.0)
    stage.tick(QUANTUM_S + 0.1)
    # The third trial is next in one of the slots; the trial that ran there is paused.
    assert first.wanted.run.key == (2, 0)
    suspend_in_memory_alone(first)
    assert stored(storage)[0].state is TrialState.SUSPENDED
    train_unsaved(first)
    first.report(1, 1.0)
    # The other slot is free, and it is not its own.
    second.end("finished")
    stage.tick(QUANTUM_S + 0.1)
    assert second.wanted.run is None
    assert first.wanted.run.key == (0, 1)
    assert first.wanted.evict == ()
    suspend_in_memory_alone(first, (0, 0))
    assert train_unsaved(first) == (0, 1)
    # No slot is ended for others in which it would lose all that it has done, be it before its next step.
    assert first.slot.task_id not in stage.search.preemptible_tasks()
    assert second.slot.task_id in stage.search.preemptible_tasks()


def test_an_unsaved_trial_resumes_in_any_slot_that_has_its_process(begin: Any) -> None:
    stage = begin(trials=3, policy="rr")
    first, second = stage.offer(cpus=2)
    train_unsaved(first)
    train_unsaved(second)
    stage.tick(QUANTUM_S + 0.1)
    assert first.wanted.run.key == (2, 0)
    suspend_in_memory_alone(first)
    train_unsaved(first)
    second.end("finished")
    # The other slot reports a moment later that it can continue the trial, too.
    assert second.wanted.run is None
    second.say(paused=((0, 0),), unsaved=((0, 0),))
    stage.tick(0.1)
    assert second.wanted.run.key == (0, 1)
    assert (first.wanted.evict, second.wanted.evict) == ((), ())
    train_unsaved(second)
    first.say(paused=(), unsaved=())
    # It is paused again, and its former slot is lost.
    second.say(run=None, training=False)
    suspended = RunEnd(0, 1, "suspended", suspend_s=0.1)
    for slot in (first, second):
        slot.say(paused=((0, 1),), unsaved=((0, 1),), ends=(suspended,) if slot is second else ())
    second.update("TASK_FAILED", message="its process was killed")
    first.end("finished")
    stage.tick(0.1)
    assert first.wanted.run.key == (0, 2)
    assert not any("anew" in note for note in stage.observer.notes)


def test_a_trial_whose_process_is_gone_and_that_could_not_be_saved_begins_anew(begin: Any) -> None:
    stage = begin(trials=2, policy="rr", max_slots=1)
    (slot,) = stage.offer(cpus=1)
    train_unsaved(slot)
    slot.report(7, 2.0)
    stage.tick(QUANTUM_S + 0.1)
    suspend_in_memory_alone(slot)
    train_unsaved(slot)
    slot.say(paused=(), unsaved=())
    stage.tick(QUANTUM_S + 0.1)
    order = slot.wanted.run
    assert (order.key, order.trial.resume_from) == ((0, 1), None)
    assert "trial 0 starts anew: its paused process is gone, and it has no checkpoint" in stage.observer.notes
    suspend_in_memory_alone(slot)
    train_unsaved(slot)
    slot.report(1, 3.0)
    assert stage.trials[0].step == 1


@pytest.mark.slow
def test_a_run_is_written_down_before_its_slot_is_told(begin: Any, storage: str) -> None:
    stage = begin()
    send = stage.mesos.sendFrameworkMessage
    seen = []

    def look(executor_id: Any, agent_id: Any, data: str) -> None:
        seen.append(stored(storage)[0])
        send(executor_id, agent_id, data)

    stage.mesos.sendFrameworkMessage = look
    stage.offer(cpus=1)
    assert (seen[0].state, seen[0].runs, seen[0].slot) == (TrialState.RUNNING, 1, 0)


def test_parameters_become_flags_after_the_common_arguments(begin: Any) -> None:
    slot = begin().offer(cpus=1)[0]
    assert slot.wanted.run.arguments == ("--epochs", "2", "--lr=0.1")
    assert slot.wanted.run.trial.parameters == {"lr": 0.1}
    assert slot.wanted.run.trial.resume_from is None


def test_a_suspended_trial_resumes_from_its_checkpoint(begin: Any, storage: str) -> None:
    stage = begin(trials=2, policy="rr")
    slot = stage.offer(cpus=1)[0]
    assert slot.train() == (0, 0)
    slot.report(5, 2.0)
    stage.tick(QUANTUM_S + 0.1)
    assert slot.wanted.run.key == (1, 0)
    slot.end("suspended", checkpoint="/c/run-0-step-5", step=5, suspend_s=0.2)
    assert stage.trials[0].state is TrialState.SUSPENDED
    assert slot.train() == (1, 0)
    slot.report(4, 1.0)
    stage.tick(QUANTUM_S + 0.1)
    assert slot.wanted.run.key == (0, 1)
    assert slot.wanted.run.trial.resume_from == "/c/run-0-step-5"
    assert slot.wanted.acknowledged_ends == ((0, 0),)
    record = stored(storage)[0]
    assert (record.state, record.checkpoint, record.checkpoint_step) == (TrialState.RUNNING, "/c/run-0-step-5", 5)
    store = Store(storage)
    store.open_search("s")
    first = store.load_slices()[0]
    assert (first.trial, first.outcome, first.suspend_s, first.to_step, first.rss_bytes) == (
        0,
        "suspended",
        0.2,
        5,
        1000,
    )
    store.close()


def test_a_trial_paused_in_memory_continues_there_and_its_slice_says_so(begin: Any) -> None:
    stage = begin(trials=2, policy="rr")
    slot = stage.offer(cpus=1)[0]
    assert slot.wanted.memory_bytes == 1024 * 2**20
    slot.train()
    slot.report(5, 2.0)
    stage.tick(QUANTUM_S + 0.1)
    slot.end("suspended", checkpoint="/c/run-0-step-5", step=5, suspend_s=0.1)
    slot.say(paused=((0, 0),))
    slot.train()
    slot.report(4, 1.0)
    stage.tick(QUANTUM_S + 0.1)
    # The one that stays there is wanted again: it is not let go.
    assert (slot.wanted.run.key, slot.wanted.evict) == ((0, 1), ())
    slot.say(paused=((0, 0), (1, 0)))
    slot.end("suspended", checkpoint="/c/run-0-step-4", step=4, suspend_s=0.1)
    slot.say(paused=((1, 0),), continued=True)
    slot.train()
    assert [(piece.trial, piece.run, piece.process, piece.from_step) for piece in stage.store.load_slices()] == [
        (0, 0, "new", 0),
        (1, 0, "new", 0),
        (0, 1, "continued", 5),
    ]
    # The trial that has waited longest is the most likely to resume.
    slot.report(5, 0.5)
    stage.tick(QUANTUM_S + 0.1)
    assert (slot.wanted.run.key, slot.wanted.evict, slot.wanted.resume_order) == ((1, 1), (), ((1, 0),))


@pytest.mark.parametrize(
    ("stay", "freed", "chosen"),
    [
        ([[(0, 0)], [(1, 0)]], 1, 1),
        ([[], []], 1, 0),
        ([[(0, 0), (1, 0)], [(0, 0), (1, 0)]], 1, 0),
        ([[(1, 0)], [(0, 0), (1, 0)]], 0, 1),
    ],
)
def test_the_policy_gets_the_slots_of_paused_processes(
    begin: Any, stay: list[list[RunKey]], freed: int, chosen: int
) -> None:
    stage = begin(trials=4, policy="dike")
    slots = stage.offer(cpus=2)
    for slot, loss in zip(slots, (2.0, 2.0005), strict=True):
        slot.train()
        slot.report(5, 5.0)
        slot.report(10, loss)
    stage.tick(QUANTUM_S + 0.1)
    for slot in slots:
        slot.end("suspended", checkpoint=f"/c/run-{slot.key[0]}-step-10", step=10)
        slot.train()
    for slot, keys in zip(slots, stay, strict=True):
        slot.say(paused=tuple(keys))
    assert [slot.key for slot in slots] == [(3, 0), (2, 0)]
    # Trial 0 is a little ahead, but its process may be paused only in the other slot.
    slots[freed].end("finished")
    assert slots[freed].wanted.run.key == (chosen, 1)
    stage.tick()


def test_a_paused_process_without_use_is_evicted(begin: Any) -> None:
    stage = begin(trials=2, policy="rr", stop="threshold=3")
    first = stage.offer(cpus=1)[0]
    first.train()
    first.report(5, 2.0)
    stage.tick(QUANTUM_S + 0.1)
    first.end("suspended", checkpoint="/c/run-0-step-5", step=5)
    first.say(paused=((0, 0),))
    first.train()
    (second,) = stage.offer(cpus=1, first=1)
    # It is to resume in another slot, which might take over its process, but does not.
    assert second.wanted.run.key == (0, 1)
    stage.tick(5.0)
    assert first.wanted.evict == ()
    second.train()
    assert first.wanted.evict == ((0, 0),)
    assert first.wanted.run.key == (1, 0)
    number = first.wanted.number
    stage.tick(5.0)
    first.say(number=number, paused=())
    stage.tick(5.0)
    assert first.wanted.number == number


def test_what_a_stopped_trial_has_left_is_let_go_in_every_slot_that_lists_it(begin: Any) -> None:
    stage = begin(trials=3, policy="rr", stop="threshold=3")
    slots = stage.offer(cpus=2)
    for slot in slots:
        slot.train()
        slot.report(5, 2.0)
    stage.tick(QUANTUM_S + 0.1)
    slots[0].made[0, 0].append({**slots[0].made[0, 0][0], "value": 4.0, "values": [[1, 5, 4.0]]})
    slots[0].end("suspended", checkpoint="/c/run-0-step-5", step=5)
    for slot in slots:
        slot.say(paused=((0, 0),))
    stage.tick(0.1)
    assert [slot.wanted.evict for slot in slots] == [(), ()]
    slots[0].send_reports(1, (0, 0))
    slots[0].say()
    assert stage.trials[0].state is TrialState.STOPPED
    stage.tick(0.1)
    assert [slot.wanted.evict for slot in slots] == [((0, 0),)] * 2


@pytest.mark.parametrize(
    ("suspend", "gpus", "stays"),
    [("checkpoint", 0, False), ("checkpoint", 1, False), ("auto", 1, True), ("memory", 1, True)],
)
def test_slots_are_told_whether_suspended_processes_stay(begin: Any, suspend: str, gpus: int, stays: bool) -> None:
    stage = begin(suspend=suspend)
    (slot,) = stage.offer(cpus=1, gpus=gpus)
    assert (slot.wanted.memory_bytes > 0) == stays
    order = SlotOrder.decode(stage.mesos.accepted[-1]["data"])
    # What they hold on a GPU is moved, so it should not be all of it.
    assert ("TF_FORCE_GPU_ALLOW_GROWTH" in order.environment) == stays


def slot_with(number: int, holds: int | None = None, paused: tuple[RunKey, ...] = (), kind: str = "") -> Slot:
    slot = Slot(number, f"s{number}", "a", "a", "", kind=kind, status=SlotStatus(f"s{number}", paused=paused))
    if holds is not None:
        order = TrialRun(TrialSpec("s", holds, 0, {}, "/c"))
        slot.current = ActiveRun(TrialRecord(holds, {}, runs=1), order, Choice(holds, ""))
    return slot


@pytest.mark.parametrize(
    ("slots", "wanted", "given"),
    [
        # Its own slot is empty, or is for a trial that is paused nowhere, or in the other slot.
        ([slot_with(0), slot_with(1, paused=((7, 2),))], {0: 7}, {1: 7}),
        ([slot_with(0), slot_with(1, paused=((7, 2),))], {0: 7, 1: 8}, {0: 8, 1: 7}),
        ([slot_with(0, paused=((8, 2),)), slot_with(1, paused=((7, 2),))], {0: 7, 1: 8}, {0: 8, 1: 7}),
        # It is there; or the other is.
        ([slot_with(0, paused=((7, 2),)), slot_with(1)], {0: 7, 1: 8}, {0: 7, 1: 8}),
        ([slot_with(0), slot_with(1, paused=((7, 2), (8, 2)))], {0: 7, 1: 8}, {0: 7, 1: 8}),
        # Another trial runs in its slot, and continues there.
        ([slot_with(0), slot_with(1, holds=9, paused=((7, 2),))], {0: 7}, {0: 7}),
        ([slot_with(0), slot_with(1, holds=9, paused=((7, 2),))], {0: 7, 1: 9}, {0: 7, 1: 9}),
        # It is to run on something else.
        ([slot_with(0, kind="v100"), slot_with(1, paused=((7, 2),))], {0: 7}, {0: 7}),
        ([slot_with(0), slot_with(1, paused=((7, 2),)), slot_with(2)], {2: 7, 1: 8, 0: 9}, {1: 7, 2: 8, 0: 9}),
        # It is paused in several slots: it gets the one that it was given, or the first one that is free.
        ([slot_with(0, paused=((7, 2),)), slot_with(1, paused=((7, 2),))], {1: 7}, {1: 7}),
        (
            [slot_with(0), slot_with(1, holds=9, paused=((7, 2),)), slot_with(2, paused=((7, 2),))],
            {0: 7, 2: 8},
            {0: 8, 2: 7},
        ),
        (
            [slot_with(0), slot_with(1, paused=((7, 2), (8, 2))), slot_with(2, paused=((7, 2), (8, 2)))],
            {0: 7, 1: 8},
            {1: 8, 2: 7},
        ),
    ],
)
def test_a_trial_is_given_the_slot_where_its_process_is_paused(
    slots: list[Slot], wanted: dict[int, int], given: dict[int, int]
) -> None:
    paused_in = {trial: [slot.id for slot in slots if (trial, 2) in slot.paused] for trial in (7, 8)}
    runs = {slot: Choice(trial, "") for slot, trial in wanted.items()}
    found = prefer_paused(runs, {slot.id: slot for slot in slots}, paused_in)
    assert {slot: choice.trial for slot, choice in found.items()} == given


def test_a_trial_does_not_resume_from_a_paused_older_run(begin: Any) -> None:
    stage = begin(trials=3, policy="rr")
    first, second = stage.offer(cpus=2)
    first.train()
    second.train()
    second.report(1, 1.0)
    for step, following in enumerate([(2, 0), (0, 1), (2, 1)], 1):
        first.report(step, 1.0)
        stage.tick(QUANTUM_S + 0.1)
        first.end("suspended", checkpoint=f"/c/{step}", step=step)
        assert first.train() == following
    first.say(paused=((0, 0),))
    second.say(paused=((0, 1),))
    stage.tick(QUANTUM_S + 0.1)
    assert stage.views[0].paused_in == {second.slot.id}


def test_the_next_run_waits_until_the_slot_is_free(begin: Any) -> None:
    stage = begin(trials=2, policy="rr")
    slot = stage.offer(cpus=1)[0]
    slot.train()
    slot.report(5, 2.0)
    stage.tick(QUANTUM_S + 0.1)
    assert slot.slot.current.record.number == 0
    assert slot.slot.view().busy
    stage.tick(5 * QUANTUM_S)
    assert slot.slot.next.record.number == 1
    slot.end("suspended", checkpoint="/c/a", step=5)
    assert slot.slot.current.record.number == 1


def test_a_run_that_its_slot_never_heard_of_is_given_out_again(begin: Any) -> None:
    stage = begin(trials=1)
    slot = stage.offer(cpus=1)[0]
    assert slot.wanted.run.key == (0, 0)
    stage.search.cancel()
    stage.tick(0.1)
    # The slot hears only the last wish: hold nothing and leave.
    slot.say(number=slot.wanted.number)
    assert stage.trials[0].state is TrialState.WAITING
    slot.update("TASK_FINISHED")
    stage.tick(0.1)
    assert stage.search.done


def test_a_trial_that_was_next_in_a_slot_that_is_to_end_is_given_out_again(begin: Any) -> None:
    stage = begin(trials=2, max_slots=1, policy="rr")
    slot = stage.offer(cpus=1)[0]
    slot.train()
    slot.report(5, 1.0)
    stage.tick(QUANTUM_S + 0.1)
    assert slot.wanted.run.key == (1, 0)
    stage.search.preempt(frozenset({slot.slot.agent_id}))
    stage.tick(0.1)
    slot.end("suspended", checkpoint="/c/a", step=5)
    slot.say(number=slot.wanted.number)
    assert [stage.trials[number].state for number in range(2)] == [TrialState.SUSPENDED, TrialState.WAITING]
    slot.update("TASK_FINISHED")
    again = stage.offer(cpus=1)[0]
    assert again.wanted.run is not None


@pytest.mark.slow
def test_what_the_study_has_not_heard_of_is_told_on_resumption(begin: Any, tmp_path: Path, storage: str) -> None:
    stage = begin(trials=1)
    slot = stage.offer(cpus=1)[0]
    slot.train()
    slot.report(8, 1.0)
    # Killed between writing the record and reporting to Optuna.
    record = stage.trials[0]
    record.state = TrialState.FINISHED
    stage.store.save_trial(record)
    resumed = SearchStage(search_spec(tmp_path, trials=1), storage, records=list(stored(storage).values()))
    assert resumed.tracker.open == []
    study = optuna.load_study(study_name="s", storage=storage)
    assert study.trials[0].state is optuna.trial.TrialState.COMPLETE


def test_cancel_suspends_everything(begin: Any) -> None:
    stage = begin(trials=2)
    slots = stage.offer(cpus=2)
    for slot in slots:
        slot.train()
        slot.report(3, 1.0)
    stage.search.cancel()
    stage.tick(0.1)
    for slot in slots:
        assert slot.wanted.leave
        assert slot.wanted.run is None
        slot.end("suspended", checkpoint="/c/x", step=3)
        slot.update("TASK_FINISHED")
    stage.tick(0.1)
    assert stage.search.done
    assert {record.state for record in stage.trials.values()} == {TrialState.SUSPENDED}


def test_the_timeout_ends_the_search(begin: Any) -> None:
    stage = begin(trials=1, timeout_s=50.0)
    slot = stage.offer(cpus=1)[0]
    slot.train()
    stage.tick(51)
    assert slot.wanted.leave
    assert "--timeout" in stage.search.result.failure


def test_a_used_up_budget_ends_the_search_and_a_greater_one_continues_it(
    begin: Any, tmp_path: Path, storage: str
) -> None:
    stage = begin(trials=1, budget="0.01cpuh")
    slot = stage.offer(cpus=1)[0]
    slot.train()
    stage.tick(35)
    assert not slot.wanted.leave
    stage.tick(2)
    assert slot.wanted.leave
    slot.end("suspended", checkpoint="/c/x", step=3)
    slot.update("TASK_FINISHED")
    stage.tick(0.1)
    assert stage.search.result.failure == "the search has used its budget of 0.01cpuh; continue with a greater --budget"
    for budget, is_left in (("0.01cpuh", False), ("0.02cpuh", True)):
        records = list(stored(storage).values())
        resumed = SearchStage(search_spec(tmp_path, trials=1, budget=budget), storage, records=records)
        resumed.offer(cpus=1)
        resumed.tick(1)
        assert resumed.search.result.failure == ("" if is_left else stage.search.result.failure)


def test_waiting_in_a_queue_does_not_count(begin: Any) -> None:
    stage = begin(trials=1, timeout_s=50.0, patient=True)
    alike = stage.search.equivalence_class
    stage.tick(60)
    slot = stage.offer(cpus=1)[0]
    slot.train()
    stage.tick(40)
    assert not slot.wanted.leave
    assert SearchState.from_json(stage.search.to_state()).first_slot_s == pytest.approx(1e9 + stage.now - 40, abs=0.5)
    # It may have to wait again, for another slot; its time is up whether or not others like it are looked after.
    assert stage.search.equivalence_class != alike
    slot.update("TASK_LOST")
    stage.tick(11)
    assert "--timeout" in stage.search.result.failure


def test_an_interrupted_search_resumes(begin: Any, tmp_path: Path, storage: str) -> None:
    stage = begin(trials=3)
    first, second = stage.offer(cpus=2)
    for slot in (first, second):
        slot.train()
        slot.report(8, 1.0)
    first.end("finished")
    second.say(checkpoint="/c/run-0-step-6", checkpoint_step=6)
    stage.tick(2)
    # The process is killed here: nothing more is written.
    asked = {number: {"lr": round(0.1 * (number + 1), 1)} for number in range(3)}
    records = trials_to_resume(list(stored(storage).values()), asked)
    assert [record.state for record in records] == [TrialState.FINISHED, TrialState.SUSPENDED, TrialState.WAITING]
    resumed = SearchStage(search_spec(tmp_path, trials=3), storage, records=records)
    slot = resumed.offer(cpus=1)[0]
    assert slot.wanted.run.key == (1, 1)
    assert slot.wanted.run.trial.resume_from == "/c/run-0-step-6"
    assert set(resumed.trials) == {0, 1, 2}
    assert [reading.step for reading in resumed.trials[1].readings] == [8]
    slot.train()
    slot.report(7, 9.0)
    slot.report(9, 0.5)
    # What is trained again is not counted again.
    assert [reading.step for reading in resumed.trials[1].readings] == [8, 9]


def test_the_last_words_of_a_slot_are_heard(begin: Any) -> None:
    stage = begin(trials=1)
    slot = stage.offer(cpus=1)[0]
    slot.train()
    slot.report(9, 0.5)
    end = RunEnd(0, 0, "finished", last={"step": 9, "train_s": 9.0, "value": 0.5})
    last = dataclasses.replace(slot.status, run=None, ends=(end,))
    slot.update("TASK_FINISHED", data=last.encode())
    assert stage.trials[0].state is TrialState.FINISHED


@pytest.mark.slow
def test_an_end_that_is_repeated_counts_once(begin: Any) -> None:
    stage = begin(trials=2)
    slot = stage.offer(cpus=1)[0]
    slot.train()
    slot.report(1, 1.0)
    slot.end("failed", message="boom")
    for _ in range(3):
        slot.say()
    assert stage.trials[0].failures == 1


def test_failures_cost_first_the_executor_then_the_agent_then_the_trial(begin: Any) -> None:
    stage = begin(nodes=[node("agent-0"), node("agent-1")], trials=1, agent_cooldown_s=100.0)
    slot = stage.offer(cpus=1)[0]
    fail(stage, slot)
    assert slot.wanted.leave
    slot.update("TASK_FINISHED")
    slot = stage.offer(cpus=1)[0]
    fail(stage, slot)
    slot.update("TASK_FINISHED")
    assert any("launches nothing on agent agent-0 for 100 s" in note for note in stage.observer.notes)
    assert stage.offer(cpus=1) == []
    slot = stage.offer(cpus=1, first=1)[0]
    fail(stage, slot)
    assert stage.trials[0].state is TrialState.FAILED
    assert stage.trials[0].failures == MAX_FAILURES
    assert "Traceback" in stage.trials[0].error
    slot.update("TASK_FINISHED")
    stage.tick(0.1)
    assert stage.search.done


def test_a_trial_that_has_failed_is_tried_in_another_executor(begin: Any) -> None:
    stage = begin(trials=3, policy="rr")
    first, second = stage.offer(cpus=2)
    second.train()
    second.report(1, 1.0)
    fail(stage, first)
    # As long as there is no other it would have to do.
    assert stage.views[0].refused == frozenset()
    first.update("TASK_FINISHED")
    other = stage.offer(cpus=1)[0]
    assert other.slot.executor_id != second.slot.executor_id == first.slot.executor_id
    assert stage.views[0].refused == {second.slot.id}
    # After it has trained again, it may run in any slot.
    assert other.train() == (0, 1)
    stage.tick(QUANTUM_S + 0.1)
    assert stage.views[0].refused == frozenset()


def test_a_slot_is_not_ended_for_others_if_an_unsaved_trial_is_next_in_it(begin: Any) -> None:
    stage = begin(trials=3, policy="rr")
    first, second = stage.offer(cpus=2)
    train_unsaved(first)
    second.train()
    stage.tick(QUANTUM_S + 0.1)
    assert first.wanted.run.key == (2, 0)
    suspend_in_memory_alone(first)
    first.train()
    second.say(paused=((0, 0),), unsaved=((0, 0),))
    first.say(preemptible=False)
    assert stage.search.preemptible_tasks() == {second.slot.task_id}
    # The unsaved one is next in the second slot, whose run is being saved.
    stage.search._start(second.slot, Choice(0, "its turn"))
    assert second.slot.next is not None
    assert not stage.search.preemptible_tasks()


def test_a_slot_that_was_meant_for_an_executor_that_had_ended_may_get_another_one(begin: Any) -> None:
    stage = begin(trials=3)
    (first,) = stage.offer(cpus=1)
    first.train()
    stage.scheduler.handle(events.OffersArrived((stage.mesos.offer(cpus=1),)))
    stage.tick(1.0)
    late = FakeSlot(stage, stage.search.slots[1])
    assert late.slot.executor_id == first.slot.executor_id
    first.update("TASK_FAILED", reason="REASON_EXECUTOR_TERMINATED", message="its executor ended")
    late.update("TASK_RUNNING")
    assert late.slot.is_up
    assert late.wanted.run is not None


def traceback(error: str) -> str:
    return f'Traceback (most recent call last):\n  File "train.py", line 1, in <module>\n{error}\n'


@pytest.mark.parametrize("error", ["TypeError: no", "NameError: no"])
def test_a_mistake_before_the_first_step_is_not_tried_again(begin: Any, error: str) -> None:
    stage = begin(nodes=[node("agent-0"), node("agent-1")], trials=1)
    slot = stage.offer(cpus=1)[0]
    slot.train()
    slot.end("failed", exit_code=1, message=error, tail=traceback(error), log="/c/run-0.log")
    assert (stage.trials[0].state, stage.trials[0].runs) == (TrialState.FAILED, 1)
    assert error in stage.trials[0].error
    assert stage.observer.notes == [
        f"trial 0 failed on agent-0: {error}; its output: dike logs s --trial 0 --storage X; the end of it is also in "
        "/c/run-0.log; Dike does not retry it: it would fail in the same way again"
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("agents", "errors", "is_over"),
    [
        ((0, 1), ("ValueError: no", "ValueError: no"), True),
        ((0, 0), ("ValueError: no", "ValueError: no"), False),
        ((0, 1), ("ValueError: no", "ValueError: not now"), False),
        ((0, 1), ("ConnectionResetError: no", "ConnectionResetError: no"), False),
    ],
)
def test_the_same_error_on_another_agent_is_not_tried_again(
    begin: Any, agents: tuple[int, int], errors: tuple[str, str], is_over: bool
) -> None:
    stage = begin(nodes=[node("agent-0"), node("agent-1")], trials=1)
    for agent, error in zip(agents, errors, strict=True):
        slot = stage.offer(cpus=1, first=agent)[0]
        slot.train()
        slot.report(1, 1.0)
        slot.end("failed", exit_code=1, message=error, tail=traceback(error))
        slot.update("TASK_FINISHED")
    assert (stage.trials[0].state is TrialState.FAILED) == is_over


@pytest.mark.parametrize("step", [10, 20])
def test_where_there_is_no_other_agent_the_second_time_is_enough_without_a_newer_checkpoint(
    begin: Any, step: int
) -> None:
    stage = begin(nodes=[node("agent-0")], trials=1)
    for saved in (10, step):
        slot = stage.offer(cpus=1)[0]
        slot.train()
        slot.report(saved, 1.0)
        more = {"checkpoint": f"/c/{saved}", "step": saved}
        slot.end("failed", exit_code=1, message="ValueError: no", tail=traceback("ValueError: no"), **more)
        slot.update("TASK_FINISHED")
    assert (stage.trials[0].state is TrialState.FAILED) == (step == 10)


def test_a_trial_that_is_given_up_costs_no_further_agent(begin: Any) -> None:
    stage = begin(nodes=[node("agent-0"), node("agent-1")], trials=1)
    for first in (0, 0, 1):
        slot = stage.offer(cpus=1, first=first)[0]
        fail(stage, slot)
        slot.update("TASK_FINISHED")
    assert stage.trials[0].state is TrialState.FAILED
    left_out = [note for note in stage.observer.notes if "launches nothing on agent" in note]
    assert ["agent-0" in note for note in left_out] == [True], left_out


def test_a_trial_that_never_gets_to_a_checkpoint_is_left_to_run(begin: Any) -> None:
    stage = begin(trials=2, policy="rr")
    slot = stage.offer(cpus=1)[0]
    slot.train()
    slot.report(1, 2.0)
    stage.tick(QUANTUM_S + 0.1)
    slot.end("killed", exit_code=-9)
    slot.train()
    slot.report(1, 2.0)
    stage.tick(QUANTUM_S + 0.1)
    slot.end("suspended", checkpoint="/c/run-0-step-1", step=1)
    assert slot.train() == (0, 1)
    slot.report(1, 2.0)
    for _ in range(5):
        stage.tick(QUANTUM_S + 0.1)
    assert slot.wanted.run.key == (0, 1)
    assert not slot.slot.suspending


@pytest.mark.slow
def test_failures_after_new_checkpoints_do_not_add_up(begin: Any) -> None:
    stage = begin(nodes=[node("agent-0")], trials=1)
    for attempt in range(2 * MAX_FAILURES):
        slot = stage.offer(cpus=1)[0]
        fail(stage, slot, checkpoint=f"/c/{attempt}", step=10 * (attempt + 1))
        slot.update("TASK_FINISHED")
    assert stage.trials[0].failures == 1
    assert stage.trials[0].state is TrialState.SUSPENDED


def test_on_failure_abort_ends_the_search(begin: Any) -> None:
    stage = begin(nodes=[node("agent-0")], trials=2, max_slots=1, on_failure="abort")
    for _ in range(MAX_FAILURES):
        slot = stage.offer(cpus=1)[0]
        assert slot.wanted.run.trial.number == 0
        fail(stage, slot)
        slot.update("TASK_FINISHED")
    stage.tick(0.1)
    assert stage.search.done
    assert "trial 0 failed: ValueError: no" in stage.search.result.failure
    assert not stage.search.result.complete


@pytest.mark.parametrize(("on_failure", "tries"), [("retry=0", 1), ("retry=4", 5), ("retry=4,abort", 5)])
def test_a_trial_is_retried_as_often_as_wanted(begin: Any, on_failure: str, tries: int) -> None:
    stage = begin(nodes=[node("agent-0")], trials=2, max_slots=1, on_failure=on_failure)
    for attempt in range(tries):
        slot = stage.offer(cpus=1)[0]
        assert slot.wanted.run.key == (0, attempt)
        fail(stage, slot)  # an error that would repeat
        slot.update("TASK_FINISHED")
        stage.tick(301)
    assert stage.trials[0].state is TrialState.FAILED
    assert stage.search.done == ("abort" in on_failure)


OUT_OF_MEMORY = (
    'Traceback (most recent call last):\n  File "train.py", line 3\ntorch.OutOfMemoryError: CUDA out of memory.'
)


def test_a_trial_that_ran_out_of_gpu_memory_is_retried_on_a_larger_gpu(begin: Any) -> None:
    nodes = [dataclasses.replace(node(f"agent-{index}", gpus=1), gpu_model=model) for index, model in enumerate(MODELS)]
    stage = begin(nodes=nodes, trials=1, on_failure="larger-gpu")
    small = stage.offer(gpus=1, gpu_model="K80")[0]
    small.train()
    small.end("failed", exit_code=1, message="out of memory", tail=OUT_OF_MEMORY)
    assert any("trial 0 ran out of GPU memory on agent-0" in note for note in stage.observer.notes)
    stage.tick(301)
    assert small.wanted.run is None or small.wanted.run.key == (0, 0)
    large = stage.offer(gpus=1, first=1, gpu_model="A100")[0]
    assert large.wanted.run.key == (0, 1)
    large.train()
    large.end("failed", exit_code=1, message="out of memory", tail=OUT_OF_MEMORY)
    assert stage.trials[0].state is TrialState.FAILED
    assert any("no agent has a GPU model with more memory" in note for note in stage.observer.notes)


MODELS = ("K80", "A100")


@pytest.mark.slow
def test_a_trial_resumes_elsewhere_when_its_slot_is_lost(begin: Any, storage: str) -> None:
    stage = begin(trials=1)
    slot = stage.offer(cpus=1)[0]
    slot.train()
    slot.say(checkpoint="/c/run-0-step-7", checkpoint_step=7)
    slot.update("TASK_LOST", source="SOURCE_MASTER", reason="REASON_AGENT_REMOVED", message="gone")
    assert stored(storage)[0].state is TrialState.SUSPENDED
    again = stage.offer(cpus=1, first=1)[0]
    assert again.slot.id == 1
    assert again.wanted.run.key == (0, 1)
    assert again.wanted.run.trial.resume_from == "/c/run-0-step-7"
    # What comes late from the lost slot changes nothing.
    slot.say()
    assert stage.trials[0].state is TrialState.RUNNING


def test_a_trial_that_takes_its_slots_down_is_given_up(begin: Any) -> None:
    stage = begin(trials=1)
    for attempt in range(MAX_LOST_RUNS):
        slot = stage.offer(cpus=1, first=attempt)[0]
        slot.train()
        slot.update("TASK_FAILED", message="executor terminated")
    assert stage.trials[0].state is TrialState.FAILED


@pytest.mark.parametrize("first", [0, 1])
def test_the_end_of_an_executor_is_held_against_the_trial_with_most_memory(begin: Any, first: int) -> None:
    stage = begin(trials=2)
    ended = {"source": "SOURCE_AGENT", "message": "its container had too much memory"}
    for attempt in range(MAX_LOST_RUNS):
        slots = sorted(stage.offer(cpus=2, first=attempt), key=lambda slot: slot.wanted.run.trial.number)
        for slot, rss_bytes in zip(slots, (1000, 2000), strict=True):
            slot.train()
            slot.say(usage=Usage(rss_bytes=rss_bytes))
        slots[first].update("TASK_FAILED", reason="REASON_CONTAINER_LIMITATION_MEMORY", **ended)
        # Of the other nothing is said yet; it has ended as well.
        assert not slots[1 - first].slot.is_up
        slots[1 - first].update("TASK_FAILED", reason="REASON_EXECUTOR_TERMINATED", **ended)
    assert [stage.trials[number].state for number in range(2)] == [TrialState.WAITING, TrialState.FAILED]


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (
            "Memory limit exceeded: Requested: 2080MB\n\nMEMORY STATISTICS:\ncache 0",
            "Memory limit exceeded: Requested: 2080MB",
        ),
        ("", "its container exceeded its memory limit"),
    ],
)
def test_a_slot_that_took_too_much_memory_says_which_option_gives_it_more(begin: Any, message: str, why: str) -> None:
    (slot,) = begin(trials=1).offer(cpus=1)
    slot.update("TASK_FAILED", source="SOURCE_AGENT", reason="REASON_CONTAINER_LIMITATION_MEMORY", message=message)
    assert slot.slot.failure() == f"slot 0 failed on agent-0: {why} (--slot-mem MIB gives each slot more)"


def test_such_a_trial_ends_a_search_that_is_to_end_with_the_first_failure(begin: Any) -> None:
    stage = begin(trials=2, max_slots=1, on_failure="abort")
    for attempt in range(MAX_LOST_RUNS):
        slot = stage.offer(cpus=1, first=attempt)[0]
        slot.train()
        slot.update("TASK_FAILED", message="executor terminated")
    stage.tick(0.1)
    assert stage.search.done
    assert "trial 0 failed: " in stage.search.result.failure
    assert "executor terminated" in stage.search.result.failure


def test_a_trial_that_gets_on_between_its_losses_is_not_given_up(begin: Any) -> None:
    stage = begin(trials=1)
    for attempt in range(MAX_LOST_RUNS + 1):
        slot = stage.offer(cpus=1, first=attempt)[0]
        slot.train()
        slot.say(checkpoint=f"/c/run-{attempt}-step-7", checkpoint_step=7 * (attempt + 1))
        slot.update("TASK_FAILED", message="executor terminated")
    assert stage.trials[0].state is TrialState.SUSPENDED


def test_slots_that_never_train_anything_end_the_search(begin: Any) -> None:
    stage = begin(trials=MAX_FAILED_EXECUTORS)
    for attempt in range(MAX_FAILED_EXECUTORS):
        assert not stage.search.done
        # They have one process, and end with it.
        for slot in stage.offer(cpus=MAX_FAILED_EXECUTORS, first=attempt):
            slot.update("TASK_FAILED", message="the zygote cannot start")
    stage.tick(0.1)
    assert stage.search.done
    assert "the zygote cannot start" in stage.search.result.failure


def test_arguments_that_the_script_refuses_end_the_search(begin: Any) -> None:
    stage = begin()
    slot = stage.offer(cpus=1)[0]
    run = slot.wanted.run
    slot.say(number=slot.wanted.number, run=run.key)
    with pytest.raises(BadInputError, match="unrecognized arguments"):
        slot.end("bad_input", message="train.py: error: unrecognized arguments: --lr 0.1", tail="usage: train.py")
    assert stage.observer.outputs == ["usage: train.py"]


@pytest.mark.parametrize("on_failure", ["continue", "abort"])
def test_what_a_script_says_of_its_arguments_is_for_its_user(begin: Any, on_failure: str) -> None:
    stage = begin(on_failure=on_failure)
    stage.observer.is_public = True
    slot = stage.offer(cpus=1)[0]
    slot.say(number=slot.wanted.number, run=slot.wanted.run.key)
    slot.end("bad_input", message="the script has no flag --lr")
    slot.update("TASK_FINISHED")
    stage.tick(0.1)
    assert stage.search.done
    result = stage.search.result
    assert (result.failure, result.last_words) == ("the script refuses its arguments", "the script has no flag --lr")
    assert not any("--lr" in note for note in stage.observer.notes)


def test_arguments_that_one_trial_refuses_fail_that_trial(begin: Any) -> None:
    stage = begin(trials=2)
    first, second = stage.offer(cpus=2)
    first.train()
    first.report(1, 1.0)
    second.say(number=second.wanted.number, run=second.wanted.run.key)
    second.end("bad_input", message="invalid choice", tail="usage: train.py")
    assert stage.trials[1].state is TrialState.FAILED
    assert not stage.search.done


def test_a_trial_that_timed_out_has_failed_and_the_next_begins_in_its_slot(begin: Any, storage: str) -> None:
    stage = begin(trials=2, trial_timeout_s=60.0)
    slot = stage.offer(cpus=1)[0]
    assert slot.wanted.run.limit_s == 60.0
    slot.train()
    slot.report(1, 1.0)
    slot.end("timed_out", message="it has run for too long", tail="Epoch 1/10")
    record = stored(storage)[0]
    assert (record.state, record.error) == (TrialState.FAILED, "Epoch 1/10\nit has run for too long")
    assert slot.wanted.run.key == (1, 0)
    assert not slot.wanted.leave


def test_a_trial_moves_to_a_faster_slot_that_becomes_free(tmp_path: Path, storage: str) -> None:
    stage = SearchStage(search_spec(tmp_path, trials=2, policy="hermes2"), storage)
    (fast,) = stage.offer(cpus=1, slot_kind="fast")
    (slow,) = stage.offer(cpus=1, first=1, slot_kind="slow")
    first, second = fast.train(), slow.train()
    for slot, steps in ((fast, 1000), (slow, 10)):
        slot.report(0, 1.0, train_s=0.0)
        slot.report(steps, 0.5, train_s=10.0)
    stage.tick(QUANTUM_S + 1)
    fast.end("finished")
    stage.tick(1)
    assert stage.trials[first[0]].state is TrialState.FINISHED
    assert slow.wanted.run is None, "its trial is to leave the slow slot"
    assert not slow.wanted.leave
    assert not fast.wanted.leave, "it waits for that trial"
    slow.end("suspended", checkpoint="/c/a", step=10)
    assert fast.train() == (second[0], second[1] + 1)
    assert slow.wanted.leave, "no trial needs the slow slot any more"
    fast.end("finished")
    stage.tick(1)
    assert stage.trials[second[0]].state is TrialState.FINISHED


def test_a_stopped_trial_frees_its_slot_at_once_and_stays_stopped(begin: Any, tmp_path: Path, storage: str) -> None:
    spec = {"trials": 2, "stop": "threshold=3", "policy": "fifo"}
    stage = begin(**spec)
    slot = stage.offer(cpus=1)[0]
    slot.train()
    assert slot.wanted.run.trial.every_value
    slot.report(10, 5.0, value=2.0, values=[[1, 5, 1.0], [2, 10, 2.0]])
    assert stage.trials[0].state is TrialState.RUNNING
    slot.report(20, 5.0, value=4.0, values=[[10**30, 11, 9.0], [2, 10, 9.0]])  # no such count; and already reported
    slot.report(20, 5.0, value=4.0, values=[[2, 10, 9.0], [3, 15, "nan?"]])  # malformed; and already reported
    slot.report(20, 5.0, value=4.0, values=[[3, 15, 4.0], [4, 20, 2.0]])
    record = stored(storage)[0]
    assert (record.state, record.value, record.stated, record.slot) == (TrialState.STOPPED, 4.0, 3, 0)
    assert record.ended_s is not None
    stage.tick()
    assert (slot.wanted.run, slot.wanted.stop) == (None, True)
    slot.report(25, 5.0, value=1.0, values=[[5, 25, 1.0]])
    last = {"step": 25, "train_s": 25.0, "value": 1.0}
    slot.end("suspended", checkpoint="/c/run-0-step-25", step=25, last=last)
    frozen = optuna.load_study(study_name="s", storage=storage).trials[0]
    assert (frozen.state, frozen.value) == (optuna.trial.TrialState.PRUNED, 4.0)
    assert frozen.intermediate_values == {1: 1.0, 2: 2.0, 3: 4.0}
    assert (slot.wanted.run.key, slot.wanted.stop) == ((1, 0), False)
    slot.train()
    slot.end("finished", last={"step": 5, "train_s": 1.0, "value": 9.0})
    record = stage.trials[0]
    assert (record.state, record.value, record.slot) == (TrialState.STOPPED, 4.0, None)
    assert record.checkpoint == "/c/run-0-step-25"
    stage.tick(1.0)
    result = stage.search.result
    assert result.complete
    # As in Optuna: one that has finished, however bad.
    assert result.best is stage.trials[1]
    resumed = SearchStage(search_spec(tmp_path, **spec), storage, records=trials_to_resume(result.trials, {}))
    assert not resumed.tracker.open


def test_a_stopped_trial_that_is_still_in_its_slot_is_told_again_after_a_restart(begin: Any, storage: str) -> None:
    stage = begin(trials=1, stop="threshold=3")
    slot = stage.offer(cpus=1)[0]
    slot.train()
    slot.report(5, 5.0, value=4.0, values=[[1, 5, 4.0]])
    state = stage.search.to_state()
    records = trials_to_resume(list(stored(storage).values()), {}, live_slots={0})
    assert records[0].slot == 0
    tracker = TrialTracker(stage.spec, stage.store, Study.open(storage, stage.spec), records)
    slots = SearchState.from_json(state).slots
    restore_runs(stage.spec, slots, tracker, stage.store.load_slices(), 0.0, 0.0)
    slots[0].adopt(slot.status)
    wanted = slots[0].take_due_message(0.0)
    assert wanted is not None
    assert (wanted.run, wanted.stop) == (None, True)
    assert trials_to_resume(list(stored(storage).values()), {})[0].slot is None


@pytest.mark.parametrize("end", [{"outcome": "killed", "exit_code": -9}, {"outcome": "failed", "message": "killed"}])
def test_a_stopped_trial_is_not_reported_as_resuming(begin: Any, end: dict[str, Any]) -> None:
    stage = begin(trials=1, stop="threshold=3")
    slot = stage.offer(cpus=1)[0]
    slot.train()
    slot.report(5, 5.0, value=4.0, values=[[1, 5, 4.0]])
    slot.end(**end)
    assert stage.observer.notes == []
    assert (stage.trials[0].state, stage.trials[0].slot) == (TrialState.STOPPED, None)


def test_a_trial_that_trains_to_its_end_before_it_is_stopped_has_finished(begin: Any, storage: str) -> None:
    stage = begin(trials=2, stop="threshold=3")
    slot, other = stage.offer(cpus=2)
    slot.train()
    other.train()
    for step in (5, 6):
        slot.make(step, 5.0, value=4.0, values=[[step - 4, step, 4.0]])
    losses = tuple(Losses(slot.slot.task_id, 0, 0, (one,), at) for at, one in enumerate(slot.made[0, 0]))
    last = dataclasses.replace(slot.status, run=None, losses=losses, ends=(RunEnd(0, 0, "finished", reports=2),))
    slot.update("TASK_FINISHED", data=last.encode())
    for _ in range(2):
        assert (stage.trials[0].state, stage.trials[0].slot) == (TrialState.FINISHED, None)
        assert stored(storage)[0].state is TrialState.FINISHED
        other.report(5, 1.0, values=[[1, 5, 1.0]])
    assert optuna.load_study(study_name="s", storage=storage).trials[0].state is optuna.trial.TrialState.COMPLETE


def test_a_trial_that_finishes_while_it_is_being_stopped_counts_with_its_last_value(begin: Any, storage: str) -> None:
    stage = begin(trials=2, stop="threshold=3")
    slot = stage.offer(cpus=1)[0]
    slot.train()
    slot.report(5, 5.0, value=4.0, values=[[1, 5, 4.0]])
    assert stage.trials[0].state is TrialState.STOPPED
    slot.end("finished", checkpoint="/c/run-0-step-9", step=9, last={"step": 9, "train_s": 9.0, "value": 2.0})
    record = stored(storage)[0]
    assert (record.state, record.step, record.value) == (TrialState.FINISHED, 9, 2.0)
    frozen = optuna.load_study(study_name="s", storage=storage).trials[0]
    assert (frozen.state, frozen.value) == (optuna.trial.TrialState.COMPLETE, 2.0)


def test_a_trial_that_has_finished_is_not_stopped_any_more(begin: Any) -> None:
    stage = begin(trials=1, stop="threshold=3")
    slot = stage.offer(cpus=1)[0]
    slot.train()
    slot.make(5, 5.0, value=4.0, values=[[1, 5, 4.0]])
    stage.tracker.receive(stage.trials[0], Losses(slot.slot.task_id, 0, 0, tuple(slot.made[0, 0])))
    stage.tracker.run_ended(stage.trials[0], RunEnd(0, 0, "finished", reports=1), 0.0)
    assert stage.tracker.stop_hopeless(0.0) == []
    assert stage.trials[0].state is TrialState.FINISHED


def test_a_trial_that_is_stopped_before_its_turn_in_a_slot_leaves_it(begin: Any) -> None:
    stage = begin(trials=2, policy="rr", stop="threshold=3")
    slot = stage.offer(cpus=1)[0]
    slot.train()
    slot.report(5, 2.0)
    stage.tick(QUANTUM_S + 0.1)
    assert slot.slot.next.key == (1, 0)
    slot.made[1, 0] = [{**slot.made[0, 0][0], "value": 4.0, "values": [[1, 5, 4.0]]}]
    slot.send_reports(0, (1, 0))
    assert stage.trials[1].state is TrialState.STOPPED
    slot.end("suspended", checkpoint="/c/a", step=5)
    assert (slot.wanted.run, slot.wanted.stop) == (None, True)
    slot.say(number=slot.wanted.number)
    assert stage.trials[1].slot is None
    stage.tick(QUANTUM_S)
    assert slot.train() == (0, 1)


def test_small_negative_values_reach_argparse() -> None:
    flags = {"lr": "--lr", "shift": "--shift", "s": "-s"}
    spec = dataclasses.replace(search_spec(Path("/project")), flags=flags)
    trial = TrialRecord(0, {"lr": 0.1, "shift": -3e-05, "s": -2})
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs")
    for flag in flags.values():
        parser.add_argument(flag, type=float)
    assert vars(parser.parse_args(trial_arguments(spec, trial))) == {"epochs": "2", "lr": 0.1, "shift": -3e-05, "s": -2}


def test_one_that_has_finished_without_a_number_is_not_the_best() -> None:
    trials = [
        TrialRecord(0, {}, TrialState.FINISHED, value=math.nan),
        TrialRecord(1, {}, TrialState.STOPPED, value=2.0),
        TrialRecord(2, {}, TrialState.FAILED, value=1.0),
    ]
    assert SearchOutcome("s", True, trials, "min", "").best is trials[1]


def test_a_policy_that_begins_anew_hears_of_the_trials_that_have_ended(
    begin: Any, tmp_path: Path, storage: str
) -> None:
    stage = begin(trials=3, policy="dike")
    slot = stage.offer(cpus=1)[0]
    slot.train()
    slot.report(8, 9.0)
    slot.report(9, 1.0)
    slot.end("finished", last={"step": 9, "train_s": 9.0, "value": 1.0})
    spec = search_spec(tmp_path, trials=3, policy="dike")
    resumed = SearchStage(spec, storage, records=trials_to_resume(list(stored(storage).values()), {}))
    progress = resumed.policy.progress
    assert {trial: one.loss for trial, one in progress.items()} == {0: 1.0}
    assert resumed.tracker.take_ended_before() == []


def test_a_poor_trial_becomes_a_copy_that_the_other_waits_for(begin: Any, storage: str) -> None:
    space = (Parameter("lr", low=1e-4, high=1.0, log=True), Parameter("units", choices=(8, 16)))
    stage = begin(trials=2, policy="pbt", space=space, sampler="random", mutate=("lr",))
    (slot,) = stage.offer(cpus=1)
    first, second = stage.trials[0], stage.trials[1]
    before = dict(first.parameters)
    for step, (number, loss) in enumerate([(0, 2.0), (1, 1.0)], 10):
        assert slot.train() == (number, 0)
        slot.report(step, loss)
        stage.tick(QUANTUM_S + 0.1)
        slot.end("suspended", suspend_s=0.1, checkpoint=f"/s/trial-{number}/run-0-step-{step}", step=step)
    order = slot.wanted.run.trial
    assert (order.number, order.run, order.resume_from) == (0, 1, "/s/trial-1/run-0-step-11")
    assert order.copies
    assert order.parameters == first.parameters == stored(storage)[0].parameters
    assert first.parameters["units"] == second.parameters["units"]
    assert first.parameters["lr"] not in (before["lr"], second.parameters["lr"])
    assert (first.step, first.value, [reading.loss for reading in first.readings]) == (11, 1.0, [1.0])
    assert f"trial 0 continues as a copy of trial 1: lr={first.parameters['lr']:g}" in stage.observer.notes
    (empty,) = stage.offer(cpus=1, first=1)
    assert empty.wanted.run is None, "the checkpoint of trial 1 is being copied"
    slot.train()
    assert empty.wanted.run.key == (1, 1)
