"""Workers' own speed."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from dike.roles.rates import REPORT_INTERVAL_S, WorkerRates


class Recorded:
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
    recorded = Recorded()
    for _ in range(12):
        recorded.step(0, 0.05)
        recorded.step(1, 0.2)
    assert len(recorded.reports) == 1
    assert recorded.reports[0] == pytest.approx({0: 20.0, 1: 5.0})


def test_a_first_step_does_not_count() -> None:
    recorded = Recorded()
    recorded.step(0, REPORT_INTERVAL_S)
    assert recorded.reports == []
    for _ in range(5):
        recorded.step(0, REPORT_INTERVAL_S / 4)
    assert recorded.reports[0] == pytest.approx({0: 4 / REPORT_INTERVAL_S})


def test_several_steps_at_once_count_as_many() -> None:
    recorded = Recorded()
    recorded.step(0, 0.1)
    recorded.step(0, REPORT_INTERVAL_S, 8)  # the first eight, in which TensorFlow prepares the function for them
    for _ in range(5):
        recorded.step(0, REPORT_INTERVAL_S / 4, 8)
    assert recorded.reports[-1] == pytest.approx({0: 8 * 4 / REPORT_INTERVAL_S})


def test_a_worker_that_does_not_come_back_gets_slower() -> None:
    recorded = Recorded()
    recorded.step(0, 0.1)
    recorded.step(1, 0.1)
    recorded.rates.begin(1)
    begun_s = recorded.now_s
    while len(recorded.reports) < 3:
        recorded.step(0, 0.5)
    assert recorded.reports[1].keys() == {0, 1}
    assert recorded.reports[2][1] == pytest.approx(1 / (recorded.now_s - begun_s))
    assert recorded.reports[2][1] < recorded.reports[1][1] < recorded.reports[2][0]


def test_a_step_may_be_timed_elsewhere() -> None:
    recorded = Recorded()
    recorded.rates.done(3, 0.5)
    recorded.rates.done(3, 0.5)
    recorded.now_s += REPORT_INTERVAL_S
    recorded.rates.done(3, 1.0)
    assert recorded.reports == [pytest.approx({3: 2 / 1.5})]
