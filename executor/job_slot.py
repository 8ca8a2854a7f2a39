"""The slot of a training job, which runs one process at a time, forked from the slot's zygote."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from dike import process
from dike.roles import server
from dike.task import TaskSpec
from executor import descendants
from executor.attempt import AttemptProcess
from executor.channel import Mailbox, TaskChannel, TaskEnd
from executor.elastic_messages import ElasticStatus, ProcessEnd, WantedProcess, decode_wanted
from executor.limits import ControlGroups
from executor.messages import ELASTIC_SAVE_S, LaunchOrder, Outcome, WantedOutput
from executor.mirror import Mirror
from executor.monitor import Gpus, RunMonitor
from executor.outputs import Outputs, Stamp, remote_copier
from executor.process import describe_exit, save_tails, wait_readable
from executor.streams import OutputCopier, OutputSender
from executor.zygote import Zygote
from executor.zygote_slot import (
    EXIT_POLL_INTERVAL_S,
    SetUpError,
    are_gpus_free,
    kill_all,
    kill_descendants_except,
    set_up,
)

logger = logging.getLogger(__name__)

PEER_LOST = "another worker of the job has ended, or cannot be reached"
PEER_LOST_TIMEOUT_S = 600.0
"""Maximum time for the framework to stop a task whose process ended because of another one."""
STATUS_INTERVAL_S = 1.0
"""Interval at which an unchanged status is resent: messages may get lost."""
STOP_GRACE_S = ELASTIC_SAVE_S + 5.0
"""Seconds between SIGTERM and SIGKILL when the job is resized."""


class JobSlot:
    """Runs the process of its order; if the job is elastic, that of the newest `WantedProcess`.

    A single thread waits for messages, processes and deadlines. The slot closes its zygote.
    """

    def __init__(self, channel: TaskChannel, order: LaunchOrder, zygote: Zygote) -> None:
        self._channel = channel
        self._order = order
        self._zygote = zygote
        self._folder = channel.sandbox / "bundle"
        self._gpus = Gpus(order.gpu_devices)
        self._groups = ControlGroups(order.limits)
        self._mailbox: Mailbox[WantedProcess | WantedOutput | float] = Mailbox()
        self._kill_grace_s: float | None = None
        self._running_reported = False
        self._bundle_files: dict[str, Stamp] = {}  # from the job's bundle
        self._peer_lost_s: float | None = None
        self._wanted = WantedProcess(0, None if order.standby else order.task)
        self._sender = OutputSender(channel, enabled=order.stream_logs)
        self._output = OutputCopier(self._sender.add)
        self._current: AttemptProcess | None = None
        self._ends: list[ProcessEnd] = []
        self._ended_attempts: set[int] = set()
        self._last_status: ElasticStatus | None = None
        self._last_status_s = 0.0

    # Called on any thread.

    def receive(self, data: str) -> None:
        """Enqueues a message of the framework."""
        try:
            self._mailbox.put(decode_wanted(data))
        except ValueError as error:
            logger.warning("message ignored: %s", error)

    def kill(self, grace_s: float | None = None) -> None:
        self._mailbox.put(float(self._order.kill_grace_s if grace_s is None else grace_s))

    def drain(self) -> None:
        """Has the process save its work and end, because the agent is leaving."""
        self.kill()

    # Called on the main thread.

    def run(self) -> None:
        end = self._run_to_end()
        self._channel.update(end.state, end.message, end.data)

    def _run_to_end(self) -> TaskEnd:
        try:
            self._bundle_files = set_up(
                "" if server.is_server(self._order.task) else self._order.bundle_url, self._folder
            )
        except SetUpError as error:
            self._zygote.close()
            return self._end("TASK_FAILED", str(error))
        try:
            while (end := self._advance()) is None:
                self._report_status()
                self._wait()
        finally:
            kill_all(self._zygote)
            self._groups.close()
        if self._order.elastic:
            self._channel.send(self._status().encode())
        return end

    def _wait(self) -> None:
        current = self._current
        watched = (self._mailbox.fileno(), *self._zygote.watched_fds, *(current.watched_fds if current else ()))
        wait_readable(watched, self._next_wakeup_s() - time.monotonic())
        for message in self._mailbox.take():
            if isinstance(message, float):
                self._kill_grace_s = message if self._kill_grace_s is None else min(message, self._kill_grace_s)
            else:
                self._apply_wanted(message)
        self._zygote.poll()
        if current is not None:
            current.poll()

    def _mirror_of(self, task: TaskSpec) -> Mirror | None:
        return Mirror.of(self._order.folder, task.checkpoint_dir, self._channel.sandbox)

    def _report_running(self, message: str) -> None:
        if not self._running_reported:
            self._running_reported = True
            self._channel.update("TASK_RUNNING", message)

    def _kill_leftovers(self) -> bool:
        """Kills what earlier processes of the slot have left; returns whether nothing is left. To be repeated."""
        return kill_descendants_except((self._zygote.pid,))

    def _next_wakeup_s(self) -> float:
        current = self._current
        if current is not None:
            if current.has_ended or (current.process is None and self._zygote.ready and not self._zygote.is_forking):
                return time.monotonic() + EXIT_POLL_INTERVAL_S
            if current.process is not None and current.process.deadline_s is not None:
                return min(self._last_status_s + STATUS_INTERVAL_S, current.process.deadline_s)
        return self._last_status_s + STATUS_INTERVAL_S

    def _apply_wanted(self, wanted: WantedProcess | WantedOutput) -> None:
        if isinstance(wanted, WantedOutput):
            self._sender.resend(wanted)
            return
        if wanted.number >= self._wanted.number:
            self._wanted = wanted
            self._ends = [end for end in self._ends if end.attempt not in wanted.acknowledged_ends]
        self._last_status = None  # every message is answered

    def _advance(self) -> TaskEnd | None:
        current = self._current
        if current is not None and current.has_ended:
            if not self._kill_leftovers() or not are_gpus_free(current):
                return None
            self._current = None
            assert current.process is not None
            self._channel.process_ended(current.process.pid)
            if (end := self._conclude(current)) is not None:
                return end
        elif current is not None and current.process is not None:
            if current.group is not None and current.group.exceeded_limit():
                current.process.terminate(0.0)
            self._enforce_wanted(current)
            return None
        elif current is not None:
            return self._start(current)
        return self._fill()

    def _fill(self) -> TaskEnd | None:
        if self._kill_grace_s is not None:
            return self._end("TASK_KILLED", "killed on request")
        if self._zygote.failure:
            return self._end("TASK_FAILED", self._zygote.failure)
        if self._zygote.ready and self._order.standby:
            self._report_running("ready")
        task = self._wanted.task
        if task is None or task.attempt in self._ended_attempts:
            is_late = self._peer_lost_s is not None and time.monotonic() - self._peer_lost_s > PEER_LOST_TIMEOUT_S
            return self._end("TASK_FAILED", PEER_LOST, process.EXIT_CODE_PEER_LOST) if task and is_late else None
        outputs, mirror = None, self._mirror_of(task)
        if task.is_plain or task.is_chief:
            if mirror is not None:
                try:
                    mirror.pull()
                except OSError as error:
                    return self._end("TASK_FAILED", f"the checkpoints could not be fetched: {error}")
            outputs = outputs_of(self._order, task, self._folder, mirror)
            outputs.restore(self._bundle_files)
            # What the other workers write does not count.
            outputs = outputs if task.is_chief else None
        self._peer_lost_s = None
        self._current = AttemptProcess(task, self._output, self._channel, RunMonitor(self._gpus), outputs, mirror)
        return self._start(self._current)

    def _start(self, current: AttemptProcess) -> TaskEnd | None:
        """Has the process forked once the zygote is ready and nothing is left of an earlier one."""
        answer = self._zygote.take_answer()
        if isinstance(answer, int):
            current.adopt(answer)
            self._report_running("running")
            self._enforce_wanted(current)
        elif answer is not None:
            return self._fail_start(current, f"the process cannot be started: {answer}")
        elif self._zygote.failure:
            return self._fail_start(current, self._zygote.failure)
        elif not self._is_wanted(current):
            if self._zygote.is_forking:
                if self._kill_grace_s is not None:
                    self._zygote.kill()
            # A zygote that died during the request may have forked the process.
            elif self._kill_leftovers():
                current.abandon()
                self._current = None
                return self._fill()
        elif self._zygote.ready and not self._zygote.is_forking and self._kill_leftovers():
            current.is_requested = True
            self._zygote.request_fork(*current.make_fork_request(self._order, self._folder, self._groups))
        return None

    def _fail_start(self, current: AttemptProcess, reason: str) -> TaskEnd:
        current.abandon()
        self._current = None
        if self._kill_grace_s is not None:
            return self._end("TASK_KILLED", "killed on request")
        return self._end("TASK_FAILED", reason)

    def _enforce_wanted(self, current: AttemptProcess) -> None:
        running = current.process
        assert running is not None
        if not self._is_wanted(current):
            if not current.stop_requested:
                current.stop_requested = True
                current.monitor.sample(descendants.processes(os.getpid(), (self._zygote.pid, remote_copier.pid)))
            if self._kill_grace_s is None:
                # The leader only: the processes that feed it are needed until it has saved.
                running.terminate(STOP_GRACE_S, leader_only=True)
            else:
                running.terminate(self._kill_grace_s)
        if running.kill_if_due():
            logger.warning("%s did not end in time and is killed", current)

    def _conclude(self, current: AttemptProcess) -> TaskEnd | None:
        """Records the end of a process. Ends the task too, unless the process was stopped on request."""
        assert current.process is not None
        assert current.group is not None
        current.drain(is_killed=self._kill_grace_s is not None)
        exit_code = current.process.exit_code
        reason = current.group.exceeded_limit() or current.process.describe_end("--task-mem")
        current.group.remove()
        if self._kill_grace_s is not None:
            return self._end("TASK_KILLED", "killed on request", exit_code)
        if exit_code == process.EXIT_CODE_PEER_LOST:
            # The end of the other worker says why; until then this is no failure of its own.
            self._peer_lost_s = time.monotonic()
        if current.ended_as_requested or exit_code == process.EXIT_CODE_PEER_LOST:
            self._ends.append(ProcessEnd(current.task.attempt, self._outcome(exit_code)))
            self._ended_attempts.add(current.task.attempt)
            return None
        if exit_code == 0:
            return self._end("TASK_FINISHED", describe_exit(0), exit_code)
        return self._end("TASK_FAILED", reason, exit_code)

    def _is_wanted(self, current: AttemptProcess) -> bool:
        task = self._wanted.task
        return (
            self._kill_grace_s is None
            and not current.stop_requested
            and task is not None
            and task.attempt == current.task.attempt
        )

    def _report_status(self) -> None:
        now_s = time.monotonic()
        status = self._status()
        if status != self._last_status or now_s - self._last_status_s >= STATUS_INTERVAL_S:
            self._last_status, self._last_status_s = status, now_s
            if self._order.elastic:
                self._channel.send(status.encode())

    def _status(self) -> ElasticStatus:
        current = self._current
        return ElasticStatus(
            task_id=self._channel.task_id,
            number=self._wanted.number,
            ready=self._zygote.ready,
            attempt=current.task.attempt if current is not None and current.is_requested else None,
            ends=tuple(self._ends),
        )

    def _outcome(self, exit_code: int | None, *, failed: bool = False) -> Outcome:
        self._sender.drain()
        output = self._output
        task = self._wanted.task or self._order.task
        location = output_location(self._channel, task, self._mirror_of(task), failed=failed)
        return Outcome(exit_code, dict(output.log_bytes), output.tail, location)

    def _end(self, state: str, message: str, exit_code: int | None = None) -> TaskEnd:
        outcome = self._outcome(exit_code, failed=state == "TASK_FAILED")
        if (mirror := self._mirror_of(self._wanted.task or self._order.task)) is not None:
            mirror.remove()
        return TaskEnd(state, message, outcome.encode(self._sender.last_output))


def outputs_of(order: LaunchOrder, task: TaskSpec, workspace: Path, mirror: Mirror | None) -> Outputs:
    folder = task.checkpoint_dir if mirror is None else str(mirror.local)
    return Outputs(workspace, folder, task.job_id, task.attempt, order.environment)


def output_location(channel: TaskChannel, task: TaskSpec, mirror: Mirror | None, *, failed: bool) -> str:
    """The folder with a task's output. A failed task's output is copied out of the sandbox, which Mesos deletes."""
    if not failed:
        return str(channel.sandbox)
    folder = task.checkpoint_dir if mirror is None else str(mirror.local)
    kept = Path(folder, "failed", f"{task.role}-{task.index}-attempt-{task.attempt}")
    copies = {channel.sandbox / stream: kept / stream for stream in ("stdout", "stderr")}
    if not save_tails(folder, copies):
        return str(channel.sandbox)
    if mirror is None:
        return str(kept)
    try:
        mirror.push_files([path.relative_to(mirror.local).as_posix() for path in copies.values()])
    except OSError as error:
        logger.warning("the output of the failed task stays on its agent: %s", error)
        return str(kept)
    return mirror.to_remote(str(kept))
