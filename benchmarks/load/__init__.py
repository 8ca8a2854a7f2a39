"""Loads a service with 1,000 jobs on 100 agents while clients query it; measures placement and response times.

Service, Mesos, database and HTTP are real. The executor is fake: it reports a few states and ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx
import numpy as np

from benchmarks.load.service import ServiceUnderLoad, service_under_load
from framework.service.api.client import ServiceClient

TITLE = "A service under load"
AGENTS = 100
JOBS = 1000
SINGLE_JOBS = 20
SUBMITTERS = 4
POLL_INTERVAL_S = 0.05
DEADLINE_S = 3600.0


@dataclass
class Timings:
    """Kind of call -> durations in seconds."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def time(self, name: str, call: Callable[[], object]) -> None:
        begun = time.perf_counter()
        call()
        self.seconds.setdefault(name, []).append(time.perf_counter() - begun)


def measure() -> Iterator[str]:
    with service_under_load(AGENTS, cpus_of_agent=8) as service:
        yield from _describe(service)
        yield ""
        alone = [_measure_placement(service, service.client) for _ in range(SINGLE_JOBS)]
        burst, among_others = _burst(service)
        yield "## Placement"
        yield ""
        yield (
            "From the submission of a job to the moment its tasks are handed to Mesos, one job after the other: on an "
            f"idle cluster, where offers are gathered for 0.6 s, and of another user while the {JOBS} jobs of one user "
            "wait and run (below); those wait for each other for as long as all take."
        )
        yield ""
        yield "| when | jobs | p50 | p99 |"
        yield "|---|---|---|---|"
        for when, seconds in (("idle cluster", alone), (f"beside {JOBS} jobs of another user", among_others)):
            yield f"| {when} | {len(seconds)} | {_milliseconds(seconds, 50)} | {_milliseconds(seconds, 99)} |"
        yield ""
        yield from burst


def _describe(service: ServiceUnderLoad) -> Iterator[str]:
    daemons = [service.cluster.master_pid, *(agent.pid for agent in service.cluster.agents)]
    yield (
        f"{len(daemons) - 1} agents of 8 CPUs each on this one machine, so that Mesos itself and the jobs' executors "
        "take most of its time. A job has one worker and one parameter server; their executor reports states and ends."
    )


def _burst(service: ServiceUnderLoad) -> tuple[list[str], list[float]]:
    """Submits many jobs together; returns the report and the placement times of another user's jobs meanwhile."""
    before_updates, before_mib = _status_updates(service), service.memory_mib()
    timings = Timings()
    is_over = threading.Event()
    with ThreadPoolExecutor() as pool:
        querying = pool.submit(_query, service, timings, is_over)
        begun = time.perf_counter()
        try:
            ids = _submit_all(service, timings)
            submitted_s = time.perf_counter() - begun
            placing = pool.submit(_place_others, service, is_over)
            states = _wait_for_all(service)
            all_s = time.perf_counter() - begun
        finally:
            is_over.set()
        querying.result()
        among_others = placing.result()
    lines = [
        f"## {len(ids)} jobs at once",
        "",
        "| what | figure |",
        "|---|---|",
        f"| submitted by {SUBMITTERS} clients | {len(ids)} jobs in {submitted_s:.0f} s |",
        f"| ended | {', '.join(f'{count} {state}' for state, count in sorted(states.items()))} after {all_s:.0f} s |",
        f"| status updates dealt with | {_status_updates(service) - before_updates:,} |",
        f"| memory of the service before and after | {before_mib:.0f} MiB, {service.memory_mib():.0f} MiB |",
        "",
        "Answers of the API meanwhile, one client looking on all the time:",
        "",
        "| request | count | p50 | p99 |",
        "|---|---|---|---|",
    ]
    for name, seconds in timings.seconds.items():
        lines.append(f"| {name} | {len(seconds)} | {_milliseconds(seconds, 50)} | {_milliseconds(seconds, 99)} |")
    return lines, among_others


def _submit_all(service: ServiceUnderLoad, timings: Timings) -> list[str]:
    with ThreadPoolExecutor(SUBMITTERS) as pool:

        def submit(number: int) -> str:
            ids: list[str] = []
            timings.time("POST /jobs", lambda: ids.append(service.submit()))
            return ids[0]

        return list(pool.map(submit, range(JOBS)))


def _query(service: ServiceUnderLoad, timings: Timings, is_over: threading.Event) -> None:
    with service.another_client("load") as client:
        while not is_over.wait(POLL_INTERVAL_S):
            page: list[str] = []
            timings.time("GET /jobs?limit=200", lambda page=page: page.extend(_first_page(client)))  # type: ignore[misc]
            if page:
                timings.time("GET /jobs/JOB", lambda page=page: client.job(page[-1]))  # type: ignore[misc]
                timings.time("GET /jobs/JOB/explain", lambda page=page: client.explain(page[-1]))  # type: ignore[misc]


def _first_page(client: ServiceClient) -> list[str]:
    jobs = client.jobs()
    first = next(jobs, None)
    return [] if first is None else [first.id]


def _place_others(service: ServiceUnderLoad, is_over: threading.Event) -> list[float]:
    placements = []
    with service.another_client("other") as client:
        while not is_over.is_set():
            placements.append(_measure_placement(service, client))
    return placements


def _measure_placement(service: ServiceUnderLoad, client: ServiceClient) -> float:
    """Submits a job and waits for its end; returns the seconds from submission to launch."""
    job_id = service.submit(client)
    deadline = time.monotonic() + DEADLINE_S
    while not (job := client.job(job_id)).state.has_ended():
        if time.monotonic() > deadline:
            raise RuntimeError(f"job {job_id} does not end: {job}")
        time.sleep(POLL_INTERVAL_S)
    return min(task.launched_s for task in client.tasks(job_id)) - job.submitted_s


def _wait_for_all(service: ServiceUnderLoad) -> dict[str, int]:
    deadline = time.monotonic() + DEADLINE_S
    while service.open_jobs():
        if time.monotonic() > deadline:
            raise RuntimeError("the jobs do not end")
        time.sleep(1)
    states: dict[str, int] = {}
    for job in service.client.jobs(user="load"):
        states[str(job.state)] = states.get(str(job.state), 0) + 1
    states["finished"] -= SINGLE_JOBS
    return states


def _status_updates(service: ServiceUnderLoad) -> int:
    answer = httpx.get(
        f"http://{service.cluster.master}/metrics/snapshot", auth=service.cluster.access.credentials, trust_env=False
    ).json()
    return int(answer["master/messages_status_update"])


def _milliseconds(seconds: Sequence[float], percentile: float) -> str:
    return f"{1000 * float(np.percentile(seconds, percentile)):.0f} ms"
