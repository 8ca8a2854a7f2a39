"""`dike run --elastic` from outside: a real Mesos that it shares with a search, real processes, one of them killed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dike.profile import Api
from framework.embedded.agents import AgentSpec
from framework.embedded.cluster import EmbeddedCluster
from tests.profiles import made_up_profile
from tests.running import DEADLINE_S, Running
from tests.task_processes import executors
from tests.training.elastic.other_search import search

pytestmark = [pytest.mark.mesos, pytest.mark.tensorflow, pytest.mark.timeout(600)]

STEPS_PER_EPOCH = 32
AGENT = "cpus:2;mem:1900;disk:4096"
SCRIPT = """
import sys, time
from pathlib import Path
import numpy as np
import keras

class Slowly(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.05)
        self.model.stop_training = Path(sys.argv[1]).exists()

model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1, name='out')])
model.compile('sgd', 'mse')
data = np.random.RandomState(0).rand(256, 4).astype('f')
model.fit(data, data.sum(axis=1), batch_size=8, epochs=10000, verbose=2, callbacks=[Slowly()])
"""
# Its FLOPs are made up: the model is a tiny one, of which no second worker would be worth anything.
PROFILE = made_up_profile({"out/kernel": (4, 1), "out/bias": (1,)}, api=Api.KERAS, flops=1e9)


@pytest.fixture
def mesos() -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster([AgentSpec(resources=AGENT)] * 2) as cluster:
        cluster.wait_for_agents(60)
        yield cluster
    Running.end_all()


def executor_of(cluster: EmbeddedCluster, name: str) -> psutil.Process:
    """The executor of the task that is called so, such as `chief-0`."""
    tasks = [task for framework in cluster.state()["frameworks"] for task in framework["tasks"]]
    ids = [task["executor_id"] for task in tasks if f".{name}." in task["id"]]
    for process in executors(cluster):
        if process.environ()["MESOS_EXECUTOR_ID"] in ids:
            return process
    raise AssertionError(f"there is no {name}")


def test_a_job_and_a_search_share_a_cluster(tmp_path: Path, mesos: EmbeddedCluster) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text(SCRIPT)
    (tmp_path / "profile.json").write_text(PROFILE.dumps())
    # Its slot fits only an agent that has nothing else.
    first = search(tmp_path / "first", mesos, steps=1_000_000, slot_mem_mib=1300)
    first.wait_for(lambda: any(f["used_resources"]["mem"] for f in mesos.state()["frameworks"]), "a slot")
    job = Running(
        tmp_path,
        *("run", "--format", "json", "--master", mesos.master, "--elastic", "1:2", "--resize-interval", "2"),
        *("--strategy", "ps"),
        *("--checkpoint-interval", "1", "--profile", tmp_path / "profile.json"),
        *(project / "train.py", tmp_path / "stop"),
    )
    # The search holds an agent, so the job begins with one worker; when it is over the job grows.
    job.wait_for_text("chief:0 running")
    assert "worker:1" not in job.log
    (tmp_path / "first" / "end-0.01").touch()
    first.result()
    job.wait_for_text("1 to 2 workers at step")
    # Another search finds no CPU free: the job gives a worker up, and its chief is killed in the middle of that.
    # The slot has room beside a part of the job, which may come back on both agents.
    second = search(tmp_path / "second", mesos, steps=20, slot_mem_mib=600)
    job.wait_for_text("changing to 1 worker and")
    executor_of(mesos, "chief-0").kill()
    job.wait_for_text("restart 1 of at most")
    resumed = job.wait_for(lambda: re.findall(r"restored .* epoch (\d+)", job.log)[1:], "the next attempt")
    assert second.result()["trials"][0]["state"] == "finished"
    (tmp_path / "stop").touch()
    result = job.result()
    assert result["succeeded"]
    assert result["restarts"] == 1
    grown = result["resizes"][0]
    assert (grown["from_workers"], grown["to_workers"]) == (1, 2)
    assert 0 < grown["step"] < result["steps"]
    assert int(resumed[-1]) >= grown["step"] // STEPS_PER_EPOCH
    assert all(0 < resize["cost_s"] < DEADLINE_S for resize in result["resizes"])
