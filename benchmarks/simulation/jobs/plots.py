"""Draws comparisons of schedulers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.simulation.jobs.comparison import SchedulerResult, reference
from benchmarks.simulation.panels import draw_rows, rotate_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"dike": "#3f9b57", "optimus": "#333333", "drf": "#5b8fd6", "tetris": "#e8a33d", "fifo": "#9aa5b1"}
_OTHERS = ("#c98bb9", "#8c6d5a", "#d6604d", "#76b7b2")


def plot_comparison(rows: Sequence[tuple[str, Sequence[SchedulerResult]]], path: Path) -> None:
    """Draws a row of three panels for each comparison (title and results) into a PNG, SVG or PDF file.

    Mean completion time and makespan relative to `reference`, and the distribution of completion times.

    Raises:
        BadInputError: if the file cannot be written.
    """
    draw_rows(rows, _draw, path)


def _draw(panels: Sequence[Axes], results: Sequence[SchedulerResult]) -> None:
    completion, makespan, shares = panels
    unit = reference(results)
    colours = _colours(results)
    _bars(completion, results, colours, [one.mean_completion_s / unit.mean_completion_s for one in results])
    completion.set_ylabel(f"mean completion time, {unit.name} = 1")
    _bars(makespan, results, colours, [one.makespan_s / unit.makespan_s for one in results])
    makespan.set_ylabel(f"makespan, {unit.name} = 1")
    _shares(shares, results, colours)


def _colours(results: Sequence[SchedulerResult]) -> list[str]:
    others = [result.name for result in results if result.name not in COLOURS]
    return [COLOURS.get(result.name) or _OTHERS[others.index(result.name) % len(_OTHERS)] for result in results]


def _bars(axes: Axes, results: Sequence[SchedulerResult], colours: Sequence[str], values: Sequence[float]) -> None:
    axes.bar_label(axes.bar([result.name for result in results], values, color=colours), fmt="%.2f", fontsize=8)
    rotate_names(axes, results)
    axes.margins(y=0.1)


def _shares(axes: Axes, results: Sequence[SchedulerResult], colours: Sequence[str]) -> None:
    for result, colour in zip(results, colours, strict=True):
        hours = sorted(seconds / 3600 for seconds in chain.from_iterable(one.completion_s for one in result.outcomes))
        shares = [(place + 1) / len(hours) for place in range(len(hours))]
        axes.step(hours, shares, where="post", color=colour, label=result.name)
    axes.set_xscale("log")
    axes.set_xlabel("hours from arrival to end")
    axes.set_ylabel("share of the jobs")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
