"""What the measured experiment measures, and how it compares ranks."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.measured import CASES, METHODS, rank_correlation
from benchmarks.measured_layouts import Case, cluster, layouts
from solver.units import SPEED_TIE_SHARE


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_layouts_are_distinct_possible_and_hold_what_each_method_chooses(case: Case) -> None:
    found = layouts(case, cluster(case, case.rates_mbps, case.uplink_mbps))
    assert len({layout.text for layout in found}) == len(found)
    assert len(found) <= case.max_layouts
    for layout in found:
        ps, workers = layout.assignment.ps, layout.assignment.workers
        assert len(set(ps)) == len(ps)
        assert all(workers.count(node) <= case.gpus[case.host(node)] for node in workers)
        assert case.shared or not {*ps} & {*workers}
    for method in METHODS:
        assert sum(method in layout.methods for layout in found) == 1
    # Dike's choice is the model's: what is measured must not be picked so that another looks better by the model.
    fastest = max(layout.steps_per_s for layout in found)
    assert next(layout for layout in found if "Dike" in layout.methods).steps_per_s >= fastest * (1 - SPEED_TIE_SHARE)


def test_equal_hosts_are_not_distinguished() -> None:
    alike = Case("alike", (100.0,) * 3, (1,) * 3, 0.1, shared=True, synchronous=False, max_layouts=1000)
    apart = Case("apart", (100.0, 200.0, 400.0), (1,) * 3, 0.1, shared=True, synchronous=False, max_layouts=1000)
    counts = [len(layouts(case, cluster(case, case.rates_mbps))) for case in (alike, apart)]
    # Each host has a ps, a worker, both or neither: 4^3, less 2 * 2^3 without a ps or without a worker, plus the empty
    # one, taken away twice. Twelve equal variables give equal shards, so hosts alike leave the multisets of size 3.
    assert counts == [20 - 4 - 4 + 1, 64 - 8 - 8 + 1]


def test_ranks_are_compared_and_ties_share_theirs() -> None:
    values = np.array([0.1, 5.0, 2.0, 30.0])
    assert rank_correlation(values, np.exp(values)) == pytest.approx(1)
    assert rank_correlation(values, -values) == pytest.approx(-1)
    assert rank_correlation(np.array([1.0, 1.0, 2.0]), np.array([1.0, 2.0, 3.0])) == pytest.approx(np.sqrt(0.75))
