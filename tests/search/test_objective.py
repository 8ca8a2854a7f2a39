"""The value of a trial, however its losses are reported and cut; its readings, in bounded memory."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import tempfile
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dike.reporting import PROGRESS_INTERVAL_S
from dike.trial.runtime import MAX_VALUES, Standing, TrialRuntime
from dike.trial.spec import TrialSpec
from executor.trial_reports import RunReports
from framework.policies.trials.interface import PolicySettings, Reading, TrialView
from framework.policies.trials.losses import LossHistory
from framework.policies.trials.new_readings import NewReadings
from framework.policies.trials.progress import MAX_KEPT_LOSSES, Progress
from framework.search.objective import MAX_REPORTS, Objective, thin
from framework.search.records import TrialRecord, TrialState, ValueKind

Way = Literal["report", "session", "fit"]
EPOCH = 7
"""Steps of an epoch of a `fit`."""

LOSSES = st.lists(st.one_of(st.floats(-1e3, 1e3), st.sampled_from([1e308, math.inf, math.nan])), min_size=1)
MANY_LOSSES = st.integers(1, 200).map(lambda count: [1000.0 / (100 + step) for step in range(count)])


class TrialStage:
    """A trial, from its steps to its record.

    Args:
        way: how its script trains.
    """

    def __init__(self, way: Way, value: ValueKind = "last") -> None:
        self.record = TrialRecord(0, {})
        self._objective = Objective("loss", "min", value)
        self._way = way
        self._now_s = 0.0
        self._saved = "{}"

    def run(self, before: int, losses: Sequence[float], pauses: Callable[[], bool], size: int) -> None:
        """One run of it, from a checkpoint to the next.

        Args:
            before: steps done before.
            losses: of its steps.
            pauses: whether a report is due, asked at each step.
            size: how many bytes are read, and how many reports sent, at a time.
        """
        with tempfile.TemporaryFile() as lines:
            spec = TrialSpec("s", 0, 0, {}, "/none", metric="loss", report_fd=lines.fileno())
            runtime = TrialRuntime(spec, lambda: self._now_s)
            # Also where Hypothesis ends an example in its middle.
            with contextlib.closing(runtime._reporter):
                runtime.restored("/none", before, 0.0, json.loads(self._saved))
                for step, loss in enumerate(losses, before + 1):
                    self._now_s += PROGRESS_INTERVAL_S if pauses() else 0.0
                    value = None if self._way == "fit" else loss
                    runtime.progress(step, loss, value=value, is_reported=self._way != "session")
                    if self._way == "fit" and step % EPOCH == 0:
                        runtime.progress(step, metrics={"loss": loss}, value=loss)
                runtime.flush_progress()
            self._saved = json.dumps(runtime.standing.to_json())
            lines.seek(0)
            reports = RunReports(spec)
            while data := lines.read(size):
                reports.feed(data)
        while taken := reports.losses.take(size)[1]:
            for report in taken:
                self._objective.apply(self.record, report)


def undisturbed(way: Way, losses: Sequence[float], value: ValueKind = "last") -> TrialRecord:
    """A trial that is never interrupted and reports seldom."""
    trial = TrialStage(way, value)
    trial.run(0, losses, lambda: False, 1 << 20)
    return trial.record


def figures(record: TrialRecord) -> str:
    return repr((record.value, record.best_value, record.best_step, record.loss))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["report", "session", "fit"])
@given(data=st.data(), losses=st.one_of(LOSSES, MANY_LOSSES))
def test_any_cutting_of_the_same_losses_has_the_same_value(way: Way, data: st.DataObject, losses: list[float]) -> None:
    suspended = sorted(data.draw(st.sets(st.integers(1, len(losses)), max_size=4)))
    chance = data.draw(st.randoms(use_true_random=False))
    often, size = data.draw(st.sampled_from([0.01, 0.3, 1.0])), data.draw(st.integers(1, 200))
    kind = data.draw(st.sampled_from(typing.get_args(ValueKind)))
    trial = TrialStage(way, kind)
    for begin, end in itertools.pairwise([0, *suspended, len(losses)]):
        trial.run(begin, losses[begin:end], lambda: chance.random() < often, size)
    assert figures(trial.record) == figures(undisturbed(way, losses, kind))
    assert repr(trial.record.loss) == repr(losses[-1])


@pytest.mark.parametrize("way", ["report", "session"])
def test_the_value_is_the_number_reported_last_or_the_best(way: Way) -> None:
    losses = [3.0, 1.0, math.inf, 2.0]
    last, best = undisturbed(way, losses), undisturbed(way, losses, "best")
    assert (last.value, last.best_value, last.best_step) == (2.0, 1.0, 2)
    assert (best.value, best.best_value, best.best_step) == (1.0, 1.0, 2)


def test_a_value_that_is_no_number_is_never_best() -> None:
    lost = undisturbed("report", [2.0, math.nan, -math.inf], "best")
    assert (lost.value, lost.best_step) == (2.0, 1)
    assert undisturbed("report", [math.nan], "best").best_value is None
    assert not undisturbed("report", [-math.inf], "best").beats(None, "min")


def test_a_fit_has_the_result_of_its_last_epoch_and_none_before_its_first() -> None:
    losses = [float(step) for step in range(20)]
    assert undisturbed("fit", losses[: EPOCH - 1]).value is None
    assert undisturbed("fit", losses).value == losses[2 * EPOCH - 1]
    assert undisturbed("fit", losses).best_step == EPOCH


def test_losses_of_batches_count_no_more_once_the_script_reports() -> None:
    """One batch is no match for an epoch, however low its loss."""
    lines = said(
        lambda trial: trial.progress(1, 0.1, value=0.1, is_reported=False),
        lambda trial: trial.flush_progress(),
        lambda trial: trial.progress(10, value=0.5),
        lambda trial: trial.progress(11, 0.2, value=0.2, is_reported=False),
    )
    record = taken(lines)
    assert (record.value, record.best_value, record.best_step, record.loss) == (0.5, 0.5, 10, 0.2)


def test_trials_are_judged_by_what_the_script_reports_alone(capsys: pytest.CaptureFixture[str]) -> None:
    def judged(*calls: Callable[[TrialRuntime], object]) -> list[list[float]]:
        reports = said(*calls, lambda trial: trial.check_reported(), every_value=True)
        return [each for report in reports.losses.take(100)[1] for each in report.get("values", ())]

    batches = [lambda trial, step=step: trial.progress(step, value=0.1, is_reported=False) for step in range(5)]
    assert judged(*batches) == []
    assert "--stop has not judged this trial" in capsys.readouterr().err
    assert judged(*batches, lambda trial: trial.progress(5, value=2.0), *batches) == [[1, 5, 2.0]]
    # Counted on after a suspension.
    kept = Standing(last=2.0, is_reported=True, stated=3).to_json()
    assert judged(lambda trial: trial.restored("/none", 7, 1.0, kept), lambda trial: trial.progress(8, value=1.5)) == [
        [4, 8, 1.5]
    ]
    assert capsys.readouterr().err == ""


def test_of_very_many_values_the_same_are_left_out_in_each_trial() -> None:
    def fast(trial: TrialRuntime) -> None:
        trial.progress(0, value=1.0)
        for step in range(1, 5000):
            trial.progress(step, value=1.0)

    reports = said(fast, every_value=True).losses.take(100)[1]
    counts = [count for report in reports for count, _, _ in report["values"]]
    assert counts[:2] == [1, 64]
    assert counts[-1] == 5000
    assert 50 < len(counts) <= MAX_VALUES + 1


@pytest.mark.parametrize(
    ("returned", "names", "best"),
    [(0.4, [], (0.3, 1)), (0.3, [], (0.3, 1)), (0.9, [], (0.9, 2)), (0.9, ["loss"], (0.3, 1))],
    ids=["the last epoch's", "the best epoch's", "something else", "named like the metric"],
)
def test_what_a_function_returns_is_the_value(returned: float, names: list[str], best: tuple[float, int]) -> None:
    lines = said(
        lambda trial: trial.progress(1, value=0.3),
        lambda trial: trial.progress(2, value=0.4),
        lambda trial: trial.result(returned, dict.fromkeys(names, returned)),
    )
    record = taken(lines)
    assert (record.value, record.best_value, record.best_step) == (returned, *best)


def said(*calls: Callable[[TrialRuntime], object], every_value: bool = False) -> RunReports:
    """The reports that a trial with these calls sends to its executor."""
    with tempfile.TemporaryFile() as lines:
        spec = TrialSpec("s", 0, 0, {}, "/none", report_fd=lines.fileno(), every_value=every_value)
        runtime = TrialRuntime(spec, lambda: 0.0)
        for call in calls:
            call(runtime)
        runtime.flush_progress()
        runtime._reporter.close()
        lines.seek(0)
        reports = RunReports(spec)
        reports.feed(lines.read())
    return reports


def taken(reports: RunReports) -> TrialRecord:
    """What the framework makes of that."""
    record, objective = TrialRecord(0, {}), Objective("loss", "min")
    for report in reports.losses.take(100)[1]:
        objective.apply(record, report)
    objective.apply(record, objective.unapplied(record, reports.last))
    return record


@pytest.mark.parametrize("kind", typing.get_args(ValueKind))
@pytest.mark.parametrize("losses", [[0.3, 0.5], [0.3, math.nan], [math.nan, math.nan], [0.5, 0.3]])
def test_a_last_report_that_has_arrived_is_no_news(kind: ValueKind, losses: list[float]) -> None:
    reports = said(
        *(
            lambda trial, step=step, x=x: trial.progress(step, metrics={"f": x}, value=x)
            for step, x in enumerate(losses)
        )
    )
    record, objective = TrialRecord(0, {}), Objective("loss", "min", kind)
    for report in reports.losses.take(100)[1]:
        objective.apply(record, report)
    assert objective.unapplied(record, reports.last).keys() == {"step", "train_s"}
    better = {**reports.last, "value": 0.1, "best": 0.1, "best_step": 1}
    assert objective.unapplied(record, better)["value"] == 0.1
    assert objective.unapplied(record, {**better, "restated": True})["best"] == 0.1


MANY = 5 * MAX_REPORTS


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
        objective.apply(record, dataclasses.asdict(reading(step)))
        assert len(record.readings) <= MAX_REPORTS
    return record


def test_readings_stay_few_and_stand_for_all_losses(long_trained: TrialRecord) -> None:
    readings = long_trained.readings
    assert len(readings) > MAX_REPORTS / 4
    assert sum(one.count for one in readings) == MANY
    assert math.isclose(sum(one.loss * one.count for one in readings), sum(map(loss_at, range(1, MANY + 1))))
    assert (readings[0].high, readings[-1]) == (loss_at(1), reading(MANY))
    assert all(first.step < second.step for first, second in itertools.pairwise(readings))
    assert max(one.count for one in readings) <= 2 * MANY / (MAX_REPORTS / 2)


def test_its_slices_begin_where_they_began(long_trained: TrialRecord) -> None:
    first, second = long_trained.slices
    assert first == 0
    assert long_trained.readings[second].step == pytest.approx(MANY // 2, abs=2 * MANY / MAX_REPORTS)


def test_a_loss_that_is_no_number_is_not_merged_away() -> None:
    record = TrialRecord(0, {})
    for step in range(1, MAX_REPORTS + 2):
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
        seen[0] += len(often.new_indices(record.readings))
        if step % 700 == 0:
            seen[1] += sum(record.readings[place].count for place in seldom.new_indices(record.readings))
    assert seen[0] == MANY
    # A reading that was merged with newer ones is looked at with these, a second time.
    assert seen[1] == pytest.approx(MANY - MANY % 700, abs=2 * MANY / MAX_REPORTS * MANY / 700)


def test_what_policies_compare_trials_by_is_not_disturbed() -> None:
    record = TrialRecord(0, {}, slices=[0])
    thinned, whole = LossHistory(PolicySettings()), LossHistory(PolicySettings())
    all_readings: list[Reading] = []
    for step in range(1, MAX_REPORTS + 500):
        record.readings.append(reading(step))
        thin(record)
        all_readings.append(reading(step))
        thinned.update(TrialView(0, 0.0, record.readings, record.slices))
        whole.update(TrialView(0, 0.0, all_readings, [0]))
    assert len(record.readings) < len(all_readings)
    assert thinned.score == whole.score


def test_a_fall_is_measured_with_few_losses() -> None:
    progress = Progress()
    readings = [reading(step) for step in range(1, 3 * MAX_KEPT_LOSSES)]
    progress.update(TrialView(0, 0.0, readings, [0]))
    assert len(progress._losses) <= MAX_KEPT_LOSSES
    half = loss_at(3 * MAX_KEPT_LOSSES // 2)
    assert progress.recent_fall() == pytest.approx(half - loss_at(3 * MAX_KEPT_LOSSES - 1), rel=0.01)


def test_what_has_ended_needs_no_readings(begin: Any) -> None:
    stage = begin(trials=1)
    slot = stage.offer(cpus=1)[0]
    slot.train()
    slot.report(5, 2.0)
    assert len(stage.trials[0].readings) == 1
    slot.end("finished")
    trial = stage.trials[0]
    assert (trial.state, trial.value, trial.readings) == (TrialState.FINISHED, 2.0, [])
