"""The same 12 trials on two slots: by Dike's policies on an embedded Mesos, by Ray Tune and by Optuna."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.search.contenders import OTHERS, SLOTS, SearchRun, run_dike, run_other, shuffled

TITLE = "Real searches"
SPACE = {"lr": (0.003, 0.001, 0.0003), "optimizer": ("sgd", "adam"), "batch_size": (16, 64)}
POLICIES = ("fifo", "rr", "slaq", "hermes", "dike")
EPOCHS = 24
QUANTUM_S = 3.0
TARGET_SHARE = 0.9
SEEDS = (0, 1)


@dataclass(frozen=True)
class _Goal:
    """What there is to find.

    Attributes:
        best: the configuration whose loss is least after all epochs.
        final: that loss.
        target: the loss that counts as found.
    """

    best: str
    final: float
    target: float


def measure() -> Iterator[str]:
    """Lines of Markdown: the times of every policy and library as multiples of FIFO's in the same order of trials."""
    names = (*POLICIES, *OTHERS)
    runs = {name: [_runner(name)(seed) for seed in SEEDS] for name in names}
    reference = runs[POLICIES[0]]
    goal = _goal(reference[0])
    sizes = ", ".join(f"{name}: {len(values)} values" for name, values in SPACE.items())
    yield f"12 configurations ({sizes}) of the CNN of `examples/digits_cnn.py`, {EPOCHS} epochs"
    yield f"each, on {SLOTS} slots of one CPU; quantum {QUANTUM_S:g} s; {len(SEEDS)} searches of each kind, each with"
    yield "another order of the trials (the same for all kinds). Times are seconds from the start of the command,"
    yield "starting Mesos, Ray and TensorFlow included; medians, and in brackets the median of the ratios to fifo with"
    yield "the same order."
    yield ""
    yield f"*found*: the configuration that is best in the end ({goal.best.replace(',', ', ')}) has come"
    yield f"{TARGET_SHARE:.0%} of the way from the median first epoch's loss to its own last, {goal.final:.4f}: to a"
    yield f"training loss of {goal.target:.3f}. *trained*: to its end. *whole*: the command has ended."
    yield "Dike suspends trials and trains them all to their end; the other two stop trials for good, as their defaults"
    yield "say, and so train fewer epochs. Ray reuses its processes and Optuna has two for all trials, so that"
    yield "TensorFlow is imported once for each slot everywhere."
    yield ""
    yield "| search | first step | found | trained | whole | epochs trained | best loss | suspensions |"
    yield "|---|---|---|---|---|---|---|---|"
    measures: Sequence[Callable[[SearchRun], float]] = (
        lambda run: run.begun_s,
        lambda run: run.reached_s(goal.best, goal.target),
        lambda run: run.finished_s(goal.best, EPOCHS),
        lambda run: run.ended_s,
    )
    for name in names:
        cells = [_cell(runs[name], reference, value) for value in measures]
        epochs = statistics.median(sum(map(len, run.epochs.values())) for run in runs[name])
        best = statistics.median(min(done[-1][1] for done in run.epochs.values()) for run in runs[name])
        suspensions = statistics.median(len(run.suspend_s) for run in runs[name]) if name in POLICIES else "-"
        yield f"| {name} | {' | '.join(cells)} | {epochs:.0f} | {best:.4f} | {suspensions} |"
    yield ""
    yield from _switches([run for name in POLICIES for run in runs[name]])
    yield _compared([run for name in names for run in runs[name]], reference[0])


def _runner(name: str) -> Callable[[int], SearchRun]:
    if name in OTHERS:
        return lambda seed: run_other(name, shuffled(SPACE, seed), EPOCHS)
    return lambda seed: run_dike(name, shuffled(SPACE, seed), EPOCHS, QUANTUM_S, seed)


def _goal(run: SearchRun) -> _Goal:
    """From a search that has trained everything to its end."""
    best = min(run.epochs, key=lambda configuration: run.epochs[configuration][-1][1])
    final = run.epochs[best][-1][1]
    first = statistics.median(done[0][1] for done in run.epochs.values())
    return _Goal(best, final, first - TARGET_SHARE * (first - final))


def _cell(runs: Sequence[SearchRun], reference: Sequence[SearchRun], value: Callable[[SearchRun], float]) -> str:
    seconds = statistics.median(map(value, runs))
    ratio = statistics.median(value(run) / value(other) for run, other in zip(runs, reference, strict=True))
    return f"{seconds:.1f} ({ratio:.2f})" if math.isfinite(seconds) else "stopped before"


def _switches(runs: Sequence[SearchRun]) -> Iterator[str]:
    suspend_s = [seconds for run in runs for seconds in run.suspend_s]
    resume_s = [seconds for run in runs for seconds in run.resume_s]
    if suspend_s and resume_s:
        yield f"{len(suspend_s)} suspensions: the slot was free {statistics.median(suspend_s):.2f} s after the request"
        yield f"(median; slowest {max(suspend_s):.2f} s); a trial that went on took its first step"
        yield f"{statistics.median(resume_s):.2f} s after the decision (slowest {max(resume_s):.2f} s)."


def _compared(runs: Sequence[SearchRun], reference: SearchRun) -> str:
    """Whether the same configuration has had the same losses everywhere, suspended or not."""
    pairs = [
        (loss, expected)
        for run in runs
        for configuration, done in run.epochs.items()
        for (_, loss), (_, expected) in zip(done, reference.epochs[configuration], strict=False)
    ]
    same = sum(loss == expected for loss, expected in pairs)
    return f"Of {len(pairs):,} epochs' losses {same:,} are the same, bit for bit, as fifo's, which suspends nothing."
