"""Measures the throughput of parameter servers by bytes, requests and CPUs, alone and together."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import IO, Any

import psutil

from dike.own_distribution import free_ports

TITLE = "What a parameter server's CPUs do"
WORKERS = 2
SECONDS = 1.5
ROUNDS = 3
MB = 1e6


@dataclass(frozen=True)
class Setup:
    """Parameter servers on the machine's cores.

    Attributes:
        cpus: the cores of each ps.
        variables: number of variables on all ps.
        megabytes: size of all variables.
        optimizer: `sgd` or `adam`.
    """

    cpus: tuple[str, ...]
    variables: int
    megabytes: float
    optimizer: str = "sgd"


ONE, BOTH = "0", "0,1"
BYTES, REQUESTS, ALL = Setup((ONE,), 20, 50), Setup((ONE,), 200, 1), Setup((ONE,), 200, 50)
SETUPS = {
    "1 ps on 1 CPU": BYTES,
    "2 ps on the same CPU": Setup((ONE, ONE), 20, 50),
    "1 ps on 2 CPUs": Setup((BOTH,), 20, 50),
    "2 ps on a CPU each": Setup(("0", "1"), 20, 50),
    "1 ps on 1 CPU, Adam": Setup((ONE,), 20, 50, "adam"),
    "1 ps on 1 CPU, small variables": REQUESTS,
    "1 ps on 1 CPU, many variables": ALL,
}


def measure() -> Iterator[str]:
    yield f"TensorFlow servers over loopback, {WORKERS} asynchronous workers on core 1, which is the second core of"
    yield "the ps where they have two; each pulls every variable and pushes a full gradient in every step. Median of"
    yield f"{ROUNDS} rounds, all set-ups in turn in each. *CPU*: milliseconds that all ps take for one worker's"
    yield "step. *Wall*: the time of a step, workers included: compare set-ups with as many CPUs."
    yield ""
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in SETUPS}
    # TensorFlow starts slowly: every set-up is started once, and idles outside of its turn.
    with contextlib.ExitStack() as stack:
        running = {name: stack.enter_context(_started(setup)) for name, setup in SETUPS.items()}
        for _ in range(ROUNDS):
            for name, job in running.items():
                seen[name].append(job.milliseconds())
    median = {name: [statistics.median(values) for values in zip(*rows, strict=True)] for name, rows in seen.items()}
    yield "| set-up | variables | MB | CPU, ms a step | least, most | wall, ms a step |"
    yield "|---|---|---|---|---|---|"
    for name, setup in SETUPS.items():
        cpu, wall = median[name]
        each = [row[0] for row in seen[name]]
        yield (
            f"| {name} | {setup.variables} | {setup.megabytes:g} | {cpu:.1f} | {min(each):.1f}, {max(each):.1f} "
            f"| {wall:.1f} |"
        )
    ms_a_variable = (median["1 ps on 1 CPU, small variables"][0] - REQUESTS.megabytes) / REQUESTS.variables
    ms_a_mb = (median["1 ps on 1 CPU"][0] - ms_a_variable * BYTES.variables) / BYTES.megabytes
    yield ""
    yield f"By bytes {ms_a_mb:.2f} ms of CPU a MB, by requests {ms_a_variable:.3f} ms a variable; predicted for 200"
    yield (
        f"variables of 50 MB, not fitted: {ms_a_mb * 50 + ms_a_variable * 200:.1f} ms, measured "
        f"{median['1 ps on 1 CPU, many variables'][0]:.1f} ms."
    )
    for first, second in (("1 ps on 1 CPU", "2 ps on the same CPU"), ("1 ps on 2 CPUs", "2 ps on a CPU each")):
        ratios = [there[0] / here[0] for here, there in zip(seen[first], seen[second], strict=True)]
        walls = [there[1] / here[1] for here, there in zip(seen[first], seen[second], strict=True)]
        yield f"{second} against {first}: CPU x {_range(ratios)}, wall x {_range(walls)}."
    yield "Servers that share the work take as much CPU time as one that does all of it. So the planner gives each ps"
    yield "its CPUs and counts these; wall times, workers included, scatter too much to distinguish two ps from one"
    yield "with two CPUs."


def _range(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


@dataclass(frozen=True)
class _Job:
    servers: tuple[subprocess.Popen[str], ...]
    workers: tuple[subprocess.Popen[str], ...]

    def milliseconds(self) -> tuple[float, float]:
        """CPU time of all servers, and wall time, per worker step."""
        before, started = _cpu_s(self.servers), time.monotonic()
        for worker in self.workers:
            _pipe(worker.stdin).write(f"{SECONDS}\n")
            _pipe(worker.stdin).flush()
        steps = sum(int(_receive(worker)) for worker in self.workers)
        return 1000 * (_cpu_s(self.servers) - before) / steps, 1000 * (time.monotonic() - started) / steps


@contextlib.contextmanager
def _started(setup: Setup) -> Iterator[_Job]:
    """Starts the processes and waits for every worker's first step."""
    ports = free_ports(len(setup.cpus) + WORKERS)
    spec = json.dumps({**asdict(setup), "ports": ports})
    servers = tuple(_start(cpus, "ps", index, spec) for index, cpus in enumerate(setup.cpus))
    workers = tuple(_start("1", "worker", index, spec) for index in range(WORKERS))
    try:
        for worker in workers:
            assert _receive(worker) == "ready"
        yield _Job(servers, workers)
    finally:
        for process in (*servers, *workers):
            process.kill()
            process.wait()


def _start(cpus: str, role: str, index: int, spec: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.ps_update", role, str(index), cpus, spec]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def _receive(process: subprocess.Popen[str]) -> str:
    line = _pipe(process.stdout).readline().strip()
    assert line, f"{process.args!r} ended"
    return line


def _cpu_s(processes: Sequence[subprocess.Popen[str]]) -> float:
    return sum(sum(psutil.Process(process.pid).cpu_times()[:2]) for process in processes)


def main() -> None:
    """A server or a worker: `python -m benchmarks.ps_update ROLE INDEX CPUS SPEC`."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import tensorflow.compat.v1 as tf

    tf.disable_v2_behavior()
    role, index, spec = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[4])
    # After the imports, which may use all cores.
    os.sched_setaffinity(0, [int(cpu) for cpu in sys.argv[3].split(",")])
    addresses = [f"127.0.0.1:{port}" for port in spec["ports"]]
    count = len(spec["cpus"])
    cluster = tf.train.ClusterSpec({"ps": addresses[:count], "worker": addresses[count:]})
    config = tf.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=2)
    if role == "ps":
        tf.train.Server(cluster, job_name="ps", task_index=index).join()
    config.device_filters.extend(["/job:ps", f"/job:worker/task:{index}"])
    server = tf.train.Server(cluster, job_name="worker", task_index=index, config=config)
    with tf.Session(server.target, config=config) as session:
        step = _step(tf, spec, index, count)
        if index == 0:
            session.run(tf.global_variables_initializer())
        while len(session.run(tf.report_uninitialized_variables())):
            time.sleep(0.2)
        session.run(step)
        print("ready", flush=True)
        for line in sys.stdin:
            until = time.monotonic() + float(line)
            steps = 0
            while time.monotonic() < until:
                session.run(step)
                steps += 1
            print(steps, flush=True)


def _step(tf: Any, spec: dict[str, Any], index: int, servers: int) -> Any:
    """Pulls every variable and pushes a full gradient for each."""
    elements = int(spec["megabytes"] * MB / 4 / spec["variables"])
    pairs = []
    for number in range(spec["variables"]):
        with tf.device(f"/job:ps/task:{number % servers}"):
            variable = tf.get_variable(f"v{number}", [elements], initializer=tf.zeros_initializer(), use_resource=True)
            stored = variable.read_value()
        with tf.device(f"/job:worker/task:{index}"):
            pairs.append((tf.negative(tf.identity(stored)), variable))
    optimizer = tf.train.AdamOptimizer(1e-3) if spec["optimizer"] == "adam" else tf.train.GradientDescentOptimizer(1e-3)
    return optimizer.apply_gradients(pairs)


if __name__ == "__main__":
    main()
