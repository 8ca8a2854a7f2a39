"""The slots of a search: each runs one trial's process at a time, as the framework requests."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from executor.channel import Mailbox, TaskChannel, TaskEnd
from executor.environment import gpu_memory_variables
from executor.limits import ControlGroups
from executor.monitor import Gpus, RunMonitor
from executor.outputs import KILLED_SAVE_TIMEOUT_S, Stamp
from executor.paused import MAX_PAUSED_PER_SLOT, PausedRuns
from executor.process import wait_readable
from executor.run_memory import RunMemory
from executor.run_phases import Event, Phase
from executor.slot_order import SlotOrder
from executor.slot_reporter import ACKNOWLEDGE_TIMEOUT_S, SlotReporter
from executor.trial_messages import RunEnd, RunKey, SlotStatus, TrialRun, Wanted
from executor.trial_run import SlotRun
from executor.zygote import Zygote
from executor.zygote_slot import (
    EXIT_POLL_INTERVAL_S,
    GPU_RELEASE_TIMEOUT_S,
    SetUpError,
    are_gpus_free,
    kill_all,
    kill_descendants_except,
    set_up,
)

logger = logging.getLogger(__name__)

KILL_GRACE_S = 1.0
"""Seconds between SIGTERM and SIGKILL; a trial's state is in its checkpoints."""


class TrialSlot:
    """Follows the newest `Wanted`: suspends, starts and reports runs."""

    def __init__(self, channel: TaskChannel, shared: TrialSlots) -> None:
        self.task_id = channel.task_id
        self._channel = channel
        self._shared = shared
        self._order = shared.order
        self._gpus = shared.gpus
        self._paused = shared.paused
        self._wanted = Wanted(0)
        self._kill_grace_s: float | None = None
        self._is_draining = False
        self._running_reported = False
        self._run: SlotRun | None = None
        self._memory = RunMemory(shared)
        self._empty_since_s = time.monotonic()
        self._reporter = SlotReporter(channel)

    # Called on any thread.

    def receive(self, data: str) -> None:
        """Enqueues a message of the framework."""
        try:
            self._shared.call_soon(functools.partial(self._apply_wanted, Wanted.decode(data)))
        except ValueError as error:
            logger.warning("message ignored: %s", error)

    def kill(self, grace_s: float | None = None) -> None:
        self._shared.call_soon(functools.partial(self._kill, KILL_GRACE_S if grace_s is None else grace_s))

    def drain(self) -> None:
        """Has the run suspended and the task ended, because the agent is leaving."""
        self._shared.call_soon(self._start_draining)

    # Called on the main thread.

    @property
    def watched_fds(self) -> tuple[int, ...]:
        return () if self._run is None else self._run.watched_fds

    @property
    def run_pid(self) -> int | None:
        run = self._run
        return None if run is None or run.has_died else run.pid

    @property
    def is_leaving(self) -> bool:
        return self._wanted.leave or self._kill_grace_s is not None

    @property
    def memory_bytes(self) -> int:
        """Its memory for running and paused processes; 0 if runs may not be paused."""
        return self._wanted.memory_bytes

    @property
    def private_bytes(self) -> int:
        """Private memory of its run when last read; includes a run that is being paused."""
        run = self._run
        if run is None or run.pid is None or (run.has_ended and not run.is_paused):
            return 0
        return self._memory.of(run)

    @property
    def pausing_bytes(self) -> int:
        """Private memory of its run if that has been asked to pause."""
        return self.private_bytes if self._run is not None and self._run.is_pausing else 0

    def poll(self) -> None:
        if self._run is not None:
            self._run.poll()

    @property
    def deadline_s(self) -> float:
        """Monotonic time of the next action that no event triggers."""
        run, zygote = self._run, self._shared.zygote
        deadlines_s = [self._reporter.deadline_s(run)]
        if run is None and self._awaits_gpu_release:
            return time.monotonic() + EXIT_POLL_INTERVAL_S
        if run is None and self._wanted.leave:
            deadlines_s.append(self._empty_since_s + ACKNOWLEDGE_TIMEOUT_S)
        if run is not None:
            if run.has_ended or (run.pid is None and zygote.ready and not zygote.is_forking):
                return time.monotonic() + EXIT_POLL_INTERVAL_S
            if run.deadline_s is not None:
                deadlines_s.append(run.deadline_s)
        return min(deadlines_s)

    def _start_draining(self) -> None:
        self._is_draining = True
        self._wanted = dataclasses.replace(self._wanted, leave=True)

    def _kill(self, grace_s: float) -> None:
        self._kill_grace_s = grace_s if self._kill_grace_s is None else min(grace_s, self._kill_grace_s)

    def _apply_wanted(self, wanted: Wanted) -> None:
        if wanted.number >= self._wanted.number:
            self._wanted = dataclasses.replace(wanted, leave=wanted.leave or self._is_draining)
            self._reporter.acknowledge(wanted, self._run)
            self._paused.resume_order = wanted.resume_order or self._paused.resume_order
            self._paused.evict(self._paused.keys if wanted.memory_bytes == 0 else wanted.evict)

    def advance(self) -> TaskEnd | None:
        """Does all that is possible without waiting; returns the end of the task, if it ends."""
        if not self._running_reported:
            self._running_reported = True
            self._channel.update("TASK_RUNNING", "the slot is up")
        run = self._run
        if run is not None and run.has_ended and self._clear(run):
            self._reporter.add_end(dataclasses.replace(run.finish(), output=run.printed.size), run)
            if run.is_paused:
                own = self._paused.add(run, run.process_tree)
                if not run.offloaded_pids:
                    self._shared.largest_bytes = max(self._shared.largest_bytes, own)
                if self._wanted.memory_bytes == 0:
                    self._paused.evict_all()
            self._empty_since_s = time.monotonic()
            self._memory.forget(run)
            self._run = run = None
        if run is None:
            return self._fill()
        if run.pid is None and not run.has_ended:
            self._start(run)
        if run.pid is not None and not run.has_ended:
            self._enforce_wanted(run)
        return None

    def _fill(self) -> TaskEnd | None:
        wanted, shared = self._wanted, self._shared
        if shared.is_ending:
            self._paused.evict_all()
        if self._kill_grace_s is not None:
            return TaskEnd("TASK_KILLED", "killed on request")
        if wanted.leave:
            is_late = time.monotonic() - self._empty_since_s >= ACKNOWLEDGE_TIMEOUT_S
            is_acknowledged = not self._reporter.ends or is_late
            return TaskEnd("TASK_FINISHED", "nothing more to run") if is_acknowledged else None
        if shared.zygote.failure:
            return TaskEnd("TASK_FAILED", shared.zygote.failure)
        if wanted.run is not None and wanted.run.key not in self._reporter.ended:
            monitor = RunMonitor(self._gpus, shares_gpu=self._order.slots_per_gpu > 1)
            self._run = self._paused.resume(wanted.run, monitor)
            if self._run is None and not self._awaits_gpu_release:
                if self._paused:
                    shared.make_room(shared.largest_bytes)
                try:
                    self._run = SlotRun(wanted.run, self._channel, monitor, folder=self._order.folder)
                except OSError as error:
                    self._fail_start(wanted.run, error)
                else:
                    self._start(self._run)
        return None

    def _fail_start(self, run: TrialRun, error: OSError) -> None:
        """Reports a run as failed whose output file or pipes could not be created."""
        trial = run.trial
        message = f"its process cannot be started: {error}"
        self._reporter.add_end(RunEnd(trial.number, trial.run, "failed", checkpoint=trial.resume_from, message=message))

    @property
    def resuming(self) -> RunKey | None:
        """The paused run that its desired run resumes; None if that is not paused here."""
        wanted = self._wanted.run
        last = None if wanted is None else (wanted.trial.number, wanted.trial.run - 1)
        return last if last in self._paused.keys else None

    @property
    def _awaits_gpu_release(self) -> bool:
        """Whether an evicted process, which may still have GPU memory, has not ended."""
        return bool(self._gpus) and self._paused.is_evicting(GPU_RELEASE_TIMEOUT_S)

    @property
    def _is_pausing_allowed(self) -> bool:
        """Whether suspended runs may be paused, here or in another slot of this process."""
        wanted = self._wanted
        may_resume = not wanted.stop and not self._shared.is_ending
        return wanted.memory_bytes > 0 and may_resume and self._memory.can_release_gpus

    def _clear(self, run: SlotRun) -> bool:
        """Kills all that a run which has ended left in the slot, or freezes it if it is paused; then saves its outputs.

        Returns:
            Whether that is done; call it until it is.
        """
        if run.is_paused and run.has_died:
            if run.offload is not None and run.phase is Phase.PAUSED:
                logger.warning("%s died while its GPU memory was being offloaded; its checkpoint stays", run)
                self._paused.offload_failed = True
            run.evict()
        if run.phase is Phase.EXITED and self._shared.kill_leftovers() and are_gpus_free(run):
            run.happened(Event.CLEAR)
        elif (
            run.phase is Phase.PAUSED
            and (not self._gpus or self._memory.release_gpus(run, is_allowed=self._is_pausing_allowed))
            # SIGSTOP takes effect immediately, unless the machine is busy.
            and any(run.freeze() for _ in range(2))
        ):
            self._sample_usage(run)
            run.happened(Event.CLEAR)
        return run.phase in (Phase.CLEARED, Phase.FROZEN) and self._save_outputs(run)

    def _sample_usage(self, run: SlotRun) -> None:
        """Samples a run's usage, and evicts paused runs if memory is short."""
        run.sample_usage()
        is_unsaved = run.reports.training and not (run.reports.preemptible or self._memory.has_gpus)
        may_pause = self._is_pausing_allowed and is_unsaved
        if self._paused or may_pause:
            self._memory.refresh(run)
            if self._paused:
                self._shared.make_room()
        self._memory.is_pausable = may_pause and self._shared.can_pause(self)

    def _start(self, run: SlotRun) -> None:
        """Has the process forked once the zygote is ready and nothing is left of an earlier run."""
        shared, zygote = self._shared, self._shared.zygote
        if shared.forking is run:
            answer = zygote.take_answer()
            if answer is None and zygote.is_forking:
                if shared.is_ending:
                    zygote.kill()
                return
            shared.forking = None
            if isinstance(answer, int):
                run.adopt(answer)
                return
            if answer is not None:
                run.cancel(f"its process cannot be started: {answer}", failed=True)
                return
            # The zygote died during the request; ask its successor.
        if zygote.failure:
            run.cancel("the zygote of its slot has failed")
        elif not self._is_wanted(run):
            run.cancel("it was withdrawn before it started")
        else:
            try:
                is_prepared = run.prepare_folder(shared.folder, shared.bundle_files, self._order.environment)
            except Exception as error:
                run.cancel(f"its working folder cannot be created: {error}", failed=True)
                return
            if is_prepared and zygote.ready and shared.kill_leftovers():
                zygote.request_fork(*run.make_fork_request(self._order.script, shared.groups, shared.gpu_memory))
                shared.forking = run

    def _enforce_wanted(self, run: SlotRun) -> None:
        """Suspends or ends a run that is not wanted, or exceeds a limit. Work is lost only if necessary."""
        reports = run.reports
        stall_s = self._order.stall_timeout_s
        if self._kill_grace_s is not None:
            run.terminate(self._kill_grace_s, "its slot was killed")
        elif run.exceeded_limit:
            run.fail(KILL_GRACE_S, run.exceeded_limit)
        elif run.limit_s is not None and run.age_s >= run.limit_s:
            run.time_out(KILL_GRACE_S, "it exceeded the maximum duration of a trial (--trial-timeout)")
        elif stall_s is not None and run.idle_s >= stall_s:
            run.time_out(
                KILL_GRACE_S, f"it stalled: no report, no output and no CPU use for {stall_s:g} s (--stall-timeout)"
            )
        elif self._wanted.leave and reports.training and not (reports.preemptible or self._can_pause_unsaved(run)):
            run.terminate(KILL_GRACE_S, "its slot must end, and it cannot be suspended")
        elif self._wanted.stop and not reports.preemptible and not self._is_wanted(run):
            run.terminate(KILL_GRACE_S, "its trial is stopped, and it cannot be suspended")
        elif run.end_requested_at_s is None and (
            self._wanted.leave or (not self._is_wanted(run) and (reports.preemptible or self._can_pause_unsaved(run)))
        ):
            run.suspend(self._order.suspend_timeout_s, pause=self._is_pausing_allowed and self._memory.reserve(run))
        run.kill_if_due()

    def _can_pause_unsaved(self, run: SlotRun) -> bool:
        """Whether a run that cannot be checkpointed can be paused now, or is being paused."""
        may_pause = self._memory.is_pausable and self._is_pausing_allowed
        return may_pause and (run.is_pausing or self._shared.can_pause(self))

    def _save_outputs(self, run: SlotRun) -> bool:
        """Saves a run's output files; returns whether that is done, or has timed out in a slot that is killed."""
        assert run.ended_at_s is not None
        is_late = self._kill_grace_s is not None and time.monotonic() - run.ended_at_s > KILLED_SAVE_TIMEOUT_S
        return run.save_outputs() or is_late

    def _is_wanted(self, run: SlotRun) -> bool:
        wanted = self._wanted
        return self._kill_grace_s is None and wanted.run is not None and wanted.run.key == run.key and not wanted.leave

    def report(self) -> None:
        """Sends the messages that are due."""
        run = self._run
        self._reporter.send_reports(run)
        is_due = self._reporter.is_heartbeat_due
        if is_due and run is not None and run.pid is not None and not run.has_ended:
            self._sample_usage(run)
            self._reporter.send_printed(run)
        self._reporter.send_status(self._status(), is_due=is_due)

    def conclude(self, end: TaskEnd) -> None:
        """Sends the last status, and the end of the task to Mesos. Nothing must be left in the slot."""
        self._reporter.conclude(self._status(), end)

    def fail(self, message: str) -> None:
        self._channel.update("TASK_FAILED", message)

    def _status(self) -> SlotStatus:
        status = SlotStatus(
            task_id=self._channel.task_id,
            number=self._wanted.number,
            ends=tuple(self._reporter.ends),
            zygote_ready=self._shared.zygote.ready,
            paused=self._paused.keys,
            unsaved=self._paused.unsaved,
            unsaved_bytes=self._paused.unsaved_bytes,
        )
        run = self._run
        if run is None:
            return status
        return dataclasses.replace(
            status,
            run=run.key,
            training=run.reports.training,
            preemptible=run.reports.preemptible,
            pausable=self._memory.is_pausable,
            suspending=run.end_requested_at_s is not None,
            step=run.reports.step,
            checkpoint=run.checkpoint[0],
            checkpoint_step=run.checkpoint[1],
            batch_size=run.reports.batch_size,
            usage=run.monitor.latest,
            continued=run.is_resumed,
        )


class TrialSlots:
    """The slots of one process, all with the same order. A slot with GPUs has a process of its own.

    A paused run can resume in any of them. A single thread waits for messages, processes and deadlines.

    Args:
        order: of each slot.
        sandbox: gets the bundle.
        zygote: forks trials; closed at the end.

    Attributes:
        order, zygote: those given.
        folder: the unpacked bundle.
        bundle_files: stamps of its files.
        gpus: the GPUs of the slot.
        gpu_memory: variables that limit the GPU memory of a run.
        groups: creates the control groups of runs.
        paused: the paused runs.
        forking: the run for which a fork has been requested from the zygote; None if there is no answer pending.
        largest_bytes: maximum private memory of a run when it was paused, without GPU memory.
    """

    def __init__(self, order: SlotOrder, sandbox: Path, zygote: Zygote) -> None:
        self.order = order
        self.zygote = zygote
        self.folder = sandbox / "bundle"
        self.bundle_files: dict[str, Stamp] = {}
        self.gpus = Gpus(order.gpu_devices)
        self.gpu_memory = gpu_memory_variables(self.gpus.memory_bytes(), order.slots_per_gpu)
        self.groups = ControlGroups(order.limits)
        self.paused = PausedRuns()
        self.forking: SlotRun | None = None
        self.largest_bytes = 0
        self._slots: dict[str, TrialSlot] = {}
        self._mailbox: Mailbox[Callable[[], None]] = Mailbox()

    # Called on any thread.

    def add(self, channel: TaskChannel) -> TrialSlot:
        slot = TrialSlot(channel, self)
        self.call_soon(functools.partial(self._add, slot))
        return slot

    def call_soon(self, work: Callable[[], None]) -> None:
        """Has `work` called on the main thread."""
        self._mailbox.put(work)

    # Called on the main thread.

    @property
    def slots(self) -> list[TrialSlot]:
        return list(self._slots.values())

    def run(self) -> None:
        """Runs the slots until the last task has ended. Each slot reports its own end."""
        self._run_callbacks()
        try:
            self.bundle_files = set_up(self.order.bundle_url, self.folder)
        except SetUpError as error:
            self.zygote.close()
            self._run_callbacks()
            for slot in self.slots:
                slot.fail(str(error))
            return
        last = None
        try:
            while last is None:
                last = self._advance()
                self._wait()
        finally:
            kill_all(self.zygote)
            self.groups.close()
        slot, end = last
        slot.conclude(end)

    def _add(self, slot: TrialSlot) -> None:
        self._slots[slot.task_id] = slot
        self.paused.max_count = MAX_PAUSED_PER_SLOT * len(self._slots)

    def _advance(self) -> tuple[TrialSlot, TaskEnd] | None:
        """Does all that is possible without waiting; returns the last slot and its end, if that has ended."""
        for slot in self.slots:
            end = slot.advance()
            if end is None:
                continue
            del self._slots[slot.task_id]
            if not self._slots:
                return slot, end
            slot.conclude(end)
            # There is less memory without the slot.
            self.paused.max_count = MAX_PAUSED_PER_SLOT * len(self._slots)
            self.make_room()
        for slot in self.slots:
            slot.report()
        return None

    def _wait(self) -> None:
        if not self._slots:
            return
        run_fds = [descriptor for slot in self.slots for descriptor in slot.watched_fds]
        watched = (self._mailbox.fileno(), *self.zygote.watched_fds, *run_fds, *self.paused.watched_fds)
        readable = wait_readable(watched, min(slot.deadline_s for slot in self.slots) - time.monotonic())
        self._run_callbacks()
        self.zygote.poll()
        for slot in self.slots:
            if readable.intersection(slot.watched_fds):
                slot.poll()
        # Only then: reports arrive many times a second, and many runs may be paused.
        if self.paused.is_evicting() or readable.intersection(self.paused.watched_fds):
            self.paused.poll()

    def _run_callbacks(self) -> None:
        for work in self._mailbox.take():
            work()

    @property
    def is_ending(self) -> bool:
        return all(slot.is_leaving for slot in self.slots)

    def kill_leftovers(self) -> bool:
        """Kills what ended runs have left; returns whether nothing is left. Call it until nothing is."""
        if self.forking is not None:
            return False  # the new run's process is not identified yet
        running = (slot.run_pid for slot in self.slots)
        return kill_descendants_except((self.zygote.pid, *self.paused.pids, *running))

    @property
    def resuming(self) -> list[RunKey]:
        """The paused runs that are about to be resumed."""
        return [key for slot in self.slots if (key := slot.resuming) is not None]

    @property
    def memory_bytes(self) -> int:
        """Memory of all slots, which are equal; 0 if runs may not be paused. Some slots may not know it yet."""
        return len(self.slots) * max(slot.memory_bytes for slot in self.slots)

    @property
    def used_bytes(self) -> int:
        """Memory used by all but paused runs."""
        return self._zygote_bytes() + sum(slot.private_bytes for slot in self.slots)

    def has_room(self, needed_bytes: int) -> bool:
        """Whether this much memory is or can be made available, by evicting runs that have a checkpoint."""
        return self.paused.has_room(self.memory_bytes, self.used_bytes, needed_bytes, self.resuming)

    def make_room(self, needed_bytes: int = 0) -> None:
        """Evicts paused runs if memory is short, or will be with this much more in use."""
        self.paused.make_room(self.memory_bytes, self.used_bytes, needed_bytes, self.resuming)

    def can_pause(self, pausing: TrialSlot) -> bool:
        """Whether the run in a slot, which has no checkpoint, may be paused.

        Counts memory for a run in every slot, as large as the largest so far, and for runs that are being paused.
        """
        largest = max(self.largest_bytes, *(slot.private_bytes for slot in self.slots))
        others = [slot for slot in self.slots if slot is not pausing]
        beside = sum(largest + slot.pausing_bytes for slot in others)
        used = self._zygote_bytes() + pausing.private_bytes + beside
        return self.paused.has_room(self.memory_bytes, used, largest, self.resuming)

    def _zygote_bytes(self) -> int:
        """Memory that all processes share: the zygote's imports."""
        with contextlib.suppress(psutil.NoSuchProcess):  # it is being restarted
            return int(psutil.Process(self.zygote.pid).memory_info().rss)
        return 0
