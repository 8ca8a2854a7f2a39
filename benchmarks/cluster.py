"""Measures clusters of several machines: joining, the start of a job, and checkpoints through the store."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.cluster_hosts import ClusterHosts

TITLE = "A cluster of several machines"
RUNS = 5
MIB = 1 << 20
CHECKPOINT_MIB = 256
FILES = 4
RESOURCES = "cpus:1;mem:4000"
SCRIPT = """
import time
import numpy as np, keras

model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)])
model.compile("sgd", "mse")


class First(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 0:
            print("first step at", time.time(), flush=True)


model.fit(np.zeros((64, 20)), np.zeros((64, 1)), batch_size=32, verbose=0, callbacks=[First()])
"""
PUSH = f"""
import os, sys, time
from pathlib import Path
from executor.mirror import Mirror, RunFolder, StoreClient, Writer
from framework.cluster.machine import running_machine
from framework.cluster.sharing import store_client

machine = running_machine()
store, folder = store_client(machine), RunFolder("ab" * 16, "/runs")
store.create_folder(folder.id)
mirror = Mirror(store, folder, "/runs/one", Path("copy"))
mirror.pull()
for number in range({FILES}):
    Path("copy", f"part-{{number}}").write_bytes(os.urandom({CHECKPOINT_MIB // FILES} << 20))
begun = time.perf_counter()
mirror.push(Writer("job", 0))
print("pushed", {CHECKPOINT_MIB} / (time.perf_counter() - begun), flush=True)
again = Mirror(store, folder, "/runs/one", Path("again"))
begun = time.perf_counter()
again.pull()
print("pulled", {CHECKPOINT_MIB} / (time.perf_counter() - begun), flush=True)
begun = time.perf_counter()
mirror.push(Writer("job", 0))
print("unchanged", time.perf_counter() - begun, flush=True)
store.remove_folder(folder.id)
"""
TLS = f"""
import os, socket, sys, threading, time
from pathlib import Path
from framework.cluster.authority import Authority, client_context, server_context
from framework.cluster.records import ClusterFolder

folder = ClusterFolder(Path("tls"))
folder.make()
Authority.create(folder.keys, "tls")
server = socket.create_server(("127.0.0.1", 0))
if child := os.fork():
    data = os.urandom({CHECKPOINT_MIB} << 20)
    plain = socket.create_connection(server.getsockname())
    connection = client_context(folder.keys).wrap_socket(plain)
    begun = time.perf_counter()
    connection.sendall(data)
    connection.recv(1)
    print("sent", {CHECKPOINT_MIB} / (time.perf_counter() - begun), flush=True)
    os.waitpid(child, 0)
else:
    connection = server_context(folder.keys).wrap_socket(server.accept()[0], server_side=True)
    left = {CHECKPOINT_MIB} << 20
    while left:
        left -= len(connection.recv(1 << 20))
    connection.sendall(b"x")
    os._exit(0)
"""


def measure() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder, ClusterHosts(Path(folder), 2) as hosts:
        for host in (0, 1):
            (hosts.project(host) / "train.py").write_text(SCRIPT)
        hosts.make_cluster([RESOURCES, RESOURCES])
        yield f"Two hosts: network namespaces on this machine, each with its own folders. Medians of {RUNS} runs."
        yield ""
        yield "## Joining"
        yield ""
        yield "| | seconds |"
        yield "|---|---|"
        join, leave = _join_and_leave(hosts)
        yield f"| `dike cluster join`, until the master counts the agent as active | {join:.2f} |"
        yield f"| `dike cluster leave`, without tasks | {leave:.2f} |"
        yield ""
        yield "## From `dike run` to the first step"
        yield ""
        yield "A Keras model, its profile cached, its TensorFlow imported by the machine's zygote, where that stays up."
        yield ""
        yield "| | seconds | of the private Mesos |"
        yield "|---|---|---|"
        ways = {
            "private Mesos, started for the command": ("--private",),
            "cluster, the head's own agent": ("--constraint", "hostname:IS:host-0"),
            "cluster, the other host: through both gateways": ("--constraint", "hostname:IS:host-1"),
        }
        for options in ways.values():
            _first_step(hosts, options)
        # Alternating: a busy moment of the machine meets all of them.
        taken = [[_first_step(hosts, options) for options in ways.values()] for _ in range(RUNS)]
        medians = [statistics.median(one) for one in zip(*taken, strict=True)]
        for name, seconds in zip(ways, medians, strict=True):
            yield f"| {name} | {seconds:.2f} | {seconds / medians[0]:.2f} |"
        yield ""
        yield "## Checkpoints through the store"
        yield ""
        yield f"{CHECKPOINT_MIB} MiB in {FILES} files, with checksums and `fsync`, beside one connection with TLS in"
        yield "Python over loopback that throws the data away."
        yield ""
        yield "| | MiB/s | of TLS over loopback |"
        yield "|---|---|---|"
        rows = [_transfers(hosts) for _ in range(RUNS)]
        tls, *others = (statistics.median(one) for one in zip(*rows, strict=True))
        yield f"| TLS over loopback, discarded | {tls:.0f} | 1.00 |"
        names = ("push, on the head", "pull, on the head", "push, through both gateways", "pull, through both gateways")
        for name, rate in zip(names, others, strict=True):
            yield f"| {name} | {rate:.0f} | {rate / tls:.2f} |"


def _join_and_leave(hosts: ClusterHosts) -> tuple[float, float]:
    joins, leaves = [], []
    for _ in range(RUNS):
        begun_s = time.perf_counter()
        _run(hosts, 1, "dike", "cluster", "leave")
        leaves.append(time.perf_counter() - begun_s)
        command = ClusterHosts.join_command(_run(hosts, 0, "dike", "cluster", "token"))
        begun_s = time.perf_counter()
        _run(hosts, 1, *command, "--resources", RESOURCES)
        joins.append(time.perf_counter() - begun_s)
    return statistics.median(joins), statistics.median(leaves)


def _first_step(hosts: ClusterHosts, options: tuple[str, ...]) -> float:
    begun_s = time.time()
    output = _run(hosts, 0, "dike", "run", *options, "train.py")
    return float(_after(output, "first step at")) - begun_s


def _transfers(hosts: ClusterHosts) -> list[float]:
    found = [float(_after(_run(hosts, 0, sys.executable, "-c", TLS), "sent"))]
    for host in (0, 1):
        output = _run(hosts, host, sys.executable, "-c", PUSH)
        found += [float(_after(output, "pushed")), float(_after(output, "pulled"))]
        for name in ("copy", "again"):
            _run(hosts, host, "rm", "-r", name)
    return found


def _run(hosts: ClusterHosts, host: int, *command: str) -> str:
    done = hosts.run(host, *command)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}")
    return done.stdout


def _after(output: str, text: str) -> str:
    return next(line.split(text)[1].split()[0] for line in output.splitlines() if text in line)
