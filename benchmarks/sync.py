"""Measures synchronous training on hosts with network cards of 1 and 10 Gb/s, emulated on one machine."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.shaped_hosts import ShapedHosts, unsupported_reason
from dike.profile import Api, ModelProfile
from dike.task import VARIABLE, Role, TaskSpec
from solver import Cluster, NodeClass
from solver.allreduce import GangModel
from solver.hardware import known_hardware
from solver.resources import WorkerShape
from solver.scenario import Scenario
from solver.units import BYTES_PER_S_PER_GBPS

TITLE = "Synchronous training on several hosts"
SCRIPT = Path(__file__).with_name("sync_task.py")
PARAMETER_MB, COMPUTE_S, STEPS, WARM_UP = 20, 1.2, 13, 4
RATES_GBPS = (1.0, 10.0)
HOSTS = (1, 2, 3, 4)
PORT = 4000
TIMEOUT_S = 300.0
DEATH_STEPS = 8
BATCH = 24
COLUMNS = (
    "Gb/s",
    "workers",
    "step, s",
    "predicted, s",
    "TCP, s",
    "bound, s",
    "step / bound",
    "speed",
    "speed of `ps`",
    "loss",
)
TRANSFERS = 9
TRANSFER_PORT = 3900
TRANSFER = """
import socket, statistics, sys, threading, time
own, after, port, size, count = *sys.argv[1:3], *map(int, sys.argv[3:])
server = socket.create_server((own, port))
while True:
    try:
        output = socket.create_connection((after, port))
        break
    except ConnectionRefusedError:
        time.sleep(0.1)
source, _ = server.accept()
buffer, data, seconds = bytearray(1 << 20), bytes(size), []
for _ in range(count):
    start = time.monotonic()
    sender = threading.Thread(target=output.sendall, args=(data,))
    sender.start()
    left = size
    while left:
        left -= source.recv_into(buffer, min(left, len(buffer)))
    sender.join()
    seconds.append(time.monotonic() - start)
print(statistics.median(seconds))
"""

EPOCHS, SHOWN_EPOCHS = 10, (1, 3, 10)
DIGITS = f"""
import keras
from sklearn.datasets import load_digits

keras.utils.set_random_seed(7)
digits = load_digits()
layers = keras.layers
model = keras.Sequential([
    keras.Input((8, 8, 1)), layers.Conv2D(16, 3, activation="relu"), layers.BatchNormalization(),
    layers.MaxPooling2D(), layers.Flatten(), layers.Dropout(0.25), layers.Dense(64, activation="relu"),
    layers.Dense(10),
])
model.compile(OPTIMIZER, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
x = (digits.images / 16 * SCALE).astype("float32")[..., None]
history = model.fit(x, digits.target, epochs={EPOCHS}, batch_size=64, verbose=0)
for loss in history.history["loss"]:
    print("STEP", 0, 0.0, loss, flush=True)
"""
LAST_BIT = "(1 + 2e-7)"
OPTIMIZERS = {"SGD": "keras.optimizers.SGD(0.01, momentum=0.9)", "Adam": "keras.optimizers.Adam(0.001)"}


@dataclass(frozen=True)
class Job:
    """Processes of one job.

    Attributes:
        workers: number of hosts with a worker.
        ps: number of parameter servers, on the first hosts; 0 for none.
        compute_s: seconds in which an accelerator computes a batch.
        script: what it trains.
    """

    workers: int
    ps: int = 0
    compute_s: float = COMPUTE_S
    script: Path = SCRIPT


def measure() -> Iterator[str]:
    if reason := unsupported_reason():
        raise SystemExit(reason)
    yield f"A Keras model of {PARAMETER_MB} MB trains on hosts that are network namespaces of this machine, joined"
    yield f"by links of 1 and 10 Gb/s. An accelerator is emulated, which computes a batch in {COMPUTE_S} s; n of"
    yield f"them compute a part each. *Step*: mean of {STEPS - WARM_UP} steps. *TCP*: in which each host sends 2 (n"
    yield "- 1) / n of the model's bytes to the next one and receives as much, by nothing but `send` and `recv`,"
    yield "all at once. That is more than the links' rates allow, because this machine's cores move every packet."
    yield "*Bound*: one process's step with the part of its emulated compute, and *TCP*. *ps*: n workers and one"
    yield "parameter server, asynchronous, each with whole batches. *Loss*: its relative difference from that of"
    yield "one process. Speeds are relative to one process. *Predicted*: by the planner, with the CPUs that each"
    yield "host has of this machine's and the links' rates."
    yield ""
    yield f"| {' | '.join(COLUMNS)} |"
    yield f"|{'---|' * len(COLUMNS)}"
    for rate in RATES_GBPS:
        yield from _rows(rate)
    yield ""
    yield from _equality()
    yield ""
    yield from _death()


def _rows(rate_gbps: float) -> Iterator[str]:
    with ShapedHosts([rate_gbps * 1000] * max(HOSTS)) as hosts:
        one_s, one_loss = 0.0, 0.0
        for count in HOSTS:
            with _running(hosts, Job(count)) as processes:
                steps = _steps(processes[0], STEPS)
            seconds, loss = _step_s(steps), steps[-1][1]
            if count == 1:
                one_s, one_loss = seconds, loss
            tcp_s, ps = 0.0, ""
            if count > 1:
                tcp_s = _tcp_s(hosts, count, round(2 * (count - 1) / count * PARAMETER_MB * 1e6))
                with _running(hosts, Job(count, ps=1)) as processes:
                    ps = f"{one_s / _step_s(_steps(processes[0], STEPS)):.2f}"
            bound_s = one_s - COMPUTE_S + COMPUTE_S / count + tcp_s
            apart = abs(loss - one_loss) / one_loss
            predicted_s = _predicted_s(count, rate_gbps)
            cells = (
                f"{rate_gbps:g}",
                count,
                f"{seconds:.3f}",
                f"{predicted_s:.3f}",
                f"{tcp_s:.3f}",
                f"{bound_s:.3f}",
                f"{seconds / bound_s:.2f}",
            )
            yield f"| {' | '.join(map(str, (*cells, f'{one_s / seconds:.2f}', ps, f'{apart:.0e}')))} |"


def _tcp_s(hosts: ShapedHosts, count: int, size: int) -> float:
    """Median seconds in which each of the hosts sends `size` bytes to the next one, all at once."""
    started = []
    for host in range(count):
        addresses = (hosts.address(host), hosts.address((host + 1) % count))
        numbers = map(str, (TRANSFER_PORT, size, TRANSFERS))
        started.append(hosts.start(host, [sys.executable, "-c", TRANSFER, *addresses, *numbers]))
    return max(float(process.communicate(timeout=TIMEOUT_S)[0]) for process in started)


def _predicted_s(workers: int, rate_gbps: float) -> float:
    """The planner's prediction, with the emulated accelerator's compute."""
    size = int(PARAMETER_MB * 1e6)
    profile = ModelProfile("sync", Api.KERAS, size // 4, size, (), 1.0, 3.0, 1.0, BATCH, why_not_split="")
    cpus = (os.cpu_count() or 1) / workers
    host = NodeClass(name="host", cpus=cpus, mem_bytes=4 << 30, count=workers, network_gbps=rate_gbps)
    scenario = Scenario.of(profile, Cluster((host,)), known_hardware())
    gang = GangModel(scenario.model(WorkerShape(0, cpus)))
    network_s = gang.network_s(np.array(workers), rate_gbps * BYTES_PER_S_PER_GBPS)
    return COMPUTE_S / workers + gang.latency_s + float(network_s)


def _equality() -> Iterator[str]:
    """Losses of epochs beside those of `python`, and of `python` with data that differ in the last bit."""
    yield "A convolutional network with batch normalization and dropout trains on the 1,797 digits of scikit-learn,"
    yield "in float32. The table has relative differences of an epoch's loss from that of `python`. *Changed data*:"
    yield "all inputs are multiplied by 1 + 2e-7, which changes their last bits."
    yield ""
    yield f"| optimizer | run | {' | '.join(f'epoch {epoch}' for epoch in SHOWN_EPOCHS)} |"
    yield f"|---|---|{'---|' * len(SHOWN_EPOCHS)}"
    with tempfile.TemporaryDirectory() as folder, ShapedHosts([10_000.0] * 3) as hosts:
        for name, optimizer in OPTIMIZERS.items():
            script = Path(folder, f"{name}.py")
            losses = []
            for scale in (LAST_BIT, "1"):
                text = DIGITS.replace("OPTIMIZER", optimizer).replace("SCALE", scale)
                script.write_text(text, encoding="utf-8")
                environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
                process = hosts.start(0, [sys.executable, str(script)], env=environment)
                losses.append([loss for _, loss in _steps(process, EPOCHS)])
            with _running(hosts, Job(3, script=script)) as processes:
                losses.append([loss for _, loss in _steps(processes[0], EPOCHS)])
            changed, alone, shared = losses
            for run, found in (("`python`, changed data", changed), ("`allreduce`, 3 workers", shared)):
                apart = [abs(found[epoch - 1] / alone[epoch - 1] - 1) for epoch in SHOWN_EPOCHS]
                yield f"| {name} | {run} | {' | '.join(f'{each:.0e}' for each in apart)} |"


def _death() -> Iterator[str]:
    """The time from the end of a worker to the end of all, and to the first step of the next attempt."""
    with tempfile.TemporaryDirectory() as folder, ShapedHosts([10_000.0] * 3) as hosts:
        with _running(hosts, Job(3), folder, interval_s=1.0) as processes:
            _steps(processes[0], DEATH_STEPS)
            processes[2].kill()
            killed_s = time.monotonic()
            processes[0].wait(TIMEOUT_S)
            ended_s = time.monotonic() - killed_s
        with _running(hosts, Job(3), folder, attempt=1) as processes:
            [(again_s, _)] = _steps(processes[0], 1)
    yield f"A worker of three is killed: the others have ended {ended_s:.2f} s later, and all have made the next"
    yield f"step {again_s - killed_s:.1f} s later, from the last checkpoint. That includes the start of Python and of"
    yield "TensorFlow, which a job's zygotes save, and not the new offers and the launch by Mesos."


@contextlib.contextmanager
def _running(
    hosts: ShapedHosts, job: Job, folder: str | None = None, *, attempt: int = 0, interval_s: float = 1e6
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Runs the processes of a job, each on its host; the first one is the chief."""
    roles = [(Role.WORKER, host) for host in range(job.workers)] + [(Role.PS, host) for host in range(job.ps)]
    if job.ps:
        roles.insert(0, (Role.CHIEF, 0))
    cluster: dict[str, list[str]] = {}
    for number, (role, host) in enumerate(roles):
        cluster.setdefault(str(role), []).append(f"{hosts.address(host)}:{PORT + 10 * attempt + number}")
    indices: dict[Role, int] = {}
    processes = []
    with contextlib.ExitStack() as stack:
        folder = folder or stack.enter_context(tempfile.TemporaryDirectory())
        for role, host in roles:
            index = indices[role] = indices.get(role, -1) + 1
            task = TaskSpec(
                job_id="sync",
                role=role,
                index=index,
                cluster=cluster,
                api=Api.KERAS,
                checkpoint_dir=f"{folder}/checkpoints",
                checkpoint_interval_s=interval_s,
                attempt=attempt,
                batch_size=BATCH,
            )
            environment = {
                **os.environ,
                VARIABLE: task.dumps(),
                "CUDA_VISIBLE_DEVICES": "",
                "TF_CPP_MIN_LOG_LEVEL": "3",
            }
            steps = STEPS if attempt or interval_s > STEPS else 10 * STEPS
            arguments = (str(PARAMETER_MB), str(job.compute_s), str(steps))
            command = [sys.executable, "-P", "-m", "dike.launch", str(job.script), *arguments]
            log = stack.enter_context(Path(folder, f"{role}-{index}.log").open("wb"))
            processes.append(hosts.start(host, command, env=environment, stderr=log))
        try:
            yield processes
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait(TIMEOUT_S)


def _steps(process: subprocess.Popen[bytes], count: int) -> list[tuple[float, float]]:
    """Time and loss of the first `count` steps that a process prints."""
    assert process.stdout is not None
    found = []
    for line in iter(process.stdout.readline, b""):
        match line.split():
            case [b"STEP", _, at_s, loss]:
                found.append((float(at_s), float(loss)))
                if len(found) == count:
                    return found
    raise RuntimeError(f"The script made {len(found)} steps instead of {count}: {json.dumps(process.args)}")


def _step_s(steps: list[tuple[float, float]]) -> float:
    """Mean seconds of a step after the first ones; asynchronous steps end in groups."""
    times = [at_s for at_s, _ in steps[WARM_UP:]]
    return (times[-1] - times[0]) / (len(times) - 1)
