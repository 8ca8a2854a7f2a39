"""TensorFlow servers on shaped hosts, and the measurement of their training steps."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.measured_task import Training
from benchmarks.shaped_hosts import HostsError, ShapedHosts

FIRST_PORT = 2222
START_TIMEOUT_S = 240.0
READY_TIMEOUT_S = 60.0
END_TIMEOUT_S = 120.0
MAX_DURATION_S = 60.0
WARM_UP_STEPS = 1
"""Steps until the links' TCP connections reach their speed."""
ROOT = Path(__file__).parent.parent


class Fleet:
    """A ps server and several worker servers on every host; a context manager that stops them on exit.

    The trained model, the tasks used and the hosts' rates can change while the servers run.

    Args:
        worker_slots: maximum number of workers of each host.

    Raises:
        HostsError: if a server does not start.
    """

    def __init__(self, hosts: ShapedHosts, worker_slots: Sequence[int]) -> None:
        self._hosts = hosts
        self._slots = [(host, slot) for host, slots in enumerate(worker_slots) for slot in range(1 + slots)]
        self._folder = tempfile.TemporaryDirectory(prefix="dike-measured-")
        self._tasks: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Fleet:
        addresses = ",".join(f"{self._hosts.address(host)}:{FIRST_PORT + slot}" for host, slot in self._slots)
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
        try:
            for index, (host, _) in enumerate(self._slots):
                command = [sys.executable, "-m", "benchmarks.measured_task", addresses, str(index)]
                with self._log(index).open("wb") as log:
                    self._tasks.append(self._hosts.start(host, command, cwd=ROOT, env=environment, stderr=log))
            deadline = time.monotonic() + START_TIMEOUT_S
            for index in range(len(self._tasks)):
                self._receive(index, deadline)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def round_s(self, training: Training, seconds: float) -> float:
        """Trains; returns the mean seconds in which every worker makes one step, without each worker's first.

        Args:
            training: what to train.
            seconds: duration; doubled while a worker makes less than two steps, up to `MAX_DURATION_S`.

        Raises:
            HostsError: if a server fails, or a worker is too slow to measure.
        """
        while seconds <= MAX_DURATION_S:
            times = self._train(training, seconds)
            if all(len(each) > WARM_UP_STEPS + 1 for each in times):
                rates = [(len(each) - WARM_UP_STEPS - 1) / (each[-1] - each[WARM_UP_STEPS]) for each in times]
                return len(rates) / sum(rates)
            seconds *= 2
        raise HostsError(f"A worker makes no two steps in {seconds / 2:.0f} s; measure with faster links.")

    def _train(self, training: Training, seconds: float) -> list[list[float]]:
        """Returns the start and end times of each worker's steps; in synchronous training one list for all."""
        masters = training.workers[:1] if training.synchronous else training.workers
        for index in masters:
            self._send(index, training.dumps())
            # In sequence: the first worker initializes the variables.
            self._receive(index, time.monotonic() + READY_TIMEOUT_S)
        until = time.monotonic() + seconds
        for index in masters:
            self._send(index, repr(until))
        # Later steps ran after other workers had stopped.
        return [[at for at in self._receive(index, until + END_TIMEOUT_S) if at <= until] for index in masters]

    def ps_task(self, host: int) -> int:
        return self._slots.index((host, 0))

    def worker_task(self, host: int, worker: int) -> int:
        """Index of the host's server for worker number `worker`, from 0."""
        return self._slots.index((host, 1 + worker))

    def _send(self, index: int, line: str) -> None:
        stdin = self._tasks[index].stdin
        assert stdin is not None
        stdin.write(line.encode() + b"\n")

    def _receive(self, index: int, deadline: float) -> Any:
        """Reads a task's next line, as JSON."""
        stdout = self._tasks[index].stdout
        assert stdout is not None
        ready, _, _ = select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))
        line = stdout.readline() if ready else b""
        if not line:
            what = "ended" if ready else "did not answer in time"
            log = self._log(index).read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise HostsError(f"TensorFlow task {index} {what}: {log[-1] if log else 'no message'}.")
        return json.loads(line)

    def _log(self, index: int) -> Path:
        return Path(self._folder.name) / f"task-{index}.log"

    def _end(self) -> None:
        for task in self._tasks:
            task.kill()
        for task in self._tasks:
            task.communicate()
        self._folder.cleanup()
