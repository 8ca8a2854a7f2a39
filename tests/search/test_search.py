"""A search's course: its turns, its end, going on after an interruption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest

from framework.search.inheritance import SearchState, prepared
from framework.search.records import TrialState
from framework.search.store import Store
from tests.search.search_stage import QUANTUM_S, SearchStage, search_spec, stored


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


def test_waiting_in_a_queue_does_not_count(begin: Any) -> None:
    stage = begin(trials=1, timeout_s=50.0, patient=True)
    alike = stage.search.demand_key
    stage.tick(60)
    slot = stage.offer(cpus=1)[0]
    slot.train()
    stage.tick(40)
    assert not slot.wanted.leave
    assert SearchState.from_json(stage.search.to_state()).first_slot_s == pytest.approx(1e9 + stage.now - 40, abs=0.5)
    # It may have to wait again, for another slot; its time is up whether or not others like it are looked after.
    assert stage.search.demand_key != alike
    slot.update("TASK_LOST")
    stage.tick(11)
    assert "--timeout" in stage.search.result.failure


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
