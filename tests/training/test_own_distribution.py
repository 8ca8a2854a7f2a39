"""Scripts that distribute themselves, started as equal processes on a private Mesos."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dike.own_distribution import variables
from framework.project.entry_point import find_entry_point
from framework.project.profiling import profile_unread

DEBIANS = Path("/usr/lib/python3/dist-packages")
"""Where Debian's PyTorch is."""
TIMEOUT_S = 240.0

RANKS = """
import os, socket, sys, time

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if rank == 0:
    with socket.create_server(place) as server:
        print("SUM", sum(int(server.accept()[0].recv(16)) for _ in range(size - 1)), "OF", size, flush=True)
else:
    while True:
        try:
            socket.create_connection(place).sendall(str(rank).encode())
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
if "fail" in sys.argv and rank == 1 and not os.path.exists(os.environ["DIKE_CHECKPOINT_DIR"] + "/failed"):
    open(os.environ["DIKE_CHECKPOINT_DIR"] + "/failed", "w").close()
    raise OSError("the disk of rank 1")
time.sleep(2 * ("fail" in sys.argv))
print("DONE", rank, flush=True)
"""
TORCH = """
import sys
sys.path.append(PATH)
import dike, torch, torch.distributed
from torch.nn.parallel import DistributedDataParallel

torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
x = torch.randn(64, 4)
y = x.sum(1, keepdim=True)
rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
saved = lambda folder: folder + "/state.pt"
first = dike.checkpoint(
    lambda folder: torch.save([model.state_dict(), optimizer.state_dict()], saved(folder)),
    lambda folder: [each.load_state_dict(it) for each, it in zip([model, optimizer], torch.load(saved(folder)))],
)
for step in range(first, 40):
    loss = ((model(x[rank::size]) - y[rank::size]) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    dike.report(step + 1, loss=float(loss))
print("LOSS", float(((model(x) - y) ** 2).mean()), "OF", size, flush=True)
"""
JAX = """
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize()
import numpy as np
from jax import numpy as jnp
from jax.experimental import multihost_utils

rank, size = jax.process_index(), jax.process_count()
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
y = x.sum(1)
weights = jnp.zeros(4)
gradient = jax.jit(jax.grad(lambda weights, x, y: jnp.mean((x @ weights - y) ** 2)))
for step in range(40):
    weights -= 0.1 * multihost_utils.process_allgather(gradient(weights, x[rank::size], y[rank::size])).mean(0)
print("LOSS", float(np.mean((x @ np.asarray(weights) - y) ** 2)), "OF", size, flush=True)
"""
STRATEGY = """
import os
os.environ["TF_USE_LEGACY_KERAS"] = "1"
import numpy as np
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
x = np.random.default_rng(0).normal(size=(256, 8)).astype("float32")
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Input((8,)), tf.keras.layers.Dense(1)])
    model.compile(tf.keras.optimizers.SGD(0.2), "mse")
data = tf.data.Dataset.from_tensor_slices((x, x.sum(1))).batch(32).repeat()
history = model.fit(data, epochs=4, steps_per_epoch=8, verbose=0)
print("LOSS", history.history["loss"][-1], "OF", strategy.num_replicas_in_sync, flush=True)
"""


def run(folder: Path, text: str, *options: str, arguments: tuple[str, ...] = ()) -> str:
    script = folder / "train.py"
    script.write_text(text)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "framework", "run", *options, str(script), *arguments],
        cwd=folder,
        env={**os.environ, "DIKE_PRIVATE": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def final_loss(output: str) -> tuple[float, str]:
    [line] = [line.split() for line in output.splitlines() if line.startswith("LOSS ")]
    return float(line[1]), line[3]


@pytest.mark.mesos
def test_processes_find_each_other_by_the_variables_of_torchrun(tmp_path: Path) -> None:
    output = run(tmp_path, RANKS, "--strategy", "allreduce", "--min-workers", "3")
    assert "SUM 3 OF 3" in output
    # Only the first process' output counts.
    assert "DONE 0" in output
    assert "DONE 1" not in output


@pytest.mark.mesos
def test_a_process_that_fails_restarts_all(tmp_path: Path) -> None:
    options = ("--strategy", "allreduce", "--min-workers", "2", "--checkpoint-dir", str(tmp_path / "checkpoints"))
    output = run(tmp_path, RANKS, *options, arguments=("fail",))
    assert output.count("SUM 1 OF 2") == 2
    assert "worker:1 failed" in output
    assert "1 restart" in output


@pytest.mark.mesos
@pytest.mark.skipif(
    not (importlib.util.find_spec("torch") or (DEBIANS / "torch").is_dir()), reason="PyTorch is not installed"
)
def test_a_script_of_pytorch_trains_on_two_workers(tmp_path: Path) -> None:
    loss, size = final_loss(run(tmp_path, TORCH.replace("PATH", repr(str(DEBIANS))), "--min-workers", "2"))
    assert size == "2"
    assert loss < 1e-3


@pytest.mark.mesos
@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX is not installed")
def test_a_script_of_jax_trains_on_two_workers(tmp_path: Path) -> None:
    loss, size = final_loss(run(tmp_path, JAX, "--min-workers", "2"))
    assert size == "2"
    assert loss < 1e-3


@pytest.mark.mesos
@pytest.mark.tensorflow
def test_tf_keras_trains_under_a_strategy_of_several_workers(tmp_path: Path) -> None:
    loss, size = final_loss(run(tmp_path, STRATEGY, "--min-workers", "2"))
    assert size == "2"
    assert loss < 0.1


@pytest.mark.parametrize(
    ("text", "library"),
    [
        (TORCH, "torch.distributed"),
        (JAX, "jax.distributed"),
        ("from accelerate import Accelerator\nAccelerator()", "torch.distributed"),
        ("from jax import distributed\ndistributed.initialize()", "jax.distributed"),
    ],
)
def test_a_library_is_recognized_in_the_source(tmp_path: Path, text: str, library: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    profile = profile_unread(find_entry_point(str(script)))
    assert profile is not None
    assert profile.own_distribution == library


@pytest.mark.parametrize(("text", "strategy"), [(RANKS, "auto"), ("import tensorflow as tf", "allreduce")])
def test_any_other_script_is_read(tmp_path: Path, text: str, strategy: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    assert profile_unread(find_entry_point(str(script)), strategy=strategy) is None


def test_a_process_with_a_gpu_is_alone_on_its_machine() -> None:
    addresses = ["a:1", "b:2", "a:3"]
    found = variables(addresses, 2, has_gpu=False)
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == ("2", "3", "1", "2")
    assert json.loads(found["TF_CONFIG"]) == {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": 2}}
    alone = variables(addresses, 2, has_gpu=True)
    assert (alone["LOCAL_RANK"], alone["LOCAL_WORLD_SIZE"]) == ("0", "1")
