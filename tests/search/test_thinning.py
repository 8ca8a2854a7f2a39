"""A trial that reports for weeks takes little memory, and policies and samplers see the same of it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest

from framework.policies.interface import PolicySettings, Reading, TrialView
from framework.policies.losses import LossHistory
from framework.policies.new_readings import NewReadings
from framework.policies.progress import LIMIT as LOWEST
from framework.policies.progress import Progress
from framework.search.losses import LIMIT
from framework.search.objective import Objective
from framework.search.records import TrialRecord, TrialState
from framework.search.thinning import thin

MANY = 5 * LIMIT


def loss_at(step: int) -> float:
    return 1000.0 / (100 + step)


def reading(step: int) -> Reading:
    return reading_of(step, loss_at(step))


def reading_of(step: int, loss: float) -> Reading:
    return Reading(step / 2, step, loss, loss, loss)


@pytest.fixture(scope="module")
def long_trained() -> TrialRecord:
    record, objective = TrialRecord(0, {}, slices=[0]), Objective("loss", "min")
    for step in range(1, MANY + 1):
        if step == MANY // 2:
            record.slices.append(len(record.readings))
        objective.take(record, dataclasses.asdict(reading(step)), has_stated=False)
        assert len(record.readings) <= LIMIT
    return record


def test_readings_stay_few_and_stand_for_all_losses(long_trained: TrialRecord) -> None:
    readings = long_trained.readings
    assert len(readings) > LIMIT / 4
    assert sum(one.count for one in readings) == MANY
    assert math.isclose(sum(one.loss * one.count for one in readings), sum(map(loss_at, range(1, MANY + 1))))
    assert (readings[0].high, readings[-1]) == (loss_at(1), reading(MANY))
    assert all(first.step < second.step for first, second in itertools.pairwise(readings))
    assert max(one.count for one in readings) <= 2 * MANY / (LIMIT / 2)


def test_its_value_is_still_the_mean_of_its_last_tenth(long_trained: TrialRecord) -> None:
    tail = [loss_at(step) for step in range(MANY * 9 // 10, MANY + 1)]
    assert long_trained.value == pytest.approx(sum(tail) / len(tail), rel=1e-3)


def test_its_slices_begin_where_they_began(long_trained: TrialRecord) -> None:
    first, second = long_trained.slices
    assert first == 0
    assert long_trained.readings[second].step == pytest.approx(MANY // 2, abs=2 * MANY / LIMIT)


def test_a_loss_that_is_no_number_is_not_merged_away() -> None:
    record = TrialRecord(0, {})
    for step in range(1, LIMIT + 2):
        record.readings.append(reading_of(step, math.nan if step == 10 else 1.0))
    thin(record)
    (lost,) = [reading for reading in record.readings if math.isnan(reading.loss)]
    assert math.isnan(lost.low)
    assert math.isnan(lost.high)
    assert lost.step - lost.count < 10 <= lost.step


def test_policies_look_at_each_reading_once() -> None:
    """Whether they look after each report, or seldom."""
    record = TrialRecord(0, {}, slices=[0])
    often, seldom, seen = NewReadings(), NewReadings(), [0, 0]
    for step in range(1, MANY + 1):
        record.readings.append(reading(step))
        thin(record)
        seen[0] += len(often.places(record.readings))
        if step % 700 == 0:
            seen[1] += sum(record.readings[place].count for place in seldom.places(record.readings))
    assert seen[0] == MANY
    # A reading that was merged with newer ones is looked at with these, a second time.
    assert seen[1] == pytest.approx(MANY - MANY % 700, abs=2 * MANY / LIMIT * MANY / 700)


def test_what_policies_compare_trials_by_is_not_disturbed() -> None:
    record = TrialRecord(0, {}, slices=[0])
    thinned, whole = LossHistory(PolicySettings()), LossHistory(PolicySettings())
    all_readings: list[Reading] = []
    for step in range(1, LIMIT + 500):
        record.readings.append(reading(step))
        thin(record)
        all_readings.append(reading(step))
        thinned.update(TrialView(0, 0.0, record.readings, record.slices))
        whole.update(TrialView(0, 0.0, all_readings, [0]))
    assert len(record.readings) < len(all_readings)
    assert thinned.score == whole.score


def test_a_fall_is_measured_with_few_losses() -> None:
    progress = Progress()
    readings = [reading(step) for step in range(1, 3 * LOWEST)]
    progress.update(TrialView(0, 0.0, readings, [0]))
    assert len(progress._losses) <= LOWEST
    half = loss_at(3 * LOWEST // 2)
    assert progress.recent_fall() == pytest.approx(half - loss_at(3 * LOWEST - 1), rel=0.01)


def test_what_has_ended_needs_no_readings(begin: Any) -> None:
    stage = begin(trials=1)
    slot = stage.offer(cpus=1)[0]
    slot.train()
    slot.report(5, 2.0)
    assert len(stage.trials[0].readings) == 1
    slot.end("finished")
    trial = stage.trials[0]
    assert (trial.state, trial.value, trial.readings) == (TrialState.FINISHED, 2.0, [])
