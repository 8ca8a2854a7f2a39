"""Measures start, stop and memory of the embedded Mesos."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import psutil

from framework.embedded.agents import AgentSpec
from framework.embedded.cluster import EmbeddedCluster

TITLE = "Starting the embedded Mesos"
RUNS = 5
READY_TIMEOUT_S = 60.0


def measure() -> Iterator[str]:
    yield "Medians; ready: the master counts every agent as active. PSS divides common pages among the daemons."
    yield ""
    yield "| agents | seconds to ready | seconds to stop | MiB a daemon (PSS) |"
    yield "|---|---|---|---|"
    for agents in (1, 2, 8):
        runs = [_run(agents) for _ in range(RUNS)]
        ready, stop, memory = (statistics.median(values) for values in zip(*runs, strict=True))
        yield f"| {agents} | {ready:.2f} | {stop:.2f} | {memory:.0f} |"


def _run(agents: int) -> tuple[float, float, float]:
    start = time.perf_counter()
    cluster = EmbeddedCluster([AgentSpec(resources="cpus:1;mem:512")] * agents)
    with cluster:
        cluster.wait_for_agents(READY_TIMEOUT_S)
        ready = time.perf_counter()
        pids = [cluster.master_pid, *(agent.pid for agent in cluster.agents)]
        memory = statistics.mean(psutil.Process(pid).memory_full_info().pss for pid in pids) / 2**20
        stopping = time.perf_counter()
    return ready - start, time.perf_counter() - stopping, memory
