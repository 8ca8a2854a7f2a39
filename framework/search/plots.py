"""Plots a search: losses of the trials, timeline of the slots, best value over time."""

from __future__ import annotations

import colorsys
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from framework.policies.trials.interface import Reading
from framework.search.records import SearchSpec, SliceRecord, TrialRecord, best_trials

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_LEGEND_TRIALS = 12
"""With more trials only the best are labelled, and the others drawn faintly."""
MAX_NAMED_TRIALS = 5
SLOT_HEIGHT_INCHES = 0.3
MIN_LABEL_WIDTH_SHARE = 0.025
"""Slices shorter than this share of the timeline are not labelled."""
LABEL_HEIGHT_SHARE = 0.12
"""Height of a label with its margin, as a share of the last panel."""
LOG_RATIO = 20
"""Ratio of values above which the axis is logarithmic."""
MAX_LABEL_LENGTH = 48
DARK_RGB_SUM = 1.5
"""Colours with a smaller sum of red, green and blue get white labels."""
SHORT_STRETCH_SHARE = 0.25
"""Stretches with fewer losses than this share of the median are merged with the next."""
_GOLDEN = 0.618034
_FAINT = 0.35


def plot_search(
    spec: SearchSpec,
    trials: Sequence[TrialRecord],
    slices: Sequence[SliceRecord],
    reports: Mapping[int, Sequence[Mapping[str, Any]]],
    path: Path,
) -> None:
    """Plots a search into a PNG, SVG or PDF file.


    Raises:
        BadInputError: if the file cannot be written.
    """
    # Imported here, as matplotlib loads slowly and most commands draw nothing.
    from solver.drawing.figure_files import check_picture_path, save_figure

    check_picture_path(path)
    save_figure(draw_search(spec, trials, slices, reports), path)


def draw_search(
    spec: SearchSpec,
    trials: Sequence[TrialRecord],
    slices: Sequence[SliceRecord],
    reports: Mapping[int, Sequence[Mapping[str, Any]]],
) -> Figure:
    from solver.drawing.figure_files import new_figure

    slots = sorted({record.slot for record in slices})
    height = max(1.2, SLOT_HEIGHT_INCHES * len(slots))
    figure = new_figure(11, 7.6 + height)
    losses, timeline, best = figure.subplots(3, height_ratios=(4, height, 2.4))
    named = _named(spec, trials)
    # Named trials get the first colours, which differ most.
    by_importance = sorted(trials, key=lambda trial: trial.number not in named)
    colours = {trial.number: _colour(place) for place, trial in enumerate(by_importance)}
    _draw_losses(losses, spec, trials, colours, named)
    begin_s = min((record.start_s for record in slices), default=0.0)
    timed = [
        (at_s, value, trial.number)
        for trial in trials
        for at_s, value in _timed_values(
            [time_slice for time_slice in slices if time_slice.trial == trial.number], reports.get(trial.number, ())
        )
    ]
    # Stable: of two reports at the same time the later one counts.
    timed.sort(key=lambda value: value[0])
    known_s = [record.end_s or record.first_step_s or record.start_s for record in slices]
    end_s = max([*known_s, *(at_s for at_s, _, _ in timed)], default=0.0)
    _draw_slots(timeline, slices, slots, (begin_s, end_s), colours)
    _draw_best(best, spec, timed, (begin_s, end_s))
    figure.suptitle(f"{spec.name}: {len(trials)} trials, policy {spec.policy}")
    figure.tight_layout()
    return figure


def _draw_losses(
    axes: Axes, spec: SearchSpec, trials: Sequence[TrialRecord], colours: dict[int, Any], named: set[int]
) -> None:
    sign = 1 if spec.mode == "min" else -1
    values: list[float] = []
    for trial in trials:
        points = [(step, sign * loss) for step, loss in _without_short_stretches(trial.readings)]
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
    # Losses fall by orders of magnitude, and a diverged one would flatten all others.
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
        # Labels the solid part if there is room.
        solid = 0.0 if trained_s is None else until_s - trained_s
        if solid > MIN_LABEL_WIDTH_SHARE * (end_s - begin_s):
            start, width = until_s - solid - begin_s, solid
        if width > MIN_LABEL_WIDTH_SHARE * (end_s - begin_s):
            label_colour = "white" if sum(colour) < DARK_RGB_SUM and width == solid else "black"
            place = (start + width / 2, row[record.slot])
            axes.text(*place, str(record.trial), ha="center", va="center", fontsize=7, color=label_colour)
    kinds = {record.slot: f", {record.kind}" if record.kind else "" for record in slices}
    axes.set_yticks(range(len(slots)), [f"slot {slot}{kinds[slot]}" for slot in slots])
    axes.invert_yaxis()
    axes.set_xlim(0, max(end_s - begin_s, 1e-3))
    axes.set_xlabel("seconds (number and colour: trial; pale: not training)")


def _draw_best(
    axes: Axes, spec: SearchSpec, timed: Sequence[tuple[float, float, int]], whole_s: tuple[float, float]
) -> None:
    sign = 1 if spec.mode == "min" else -1
    times: list[float] = []
    values: list[float] = []
    leads: list[tuple[float, float, int]] = []
    leader: int | None = None
    for at_s, value, trial in timed:
        if not math.isfinite(value) or (values and sign * value >= sign * values[-1]):
            continue
        times.append(at_s - whole_s[0])
        values.append(value)
        if trial != leader:
            leads.append((times[-1], value, trial))
        leader = trial
    end = max(whole_s[1] - whole_s[0], 1e-3)
    axes.step([*times, end], [*values, *values[-1:]] if values else [math.nan], where="post", color="black")
    if values and min(values) > 0 and max(values) > LOG_RATIO * min(values):
        axes.set_yscale("log")
    axes.margins(y=LABEL_HEIGHT_SHARE)
    axes.set_xlim(0, end)
    _draw_leaders(axes, leads)
    axes.set_xlabel("seconds (number: trial that takes the lead)")
    axes.set_ylabel(f"best {spec.metric} so far")


def _draw_leaders(axes: Axes, leads: Sequence[tuple[float, float, int]]) -> None:
    """Labels changes of the leading trial, the last first, without overlaps."""
    place_in_axes = axes.transScale + axes.transLimits
    taken: list[tuple[float, float]] = []
    shown = []
    for at_s, value, trial in reversed(leads):
        x, y = place_in_axes.transform((at_s, value))
        if not any(
            abs(x - other[0]) < MIN_LABEL_WIDTH_SHARE and abs(y - other[1]) < LABEL_HEIGHT_SHARE for other in taken
        ):
            taken.append((x, y))
            shown.append((at_s, value, trial))
    for at_s, value, trial in reversed(shown):
        axes.annotate(str(trial), (at_s, value), (0, 4), textcoords="offset points", fontsize=7)


def _without_short_stretches(readings: Sequence[Reading]) -> list[tuple[int, float]]:
    """Returns step and mean loss of comparable stretches: a resumed run reports its first step alone."""
    finite = [reading for reading in readings if math.isfinite(reading.loss)]
    if not finite:
        return []
    least = SHORT_STRETCH_SHARE * median(reading.count for reading in finite)
    stretches: list[list[Reading]] = [[]]
    for reading in finite:
        if sum(part.count for part in stretches[-1]) >= least:
            stretches.append([])
        stretches[-1].append(reading)
    if len(stretches) > 1 and sum(part.count for part in stretches[-1]) < least:
        stretches[-2:] = [stretches[-2] + stretches[-1]]
    return [
        (parts[-1].step, sum(part.loss * part.count for part in parts) / sum(part.count for part in parts))
        for parts in stretches
    ]


def _timed_values(slices: Sequence[SliceRecord], reports: Sequence[Mapping[str, Any]]) -> Iterator[tuple[float, float]]:
    """Yields wall-clock time and the trial's best value so far, for reports whose time slice is known."""
    slices_by_run = {time_slice.run: time_slice for time_slice in slices}
    steps = [report["step"] for report in reports]
    for report in reports:
        time_slice = slices_by_run.get(report["run"])
        # Absent before the first finite value.
        value = report.get("best", report.get("value"))
        if value is None or time_slice is None or time_slice.first_step_s is None:
            continue
        before = bisect_right(steps, time_slice.from_step) - 1
        begin_train_s = reports[before]["train_s"] if before >= 0 else 0.0
        yield time_slice.first_step_s + report["train_s"] - begin_train_s, value


def _named(spec: SearchSpec, trials: Sequence[TrialRecord]) -> set[int]:
    if len(trials) <= MAX_LEGEND_TRIALS:
        return {trial.number for trial in trials}
    return {trial.number for trial in best_trials(trials, spec.mode)[:MAX_NAMED_TRIALS]}


def _label(trial: TrialRecord) -> str:
    values = (f"{value:.4g}" if isinstance(value, float) else str(value) for value in trial.parameters.values())
    label = f"{trial.number}: " + ", ".join(map("=".join, zip(trial.parameters, values, strict=True)))
    return label if len(label) <= MAX_LABEL_LENGTH else f"{label[: MAX_LABEL_LENGTH - 3]}..."


def _colour(place: int) -> tuple[float, float, float]:
    """Returns any number of colours, with neighbours far apart on the colour circle."""
    return colorsys.hsv_to_rgb(place * _GOLDEN % 1, 0.55 + 0.3 * (place % 2), 0.85 - 0.2 * (place // 2 % 2))
