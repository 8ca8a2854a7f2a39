"""Measures the cost of preemption, and the overhead of being a trial."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.search.overhead import PROCESSES, SCRIPTS, STEPS, TURNS, take_turns
from benchmarks.search.slot import slot_for

TITLE = "Preemption"
REPETITIONS = 5
PAPER = "0.67 to 1.57 s for a suspension and a resumption together (its Figure 7, on GPUs)"
_EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True)
class Script:
    name: str
    path: Path
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Costs:
    """Measured times in seconds.

    Attributes:
        begin_s: from the request to the zygote to the first step of a new trial.
        pause_s, suspend_s: from the suspend request to the free slot, with the process paused and ended.
        cold_s, zygote_s, memory_s: from the request to the first step of a resumed trial: in a new Python process,
            forked from the zygote, and in the paused process.
        refusals: errors of the GPU driver that could not move its memory.
    """

    begin_s: list[float]
    pause_s: list[float]
    suspend_s: list[float]
    cold_s: list[float]
    zygote_s: list[float]
    memory_s: list[float]
    checkpoint_bytes: int
    gpu_bytes: int
    refusals: list[str]


INTERRUPTED = (
    Script("digits CNN, Keras", _EXAMPLES / "digits_cnn.py", ("--epochs", "100000")),
    Script("digits CNN, v1", _EXAMPLES / "digits_v1.py", ("--steps", "10000000")),
    Script("dense, 100 MB, Keras", SCRIPTS / "dense_keras.py"),
    Script("dense, 100 MB, v1", SCRIPTS / "dense_v1.py"),
)
OVERHEAD_CASES = (
    ("Keras, epochs of 250 steps", "turns_keras.py", ("--epoch-steps", "250")),
    ("Keras, epochs of 25 steps", "turns_keras.py", ("--epoch-steps", "25")),
    ("v1, `MonitoredTrainingSession`", "turns_v1.py", ()),
)


def measure() -> Iterator[str]:
    """Reports seconds to suspend and resume, then steps of a trial relative to the same steps without Dike."""
    yield f"Medians of {REPETITIONS} (slowest in brackets), one CPU, seconds. *suspend*: from the request to the slot"
    yield "being free, the checkpoint on the local disk and the process gone, or stopped. *resume*: from the request to"
    yield "start the process until a step is done; *memory*: continued where it was stopped, *zygote*: forked from a"
    yield "process that has imported TensorFlow, *cold*: a new Python. *begin*: the same by the zygote for a trial that"
    yield "begins; it includes what the script does itself, such as reading its data and building its graph. *pair*:"
    yield f"suspend and resume; the paper has {PAPER}."
    yield ""
    resumes = " | ".join(f"resume, {how} | pair, {how}" for how in ("memory", "zygote", "cold"))
    yield f"| trial | checkpoint, MB | suspend | begin | {resumes} |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    with tempfile.TemporaryDirectory() as name:
        for number, script in enumerate(INTERRUPTED):
            costs = interrupt(script, Path(name) / str(number), REPETITIONS)
            suspends_s = [*costs.pause_s, *costs.suspend_s]
            suspend_s = statistics.median(suspends_s)
            yield (
                f"| {script.name} | {costs.checkpoint_bytes / 1e6:.1f} | {format_seconds(suspends_s)} "
                f"| {format_seconds(costs.begin_s)} | {format_seconds(costs.memory_s)} "
                f"| {suspend_s + statistics.median(costs.memory_s):.2f} | {format_seconds(costs.zygote_s)} "
                f"| {suspend_s + statistics.median(costs.zygote_s):.2f} | {format_seconds(costs.cold_s)} "
                f"| {suspend_s + statistics.median(costs.cold_s):.2f} |"
            )
        yield ""
        yield from _overhead(Path(name))


def interrupt(script: Script, folder: Path, repetitions: int, gpus: Sequence[int] = (), *, cold: bool = True) -> Costs:
    """Repeatedly starts a trial, suspends it, and resumes it in memory, from the zygote and (`cold`) in a new Python.

    Creates `folder` for its files.
    """
    begin_s: list[float] = []
    pause_s: list[float] = []
    suspend_s: list[float] = []
    cold_s: list[float] = []
    zygote_s: list[float] = []
    memory_s: list[float] = []
    gpu_bytes = 0
    with slot_for(script.path, script.arguments, folder, gpus) as slot:
        for _ in range(repetitions):
            checkpoint = None
            for taken in (begin_s, memory_s, zygote_s, *((cold_s,) if cold else ())):
                cold_start = taken is cold_s
                started = slot.resume(checkpoint) if taken is memory_s else slot.start(checkpoint, cold=cold_start)
                if started is None:
                    continue
                run, taken_s = started
                taken.append(taken_s)
                gpu_bytes = max(gpu_bytes, slot.gpu_bytes(run))
                pause = taken is begin_s
                refusals = len(slot.refusals)
                end = slot.suspend(run, pause=pause)
                assert end.suspend_s is not None
                if len(slot.refusals) == refusals:
                    (pause_s if pause else suspend_s).append(end.suspend_s)
                checkpoint = end.checkpoint
    assert checkpoint is not None
    size = sum(file.stat().st_size for file in Path(checkpoint).rglob("*") if file.is_file())
    return Costs(begin_s, pause_s, suspend_s, cold_s, zygote_s, memory_s, size, gpu_bytes, slot.refusals)


def _overhead(folder: Path) -> Iterator[str]:
    yield "The digits CNN at batch size 64 as a trial that reports, against the same script without Dike:"
    yield f"{PROCESSES} pairs of processes that alternate in turns of {STEPS} steps on the machine, {TURNS} turns each"
    yield f"after one to warm up, so {PROCESSES * TURNS * STEPS:,} steps of each kind, without imports and starts."
    yield "Median ratio of the two turns of a pair, and the middle half; by the clock, and by the CPU time of all"
    yield "threads, which suffers less from other work on the machine. The paper has 2.0 to 8.7% for 1,000 iterations"
    yield "(its Table 2). A periodic checkpoint, by default every 60 s, comes on top."
    yield ""
    yield "| training | plain, ms a step | ratio by the clock | ratio by CPU time |"
    yield "|---|---|---|---|"
    for number, (name, script, arguments) in enumerate(OVERHEAD_CASES):
        own = folder / f"turns-{number}"
        own.mkdir()
        pairs = take_turns(own, script, arguments)
        step_ms = statistics.median(plain.clock_s for plain, _ in pairs) / STEPS * 1000
        by_clock = _ratios([dike.clock_s / plain.clock_s for plain, dike in pairs])
        by_cpu = _ratios([dike.cpu_s / plain.cpu_s for plain, dike in pairs])
        yield f"| {name} | {step_ms:.2f} | {by_clock} | {by_cpu} |"


def format_seconds(values: Sequence[float]) -> str:
    """Formats the median, and the maximum in brackets; `-` without values."""
    if not values:
        return "-"
    return f"{statistics.median(values):.2f} ({max(values):.2f})"


def _ratios(values: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"
