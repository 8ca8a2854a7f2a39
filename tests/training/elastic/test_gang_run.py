"""Gangs on a real Mesos with real TensorFlow: resized, or with a killed worker, they compute what `python` does."""

from __future__ import annotations

import dataclasses
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dike.profile import Api
from executor.job_slot import PEER_LOST_TIMEOUT_S
from framework.embedded.agents import AgentSpec
from framework.embedded.cluster import EmbeddedCluster
from tests import warm
from tests.profiles import made_up_profile
from tests.running import TIMEOUT_S, Running
from tests.task_processes import roles
from tests.training.elastic.other_search import search
from tests.warm import WarmTensorFlow

pytestmark = [pytest.mark.mesos, pytest.mark.tensorflow, pytest.mark.timeout(600)]

AGENT = AgentSpec(resources="cpus:1;mem:1900;disk:4096")
EPOCHS = 20
# Takes its time until there is a file.
SCRIPT = f"""
import os, sys, time
import keras
import numpy as np

keras.utils.set_random_seed(7)

class Pace(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if not os.path.exists(sys.argv[1]):
            time.sleep(0.2)

x = np.random.default_rng(0).random((128, 8), 'f')
layers = [keras.layers.Dense(8, 'relu'), keras.layers.BatchNormalization(), keras.layers.Dropout(0.2)]
model = keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(1)])
model.compile('adam', 'mse', metrics=['mae'])
history = model.fit(x, x.sum(1), epochs={EPOCHS}, batch_size=16, verbose=0, callbacks=[Pace()])
print('history', *history.history['loss'], *history.history['mae'], flush=True)
"""
# Its FLOPs are made up: for the real ones no second worker would be worth anything.
SHAPES = {"dense/kernel": (8, 8), "dense/bias": (8,), "dense_1/kernel": (8, 1), "dense_1/bias": (1,)}
PROFILE = dataclasses.replace(
    made_up_profile(SHAPES, api=Api.KERAS, flops=1e9, batch_size=16), why_not_split="", synced_layers=1
)


@pytest.fixture
def mesos() -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster([AGENT] * 2) as cluster:
        cluster.wait_for_agents(60)
        yield cluster
    Running.end_all()


def project(folder: Path) -> tuple[Path, Path]:
    """The script, and the file that lets it hurry."""
    (folder / "src").mkdir()
    script = folder / "src" / "train.py"
    script.write_text(SCRIPT)
    (folder / "profile.json").write_text(PROFILE.dumps())
    return script, folder / "go"


def histories(text: str) -> list[list[float]]:
    return [[float(word) for word in line.split()] for line in re.findall(r"^history (.*)$", text, re.MULTILINE)]


def check_history(run: Running, script: Path, go: Path, folder: Path) -> None:
    """The job has printed one history, that of `python`."""
    bare = warm.run([sys.executable, script, go], timeout=TIMEOUT_S, cwd=folder, process_class=WarmTensorFlow)
    assert bare.returncode == 0, bare.stderr
    (expected,), (found,) = histories(bare.stdout), histories(run.log)
    assert len(found) == 2 * EPOCHS
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_resized_gang_computes_what_python_computes(mesos: EmbeddedCluster, tmp_path: Path) -> None:
    script, go = project(tmp_path)
    first = search(tmp_path / "first", mesos, steps=1_000_000, slot_mem_mib=1500)
    first.wait_for(lambda: any(each["used_resources"]["mem"] for each in mesos.state()["frameworks"]), "a slot")
    job = Running(
        tmp_path,
        *("run", "--format", "json", "--master", mesos.master, "--elastic", "1:3", "--resize-interval", "2"),
        *("--checkpoint-interval", "1", "--profile", tmp_path / "profile.json", script, go),
    )
    # The search holds an agent, so the job begins as one task; when it is over the job grows.
    job.wait_for_text("worker:0 running")
    assert "worker:1" not in job.log
    (tmp_path / "first" / "end-0.01").touch()
    first.result()
    job.wait_for_text("1 to 2 workers at step")
    # Another search finds no agent free: the job becomes one task again.
    second = search(tmp_path / "second", mesos, steps=1_000_000, slot_mem_mib=1500)
    job.wait_for_text("2 to 1 workers at step")
    go.touch()
    result = job.result()
    (tmp_path / "second" / "end-0.01").touch()
    second.result()
    assert (result["restarts"], result["plan"]["option"]["ps"]) == (0, 0)
    assert [(each["from_workers"], each["to_workers"]) for each in result["resizes"][:2]] == [(1, 2), (2, 1)]
    check_history(job, script, go, tmp_path)


def test_a_gang_that_loses_a_worker_computes_what_python_computes(mesos: EmbeddedCluster, tmp_path: Path) -> None:
    script, go = project(tmp_path)
    job = Running(
        tmp_path,
        *("run", "--format", "json", "--master", mesos.master, "--strategy", "allreduce", "--max-workers", "2"),
        *("--checkpoint-interval", "1", "--profile", tmp_path / "profile.json"),
        *("--checkpoint-dir", tmp_path / "checkpoints", script, go),
    )
    job.wait_for(lambda: list((tmp_path / "checkpoints").glob("run-0-step-*/dike-trial.json")), "a checkpoint")
    processes = roles(mesos)
    processes["worker:1"].kill()
    chief = processes["worker:0"]
    killed_s = time.monotonic()
    job.wait_for_text("; this worker ends, too.")
    job.wait_for(lambda: chief not in roles(mesos).values(), "the end of worker 0")
    assert time.monotonic() - killed_s < PEER_LOST_TIMEOUT_S / 2
    job.wait_for_text("dike: restored '")
    go.touch()
    result = job.result()
    assert (result["restarts"], result["plan"]["option"]["workers"]) == (1, 2)
    assert "restart 1 of at most" in job.log
    check_history(job, script, go, tmp_path)


def test_an_elastic_gang_that_loses_a_machine_continues_on_the_other(mesos: EmbeddedCluster, tmp_path: Path) -> None:
    script, go = project(tmp_path)
    job = Running(
        tmp_path,
        *("run", "--format", "json", "--master", mesos.master, "--elastic", "1:2", "--resize-interval", "60"),
        *("--checkpoint-interval", "1", "--profile", tmp_path / "profile.json"),
        *("--checkpoint-dir", tmp_path / "checkpoints", script, go),
    )
    job.wait_for(lambda: list((tmp_path / "checkpoints").glob("run-0-step-*/dike-trial.json")), "a checkpoint")
    assert set(roles(mesos)) == {"worker:0", "worker:1"}
    mesos.kill_agent(1, signal.SIGUSR1)
    job.wait_for_text("dike: restored '")
    go.touch()
    result = job.result()
    assert (result["restarts"], result["plan"]["option"]["workers"]) == (1, 1)
    check_history(job, script, go, tmp_path)
