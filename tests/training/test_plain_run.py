"""One plain task on a real Mesos with real TensorFlow: what `python` computes, also when it is killed on the way."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from framework.embedded.agents import AgentSpec
from framework.embedded.cluster import EmbeddedCluster
from tests import warm
from tests.running import TIMEOUT_S, Running, run_dike
from tests.task_processes import roles
from tests.warm import WarmTensorFlow

pytestmark = [pytest.mark.mesos, pytest.mark.tensorflow, pytest.mark.timeout(600)]

AGENT = AgentSpec(resources="cpus:2;mem:6144;disk:4096")
# Each takes its time until there is a file: then it has been killed.
KERAS = """
import os, sys, time
import executor
import keras
import numpy as np

keras.utils.set_random_seed(7)

class Pace(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if not os.path.exists(sys.argv[1]):
            time.sleep(0.2)

x = np.random.default_rng(0).random((320, 8), 'f')
model = keras.Sequential([keras.layers.Dense(8, 'relu'), keras.layers.Dropout(0.2), keras.layers.Dense(1)])
model.compile('adam', 'mse')
epochs = int(sys.argv[2]) if len(sys.argv) > 2 else 6
history = model.fit(x, x.sum(1), epochs=epochs, batch_size=16, verbose=0, callbacks=[Pace()])
assert 'TF_CONFIG' not in os.environ
assert executor.IS_MINE
print('losses', [float(loss).hex() for loss in history.history['loss']], flush=True)
"""
SESSION = """
import os, sys, time
import executor
import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
tf.set_random_seed(7)
data = np.random.RandomState(0).rand(256, 8).astype('f')
x = tf.placeholder(tf.float32, [None, 8])
w = tf.get_variable('w', [8, 1])
loss = tf.reduce_mean(tf.square(tf.matmul(x, w) - 1.0))
step = tf.train.get_or_create_global_step()
train = tf.train.AdamOptimizer(0.01).minimize(loss, global_step=step)
with tf.train.MonitoredTrainingSession(hooks=[tf.train.StopAtStepHook(last_step=120)]) as session:
    while not session.should_stop():
        value, now, _ = session.run([loss, step, train], {x: data[:32]})
        if not os.path.exists(sys.argv[1]):
            time.sleep(0.2)
assert executor.IS_MINE
print('losses', float(value).hex(), flush=True)
"""
LOOP = """
import multiprocessing, os, sys, time
import executor
import tensorflow as tf

with tf.distribute.MirroredStrategy(['/cpu:0']).scope():
    mirrored = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(1)])
    mirrored.compile('sgd', 'mse')
w, step = tf.Variable([[1.0], [2.0]]), tf.Variable(0)
saved = tf.train.CheckpointManager(tf.train.Checkpoint(w=w, step=step), os.environ.get('DIKE_CHECKPOINT_DIR', 'own'), 1)
saved.restore_or_initialize()
print('begins at', int(step), flush=True)
while step < 40:
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum((w - 3.0) ** 2)
    w.assign_sub(0.01 * tape.gradient(loss, w))
    step.assign_add(1)
    saved.save()
    if not os.path.exists(sys.argv[1]):
        time.sleep(0.2)
mirrored.fit(tf.ones((64, 4)), tf.ones((64, 1)), verbose=0)
helper = multiprocessing.get_context('fork').Process(target=time.sleep, args=[60])
helper.start()
helper.terminate()  # SIGTERM, which is not this process' own
helper.join()
assert 'TF_CONFIG' not in os.environ
assert executor.IS_MINE
print('loss', float(loss).hex(), flush=True)
"""
REPORTING = """
import json, os, random, sys, time
import dike
import executor

w = 0.0

def save(folder):
    with open(os.path.join(folder, 'w.json'), 'w') as file:
        json.dump(w, file)

def restore(folder):
    global w
    with open(os.path.join(folder, 'w.json')) as file:
        w = json.load(file)

random.seed(7)
done = dike.checkpoint(save, restore)
print('begins at', done, flush=True)
for step in range(done, 200):
    w += 0.1 * random.random()
    dike.report(step + 1, loss=(w - 3) ** 2)
    if not os.path.exists(sys.argv[1]):
        time.sleep(0.2)
assert executor.IS_MINE
print('loss', w.hex(), flush=True)
"""


@pytest.fixture(scope="module")
def mesos() -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster([AGENT]) as cluster:
        cluster.wait_for_agents(60)
        yield cluster


@pytest.fixture(autouse=True)
def runs_end() -> Iterator[None]:
    yield
    Running.end_all()


def project(folder: Path, program: str) -> Path:
    """The script, in a folder that has a module named as one of our packages."""
    (folder / "src").mkdir()
    (folder / "src" / "executor.py").write_text("IS_MINE = True")
    script = folder / "src" / "train.py"
    script.write_text(program)
    return script


@pytest.mark.parametrize(("program", "model"), [(KERAS, "model.keras"), (SESSION, "model")], ids=["keras", "session"])
def test_a_killed_plain_task_computes_what_python_computes(
    program: str, model: str, mesos: EmbeddedCluster, tmp_path: Path
) -> None:
    script, go = project(tmp_path, program), tmp_path / "go"
    options = ("--master", mesos.master, "--checkpoint-dir", "checkpoints", "--checkpoint-interval", "1")
    run = Running(tmp_path, "run", "--format", "json", *options, script, go)
    run.wait_for(lambda: list((tmp_path / "checkpoints").glob("run-0-step-*/dike-trial.json")), "a checkpoint")
    (process,) = roles(mesos).values()
    process.kill()
    run.wait_for_text("dike: restored '")
    go.touch()
    result = run.result()
    assert (result["restarts"], result["plan"]["option"]["ps"]) == (1, 0)
    (task,) = result["plan"]["tasks"]
    assert (task["role"], task["is_plain"]) == ("worker", True)
    bare = warm.run([sys.executable, script, go], timeout=TIMEOUT_S, cwd=tmp_path, process_class=WarmTensorFlow)
    assert bare.returncode == 0, bare.stderr
    losses = re.findall(r"^losses .*", bare.stdout, re.MULTILINE)
    assert len(losses) == 1
    assert re.findall(r"^losses .*", run.log, re.MULTILINE) == losses
    exported = run_dike("export", "checkpoints", "-o", model, cwd=tmp_path)
    assert exported.returncode == 0, exported.stderr
    assert (tmp_path / model).exists()
    if program is KERAS:
        longer = Running(tmp_path, "run", "--format", "json", *options, script, go, "7")
        assert longer.result()["steps"] == 7 * 20
        more = re.findall(r"'-?0x[^']*'", re.findall(r"^losses .*", longer.log, re.MULTILINE)[0])
        assert (len(more), more[:6]) == (7, re.findall(r"'-?0x[^']*'", losses[0]))
    # Its checkpoints cannot be resumed with parameter servers.
    refused = run_dike("run", "--strategy", "ps", *options, script, go, cwd=tmp_path)
    assert refused.returncode == 1
    assert "of a job without parameter servers; leave out --strategy ps, or name another folder" in refused.stderr


@pytest.mark.parametrize(
    ("program", "how", "checkpoint"),
    [(LOOP, "by Variable.assign_sub", "checkpoint"), (REPORTING, "dike.report say", "run-0-step-*/dike-trial.json")],
    ids=["tensorflow", "any"],
)
def test_a_script_with_a_loop_of_its_own_runs_as_it_is(
    program: str, how: str, checkpoint: str, mesos: EmbeddedCluster, tmp_path: Path
) -> None:
    script, go = project(tmp_path, program), tmp_path / "go"
    options = ("--master", mesos.master, "--checkpoint-dir", "checkpoints", "--checkpoint-interval", "1")
    refused = run_dike("run", "--strategy", "ps", *options, script, go, cwd=tmp_path)
    assert refused.returncode == 2
    assert "it can only train without parameter servers. train.py trains " in refused.stderr
    assert how in refused.stderr
    run = Running(tmp_path, "run", "--format", "json", *options, script, go)

    def begins() -> list[int]:
        # It has begun for its profile, too.
        tasks = run.log.partition("launched worker:0")[2]
        return [int(step) for step in re.findall(r"^begins at (\d+)$", tasks, re.MULTILINE)]

    run.wait_for(lambda: list((tmp_path / "checkpoints").glob(checkpoint)), "a checkpoint")
    (process,) = roles(mesos).values()
    process.kill()
    run.wait_for(lambda: len(begins()) == 2, "another beginning")
    go.touch()
    result = run.result()
    assert (result["restarts"], result["plan"]["samples_per_s"]) == (1, 0.0)
    assert "saves and restores by dike.checkpoint or by itself, if at all" in run.log
    bare = warm.run([sys.executable, script, go], timeout=TIMEOUT_S, cwd=tmp_path, process_class=WarmTensorFlow)
    assert bare.returncode == 0, bare.stderr
    first, second = begins()
    assert (first, second > 0) == (0, True), "what it has done is not done again"
    assert re.findall("^loss .*", run.log, re.MULTILINE) == re.findall("^loss .*", bare.stdout, re.MULTILINE)


def test_a_job_with_parameter_servers_resumes_with_parameter_servers(mesos: EmbeddedCluster, tmp_path: Path) -> None:
    script, go = project(tmp_path, SESSION), tmp_path / "go"
    go.touch()
    options = ("--master", mesos.master, "--checkpoint-dir", "checkpoints")
    first = run_dike("run", "--strategy", "ps", "--max-workers", "1", *options, script, go, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    run = Running(tmp_path, "run", "--format", "json", *options, script, go)
    result = run.result()
    assert "are of a job with parameter servers; planning again" in run.log
    assert (result["restarts"], result["plan"]["option"]["ps"] > 0) == (0, True)
