"""One run of a trial in a slot: its process, files, pipes and end."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import posixpath
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import psutil

from dike.trial import spec as specs
from dike.trial.spec import step_of_checkpoint
from executor import cuda_checkpoint, descendants
from executor.channel import TaskChannel
from executor.forked import ForkedProcess
from executor.limits import ControlGroup, ControlGroups
from executor.mirror import PATIENCE_S, Mirror, RunFolder, Writer
from executor.monitor import RunMonitor
from executor.outputs import OUTPUT_DIR_VARIABLE, Outputs, Stamp
from executor.process import children, describe_exit, read_tail, save_tails
from executor.run_log import RunLog
from executor.run_phases import IN_MEMORY, LEAVING, TRANSITIONS, WITH_PROCESS, Event, Phase
from executor.trial_messages import RunEnd, RunKey, TrialRun
from executor.trial_reports import RunReports
from executor.zygote import ForkRequest

logger = logging.getLogger(__name__)

REPORT_FD, CONTROL_FD = 3, 4
"""File descriptors of the pipes in a trial's process."""
READ_BYTES = 1 << 16
IDLE_CPUS = 0.01
"""A run that keeps fewer CPUs busy is idle: waiting threads wake up now and then."""


def _copy_if_missing(source: str, target: str) -> str:
    return target if os.path.exists(target) else str(shutil.copy2(source, target))


class BackgroundTask:
    """Work in a thread of its own.

    Attributes:
        started_at_s, ended_at_s: monotonic times; `ended_at_s` is None before the end.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self.started_at_s = time.monotonic()
        self.ended_at_s: float | None = None
        self._work = work
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._do, name="work for a run", daemon=True)
        self._thread.start()

    def is_done(self) -> bool:
        """Whether the work has ended.

        Raises:
            Exception: that of the work.
        """
        if self.ended_at_s is None:
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
            self.ended_at_s = time.monotonic()


class SlotRun:
    """A run, from the decision to start it until nothing of it is left.

    Its phase says what it does (`executor.run_phases`). The trial's next run may take over the process, files and pipes
    of a paused run (`executor.paused`). All methods belong to one thread.

    Args:
        order: what to run.
        channel: the slot's task; its sandbox gets the run's output file and working folder.
        monitor: monitors it.
        previous: the trial's paused run, whose process, files and pipes it takes over; None for a new process.
        folder: how to reach the trials' folders; None if this machine sees them.

    Attributes:
        channel, monitor: those given.
        phase: its phase.
        is_resumed: whether it has taken over the previous run's process.
        reports: its reports.
        printed: its output.
        end_requested_at_s: monotonic time of the first request to suspend or end; None before.
        startup_s: seconds from the start of its process to the first report; None before that.
        exceeded_limit: the limit of its control group that it had exceeded at the latest check; empty if none.
        offloaded_pids: processes whose GPU memory is on the host, or on its way there.
        offload: moves it there; None before.
    """

    def __init__(
        self,
        order: TrialRun,
        channel: TaskChannel,
        monitor: RunMonitor,
        previous: SlotRun | None = None,
        folder: RunFolder | None = None,
    ) -> None:
        sandbox = channel.sandbox
        self.channel = channel
        self.monitor = monitor
        self._copied: Mirror | None = None
        """Mirror of the other trial's folder whose checkpoint it resumes from."""
        if previous is None:
            self._mirror = Mirror.of(folder, order.trial.folder, sandbox)
            if order.trial.copies:
                other = posixpath.dirname(order.trial.resume_from or "")
                self._copied = Mirror.of(folder, other, sandbox, reader=order.trial.folder)
        else:
            self._mirror = previous._mirror
        self._pushed = (order.trial.resume_from, step_of_checkpoint(order.trial.resume_from or ""))
        order = self._with_local_paths(order)
        self.reports = RunReports(order.trial)
        self.end_requested_at_s: float | None = None
        self.phase = Phase.PREPARING if previous is None else Phase.RUNNING
        self.startup_s: float | None = None
        self.offloaded_pids: tuple[int, ...] = ()
        self.offload: BackgroundTask | None = None
        self.is_resumed = previous is not None
        self._order = order
        self._workspace = sandbox / f"trial-{order.trial.number}"
        self._folder_task: BackgroundTask | None = None
        self._save_task: BackgroundTask | None = None
        self._is_report_pipe_open = True
        self._ended_at_s: float | None = None
        self._timeout_reason = ""
        self._active_at_s = time.monotonic()
        self._printed_bytes = 0
        self._was_stopped = False
        self._is_push_missing = False
        self._stop_reason = ""
        self._failure_reason = ""
        self._started_at_s = time.monotonic()
        self._outputs: Outputs | None = None
        self._process: ForkedProcess | None = None
        self.exceeded_limit = ""
        self._group: ControlGroup | None = None
        if previous is not None:
            self._take_over_process(previous)
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

    def _take_over_process(self, previous: SlotRun) -> None:
        self._outputs, self._process, self._group = previous._outputs, previous._process, previous._group
        self._report_reader, self._control_writer = previous._report_reader, previous._control_writer
        self._log, self.printed = previous._log, RunLog(previous._log, previous.printed.end)
        self.startup_s = previous.startup_s

    def __str__(self) -> str:
        return "trial {}, run {}".format(*self.key)

    def _with_local_paths(self, order: TrialRun) -> TrialRun:
        if self._mirror is None:
            return order
        checkpoint = order.trial.resume_from
        local = None if checkpoint is None else (self._copied or self._mirror).to_local(checkpoint)
        trial = dataclasses.replace(order.trial, folder=str(self._mirror.local), resume_from=local)
        return dataclasses.replace(order, trial=trial)

    @property
    def key(self) -> RunKey:
        return self._order.key

    @property
    def checkpoint(self) -> tuple[str | None, int]:
        """The trial's newest checkpoint, as the framework can name it to other agents, and its step."""
        if self._mirror is not None:
            return self._pushed
        return self.reports.checkpoint, self.reports.checkpoint_step

    @property
    def limit_s(self) -> float | None:
        return self._order.limit_s

    @property
    def pid(self) -> int | None:
        """Id of the supervisor of its process, which leads their process group; None before the fork."""
        return None if self._process is None else self._process.pid

    @property
    def processes(self) -> list[psutil.Process]:
        """Its processes, without the supervisor."""
        return [] if self.pid is None or self.has_died else descendants.processes(self.pid)

    @property
    def process_tree(self) -> list[psutil.Process]:
        if self.pid is None or self.has_died:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            return [psutil.Process(self.pid), *self.processes]
        return []

    def freeze(self) -> bool:
        """Sends SIGSTOP to its processes, not to the supervisor; returns whether all are frozen. To be repeated."""
        return self.pid is None or self.has_died or descendants.freeze(self.pid)

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._started_at_s

    @property
    def ended_at_s(self) -> float | None:
        """Monotonic time of its end or pause; None before."""
        return self._ended_at_s

    @property
    def has_ended(self) -> bool:
        """Whether it has ended or paused."""
        return self.phase in LEAVING

    @property
    def is_pausing(self) -> bool:
        """Whether its process is to stay in memory, or does."""
        return self.phase is Phase.PAUSING or self.is_paused

    @property
    def is_paused(self) -> bool:
        return self.phase in IN_MEMORY

    def may(self, event: Event) -> bool:
        """Whether this can happen now."""
        return (self.phase, event) in TRANSITIONS

    def happened(self, event: Event) -> None:
        """Enters the next phase.

        Raises:
            RuntimeError: this cannot happen in its phase.
        """
        if not self.may(event):
            raise RuntimeError(f"{self} is {self.phase}, and '{event}' has happened")
        before, self.phase = self.phase, TRANSITIONS[self.phase, event]
        logger.debug("%s: %s, %s -> %s", self, event, before, self.phase)
        if self.phase not in LEAVING:
            self._ended_at_s = None
        elif self._ended_at_s is None:
            self._ended_at_s = time.monotonic()
        self.validate()

    def validate(self) -> None:
        """Checks what holds in each phase.

        Raises:
            RuntimeError: something does not hold, which is a defect.
        """
        has_process = self._process is not None and self._process.ended_at_s is None
        problem = ""
        if self.phase is Phase.PREPARING and self._process is not None:
            problem = "has a process"
        elif self.phase in (Phase.EXITED, Phase.CLEARED, Phase.DONE) and has_process:
            problem = "has a process that runs"
        elif self.phase in (*WITH_PROCESS, *IN_MEMORY) and self._process is None:
            problem = "has no process"
        elif (self.phase in LEAVING) != (self._ended_at_s is not None):
            problem = f"has ended at {self._ended_at_s}"
        if problem:
            raise RuntimeError(f"{self} is {self.phase} and {problem}")

    @property
    def has_died(self) -> bool:
        """Whether its process has ended, also while it waited in memory."""
        return self._process is not None and self._process.ended_at_s is not None

    @property
    def deadline_s(self) -> float | None:
        """Monotonic time at which it is killed; None for no deadline."""
        return None if self._process is None else self._process.deadline_s

    @property
    def watched_fds(self) -> tuple[int, ...]:
        if self._process is None or self.has_died:
            return ()
        if self.is_paused:
            return self._process.watched_fds
        report_fds = (self._report_reader,) if self._is_report_pipe_open else ()
        return (*self._process.watched_fds, *report_fds)

    def prepare_folder(self, folder: Path, bundle_files: Mapping[str, Stamp], environment: Mapping[str, str]) -> bool:
        """Creates its working folder in a thread: a copy of the bundle, with the trial's earlier outputs.

        Returns whether it is complete; call it until it is.

        Raises:
            OSError: if the folder cannot be created.
        """
        spec = self._order.trial
        if self._outputs is None:
            after_save = None if self._mirror is None else self._push
            self._outputs = outputs = Outputs(
                self._workspace, spec.folder, spec.search, spec.run, environment, after_save
            )

            def prepare() -> None:
                for mirror in filter(None, (self._mirror, self._copied)):
                    mirror.pull()
                # The folder exists if an earlier run in this slot has left files there that could not be saved.
                shutil.copytree(folder, self._workspace, dirs_exist_ok=True, copy_function=_copy_if_missing)
                outputs.restore(bundle_files)

            self._folder_task = BackgroundTask(prepare)
        assert self._folder_task is not None
        return self._folder_task.is_done()

    def save_outputs(self) -> bool:
        """Saves its output files in a thread, after its end; returns whether that is done. Call it until it is."""
        if self._folder_task is not None:
            with contextlib.suppress(Exception):  # reported already
                if not self._folder_task.is_done():
                    return False
        if self._process is None or self._outputs is None:
            return True
        if self._save_task is None:
            self._save_task = BackgroundTask(self._outputs.save)
        try:
            return self._save_task.is_done()
        except Exception:
            logger.exception("the outputs of %s are not saved", self)
            return True

    def make_fork_request(
        self, script: str, groups: ControlGroups, gpu_memory: Mapping[str, str]
    ) -> tuple[ForkRequest, tuple[int, int, int, int]]:
        """Returns the request to the zygote, and the file descriptors to pass. Creates the control group.

        `gpu_memory` are the variables that limit its GPU memory (`gpu_memory_variables`).
        """
        trial = dataclasses.replace(self._order.trial, report_fd=REPORT_FD, control_fd=CONTROL_FD)
        changes = {specs.VARIABLE: trial.dumps(), OUTPUT_DIR_VARIABLE: str(self._workspace)}
        changes |= {} if self._mirror is None else self._mirror.environment
        changes |= gpu_memory
        self._group = self._group or groups.make()
        request = ForkRequest(
            Path(script),
            self._order.arguments,
            self._workspace,
            changes,
            is_supervised=True,
            groups=self._group.folders,
            processes=self._group.max_processes,
        )
        return request, (self._output, self._output, self._report_writer, self._control_reader)

    def adopt(self, pid: int) -> None:
        """Takes over the forked process, whose supervisor is a child of this one."""
        self._process = ForkedProcess(pid)
        self.channel.process_started(pid)
        self._started_at_s = self._active_at_s = self._process.started_at_s
        self._close_child_ends()
        self.happened(Event.FORKED)

    def cancel(self, reason: str, *, failed: bool = False) -> None:
        """Ends the run before it has a process; as failed, if `failed`."""
        self._was_stopped, self._stop_reason = True, reason
        self._failure_reason = reason if failed else ""
        self._close_child_ends()
        self.happened(Event.CANCELLED)

    @property
    def idle_s(self) -> float:
        """Seconds since it last reported, printed or used a CPU or GPU."""
        return time.monotonic() - self._active_at_s

    def sample_usage(self) -> None:
        """Updates its usage, exceeded limit and idle time."""
        self._check_limits()
        self.monitor.sample(self.processes)
        now, printed = self.monitor.latest, self.printed.size
        if (now.cpu or 0.0) >= IDLE_CPUS or self.monitor.is_gpu_busy or printed != self._printed_bytes:
            self._active_at_s = time.monotonic()
        self._printed_bytes = printed

    def _check_limits(self) -> None:
        if self._group is not None:
            self.exceeded_limit = self._group.exceeded_limit()

    def fail(self, grace_s: float, reason: str) -> None:
        """Ends it as `terminate` does, as failed."""
        if self.may(Event.STOP):
            self._failure_reason = reason
        self.terminate(grace_s, reason)

    def time_out(self, grace_s: float, reason: str) -> None:
        """Ends it as `terminate` does, as timed out."""
        if self.may(Event.STOP):
            self._timeout_reason = reason
        self.terminate(grace_s, reason)

    def poll(self) -> None:
        """Reads its reports; handles its end or pause."""
        process = self._process
        if process is None or process.ended_at_s is not None:
            return
        process.poll()
        if self.is_paused:
            return
        if process.ended_at_s is not None and process.usage is not None:
            busy_s = process.usage.ru_utime + process.usage.ru_stime
            seconds = max(process.ended_at_s - process.started_at_s, 1e-3)
            self.monitor.record_exit(process.usage.ru_maxrss << 10, busy_s / seconds)
        checkpoint = self.reports.checkpoint
        try:
            while data := os.read(self._report_reader, READ_BYTES):
                self.reports.feed(data)
                self._active_at_s = time.monotonic()
            self._is_report_pipe_open = False
        except BlockingIOError:
            pass
        if self.startup_s is None and self.reports.last and not self.is_resumed:
            self.startup_s = self.age_s
        if self._outputs is not None and self.reports.checkpoint != checkpoint:
            self._outputs.save_soon()
        if process.ended_at_s is not None:
            self.happened(Event.EXIT)
        elif self.reports.paused and self.may(Event.WAITS):
            process.clear_deadline()
            self.happened(Event.WAITS)

    def suspend(self, timeout_s: float, *, pause: bool = False) -> None:
        """Requests once that it saves its state and ends, or pauses: then it waits to be frozen.

        It is killed after `timeout_s`, if it can be checkpointed.
        """
        event = Event.PAUSE if pause else Event.SUSPEND
        if self._process is None or not self.may(event):
            return
        self.end_requested_at_s = time.monotonic()
        self.happened(event)
        if self.reports.preemptible:
            self._process.set_deadline(timeout_s)
        self._stop_reason = f"it did not save and end within {timeout_s:g} s of the request to suspend"
        with contextlib.suppress(BrokenPipeError):
            os.write(self._control_writer, b"pause\n" if pause else b"suspend\n")

    def offload_gpus(self, gpu_pids: Collection[int]) -> None:
        """Moves the GPU memory of its processes to the host, in a thread. The run must be paused.

        `gpu_pids` are the ids of all processes with GPU memory, by the driver.
        """
        pids = [process.pid for process in self.processes]
        # In a container the driver may list other ids; then the trial's main process is assumed.
        assert self.pid is not None
        self.offloaded_pids = tuple(pid for pid in pids if pid in gpu_pids) or tuple(children(self.pid)[:1])
        self.offload = BackgroundTask(functools.partial(cuda_checkpoint.move_to_host, self.offloaded_pids))

    def evict(self) -> None:
        """Kills its process instead of pausing it."""
        assert self._process is not None
        self._stop_reason = "its process was evicted"
        self.happened(Event.EVICT)
        if self.has_died:
            self.happened(Event.EXIT)
        else:
            self._process.terminate(0.0)

    def resume(self) -> None:
        """Has the paused process continue as this run, once it is unfrozen."""
        assert self._outputs is not None
        self._outputs.assign_to(self._order.trial.run, None if self._mirror is None else self._push)
        with contextlib.suppress(BrokenPipeError):  # killed meanwhile
            os.write(self._control_writer, f"continue {self._order.trial.run}\n".encode())

    def terminate(self, grace_s: float, reason: str) -> None:
        """Sends SIGTERM on the first call; SIGKILL follows after `grace_s` seconds."""
        if self._process is None or not self.may(Event.STOP):
            return
        self.end_requested_at_s = self.end_requested_at_s or time.monotonic()
        self._was_stopped = True
        self._stop_reason = reason
        self.happened(Event.STOP)
        self._process.terminate(grace_s)

    def kill_if_due(self) -> None:
        if self._process is not None and self._process.kill_if_due():
            logger.warning("%s is killed: %s", self, self._stop_reason)
            self._was_stopped = True
            self.happened(Event.DEADLINE)

    def finish(self) -> RunEnd:
        """Returns how it ended; closes it unless it is paused. To be called once, when all is saved."""
        self.happened(Event.SAVED)
        assert self.ended_at_s is not None
        self._check_limits()
        if not self.is_paused:
            self.close()
        reports, process = self.reports, self._process
        if not self.is_paused:
            reports.finish()
        exit_code = None if process is None else process.exit_code
        how = describe_exit(None) if process is None else process.describe_end("--slot-mem")
        failure = self._failure_reason or (self.exceeded_limit if exit_code else "")
        if process is not None and exit_code is None and not self.is_paused:
            failure = "its exit code is unknown: its supervisor was not a child of the slot's process"
        outcome, message = reports.outcome(exit_code, how, self._stop_reason if self._was_stopped else "")
        if failure:
            outcome, message = "failed", failure
        elif self._timeout_reason and outcome != "finished":
            outcome, message = "timed_out", self._timeout_reason
        trial, number = self.key
        return RunEnd(
            trial=trial,
            run=number,
            outcome=outcome,
            exit_code=exit_code,
            checkpoint=self.checkpoint[0],
            step=self.checkpoint[1],
            message=message,
            tail=read_tail(self._log),
            log=str(self._save_log() if outcome in ("failed", "bad_input", "timed_out") else self._log),
            last=reports.last,
            preemptible=reports.was_preemptible,
            suspend_s=None if self.end_requested_at_s is None else time.monotonic() - self.end_requested_at_s,
            seconds=0.0 if process is None else self.ended_at_s - self._started_at_s,
            usage=self.monitor.peak,
            reports=reports.losses.count,
        )

    def close(self) -> None:
        """Releases its pipes, control group and working folder. Nothing of it must be running."""
        os.close(self._report_reader)
        os.close(self._control_writer)
        if self._group is not None:
            self._group.remove()
        if self._process is not None:
            self._process.close()
            self.channel.process_ended(self._process.pid)
        # A killed slot does not wait for these.
        is_workspace_in_use = any(
            work is not None and work.ended_at_s is None for work in (self._folder_task, self._save_task)
        )
        if not is_workspace_in_use and (self._outputs is None or not self._outputs.left_behind):
            # The other processes of a trial have copies (`dike.trial.launch`).
            for folder in (self._workspace, *self._workspace.parent.glob(f"{self._workspace.name}-process-*")):
                shutil.rmtree(folder, ignore_errors=True)
            if self._mirror is not None and not self._is_push_missing:
                self._mirror.remove()
            if self._copied is not None:
                self._copied.remove()

    def _save_log(self) -> Path:
        """Copies the end of its output beside the trial's checkpoints; returns the copy, or the original on failure."""
        trial = self._order.trial
        kept = Path(trial.folder, f"run-{trial.run}.log")
        if not save_tails(trial.folder, {self._log: kept}):
            return self._log
        if self._mirror is not None:
            try:
                self._mirror.push_files([kept.name])
            except OSError as error:
                logger.warning("the log of %s stays on its agent: %s", self, error)
                return self._log
            return Path(self._mirror.to_remote(str(kept)))
        return kept

    def _push(self) -> None:
        """Copies the trial's folder to the store, after its outputs were saved; then the newest checkpoint counts."""
        assert self._mirror is not None
        newest, step = self.reports.newest_checkpoint
        trial = self._order.trial
        self._is_push_missing = True
        try:
            self._mirror.push(Writer(trial.search, trial.run), PATIENCE_S)
        except OSError as error:
            logger.error("the folder of %s could not be copied to the store: %s", self, error)
            return
        self._is_push_missing = False
        self._pushed = (None if newest is None else self._mirror.to_remote(newest), step)

    def _close_child_ends(self) -> None:
        for descriptor in (self._output, self._report_writer, self._control_reader):
            os.close(descriptor)
