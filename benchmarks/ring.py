"""Measures all-reduces by Dike's ring over TCP and by TensorFlow's over gRPC, and what they add to a small step."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dike.own_distribution import LOCALHOST, free_ports
from dike.profile import Api
from dike.roles.gang import Gang
from dike.task import Role, TaskSpec

TITLE = "All-reduce over rings"
DIKE, TENSORFLOW = "dike", "tensorflow"
WORLDS = (2, 3)
MEGABYTES = (0, 1, 10, 100)
ROUNDS = 5
MIN_ROUND_S = 0.5
STEP_VARIABLES = 20
STEP_ELEMENTS = 1000
STEP = "step"
CHAIN_LENGTH = 50
CHAIN = "chain"
MB = 1_000_000
FLOAT_BYTES = 4
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Measured:
    """Medians of one kind of exchange.

    Attributes:
        seconds: wall time of an exchange.
        cpu_s: CPU time of one worker for an exchange.
    """

    seconds: float
    cpu_s: float


def measure() -> Iterator[str]:
    yield "The workers are processes of one machine, connected over loopback. A flat tensor of float32 is summed by"
    yield "`dike.roles.gang`, and by TensorFlow's `all_reduce_v2` with the hint `ring`, over gRPC."
    yield f"Median of {ROUNDS} rounds. A worker of n sends 2 (n - 1) / n of the tensor and receives as much. *CPU*:"
    yield "of one worker. *MB sent / CPU s*: what a worker sends for each second of its CPU time, in which it also"
    yield f"receives and adds. 0 MB is a single number. *Chain*: one sum of {CHAIN_LENGTH} of a single number, which"
    yield f"follow each other in one graph. *Step*: a graph that flattens {STEP_VARIABLES} gradients of"
    yield f"{STEP_ELEMENTS} numbers, sums them and the metrics, and splits the sum. *TensorFlow's*: seconds and CPU"
    yield "seconds of TensorFlow's ring, relative to Dike's."
    yield ""
    yield "| workers | MB | ms | CPU, ms | MB sent / s | MB sent / CPU s | TensorFlow's | TensorFlow's CPU |"
    yield "|---|---|---|---|---|---|---|---|"
    found = {(world, kind): _run(world, kind) for world in WORLDS for kind in (DIKE, TENSORFLOW)}
    for world, name in itertools.product(WORLDS, (*map(str, MEGABYTES), CHAIN, STEP)):
        one, other = found[world, DIKE][name], found[world, TENSORFLOW][name]
        sent = 0.0 if name in (CHAIN, STEP) else 2 * (world - 1) / world * int(name)
        rates = (f"{sent / one.seconds:.0f}", f"{sent / one.cpu_s:.0f}") if sent else ("", "")
        ratios = (f"{other.seconds / one.seconds:.1f}", f"{other.cpu_s / one.cpu_s:.1f}")
        cells = (world, name, f"{one.seconds * 1e3:.2f}", f"{one.cpu_s * 1e3:.2f}", *rates, *ratios)
        yield f"| {' | '.join(map(str, cells))} |"
    yield ""
    for world in WORLDS:
        hops, empty, step = 2 * (world - 1), found[world, DIKE][CHAIN], found[world, DIKE][STEP]
        yield (
            f"{world} workers: each of the {hops} hops in the chain takes {empty.seconds / hops * 1e3:.2f} ms, "
            f"{empty.cpu_s / hops * 1e3:.2f} ms of CPU; a step takes {(step.seconds - 2 * empty.seconds) * 1e3:.2f} ms "
            f"more than two such sums, {(step.cpu_s - 2 * empty.cpu_s) * 1e3:.2f} ms of CPU."
        )
    yield ""
    yield "With more workers than cores, processes wait for a core. Hops and seconds include that; CPU times do not."


def _run(world: int, kind: str) -> dict[str, Measured]:
    """Starts the workers, and returns the slowest one's seconds with the mean CPU time of all."""
    ports = json.dumps(free_ports(world))
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.ring", kind, str(rank), ports],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        replies = [json.loads(worker.communicate(timeout=TIMEOUT_S)[0].splitlines()[-1]) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    return {
        name: Measured(max(reply[name][0] for reply in replies), statistics.fmean(reply[name][1] for reply in replies))
        for name in replies[0]
    }


def main() -> None:
    """A worker: `python -m benchmarks.ring dike|tensorflow RANK PORTS`."""
    kind, rank, ports = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    addresses = [f"{LOCALHOST}:{port}" for port in ports]
    import tensorflow as tf

    all_reduce = (_dikes if kind == DIKE else _tensorflows)(tf, rank, addresses)
    found = {}
    for megabytes in MEGABYTES:
        tensor = tf.ones([max(1, megabytes * MB // FLOAT_BYTES)])
        found[str(megabytes)] = _timed(lambda tensor=tensor: all_reduce(tensor), all_reduce, tf)  # type: ignore[misc]
    seconds, cpu_s = _timed(_chain(tf, all_reduce), all_reduce, tf)
    found[CHAIN] = (seconds / CHAIN_LENGTH, cpu_s / CHAIN_LENGTH)
    found[STEP] = _timed(_step(tf, all_reduce), all_reduce, tf)
    all_reduce(tf.ones([1]))
    print(json.dumps(found), flush=True)
    # TensorFlow's server has no way to stop, and no peer's end is to be noticed.
    os._exit(0)


def _dikes(tf: Any, rank: int, addresses: Sequence[str]) -> Callable[[Any], Any]:
    gang = Gang(TaskSpec("ring", Role.WORKER, rank, {Role.WORKER: list(addresses)}, Api.KERAS))
    return lambda tensor: gang.sum([tensor])[0]


def _tensorflows(tf: Any, rank: int, addresses: Sequence[str]) -> Callable[[Any], Any]:
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}})
    communication = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    # Made for its side effect: it starts the server and the collective runtime.
    tf.distribute.MultiWorkerMirroredStrategy(communication_options=communication)
    from tensorflow.python.ops import collective_ops

    keys = itertools.count(100)

    def key() -> Any:
        if tf.executing_eagerly():
            return tf.constant(next(keys))
        # A key must be new in every execution of a graph.
        graph = tf.compat.v1.get_default_graph()
        return graph.capture_call_time_value(lambda: tf.constant(next(keys)), tf.TensorSpec([], tf.int32))

    def all_reduce(tensor: Any) -> Any:
        with tf.device(f"/job:worker/replica:0/task:{rank}/device:CPU:0"):
            return collective_ops.all_reduce_v2(
                tensor,
                group_size=len(addresses),
                group_key=1,
                instance_key=key(),
                communication_hint="ring",
                timeout=60,
            )

    return all_reduce


def _chain(tf: Any, all_reduce: Callable[[Any], Any]) -> Callable[[], Any]:
    @tf.function
    def chain() -> Any:
        total = tf.ones([1])
        for _ in range(CHAIN_LENGTH):
            total = all_reduce(total) / 2
        return total

    return chain


def _step(tf: Any, all_reduce: Callable[[Any], Any]) -> Callable[[], Any]:
    variables = [tf.Variable(tf.ones([STEP_ELEMENTS])) for _ in range(STEP_VARIABLES)]

    @tf.function
    def step() -> Any:
        total = all_reduce(tf.concat([tf.reshape(variable, [-1]) for variable in variables], 0))
        metrics = all_reduce(tf.ones([2]))
        return [tf.reduce_sum(part) for part in tf.split(total, STEP_VARIABLES)], metrics

    return step


def _timed(exchange: Callable[[], Any], all_reduce: Callable[[Any], Any], tf: Any) -> tuple[float, float]:
    """Median seconds, and CPU seconds of this process, of an exchange; all workers make equally many."""
    exchange()
    started = time.perf_counter()
    exchange()
    # The workers agree on the number by a sum.
    wanted = MIN_ROUND_S / (time.perf_counter() - started)
    count = max(3, round(float(all_reduce(tf.constant([wanted], tf.float32))[0]) / 2))
    rows: list[tuple[float, float]] = []
    for _ in range(ROUNDS):
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(count):
            exchange()
        rows.append(((time.perf_counter() - wall) / count, (time.process_time() - cpu) / count))
    seconds, cpu_s = (statistics.median(values) for values in _columns(rows))
    return seconds, cpu_s


def _columns(rows: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [row[0] for row in rows], [row[1] for row in rows]


if __name__ == "__main__":
    main()
