"""The slot of a search: holds one trial's process at a time, as the framework wants it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time

import psutil

from executor import cuda_checkpoint, descendants
from executor.channel import TaskChannel, TaskEnd
from executor.cuda_checkpoint import CudaCheckpointError
from executor.monitor import RunMonitor, own_bytes
from executor.outputs import KILLED_SAVE_S
from executor.paused import PausedRuns
from executor.run_log import Piece, RunLog
from executor.slot_order import SlotOrder
from executor.trial_messages import Losses, RunEnd, RunKey, SlotStatus, TrialOutput, Usage, Wanted
from executor.trial_reports import KeptReports
from executor.trial_run import SlotRun
from executor.zygote import Zygote
from executor.zygote_slot import CLEAR_POLL_S, GPU_RELEASE_TIMEOUT_S, ZygoteSlot

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
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


class TrialSlot(ZygoteSlot[Wanted]):
    """Obeys the newest `Wanted`: makes place, starts, reports.

    Args:
        channel: the slot's task.
        order: what it has to know.
        zygote: forks trials.
    """

    def __init__(self, channel: TaskChannel, order: SlotOrder, zygote: Zygote) -> None:
        super().__init__(channel, order.bundle_url, order.gpu_devices, KILL_GRACE_S, zygote)
        self._order = order
        self._wanted = Wanted(0)
        self._run: SlotRun | None = None
        self._paused = PausedRuns()
        self._has_driver: bool | None = None
        """Whether what runs hold on the slot's GPUs can be brought to the host; None before it is asked."""
        self._is_pausable = False
        """Whether the run, which cannot be saved, has room to be suspended in memory."""
        self._most_bytes = 0
        """The most memory that a run has had for itself when it was suspended, GPU memory aside."""
        self._has_gpus = order.gpu_devices is None or bool(order.gpu_devices)
        self._begin_s = 0.0
        """Seconds from the start of the last new process to its first report."""
        self._empty_s = time.monotonic()
        self._ends: list[RunEnd] = []
        self._ended: set[RunKey] = set()
        self._left: dict[RunKey, KeptReports] = {}
        """What ended runs have reported, until their end is known."""
        self._printed: dict[RunKey, RunLog] = {}
        """What they have printed, for as long."""
        self._sends_output = False
        self._told: SlotStatus | None = None
        self._beat_s = self._losses_s = 0.0

    @property
    def _held(self) -> SlotRun | None:
        return self._run

    @property
    def _aside(self) -> tuple[int, ...]:
        return self._paused.watched

    def _decode(self, data: str) -> Wanted:
        return Wanted.decode(data)

    def _due_s(self, zygote: Zygote) -> float:
        run = self._run
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
            self._sends_output = wish.known_output is not None
            for trial, number, size in wish.known_output or ():
                log = self._log_of((trial, number))
                if log is not None:
                    log.known(size)
            self._paused.likely = wish.likely
            self._paused.let_go(self._paused.keys if wish.memory_bytes == 0 else wish.let_go)
            self._told = None  # who asks is answered

    # What to do.

    def _advance(self, zygote: Zygote) -> TaskEnd | None:
        self._announce("the slot is up")
        self._paused.poll()
        run = self._run
        if run is not None and run.is_over and self._is_out(run, zygote) and self._is_saved(run):
            self._left[run.key] = run.reports.losses
            self._printed[run.key] = run.printed
            end = run.end()
            self._ends.append(dataclasses.replace(end, output=run.printed.size) if self._sends_output else end)
            self._ended.add(run.key)
            self._is_pausable = False
            self._begin_s = run.begin_s or self._begin_s
            if run.is_paused:
                own = self._paused.add(run, descendants.processes(zygote.pid, self._paused.pids))
                if not run.off_gpu:
                    self._most_bytes = max(self._most_bytes, own)
                if self._wanted.memory_bytes == 0:
                    self._paused.let_all_go()
            self._empty_s = time.monotonic()
            self._run = run = None
        if run is None:
            return self._fill(zygote)
        if run.pid is None and not run.is_over:
            self._start(run, zygote)
        if run.pid is not None and not run.is_over:
            self._press(run, zygote)
        return None

    def _fill(self, zygote: Zygote) -> TaskEnd | None:
        """The slot is empty: it ends, or takes the run that is wanted."""
        wanted = self._wanted
        if wanted.leave or self._kill_grace_s is not None:
            self._paused.let_all_go()
        if self._kill_grace_s is not None:
            return self._end("TASK_KILLED", "killed on request")
        if wanted.leave:
            is_known = not self._ends or time.monotonic() - self._empty_s >= KNOWN_TIMEOUT_S
            return self._end("TASK_FINISHED", "nothing more to run") if is_known else None
        if zygote.failure:
            return self._end("TASK_FAILED", zygote.failure)
        if wanted.run is not None and wanted.run.key not in self._ended:
            monitor = RunMonitor(self._gpus)
            self._run = self._paused.take(wanted.run, monitor)
            if self._run is None and not self._gpus_await_end:
                if self._paused:
                    self._paused.make_room(self._wanted.memory_bytes, _shared_bytes(zygote), self._most_bytes)
                self._run = SlotRun(wanted.run, self._channel.sandbox, monitor)
                self._start(self._run, zygote)
        return None

    @property
    def _going_on(self) -> RunKey | None:
        """The suspended run whose process is to go on next; None if that is none of those here."""
        wanted = self._wanted.run
        last = None if wanted is None else (wanted.trial.number, wanted.trial.run - 1)
        return last if last in self._paused.keys else None

    @property
    def _gpus_await_end(self) -> bool:
        """Whether a process that did not get its GPU memory back, and may still hold some, is not gone yet."""
        return bool(self._gpus) and self._paused.has_dying(GPU_RELEASE_TIMEOUT_S)

    @property
    def _may_stay(self) -> bool:
        """Whether processes of suspended runs may stay in the slot."""
        wanted = self._wanted
        is_wanted = wanted.memory_bytes > 0 and not (wanted.leave or wanted.stop) and self._kill_grace_s is None
        return is_wanted and (not self._has_gpus or self._can_offload)

    @property
    def _can_offload(self) -> bool:
        if self._has_driver is None:
            why_not = cuda_checkpoint.why_not() if self._gpus else "NVIDIA's library does not show the slot's GPUs"
            if why_not:
                logger.warning("suspended trials go by their checkpoints, not in memory: %s", why_not)
            self._has_driver = not why_not
        return self._has_driver

    def _is_out(self, run: SlotRun, zygote: Zygote) -> bool:
        """Whether nothing of a run that is over runs any more; to be called until that is so."""
        spared = self._paused.pids
        if not run.is_paused:
            return self._is_clear(run, zygote, spared)
        if self._gpus and not self._is_off_gpus(run, zygote):
            return False
        # They stand still at once, unless the machine is busy.
        is_still = any(descendants.stop(zygote.pid, spared) is not None for _ in range(2))
        if is_still:
            self._look(run, zygote)
        return is_still

    def _is_off_gpus(self, run: SlotRun, zygote: Zygote) -> bool:
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
            if not self._has_place(run, zygote):
                run.leave_memory()
                return False
            pids = {process.pid for process in descendants.processes(zygote.pid, self._paused.pids)}
            # In a container the driver's list may have other ids; then it is the trial's own process.
            run.leave_gpus(pids & self._gpus.bytes_by_process().keys() or {run.pid or 0})
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

    def _has_place(self, run: SlotRun, zygote: Zygote) -> bool:
        """Whether the process of a run that makes place, and can be saved, stays in the slot.

        What it holds on GPUs has to fit into the host's memory, for which others are let go. Unless it was asked for,
        it has to be back sooner than a new process would report, too, and the driver must not have failed yet.
        """
        if not self._may_stay or not self._has_gpus:
            return self._may_stay
        processes = descendants.processes(zygote.pid, self._paused.pids)
        held = run.monitor.gpu_bytes(processes)
        own, limit = sum(map(own_bytes, processes)), self._wanted.memory_bytes
        self._most_bytes = max(self._most_bytes, own)
        kept = self._going_on
        used, coming = own + _shared_bytes(zygote), held + (0 if kept else self._most_bytes)
        begin_s = run.begin_s or max(self._begin_s, 0.0 if run.is_continued else run.age_s)
        why_not = ""
        if held and not self._order.always_stay:
            if self._paused.refused:
                why_not = "the GPU's driver has failed before"
            elif held * MOVE_S_PER_BYTE > begin_s:
                why_not = (
                    f"it holds {held / (1 << 30):.1f} GiB on GPUs, and a new process reports after {begin_s:.1f} s"
                )
        if not why_not and not self._paused.has_room(limit, used, coming, kept):
            why_not = "there is no room"
        if why_not:
            logger.info("%s does not stay in memory: %s", run, why_not)
            return False
        self._paused.make_room(limit, used, coming, kept)
        return True

    def _look(self, run: SlotRun, zygote: Zygote) -> None:
        """Looks what a run uses, and whether memory is short."""
        processes = descendants.processes(zygote.pid, self._paused.pids)
        run.monitor.look(processes)
        may_pause = self._may_stay and run.reports.training and not (run.reports.preemptible or self._has_gpus)
        if self._paused or may_pause:  # to ask for a process' own memory takes milliseconds
            own, limit = sum(map(own_bytes, processes)), self._wanted.memory_bytes
            used = own + _shared_bytes(zygote)
            if self._paused:
                self._paused.make_room(limit, used, kept=self._going_on)
            self._is_pausable = may_pause and self._paused.has_room(limit, used, max(own, self._most_bytes))

    def _start(self, run: SlotRun, zygote: Zygote) -> None:
        """Gets its process from the zygote, once that is ready and nothing of an earlier run is left."""
        answer = zygote.take_answer()
        if isinstance(answer, int):
            run.started(answer)
            self._channel.started(answer)
        elif answer is not None:
            run.not_started(f"its process could not be started: {answer}", failed=True)
        elif zygote.failure:
            run.not_started("its slot has no zygote any more")
        elif not self._is_wanted(run):
            if not zygote.asked:
                run.not_started("it was not wanted any more before it began")
            elif self._wanted.leave or self._kill_grace_s is not None:
                zygote.kill()
        else:
            try:
                is_prepared = run.is_prepared(self._folder, self._given, self._order.environment)
            except Exception as error:
                run.not_started(f"its working folder could not be made: {error}", failed=True)
                return
            is_asked_next = is_prepared and zygote.ready and not zygote.asked
            if is_asked_next and descendants.clear(zygote.pid, self._paused.pids):
                zygote.ask(*run.request(self._order.script))

    def _press(self, run: SlotRun, zygote: Zygote) -> None:
        """Makes a run end that is to make place. One that cannot be suspended is left alone as long as that may be."""
        reports = run.reports
        if self._kill_grace_s is not None:
            run.terminate(self._kill_grace_s, "its slot was killed")
        elif self._wanted.leave and reports.training and not reports.preemptible:
            run.terminate(KILL_GRACE_S, "its slot had to end, and it cannot be suspended")
        elif self._wanted.stop and not reports.preemptible and not self._is_wanted(run):
            run.terminate(KILL_GRACE_S, "its trial is stopped, and it cannot be suspended")
        elif run.asked_s is None and (
            self._wanted.leave or ((reports.preemptible or self._is_pausable) and not self._is_wanted(run))
        ):
            run.suspend(self._order.suspend_timeout_s, stays=self._has_place(run, zygote))
        run.kill_if_due()

    def _is_saved(self, run: SlotRun) -> bool:
        """Whether what a run has written is brought back; a slot that is killed does not wait long for that."""
        assert run.over_s is not None
        is_late = self._kill_grace_s is not None and time.monotonic() - run.over_s > KILLED_SAVE_S
        return run.is_saved() or is_late

    def _is_wanted(self, run: SlotRun) -> bool:
        wanted = self._wanted
        return self._kill_grace_s is None and wanted.run is not None and wanted.run.key == run.key and not wanted.leave

    # What to say.

    def _tell(self, zygote: Zygote) -> None:
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
                self._look(run, zygote)
                self._send_output(run.key, run.printed, PIECES_LIMIT)
        status = self._status()
        news = dataclasses.replace(status, step=0, usage=Usage())
        if is_due or news != self._told:
            self._told = news
            self._channel.send(status.encode())

    def _concluded(self, end: TaskEnd) -> TaskEnd:
        for reports in self._left.values():
            reports.known(max(reports.oldest, reports.count - LOSSES_LIMIT))
        last = tuple(self._next_losses(key, reports) for key, reports in self._left.items() if reports.has_unsent)
        status = dataclasses.replace(self._status(), losses=last, output=self._last_output()).encode()
        self._channel.send(status)
        return dataclasses.replace(end, data=status)

    def _reports_of(self, key: RunKey) -> KeptReports | None:
        run = self._run
        return run.reports.losses if run is not None and run.key == key else self._left.get(key)

    def _log_of(self, key: RunKey) -> RunLog | None:
        run = self._run
        return run.printed if run is not None and run.key == key else self._printed.get(key)

    def _send_output(self, key: RunKey, log: RunLog, count: int | None = None) -> None:
        """Sends so many pieces of a run's output at most; None: all that has not been sent of one that has ended."""
        if not self._sends_output:
            return
        while pieces := log.take(count or PIECES_LIMIT, has_ended=count is None):
            for piece in pieces:
                self._channel.send(self._output_message(key, piece).encode())
            if count is not None:
                return

    def _last_output(self) -> tuple[TrialOutput, ...]:
        if not self._sends_output:
            return ()
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
            zygote_ready=self._zygote.ready,
            paused=self._paused.keys,
            unsaved=self._paused.unsaved,
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


def _shared_bytes(zygote: Zygote) -> int:
    """Memory that all processes of a slot share: what the zygote has imported."""
    with contextlib.suppress(psutil.NoSuchProcess):  # it is being replaced
        return int(psutil.Process(zygote.pid).memory_info().rss)
    return 0
