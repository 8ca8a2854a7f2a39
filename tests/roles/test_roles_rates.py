"""Workers' own speed."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from dike.roles.rates import REPORT_INTERVAL_S, WorkerRates


class RatesStage:
    """Rates on a clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.reports: list[dict[int, float]] = []
        self.rates = WorkerRates(self._report, lambda: self.now_s)

    def _report(self, rates: Mapping[int, float]) -> None:
        self.reports.append(dict(rates))

    def step(self, worker: int, seconds: float, count: int = 1) -> None:
        self.rates.begin(worker, count)
        self.now_s += seconds
        self.rates.done(worker)


def test_only_the_time_of_a_workers_own_steps_counts() -> None:
    stage = RatesStage()
    for _ in range(12):
        stage.step(0, 0.05)
        stage.step(1, 0.2)
    assert len(stage.reports) == 1
    assert stage.reports[0] == pytest.approx({0: 20.0, 1: 5.0})


def test_a_first_step_does_not_count() -> None:
    stage = RatesStage()
    stage.step(0, REPORT_INTERVAL_S)
    assert stage.reports == []
    for _ in range(5):
        stage.step(0, REPORT_INTERVAL_S / 4)
    assert stage.reports[0] == pytest.approx({0: 4 / REPORT_INTERVAL_S})


def test_several_steps_at_once_count_as_many() -> None:
    stage = RatesStage()
    stage.step(0, 0.1)
    stage.step(0, REPORT_INTERVAL_S, 8)  # the first eight, in which TensorFlow prepares the function for them
    for _ in range(5):
        stage.step(0, REPORT_INTERVAL_S / 4, 8)
    assert stage.reports[-1] == pytest.approx({0: 8 * 4 / REPORT_INTERVAL_S})


def test_a_worker_that_does_not_come_back_gets_slower() -> None:
    stage = RatesStage()
    stage.step(0, 0.1)
    stage.step(1, 0.1)
    stage.rates.begin(1)
    begun_s = stage.now_s
    while len(stage.reports) < 3:
        stage.step(0, 0.5)
    assert stage.reports[1].keys() == {0, 1}
    assert stage.reports[2][1] == pytest.approx(1 / (stage.now_s - begun_s))
    assert stage.reports[2][1] < stage.reports[1][1] < stage.reports[2][0]


def test_a_step_may_be_timed_elsewhere() -> None:
    stage = RatesStage()
    stage.rates.done(3, 0.5)
    stage.rates.done(3, 0.5)
    stage.now_s += REPORT_INTERVAL_S
    stage.rates.done(3, 1.0)
    assert stage.reports == [pytest.approx({3: 2 / 1.5})]
