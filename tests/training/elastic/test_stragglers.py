"""Workers that are slower than half the median for several reports in a row."""

from __future__ import annotations

from framework.training.elastic.stragglers import MIN_SLOW_REPORTS, StragglerDetector
from tests.training.job_stage import JobStage, spec


def test_a_worker_that_stays_slow_is_a_straggler() -> None:
    detector = StragglerDetector()
    found = [detector.add({0: 10.0, 1: 4.0, 2: 11.0}) for _ in range(MIN_SLOW_REPORTS)]
    assert found[:-1] == [None] * (MIN_SLOW_REPORTS - 1)
    assert found[-1] is not None
    assert (found[-1].index, found[-1].steps_per_s, found[-1].median_steps_per_s) == (1, 4.0, 10.0)


def test_a_slow_moment_makes_no_straggler() -> None:
    detector = StragglerDetector()
    for _ in range(3):
        for _ in range(MIN_SLOW_REPORTS - 1):
            assert detector.add({0: 10.0, 1: 4.0, 2: 11.0}) is None
        assert detector.add({0: 10.0, 1: 9.0, 2: 11.0}) is None


def test_workers_that_report_for_themselves_are_compared_too() -> None:
    detector = StragglerDetector()
    found = None
    for _ in range(MIN_SLOW_REPORTS + 1):
        for index, rate in ((0, 10.0), (1, 4.0), (2, 11.0)):
            found = detector.add({index: rate}) or found
    assert found is not None
    assert found.index == 1


def test_a_single_worker_is_never_slow() -> None:
    detector = StragglerDetector()
    assert [detector.add({0: 1.0}) for _ in range(2 * MIN_SLOW_REPORTS)] == [None] * (2 * MIN_SLOW_REPORTS)


def test_other_workers_begin_anew() -> None:
    detector = StragglerDetector()
    for _ in range(MIN_SLOW_REPORTS - 1):
        detector.add({0: 10.0, 1: 1.0, 2: 10.0})
    detector.reset()
    assert detector.add({0: 10.0, 1: 1.0, 2: 10.0}) is None


def test_a_job_of_one_size_reports_its_straggler_once() -> None:
    for choice, told in (("report", 1), ("ignore", 0)):
        stage = JobStage(spec(stragglers=choice))
        chief = stage.start()["worker:0"]
        for _ in range(2 * MIN_SLOW_REPORTS):
            stage.rates(chief, {0: 10.0, 1: 1.0, 2: 10.0})
        assert len([note for note in stage.observer.notes if "worker:1 makes 1 steps/s" in note]) == told
