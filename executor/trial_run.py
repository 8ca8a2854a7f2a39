"""One run of a trial in a slot: its process, its files and pipes, its end."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import psutil

from dike.trial import spec as specs
from executor import cuda_checkpoint, descendants
from executor.channel import TaskChannel
from executor.forked import ForkedProcess
from executor.limits import Group, Groups
from executor.monitor import RunMonitor
from executor.outputs import OUTPUT_DIR_VARIABLE, Outputs, Stamp
from executor.process import children, describe_exit, keep_tails, tail_of
from executor.run_log import RunLog
from executor.trial_messages import RunEnd, RunKey, TrialRun
from executor.trial_reports import RunReports
from executor.zygote import ForkRequest

logger = logging.getLogger(__name__)

REPORT_FD, CONTROL_FD = 3, 4
"""Where a trial's process finds its pipes."""
READ_BYTES = 1 << 16
IDLE_CPUS = 0.01
"""A run that keeps fewer CPUs busy than this does nothing: threads that wait wake up now and then."""


def _copy_if_new(source: str, target: str) -> str:
    return target if os.path.exists(target) else str(shutil.copy2(source, target))


class Background:
    """Something that is done in a thread.

    Args:
        work: what.

    Attributes:
        begin_s, over_s: when it began and when it was over, on the monotonic clock; `over_s` is None before.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self.begin_s = time.monotonic()
        self.over_s: float | None = None
        self._work = work
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._do, name="work for a run", daemon=True)
        self._thread.start()

    def is_over(self) -> bool:
        """Whether it is done.

        Raises:
            Exception: if that is how it ended.
        """
        if self.over_s is None:
            return False
        if self._error is not None:
            raise self._error
        return True

    def _do(self) -> None:
        try:
            self._work()
        except Exception as error:
            self._error = error
        finally:
            self.over_s = time.monotonic()


class SlotRun:
    """A run, from the decision to start it until nothing of it is left.

    It waits until a zygote has forked it, then it is alive, then over. One that is suspended in memory is over while
    its process stays; the trial's next run may have that (`executor.paused`). All methods belong to one thread.

    Args:
        order: what to run.
        channel: the slot's task; its sandbox gets what the run prints, a file of its own, and its working folder.
        monitor: watches it.
        before: the trial's last run, whose process, files and pipes it has from now on; None for a new process.

    Attributes:
        channel, monitor: those given.
        is_continued: whether it goes on in the process of the run before.
        reports: what it has reported.
        printed: what it has printed.
        asked_s: when it was first asked to end; None before.
        is_to_stay: whether it was asked to stay in memory then, and still may.
        begin_s: seconds from the start of its process to the first report; None before that.
        exceeded: which limit of its control group it had exceeded when that was last looked at, in words.
        off_gpu: its processes whose GPU memory is on the host meanwhile, or on its way there.
        offload: brings it there; None before.
    """

    def __init__(
        self, order: TrialRun, channel: TaskChannel, monitor: RunMonitor, before: SlotRun | None = None
    ) -> None:
        sandbox = channel.sandbox
        self.channel = channel
        self.monitor = monitor
        self.reports = RunReports(order.trial)
        self.asked_s: float | None = None
        self.is_to_stay = False
        self.begin_s: float | None = None
        self.off_gpu: tuple[int, ...] = ()
        self.offload: Background | None = None
        self.is_continued = before is not None
        self._order = order
        self._workspace = sandbox / f"trial-{order.trial.number}"
        self._preparation: Background | None = None
        self._saving: Background | None = None
        self._can_report = True
        self._given_up_s: float | None = None
        self._paused_s: float | None = None
        self._terminated = False
        self._timed_out = ""
        self._active_s = time.monotonic()
        self._printed_bytes = 0
        self._stopped = False
        self._reason = ""
        self._failure = ""
        self._since_s = time.monotonic()
        self._outputs: Outputs | None = None
        self._process: ForkedProcess | None = None
        self.exceeded = ""
        self._group: Group | None = None
        if before is not None:
            self._take_over(before)
            return
        self._log = sandbox / f"trial-{order.trial.number}-run-{order.trial.run}.out"
        self.printed = RunLog(self._log)
        with contextlib.ExitStack() as opened:
            self._output = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            opened.callback(os.close, self._output)
            self._report_reader, self._report_writer = os.pipe()
            opened.callback(os.close, self._report_reader)
            opened.callback(os.close, self._report_writer)
            self._control_reader, self._control_writer = os.pipe()
            opened.pop_all()
        os.set_blocking(self._report_reader, False)
        os.set_blocking(self._control_writer, False)

    def _take_over(self, before: SlotRun) -> None:
        self._outputs, self._process, self._group = before._outputs, before._process, before._group
        self._report_reader, self._control_writer = before._report_reader, before._control_writer
        self._log, self.printed = before._log, RunLog(before._log, before.printed.end)
        self.begin_s = before.begin_s

    def __str__(self) -> str:
        return "trial {}, run {}".format(*self.key)

    @property
    def key(self) -> RunKey:
        return self._order.key

    @property
    def limit_s(self) -> float | None:
        """Seconds that it may run; None for no limit."""
        return self._order.limit_s

    @property
    def pid(self) -> int | None:
        """The supervisor of its process, which leads their process group; None while it waits."""
        return None if self._process is None else self._process.pid

    @property
    def processes(self) -> list[psutil.Process]:
        """All that belongs to it, its supervisor aside."""
        return [] if self.pid is None or self.has_died else descendants.processes(self.pid)

    @property
    def family(self) -> list[psutil.Process]:
        """The same, and its supervisor."""
        if self.pid is None or self.has_died:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            return [psutil.Process(self.pid), *self.processes]
        return []

    def stand_still(self) -> bool:
        """Stops its processes, not the supervisor; to be called until it says that all stand still."""
        return self.pid is None or self.has_died or descendants.stop(self.pid)

    @property
    def age_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._since_s

    @property
    def over_s(self) -> float | None:
        """When it was over, on the monotonic clock; None before."""
        if self._process is None:
            return self._given_up_s
        return self._process.over_s if self._paused_s is None else self._paused_s

    @property
    def is_over(self) -> bool:
        return self.over_s is not None

    @property
    def is_paused(self) -> bool:
        """Whether it is over, suspended in memory."""
        return self._paused_s is not None

    @property
    def has_died(self) -> bool:
        """Whether its process has ended."""
        return self._process is not None and self._process.over_s is not None

    @property
    def due_s(self) -> float | None:
        """When it will be killed unless it ends before, on the monotonic clock; None if that is not planned."""
        return None if self._process is None else self._process.due_s

    @property
    def watched(self) -> tuple[int, ...]:
        """File descriptors that can be read when there is something to `poll`."""
        if self._process is None or self.has_died:
            return ()
        if self.is_paused:
            return self._process.watched
        return (*self._process.watched, self._report_reader) if self._can_report else self._process.watched

    def is_prepared(self, folder: Path, given: Mapping[str, Stamp], environment: Mapping[str, str]) -> bool:
        """Whether it has its own working folder: a copy of what has travelled, with what its trial wrote before.

        To be called until that is so; made in a thread, for it may take long.

        Args:
            folder: the unpacked bundle.
            given: what is in there (`local_files`).
            environment: of the slot's processes.

        Raises:
            OSError: if the folder cannot be made.
        """
        spec = self._order.trial
        if self._outputs is None:
            self._outputs = outputs = Outputs(self._workspace, spec.folder, spec.search, spec.run, environment)

            def prepare() -> None:
                # What an earlier run has left there could not be brought back.
                shutil.copytree(folder, self._workspace, dirs_exist_ok=True, copy_function=_copy_if_new)
                outputs.restore(given)

            self._preparation = Background(prepare)
        assert self._preparation is not None
        return self._preparation.is_over()

    def is_saved(self) -> bool:
        """Whether what it has written is brought back, after its end; to be called until that is so."""
        if self._preparation is not None:
            with contextlib.suppress(Exception):  # told already
                if not self._preparation.is_over():
                    return False
        if self._process is None or self._outputs is None:
            return True
        if self._saving is None:
            self._saving = Background(self._outputs.save)
        try:
            return self._saving.is_over()
        except Exception:
            logger.exception("what %s has written is not brought back", self)
            return True

    def request(self, script: str, groups: Groups) -> tuple[ForkRequest, tuple[int, int, int, int]]:
        """What a zygote is to be asked for, and the file descriptors that go with it.

        Args:
            script: path of the script in the working folder.
            groups: makes the control group that the process enters.
        """
        trial = dataclasses.replace(self._order.trial, report_fd=REPORT_FD, control_fd=CONTROL_FD)
        changes = {specs.VARIABLE: trial.dumps(), OUTPUT_DIR_VARIABLE: str(self._workspace)}
        self._group = self._group or groups.make()
        request = ForkRequest(
            Path(script),
            self._order.arguments,
            self._workspace,
            changes,
            is_supervised=True,
            groups=self._group.folders,
            processes=self._group.most_processes,
        )
        return request, (self._output, self._output, self._report_writer, self._control_reader)

    def started(self, pid: int) -> None:
        """Its process exists, and its supervisor is a child of ours."""
        self._process = ForkedProcess(pid)
        self.channel.started(pid)
        self._since_s = self._active_s = self._process.since_s
        self._close_its_ends()

    def not_started(self, reason: str, *, failed: bool = False) -> None:
        """It is over without ever having begun.

        Args:
            reason: why.
            failed: whether that is a failure of the run.
        """
        self._stopped, self._reason = True, reason
        self._failure = reason if failed else ""
        self._given_up_s = time.monotonic()
        self._close_its_ends()

    @property
    def idle_s(self) -> float:
        """Seconds since it was last seen to report, to print or to compute."""
        return time.monotonic() - self._active_s

    def look(self) -> None:
        """Looks what it uses, whether that is more than it may, and whether it does anything."""
        self._look_at_limits()
        self.monitor.look(self.processes)
        now, printed = self.monitor.now, self.printed.size
        if (now.cpu or 0.0) >= IDLE_CPUS or (now.gpu_utilisation or 0.0) > 0 or printed != self._printed_bytes:
            self._active_s = time.monotonic()
        self._printed_bytes = printed

    def _look_at_limits(self) -> None:
        if self._group is not None:
            self.exceeded = self._group.exceeded()

    def fail(self, grace_s: float, why: str) -> None:
        """Ends it as a failure, as `terminate` does, for what it has done."""
        if not self._terminated:
            self._failure = why
        self.terminate(grace_s, why)

    def time_out(self, grace_s: float, why: str) -> None:
        """Ends it for good, as a failure.

        Args:
            grace_s: seconds between SIGTERM and SIGKILL.
            why: what is said of it.
        """
        if not self._terminated:
            self._timed_out = why
        self.terminate(grace_s, why)

    def poll(self) -> None:
        """Takes in what it has reported, and its end."""
        process = self._process
        if process is None or process.over_s is not None:
            return
        process.poll()
        if self.is_paused:
            return
        if process.over_s is not None and process.usage is not None:
            busy_s = process.usage.ru_utime + process.usage.ru_stime
            seconds = max(process.over_s - process.since_s, 1e-3)
            self.monitor.ended(process.usage.ru_maxrss << 10, busy_s / seconds)
        checkpoint = self.reports.checkpoint
        try:
            while data := os.read(self._report_reader, READ_BYTES):
                self.reports.feed(data)
                self._active_s = time.monotonic()
            self._can_report = False
        except BlockingIOError:
            pass  # that is all for now
        if self.begin_s is None and self.reports.last and not self.is_continued:
            self.begin_s = self.age_s
        if self._outputs is not None and self.reports.checkpoint != checkpoint:
            self._outputs.save_soon()
        if self.reports.paused and process.over_s is None and self.is_to_stay:
            self._paused_s = time.monotonic()
            process.relieve()

    def suspend(self, timeout_s: float, *, stays: bool = False) -> None:
        """Asks it to save its state and end; asks once.

        Args:
            timeout_s: it is killed if it has not ended by then, unless it cannot be saved.
            stays: whether its process is to stay instead, and wait to be stopped.
        """
        if self.asked_s is not None or self._process is None:
            return
        self.asked_s, self.is_to_stay = time.monotonic(), stays
        if self.reports.preemptible:
            self._process.limit(timeout_s)
        self._reason = f"it did not save and end within {timeout_s:g} s of the request to suspend"
        with contextlib.suppress(BrokenPipeError):
            os.write(self._control_writer, b"pause\n" if stays else b"suspend\n")

    def leave_gpus(self, holding: Collection[int]) -> None:
        """It is suspended; what its processes hold on GPUs is brought to the host's memory, in a thread.

        Args:
            holding: ids of all processes that hold GPU memory, by the driver's list.
        """
        pids = [process.pid for process in self.processes]
        # In a container the driver may know them by other ids; then the trial's own process is taken.
        assert self.pid is not None
        self.off_gpu = tuple(pid for pid in pids if pid in holding) or tuple(children(self.pid)[:1])
        self.offload = Background(functools.partial(cuda_checkpoint.to_host, self.off_gpu))

    def leave_memory(self) -> None:
        """It is suspended, and its process does not stay after all."""
        assert self._process is not None
        self._paused_s = None
        self.is_to_stay = False
        self._reason = "its process does not stay in memory after all"
        if not self.has_died:
            self._process.terminate(0.0)

    def go_on(self) -> None:
        """Has the process go on as this run, once it is continued."""
        assert self._outputs is not None
        self._outputs.belongs_to(self._order.trial.run)
        with contextlib.suppress(BrokenPipeError):  # it was killed
            os.write(self._control_writer, f"continue {self._order.trial.run}\n".encode())

    def terminate(self, grace_s: float, reason: str) -> None:
        """Ends it: SIGTERM at the first call, SIGKILL `grace_s` seconds later."""
        if self._terminated or self._process is None:
            return
        self.asked_s = self.asked_s or time.monotonic()
        self._terminated = self._stopped = True
        self._reason = reason
        self._process.terminate(grace_s)

    def kill_if_due(self) -> None:
        """Kills it if its time is up."""
        if self._process is not None and self._process.kill_if_due():
            logger.warning("%s is killed: %s", self, self._reason)
            self._stopped = True

    def end(self) -> RunEnd:
        """How it ended; to be called once, when nothing of it runs and all is saved."""
        assert self.over_s is not None
        self._look_at_limits()
        if not self.is_paused:
            self.close()
        reports, process = self.reports, self._process
        if not self.is_paused:
            reports.settle()
        exit_code = None if process is None else process.exit_code
        how = describe_exit(None) if process is None else process.describe_end("--slot-mem")
        failure = self._failure or (self.exceeded if exit_code else "")
        if process is not None and exit_code is None and not self.is_paused:
            failure = "its supervisor was not a child of the slot's process, so nobody knows its exit code"
        outcome, message = reports.outcome(exit_code, how, self._reason if self._stopped else "")
        if failure:
            outcome, message = "failed", failure
        elif self._timed_out and outcome != "finished":
            outcome, message = "timed_out", self._timed_out
        trial, number = self.key
        return RunEnd(
            trial=trial,
            run=number,
            outcome=outcome,
            exit_code=exit_code,
            checkpoint=reports.checkpoint,
            step=reports.checkpoint_step,
            message=message,
            tail=tail_of(self._log),
            log=str(self._kept_log() if outcome in ("failed", "bad_input", "timed_out") else self._log),
            last=reports.last,
            preemptible=reports.was_preemptible,
            suspend_s=None if self.asked_s is None else time.monotonic() - self.asked_s,
            seconds=0.0 if process is None else self.over_s - self._since_s,
            usage=self.monitor.peak,
            reports=reports.losses.count,
        )

    def close(self) -> None:
        """Lets go of its pipes and of its working folder, nothing of it being left."""
        os.close(self._report_reader)
        os.close(self._control_writer)
        if self._group is not None:
            self._group.remove()
        if self._process is not None:
            self._process.close()
            self.channel.ended(self._process.pid)
        # A slot that is killed does not wait for all that is under way there.
        is_in_use = any(work is not None and work.over_s is None for work in (self._preparation, self._saving))
        if not is_in_use and (self._outputs is None or not self._outputs.left_behind):
            shutil.rmtree(self._workspace, ignore_errors=True)

    def _kept_log(self) -> Path:
        """Where its output is, or the end of it: beside the trial's checkpoints, if that can be."""
        trial = self._order.trial
        kept = Path(trial.folder, f"run-{trial.run}.log")
        return kept if keep_tails(trial.folder, {self._log: kept}) else self._log

    def _close_its_ends(self) -> None:
        for descriptor in (self._output, self._report_writer, self._control_reader):
            os.close(descriptor)
