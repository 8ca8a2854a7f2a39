"""Runs the same 12 trials on two slots by Dike's policies on an embedded Mesos, by Ray Tune and by Optuna."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import psutil

from benchmarks.search.contenders import KINDS, OWN, QUANTUM_S, SLOTS, SearchRun, Task, run_search
from benchmarks.tables import RESULTS

TITLE = "Real searches"
TASKS = (
    Task(
        "digits",
        "the CNN of `examples/digits_cnn.py`",
        {"lr": (0.003, 0.001, 0.0003), "optimizer": ("sgd", "adam"), "batch_size": (16, 64)},
        epochs=24,
    ),
    Task(
        "next_character",
        "a neural language model of characters on Python's language reference",
        {"lr": (0.01, 0.003, 0.001), "context": (4, 12), "batch_size": (32, 128)},
        epochs=24,
    ),
)
REFERENCE = "fifo"
REPEATS = 5
TARGET_SHARE = 0.9
PARTIAL_RESULTS = RESULTS / "real.jsonl"
"""Results of an interrupted measurement, one search a line."""

Runs = Mapping[str, Sequence[SearchRun]]
"""Kind of search -> its runs, one for each order of the trials."""


@dataclass(frozen=True)
class _Goal:
    """What a search should find.

    Attributes:
        best: configuration with the lowest loss after all epochs.
        target: loss that counts as found.
    """

    best: str
    final: float
    target: float


def measure(repeats: int = REPEATS) -> Iterator[str]:
    """Reports times of every policy and library, and as multiples of FIFO's with the same order of trials.

    `repeats`: number of orders.
    """
    measured = _search_all(repeats)
    yield f"12 configurations each of two tasks, on {SLOTS} slots of one CPU; quantum {QUANTUM_S:g} s; {repeats}"
    yield "searches of each kind, each with another order of the trials (the same for all kinds), in rotation."
    yield "Times are seconds from the start of the command, starting Mesos, Ray and TensorFlow included: the median"
    yield "and, after the comma, the least and the greatest; in brackets the same of the ratios to fifo with the same"
    yield "order."
    yield ""
    yield f"*found*: the configuration that is best in the end is {TARGET_SHARE:.0%} of the way from the median"
    yield "first epoch's training loss to its own last. *trained*: to its end. *never*: it was stopped before. *whole*:"
    yield "the search has ended (Dike's Mesos, too; Ray's own processes end later). Policies suspend trials and train"
    yield "them all to their end; `--stop` and the other two libraries stop trials for good, and so train fewer epochs."
    yield "*paced*: the ratio of *whole* divided by that of the time that an epoch takes, the median one of each"
    yield "configuration: at times the machine takes half as long again for the same epochs, in any library."
    yield f"*processors*: seconds that the machine's {psutil.cpu_count()} were busy during the search, whatever with."
    yield "All have their defaults; Ray and Optuna's Hyperband get the number of epochs of a trial. Ray's HyperBand"
    yield "pauses trials, too: they resume from the Keras model that was saved at the end of an epoch, and shuffle the"
    yield "samples anew. Ray reuses its processes and Optuna has two for all trials, so that TensorFlow is imported"
    yield f"once for each slot everywhere. No policy was chosen on `{TASKS[1].script}`."
    for task in TASKS:
        yield ""
        yield from _table(task, measured[task.script])
    yield ""
    yield from _preemption_times([one for runs in measured.values() for kind in OWN for one in runs[kind]])
    yield from _compare_losses(list(measured.values()))


def _search_all(repeats: int) -> Mapping[str, Runs]:
    """Runs all searches that `PARTIAL_RESULTS` does not contain; returns them by task."""
    stored: dict[tuple[str, str, int], SearchRun] = {}
    if PARTIAL_RESULTS.exists():
        for line in PARTIAL_RESULTS.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            stored[entry["task"], entry["kind"], entry["seed"]] = SearchRun(**entry["run"])
        print(f"resumes after the {len(stored)} searches in {PARTIAL_RESULTS}", file=sys.stderr, flush=True)
    found: dict[str, dict[str, list[SearchRun]]] = {task.script: defaultdict(list) for task in TASKS}
    searches = [(seed, task, kind) for seed in range(repeats) for task in TASKS for kind in KINDS]
    for number, (seed, task, kind) in enumerate(searches, 1):
        one = stored.get((task.script, kind, seed))
        if one is None:
            one = run_search(kind, task, seed)
            with PARTIAL_RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"task": task.script, "kind": kind, "seed": seed, "run": asdict(one)}) + "\n")
            print(f"{number}/{len(searches)} {task.script}, {kind}: {one.ended_s:.1f} s", file=sys.stderr, flush=True)
        found[task.script][kind].append(one)
    PARTIAL_RESULTS.unlink()
    return found


def _table(task: Task, runs: Runs) -> Iterator[str]:
    reference = runs[REFERENCE]
    goal = _goal(reference[0])
    sizes = ", ".join(f"{name}: {len(values)} values" for name, values in task.space.items())
    yield f"**{task.script}**: {task.words} ({sizes}), {task.epochs} epochs each. Best is"
    yield f"{goal.best.replace(',', ', ')} with a training loss of {goal.final:.4f}; found: {goal.target:.3f}."
    yield ""
    yield "| search | first step | found | trained | whole | paced | processors | epochs | best loss | suspensions |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    measures: Sequence[Callable[[SearchRun], float]] = (
        lambda run: run.begun_s,
        lambda run: run.reached_s(goal.best, goal.target),
        lambda run: run.finished_s(goal.best, task.epochs),
        lambda run: run.ended_s,
        lambda run: run.cpu_s,
    )
    for kind in KINDS:
        cells = [_cell(runs[kind], reference, value) for value in measures]
        pairs = zip(runs[kind], reference, strict=True)
        paced = _spread([run.ended_s / other.ended_s / run.pace(other) for run, other in pairs], ".2f")
        epochs = _spread([sum(map(len, run.epochs.values())) for run in runs[kind]], ".0f")
        best = _spread([min(done[-1][1] for done in run.epochs.values()) for run in runs[kind]], ".4f")
        suspensions = _spread([len(run.suspend_s) for run in runs[kind]], ".0f") if kind in OWN else "-"
        cells.insert(-1, paced)
        yield f"| {kind} | {' | '.join(cells)} | {epochs} | {best} | {suspensions} |"


def _goal(run: SearchRun) -> _Goal:
    """Derives the goal from a search that has trained all trials to the end."""
    best = min(run.epochs, key=lambda configuration: run.epochs[configuration][-1][1])
    final = run.epochs[best][-1][1]
    first = statistics.median(done[0][1] for done in run.epochs.values())
    return _Goal(best, final, first - TARGET_SHARE * (first - final))


def _cell(runs: Sequence[SearchRun], reference: Sequence[SearchRun], value: Callable[[SearchRun], float]) -> str:
    ratios = [value(run) / value(other) for run, other in zip(runs, reference, strict=True)]
    return f"{_spread(list(map(value, runs)), '.1f')} ({_spread(ratios, '.2f')})"


def _spread(values: Sequence[float], form: str) -> str:
    figures = (statistics.median(values), min(values), max(values))
    median, least, greatest = (f"{figure:{form}}" if math.isfinite(figure) else "never" for figure in figures)
    return median if least == greatest else f"{median}, {least}-{greatest}"


def _preemption_times(runs: Sequence[SearchRun]) -> Iterator[str]:
    suspend_s = [seconds for run in runs for seconds in run.suspend_s]
    resume_s = [seconds for run in runs for seconds in run.resume_s]
    if suspend_s and resume_s:
        yield f"{len(suspend_s)} suspensions: the slot was free {statistics.median(suspend_s):.2f} s after the request"
        yield f"(median; slowest {max(suspend_s):.2f} s); a resumed trial took its first step"
        yield f"{statistics.median(resume_s):.2f} s after the decision (slowest {max(resume_s):.2f} s)."


def _compare_losses(tasks: Sequence[Runs]) -> Iterator[str]:
    """Reports whether each configuration has the same losses in every search, suspended or not."""
    same, other = 0, dict.fromkeys(KINDS, 0)
    for runs in tasks:
        expected = runs[REFERENCE][0].epochs
        for kind in KINDS:
            for one in runs[kind]:
                for configuration, done in one.epochs.items():
                    alike = sum(a[1] == b[1] for a, b in zip(done, expected[configuration], strict=False))
                    same += alike
                    other[kind] += len(done) - alike
    count = same + sum(other.values())
    yield f"Of {count:,} epochs' losses {same:,} are the same, bit for bit, as fifo's, which suspends nothing."
    differing = ", ".join(f"{kind} ({number:,})" for kind, number in other.items() if number)
    if differing:
        yield f"The others are of {differing}."
