"""A slot for tests: the real zygote, asked by the executor's own client, and what its trials report."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dike.trial import spec as specs
from dike.trial.spec import TrialSpec
from executor.process import wait_readable
from executor.slot_order import LAUNCHER
from executor.zygote import PROGRAM, ForkRequest, Zygote
from tests.executor.polled_zygote import poll_until

DEADLINE_S = 180.0
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37

Report = dict[str, Any]


def trial(folder: Path, **changes: Any) -> TrialSpec:
    """A trial whose checkpoints go into `folder`."""
    values = {"search": "test", "number": 0, "run": 0, "parameters": {}, "folder": str(folder)}
    return TrialSpec(**{**values, "report_fd": 3, "control_fd": 4, **changes})


@dataclass
class Run:
    """A trial's process.

    Attributes:
        pid: its id.
        log: its output.
        reports: its reports.
        code: how it ended; minus the signal's number if one ended it.
    """

    pid: int
    log: Path
    control: int
    reader: int
    reports: list[Report] = field(default_factory=list)
    code: int | None = None

    @property
    def output(self) -> str:
        return self.log.read_text()

    def of(self, kind: str) -> list[Report]:
        """Its reports of one type."""
        return [report for report in self.reports if report["type"] == kind]

    def read(self, until: Callable[[Report], object] = lambda report: False) -> None:
        """Reads reports up to the first that is `until`, or to the end of the process."""
        rest = b""
        end_s = time.monotonic() + DEADLINE_S
        while wait_readable([self.reader], max(0.0, end_s - time.monotonic())):
            data = os.read(self.reader, 1 << 16)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            new = [json.loads(line) for line in lines]
            self.reports += new
            if any(until(report) for report in new):
                return
        else:
            os.kill(self.pid, signal.SIGKILL)
            raise AssertionError(f"the trial does not end: {self.output}")
        self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self.reader)
        os.close(self.control)

    def suspend(self) -> None:
        """Asks it to give its slot back."""
        os.write(self.control, b"suspend\n")


class SlotStage:
    """Starts trials, from a zygote or cold.

    Args:
        folder: for its files.
        zygote: forks trials; None to start all of them cold.
    """

    def __init__(self, folder: Path, zygote: Zygote | None) -> None:
        self.folder = folder
        self.zygote = zygote
        self._count = 0

    def start(
        self,
        script: Path,
        spec: TrialSpec,
        arguments: Sequence[str] = (),
        environment: Mapping[str, Any] | None = None,
        folder: Path | None = None,
    ) -> Run:
        """Starts a trial."""
        self._count += 1
        log = self.folder / f"run-{self._count}.out"
        reader, report_writer = os.pipe()
        control_reader, control = os.pipe()
        try:
            with log.open("wb") as output:
                descriptors = (output.fileno(), output.fileno(), report_writer, control_reader)
                if self.zygote is None:
                    pid = self._cold(script, arguments, spec, descriptors)
                else:
                    changes = {**(environment or {}), specs.VARIABLE: spec.dumps()}
                    request = ForkRequest(script, arguments, folder or self.folder, changes)
                    pid = self._fork(self.zygote, request, descriptors)
        finally:
            os.close(report_writer)
            os.close(control_reader)
        return Run(pid, log, control, reader)

    def run(self, script: Path, spec: TrialSpec, arguments: Sequence[str] = (), **others: Any) -> Run:
        """Runs a trial to its end."""
        run = self.start(script, spec, arguments, **others)
        run.read()
        return run

    def write(self, name: str, source: str) -> Path:
        """Writes a script."""
        path = self.folder / name
        path.write_text(source)
        return path

    def _cold(self, script: Path, arguments: Sequence[str], spec: TrialSpec, descriptors: Sequence[int]) -> int:
        report, control = descriptors[2:]
        spec = dataclasses.replace(spec, report_fd=report, control_fd=control)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "dike.trial.launch", str(script), *arguments],
            env={**os.environ, specs.VARIABLE: spec.dumps()},
            cwd=self.folder,
            stdout=descriptors[0],
            stderr=descriptors[1],
            pass_fds=(report, control),
        )
        process.returncode = 0  # its end is ours to wait for
        return process.pid

    def _fork(self, zygote: Zygote, request: ForkRequest, descriptors: Sequence[int]) -> int:
        zygote.request_fork(request, descriptors)
        answer = poll_until(zygote, zygote.take_answer, "a process")
        assert isinstance(answer, int), answer
        return answer


@contextmanager
def slot(folder: Path, preload: Sequence[str] = ()) -> Iterator[SlotStage]:
    """A slot whose zygote has preloaded some modules; this process adopts the trials, as executors do."""
    libc, before = ctypes.CDLL(None), ctypes.c_int()
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    environment = {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "OMP_NUM_THREADS": "1",
        "TF_NUM_INTRAOP_THREADS": "1",
        # Trials are never to be handed over to a cluster.
        "DIKE_MASTER": "127.0.0.1:1",
    }
    zygote = Zygote(preload, environment, folder / "zygote.out", (*PROGRAM, LAUNCHER))
    try:
        poll_until(zygote, lambda: zygote.ready, "a zygote")
        yield SlotStage(folder, zygote)
    finally:
        zygote.close()
        libc.prctl(_PR_SET_CHILD_SUBREAPER, before, 0, 0, 0)
