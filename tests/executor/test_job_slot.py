"""A slot of a training job with real processes: one attempt at a time, each stopped before the next begins."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from dike.process import EXIT_CODE_PEER_LOST
from dike.profile import Api
from dike.task import Role, TaskSpec
from executor.elastic_messages import ElasticStatus, ProcessEnd, WantedProcess, decode_job_message
from executor.job_slot import PEER_LOST
from executor.messages import LAUNCHER, LaunchOrder, LogChunk, Outcome, Report, WantedOutput, decode_last_output
from executor.zygote import PROGRAM
from framework.project import bundle
from tests.executor.slot_stage import FAKE_ZYGOTE, HERE, LIMITED, SlotStage, skip_without_groups, wait_gone

pytestmark = pytest.mark.integration

TOKEN = "t" * 32
# Of the process that runs the tests: others may run them, too.
CHECKPOINTS = Path(tempfile.gettempdir(), f"dike-test-elastic-{os.getpid()}")
TASK = TaskSpec("job", Role.WORKER, 0, {"ps": ["h:1"], "worker": ["h:2"]}, Api.GRAPH, checkpoint_dir=str(CHECKPOINTS))


def task(attempt: int) -> TaskSpec:
    return dataclasses.replace(TASK, attempt=attempt)


class ElasticSlotStage(SlotStage[ElasticStatus]):
    """A slot of an elastic job."""

    def __init__(
        self,
        folder: Path,
        order: LaunchOrder,
        zygote: Sequence[str] = FAKE_ZYGOTE,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.reports: list[dict[str, Any]] = []
        self.output = b""
        self._number = 0
        super().__init__(folder, order.encode(), zygote, environment)

    def take(self, message: str) -> None:
        said = decode_job_message(message)
        match said:
            case ElasticStatus():
                self.statuses.append(said)
            case Report():
                self.reports.append(said.content)
            case LogChunk(stream="stdout"):
                assert said.offset == len(self.output)
                self.output += said.data

    def wants(self, attempt: int | None, *, known: tuple[int, ...] = (), number: int | None = None) -> None:
        if number is None:
            self._number += 1
        wanted = None if attempt is None else task(attempt)
        self.say("wanted " + WantedProcess(number or self._number, wanted, known).encode())

    def runs(self, attempt: int) -> int:
        """The process of an attempt, after its last report."""
        self.wait_for(lambda: {"type": "started", "attempt": attempt} in self.reports, lambda: self.reports)
        self.status_when(lambda status: status.attempt == attempt)
        (process,) = self.children("pipe")
        return process.pid

    def end_of(self, attempt: int) -> ProcessEnd:
        status = self.status_when(lambda status: any(end.attempt == attempt for end in status.ends))
        return next(end for end in status.ends if end.attempt == attempt)

    def task_end(self) -> tuple[str, str, Outcome]:
        """State, message and outcome of the slot's task, whose process has ended."""
        last = self.ended()
        return last["state"], last["message"], Outcome.decode(last["data"])

    @property
    def states(self) -> list[str]:
        return [update["state"] for update in self.updates]


@pytest.fixture(autouse=True)
def no_checkpoints_yet() -> Iterator[None]:
    yield
    shutil.rmtree(CHECKPOINTS, ignore_errors=True)


@pytest.fixture(scope="module")
def bundle_url() -> Iterator[str]:
    with bundle.BundleServer({TOKEN: bundle.pack(HERE / "job_script.py")}.get, "127.0.0.1") as server:
        yield server.url(TOKEN)


Open = Callable[..., ElasticSlotStage]


@pytest.fixture
def opened(tmp_path: Path, bundle_url: str) -> Iterator[Open]:
    slots: list[ElasticSlotStage] = []

    def start(
        ways: str,
        *,
        zygote: Sequence[str] = FAKE_ZYGOTE,
        environment: Mapping[str, str] | None = None,
        **changes: Any,
    ) -> ElasticSlotStage:
        order = LaunchOrder(TASK, bundle_url, "job_script.py", (ways,), stream_logs=True)
        order = dataclasses.replace(order, gpu_devices=(), **{"elastic": True, **changes})
        slots.append(ElasticSlotStage(tmp_path, order, zygote, environment))
        return slots[-1]

    yield start
    for slot in slots:
        slot.close()


def test_one_attempt_makes_place_for_the_next(opened: Open) -> None:
    slot = opened("train")
    first = slot.runs(0)
    slot.wants(1)
    end = slot.end_of(0)
    assert end.outcome.exit_code == 143
    assert end.outcome.tail == "attempt 0 begins\nattempt 0 leaves\n"
    assert {"type": "checkpoint", "path": str(CHECKPOINTS), "step": 0} in slot.reports
    assert slot.runs(1) != first
    assert not psutil.pid_exists(first)
    slot.wants(None, known=(0,))
    second = slot.end_of(1)
    assert slot.statuses[-1].ends == (second,)
    # Both attempts write to the same streams.
    both = "".join(f"attempt {attempt} {does}\n" for attempt in (0, 1) for does in ("begins", "leaves"))
    assert slot.output.decode() == both == (slot.sandbox / "stdout").read_text()
    assert second.outcome.log_bytes == {"stdout": len(both), "stderr": 0}
    assert second.outcome.tail == "attempt 1 begins\nattempt 1 leaves\n"
    # Nothing is wanted: the slot stays, and says so again and again.
    told = len(slot.statuses)
    slot.status_when(lambda _: len(slot.statuses) > told)
    assert slot.states == ["TASK_RUNNING"]
    # There was never more than one.
    for status in slot.statuses:
        assert status.attempt not in [end.attempt for end in status.ends]


def test_output_is_sent_again_and_its_end_comes_with_the_end(opened: Open) -> None:
    slot = opened("train")
    slot.runs(0)
    begun = b"attempt 0 begins\n"
    slot.wait_for(lambda: slot.output == begun, lambda: slot.output)
    slot.output = begun[:8]
    slot.say("wanted " + WantedOutput({"stdout": 8}).encode())
    slot.wait_for(lambda: slot.output == begun, lambda: slot.output)
    slot.kill(5)
    [last] = decode_last_output(slot.ended()["data"])
    assert (last.stream, last.offset, last.data) == ("stdout", 0, slot.output)


def test_a_slot_that_stands_by_is_ready_before_it_has_a_process(opened: Open) -> None:
    slot = opened("finish", standby=True)
    assert slot.status_when(lambda status: status.ready).attempt is None
    slot.wait_for(lambda: "TASK_RUNNING" in slot.states, lambda: slot.states)
    assert slot.output == b""
    slot.wants(4)
    state, message, outcome = slot.task_end()
    assert (state, message, outcome.exit_code) == ("TASK_FINISHED", "exited with status 0", 0)
    assert outcome.tail == "attempt 4 begins\n"
    assert slot.states == ["TASK_RUNNING", "TASK_FINISHED"]


def test_late_and_repeated_messages_change_nothing(opened: Open) -> None:
    slot = opened("train")
    slot.runs(0)
    slot.wants(1, number=5)
    first = slot.runs(1)
    slot.wants(1, number=5)
    slot.wants(None, number=4)
    slot.wants(0, number=3, known=(0,))
    slot.wants(1, number=6)
    assert slot.status_when(lambda status: status.number == 6).attempt == 1
    assert slot.runs(1) == first
    slot.end_of(0)
    slot.wants(None, number=7, known=(0,))
    slot.end_of(1)
    # What has ended is not started again, not even by a message that is newer.
    slot.wants(1, number=8)
    slot.wants(0, number=9)
    assert slot.status_when(lambda status: status.number == 9).attempt is None
    slot.say("wanted nonsense")
    slot.wants(2, number=10)
    slot.runs(2)
    slot.wants(None, number=11)
    slot.end_of(2)
    assert slot.output.count(b"begins") == 3


@pytest.mark.parametrize("elastic", [True, False])
@pytest.mark.parametrize(
    ("way", "state", "message", "exit_code"),
    [
        ("finish", "TASK_FINISHED", "exited with status 0", 0),
        ("fail", "TASK_FAILED", "exited with status 3", 3),
        ("vanish", "TASK_FAILED", "ended by signal 9 (SIGKILL)", -9),
    ],
)
def test_a_process_that_ends_by_itself_ends_the_slot(
    opened: Open, way: str, state: str, message: str, exit_code: int, *, elastic: bool
) -> None:
    slot = opened(way, elastic=elastic)
    said, words, outcome = slot.task_end()
    assert (said, words, outcome.exit_code) == (state, message, exit_code)
    lines = {"attempt 0 begins", *(["about to fail"] if way == "fail" else [])}
    assert set(outcome.tail.splitlines()) == lines
    # Only an elastic job's slot sends statuses.
    assert [status.ends for status in slot.statuses[-1:]] == ([()] if elastic else [])


def test_a_process_that_fails_when_it_is_stopped_ends_the_slot(opened: Open) -> None:
    slot = opened("fail_when_stopped,train")
    slot.runs(0)
    slot.wants(1)
    state, message, outcome = slot.task_end()
    assert (state, message, outcome.exit_code) == ("TASK_FAILED", "exited with status 1", 1)
    assert b"attempt 1" not in slot.output


def test_how_a_stopped_worker_ends_does_not_matter(opened: Open) -> None:
    slot = opened("fail_when_stopped,train", task=dataclasses.replace(TASK, index=1))
    slot.runs(0)
    slot.wants(1)
    assert slot.end_of(0).outcome.exit_code == 1
    slot.runs(1)


@pytest.mark.parametrize("elastic", [True, False])
def test_a_task_whose_peer_has_ended_waits_until_it_is_killed(opened: Open, *, elastic: bool) -> None:
    slot = opened("lose_peer", elastic=elastic)
    slot.wait_for(lambda: b"attempt 0 begins" in slot.output, lambda: slot.output)
    if elastic:
        assert slot.end_of(0).outcome.exit_code == EXIT_CODE_PEER_LOST
        # It is wanted, and has ended: it is not started again.
        told = len(slot.statuses)
        slot.status_when(lambda _: len(slot.statuses) > told + 1)
    assert slot.states == ["TASK_RUNNING"]
    slot.kill(5)
    state, message, _ = slot.task_end()
    assert (state, message) == ("TASK_KILLED", "killed on request")
    assert slot.output.count(b"begins") == 1


def test_a_follower_that_ends_with_the_chief_makes_place_for_the_next_attempt(opened: Open) -> None:
    slot = opened("lose_peer,train", task=dataclasses.replace(TASK, index=1))
    assert slot.end_of(0).outcome.exit_code == EXIT_CODE_PEER_LOST
    # The order to stop comes after the end.
    slot.wants(None)
    assert slot.status_when(lambda status: status.number == 1).attempt is None
    slot.wants(1, known=(0,))
    slot.runs(1)
    assert slot.states == ["TASK_RUNNING"]


def test_a_task_whose_peer_has_ended_fails_if_it_is_not_killed(opened: Open) -> None:
    slot = opened("lose_peer", environment={"PEER_LOST_TIMEOUT_S": "0.5"})
    state, message, outcome = slot.task_end()
    assert (state, message) == ("TASK_FAILED", PEER_LOST)
    assert outcome.tail == "attempt 0 begins\n"


def test_servers_end_by_the_signal_and_the_stubborn_are_killed(opened: Open) -> None:
    slot = opened("serve,stubborn,train", environment={"STOP_GRACE_S": "0.2"})
    slot.runs(0)
    slot.wants(1)
    assert slot.end_of(0).outcome.exit_code == -15
    slot.runs(1)
    slot.wants(2, known=(0,))
    assert slot.end_of(1).outcome.exit_code == -9
    slot.runs(2)


def test_a_killed_slot_leaves_nothing_behind(opened: Open) -> None:
    slot = opened("litter")
    slot.wait_for(lambda: any(report["type"] == "left" for report in slot.reports), lambda: slot.reports)
    pid = slot.runs(0)
    (left,) = [report["pid"] for report in slot.reports if report["type"] == "left"]
    slot.kill(5)
    state, message, outcome = slot.task_end()
    assert (state, message, outcome.exit_code) == ("TASK_KILLED", "killed on request", -15)
    assert not any(map(psutil.pid_exists, (pid, left)))


def test_a_kill_shortens_the_time_that_a_stopped_process_has(opened: Open) -> None:
    slot = opened("stubborn", environment={"STOP_GRACE_S": "600"})
    slot.runs(0)
    slot.wants(None)
    slot.status_when(lambda status: status.number == 1)
    slot.kill(0.1)
    state, _, outcome = slot.task_end()
    assert (state, outcome.exit_code) == ("TASK_KILLED", -9)


def test_a_kill_before_anything_runs(opened: Open) -> None:
    slot = opened("train", standby=True)
    slot.status_when(lambda status: status.ready)
    slot.kill(5)
    state, _, outcome = slot.task_end()
    assert (state, outcome.exit_code, outcome.tail) == ("TASK_KILLED", None, "")


def test_its_process_dies_with_the_executor(opened: Open) -> None:
    slot = opened("train")
    pid = slot.runs(0)
    slot.process.kill()
    wait_gone(pid)


def test_the_death_of_the_zygote_is_nothing_to_a_running_process(opened: Open) -> None:
    slot = opened("train")
    pid = slot.runs(0)
    (own,) = slot.children("zygote")
    told = len(slot.statuses)
    own.kill()
    slot.status_when(lambda status: not status.ready, told)
    assert slot.status_when(lambda status: status.ready).attempt == 0
    assert psutil.pid_exists(pid)
    slot.wants(1)
    assert slot.end_of(0).outcome.exit_code == 143
    slot.runs(1)


def test_a_zygote_that_dies_over_a_request_is_replaced_and_asked_again(opened: Open, tmp_path: Path) -> None:
    (tmp_path / "frail").touch()
    slot = opened("train")
    slot.runs(0)
    assert not (tmp_path / "frail").exists()


def test_a_zygote_that_cannot_start_fails_the_slot_with_its_last_words(opened: Open, tmp_path: Path) -> None:
    (tmp_path / "mute").touch()
    state, message, outcome = opened("train").task_end()
    assert (state, outcome.exit_code) == ("TASK_FAILED", None)
    assert "no module named nothing" in message


def test_a_process_that_cannot_be_forked_fails_the_slot(opened: Open, tmp_path: Path) -> None:
    (tmp_path / "refuses").touch()
    state, message, _ = opened("train").task_end()
    assert (state, message) == ("TASK_FAILED", "the process cannot be started: no memory")


def test_a_bundle_that_cannot_be_fetched_fails_the_slot(opened: Open, bundle_url: str) -> None:
    state, message, _ = opened("train", bundle_url=bundle_url + "x").task_end()
    assert state == "TASK_FAILED"
    assert "HTTP 404" in message


def test_the_real_zygote_gives_each_attempt_what_is_its_own(opened: Open) -> None:
    slot = opened(
        "--flag",
        script="look_script.py",
        zygote=(*PROGRAM, LAUNCHER),
        preload=("numpy.random",),
        environment={"A": "b"},
    )
    seen = []
    for attempt in (0, 1):
        slot.wait_for(lambda: slot.output.count(b"\n") > len(seen), lambda: (slot.sandbox / "zygote.out").read_text())
        seen.append(json.loads(slot.output.splitlines()[-1]))
        slot.wants(attempt + 1)
        assert slot.end_of(attempt).outcome.exit_code == 143
    for attempt, its in enumerate(seen):
        assert its["task"]["attempt"] == attempt
        assert its["tf_config"]["task"] == {"type": "worker", "index": 0}
        assert (its["name"], its["argv"], its["a"]) == ("__main__", ["look_script.py", "--flag"], "b")
        assert its["checkpoints"] == str(CHECKPOINTS)
        assert its["visible_gpus"] == "-1"
        assert its["save_timeout_s"] == 60
    assert seen[0]["random"] != seen[1]["random"]


@pytest.mark.parametrize(
    ("changes", "script_imports", "expected"),
    [
        ({}, ("numpy", "tensorflow"), ("numpy", "tensorflow")),
        ({}, None, ("tensorflow",)),
        ({"api": Api.KERAS, "role": Role.CHIEF}, None, ("tensorflow", "keras")),
        ({"api": Api.TF_KERAS, "role": Role.CHIEF}, None, ()),
        # Servers run nothing of the script.
        ({"api": Api.TF_KERAS}, ("numpy",), ("tensorflow",)),
        ({"role": Role.PS}, ("numpy",), ("tensorflow",)),
    ],
)
def test_what_is_imported_ahead(
    changes: dict[str, Any], script_imports: tuple[str, ...] | None, expected: tuple[str, ...]
) -> None:
    order = LaunchOrder(dataclasses.replace(TASK, **changes), "", "train.py", preload=script_imports)
    assert order.setup.preload == expected


def test_messages_survive() -> None:
    wanted = WantedProcess(3, task(2), (0, 1))
    assert WantedProcess.decode(wanted.encode()) == wanted
    status = ElasticStatus("task", 3, True, 2, (ProcessEnd(1, Outcome(143, {"stdout": 3}, "tail", "/sandbox")),))
    assert decode_job_message(status.encode()) == status
    report = Report("task", {"type": "progress"})
    assert decode_job_message(report.encode()) == report
    order = LaunchOrder(TASK, "http://host", "train.py", elastic=True, standby=True, preload=("numpy",))
    assert LaunchOrder.decode(order.encode()) == order


@pytest.mark.parametrize("text", ['{"type": "elastic"}', '{"type": "elastic", "attempt": 1, "ends": 3}', "[]", "3"])
def test_a_malformed_status_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="message"):
        decode_job_message(base64.b64encode(text.encode()).decode())


@pytest.mark.parametrize("text", ['{"kind": "wanted"}', '{"kind": "wanted_process"}', "[]", "3", "not JSON"])
def test_a_malformed_wish_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"slot|JSON|Expecting"):
        WantedProcess.decode(base64.b64encode(text.encode()).decode())


def test_a_fork_bomb_ends_its_own_job(opened: Open) -> None:
    skip_without_groups()
    slot = opened("bomb", environment=LIMITED, elastic=False)
    state, message, _ = slot.task_end()
    assert state == "TASK_FAILED"
    assert message.startswith("it exceeded its limit of 40 processes and threads")
