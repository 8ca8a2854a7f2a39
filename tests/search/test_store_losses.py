"""The losses of trials in the database: kept once, merged when they are many."""

from __future__ import annotations

import dataclasses
import itertools
import math
from contextlib import closing
from typing import Any

import pytest

from executor.trial_messages import RunEnd
from framework.policies.trials.interface import Reading
from framework.search import store as stores
from framework.search.objective import MAX_REPORTS
from framework.search.optuna_study import Study
from framework.search.records import Parameter, TrialRecord
from framework.search.store import Store
from framework.search.trials import TrialTracker
from tests.search.stored_search import SPEC, add_losses, report


def test_losses_become_the_readings_of_the_objective(store: Store) -> None:
    store.save_trial(TrialRecord(0, {}))
    add_losses(store, 0, 0, [report(10, 2.0), report(20, metrics={"accuracy": 0.5}, value=0.5), report(20, 1.5)])
    (trial,) = store.load_trials()
    assert trial.readings == [Reading(5.0, 10, 2.0, 2.0, 2.0), Reading(10.0, 20, 1.5, 1.5, 1.5)]

    store.create_search(dataclasses.replace(SPEC, name="other", metric="accuracy", mode="max"))
    store.save_trial(TrialRecord(0, {}))
    add_losses(store, 0, 0, [report(10, 2.0), report(20, metrics={"accuracy": 0.5}, value=0.5)])
    (trial,) = store.load_trials()
    assert trial.readings == [Reading(10.0, 20, -0.5, -0.5, -0.5)]


def test_what_a_run_repeats_is_kept_once(store: Store) -> None:
    store.save_trial(TrialRecord(0, {}))
    add_losses(store, 0, 0, [report(10, 3.0), report(20, 2.0), report(30, 1.0)])
    add_losses(store, 0, 1, [report(20, 7.0), report(40, 0.5)])
    assert [(line["run"], line["step"], line["loss"]) for line in store.load_losses()[0]] == [
        (0, 10, 3.0),
        (0, 20, 2.0),
        (0, 30, 1.0),
        (1, 40, 0.5),
    ]
    assert [reading.loss for reading in store.load_trials()[0].readings] == [3.0, 2.0, 1.0, 0.5]


def test_the_best_value_outlives_the_merging_of_reports(store: Store) -> None:
    store.save_trial(TrialRecord(0, {}))
    add_losses(store, 0, 0, [report(step, 1.0, value=step, best=1.0) for step in range(1, MAX_REPORTS + 2)])
    lines = store.load_losses()[0]
    assert len(lines) < MAX_REPORTS
    assert {line["best"] for line in lines} == {1.0}


def test_a_loss_that_comes_twice_is_kept_once(store: Store) -> None:
    store.save_trial(TrialRecord(0, {}))
    add_losses(store, 0, 0, [report(10, 3.0)])
    add_losses(store, 0, 0, [report(10, 3.0)])
    add_losses(store, 0, 0, [report(10, metrics={"accuracy": 0.5}, value=0.5)])
    add_losses(store, 0, 1, [report(10, 3.0), report(20, 2.0)])
    lines = store.load_losses()[0]
    assert [(line["step"], line.get("loss"), line.get("value")) for line in lines] == [
        (10, 3.0, None),
        (10, None, 0.5),
        (20, 2.0, None),
    ]


def test_a_malformed_report_is_refused_whole(store: Store) -> None:
    for wrong in ({"loss": 1.0}, report(2, loss=None, metrics=[1]), {**report(2, 1.0), "loss": []}):
        with pytest.raises(ValueError, match="malformed"):
            add_losses(store, 0, 0, [report(1, 1.0), wrong])
    assert store.load_losses() == {}


def test_a_trial_and_its_reports_are_written_together_or_not_at_all(store: Store) -> None:
    store.save_progress(TrialRecord(0, {}, reports=2), [(0, report(1, 1.0)), (0, report(2, 0.5))])
    with pytest.raises(ValueError, match="malformed"):
        store.save_progress(TrialRecord(0, {}, reports=4), [(0, report(3, 0.4)), (0, {"loss": 1.0})])
    (trial,) = store.load_trials()
    assert trial.reports == 2
    assert [reading.step for reading in trial.readings] == [1, 2]


def test_many_losses_are_merged_evenly_and_lose_neither_mean_nor_extremes(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "MAX_REPORTS", 40)
    store.save_trial(TrialRecord(0, {}))
    values = [1 / (step + 1) for step in range(400)]
    for begin in range(0, 400, 10):
        add_losses(store, 0, 0, [report(step, values[step]) for step in range(begin, begin + 10)])
    readings = store.load_trials()[0].readings
    assert 20 <= len(readings) <= 40
    assert [reading.step for reading in readings] == sorted({reading.step for reading in readings})
    assert sum(reading.count for reading in readings) == 400
    assert math.isclose(sum(reading.loss * reading.count for reading in readings), sum(values))
    assert max(reading.high for reading in readings) == values[0]
    assert min(reading.low for reading in readings) == values[-1]
    assert readings[-1].step == 399
    # The older part stands for equally many reports a row.
    widths = [later.step - earlier.step for earlier, later in itertools.pairwise(readings[:11])]
    assert max(widths) <= 2 * min(widths)


def test_merged_losses_keep_nan_and_the_newest_metrics() -> None:
    row = {"run": 0, "train_s": 1.0, "value": None, "best": None, "reports": 1, "metrics": '{"a": 1}', "count": 1}
    rows = [
        {**row, "step": 1, "loss": 1.0, "low": 1.0, "high": 1.0},
        {**row, "step": 2, "loss": math.nan, "low": math.nan, "high": math.nan, "value": 5.0},
        {**row, "step": 3, "loss": None, "low": None, "high": None, "count": 0, "metrics": '{"a": 2}'},
    ]
    (merged,) = stores.merge_losses(rows, 1)
    assert (merged["step"], merged["count"], merged["reports"], merged["value"]) == (3, 2, 3, 5.0)
    assert merged["metrics"] == '{"a": 2}'
    assert all(math.isnan(merged[name]) for name in ("loss", "low", "high"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("last", "stored"),
    [
        # The last report, as it came before.
        ({"step": 10, "train_s": 5.0, "loss": 1.0, "low": 1.0, "high": 1.0, "count": 1, "metrics": {"a": 0.5}}, []),
        # With what a function has returned.
        ({"step": 10, "train_s": 5.0, "loss": 1.0, "metrics": {"a": 0.5, "b": 2.0}, "value": 0.25}, [(10, None, 0.25)]),
        ({"value": 0.25}, [(10, None, 0.25)]),
        # A report that was lost on its way.
        ({"step": 20, "train_s": 9.0, "loss": 0.5, "low": 0.5, "high": 0.5, "count": 1}, [(20, 0.5, None)]),
        ({}, []),
    ],
)
def test_the_last_report_of_a_run_is_stored_once(
    storage: str, last: dict[str, Any], stored: list[tuple[int, float | None, float | None]]
) -> None:
    spec = dataclasses.replace(SPEC, space=(Parameter("lr", (0.1,)),), sampler="grid", trial_count=1)
    with closing(Store(storage)) as store:
        store.create_search(spec)
        tracker = TrialTracker(spec, store, Study.create(storage, spec))
        tracker.admit(1, 0.0, 0.0)
        record = tracker.records[0]
        run = tracker.start(record, 0, "node-1", None)
        tracker.add_reports(record, run, [report(10, 1.0, metrics={"a": 0.5})])
        tracker.run_ended(record, RunEnd(0, run, "finished", last=last), 1.0)
        lines = store.load_losses()[0]
        assert [(line["step"], line.get("loss"), line.get("value")) for line in lines] == [(10, 1.0, None), *stored]
        assert store.load_trials()[0].value == last.get("value", record.value)
        assert record.metrics == {"a": 0.5, **last.get("metrics", {})}


@pytest.mark.parametrize("limit", [1, 3, 10, 11, 100])
def test_losses_can_be_asked_for_thinned(store: Store, limit: int) -> None:
    store.save_trial(TrialRecord(0, {}))
    store.save_trial(TrialRecord(1, {}))
    add_losses(store, 0, 0, [report(step, 1.0) for step in range(1, 11)])
    add_losses(store, 1, 0, [report(step, 1.0) for step in range(1, 4)])
    thinned = {trial: [line["step"] for line in lines] for trial, lines in store.load_losses(limit=limit).items()}
    stride = math.ceil(10 / limit)
    assert thinned[0] == [step for step in range(1, 11) if (10 - step) % stride == 0]
    assert len(thinned[0]) <= limit
    assert thinned[1][-1] == 3
    assert store.load_losses(1, limit).keys() == {1}
