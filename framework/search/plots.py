"""Draws a search: losses of the trials, who held which slot, the best value over time."""

from __future__ import annotations

import colorsys
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from framework.search.records import SearchSpec, SliceRecord, TrialRecord, TrialState

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEGEND_TRIALS = 12
"""With more trials than this only the best are named, and the others drawn faintly."""
NAMED = 5
SLOT_HEIGHT_INCHES = 0.3
LABEL_SHARE = 0.025
"""Slices shorter than this share of the whole time are not labelled."""
LOG_RATIO = 20
"""Values that differ by more than this factor are drawn by orders of magnitude."""
LABEL_LENGTH = 48
DARK = 1.5
"""Colours with a smaller sum of red, green and blue get white letters."""
_GOLDEN = 0.618034
_FAINT = 0.35


def plot_search(spec: SearchSpec, trials: Sequence[TrialRecord], slices: Sequence[SliceRecord], path: Path) -> None:
    """Draws a search into a PNG, SVG or PDF file.

    Args:
        spec: what was asked for.
        trials: with their readings.
        slices: time slices of all trials.
        path: the file.

    Raises:
        BadInputError: if the file cannot be written.
    """
    # matplotlib takes a while to load, and most commands draw nothing.
    from solver.drawing.figure_files import check_picture_path, new_figure, save_figure

    check_picture_path(path)
    slots = sorted({record.slot for record in slices})
    height = max(1.2, SLOT_HEIGHT_INCHES * len(slots))
    figure = new_figure(11, 7.6 + height)
    losses, timeline, best = figure.subplots(3, height_ratios=(4, height, 2.4))
    named = _named(spec, trials)
    # The first colours differ most.
    by_importance = sorted(trials, key=lambda trial: trial.number not in named)
    colours = {trial.number: _colour(place) for place, trial in enumerate(by_importance)}
    _draw_losses(losses, spec, trials, colours, named)
    begin_s = min((record.start_s for record in slices), default=0.0)
    timed = sorted(_timed_losses(trials, slices))
    known_s = [record.end_s or record.first_step_s or record.start_s for record in slices]
    end_s = max([*known_s, *(at_s for at_s, _, _ in timed)], default=0.0)
    _draw_slots(timeline, slices, slots, (begin_s, end_s), colours)
    _draw_best(best, spec, timed, (begin_s, end_s))
    figure.suptitle(f"{spec.name}: {len(trials)} trials, policy {spec.policy}")
    figure.tight_layout()
    save_figure(figure, path)


def _draw_losses(
    axes: Axes, spec: SearchSpec, trials: Sequence[TrialRecord], colours: dict[int, Any], named: set[int]
) -> None:
    sign = 1 if spec.mode == "min" else -1
    values: list[float] = []
    for trial in trials:
        points = [(reading.step, sign * reading.loss) for reading in trial.readings if math.isfinite(reading.loss)]
        if not points:
            continue
        values += [value for _, value in points]
        stands_out = trial.number in named
        axes.plot(
            *zip(*points, strict=True),
            color=colours[trial.number],
            label=_label(trial) if stands_out else None,
            linewidth=1.4 if stands_out else 0.8,
            alpha=1.0 if stands_out else _FAINT,
            marker="." if len(points) == 1 else None,
        )
    # Losses fall by orders of magnitude, and one that diverges would flatten all others.
    if values and min(values) > 0 and max(values) > LOG_RATIO * min(values):
        axes.set_yscale("log")
    axes.set_xlabel("training steps")
    axes.set_ylabel("training loss" if spec.metric == "loss" else spec.metric)
    if axes.get_legend_handles_labels()[0]:
        title = "trial" if len(named) == len(trials) else "best trials"
        axes.legend(title=title, fontsize="x-small", loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _draw_slots(
    axes: Axes,
    slices: Sequence[SliceRecord],
    slots: Sequence[int],
    whole_s: tuple[float, float],
    colours: dict[int, Any],
) -> None:
    begin_s, end_s = whole_s
    row = {slot: place for place, slot in enumerate(slots)}
    for record in slices:
        trained_s = record.first_step_s
        until_s = end_s if record.end_s is None else record.end_s
        start, width = record.start_s - begin_s, until_s - record.start_s
        colour = colours.get(record.trial, (0.5, 0.5, 0.5))
        axes.barh(row[record.slot], width, left=start, height=0.8, color=colour, alpha=_FAINT)
        if trained_s is not None:
            axes.barh(row[record.slot], until_s - trained_s, left=trained_s - begin_s, height=0.8, color=colour)
        if width > LABEL_SHARE * (end_s - begin_s):
            label_colour = "white" if sum(colour) < DARK else "black"
            place = (start + width / 2, row[record.slot])
            axes.text(*place, str(record.trial), ha="center", va="center", fontsize=7, color=label_colour)
    axes.set_yticks(range(len(slots)), [f"slot {slot}" for slot in slots])
    axes.invert_yaxis()
    axes.set_xlim(0, max(end_s - begin_s, 1e-3))
    axes.set_xlabel("seconds (number and colour: trial; pale: not training)")


def _draw_best(
    axes: Axes, spec: SearchSpec, timed: Sequence[tuple[float, float, int]], whole_s: tuple[float, float]
) -> None:
    sign = 1 if spec.mode == "min" else -1
    times: list[float] = []
    values: list[float] = []
    leader: int | None = None
    for at_s, loss, trial in timed:
        if values and loss >= sign * values[-1]:
            continue
        times.append(at_s - whole_s[0])
        values.append(sign * loss)
        if trial != leader:
            axes.annotate(str(trial), (times[-1], values[-1]), (0, 4), textcoords="offset points", fontsize=7)
            leader = trial
    end = max(whole_s[1] - whole_s[0], 1e-3)
    axes.step([*times, end], [*values, *values[-1:]] if values else [math.nan], where="post", color="black")
    if values and min(values) > 0 and max(values) > LOG_RATIO * min(values):
        axes.set_yscale("log")
    axes.set_xlim(0, end)
    axes.set_xlabel("seconds (number: trial that takes the lead)")
    axes.set_ylabel(f"best {spec.metric} so far")


def _timed_losses(trials: Sequence[TrialRecord], slices: Sequence[SliceRecord]) -> Iterator[tuple[float, float, int]]:
    """Wall-clock time, objective (to be minimised) and trial of all readings whose time slice is known."""
    for trial in trials:
        own = [record for record in slices if record.trial == trial.number and record.first_step_s is not None]
        own.sort(key=lambda record: record.from_step)
        starts = [record.from_step for record in own]
        before_s = dict.fromkeys(range(len(own)), 0.0)
        train_s = 0.0
        last = -1
        for reading in trial.readings:
            place = bisect_left(starts, reading.step) - 1
            if place >= 0 and math.isfinite(reading.loss):
                if place != last:
                    before_s[place], last = train_s, place
                first_step_s = own[place].first_step_s
                assert first_step_s is not None
                yield first_step_s + reading.train_s - before_s[place], reading.loss, trial.number
            train_s = reading.train_s


def _named(spec: SearchSpec, trials: Sequence[TrialRecord]) -> set[int]:
    if len(trials) <= LEGEND_TRIALS:
        return {trial.number for trial in trials}
    comparable = [trial for trial in trials if trial.state is not TrialState.FAILED and trial.beats(None, spec.mode)]
    comparable.sort(key=lambda trial: trial.value or 0.0, reverse=spec.mode == "max")
    return {trial.number for trial in comparable[:NAMED]}


def _label(trial: TrialRecord) -> str:
    values = (f"{value:.4g}" if isinstance(value, float) else str(value) for value in trial.parameters.values())
    label = f"{trial.number}: " + ", ".join(map("=".join, zip(trial.parameters, values, strict=True)))
    return label if len(label) <= LABEL_LENGTH else f"{label[: LABEL_LENGTH - 3]}..."


def _colour(place: int) -> tuple[float, float, float]:
    """Any number of colours; neighbours are far from each other on the colour circle."""
    return colorsys.hsv_to_rgb(place * _GOLDEN % 1, 0.55 + 0.3 * (place % 2), 0.85 - 0.2 * (place // 2 % 2))
