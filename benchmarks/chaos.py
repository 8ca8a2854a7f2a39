"""How long a service's jobs stand still when any of the processes behind them is killed."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from framework.embedded.cluster import EmbeddedCluster
from tests.faults.chaos import AGENTS, Chaos, begin
from tests.faults.fault_stage import FaultStage

TITLE = "Chaos"
KILLS = 210
SEED = 1


def measure() -> Iterator[str]:
    """Lines of Markdown: what is killed, how often, and how long until all jobs train again."""
    yield from chaos_on(FaultStage, KILLS, "(a chief, a worker, a ps)", "all without TensorFlow")


def chaos_on(kind: type[FaultStage], kills: int, roles: str, means: str) -> Iterator[str]:
    """The same.

    Args:
        kind: of the stage that the jobs are on.
        kills: how many.
        roles: the training job's, in words.
        means: what job and search are made of, in words.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        EmbeddedCluster(AGENTS) as cluster,
        kind(cluster, Path(folder)) as stage,
    ):
        chaos = Chaos(stage, *begin(stage), SEED, lambda text: print(text, file=sys.stderr, flush=True))
        chaos.run(kills)
        chaos.end()
        restarts = chaos.restarts
        steps = stage.last_step(), len(stage.trial_diary())
    yield (
        f"A service on an embedded Mesos of {len(AGENTS)} agents runs a training job {roles} and a "
        f"search (four trials that take turns in two slots), {means}. A random process is killed with "
        "SIGKILL, one kind after the other in an order of chance; service, master and agents are started again at "
        "once, as an init system would. In a quarter of all cases the next one is killed before the jobs have "
        "recovered. Standstill: the longest that job or search made no step after a kill (they make at most ten and "
        "twenty a second), of those kills after which recovery was waited for."
    )
    yield ""
    yield chaos.table()
    yield ""
    yield (
        f"At the end both had finished: each of the {steps[0]} steps of the job, which was started again {restarts} "
        f"times, and of the {steps[1]} steps of the trials had the loss of an undisturbed run; no process was left, "
        "and the master had heard of no task that the database did not know."
    )
