"""Draws comparisons of policies, as Figures 5 and 6 of the paper 'Hermes'."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.simulation.comparison import TOP, PolicyResult, reference
from benchmarks.simulation.panels import draw_rows, rotate_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "fifo": "#9aa5b1",
    "rr": "#c98bb9",
    "slaq": "#e8a33d",
    "hermes": "#5b8fd6",
    "hermes2": "#7b5fc7",
    "asha": "#8c6d5a",
    "dike": "#3f9b57",
    "oracle": "#333333",
    "assignment": "#333333",
}
_OTHER = "#d6604d"


def plot_comparison(rows: Sequence[tuple[str, Sequence[PolicyResult]]], path: Path) -> None:
    """Draws a row of three panels for each comparison (title and results) into a PNG, SVG or PDF file.

    The mean time for a good trial to reach the target, the time until one and until four have reached it (all relative
    to `reference`), and how many have reached it over time.

    Raises:
        BadInputError: if the file cannot be written.
    """
    draw_rows(rows, _draw, path)


def _draw(panels: Sequence[Axes], results: Sequence[PolicyResult]) -> None:
    means, tops, reached = panels
    _draw_means(means, results)
    _draw_tops(tops, results)
    _draw_reached(reached, results)


def _draw_means(axes: Axes, results: Sequence[PolicyResult]) -> None:
    unit = reference(results)
    values = [result.mean_time_good_s / unit.mean_time_good_s for result in results]
    bars = axes.bar([result.name for result in results], values, color=[_colour(result.name) for result in results])
    axes.bar_label(bars, fmt="%.2f", fontsize=8)
    rotate_names(axes, results)
    axes.margins(y=0.1)
    axes.set_ylabel(f"mean time to target, {unit.name} = 1")


def _draw_tops(axes: Axes, results: Sequence[PolicyResult]) -> None:
    unit = reference(results)
    places = range(len(results))
    colours = [_colour(result.name) for result in results]
    firsts = [result.time_first_s / unit.time_first_s for result in results]
    tops = [result.time_top4_s / unit.time_top4_s for result in results]
    axes.bar_label(axes.bar([place - 0.2 for place in places], firsts, 0.4, color=colours), fmt="%.1f", fontsize=6)
    of_top = axes.bar([place + 0.2 for place in places], tops, 0.4, color=colours, alpha=0.55)
    axes.bar_label(of_top, fmt="%.1f", fontsize=6)
    axes.margins(y=0.1)
    axes.set_xticks(places, [result.name for result in results])
    rotate_names(axes, results)
    axes.set_ylabel(f"time of first, of top {TOP} (pale)")


def _draw_reached(axes: Axes, results: Sequence[PolicyResult]) -> None:
    """One step for each good trial of each seed, so that a line is a mean over the seeds."""
    end_s = max(outcome.reached_s[-1] for result in results for outcome in result.outcomes)
    for result in results:
        times_s = sorted(chain.from_iterable(outcome.reached_s for outcome in result.outcomes))
        counts = [count / len(result.outcomes) for count in range(len(times_s) + 1)]
        axes.step(
            [0, *times_s, end_s], [*counts, counts[-1]], where="post", color=_colour(result.name), label=result.name
        )
    axes.locator_params(axis="x", nbins=5)
    axes.set_xlabel("seconds")
    axes.set_ylabel("good trials at the target")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)


def _colour(name: str) -> str:
    return COLOURS.get(name, _OTHER)
