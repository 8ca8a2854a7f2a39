"""Kinds of slots, and the speeds of trials on them: measured, passed to policies, stored, restored."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from framework.policies.trials.interface import PolicySettings
from framework.search.migration_cost import MIN_RUNS, with_measured_migration_cost
from framework.search.records import Parameter, SliceRecord, TrialRecord, TrialState, trials_to_resume
from framework.search.recovery import close_open_slices
from framework.search.slot_pool import kind_of
from framework.search.speeds import MIN_TRAINING_S, SpeedTracker
from framework.search.store import Store
from tests.search.search_stage import QUANTUM_S, FakeSlot, SearchStage, search_spec, stored


@pytest.mark.parametrize(
    ("attributes", "gpus", "kind"),
    [
        ({"gpu_model": "v100"}, 1, "v100"),
        ({"gpu_model": "Tesla V100-SXM2-16GB"}, 1, "v100"),
        ({"gpu_model": "Quantum 9"}, 1, "quantum 9"),
        ({"gpu_model": "K80", "slot_kind": "fast"}, 1, "k80"),
        ({"slot_kind": "Fast"}, 1, "fast"),
        # A slot without GPUs is as fast as the CPUs are.
        ({"gpu_model": "K80"}, 0, ""),
        ({"gpu_model": "K80", "slot_kind": "fast"}, 0, "fast"),
        ({"rack": "r1"}, 1, ""),
    ],
)
def test_a_kind_is_the_gpus_model_or_what_the_agent_says(attributes: dict[str, str], gpus: int, kind: str) -> None:
    assert kind_of(attributes, gpus) == kind


@pytest.mark.parametrize(
    ("parameters", "reported", "samples"),
    [
        ({"batch_size": 64}, 32.0, 64.0),
        ({"batch-size": 64}, None, 64.0),
        ({"bs": 16.0}, None, 16.0),
        ({"batch": "large"}, 32.0, 32.0),
        ({"batch": True}, None, 1.0),
        ({"batch_size": 0}, None, 1.0),
        ({"lr": 0.1}, 32.0, 32.0),
        ({"lr": 0.1}, None, 1.0),
    ],
)
def test_a_batch_size_is_a_parameter_or_reported(
    parameters: dict[str, Any], reported: float | None, samples: float
) -> None:
    assert TrialRecord(0, parameters, batch_size=reported).samples_per_step == samples


def test_a_speed_is_that_between_the_first_and_the_last_report_of_each_run() -> None:
    trial = TrialRecord(3, {"batch_size": 10})
    speeds = SpeedTracker((), {3: trial})
    speeds.begin_run(3, 0, "k80")
    # What comes before the first report, such as the making of the graph, counts for nothing.
    for step, train_s in ((1, 30.0), (5, 32.0), (21, 40.0)):
        speeds.add_report(trial, 0, step, train_s)
    assert speeds.of(trial) == {"k80": pytest.approx(20.0)}
    speeds.begin_run(3, 1, "v100")
    # It goes back to an earlier checkpoint, and what comes late from the run before is left out.
    speeds.add_report(trial, 1, 10, 35.0)
    speeds.add_report(trial, 0, 22, 41.0)
    speeds.add_report(trial, 1, 30, 36.0)
    assert speeds.of(trial) == {"k80": pytest.approx(20.0), "v100": pytest.approx(200.0)}
    assert speeds.of_run(trial, 1) == pytest.approx(200.0)
    assert speeds.of_run(trial, 0) is None
    speeds.begin_run(3, 2, "k80")
    speeds.add_report(trial, 2, 30, 36.0)
    speeds.add_report(trial, 2, 110, 46.0)
    # By the time of both runs there: 20 + 80 steps in 10 + 10 seconds.
    assert speeds.of(trial)["k80"] == pytest.approx(50.0)


def test_too_short_a_training_says_nothing() -> None:
    trial = TrialRecord(0, {})
    speeds = SpeedTracker((), {0: trial})
    speeds.begin_run(0, 0, "k80")
    speeds.add_report(trial, 0, 1, 1.0)
    assert speeds.of(trial) == {}
    speeds.add_report(trial, 0, 2, 1.0 + MIN_TRAINING_S / 2)
    assert speeds.of(trial) == {}
    speeds.add_report(trial, 0, 3, 1.0 + 2 * MIN_TRAINING_S)
    assert speeds.of(trial) == {"k80": pytest.approx(1 / MIN_TRAINING_S)}


def two_kinds(tmp_path: Path, storage: str) -> SearchStage:
    spec = search_spec(
        tmp_path, trials=2, policy="rr", slot_gpus=1, space=(Parameter("batch_size", choices=(8, 16)),), flags={}
    )
    stage = SearchStage(spec, storage)
    stage.offer(gpus=1, gpu_model="Tesla K80")
    stage.offer(gpus=1, first=1, gpu_model="V100")
    return stage


def test_policies_see_kinds_and_speeds_and_slices_keep_them(tmp_path: Path, storage: str) -> None:
    stage = two_kinds(tmp_path, storage)
    assert [slot.view().kind for slot in stage.search.slots] == ["k80", "v100"]
    for slot in stage.fakes.values():
        slot.train()
        slot.report(1, 1.0)
        slot.report(11, 0.5)
    first, second = stage.tracker.views({}, {}, {})
    assert (first.batch_size, first.speeds) == (8.0, {"k80": pytest.approx(8.0)})
    assert (second.batch_size, second.speeds) == (16.0, {"v100": pytest.approx(16.0)})
    stage.fakes[0].end("finished")
    (ended,) = (piece for piece in stage.store.load_slices() if piece.outcome == "finished")
    assert (ended.kind, ended.samples_per_s) == ("k80", pytest.approx(8.0))


@pytest.mark.slow
def test_a_batch_size_that_only_the_process_knows_is_used_and_kept(begin: Any, storage: str) -> None:
    stage = begin(trials=1)
    (slot,) = stage.offer(cpus=1, slot_kind="fast")
    slot.train()
    slot.say(batch_size=32.0)
    slot.report(1, 1.0)
    slot.report(3, 1.0)
    (view,) = stage.tracker.views({}, {}, {})
    assert (view.batch_size, view.speeds) == (32.0, {"fast": pytest.approx(32.0)})
    assert stored(storage)[0].batch_size == 32.0


def test_a_resumed_search_keeps_the_speeds(tmp_path: Path, storage: str) -> None:
    stage = two_kinds(tmp_path, storage)
    for slot in stage.fakes.values():
        slot.train()
        slot.report(1, 1.0)
        slot.report(21, 0.5)
    stage.fakes[0].end("suspended", checkpoint="/c/a", step=21)
    stage.tick(2)
    # The process is killed here: the second slice is left open.
    store = Store(storage)
    spec = store.open_search("s")
    close_open_slices(store, 1e9 + stage.now)
    records = trials_to_resume(store.load_trials(), {})
    store.close()
    resumed = SearchStage(spec, storage, records=records)
    first, second = resumed.tracker.views({}, {}, {})
    assert first.speeds == {"k80": pytest.approx(8.0)}
    assert second.speeds == {"v100": pytest.approx(16.0)}
    assert all(piece.end_s is not None for piece in resumed.store.load_slices())


def test_a_gpu_of_unknown_speed_is_named_once(tmp_path: Path, storage: str) -> None:
    stage = SearchStage(search_spec(tmp_path, trials=4, slot_gpus=1), storage)
    stage.offer(agents=2, gpus=1, gpu_model="Quantum 9")
    stage.offer(first=2, gpus=1, gpu_model="Quantum 9")
    stage.offer(first=3, gpus=1, gpu_model="V100")
    assert len(stage.search.slots) == 4
    (note,) = (note for note in stage.observer.notes if "Quantum 9" in note)
    assert note.startswith("agent agent-0 has GPUs 'Quantum 9', whose speed Dike does not know")
    assert not any("V100" in note for note in stage.observer.notes)


def slices(moved: int, stayed: int) -> list[SliceRecord]:
    """Runs of one trial that take 2.0 s to begin in another slot and 0.75 s in the same; the first in a slot, 9.0 s."""
    pieces = [SliceRecord(0, slot, slot, "a", start_s=0.0, first_step_s=9.0) for slot in range(2)]
    for changes, begin_s in [(True, 2.0)] * moved + [(False, 0.75)] * stayed:
        last = pieces[-1]
        start_s = last.start_s + QUANTUM_S
        slot = 1 - last.slot if changes else last.slot
        pieces.append(SliceRecord(0, last.run + 1, slot, "a", start_s=start_s, first_step_s=start_s + begin_s))
    return pieces


def test_what_a_move_costs_is_measured_once_there_are_enough() -> None:
    settings = PolicySettings(move_s=0.5)
    in_memory = [dataclasses.replace(piece, process="continued") for piece in slices(MIN_RUNS, MIN_RUNS)]
    assert with_measured_migration_cost(settings, in_memory) == settings
    assert with_measured_migration_cost(settings, slices(MIN_RUNS, MIN_RUNS)).move_s == pytest.approx(1.25)
    assert with_measured_migration_cost(settings, slices(MIN_RUNS, MIN_RUNS - 1)) == settings
    assert with_measured_migration_cost(settings, slices(MIN_RUNS - 1, MIN_RUNS)) == settings
    assert with_measured_migration_cost(settings, []) == settings


def stage_of_batch_sizes(tmp_path: Path, storage: str, **changes: Any) -> tuple[SearchStage, list[FakeSlot]]:
    """Three trials of which two train in two slots, by steps of a second; the first has done 101, the second 11."""
    space = (Parameter("batch_size", choices=(8, 16, 32)),)
    stage = SearchStage(search_spec(tmp_path, trials=3, space=space, flags={}, **changes), storage)
    slots = stage.offer(cpus=2)
    for slot, steps in zip(slots, (100, 10), strict=True):
        slot.train()
        slot.report(1, 1.0)
        slot.report(1 + steps, 0.5)
    return stage, slots


def left_s(stage: SearchStage, stands_still: int | None = None) -> dict[int, float | None]:
    homes = {} if stands_still is None else {stands_still: frozenset([0])}
    return {view.id: view.left_s for view in stage.tracker.views({}, {}, homes)}


def test_the_trials_that_have_finished_say_what_others_have_left(tmp_path: Path, storage: str) -> None:
    stage, (first, second) = stage_of_batch_sizes(tmp_path, storage)
    assert left_s(stage) == {0: None, 1: None, 2: None}
    first.end("finished")
    assert left_s(stage) == {1: pytest.approx((101 * 8 - 11 * 16) / 16), 2: None}, "the third has no speed yet"
    second.end("suspended", checkpoint="/c/a", step=6)
    assert left_s(stage)[1] == pytest.approx((101 * 8 - 6 * 16) / 16), "it resumes from its checkpoint"
    assert left_s(stage, stands_still=1)[1] == pytest.approx((101 * 8 - 11 * 16) / 16), "or from the paused step"
    first.train()
    first.report(1, 1.0)
    first.report(28, 1.0)
    assert left_s(stage)[2] == pytest.approx(0.0, abs=1e-9), "a tenth more than the first: about as long"
    first.report(31, 1.0)
    assert left_s(stage) == {1: None, 2: None}, "it is longer than the one that has finished"


def test_what_has_finished_before_a_search_is_resumed_says_what_others_have_left(tmp_path: Path, storage: str) -> None:
    stage, (first, _) = stage_of_batch_sizes(tmp_path, storage)
    first.end("finished")
    resumed = SearchStage(stage.spec, storage, records=trials_to_resume(list(stored(storage).values()), {}))
    (again,) = resumed.offer(cpus=1)
    assert again.train() == (1, 1)
    again.report(1, 1.0)
    again.report(11, 0.5)
    assert left_s(resumed) == {1: pytest.approx((101 * 8 - 11 * 16) / 16), 2: None}


def test_trials_that_have_finished_early_say_nothing(tmp_path: Path, storage: str) -> None:
    stage, (first, second) = stage_of_batch_sizes(tmp_path, storage)
    first.end("finished")
    second.end("finished")
    first.train()
    first.report(1, 1.0)
    first.report(2, 1.0)
    assert left_s(stage) == {2: None}


@pytest.mark.parametrize(
    "changes", [{"timeout_s": 1000.0}, {"stop": "asha"}, {"sampler": "random", "trial_count": 400}]
)
def test_nobody_says_it_if_trials_may_be_stopped_or_are_to_come(
    tmp_path: Path, storage: str, changes: dict[str, Any]
) -> None:
    stage, (first, _) = stage_of_batch_sizes(tmp_path, storage, **changes)
    first.end("finished")
    assert stage.trials[0].state is TrialState.FINISHED
    assert set(left_s(stage).values()) == {None}
