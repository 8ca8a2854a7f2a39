"""How runs and slots end in a search, and what it does about it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from dike.exceptions import BadInputError
from executor.trial_messages import RunEnd
from framework.search.endings import MAX_BARREN
from framework.search.records import TrialState
from framework.search.roster import MAX_FAILURES, MAX_LOSSES
from tests.search.search_stage import QUANTUM_S, fail, node, stored


def test_the_last_words_of_a_slot_are_heard(begin: Any) -> None:
    stage = begin(trials=1)
    slot = stage.offer(cpus=1)[0]
    slot.train()
    slot.report(9, 0.5)
    end = RunEnd(0, 0, "finished", last={"step": 9, "train_s": 9.0, "value": 0.5})
    last = dataclasses.replace(slot.status, run=None, ends=(end,))
    slot.update("TASK_FINISHED", data=last.encode())
    assert stage.trials[0].state is TrialState.FINISHED


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
    stage = begin(nodes=[node("agent-0"), node("agent-1")], trials=1, blacklist_s=100.0)
    slot = stage.offer(cpus=1)[0]
    fail(stage, slot)
    assert slot.wanted.leave
    slot.update("TASK_FINISHED")
    slot = stage.offer(cpus=1)[0]
    fail(stage, slot)
    slot.update("TASK_FINISHED")
    assert any("agent-0 is left out for 100 s" in note for note in stage.watcher.notes)
    assert stage.offer(cpus=1) == []
    slot = stage.offer(cpus=1, first=1)[0]
    fail(stage, slot)
    assert stage.trials[0].state is TrialState.FAILED
    assert stage.trials[0].failures == MAX_FAILURES
    assert "Traceback" in stage.trials[0].error
    slot.update("TASK_FINISHED")
    stage.tick(0.1)
    assert stage.search.done


def test_a_trial_that_is_given_up_costs_no_further_agent(begin: Any) -> None:
    stage = begin(nodes=[node("agent-0"), node("agent-1")], trials=1)
    for first in (0, 0, 1):
        slot = stage.offer(cpus=1, first=first)[0]
        fail(stage, slot)
        slot.update("TASK_FINISHED")
    assert stage.trials[0].state is TrialState.FAILED
    assert not any("agent-1 is left out" in note for note in stage.watcher.notes)


def test_a_trial_that_never_gets_to_a_checkpoint_is_left_to_run(begin: Any) -> None:
    stage = begin(trials=2, policy="rr")
    slot = stage.offer(cpus=1)[0]
    slot.train()
    slot.report(1, 2.0)
    stage.tick(QUANTUM_S + 0.1)
    slot.end("stopped", exit_code=-9)
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


def test_a_trial_goes_on_elsewhere_when_its_slot_is_lost(begin: Any, storage: str) -> None:
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
    for attempt in range(MAX_LOSSES):
        slot = stage.offer(cpus=1, first=attempt)[0]
        slot.train()
        slot.update("TASK_FAILED", message="executor terminated")
    assert stage.trials[0].state is TrialState.FAILED


def test_such_a_trial_ends_a_search_that_is_to_end_with_the_first_failure(begin: Any) -> None:
    stage = begin(trials=2, max_slots=1, on_failure="abort")
    for attempt in range(MAX_LOSSES):
        slot = stage.offer(cpus=1, first=attempt)[0]
        slot.train()
        slot.update("TASK_FAILED", message="executor terminated")
    stage.tick(0.1)
    assert stage.search.done
    assert "trial 0 failed: " in stage.search.result.failure
    assert "executor terminated" in stage.search.result.failure


def test_a_trial_that_gets_on_between_its_losses_is_not_given_up(begin: Any) -> None:
    stage = begin(trials=1)
    for attempt in range(MAX_LOSSES + 1):
        slot = stage.offer(cpus=1, first=attempt)[0]
        slot.train()
        slot.say(checkpoint=f"/c/run-{attempt}-step-7", checkpoint_step=7 * (attempt + 1))
        slot.update("TASK_FAILED", message="executor terminated")
    assert stage.trials[0].state is TrialState.SUSPENDED


def test_slots_that_never_train_anything_end_the_search(begin: Any) -> None:
    stage = begin(trials=1)
    for attempt in range(MAX_BARREN):
        slot = stage.offer(cpus=1, first=attempt)[0]
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
    assert stage.watcher.outputs == ["usage: train.py"]


def test_arguments_that_one_trial_refuses_fail_that_trial(begin: Any) -> None:
    stage = begin(trials=2)
    first, second = stage.offer(cpus=2)
    first.train()
    first.report(1, 1.0)
    second.say(number=second.wanted.number, run=second.wanted.run.key)
    second.end("bad_input", message="invalid choice", tail="usage: train.py")
    assert stage.trials[1].state is TrialState.FAILED
    assert not stage.search.done
