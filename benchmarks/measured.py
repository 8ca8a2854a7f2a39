"""Compares predictions with real TensorFlow training on hosts with slow network cards, emulated on one machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.ticker import LogLocator, NullLocator
from numpy.typing import NDArray

from benchmarks.measured_fleet import Fleet
from benchmarks.measured_layouts import LAYERS, SHAPE, WIDTH, Case, Layout, cluster, layouts, profile
from benchmarks.measured_task import Training
from benchmarks.shaped_hosts import UNSHAPED_MBPS, ShapedHosts, unsupported_reason
from solver import Cluster
from solver.calibration import fit
from solver.calibration.measured_rows import Measurement
from solver.drawing.figure_files import new_figure, save_figure

TITLE = "Measured, not modelled: parameter servers on shaped links"
PLOT = Path(__file__).parent / "results" / "measured.svg"
COMPUTE_S = 0.4
MIN_DURATION_S = 5.0
TRANSFER_S = 2.0
STEPS = 5
METHODS = ("Dike", "least traffic", "round robin")
UNEQUAL = (500.0, 500.0, 200.0, 100.0, 50.0)
FOUR, ALIKE, FIVE = (1,) * 4, (100.0,) * 4, (1,) * 5
CASES = (
    Case("2 hosts", (100.0,) * 2, (1, 1), COMPUTE_S, shared=True, synchronous=False, max_layouts=5),
    Case("4 hosts", ALIKE, FOUR, COMPUTE_S, shared=True, synchronous=False, max_layouts=9),
    Case("4 hosts, synchronous", ALIKE, FOUR, COMPUTE_S, shared=True, synchronous=True, max_layouts=8),
    Case("4 hosts, network alone", ALIKE, FOUR, 0.0, shared=False, synchronous=False, max_layouts=6),
    Case(
        "4 hosts, one without a GPU",
        (500.0, *ALIKE[1:]),
        (0, 1, 1, 1),
        COMPUTE_S,
        shared=True,
        synchronous=False,
        max_layouts=9,
    ),
    Case(
        "4 hosts, two racks", ALIKE, FOUR, COMPUTE_S, shared=True, synchronous=False, max_layouts=10, uplink_mbps=50.0
    ),
    Case("3 unequal hosts of 2 GPUs", (500.0, 200.0, 50.0), (2,) * 3, COMPUTE_S, True, False, max_layouts=10),
    Case("5 unequal hosts", UNEQUAL, FIVE, COMPUTE_S, shared=True, synchronous=False, max_layouts=11),
    Case(
        "5 unequal hosts, network alone, synchronous", UNEQUAL, FIVE, 0.0, shared=False, synchronous=True, max_layouts=9
    ),
)


@dataclass(frozen=True)
class Outcome:
    """A measured layout; `measured_s`: mean seconds in which every worker makes one step."""

    layout: Layout
    measured_s: float

    @property
    def steps_per_s(self) -> float:
        """Steps of all workers together."""
        return len(self.layout.assignment.workers) / self.measured_s


@dataclass(frozen=True)
class Experiment:
    """All outcomes of a case.

    Attributes:
        where: its hosts as the solver's cluster.
    """

    case: Case
    where: Cluster
    outcomes: tuple[Outcome, ...]

    @property
    def predicted_s(self) -> NDArray[np.float64]:
        """Predicted seconds in which every worker makes one step, by outcome."""
        return np.array([outcome.layout.predicted_s for outcome in self.outcomes])

    @property
    def measured_s(self) -> NDArray[np.float64]:
        return np.array([outcome.measured_s for outcome in self.outcomes])

    @property
    def workers(self) -> NDArray[np.int64]:
        return np.array([len(outcome.layout.assignment.workers) for outcome in self.outcomes])

    @property
    def best_steps_per_s(self) -> float:
        return max(outcome.steps_per_s for outcome in self.outcomes)

    def share(self, method: str) -> float:
        """Measured speed of a method's layout, relative to the best measured."""
        chosen = next(outcome for outcome in self.outcomes if method in outcome.layout.methods)
        return chosen.steps_per_s / self.best_steps_per_s

    def left_out_error(self) -> float | None:
        """Mean relative error in leave-one-out calibration (`--measurements`)."""
        rows = [Measurement(SHAPE, outcome.layout.assignment, outcome.measured_s) for outcome in self.outcomes]
        return fit(rows, profile(self.case), self.where).left_out_error


def measure() -> Iterator[str]:
    """Runs the experiment, and draws a plot beside the results."""
    reason = unsupported_reason()
    if reason is not None:
        yield f"Not measured: {reason}"
        return
    rates, experiments = _run(CASES)
    _draw(experiments)
    payload = ", ".join(f"{mbps:.1f} of {rate:g}" for rate, mbps in rates.items())
    megabytes = 4 * LAYERS * WIDTH * WIDTH / 1e6
    yield "Hosts are network namespaces on a bridge; a token bucket filter shapes each link in both directions. By"
    yield f"one TCP connection links carry {payload} Mbit/s; the solver plans with that."
    yield "The two racks are bridges of two hosts each, joined by one more such link. Every ps and every worker is a"
    yield f"TensorFlow server of its own. In a step a worker pulls {LAYERS} dense layers ({megabytes:.1f} MB in all),"
    yield "computes, and pushes full gradients. The hosts share this machine's cores, so"
    yield f"the accelerator's time, {COMPUTE_S:g} s a step, is waited, not computed. *Network alone*: no such wait, and"
    yield "a host has memory for a worker or a ps, not for both. What is not *synchronous* is asynchronous: its step"
    yield "time is the number of workers over the steps that all of them make in a second."
    yield ""
    yield "*Dike*, *least traffic* (Eq. 1) and *round robin* (one ps for four workers, dealt out in turn): measured"
    yield "speed of the layout each chooses, as a share of the best layout measured. *Ranks*: Spearman's correlation of"
    yield "predicted and measured step times, and of speeds. *Error*: mean relative error of the predicted step times;"
    yield "*calibrated*: the same for each layout after a calibration (`--measurements`) with the others of its row."
    yield ""
    yield "| hosts | layouts | Dike | least traffic | round robin | ranks, time | ranks, speed | error | calibrated |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for experiment in experiments:
        yield _summary(experiment)
    yield ""
    yield f"![predicted against measured step times]({PLOT.name})"
    for experiment in experiments:
        yield ""
        yield from _table(experiment)


def _run(cases: Sequence[Case]) -> tuple[dict[float, float], list[Experiment]]:
    """Measures every case; also returns nominal rate -> payload rate of a link, in Mbit/s."""
    count = max(len(case.rates_mbps) for case in cases)
    slots = [max(case.gpus[host] for case in cases if host < len(case.rates_mbps)) for host in range(count)]
    with ShapedHosts(UNEQUAL) as hosts:
        uplinks = {case.uplink_mbps for case in cases if case.uplink_mbps is not None}
        nominal = sorted({rate for case in cases for rate in case.rates_mbps} | uplinks)
        rates = {rate: _payload_mbps(hosts, rate) for rate in nominal}
        with Fleet(hosts, slots) as fleet:
            experiments = []
            for case in cases:
                for host, rate in enumerate(case.rates_mbps):
                    hosts.set_rate(host, rate)
                hosts.set_uplink(case.uplink_mbps or UNSHAPED_MBPS)
                uplink = None if case.uplink_mbps is None else rates[case.uplink_mbps]
                where = cluster(case, [rates[rate] for rate in case.rates_mbps], uplink)
                outcomes = tuple(_measured(fleet, case, layout) for layout in layouts(case, where))
                experiments.append(Experiment(case, where, outcomes))
    return rates, experiments


def _payload_mbps(hosts: ShapedHosts, rate_mbps: float) -> float:
    """Measures the payload that a link of that rate carries."""
    for host in (0, 1):
        hosts.set_rate(host, rate_mbps)
    return hosts.transfer_mbps(0, 1, int(rate_mbps * 1e6 / 8 * TRANSFER_S))


def _measured(fleet: Fleet, case: Case, layout: Layout) -> Outcome:
    servers = [fleet.ps_task(case.host(node)) for node in layout.assignment.ps]
    used: dict[str, int] = {}
    workers = []
    for node in layout.assignment.workers:
        workers.append(fleet.worker_task(case.host(node), used.get(node, 0)))
        used[node] = used.get(node, 0) + 1
    training = Training(
        width=WIDTH,
        # Round-robin over equal variables gives ps 0 the largest shard, as in a plan.
        ps_of_layer=tuple(servers[layer % len(servers)] for layer in range(LAYERS)),
        workers=tuple(workers),
        compute_s=case.compute_s,
        synchronous=case.synchronous,
    )
    return Outcome(layout, fleet.round_s(training, max(MIN_DURATION_S, STEPS * layout.predicted_s)))


def _summary(experiment: Experiment) -> str:
    shares = " | ".join(f"{experiment.share(method):.0%}" for method in METHODS)
    predicted, measured, workers = experiment.predicted_s, experiment.measured_s, experiment.workers
    error = float(np.abs(predicted / measured - 1).mean())
    left_out = experiment.left_out_error()
    return (
        f"| {experiment.case.name} | {len(workers)} | {shares} | {rank_correlation(predicted, measured):.2f} "
        f"| {rank_correlation(workers / predicted, workers / measured):.2f} | {error:.0%} "
        f"| {'-' if left_out is None else f'{left_out:.0%}'} |"
    )


def _table(experiment: Experiment) -> Iterator[str]:
    rates = ", ".join(f"{rate:g}" for rate in experiment.case.rates_mbps)
    uplink = experiment.case.uplink_mbps
    yield f"**{experiment.case.name}** ({rates} Mbit/s{'' if uplink is None else f', {uplink:g} between the racks'})"
    yield ""
    yield "| layout | predicted, s | measured, s | steps/s | share of best | chosen by |"
    yield "|---|---|---|---|---|---|"
    for outcome in sorted(experiment.outcomes, key=lambda one: -one.steps_per_s):
        layout = outcome.layout
        yield (
            f"| {layout.text} | {layout.predicted_s:.3f} | {outcome.measured_s:.3f} | {outcome.steps_per_s:.2f} "
            f"| {outcome.steps_per_s / experiment.best_steps_per_s:.0%} | {', '.join(layout.methods)} |"
        )


def rank_correlation(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Spearman's rank correlation; ties share their mean rank."""
    return float(np.corrcoef(_ranks(one), _ranks(other))[0, 1])


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    # Values equal up to rounding tie.
    _, position, counts = np.unique(values.round(9), return_inverse=True, return_counts=True)
    ranks: NDArray[np.float64] = (counts.cumsum() - (counts - 1) / 2)[position]
    return ranks


def _draw(experiments: Sequence[Experiment]) -> None:
    figure = new_figure(7.0, 5.0)
    axes = figure.add_subplot()
    for experiment in experiments:
        axes.plot(experiment.predicted_s, experiment.measured_s, "o", alpha=0.7, label=experiment.case.name)
    predicted = np.concatenate([experiment.predicted_s for experiment in experiments])
    ends = [predicted.min(), predicted.max()]
    axes.plot(ends, ends, color="grey", linewidth=1)
    axes.loglog()
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_minor_locator(NullLocator())
    axes.set_xlabel("predicted seconds in which every worker makes one step")
    axes.set_ylabel("measured seconds")
    axes.set_title("TensorFlow parameter servers on shaped links", fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    save_figure(figure, PLOT)
