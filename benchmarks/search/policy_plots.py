"""Draws the schedules of all policies for the same bin of trials: GPUs and losses over time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from benchmarks.search.simulated import DATA, SETS
from benchmarks.simulation.bins import Bin, draw_bin
from benchmarks.simulation.comparison import POLICY_NAMES, Scenario, SimulationSettings, policies_named, resolve
from benchmarks.simulation.curves import Curve, read_curves
from benchmarks.simulation.throughputs import draw_jobs, read_throughputs
from benchmarks.simulation.world import Outcome, World
from framework.policies.trials.interface import Decision, Policy, PolicySettings, Reading, SlotView, TrialView
from solver.drawing.figure_files import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLE = "What each policy does, drawn"
PICTURES = Path(__file__).parents[2] / "docs" / "policies"
SEED = 6
"""Seed of the bin; its times are close to the policies' means."""
GOOD_COLOURS = ("#3f9b57", "#5b8fd6", "#e8a33d", "#b04fa0")
OTHER_COLOURS = ("#b8bec6", "#cfd4da", "#dfe2e6")
HOUR_S = 3600.0

THROUGHPUTS = Path(__file__).parents[1] / "data" / "throughput" / "gavel_simulation_throughputs.json.gz"
TYPED = ("hermes2", "assignment")
"""Drawn on GPUs of `TYPES`: on equal ones `hermes2` is `hermes`, and `assignment` is no limit."""
TYPES = ("k80", "p100", "v100", "v100")
MODEL = "ResNet-50"


@dataclass(frozen=True)
class Slice:
    """A time slice of a trial in a slot.

    Attributes:
        start_s, end_s: time of the search; start-up and resumption of the trial included.
    """

    slot: int
    trial: int
    start_s: float
    end_s: float


class Recorder:
    """A policy that delegates to another and records the time slices.

    `policy`: the other.
    """

    def __init__(self, policy: Policy) -> None:
        self.name = policy.name
        self.readings: dict[int, Sequence[Reading]] = {}
        """Trial -> all its reports, after its end too."""
        self._policy = policy
        self._slices: list[Slice] = []
        self._held: dict[int, SlotView] = {}

    def decide(self, now_s: float, trials: Sequence[TrialView], slots: Sequence[SlotView]) -> Decision:
        for trial in trials:
            self.readings[trial.id] = trial.readings
        for slot in slots:
            held = self._held.get(slot.id)
            if held is not None and (held.trial, held.since_s) == (slot.trial, slot.since_s):
                continue
            if held is not None:
                # After the end of a trial, `since_s` is unchanged.
                self._close(held, slot.since_s if slot.since_s > held.since_s else now_s)
            self._held[slot.id] = slot
        return self._policy.decide(now_s, trials, slots)

    def slices(self, end_s: float) -> list[Slice]:
        """Returns all slices by end time; ends running ones at `end_s`."""
        for slot in self._held.values():
            self._close(slot, end_s)
        self._held.clear()
        return self._slices

    def _close(self, slot: SlotView, end_s: float) -> None:
        if slot.trial is not None:
            self._slices.append(Slice(slot.id, slot.trial, slot.since_s, end_s))


@dataclass(frozen=True)
class _Run:
    """Results of a policy.

    Attributes:
        slices: time slices until the last good trial reached the target.
        losses: trial -> points of search time in seconds and loss.
    """

    outcome: Outcome
    slices: Sequence[Slice]
    losses: Mapping[int, Sequence[tuple[float, float]]]

    @property
    def mean_s(self) -> float:
        return fmean(self.outcome.reached_s)

    @property
    def completion_s(self) -> float:
        return fmean(self.outcome.completion_s)

    @property
    def end_s(self) -> float:
        return self.outcome.reached_s[-1]


@dataclass(frozen=True)
class _Setup:
    """A bin and its scenario, shared by the pictures of several policies."""

    trials: Bin
    scenario: Scenario

    @cached_property
    def good(self) -> list[int]:
        return [trial for trial, target_s in enumerate(self.trials.target_s) if math.isfinite(target_s)]

    @cached_property
    def colours(self) -> dict[int, str]:
        others = [trial for trial in range(len(self.trials.curves)) if trial not in self.good]
        colours = dict(zip(self.good, GOOD_COLOURS, strict=True))
        return colours | {trial: OTHER_COLOURS[place % len(OTHER_COLOURS)] for place, trial in enumerate(others)}

    def run(self, name: str) -> _Run:
        scenario = self.scenario
        settings = PolicySettings(
            quantum_s=scenario.quantum_s,
            trials_per_slot=scenario.trials_per_slot,
            seed=SEED,
            switch_s=scenario.world.overhead_s,
        )
        make = policies_named([name], typed=bool(scenario.world.kinds))[name]
        recorder = Recorder(make(self.trials, settings))
        outcome = World(self.trials, recorder, scenario.world).run()
        slices = recorder.slices(max((*outcome.reached_s, *outcome.completion_s)))
        losses = {
            trial: losses_over_time(slices, trial, readings, scenario.world.overhead_s)
            for trial, readings in recorder.readings.items()
        }
        return _Run(outcome, slices, losses)


def measure() -> Iterator[str]:
    """Reports the figures, and draws the pictures of docs/policies.md."""
    one = SETS[0]
    curves = read_curves(DATA / one.file)
    alike = SimulationSettings(target_share=one.target_share)
    jobs = read_throughputs(THROUGHPUTS).jobs(TYPES, [MODEL])
    setups = [_make_setup(curves, alike), _make_setup(curves, replace(alike, gpu_types=TYPES, table_jobs=jobs))]
    runs = {name: setups[0].run(name) for name in POLICY_NAMES if name not in TYPED}
    typed = {name: setups[1].run(name) for name in (*TYPED, "hermes")}
    scenario = setups[0].scenario
    yield f"{one.name}: one bin of {scenario.jobs} trials (seed {SEED}), {scenario.good} of them good, on"
    yield f"{scenario.world.slots} GPUs that are alike, or on GPUs {', '.join(TYPES)}: there the trials are"
    yield f"as fast as {MODEL} with batches of different sizes, and the bad ones run to the end of their curve."
    yield ""
    yield "| policy | GPUs | mean of the good, h | last good, h | all trials, mean, h | preemptions |"
    yield "|---|---|---|---|---|---|"
    for name, run in runs.items():
        yield f"| {name} | alike | {_hours(run)} | - | {run.outcome.preemptions} |"
    for name, run in typed.items():
        yield f"| {name} | types | {_hours(run)} | {run.completion_s / HOUR_S:.1f} | {run.outcome.preemptions} |"
    PICTURES.mkdir(exist_ok=True)
    for setup, drawn in ((setups[0], runs), (setups[1], {name: typed[name] for name in TYPED})):
        end_s = max(run.end_s for run in drawn.values())
        for name, run in drawn.items():
            _draw(name, run, setup, end_s)


def _hours(run: _Run) -> str:
    return f"{run.mean_s / HOUR_S:.1f} | {run.end_s / HOUR_S:.1f}"


def _make_setup(curves: Sequence[Curve], settings: SimulationSettings) -> _Setup:
    scenario = resolve(curves, settings)
    trials = draw_bin(curves, scenario.target, scenario.jobs, scenario.good, SEED)
    if settings.table_jobs:
        trials = replace(trials, jobs=draw_jobs(settings.table_jobs, scenario.jobs, SEED))
    return _Setup(trials, scenario)


def losses_over_time(
    slices: Sequence[Slice], trial: int, readings: Sequence[Reading], overhead_s: float
) -> list[tuple[float, float]]:
    """Returns a trial's reports by search time.

    Args:
        slices: of all trials, each trial's in order.
        trial: the trial's number.
        readings: its reports.
        overhead_s: from the start of a slice to its first second of training.

    Returns:
        Seconds and loss; a NaN after each slice, so that no line is drawn across the gap.
    """
    points: list[tuple[float, float]] = []
    place, trained_s = 0, 0.0
    for piece in slices:
        if piece.trial != trial:
            continue
        trains_from_s = piece.start_s + overhead_s
        before_s, trained_s = trained_s, trained_s + max(piece.end_s - trains_from_s, 0.0)
        # Tolerance: rounding may put the last report after the end of its slice.
        until_s = trained_s * (1 + 1e-9)
        while place < len(readings) and readings[place].train_s <= until_s:
            points.append((trains_from_s + readings[place].train_s - before_s, readings[place].loss))
            place += 1
        points.append((piece.end_s, math.nan))
    return points


def _draw(name: str, run: _Run, setup: _Setup, end_s: float) -> None:
    figure = new_figure(9, 4.6)
    timeline, losses = figure.subplots(2, height_ratios=(1, 1.5), sharex=True)
    _draw_slices(timeline, run, setup)
    _draw_losses(losses, run, setup)
    mean_h = run.mean_s / HOUR_S
    title = f"{name}: the good trials (coloured) are there after {mean_h:.1f} h in the mean"
    if setup.scenario.world.kinds:
        whole_h = run.completion_s / HOUR_S
        title = f"{name}: mean time to the target (coloured trials) {mean_h:.1f} h, to the end (all) {whole_h:.1f} h"
    timeline.set_title(title, loc="left")
    timeline.set_xlim(0, end_s / HOUR_S)
    losses.set_xlabel("hours since the search began")
    figure.tight_layout()
    save_figure(figure, PICTURES / f"{name}.png")


def _draw_slices(axes: Axes, run: _Run, setup: _Setup) -> None:
    world = setup.scenario.world
    for slot in range(world.slots):
        held = [piece for piece in run.slices if piece.slot == slot and piece.start_s < run.end_s]
        axes.broken_barh(
            [(piece.start_s / HOUR_S, (min(piece.end_s, run.end_s) - piece.start_s) / HOUR_S) for piece in held],
            (slot - 0.42, 0.84),
            facecolors=[setup.colours[piece.trial] for piece in held],
        )
    axes.set_yticks(range(world.slots), world.kinds or [f"GPU {slot}" for slot in range(world.slots)])
    axes.invert_yaxis()


def _draw_losses(axes: Axes, run: _Run, setup: _Setup) -> None:
    # Good trials last, on top.
    for trial in sorted(run.losses, key=lambda trial: trial in setup.good):
        points = [(time_s / HOUR_S, loss) for time_s, loss in run.losses[trial] if time_s <= run.end_s]
        width = 1.6 if trial in setup.good else 0.9
        axes.plot(*zip(*points, strict=True), color=setup.colours[trial], linewidth=width)
    target = setup.scenario.target
    axes.plot(*zip(*_best_so_far(run), strict=True), color="black", linewidth=0.9, linestyle=":", label="best so far")
    axes.axhline(target, color="#d6604d", linewidth=0.8, label="target")
    for trial in setup.good:
        there_s = max(piece.end_s for piece in run.slices if piece.trial == trial)
        axes.plot(there_s / HOUR_S, target, marker="v", color=setup.colours[trial], markersize=8, clip_on=False)
    axes.set_ylabel("training loss")
    axes.set_ylim(0, 1.05 * max(run.losses[trial][0][1] for trial in setup.good))
    axes.legend(fontsize=8, loc="upper right")


def _best_so_far(run: _Run) -> list[tuple[float, float]]:
    """Hours, and the lowest loss that any trial has reported by then."""
    best: list[tuple[float, float]] = []
    for time_s, loss in sorted(point for points in run.losses.values() for point in points):
        if math.isfinite(loss) and time_s <= run.end_s:
            best.append((time_s / HOUR_S, min(loss, best[-1][1]) if best else loss))
    return best
