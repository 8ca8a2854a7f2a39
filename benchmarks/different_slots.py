"""Runs the same 12 trials on three slots of different real speed, under several policies, on the embedded Mesos."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from benchmarks.search.contenders import Space, shuffled
from benchmarks.search.slowed_search import SlowedSearch, search

TITLE = "A search on slots of different speed"
SPACE: Space = {"width": (64, 1024), "batch_size": (16, 64), "lr": (0.1, 0.03, 0.01)}
WAITS = 64
"""Width of the trials that wait for input most of the time."""
SHARES = {"full": 1.0, "half": 0.5, "eighth": 0.125}
"""Kind of slot -> share of a CPU that a trial may use."""
SLOWEST = "eighth"
POLICIES = ("fifo", "rr", "hermes", "hermes2")
EPOCHS = 24
QUANTUM_S = 2.0
SEEDS = (0, 1)


def measure() -> Iterator[str]:
    """Reports times of each policy, and as multiples of FIFO's with the same order of trials."""
    runs: dict[str, list[SlowedSearch]] = defaultdict(list)
    for seed in SEEDS:
        for policy in POLICIES:
            runs[policy].append(search(policy, shuffled(SPACE, seed), EPOCHS, QUANTUM_S, seed, SHARES))
    shares = ", ".join(f"`{kind}` {share:g}" for kind, share in SHARES.items())
    count = math.prod(map(len, SPACE.values()))
    yield f"{count} trials of `benchmarks/search/scripts/readers.py`, {EPOCHS} epochs each, on one machine: three"
    yield "agents of one slot, distinguished by the attribute `slot_kind`. A trial may use this share of a CPU:"
    yield f"{shares}. The limit is the benchmark's own: it looks every 10 ms what a trial's"
    yield "process has used, and stops it (SIGSTOP) until it has its share again. Mesos, executors and zygotes are not"
    yield f"held back, nor is a trial that waits for its samples. Half of the trials (width {WAITS}) mostly wait and"
    yield "are hardly slower anywhere; the others compute."
    yield ""
    yield f"Quantum {QUANTUM_S:g} s; {len(SEEDS)} searches of each policy, each with another order of the trials (the"
    yield "same for all policies); medians, and in brackets the median of the ratios to fifo with the same order."
    yield "Seconds from the start of the command, on a Mesos that is up. *lowest loss*: one trial is within 1% of the"
    yield "lowest final loss. *on the slowest*: the share that waiting trials had of the time of"
    yield f"the slot `{SLOWEST}`. *moves*: a trial resumed in another slot."
    yield ""
    yield "| policy | lowest loss, s | mean completion, s | whole search, s | on the slowest | suspensions | moves |"
    yield "|---|---|---|---|---|---|---|"
    times: Sequence[Callable[[SlowedSearch], float]] = (
        lambda run: run.lowest_s,
        lambda run: run.completion_s,
        lambda run: run.whole_s,
    )
    counts: Sequence[Callable[[SlowedSearch], int]] = (lambda run: run.suspensions, lambda run: run.moves)
    for policy, its in runs.items():
        cells = [_cell(its, runs[POLICIES[0]], value) for value in times]
        cells.append(f"{statistics.median(map(_waiting_share, its)):.0%}")
        cells += [f"{statistics.median(map(value, its)):g}" for value in counts]
        yield f"| {policy} | {' | '.join(cells)} |"
    yield ""
    yield "Samples a second as Dike has recorded them (`dike timeline`), medians over all searches:"
    yield ""
    yield f"| width | batch size | {' | '.join(SHARES)} |"
    yield f"|---|---|{'---|' * len(SHARES)}"
    speeds = _speeds([run for its in runs.values() for run in its])
    for width in SPACE["width"]:
        for batch_size in SPACE["batch_size"]:
            known = [speeds.get((width, batch_size, kind)) for kind in SHARES]
            cells = ["-" if of_kind is None else f"{statistics.median(of_kind):,.0f}" for of_kind in known]
            yield f"| {width} | {batch_size} | {' | '.join(cells)} |"


def _cell(
    runs: Sequence[SlowedSearch], reference: Sequence[SlowedSearch], value: Callable[[SlowedSearch], float]
) -> str:
    ratio = statistics.median(value(run) / value(other) for run, other in zip(runs, reference, strict=True))
    return f"{statistics.median(map(value, runs)):.1f} ({ratio:.2f})"


def _waiting_share(run: SlowedSearch) -> float:
    waits = {trial.number: trial.parameters["width"] == WAITS for trial in run.trials}
    seconds = {True: 0.0, False: 0.0}
    for piece in run.slices:
        if piece.kind == SLOWEST and piece.end_s is not None:
            seconds[waits[piece.trial]] += piece.end_s - piece.start_s
    return seconds[True] / sum(seconds.values())


def _speeds(runs: Sequence[SlowedSearch]) -> dict[tuple[object, object, str], list[float]]:
    """(Width, batch size, kind of slot) -> samples per second of all slices there."""
    speeds: dict[tuple[object, object, str], list[float]] = defaultdict(list)
    for run in runs:
        parameters = {trial.number: trial.parameters for trial in run.trials}
        for piece in run.slices:
            own = parameters[piece.trial]
            if piece.samples_per_s is not None:
                speeds[own["width"], own["batch_size"], piece.kind].append(piece.samples_per_s)
    return speeds
