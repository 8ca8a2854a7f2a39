"""Measures how long jobs make no step after a process is killed or stopped, or a disk is full."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from framework.embedded.cluster import EmbeddedCluster
from tests.faults.chaos import AGENTS, FULL_S, PAUSE_S, Chaos, begin, free_address, small_disks
from tests.faults.fault_stage import FaultStage

TITLE = "Chaos"
FAULTS = 210
SEED = 1


def measure() -> Iterator[str]:
    yield from chaos_on(FaultStage, FAULTS, "(a chief, a worker, a ps)", "all without TensorFlow")


def chaos_on(kind: type[FaultStage], faults: int, roles: str, means: str) -> Iterator[str]:
    """Injects faults while a training job and a search run.

    Args:
        kind: of the stage that the jobs are on.
        faults: number of faults.
        roles: roles of the training job, for the text.
        means: what job and search consist of, for the text.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        small_disks(Path(folder)) as has_disks,
        free_address() as address,
        EmbeddedCluster(AGENTS) as cluster,
        kind(cluster, Path(folder), address) as stage,
    ):
        chaos = Chaos(
            stage, *begin(stage), SEED, lambda text: print(text, file=sys.stderr, flush=True), has_disks=has_disks
        )
        chaos.run(faults)
        chaos.end()
        restarts = chaos.restarts
        steps = stage.last_step(), len(stage.trial_diary())
    yield (
        f"A service on an embedded Mesos of {len(AGENTS)} agents runs a training job {roles} and a "
        f"search (four trials in rotation in two slots), {means}. Kinds of faults follow in random order: "
        f"a process is killed (SIGKILL) or stopped for {PAUSE_S:g} s (SIGSTOP), a sandbox is deleted "
        f"under its executor, the newest checkpoint is cut short, a disk is full or clients flood the service for "
        f"{FULL_S:g} s. Service, master and "
        "agents that end are restarted immediately, as by an init system. In a quarter of all cases the next fault "
        "comes before the jobs have recovered. Standstill: the longest that job or search made no step after a fault "
        "(they make at most ten and twenty a second), of those after which recovery was waited for."
    )
    yield ""
    yield chaos.table()
    yield ""
    yield (
        f"At the end both had finished: each of the {steps[0]} steps of the job, which was started again {restarts} "
        f"times, and of the {steps[1]} steps of the trials had the loss of an undisturbed run; no process was left, "
        "and the master had heard of no task that the database did not know."
    )
