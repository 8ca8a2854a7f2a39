"""Measures the growth of a service's memory during an hour of jobs that arrive and end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.load.service import ServiceUnderLoad, service_under_load

TITLE = "A service under steady load"
MINUTES = 60
AGENTS = 4
SUBMIT_INTERVAL_S = 2.0
MAX_OPEN_JOBS = 8
WARM_UP_MINUTES = 10
"""Earlier growth is not counted: caches fill, and libraries are imported."""


@dataclass(frozen=True)
class Sample:
    minute: float
    jobs: int
    memory_mib: float
    threads: int
    files: int


def measure() -> Iterator[str]:
    with service_under_load(AGENTS, cpus_of_agent=8) as service:
        samples = list(_samples(service))
    late = [sample for sample in samples if sample.minute >= WARM_UP_MINUTES]
    growth, _ = np.polyfit([sample.minute / 60 for sample in late], [sample.memory_mib for sample in late], 1)
    shown = samples[:: max(1, len(samples) // 12)]
    yield (
        f"A job every {SUBMIT_INTERVAL_S:g} s for {MINUTES} minutes on {AGENTS} agents: one worker and one parameter "
        "server, whose executor reports a few states and ends. The open jobs are listed as often."
    )
    yield ""
    yield (
        f"{late[-1].jobs - late[0].jobs:,} jobs in the last {late[-1].minute - late[0].minute:.0f} minutes; a straight "
        f"line through the service's resident memory in that time rises by {growth:+.1f} MiB an hour."
    )
    yield ""
    yield from halves([sample for sample in shown if sample.minute >= WARM_UP_MINUTES])
    yield ""
    yield "| minute | jobs so far | memory, MiB | threads | open files |"
    yield "|---|---|---|---|---|"
    for sample in shown:
        yield f"| {sample.minute:.0f} | {sample.jobs:,} | {sample.memory_mib:.1f} | {sample.threads} | {sample.files} |"


def halves(late: Sequence[Sample]) -> Iterator[str]:
    """Reports the memory growth in the first and second half of the samples."""
    first, middle, last = late[0], late[len(late) // 2], late[-1]
    yield (
        f"By the samples below: {middle.memory_mib - first.memory_mib:+.1f} MiB from minute {first.minute:.0f} to "
        f"{middle.minute:.0f}, {last.memory_mib - middle.memory_mib:+.1f} MiB from then to minute {last.minute:.0f}. "
        "Longer runs were not measured."
    )


def _samples(service: ServiceUnderLoad) -> Iterator[Sample]:
    begun = time.monotonic()
    jobs = 0
    next_s = 0.0
    while (elapsed_s := time.monotonic() - begun) <= 60 * MINUTES:
        if service.open_jobs() < MAX_OPEN_JOBS:
            service.submit()
            jobs += 1
        if elapsed_s >= next_s:
            next_s += 60
            process = service.process
            yield Sample(elapsed_s / 60, jobs, service.memory_mib(), process.num_threads(), process.num_fds())
        time.sleep(SUBMIT_INTERVAL_S)
