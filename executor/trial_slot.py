"""The slots of a search: each holds one trial's process at a time, as the framework wants it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from executor import cuda_checkpoint
from executor.channel import Mailbox, TaskChannel, TaskEnd
from executor.cuda_checkpoint import CudaCheckpointError
from executor.limits import Groups
from executor.monitor import Gpus, RunMonitor, own_bytes
from executor.outputs import KILLED_SAVE_S, Stamp
from executor.paused import MOST_PAUSED, PausedRuns
from executor.process import wait_readable
from executor.run_log import Piece, RunLog
from executor.slot_order import SlotOrder
from executor.trial_messages import Losses, RunEnd, RunKey, SlotStatus, TrialOutput, TrialRun, Usage, Wanted
from executor.trial_reports import KeptReports
from executor.trial_run import SlotRun
from executor.zygote import Zygote
from executor.zygote_slot import (
    CLEAR_POLL_S,
    GPU_RELEASE_TIMEOUT_S,
    SetUpError,
    are_gpus_free,
    clear_all_but,
    end_all,
    set_up,
)

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
OWN_S = 5.0
"""How often a run's own memory is read, which takes milliseconds; at once if it has `MORE_SHARE` times as much in
all."""
MORE_SHARE = 1.02
LOSSES_S = 0.5
"""How often losses are sent at most."""
LOSSES_LIMIT = 1000
"""So many reports go into one message."""
PIECES_LIMIT = 8
"""So many pieces of a run's output are sent at a heartbeat."""
KILL_GRACE_S = 1.0
"""Between SIGTERM and SIGKILL; what a trial wants to keep is in its checkpoints."""
MOVE_S_PER_BYTE = 1.0 / (1 << 30)
"""To bring GPU memory to the host and back, as seen on an H100 (benchmarks/results/suspend_gpu.md)."""
OFFLOAD_TIMEOUT_S = 120.0
"""A GPU's driver that needs longer to bring GPU memory to the host is not waited for."""
KNOWN_TIMEOUT_S = 1.0
"""How long a slot that is to leave waits for the framework to know its ends, which its last status update holds too."""


class TrialSlot:
    """Obeys the newest `Wanted`: makes place, starts, reports.

    Args:
        channel: the slot's task.
        shared: what it shares with others of its search.
    """

    def __init__(self, channel: TaskChannel, shared: TrialSlots) -> None:
        self.task_id = channel.task_id
        self._channel = channel
        self._shared = shared
        self._order = shared.order
        self._gpus = shared.gpus
        self._paused = shared.paused
        self._wanted = Wanted(0)
        self._kill_grace_s: float | None = None
        self._is_announced = False
        self._run: SlotRun | None = None
        self._own_bytes: int | None = None
        """Memory that its run had for itself when that was last read; None before."""
        self._own_until = (0.0, 0.0)
        """Until when that counts, on the monotonic clock, and up to which memory in all, in bytes."""
        self._has_driver: bool | None = None
        """Whether what runs hold on the slot's GPUs can be brought to the host; None before it is asked."""
        self._is_pausable = False
        """Whether the run, which cannot be saved, has room to be suspended in memory."""
        self._has_gpus = self._order.gpu_devices is None or bool(self._order.gpu_devices)
        self._begin_s = 0.0
        """Seconds from the start of the last new process to its first report."""
        self._empty_s = time.monotonic()
        self._ends: list[RunEnd] = []
        self._ended: set[RunKey] = set()
        self._left: dict[RunKey, KeptReports] = {}
        """What ended runs have reported, until their end is known."""
        self._printed: dict[RunKey, RunLog] = {}
        """What they have printed, for as long."""
        self._told: SlotStatus | None = None
        self._beat_s = self._losses_s = 0.0

    # Called on any thread.

    def told(self, data: str) -> None:
        """Takes what the framework wants."""
        try:
            self._shared.do(functools.partial(self._take, Wanted.decode(data)))
        except ValueError as error:
            logger.warning("message ignored: %s", error)

    def kill(self, grace_s: float | None = None) -> None:
        """Ends what is in the slot, and the task."""
        self._shared.do(functools.partial(self._kill, KILL_GRACE_S if grace_s is None else grace_s))

    # Called on the main thread.

    @property
    def watched(self) -> tuple[int, ...]:
        """File descriptors that can be read when there is something to `poll`."""
        return () if self._run is None else self._run.watched

    @property
    def run_pid(self) -> int | None:
        """The supervisor of its run; None if there is none."""
        run = self._run
        return None if run is None or run.has_died else run.pid

    @property
    def is_leaving(self) -> bool:
        """Whether it is about to end."""
        return self._wanted.leave or self._kill_grace_s is not None

    @property
    def memory_bytes(self) -> int:
        """Its memory, if processes may stand still in it; else 0."""
        return self._wanted.memory_bytes

    @property
    def own_bytes(self) -> int:
        """Memory that its run has for itself, as last looked at; of one that is suspended, until that is kept."""
        run = self._run
        if run is None or run.pid is None or (run.is_over and not run.is_paused):
            return 0
        return self._read_own_bytes(run, run.processes) if self._own_bytes is None else self._own_bytes

    @property
    def staying_bytes(self) -> int:
        """Memory of its run, if that has been asked to give the slot back and to stay in memory."""
        return self.own_bytes if self._run is not None and self._run.is_to_stay else 0

    def poll(self) -> None:
        """Takes in what its run has to say, and its end."""
        if self._run is not None:
            self._run.poll()

    @property
    def due_s(self) -> float:
        """When there is something to do, whatever comes, on the monotonic clock."""
        run, zygote = self._run, self._shared.zygote
        due_s = [self._beat_s + HEARTBEAT_S]
        if run is None and self._gpus_await_end:
            return time.monotonic() + CLEAR_POLL_S
        if run is None and self._wanted.leave:
            due_s.append(self._empty_s + KNOWN_TIMEOUT_S)
        if run is not None:
            if run.is_over or (run.pid is None and zygote.ready and not zygote.asked):
                return time.monotonic() + CLEAR_POLL_S
            if run.reports.losses.has_unsent:
                due_s.append(self._losses_s + LOSSES_S)
            if run.due_s is not None:
                due_s.append(run.due_s)
        return min(due_s)

    def _kill(self, grace_s: float) -> None:
        self._kill_grace_s = grace_s if self._kill_grace_s is None else min(grace_s, self._kill_grace_s)

    def _take(self, wish: Wanted) -> None:
        if wish.number >= self._wanted.number:
            self._wanted = wish
            self._ends = [end for end in self._ends if end.key not in wish.known_ends]
            for key in wish.known_ends:
                self._left.pop(key, None)
                self._printed.pop(key, None)
            for trial, number, count in wish.known_reports:
                reports = self._reports_of((trial, number))
                if reports is not None:
                    reports.known(count)
            for trial, number, size in wish.known_output:
                log = self._log_of((trial, number))
                if log is not None:
                    log.known(size)
            self._paused.likely = wish.likely or self._paused.likely
            self._paused.let_go(self._paused.keys if wish.memory_bytes == 0 else wish.let_go)
            self._told = None  # who asks is answered

    # What to do.

    def advance(self) -> TaskEnd | None:
        """Does whatever can be done now; returns the end of the task if that is it."""
        if not self._is_announced:
            self._is_announced = True
            self._channel.update("TASK_RUNNING", "the slot is up")
        run = self._run
        if run is not None and run.is_over and self._is_out(run) and self._is_saved(run):
            self._left[run.key] = run.reports.losses
            self._printed[run.key] = run.printed
            self._ends.append(dataclasses.replace(run.end(), output=run.printed.size))
            self._ended.add(run.key)
            self._is_pausable = False
            self._begin_s = run.begin_s or self._begin_s
            if run.is_paused:
                own = self._paused.add(run, run.family)
                if not run.off_gpu:
                    self._shared.largest_bytes = max(self._shared.largest_bytes, own)
                if self._wanted.memory_bytes == 0:
                    self._paused.let_all_go()
            self._empty_s = time.monotonic()
            self._run = run = self._own_bytes = None
            self._own_until = (0.0, 0.0)
        if run is None:
            return self._fill()
        if run.pid is None and not run.is_over:
            self._start(run)
        if run.pid is not None and not run.is_over:
            self._press(run)
        return None

    def _fill(self) -> TaskEnd | None:
        """The slot is empty: it ends, or takes the run that is wanted."""
        wanted, shared = self._wanted, self._shared
        if shared.is_ending:
            self._paused.let_all_go()
        if self._kill_grace_s is not None:
            return TaskEnd("TASK_KILLED", "killed on request")
        if wanted.leave:
            is_known = not self._ends or time.monotonic() - self._empty_s >= KNOWN_TIMEOUT_S
            return TaskEnd("TASK_FINISHED", "nothing more to run") if is_known else None
        if shared.zygote.failure:
            return TaskEnd("TASK_FAILED", shared.zygote.failure)
        if wanted.run is not None and wanted.run.key not in self._ended:
            monitor = RunMonitor(self._gpus)
            self._run = self._paused.take(wanted.run, monitor)
            if self._run is None and not self._gpus_await_end:
                if self._paused:
                    shared.make_room(shared.largest_bytes)
                try:
                    self._run = SlotRun(wanted.run, self._channel, monitor)
                except OSError as error:
                    self._cannot_begin(wanted.run, error)
                else:
                    self._start(self._run)
        return None

    def _cannot_begin(self, run: TrialRun, error: OSError) -> None:
        """There is no file for its output, or no pipe."""
        trial = run.trial
        message = f"its process could not be started: {error}"
        self._ends.append(RunEnd(trial.number, trial.run, "failed", checkpoint=trial.resume_from, message=message))
        self._ended.add(run.key)

    @property
    def going_on(self) -> RunKey | None:
        """The suspended run that its wanted run continues; None if that has no process here."""
        wanted = self._wanted.run
        last = None if wanted is None else (wanted.trial.number, wanted.trial.run - 1)
        return last if last in self._paused.keys else None

    @property
    def _gpus_await_end(self) -> bool:
        """Whether a process that did not get its GPU memory back, and may still hold some, is not gone yet."""
        return bool(self._gpus) and self._paused.has_dying(GPU_RELEASE_TIMEOUT_S)

    @property
    def _may_stay(self) -> bool:
        """Whether processes of suspended runs may stay, here or in a slot beside this one."""
        wanted = self._wanted
        may_go_on = not wanted.stop and not self._shared.is_ending
        return wanted.memory_bytes > 0 and may_go_on and (not self._has_gpus or self._can_offload)

    @property
    def _can_offload(self) -> bool:
        if self._has_driver is None:
            why_not = cuda_checkpoint.why_not() if self._gpus else "NVIDIA's library does not show the slot's GPUs"
            if why_not:
                logger.warning("suspended trials go by their checkpoints, not in memory: %s", why_not)
            self._has_driver = not why_not
        return self._has_driver

    def _is_out(self, run: SlotRun) -> bool:
        """Whether nothing of a run that is over runs any more; to be called until that is so."""
        if run.is_paused and run.has_died:
            run.leave_memory()
        if not run.is_paused:
            return self._shared.is_clear() and are_gpus_free(run)
        if self._gpus and not self._is_off_gpus(run):
            return False
        # They stand still at once, unless the machine is busy.
        is_still = any(run.stand_still() for _ in range(2))
        if is_still:
            self._look(run)
        return is_still

    def _is_off_gpus(self, run: SlotRun) -> bool:
        """Whether a run that is suspended in memory is seen to hold no GPU memory; to be called until that is so.

        One with which that fails, and one that is not to stay any more, is ended: its checkpoint is written.
        """
        if run.has_died and run.offload is not None:
            logger.warning("%s has died while its GPU memory was brought to the host; its checkpoint stays", run)
            self._paused.refused = True
        if run.has_died or not self._may_stay:
            run.leave_memory()
            return False
        if run.offload is None:
            if self._is_seen_free(run):
                return True
            # It may hold more by now than when it was asked.
            if not self._has_place(run):
                run.leave_memory()
                return False
            run.leave_gpus(self._gpus.bytes_by_process())
        assert run.offload is not None
        try:
            if not run.offload.is_over():
                if time.monotonic() - run.offload.begin_s >= OFFLOAD_TIMEOUT_S:
                    self._has_driver = False
                    self._paused.let_all_go()
                    raise CudaCheckpointError("the driver does not end; it is not asked again")
                return False
            assert run.offload.over_s is not None
            if self._is_seen_free(run):
                return True
            if time.monotonic() - run.offload.over_s >= GPU_RELEASE_TIMEOUT_S:
                raise CudaCheckpointError("its GPU memory is not seen free")
        except CudaCheckpointError as error:
            logger.warning("%s leaves memory, its checkpoint stays: %s", run, error)
            self._paused.refused = True
            run.leave_memory()
        return False

    def _is_seen_free(self, run: SlotRun) -> bool:
        return self._gpus.used_bytes() is not None and run.monitor.gpus_free()

    def _has_place(self, run: SlotRun) -> bool:
        """Whether the process of a run that makes place stays in memory.

        What it holds on GPUs has to fit into the host's memory, for which others are let go. Unless it was asked for,
        it has to be back sooner than a new process would report, too, and the driver must not have failed yet.
        """
        if not self._may_stay or not self._has_gpus:
            return self._may_stay
        shared, processes = self._shared, run.processes
        held = run.monitor.gpu_bytes(processes)
        shared.largest_bytes = max(shared.largest_bytes, self._read_own_bytes(run, processes))
        coming = held + (0 if shared.going_on else shared.largest_bytes)
        begin_s = run.begin_s or max(self._begin_s, 0.0 if run.is_continued else run.age_s)
        why_not = ""
        if held and not self._order.always_stay:
            if self._paused.refused:
                why_not = "the GPU's driver has failed before"
            elif held * MOVE_S_PER_BYTE > begin_s:
                why_not = (
                    f"it holds {held / (1 << 30):.1f} GiB on GPUs, and a new process reports after {begin_s:.1f} s"
                )
        if not why_not and not shared.has_room(coming):
            why_not = "there is no room"
        if why_not:
            logger.info("%s does not stay in memory: %s", run, why_not)
            return False
        shared.make_room(coming)
        return True

    def _look(self, run: SlotRun) -> None:
        """Looks what a run uses, and whether memory is short."""
        shared, paused, processes = self._shared, self._paused, run.processes
        run.look()
        may_pause = self._may_stay and run.reports.training and not (run.reports.preemptible or self._has_gpus)
        if paused or may_pause:
            until_s, up_to_bytes = self._own_until
            rss_bytes = run.monitor.now.rss_bytes or 0
            if self._own_bytes is None or time.monotonic() >= until_s or rss_bytes > up_to_bytes:
                self._read_own_bytes(run, processes)
            if paused:
                shared.make_room()
        self._is_pausable = may_pause and shared.can_pause(self)

    def _read_own_bytes(self, run: SlotRun, processes: Iterable[psutil.Process]) -> int:
        self._own_bytes = own = sum(map(own_bytes, processes))
        self._own_until = time.monotonic() + OWN_S, MORE_SHARE * (run.monitor.now.rss_bytes or 0)
        return own

    def _start(self, run: SlotRun) -> None:
        """Gets its process from the zygote, once that is ready and nothing of an earlier run is left."""
        shared, zygote = self._shared, self._shared.zygote
        if shared.asking is run:
            answer = zygote.take_answer()
            if answer is None and zygote.asked:
                if shared.is_ending:
                    zygote.kill()
                return
            shared.asking = None
            if isinstance(answer, int):
                run.started(answer)
                return
            if answer is not None:
                run.not_started(f"its process could not be started: {answer}", failed=True)
                return
            # The zygote has died over it; another one is asked.
        if zygote.failure:
            run.not_started("its slot has no zygote any more")
        elif not self._is_wanted(run):
            run.not_started("it was not wanted any more before it began")
        else:
            try:
                is_prepared = run.is_prepared(shared.folder, shared.given, self._order.environment)
            except Exception as error:
                run.not_started(f"its working folder could not be made: {error}", failed=True)
                return
            if is_prepared and zygote.ready and shared.is_clear():
                zygote.ask(*run.request(self._order.script, shared.groups))
                shared.asking = run

    def _press(self, run: SlotRun) -> None:
        """Makes a run end that is to make place. One that cannot be suspended is left alone as long as that may be."""
        reports = run.reports
        stall_s = self._order.stall_timeout_s
        if self._kill_grace_s is not None:
            run.terminate(self._kill_grace_s, "its slot was killed")
        elif run.exceeded:
            run.fail(KILL_GRACE_S, run.exceeded)
        elif run.limit_s is not None and run.age_s >= run.limit_s:
            run.time_out(KILL_GRACE_S, "it has run for as long as a trial may (--trial-timeout)")
        elif stall_s is not None and run.idle_s >= stall_s:
            run.time_out(
                KILL_GRACE_S, f"it has reported and printed nothing and used no CPU for {stall_s:g} s (--stall-timeout)"
            )
        elif self._wanted.leave and reports.training and not (reports.preemptible or self._may_pause(run)):
            run.terminate(KILL_GRACE_S, "its slot had to end, and it cannot be suspended")
        elif self._wanted.stop and not reports.preemptible and not self._is_wanted(run):
            run.terminate(KILL_GRACE_S, "its trial is stopped, and it cannot be suspended")
        elif run.asked_s is None and (
            self._wanted.leave or (not self._is_wanted(run) and (reports.preemptible or self._may_pause(run)))
        ):
            run.suspend(self._order.suspend_timeout_s, stays=self._has_place(run))
        run.kill_if_due()

    def _may_pause(self, run: SlotRun) -> bool:
        """Whether a run that cannot be saved can be suspended in memory at this moment, or is about to be."""
        return self._is_pausable and self._may_stay and (run.is_to_stay or self._shared.can_pause(self))

    def _is_saved(self, run: SlotRun) -> bool:
        """Whether what a run has written is brought back; a slot that is killed does not wait long for that."""
        assert run.over_s is not None
        is_late = self._kill_grace_s is not None and time.monotonic() - run.over_s > KILLED_SAVE_S
        return run.is_saved() or is_late

    def _is_wanted(self, run: SlotRun) -> bool:
        wanted = self._wanted
        return self._kill_grace_s is None and wanted.run is not None and wanted.run.key == run.key and not wanted.leave

    # What to say.

    def tell(self) -> None:
        """Says what is to be said by now."""
        now_s = time.monotonic()
        run = self._run
        for key, reports in self._left.items():
            # Before the end itself is told.
            self._send_losses(key, reports)
        for key, log in self._printed.items():
            self._send_output(key, log)
        if run is not None and run.reports.losses.has_unsent and now_s - self._losses_s >= LOSSES_S:
            self._losses_s = now_s
            self._send_losses(run.key, run.reports.losses)
        is_due = now_s - self._beat_s >= HEARTBEAT_S
        if is_due:
            self._beat_s = now_s
            if run is not None and run.pid is not None and not run.is_over:
                self._look(run)
                self._send_output(run.key, run.printed, PIECES_LIMIT)
        status = self._status()
        news = dataclasses.replace(status, step=0, usage=Usage())
        if run is not None:  # then `paused` can wait for the heartbeat; `unsaved` cannot: those can go on nowhere else
            news = dataclasses.replace(news, paused=())
        if is_due or news != self._told:
            self._told = news
            self._channel.send(status.encode())

    def conclude(self, end: TaskEnd) -> None:
        """Says the last that is to be said, nothing being left in the slot, and tells Mesos of the end."""
        for reports in self._left.values():
            reports.known(max(reports.oldest, reports.count - LOSSES_LIMIT))
        last = tuple(self._next_losses(key, reports) for key, reports in self._left.items() if reports.has_unsent)
        status = dataclasses.replace(self._status(), losses=last, output=self._last_output()).encode()
        self._channel.send(status)
        self._channel.update(end.state, end.message, status)

    def fail(self, message: str) -> None:
        """Tells Mesos of the end of a slot that has never held anything."""
        self._channel.update("TASK_FAILED", message)

    def _reports_of(self, key: RunKey) -> KeptReports | None:
        run = self._run
        return run.reports.losses if run is not None and run.key == key else self._left.get(key)

    def _log_of(self, key: RunKey) -> RunLog | None:
        run = self._run
        return run.printed if run is not None and run.key == key else self._printed.get(key)

    def _send_output(self, key: RunKey, log: RunLog, count: int | None = None) -> None:
        """Sends so many pieces of a run's output at most; None: all that has not been sent of one that has ended."""
        while pieces := log.take(count or PIECES_LIMIT, has_ended=count is None):
            for piece in pieces:
                self._channel.send(self._output_message(key, piece).encode())
            if count is not None:
                return

    def _last_output(self) -> tuple[TrialOutput, ...]:
        return tuple(self._output_message(key, piece) for key, log in self._printed.items() for piece in log.last())

    def _output_message(self, key: RunKey, piece: Piece) -> TrialOutput:
        return TrialOutput(self._channel.task_id, *key, piece.offset, piece.data, piece.skipped)

    def _send_losses(self, key: RunKey, reports: KeptReports) -> None:
        while reports.has_unsent:
            self._channel.send(self._next_losses(key, reports).encode())

    def _next_losses(self, key: RunKey, reports: KeptReports) -> Losses:
        first, taken = reports.take(LOSSES_LIMIT)
        return Losses(self._channel.task_id, *key, taken, first, reports.oldest)

    def _status(self) -> SlotStatus:
        status = SlotStatus(
            task_id=self._channel.task_id,
            number=self._wanted.number,
            ends=tuple(self._ends),
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
            pausable=self._is_pausable,
            suspending=run.asked_s is not None,
            step=run.reports.step,
            checkpoint=run.reports.checkpoint,
            checkpoint_step=run.reports.checkpoint_step,
            batch_size=run.reports.batch_size,
            usage=run.monitor.now,
            continued=run.is_continued,
        )


class TrialSlots:
    """The slots of one process, all launched with the same order. A slot with GPUs is alone in its process.

    A run whose process stands still goes on in any of them. One thread waits for whatever comes first.

    Args:
        order: what each of them has been launched with.
        sandbox: gets the script's folder.
        zygote: forks trials; it is closed at the end.

    Attributes:
        order, zygote: those given.
        folder: the script's.
        given: what has travelled with the script.
        gpus: those of the slot.
        groups: makes the control groups of runs.
        paused: the runs that stand still.
        asking: the run for which the zygote has been asked for a process; None if it owes no answer.
        largest_bytes: the most memory that a run has had for itself when it was suspended, GPU memory aside.
    """

    def __init__(self, order: SlotOrder, sandbox: Path, zygote: Zygote) -> None:
        self.order = order
        self.zygote = zygote
        self.folder = sandbox / "bundle"
        self.given: dict[str, Stamp] = {}
        self.gpus = Gpus(order.gpu_devices)
        self.groups = Groups(order.limits)
        self.paused = PausedRuns()
        self.asking: SlotRun | None = None
        self.largest_bytes = 0
        self._slots: dict[str, TrialSlot] = {}
        self._mailbox: Mailbox[Callable[[], None]] = Mailbox()

    # Called on any thread.

    def add(self, channel: TaskChannel) -> TrialSlot:
        """A slot for one more task."""
        slot = TrialSlot(channel, self)
        self.do(functools.partial(self._add, slot))
        return slot

    def do(self, work: Callable[[], None]) -> None:
        """Has something done by the thread that all else belongs to."""
        self._mailbox.put(work)

    # Called on the main thread.

    @property
    def slots(self) -> list[TrialSlot]:
        """Those whose tasks have not ended."""
        return list(self._slots.values())

    def run(self) -> None:
        """Holds the slots to the end of the last one's task; each tells its own end."""
        self._obey()
        try:
            self.given = set_up(self.order.bundle_url, self.folder)
        except SetUpError as error:
            self.zygote.close()
            self._obey()
            for slot in self.slots:
                slot.fail(str(error))
            return
        last = None
        try:
            while last is None:
                last = self._advance()
                self._wait()
        finally:
            end_all(self.zygote)
            self.groups.close()
        slot, end = last
        slot.conclude(end)

    def _add(self, slot: TrialSlot) -> None:
        self._slots[slot.task_id] = slot
        self.paused.max_count = MOST_PAUSED * len(self._slots)

    def _advance(self) -> tuple[TrialSlot, TaskEnd] | None:
        """Does whatever can be done now; returns the end of the last slot's task if that is it."""
        for slot in self.slots:
            end = slot.advance()
            if end is None:
                continue
            del self._slots[slot.task_id]
            if not self._slots:
                return slot, end
            slot.conclude(end)
            # Its memory goes with it.
            self.paused.max_count = MOST_PAUSED * len(self._slots)
            self.make_room()
        for slot in self.slots:
            slot.tell()
        return None

    def _wait(self) -> None:
        """Waits until something has come or is due, and takes it in."""
        if not self._slots:
            return
        held = [descriptor for slot in self.slots for descriptor in slot.watched]
        watched = (self._mailbox.fileno(), *self.zygote.watched, *held, *self.paused.watched)
        readable = wait_readable(watched, min(slot.due_s for slot in self.slots) - time.monotonic())
        self._obey()
        self.zygote.poll()
        for slot in self.slots:
            if readable.intersection(slot.watched):
                slot.poll()
        # Reports come many times a second, and many may stand still.
        if self.paused.has_dying() or readable.intersection(self.paused.watched):
            self.paused.poll()

    def _obey(self) -> None:
        for work in self._mailbox.take():
            work()

    @property
    def is_ending(self) -> bool:
        """Whether all slots are about to end."""
        return all(slot.is_leaving for slot in self.slots)

    def is_clear(self) -> bool:
        """Whether nothing is left of runs that are over; to be called until that is so."""
        if self.asking is not None:
            return False  # nobody knows yet which process is that run's
        running = (slot.run_pid for slot in self.slots)
        return clear_all_but((self.zygote.pid, *self.paused.pids, *running))

    @property
    def going_on(self) -> list[RunKey]:
        """The runs whose processes are to go on next."""
        return [key for slot in self.slots if (key := slot.going_on) is not None]

    @property
    def memory_bytes(self) -> int:
        """The memory of all slots, which are alike, if processes may stand still in them; some may not know it yet."""
        return len(self.slots) * max(slot.memory_bytes for slot in self.slots)

    @property
    def used_bytes(self) -> int:
        """What is used of it beside what stands still."""
        return self._zygote_bytes() + sum(slot.own_bytes for slot in self.slots)

    def has_room(self, coming_bytes: int) -> bool:
        """Whether there is room for so much, if what a checkpoint holds is let go."""
        return self.paused.has_room(self.memory_bytes, self.used_bytes, coming_bytes, self.going_on)

    def make_room(self, coming_bytes: int = 0) -> None:
        """Lets some of what stands still go, if memory is short, or will be with so much more."""
        self.paused.make_room(self.memory_bytes, self.used_bytes, coming_bytes, self.going_on)

    def can_pause(self, pausing: TrialSlot) -> bool:
        """Whether the run in a slot, which no checkpoint holds, may be suspended.

        Every slot may get a run as large as the largest so far, and what gives its slot back just now stays as well.
        """
        largest = max(self.largest_bytes, *(slot.own_bytes for slot in self.slots))
        others = [slot for slot in self.slots if slot is not pausing]
        beside = sum(largest + slot.staying_bytes for slot in others)
        used = self._zygote_bytes() + pausing.own_bytes + beside
        return self.paused.has_room(self.memory_bytes, used, largest, self.going_on)

    def _zygote_bytes(self) -> int:
        """Memory that all processes share: what the zygote has imported."""
        with contextlib.suppress(psutil.NoSuchProcess):  # it is being replaced
            return int(psutil.Process(self.zygote.pid).memory_info().rss)
        return 0
