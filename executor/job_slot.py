"""The slot of a training job: one process at a time, forked from the slot's zygote, which has imported TensorFlow.

That of an elastic job runs the attempt that the framework wants; what is said to the framework and heard from it is in
`executor.elastic_messages`.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from dike.roles import server
from dike.task import TaskSpec
from executor import descendants
from executor.attempt import AttemptProcess
from executor.channel import Mailbox, TaskChannel, TaskEnd
from executor.elastic_messages import ElasticStatus, ProcessEnd, WantedProcess, decode_wish
from executor.limits import Groups
from executor.messages import ELASTIC_SAVE_S, LaunchOrder, Outcome, WantedOutput
from executor.monitor import Gpus, RunMonitor
from executor.output import OutputCopier, OutputSender
from executor.outputs import Outputs, Stamp, remote_copier
from executor.process import describe_exit, keep_tails, wait_readable
from executor.zygote import Zygote
from executor.zygote_slot import CLEAR_POLL_S, SetUpError, are_gpus_free, clear_all_but, end_all, set_up

logger = logging.getLogger(__name__)

REPEAT_S = 1.0
"""How often a slot says how it stands, though nothing has changed: any message may get lost."""
STOP_GRACE_S = ELASTIC_SAVE_S + 5.0
"""Between SIGTERM and SIGKILL when the job changes its size."""


class JobSlot:
    """Runs the process of its order; obeys the newest `WantedProcess`, if any comes: stops, starts, reports.

    One thread waits for whatever comes first.

    Args:
        channel: the slot's task.
        order: what it has to know.
        zygote: forks the job's processes; the slot closes it.
    """

    def __init__(self, channel: TaskChannel, order: LaunchOrder, zygote: Zygote) -> None:
        self._channel = channel
        self._order = order
        self._zygote = zygote
        self._folder = channel.sandbox / "bundle"
        self._gpus = Gpus(order.gpu_devices)
        self._groups = Groups(order.limits)
        self._mailbox: Mailbox[WantedProcess | WantedOutput | float] = Mailbox()
        self._kill_grace_s: float | None = None
        self._is_announced = False
        self._given: dict[str, Stamp] = {}
        """What has travelled with the script."""
        self._wanted = WantedProcess(0, None if order.standby else order.task)
        self._sender = OutputSender(channel, enabled=order.stream_logs)
        self._output = OutputCopier(self._sender.add)
        self._current: AttemptProcess | None = None
        self._ends: list[ProcessEnd] = []
        self._ended: set[int] = set()
        self._told: ElasticStatus | None = None
        self._told_s = 0.0

    # Called on any thread.

    def told(self, data: str) -> None:
        """Takes what the framework wants."""
        try:
            self._mailbox.put(decode_wish(data))
        except ValueError as error:
            logger.warning("message ignored: %s", error)

    def kill(self, grace_s: float | None = None) -> None:
        """Ends what is in the slot, and the task."""
        self._mailbox.put(float(self._order.kill_grace_s if grace_s is None else grace_s))

    # Called on the main thread.

    def run(self) -> None:
        """Holds the slot to the end of its task, and tells Mesos how it has ended."""
        end = self._hold()
        self._channel.update(end.state, end.message, end.data)

    def _hold(self) -> TaskEnd:
        try:
            self._given = set_up("" if server.is_server(self._order.task) else self._order.bundle_url, self._folder)
        except SetUpError as error:
            self._zygote.close()
            return self._end("TASK_FAILED", str(error))
        try:
            while (end := self._advance()) is None:
                self._tell()
                self._wait()
        finally:
            end_all(self._zygote)
            self._groups.close()
        if self._order.elastic:
            self._channel.send(self._status().encode())
        return end

    def _wait(self) -> None:
        """Waits until something has come or is due, and takes it in."""
        current = self._current
        watched = (self._mailbox.fileno(), *self._zygote.watched, *(current.watched if current else ()))
        wait_readable(watched, self._due_s() - time.monotonic())
        for message in self._mailbox.take():
            if isinstance(message, float):
                self._kill_grace_s = message if self._kill_grace_s is None else min(message, self._kill_grace_s)
            else:
                self._take(message)
        self._zygote.poll()
        if current is not None:
            current.poll()

    def _announce(self, message: str) -> None:
        """Tells Mesos once that the task runs."""
        if not self._is_announced:
            self._is_announced = True
            self._channel.update("TASK_RUNNING", message)

    def _is_clear(self) -> bool:
        """Whether nothing is left of the slot's processes; to be called until that is so."""
        return clear_all_but((self._zygote.pid,))

    def _due_s(self) -> float:
        current = self._current
        if current is not None:
            if current.is_over or (current.process is None and self._zygote.ready and not self._zygote.asked):
                return time.monotonic() + CLEAR_POLL_S
            if current.process is not None and current.process.due_s is not None:
                return min(self._told_s + REPEAT_S, current.process.due_s)
        return self._told_s + REPEAT_S

    def _take(self, wish: WantedProcess | WantedOutput) -> None:
        if isinstance(wish, WantedOutput):
            self._sender.resend(wish)
            return
        if wish.number >= self._wanted.number:
            self._wanted = wish
            self._ends = [end for end in self._ends if end.attempt not in wish.known_ends]
        self._told = None  # who speaks is answered

    # What to do.

    def _advance(self) -> TaskEnd | None:
        current = self._current
        if current is not None and current.is_over:
            if not self._is_clear() or not are_gpus_free(current):
                return None
            self._current = None
            assert current.process is not None
            self._channel.ended(current.process.pid)
            if (end := self._conclude(current)) is not None:
                return end
        elif current is not None and current.process is not None:
            if current.group is not None and current.group.exceeded():
                current.process.terminate(0.0)
            self._press(current)
            return None
        elif current is not None:
            return self._start(current)
        return self._fill()

    def _fill(self) -> TaskEnd | None:
        """The slot is empty: it ends, gets ready, or takes the process that is wanted."""
        if self._kill_grace_s is not None:
            return self._end("TASK_KILLED", "killed on request")
        if self._zygote.failure:
            return self._end("TASK_FAILED", self._zygote.failure)
        if self._zygote.ready and self._order.standby:
            self._announce("ready")
        task = self._wanted.task
        if task is None or task.attempt in self._ended:
            return None
        outputs = None
        if task.is_chief:
            outputs = outputs_of(self._order, task, self._folder)
            outputs.restore(self._given)
        self._current = AttemptProcess(task, self._output, self._channel, RunMonitor(self._gpus), outputs)
        return self._start(self._current)

    def _start(self, current: AttemptProcess) -> TaskEnd | None:
        """Gets its process from the zygote, once that is ready and nothing of an earlier one is left."""
        answer = self._zygote.take_answer()
        if isinstance(answer, int):
            current.started(answer)
            self._announce("running")
            self._press(current)
        elif answer is not None:
            return self._give_up(current, f"the process could not be started: {answer}")
        elif self._zygote.failure:
            return self._give_up(current, self._zygote.failure)
        elif not self._is_wanted(current):
            if self._zygote.asked:
                if self._kill_grace_s is not None:
                    self._zygote.kill()
            # A zygote that died over the request may have forked all the same.
            elif self._is_clear():
                current.abandon()
                self._current = None
                return self._fill()
        elif self._zygote.ready and not self._zygote.asked and self._is_clear():
            current.asked = True
            self._zygote.ask(*current.request(self._order, self._folder, self._groups))
        return None

    def _give_up(self, current: AttemptProcess, reason: str) -> TaskEnd:
        current.abandon()
        self._current = None
        if self._kill_grace_s is not None:
            return self._end("TASK_KILLED", "killed on request")
        return self._end("TASK_FAILED", reason)

    def _press(self, current: AttemptProcess) -> None:
        """Makes a process end that is to make place."""
        running = current.process
        assert running is not None
        if not self._is_wanted(current):
            if not current.stopped:
                current.stopped = True
                current.monitor.look(descendants.processes(os.getpid(), (self._zygote.pid, remote_copier.pid)))
            if self._kill_grace_s is None:
                # What feeds it is to go on until it has saved.
                running.terminate(STOP_GRACE_S, alone=True)
            else:
                running.terminate(self._kill_grace_s)
        if running.kill_if_due():
            logger.warning("%s did not end in time: it is killed", current)

    def _conclude(self, current: AttemptProcess) -> TaskEnd | None:
        """A process has ended: so does the task, unless another was wanted in its place, or none."""
        assert current.process is not None
        assert current.group is not None
        current.drain(is_killed=self._kill_grace_s is not None)
        exit_code = current.process.exit_code
        why = current.group.exceeded() or current.process.describe_end("--task-mem")
        current.group.remove()
        if self._kill_grace_s is not None:
            return self._end("TASK_KILLED", "killed on request", exit_code)
        if current.ended_as_asked:
            self._ends.append(ProcessEnd(current.task.attempt, self._outcome(exit_code)))
            self._ended.add(current.task.attempt)
            return None
        if exit_code == 0:
            return self._end("TASK_FINISHED", describe_exit(0), exit_code)
        return self._end("TASK_FAILED", why, exit_code)

    def _is_wanted(self, current: AttemptProcess) -> bool:
        task = self._wanted.task
        return (
            self._kill_grace_s is None
            and not current.stopped
            and task is not None
            and task.attempt == current.task.attempt
        )

    # What to say.

    def _tell(self) -> None:
        now_s = time.monotonic()
        status = self._status()
        if status != self._told or now_s - self._told_s >= REPEAT_S:
            self._told, self._told_s = status, now_s
            if self._order.elastic:
                self._channel.send(status.encode())

    def _status(self) -> ElasticStatus:
        current = self._current
        return ElasticStatus(
            task_id=self._channel.task_id,
            number=self._wanted.number,
            ready=self._zygote.ready,
            attempt=current.task.attempt if current is not None and current.asked else None,
            ends=tuple(self._ends),
        )

    def _outcome(self, exit_code: int | None, *, failed: bool = False) -> Outcome:
        self._sender.drain()
        output = self._output
        place = place_of_output(self._channel, self._wanted.task or self._order.task, failed=failed)
        return Outcome(exit_code, dict(output.log_bytes), output.tail, place)

    def _end(self, state: str, message: str, exit_code: int | None = None) -> TaskEnd:
        outcome = self._outcome(exit_code, failed=state == "TASK_FAILED")
        return TaskEnd(state, message, outcome.encode(self._sender.last_output))


def outputs_of(order: LaunchOrder, task: TaskSpec, workspace: Path) -> Outputs:
    """The outputs of a chief, which go to its job's checkpoint folder."""
    return Outputs(workspace, task.checkpoint_dir, task.job_id, task.attempt, order.environment)


def place_of_output(channel: TaskChannel, task: TaskSpec, *, failed: bool) -> str:
    """Where all that a task has written is: of one that has failed, where it outlasts Mesos' sandbox."""
    if not failed:
        return str(channel.sandbox)
    kept = Path(task.checkpoint_dir, "failed", f"{task.role}-{task.index}-attempt-{task.attempt}")
    copies = {channel.sandbox / stream: kept / stream for stream in ("stdout", "stderr")}
    return str(kept if keep_tails(task.checkpoint_dir, copies) else channel.sandbox)
