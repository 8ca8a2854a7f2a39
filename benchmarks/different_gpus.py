"""Simulates searches on GPUs of different types: `hermes2`, policies that ignore the type, and the optimum."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean, median, stdev

import numpy as np

from benchmarks.simulation.assignment import AssignmentPolicy
from benchmarks.simulation.bins import Bin
from benchmarks.simulation.comparison import OVERHEAD_S, QUANTUM_SHARE, REPORTS_PER_QUANTUM
from benchmarks.simulation.curves import Curve, read_curves
from benchmarks.simulation.plots import COLOURS
from benchmarks.simulation.throughputs import ThroughputTable, draw_jobs, read_throughputs
from benchmarks.simulation.world import World, WorldSettings
from framework.policies.trials.hermes2 import PAPER, Hermes2Policy, MetaRules
from framework.policies.trials.interface import Decision, Policy, PolicySettings, SlotView, TrialView
from framework.policies.trials.registry import make_policy
from solver.drawing.figure_files import new_figure, save_figure

TITLE = "Searches on GPUs that differ"
DATA = Path(__file__).parent / "data"
PICTURE = "different_gpus.png"
SEEDS = range(30)
TRIALS_PER_GPU = 4
OF_ONE_MODEL = ("ResNet-18", "ResNet-50")
GOAL = 0.05
"""Maximum relative distance of a policy from the limit."""

PolicyMaker = Callable[[Bin, PolicySettings], Policy]


class KnownSpeedsPolicy:
    """`hermes2` with all speeds given from the start: shows the cost of measuring them."""

    name = "hermes2, told"

    def __init__(self, trials: Bin, settings: PolicySettings) -> None:
        self._policy = Hermes2Policy(settings)
        self._jobs = trials.jobs

    def decide(self, now_s: float, trials: Sequence[TrialView], slots: Sequence[SlotView]) -> Decision:
        informed = [replace(trial, speeds=self._jobs[trial.id].speeds) for trial in trials]
        return self._policy.decide(now_s, informed, slots)


class TypeBlindPolicy:
    """`dike` without the slots' GPU types: shows the gain of using them."""

    name = "dike, types unknown"

    def __init__(self, _: Bin, settings: PolicySettings) -> None:
        self._policy = make_policy("dike", settings)

    def decide(self, now_s: float, trials: Sequence[TrialView], slots: Sequence[SlotView]) -> Decision:
        return self._policy.decide(now_s, trials, [replace(slot, kind="") for slot in slots])


def _registered(name: str) -> PolicyMaker:
    return lambda _, settings: make_policy(name, settings)


def _hermes2_with(rules: MetaRules) -> PolicyMaker:
    return lambda _, settings: Hermes2Policy(settings, rules)


POLICIES: Mapping[str, PolicyMaker] = {
    **{name: _registered(name) for name in ("fifo", "rr", "hermes")},
    TypeBlindPolicy.name: TypeBlindPolicy,
    "Eq. 1 and 2": _hermes2_with(PAPER),
    "hermes2": _registered("hermes2"),
    KnownSpeedsPolicy.name: KnownSpeedsPolicy,
    "dike": _registered("dike"),
    "assignment": AssignmentPolicy,
}
RULES: Mapping[str, PolicyMaker] = {
    "relative speeds": _hermes2_with(MetaRules(relative=True, rings=False, explores=False)),
    "relative, rings": _hermes2_with(MetaRules(relative=True, rings=True, explores=False)),
    "relative, explores": _hermes2_with(MetaRules(relative=True, rings=False, explores=True)),
    "rings, explores": _hermes2_with(MetaRules(relative=False, rings=True, explores=True)),
}
"""Combinations of rules between the paper's and those of `hermes2`."""


@dataclass(frozen=True)
class _Setup:
    """A simulated set-up.

    Attributes:
        gpus: type -> number of GPUs; None: 1 to 8 of each type, drawn by seed.
        models: models that trials are drawn from; empty: all jobs of the table.
        policies: names of `POLICIES` and `RULES`.
    """

    name: str
    gpus: Mapping[str, int] | None
    models: tuple[str, ...] = ()
    policies: tuple[str, ...] = tuple(POLICIES)
    curves: str = "algoperf_imagenet_resnet.csv.gz"

    def kinds(self, types: Sequence[str], seed: int) -> tuple[str, ...]:
        if self.gpus is not None:
            return tuple(kind for kind, count in self.gpus.items() for _ in range(count))
        rng = np.random.default_rng([seed, len(types)])
        return tuple(kind for kind in types for _ in range(rng.integers(1, 9)))


SETUPS = (
    _Setup(
        "12 trials on 3 GPUs, ResNets", dict.fromkeys(("k80", "p100", "v100"), 1), OF_ONE_MODEL, (*POLICIES, *RULES)
    ),
    _Setup("24 trials on 6 GPUs, all jobs", dict.fromkeys(("k80", "p100", "v100"), 2), policies=(*POLICIES, *RULES)),
    _Setup("96 trials on 24 GPUs, all jobs", dict.fromkeys(("k80", "p100", "v100"), 8)),
    _Setup("4 trials a GPU on clusters drawn at random, all jobs", None),
)


@dataclass(frozen=True)
class Figures:
    """Results of a policy for one seed, in seconds; see `benchmarks.simulation.world.Outcome`."""

    lowest_s: float
    completion_s: float
    speed: float
    preemptions: int


def measure() -> Iterator[str]:
    """Measures every set-up, and draws a figure beside the results."""
    table = _table()
    slower = [name for name in table.jobs_of(table.kinds) if table.steps_s["v100"][name] < table.steps_s["p100"][name]]
    yield "K80, P100 and V100 as in Gavel's table of throughputs (26 jobs alone on a GPU; [data](../data/README.md));"
    yield f"{len(slower)} of the jobs are slower on a V100 than on a P100. Each trial follows a recorded learning curve"
    yield "(ResNet on ImageNet) and is a job of the table, both drawn by seed; the curve's seconds are those of a"
    yield f"{table.reference.upper()}, and pass faster or slower on the others as the table says. All trials are there"
    yield f"at time 0 and train to the end of their curves; at most {TRIALS_PER_GPU} are bound to a GPU. Quantum: 1% of"
    yield f"the median length of a curve; putting a trial on a GPU takes {OVERHEAD_S} s."
    yield ""
    yield f"Means of {len(SEEDS)} seeds, the same for all policies. *Lowest loss*: until the trial with the lowest loss"
    yield "of all has reached it. *Completion*: mean time until a trial has ended. *Speed*: of the trial on a GPU, as a"
    yield "multiple of the trial's mean over the types, while there are trials for all GPUs; an empty GPU counts 0. In"
    yield "brackets: lowest loss and completion as a multiple of `hermes`, with the standard error of the ratio over"
    yield "the seeds; speed as a multiple of that of `assignment`, the best assignment at every event, speeds known (an"
    yield "exact assignment problem, solved by HiGHS; it knows nothing of losses)."
    yield ""
    yield "`dike, types unknown`: `dike` that does not look at the GPUs' types, as it would decide if all were alike."
    yield "`Eq. 1 and 2`: the meta scheduler of the paper 'Hermes-v2' and nothing else. `hermes2, told`: `hermes2` with"
    yield "all speeds given from the start. Between the two lie *relative speeds* (Eq. 2 on multiples of a trial's mean"
    yield "speed instead of samples/s), *rings* (cyclic exchanges of more than two), and *explores* (what was not"
    yield "measured counts as faster, by its doubt)."
    yield ""
    results = {}
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        for setup in SETUPS:
            by_seed = list(pool.map(_run_seed, [setup] * len(SEEDS), SEEDS))
            results[setup.name] = {name: [figures[name] for figures in by_seed] for name in setup.policies}
    yield from goal(list(results.values()))
    yield "The first set-up is the paper's, but for its Table 1 (MobileNet and ResNet56 on its three GPUs), which could"
    yield "not be found: ResNet-18 and ResNet-50 of Gavel's table, batches of 16 to 256, replace it."
    yield ""
    for setup in SETUPS:
        yield from _rows(setup, results[setup.name])
    _draw(results, Path(__file__).parent / "results" / PICTURE)
    yield f"![Searches on GPUs that differ]({PICTURE})"
    yield ""
    yield "The first set-up by hand:"
    yield ""
    yield "    python -m benchmarks simulate --until end \\"
    yield "        --curves benchmarks/data/learning_curves/algoperf_imagenet_resnet.csv.gz \\"
    yield "        --gpu-types k80:1,p100:1,v100:1 --models ResNet-18,ResNet-50 --jobs 12 --good 3 \\"
    yield "        --throughputs benchmarks/data/throughput/gavel_simulation_throughputs.json.gz"


@cache
def _table() -> ThroughputTable:
    return read_throughputs(DATA / "throughput" / "gavel_simulation_throughputs.json.gz")


@cache
def _curves(file: str) -> tuple[Curve, ...]:
    return read_curves(DATA / "learning_curves" / file)


def _run_seed(setup: _Setup, seed: int) -> dict[str, Figures]:
    """Runs all policies of a set-up on the same trials and GPUs."""
    curves = _curves(setup.curves)
    kinds = setup.kinds(_table().kinds, seed)
    trials = _draw_bin(curves, kinds, setup.models, seed)
    quantum_s = QUANTUM_SHARE * median(curve.length_s for curve in curves)
    world = WorldSettings(len(kinds), OVERHEAD_S, quantum_s / REPORTS_PER_QUANTUM, kinds=kinds)
    settings = PolicySettings(quantum_s=quantum_s, trials_per_slot=TRIALS_PER_GPU, seed=seed, switch_s=OVERHEAD_S)
    figures = {}
    for name in setup.policies:
        outcome = World(trials, {**POLICIES, **RULES}[name](trials, settings), world).run()
        figures[name] = Figures(outcome.reached_s[0], fmean(outcome.completion_s), outcome.speed, outcome.preemptions)
    return figures


def _draw_bin(curves: Sequence[Curve], kinds: Sequence[str], models: Sequence[str], seed: int) -> Bin:
    """Draws trials; those that reach the lowest loss of all are the good ones."""
    count = TRIALS_PER_GPU * len(kinds)
    chosen = [curves[place] for place in np.random.default_rng(seed).choice(len(curves), count, replace=False)]
    lowest = min(curve.lowest_loss for curve in chosen)
    jobs = draw_jobs(_table().jobs(kinds, models), count, seed)
    return Bin(tuple(chosen), tuple(curve.time_to(lowest) for curve in chosen), jobs)


def goal(results: Sequence[Mapping[str, Sequence[Figures]]]) -> Iterator[str]:
    """Reports where `hermes2` is within 5% of the limit, and whether `dike` is as good as `hermes2`.

    `results`: for each set-up, policy -> figures by seed.
    """

    def ratios(value: Callable[[Figures], float], policy: str = "hermes2", unit: str = "assignment") -> list[float]:
        return sorted(fmean(map(value, one[policy])) / fmean(map(value, one[unit])) for one in results)

    def met(is_met: bool) -> str:
        return "met" if is_met else "**not met**"

    speeds, times = ratios(lambda one: one.speed), ratios(lambda one: one.completion_s)
    yield "The goal is to come within 5% of `assignment`, which is the limit of the speed and of nothing else. By"
    yield f"set-up, `hermes2` has {speeds[0]:.3f} to {speeds[-1]:.3f} of its *speed*: {met(speeds[0] >= 1 - GOAL)}. Its"
    yield f"*completion* takes {times[0]:.2f} to {times[-1]:.2f} times as long: {met(times[-1] <= 1 + GOAL)}."
    yield ""
    lowest = ratios(lambda one: one.lowest_s, "dike", "hermes2")
    times = ratios(lambda one: one.completion_s, "dike", "hermes2")
    yield "`dike` is to find the lowest loss no later than `hermes2`, and to complete trials no later. By set-up, its"
    yield f"*lowest loss* takes {lowest[0]:.2f} to {lowest[-1]:.2f} of the time of `hermes2`: {met(lowest[-1] <= 1)}."
    yield f"Its *completion* takes {times[0]:.2f} to {times[-1]:.2f} of it: {met(times[-1] <= 1)}."
    yield ""


def _rows(setup: _Setup, results: Mapping[str, Sequence[Figures]]) -> Iterator[str]:
    yield f"**{setup.name}**"
    yield ""
    yield "| policy | lowest loss, s | completion, s | speed | preemptions |"
    yield "|---|---|---|---|---|"
    limit = fmean(figures.speed for figures in results["assignment"])
    for name, figures in results.items():
        lowest = _with_ratio([one.lowest_s for one in figures], [one.lowest_s for one in results["hermes"]])
        completion = _with_ratio([one.completion_s for one in figures], [one.completion_s for one in results["hermes"]])
        speed = fmean(one.speed for one in figures)
        preemptions = fmean(one.preemptions for one in figures)
        yield f"| {name} | {lowest} | {completion} | {speed:.3f} ({speed / limit:.3f}) | {preemptions:,.0f} |"
    yield ""


def _with_ratio(times_s: Sequence[float], unit_s: Sequence[float]) -> str:
    """Formats the mean, and its ratio to another mean with the ratio's standard error over the seeds."""
    ratio = fmean(times_s) / fmean(unit_s)
    residuals = [time_s - ratio * unit for time_s, unit in zip(times_s, unit_s, strict=True)]
    error = stdev(residuals) / len(residuals) ** 0.5 / fmean(unit_s)
    scatter = f" ± {error:.2f}" if error else ""
    return f"{fmean(times_s):,.0f} ({ratio:.2f}{scatter})"


def _draw(results: Mapping[str, Mapping[str, Sequence[Figures]]], path: Path) -> None:
    figure = new_figure(13, 2.9 * len(results))
    rows = figure.subplots(len(results), 3, squeeze=False)
    for panels, (title, of_policies) in zip(rows, results.items(), strict=True):
        names = [name for name in of_policies if name in POLICIES]
        colours = [COLOURS.get(name, "#b7a6e0") for name in names]
        measures: tuple[tuple[str, str, Callable[[Figures], float]], ...] = (
            ("time to the lowest loss, hermes = 1", "hermes", lambda one: one.lowest_s),
            ("mean completion time, hermes = 1", "hermes", lambda one: one.completion_s),
            ("speed, assignment = 1", "assignment", lambda one: one.speed),
        )
        for axes, (label, unit, value) in zip(panels, measures, strict=True):
            means = {name: fmean(map(value, of_policies[name])) for name in names}
            bars = axes.bar(names, [means[name] / means[unit] for name in names], color=colours)
            axes.bar_label(bars, fmt="%.2f", fontsize=8)
            axes.margins(y=0.12)
            axes.set_ylabel(label, fontsize=8)
            axes.tick_params(axis="x", labelrotation=35, labelsize=7)
        panels[0].set_title(title, loc="left", fontsize=10)
    figure.tight_layout()
    save_figure(figure, path)
