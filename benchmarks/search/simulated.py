"""Policies in virtual time on recorded learning curves, as in `python -m benchmarks simulate`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.simulation.bins import TARGET_SHARE, Bin
from benchmarks.simulation.comparison import (
    POLICY_NAMES,
    TOP,
    PolicyFactory,
    PolicyResult,
    Scenario,
    SimulationSettings,
    policies_named,
    reference,
    resolve,
    simulate,
)
from benchmarks.simulation.curves import Curve, read_curves
from benchmarks.simulation.plots import plot_comparison
from framework.policies.trials.hermes import HermesPolicy
from framework.policies.trials.interface import Policy, PolicySettings

TITLE = "Policies on recorded curves"
DATA = Path(__file__).parents[1] / "data" / "learning_curves"
RESULTS = Path(__file__).parents[1] / "results"
GOOD = (4, 12)
SEEDS = range(30)


@dataclass(frozen=True)
class _Set:
    """A file of curves, and the target share of its good trials."""

    name: str
    file: str
    picture: str
    target_share: float = TARGET_SHARE


SETS = (
    _Set("ResNet on ImageNet (AlgoPerf)", "algoperf_imagenet_resnet.csv.gz", "simulated_imagenet.png"),
    # At 90% of the way all 305 trials are good.
    _Set("graph network on OGBG (AlgoPerf)", "algoperf_ogbg.csv.gz", "simulated_ogbg.png", 0.98),
    _Set("AlexNet on ImageNet", "nas_alexnet_imagenet.csv.gz", "simulated_alexnet.png"),
)


def _fixed_quantum(_: Bin, settings: PolicySettings) -> Policy:
    """`hermes` without the paper's changes of the quantum (section 4.1.2)."""
    return HermesPolicy(replace(settings, milestones=(), quantum_growth=0.0))


def measure() -> Iterator[str]:
    """Reports all sets, and draws a figure for each beside the results."""
    yield f"4 GPUs, bins of 16 trials that are all there at time 0, {len(SEEDS)} bins (the same for all policies), at"
    yield "most 4 trials bound to a GPU. A trial is *good* if it comes 90% of the way from the median first loss to the"
    yield "final loss of the best 2% (OGBG: 98%, as all of its trials come 90% of the way). Quantum: 1% of the median"
    yield "length of a curve; overhead of putting a trial on a GPU: 1.5 s, at most a tenth of the quantum. The *oracle*"
    yield "knows the curves. AlexNet's seconds are evaluations. What is simulated: [here](../simulate.md)."
    yield ""
    yield "Under `hermes` the quantum grows at milestones of the loss and with each preemption, as the paper says"
    yield "(section 4.1.2; [the figures are ours](../../docs/policies.md#hermes)); *fixed quantum*: without that."
    yield ""
    yield "Times are from the start of the search until a good trial reaches the target: the mean over the good ones,"
    yield f"the first, and the first {TOP}; in brackets as a multiple of the oracle's. *To the end*: the mean if trials"
    yield "do not leave at the target but at the end of their curve, so that only the oracle frees slots in time."
    yield ""
    for one in SETS:
        curves = read_curves(DATA / one.file)
        rows = []
        for good in GOOD:
            settings = SimulationSettings(good=good, target_share=one.target_share)
            scenario = resolve(curves, settings)
            results = _simulate(curves, scenario)
            to_the_end = _simulate(curves, resolve(curves, replace(settings, until="end")))
            rows.append((f"{one.name}: {good} good of {scenario.jobs}", results))
            yield from _table(one, scenario, results, to_the_end)
        plot_comparison(rows, RESULTS / one.picture)
        yield f"![{one.name}]({one.picture})"
        yield ""


def _simulate(curves: Sequence[Curve], scenario: Scenario) -> tuple[PolicyResult, ...]:
    *names, limit = POLICY_NAMES
    policies: dict[str, PolicyFactory] = policies_named(names)
    policies |= {"hermes, fixed quantum": _fixed_quantum} | policies_named([limit])
    return simulate(curves, policies, scenario, SEEDS)


def _table(
    one: _Set, scenario: Scenario, results: Sequence[PolicyResult], to_the_end: Sequence[PolicyResult]
) -> Iterator[str]:
    yield f"**{one.name}, {scenario.good} good of {scenario.jobs}** (a loss of {scenario.target:.3g}, which"
    yield f"{scenario.recorded_good} of {scenario.recorded} curves reach; quantum {scenario.quantum_s:.4g} s, overhead"
    yield f"{scenario.world.overhead_s:.3g} s)"
    yield ""
    yield f"| policy | mean of the good, s | first, s | top {TOP}, s | preemptions | to the end, s |"
    yield "|---|---|---|---|---|---|"
    unit, unit_end = reference(results), reference(to_the_end)
    for result, end in zip(results, to_the_end, strict=True):
        yield (
            f"| {result.name} | {_value(result.mean_time_good_s, unit.mean_time_good_s)} "
            f"| {_value(result.time_first_s, unit.time_first_s)} | {_value(result.time_top4_s, unit.time_top4_s)} "
            f"| {result.preemptions:,.0f} | {_value(end.mean_time_good_s, unit_end.mean_time_good_s)} |"
        )
    yield ""


def _value(value: float, unit: float) -> str:
    return f"{value:,.0f} ({value / unit:.2f})"
