"""Measures preemption on a GPU: its memory offloaded to the host, or a new process.

It needs a GPU, PyTorch, JAX and the extra `cuda`.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pynvml

from benchmarks.search.overhead import SCRIPTS
from benchmarks.search.preemption import Script, format_seconds, interrupt
from framework.embedded.machine import gpu_models

TITLE = "Suspended trials on a GPU, measured"
REPETITIONS = 3
TRIALS = (
    Script("convolutions, PyTorch", SCRIPTS / "torch_held.py"),
    Script("perceptron, JAX", SCRIPTS / "jax_held.py"),
    Script("convolutions, PyTorch, 8 GiB more", SCRIPTS / "torch_held.py", ("--mib", "8192")),
)


def measure() -> Iterator[str]:
    """Reports seconds to free a GPU and to resume, in memory and by a new process."""
    yield f"GPU: {gpu_models()[0]}, driver {_driver()}; *GiB*: what the trial holds on it."
    yield ""
    yield f"Medians of {REPETITIONS} (slowest in brackets), seconds. *free*: from the request to suspend to the"
    yield "GPU being seen free, the checkpoint written; *memory*: its memory brought to the host, the process stopped;"
    yield "*end*: the process ended. *resume*: from the request to the next step; *memory*: GPU memory brought back;"
    yield "*new*: a process forked from one that has imported what can be. *ratio*: a turn by a new process (*end* and"
    yield "*new*) to one in memory. *begin*: a new process to its first step, nothing to restore. *refused*: number of"
    yield "moves to the host and back that the driver could not make; the trial is then resumed by a new process."
    yield ""
    yield "| trial | GiB | begin | free, memory | free, end | resume, memory | resume, new | ratio | refused |"
    yield "|---|---|---|---|---|---|---|---|---|"
    refusals: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        for number, script in enumerate(TRIALS):
            costs = interrupt(script, Path(name) / str(number), REPETITIONS, gpus=(0,), cold=False)
            restart_s = statistics.median(costs.suspend_s) + statistics.median(costs.zygote_s)
            ratio = "-"
            if costs.pause_s and costs.memory_s:
                ratio = f"{restart_s / (statistics.median(costs.pause_s) + statistics.median(costs.memory_s)):.2f}"
            yield (
                f"| {script.name} | {costs.gpu_bytes / 2**30:.1f} | {format_seconds(costs.begin_s)} "
                f"| {format_seconds(costs.pause_s)} | {format_seconds(costs.suspend_s)} "
                f"| {format_seconds(costs.memory_s)} | {format_seconds(costs.zygote_s)} "
                f"| {ratio} | {len(costs.refusals)} of {REPETITIONS} |"
            )
            refusals += (f"{script.name}: {refusal}" for refusal in costs.refusals)
    if refusals:
        yield ""
        yield "Errors of the driver:"
        yield ""
        yield from (f"* {refusal}" for refusal in refusals)


def _driver() -> str:
    pynvml.nvmlInit()
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()
