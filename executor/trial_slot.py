"""The slot of a search: holds one trial's process at a time, as the framework wants it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import queue
import time
from collections.abc import Sequence

from executor import bundle, descendants
from executor.channel import TaskChannel, TaskEnd
from executor.environment import process_environment
from executor.monitor import Gpus, RunMonitor
from executor.process import wait_readable
from executor.trial_messages import Losses, RunEnd, RunKey, SlotOrder, SlotStatus, Usage, Wanted
from executor.trial_run import SlotRun
from executor.zygote import COMMAND, Zygote

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
LOSSES_S = 0.5
"""How often losses are sent at most."""
CLEAR_POLL_S = 0.02
KILL_GRACE_S = 1.0
"""Between SIGTERM and SIGKILL; what a trial wants to keep is in its checkpoints."""
GPU_RELEASE_TIMEOUT_S = 10.0
"""How long the next run waits for GPU memory that a process which is gone should not hold."""
KNOWN_TIMEOUT_S = 1.0
"""How long a slot that is to leave waits for the framework to know its ends, which its last status update holds too."""


class TrialSlot:
    """Obeys the newest `Wanted`: makes place, starts, reports; one thread, which waits for whatever comes first.

    Args:
        channel: the slot's task.
        order: what it has to know.
        zygote_command: the program that forks trials.
    """

    def __init__(self, channel: TaskChannel, order: SlotOrder, zygote_command: Sequence[str] = COMMAND) -> None:
        self._channel = channel
        self._order = order
        self._zygote_command = zygote_command
        self._folder = channel.sandbox / "bundle"
        self._inbox: queue.SimpleQueue[Wanted | float] = queue.SimpleQueue()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wanted = Wanted(0)
        self._kill_grace_s: float | None = None
        self._zygote: Zygote | None = None
        self._gpus = Gpus(order.gpu_devices)
        self._run: SlotRun | None = None
        self._empty_s = time.monotonic()
        self._ends: list[RunEnd] = []
        self._ended: set[RunKey] = set()
        self._told: SlotStatus | None = None
        self._beat_s = self._losses_s = 0.0

    # Called on the driver's thread.

    def told(self, data: str) -> None:
        """Takes what the framework wants; it decides at once."""
        try:
            self._inbox.put(Wanted.decode(data))
        except ValueError as error:
            logger.warning("message ignored: %s", error)
            return
        os.eventfd_write(self._wake_fd, 1)

    def kill(self, grace_s: float | None = None) -> None:
        """Ends the run and the task."""
        self._inbox.put(KILL_GRACE_S if grace_s is None else grace_s)
        os.eventfd_write(self._wake_fd, 1)

    # Called on the main thread.

    def run(self) -> TaskEnd:
        """Holds the slot until the framework wants it to leave, or Mesos ends it."""
        self._channel.update("TASK_STARTING", "fetching the script")
        try:
            bundle.fetch(self._order.bundle_url, self._folder)
            descendants.adopt_orphans()
            order = self._order
            # The order of a set of strings is the same in every slot a trial comes to.
            own = {"PYTHONHASHSEED": "0", **order.environment}
            environment = process_environment(order.cpus, own, order.gpu_devices)
            log = self._channel.sandbox / "zygote.out"
            self._zygote = Zygote(order.preload, environment, log, self._zygote_command)
        except (bundle.BundleError, OSError) as error:
            return TaskEnd("TASK_FAILED", f"the slot could not be set up: {error}")
        self._channel.update("TASK_RUNNING", "the slot is up")
        try:
            while (end := self._advance(self._zygote)) is None:
                self._tell(self._zygote)
                self._wait(self._zygote)
        finally:
            self._zygote.close()
            while not descendants.clear(None):
                time.sleep(CLEAR_POLL_S)
        status = self._status().encode()
        self._channel.send(status)
        return dataclasses.replace(end, data=status)

    def _wait(self, zygote: Zygote) -> None:
        """Waits until something has come or is due, and takes it in."""
        run = self._run
        wait_readable((self._wake_fd, *zygote.watched, *(run.watched if run else ())), self._pause_s(zygote))
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        while not self._inbox.empty():
            self._take(self._inbox.get())
        zygote.poll()
        if run is not None:
            run.poll()

    def _pause_s(self, zygote: Zygote) -> float:
        run = self._run
        due_s = [self._beat_s + HEARTBEAT_S]
        if run is None and self._wanted.leave:
            due_s.append(self._empty_s + KNOWN_TIMEOUT_S)
        if run is not None:
            if run.is_over or (run.pid is None and zygote.ready and not zygote.asked):
                return CLEAR_POLL_S
            if run.reports.losses:
                due_s.append(self._losses_s + LOSSES_S)
            if run.due_s is not None:
                due_s.append(run.due_s)
        return min(due_s) - time.monotonic()

    def _take(self, message: Wanted | float) -> None:
        if not isinstance(message, Wanted):
            self._kill_grace_s = message if self._kill_grace_s is None else min(message, self._kill_grace_s)
        elif message.number >= self._wanted.number:
            self._wanted = message
            self._ends = [end for end in self._ends if end.key not in message.known_ends]
            self._told = None  # who asks is answered

    # What to do.

    def _advance(self, zygote: Zygote) -> TaskEnd | None:
        """Does whatever can be done now; returns the end of the task if that is it."""
        run = self._run
        if run is not None and run.is_over and self._is_clear(run, zygote):
            self._send_losses(run)
            self._ends.append(run.end())
            self._ended.add(run.key)
            self._empty_s = time.monotonic()
            self._run = run = None
        if run is None:
            return self._fill(zygote)
        if run.pid is None and not run.is_over:
            self._start(run, zygote)
        if run.pid is not None and not run.is_over:
            self._press(run)
        return None

    def _fill(self, zygote: Zygote) -> TaskEnd | None:
        """The slot is empty: it ends, or takes the run that is wanted."""
        wanted = self._wanted
        if self._kill_grace_s is not None:
            return TaskEnd("TASK_KILLED", "killed on request")
        if wanted.leave:
            is_known = not self._ends or time.monotonic() - self._empty_s >= KNOWN_TIMEOUT_S
            return TaskEnd("TASK_FINISHED", "nothing more to run") if is_known else None
        if zygote.failure:
            return TaskEnd("TASK_FAILED", zygote.failure)
        if wanted.run is not None and wanted.run.key not in self._ended:
            self._run = SlotRun(wanted.run, self._channel.sandbox, RunMonitor(self._gpus))
            self._start(self._run, zygote)
        return None

    def _start(self, run: SlotRun, zygote: Zygote) -> None:
        """Gets its process from the zygote, once that is ready and nothing of an earlier run is left."""
        answer = zygote.take_answer()
        if isinstance(answer, int):
            run.started(answer)
        elif answer is not None:
            run.not_started(f"its process could not be started: {answer}", failed=True)
        elif zygote.failure:
            run.not_started("its slot has no zygote any more")
        elif not self._is_wanted(run):
            if not zygote.asked:
                run.not_started("it was not wanted any more before it began")
            elif self._wanted.leave or self._kill_grace_s is not None:
                zygote.kill()
        elif zygote.ready and not zygote.asked and descendants.clear(zygote.pid):
            zygote.ask(*run.request(self._folder, self._order.script))

    def _press(self, run: SlotRun) -> None:
        """Makes a run end that is to make place. One that cannot be suspended is left alone as long as that may be."""
        reports = run.reports
        if self._kill_grace_s is not None:
            run.terminate(self._kill_grace_s, "its slot was killed")
        elif self._wanted.leave and reports.training and not reports.preemptible:
            run.terminate(KILL_GRACE_S, "its slot had to end, and it cannot be suspended")
        elif self._wanted.leave or (reports.preemptible and not self._is_wanted(run)):
            run.suspend(self._order.suspend_timeout_s)
        run.kill_if_due()

    def _is_wanted(self, run: SlotRun) -> bool:
        wanted = self._wanted
        return self._kill_grace_s is None and wanted.run is not None and wanted.run.key == run.key and not wanted.leave

    def _is_clear(self, run: SlotRun, zygote: Zygote) -> bool:
        """Whether nothing is left of a run that is over."""
        assert run.over_s is not None
        if not descendants.clear(zygote.pid):
            return False
        if run.monitor.gpus_free():
            return True
        if time.monotonic() - run.over_s < GPU_RELEASE_TIMEOUT_S:
            return False
        logger.warning("trial %d, run %d is gone, but its GPU memory is not seen free", *run.key)
        return True

    # What to say.

    def _tell(self, zygote: Zygote) -> None:
        now_s = time.monotonic()
        run = self._run
        if run is not None and now_s - self._losses_s >= LOSSES_S:
            self._send_losses(run)
        is_due = now_s - self._beat_s >= HEARTBEAT_S
        if is_due:
            self._beat_s = now_s
            if run is not None and run.pid is not None and not run.is_over:
                run.monitor.look(descendants.processes(zygote.pid))
        status = self._status()
        news = dataclasses.replace(status, step=0, usage=Usage())
        if is_due or news != self._told:
            self._told = news
            self._channel.send(status.encode())

    def _send_losses(self, run: SlotRun) -> None:
        if reports := run.reports.take_losses():
            self._losses_s = time.monotonic()
            self._channel.send(Losses(self._channel.task_id, *run.key, reports).encode())

    def _status(self) -> SlotStatus:
        status = SlotStatus(
            task_id=self._channel.task_id,
            number=self._wanted.number,
            ends=tuple(self._ends),
            zygote_ready=self._zygote is not None and self._zygote.ready,
        )
        run = self._run
        if run is None:
            return status
        return dataclasses.replace(
            status,
            run=run.key,
            training=run.reports.training,
            preemptible=run.reports.preemptible,
            suspending=run.asked_s is not None,
            step=run.reports.step,
            checkpoint=run.reports.checkpoint,
            checkpoint_step=run.reports.checkpoint_step,
            usage=run.monitor.now,
        )
