"""Plots the variants of a plan: speed against the varied value."""

from __future__ import annotations

from pathlib import Path

from solver.drawing.figure_files import new_figure, save_figure
from solver.variants import Variant

SPEED_COLOUR = "#5b8fd6"
NONE_COLOUR = "#b05050"


def draw_variants(variants: tuple[Variant, ...], title: str, path: Path) -> None:
    """Draws a line if the labels end in numbers, else bars; each point shows the numbers of workers and ps.

    Raises:
        BadInputError: if the file cannot be written.
    """
    figure = new_figure(max(6.0, 1.1 * len(variants) + 2), 4.2)
    axes = figure.add_subplot()
    names = [variant.label.rpartition("=")[2] for variant in variants]
    numbers = [_number(name) for name in names]
    speeds = [0.0 if variant.plan is None else variant.plan.samples_per_s for variant in variants]
    if all(number is not None for number in numbers) and len({*numbers}) > 1:
        places = [number or 0.0 for number in numbers]
        axes.plot(*zip(*sorted(zip(places, speeds, strict=True)), strict=True), color=SPEED_COLOUR, zorder=1)
        colours = [NONE_COLOUR if variant.plan is None else SPEED_COLOUR for variant in variants]
        axes.scatter(places, speeds, color=colours, zorder=2)
        axes.set_xlabel(variants[0].label.rpartition("=")[0])
    else:
        places = [float(index) for index in range(len(variants))]
        axes.bar(places, speeds, color=SPEED_COLOUR, width=0.6)
        axes.set_xticks(places, [variant.label for variant in variants], rotation=15, ha="right")
    for place, speed, variant in zip(places, speeds, variants, strict=True):
        axes.annotate(_caption(variant), (place, speed), (0, 6), textcoords="offset points", ha="center", fontsize=8)
    axes.margins(x=0.1)
    axes.set_ylim(0, 1.18 * max([*speeds, 1e-9]))
    axes.set_ylabel("predicted samples/s")
    axes.set_title(title, fontsize=11)
    axes.grid(axis="y", alpha=0.3)
    figure.tight_layout()
    save_figure(figure, path)


def _caption(variant: Variant) -> str:
    if variant.plan is None:
        return "does not fit"
    return f"{variant.plan.option.workers} w, {variant.plan.option.ps} ps"


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
