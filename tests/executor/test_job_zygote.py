"""Processes of a job that trains with TensorFlow, forked from a zygote that has imported it, attempt after attempt."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dike.profile import Api
from dike.task import Role, TaskSpec
from executor.attempt import AttemptProcess
from executor.channel import TaskChannel
from executor.elastic_messages import decode_job_message
from executor.environment import process_environment
from executor.limits import ControlGroups
from executor.messages import LAUNCHER, LaunchOrder, Report
from executor.monitor import Gpus, RunMonitor
from executor.process import wait_readable
from executor.streams import OutputCopier
from executor.zygote import PROGRAM, Zygote
from framework.embedded.ports import reserve_blocks
from tests.executor.polled_zygote import poll_until
from tests.executor.slot_stage import HERE

pytestmark = pytest.mark.tensorflow

DEADLINE_S = 120.0
PR_SET_CHILD_SUBREAPER = 36


class FakeDriver:
    """Stands where Mesos' driver would."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def sendStatusUpdate(self, status: dict[str, Any]) -> None:  # noqa: N802
        raise AssertionError(status)

    def processStarted(self, pid: int) -> None:  # noqa: N802
        pass

    def processEnded(self, pid: int) -> None:  # noqa: N802
        pass

    def sendFrameworkMessage(self, data: str) -> None:  # noqa: N802
        message = decode_job_message(data)
        assert isinstance(message, Report)
        self.lines.append(message.content)

    def steps(self, kind: str) -> list[int]:
        return [line["step"] for line in self.lines if line["type"] == kind]


class ForksStage:
    """ForksStage the processes of a job, one zygote for all of them; this process adopts them, as executors do."""

    def __init__(self, folder: Path) -> None:
        order = LaunchOrder(TaskSpec("", Role.PS, 0, {}, Api.GRAPH), "", "", gpu_devices=(), elastic=True)
        self.folder = folder
        self.zygote = Zygote(
            ("tensorflow",), process_environment(order.setup), folder / "zygote.out", (*PROGRAM, LAUNCHER)
        )
        self.living: list[AttemptProcess] = []

    def start(self, task: TaskSpec, reports: FakeDriver) -> AttemptProcess:
        channel = TaskChannel(reports, task.name, self.folder)
        attempt = AttemptProcess(task, OutputCopier(lambda *_: None), channel, RunMonitor(Gpus(())))
        poll_until(self.zygote, lambda: self.zygote.ready, "the zygote")
        order = LaunchOrder(task, "", "session_script.py")
        self.zygote.request_fork(*attempt.make_fork_request(order, HERE, ControlGroups(order.limits)))
        pid = poll_until(self.zygote, self.zygote.take_answer, "its answer")
        assert isinstance(pid, int), pid
        attempt.adopt(pid)
        self.living.append(attempt)
        return attempt

    def stop(self, attempt: AttemptProcess) -> int | None:
        assert attempt.process is not None
        attempt.process.terminate(DEADLINE_S)
        assert wait_readable(attempt.process.watched_fds, DEADLINE_S)
        attempt.process.poll()
        attempt.drain()
        self.living.remove(attempt)
        return attempt.process.exit_code


@pytest.fixture
def forks(tmp_path: Path) -> Iterator[ForksStage]:
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    forks = ForksStage(tmp_path)
    yield forks
    for attempt in list(forks.living):
        forks.stop(attempt)
    forks.zygote.close()
    libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@pytest.fixture
def addresses() -> Iterator[Iterator[str]]:
    """Addresses that stay reserved until a server listens there."""
    [block] = reserve_blocks(1)
    yield (f"127.0.0.1:{port}" for port in block)
    block.claim.close()


def test_a_job_resumes_with_other_numbers_of_processes(forks: ForksStage, addresses: Iterator[str]) -> None:
    """Its chief is forked before the parameter servers, and waits for them."""
    last = 0
    for attempt, servers in enumerate((1, 2)):
        ps, workers = [next(addresses) for _ in range(servers)], [next(addresses)]
        task = TaskSpec(
            job_id="job",
            role=Role.WORKER,
            index=0,
            cluster={"ps": ps, "worker": workers},
            api=Api.GRAPH,
            variables={"w0": 0, "w1": servers - 1},
            checkpoint_dir=str(forks.folder / "checkpoints"),
            attempt=attempt,
        )
        reports = FakeDriver()
        chief = forks.start(task, reports)
        started = [FakeDriver() for _ in ps]
        others = [
            forks.start(TaskSpec(**{**vars(task), "role": Role.PS, "index": index}), its)
            for index, its in enumerate(started)
        ]
        poll_until(forks.zygote, lambda reports=reports: reports.steps("progress"), "its progress")
        # A server serves before it says so.
        poll_until(forks.zygote, lambda started=started: all(its.lines for its in started), "the servers' words")
        assert all(its.lines == [{"type": "started"}] for its in started)
        assert reports.steps("progress")[0] >= last
        assert forks.stop(chief) == 143
        assert [forks.stop(other) for other in others] == [-15] * servers
        (last,) = reports.steps("checkpoint")[-1:]
        assert last >= reports.steps("progress")[-1]
        (placement,) = [line["variables"] for line in reports.lines if line["type"] == "placement"]
        assert f"/task:{servers - 1}" in placement["w1"]
    assert os.listdir(forks.folder / "checkpoints")
