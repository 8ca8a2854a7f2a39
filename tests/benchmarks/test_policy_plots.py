"""What the pictures of policies are drawn from."""

from __future__ import annotations

import itertools
import math
from itertools import pairwise
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.search.policy_plots import Recorder, losses_over_time
from benchmarks.simulation.bins import Bin
from benchmarks.simulation.comparison import PolicyResult
from benchmarks.simulation.curves import Curve
from benchmarks.simulation.plots import COLOURS, plot_comparison
from benchmarks.simulation.world import Outcome, World, WorldSettings
from framework.policies.trials.interface import PolicySettings
from framework.policies.trials.registry import make_policy
from solver.drawing import figure_files

OVERHEAD_S = 2.0


def straight(number: int, length_s: float) -> Curve:
    """A loss that falls from 1 to 0."""
    return Curve(str(number), [0.0, length_s], [0, 100], [1.0, 0.0])


@pytest.mark.parametrize("policy", ["rr", "hermes", "dike", "fifo"])
def test_what_is_drawn_is_what_happened(policy: str) -> None:
    lengths_s = (90.0, 150.0, 210.0, 130.0, 170.0)
    trials = Bin(tuple(straight(*one) for one in enumerate(lengths_s)), tuple(length_s / 2 for length_s in lengths_s))
    recorder = Recorder(make_policy(policy, PolicySettings(quantum_s=20.0, trials_per_slot=3)))
    outcome = World(trials, recorder, WorldSettings(2, OVERHEAD_S, 5.0, until="target")).run()
    slices = recorder.slices(outcome.reached_s[-1])
    for slot in (0, 1):
        held = [piece for piece in slices if piece.slot == slot]
        assert all(before.end_s <= after.start_s for before, after in pairwise(held))
    ends_s = []
    for trial, target_s in enumerate(trials.target_s):
        held = [piece for piece in slices if piece.trial == trial]
        assert sum(piece.end_s - piece.start_s - OVERHEAD_S for piece in held) == pytest.approx(target_s)
        ends_s.append(held[-1].end_s)
        points = losses_over_time(slices, trial, recorder.readings[trial], OVERHEAD_S)
        losses = [loss for _, loss in points if not math.isnan(loss)]
        assert len(losses) == len(recorder.readings[trial]), "every report is drawn"
        assert sum(math.isnan(loss) for _, loss in points) == len(held), "and the line broken where the slot was lost"
        assert all(before[0] <= after[0] for before, after in pairwise(points))
        for time_s, loss in points:
            piece = next(piece for piece in held if piece.start_s <= time_s <= piece.end_s * (1 + 1e-9))
            before_s = sum(p.end_s - p.start_s - OVERHEAD_S for p in held if p.end_s <= piece.start_s)
            trained_s = before_s + time_s - piece.start_s - OVERHEAD_S
            if not math.isnan(loss):
                # A report is the mean of the 5 s before it.
                assert loss == pytest.approx(1 - trained_s / (2 * target_s), abs=5.0 / (2 * target_s))
    assert sorted(ends_s) == pytest.approx(outcome.reached_s)
    assert policy != "rr" or outcome.preemptions > 10


def test_names_and_figures_of_bars_do_not_cover_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(figure_files, "save_figure", lambda figure, path: drawn.append(figure))
    outcome = Outcome((10.0, 20.0, 30.0, 40.0), preemptions=0, decisions=1)
    results = [PolicyResult(name, (outcome,)) for name in COLOURS if name != "assignment"]
    plot_comparison([("all alike", results)], tmp_path / "policies.png")
    means, tops, _ = drawn[0].axes
    FigureCanvasAgg(drawn[0]).draw()
    renderer = FigureCanvasAgg(drawn[0]).get_renderer()
    for axes in (means, tops):
        assert {label.get_rotation() for label in axes.get_xticklabels()} == {30.0}
        figures = [text.get_window_extent(renderer) for text in axes.texts]
        assert not any(one.overlaps(other) for one, other in itertools.combinations(figures, 2))
