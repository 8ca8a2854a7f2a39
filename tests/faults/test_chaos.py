"""A random fault every few seconds: 20 here, 200 and more in `make chaos`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from framework.embedded.cluster import EmbeddedCluster
from tests.faults.chaos import AGENTS, ENDLESS, PAUSE_S, SHORT_PAUSE_S, Chaos, begin, free_address, small_disks
from tests.faults.fault_stage import FaultStage

FAULTS = int(os.environ.get("DIKE_CHAOS_FAULTS", "20"))
SEED = int(os.environ.get("DIKE_CHAOS_SEED", "1"))
NIGHTLY = 100
"""Minimum number of faults for the tests that import TensorFlow."""

pytestmark = [pytest.mark.mesos, pytest.mark.timeout(300 + 60 * FAULTS)]


def say(text: str) -> None:
    print(text, flush=True)


def test_everything_fails_and_nothing_is_lost(tmp_path: Path) -> None:
    with (
        small_disks(tmp_path) as has_disks,
        free_address() as address,
        EmbeddedCluster(AGENTS) as cluster,
        FaultStage(cluster, tmp_path, address) as stage,
    ):
        chaos = Chaos(
            stage,
            *begin(stage),
            SEED,
            say,
            has_disks=has_disks,
            pause_s=PAUSE_S if FAULTS >= NIGHTLY else SHORT_PAUSE_S,
        )
        chaos.run(FAULTS)
        chaos.end()
        say(chaos.table())


@pytest.mark.tensorflow
@pytest.mark.skipif(FAULTS < NIGHTLY, reason="takes long; make chaos")
def test_a_job_on_tensorflow_comes_to_its_end(tmp_path: Path) -> None:
    with EmbeddedCluster(AGENTS) as cluster, FaultStage(cluster, tmp_path) as stage:
        training = stage.submit_tensorflow(ENDLESS)
        stage.start_service()
        stage.wait_until(stage.diary, "the first steps")
        chaos = Chaos(stage, training, None, SEED, say)
        chaos.run(FAULTS // 5)
        chaos.end()
        say(chaos.table())
