"""The processes of tasks on an embedded Mesos, found by the names that they give themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator

import psutil

from framework.embedded.cluster import EmbeddedCluster

SLOT = "dike slot"
ZYGOTE = "dike zygote"
_NAME = re.compile(r"dike ((chief|ps|worker):\d+|trial \d+|slot|supervisor)")


def living(cluster: EmbeddedCluster) -> Iterator[tuple[str, psutil.Process]]:
    """Name and process of all that descend from the cluster's supervisor."""
    for process in psutil.Process(cluster.supervisor_pid).children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                yield process.name(), process
        except psutil.NoSuchProcess:
            continue


def roles(cluster: EmbeddedCluster) -> dict[str, psutil.Process]:
    """Role, such as `worker:1`, -> the process that plays it."""
    return {name.removeprefix("dike "): process for name, process in living(cluster) if ":" in name}


def slots(cluster: EmbeddedCluster) -> list[psutil.Process]:
    """The processes that hold tasks."""
    # So is each zygote of theirs called until it has named itself.
    found = [process for name, process in living(cluster) if name == SLOT]
    pids = {process.pid for process in found}
    return [process for process in found if process.ppid() not in pids]


def zygotes(cluster: EmbeddedCluster) -> list[psutil.Process]:
    """The zygotes of slots; not those of the machine's server."""
    held = {process.pid for process in slots(cluster)}
    return [process for name, process in living(cluster) if name == ZYGOTE and process.ppid() in held]


def executors(cluster: EmbeddedCluster) -> list[psutil.Process]:
    """The executors."""
    found = []
    for _, process in living(cluster):
        try:
            if process.cmdline()[-2:] == ["-m", "executor"]:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def of_tasks(cluster: EmbeddedCluster) -> list[psutil.Process]:
    """All that belongs to tasks: their executors, what holds them, and what is in there."""
    return [*executors(cluster), *(process for name, process in living(cluster) if _NAME.fullmatch(name))]
