"""Runs the processes of one training job by hand: what the executors do, without Mesos."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from dike.profile import Api
from dike.roles import server
from dike.task import VARIABLE, Role, TaskSpec
from framework.embedded.ports import reserve_blocks
from tests.waiting import is_alive, wait_until
from tests.warm import WarmTensorFlow

SCRIPTS = Path(__file__).parent / "scripts"
DEADLINE_S = 480.0
PATIENT = {"DIKE_SAVE_TIMEOUT_S": "120"}
"""For a chief's environment: as long as a loaded machine takes to save. What a test finds must not depend on it."""
REPORT_FD = 200  # higher than any that the tests before have open


@dataclass
class Process:
    """One process of the job and the files it writes to."""

    task: TaskSpec
    process: psutil.Process
    output: Path
    report: Path

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    @property
    def messages(self) -> list[dict[str, Any]]:
        # The last line may still be being written.
        whole = self.report.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def reported(self, kind: str) -> list[dict[str, Any]]:
        return [message for message in self.messages if message["type"] == kind]

    @property
    def result(self) -> dict[str, Any]:
        """What the script printed after `RESULT`."""
        lines = [line for line in self.text.splitlines() if line.startswith("RESULT ")]
        assert lines, f"{self.task.name} printed no result:\n{self.text[-4000:]}"
        return dict(json.loads(lines[-1].removeprefix("RESULT ")))

    @property
    def is_running(self) -> bool:
        return is_alive(self.process)

    def wait(self) -> int | None:
        """Its exit code."""
        try:
            code = self.process.wait(DEADLINE_S)
            return _forked_code(self.task, self.process.pid) if code is None else code
        except (subprocess.TimeoutExpired, psutil.TimeoutExpired):
            raise AssertionError(f"{self.task.name} does not end:\n{self.text[-4000:]}") from None


@dataclass
class RolesStage:
    """A job that runs until the `with` block ends; its remaining processes are killed then."""

    api: Api
    script: Path
    folder: Path
    ps: int = 1
    workers: int = 2
    arguments: tuple[str, ...] = ()
    variables: Mapping[str, int] = field(default_factory=dict)
    checkpoint_interval_s: float = 60.0
    fingerprint: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    attempt: int = 0
    replicas: int | None = None
    alone: bool = False
    """Whether only the chief is started; the others have addresses."""
    forked: bool = True
    """Whether the script runs in a fork of a process that has imported TensorFlow, as a slot's zygote has when the
    script's imports allow it (`framework.project.script_facts`); otherwise in a Python of its own."""
    processes: dict[str, Process] = field(default_factory=dict)

    def __enter__(self) -> RolesStage:
        counts = {Role.PS: self.ps, Role.WORKER: self.workers} if self.ps else {Role.WORKER: self.workers}
        has_separate_chief = self.api.has_separate_chief and self.ps > 0
        if has_separate_chief:
            counts[Role.CHIEF] = 1
        # The ports stay reserved before a process listens on them and while it is down.
        [self._block] = reserve_blocks(1)
        addresses = (f"127.0.0.1:{port}" for port in self._block)
        self._cluster = {str(role): [next(addresses) for _ in range(count)] for role, count in counts.items()}
        for role, count in counts.items():
            for index in range(count):
                is_chief = index == 0 and role is (Role.CHIEF if has_separate_chief else Role.WORKER)
                if is_chief or not self.alone:
                    self.start(role, index)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.process.kill()
            process.process.wait(DEADLINE_S)
        self._block.claim.close()
        if kind is not None:
            for process in self.processes.values():
                print(f"--- {process.task.name}\n{process.text[-3000:]}")

    def start(self, role: Role, index: int, attempt: int | None = None) -> Process:
        """Starts a process, in the place of one of the same role and index if there is one."""
        attempt = self.attempt if attempt is None else attempt
        self.folder.mkdir(parents=True, exist_ok=True)
        task = TaskSpec(
            job_id="test",
            role=role,
            index=index,
            cluster=self._cluster,
            api=self.api,
            variables=dict(self.variables),
            checkpoint_dir=str(self.folder / "checkpoints"),
            checkpoint_interval_s=self.checkpoint_interval_s,
            attempt=attempt,
            fingerprint=self.fingerprint,
            replicas=self.replicas,
        )
        output = self.folder / f"{role}{index}-{attempt}.log"
        report = self.folder / f"{role}{index}-{attempt}.jsonl"
        task = dataclasses.replace(task, report_fd=REPORT_FD)
        environment = {
            "CUDA_VISIBLE_DEVICES": "",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "TF_NUM_INTRAOP_THREADS": "1",
            **self.environment,
            VARIABLE: task.dumps(),
        }
        argv = [str(self.script), *self.arguments]
        start = functools.partial(_fork, _preloaded(task)) if self.forked or server.is_server(task) else _start_script
        self.processes[task.name] = Process(task, start(argv, environment, output, report), output, report)
        return self.processes[task.name]

    @property
    def chief(self) -> Process:
        return self.processes["chief:0" if self.api.has_separate_chief else "worker:0"]

    def worker(self, index: int) -> Process:
        return self.processes[f"worker:{index}"]

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> int | None:
        self.processes[name].process.send_signal(number)
        return self.processes[name].wait()


def _start_script(argv: list[str], environment: Mapping[str, str], output: Path, report: Path) -> psutil.Process:
    """A process that runs the script, started as the executor does."""
    with output.open("wb") as log, report.open("wb") as lines:
        os.dup2(lines.fileno(), REPORT_FD)
        try:
            return psutil.Popen(
                [sys.executable, "-P", "-m", "dike.launch", *argv],
                env={**os.environ, **environment},
                cwd=Path(argv[0]).parent,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[REPORT_FD],
            )
        finally:
            os.close(REPORT_FD)


_started: list[subprocess.Popen[str]] = []


@functools.cache
def _servers(keras: str) -> subprocess.Popen[str]:
    """See servers.py.

    Args:
        keras: which is preloaded.
    """
    process = WarmTensorFlow(
        [sys.executable, "-P", str(Path(__file__).parent / "servers.py"), keras],
        env={
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "GRPC_FAIL_FAST": "use_caller",
            **({"TF_USE_LEGACY_KERAS": "1"} if keras == "tf_keras" else {}),
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    _started.append(process)
    return process


def _ask(keras: str, order: Mapping[str, Any]) -> Any:
    """Asks the process that servers.py is."""
    process = _servers(keras)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(order) + "\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def _forked_code(task: TaskSpec, pid: int) -> int | None:
    deadline_s = time.monotonic() + DEADLINE_S
    while (code := _ask(_preloaded(task), {"ended": pid})) is None and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return None if code is None else int(code)


def _preloaded(task: TaskSpec) -> str:
    return "tf_keras" if task.api is Api.TF_KERAS else "keras"


def _fork(keras: str, argv: list[str], environment: Mapping[str, str], output: Path, report: Path) -> psutil.Process:
    for file in (output, report):
        file.write_bytes(b"")  # so that readers need not wait for the fork
    files = {"folder": str(Path(argv[0]).parent), "output": str(output), "report": str(report)}
    return psutil.Process(_ask(keras, {"argv": argv, "environment": environment, "report_fd": REPORT_FD, **files}))


def stop_servers() -> None:
    """Called once, at the end of the tests."""
    for process in _started:
        process.kill()
        process.wait()


def wait_for(condition: Callable[[], object], process: Process) -> None:
    """Waits for a condition while `process` lives."""
    wait_until(
        condition,
        f"what {process.task.name} has to do",
        said=lambda: process.text[-4000:],
        lost=lambda: not process.is_running,
        deadline_s=DEADLINE_S,
    )


def step_of(process: Process) -> int:
    """The last step that the process reported; 0 before the first."""
    return max((int(message["step"]) for message in process.reported("progress")), default=0)
