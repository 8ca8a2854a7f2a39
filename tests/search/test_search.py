"""The search's state machine: what it tells its slots, what it survives, what it writes down."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import optuna
import pytest

from dike.exceptions import BadInputError, InfeasibleError
from executor.trial_messages import RunEnd, SlotOrder
from framework import events
from framework.search.records import TrialState
from framework.search.roster import MAX_FAILURES, MAX_LOSSES
from framework.search.runner import prepared
from framework.search.search import MAX_BARREN, SILENCE_S
from framework.search.slots import REPEAT_S
from framework.search.store import Store
from solver import NodeClass
from tests.search.search_stage import QUANTUM_S, PlayedSlot, SearchStage, search_spec

GIB = 2**30


@pytest.fixture
def storage(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/searches.db"


@pytest.fixture
def begin(tmp_path: Path, storage: str) -> Any:
    def make(nodes: list[NodeClass] | None = None, **changes: Any) -> SearchStage:
        return SearchStage(search_spec(tmp_path, **changes), storage, nodes)

    return make


def node(name: str, cpus: float = 2.0, gpus: int = 0) -> NodeClass:
    return NodeClass(name=name, count=1, cpus=cpus, mem_bytes=8 * GIB, gpus=gpus, gpu_model=None, disk_bytes=GIB)


def stored(storage: str) -> dict[int, Any]:
    store = Store(storage)
    store.open_search("s")
    records = {record.number: record for record in store.load_trials()}
    store.close()
    return records


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
    assert slot.wanted.run.arguments == ("--epochs", "2", "--lr", "0.1")
    assert slot.wanted.run.trial.parameters == {"lr": 0.1}
    assert slot.wanted.run.trial.resume_from is None


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


def test_a_suspended_trial_goes_on_from_its_checkpoint(begin: Any, storage: str) -> None:
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
    assert slot.wanted.known_ends == ((0, 0),)
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


def fail(stage: SearchStage, slot: PlayedSlot, **more: Any) -> None:
    slot.train()
    slot.report(1, 1.0)
    slot.end("failed", message="ValueError: no", tail="Traceback ...", **more)


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


def test_what_the_study_has_not_heard_of_is_told_on_resumption(begin: Any, tmp_path: Path, storage: str) -> None:
    stage = begin(trials=1)
    slot = stage.offer(cpus=1)[0]
    slot.train()
    slot.report(8, 1.0)
    # Killed after the record was written and before Optuna was told.
    record = stage.trials[0]
    record.state = TrialState.FINISHED
    stage.store.save_trial(record)
    resumed = SearchStage(search_spec(tmp_path, trials=1), storage, records=list(stored(storage).values()))
    assert resumed.roster.open == []
    study = optuna.load_study(study_name="s", storage=storage)
    assert study.trials[0].state is optuna.trial.TrialState.COMPLETE


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


def test_the_timeout_ends_the_search(begin: Any) -> None:
    stage = begin(trials=1, timeout_s=50.0)
    slot = stage.offer(cpus=1)[0]
    slot.train()
    stage.tick(51)
    assert slot.wanted.leave
    assert "--timeout" in stage.search.result.failure


def test_tasks_that_are_not_ours_are_ended(begin: Any) -> None:
    stage = begin()
    stage.search.handle(
        events.StatusUpdate({"task_id": {"value": "old"}, "agent_id": {"value": "S0"}, "state": "TASK_RUNNING"})
    )
    assert stage.mesos.killed == ["old"]


def test_an_interrupted_search_goes_on(begin: Any, tmp_path: Path, storage: str) -> None:
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
    records = prepared(list(stored(storage).values()), asked)
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
