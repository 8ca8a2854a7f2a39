"""A slot without Mesos: trials forked from a real zygote or started cold, and monitored as in the executor."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dike import process
from dike.trial.spec import TrialSpec
from executor import descendants
from executor.channel import TaskChannel
from executor.cuda_checkpoint import CudaCheckpointError
from executor.environment import Setup, process_environment
from executor.limits import ControlGroups, RunLimits
from executor.monitor import Gpus, RunMonitor
from executor.paused import PausedRuns
from executor.process import wait_readable
from executor.run_phases import Event
from executor.slot_order import LAUNCHER
from executor.trial_messages import RunEnd, TrialRun
from executor.trial_run import CONTROL_FD, REPORT_FD, SlotRun
from executor.zygote import PROGRAM, ForkRequest, Zygote
from framework.project.entry_point import EntryPoint
from framework.project.script_facts import script_facts
from framework.search.slot_pool import GPU_GROWTH_ENVIRONMENT

DEADLINE_S = 120.0
PAUSE_S = 1.0
"""Time that a process stays paused before it resumes."""
_POLL_S = 0.1
_CLEAR_POLL_S = 0.01
_FIRST_FREE_FD = 10
"""First file descriptor that trials do not use."""


def slot_environment(variables: Mapping[str, str] = MappingProxyType({}), gpus: Sequence[int] = ()) -> dict[str, str]:
    """The environment of processes in a slot with one CPU, also for plain processes to compare with."""
    return process_environment(
        Setup(LAUNCHER, (), {**(GPU_GROWTH_ENVIRONMENT if gpus else {}), **variables}, gpu_devices=gpus)
    )


class NoDriver:
    """An executor driver that sends nothing."""

    def sendStatusUpdate(self, status: dict[str, Any]) -> None:  # noqa: N802
        pass

    def sendFrameworkMessage(self, data: str) -> None:  # noqa: N802
        pass

    def processStarted(self, pid: int) -> None:  # noqa: N802
        pass

    def processEnded(self, pid: int) -> None:  # noqa: N802
        pass


class BenchmarkSlot:
    """Runs one trial of a script repeatedly; see `slot_for`.

    Attributes:
        refusals: errors of the GPU driver that could not move a run's memory.
    """

    def __init__(
        self, script: Path, arguments: Sequence[str], folder: Path, zygote: Zygote, gpus: Sequence[int] = ()
    ) -> None:
        self._script = script
        self._arguments = tuple(arguments)
        self._folder = folder
        self._zygote = zygote
        self._devices = tuple(gpus)
        self._gpus = Gpus(self._devices)
        self.refusals: list[str] = []
        self._paused = PausedRuns()
        self._runs = 0

    def start(self, checkpoint: str | None, *, cold: bool = False) -> tuple[SlotRun, float]:
        """Starts a run of the trial; returns it and the seconds until its first step.

        `cold`: in a new Python process instead of a fork of the zygote.

        Raises:
            RuntimeError: if it makes no step.
        """
        channel = TaskChannel(NoDriver(), "slot", self._folder)
        run = SlotRun(self._order(checkpoint), channel, RunMonitor(self._gpus))
        self._wait(None, lambda: run.prepare_folder(self._script.parent, {}, {}))
        request, descriptors = run.make_fork_request(
            self._script.name, ControlGroups(RunLimits.of_slot(0, 1, "--slot-mem")), {}
        )
        begin_s = time.monotonic()
        run.adopt(_spawn(request, descriptors, self._devices) if cold else self._fork(request, descriptors))
        self._wait(run, lambda: run.reports.last)
        return run, time.monotonic() - begin_s

    def resume(self, checkpoint: str | None) -> tuple[SlotRun, float] | None:
        """As `start`, in the paused process; returns None if the driver refuses and the process is killed.

        `checkpoint`: the one written last.
        """
        order, monitor = self._order(checkpoint), RunMonitor(self._gpus)
        time.sleep(PAUSE_S)
        begin_s = time.monotonic()
        was_paused = bool(self._paused)
        run = self._paused.resume(order, monitor)
        if run is None:
            if was_paused:
                self.refusals.append("its GPU memory cannot be restored")
            self._wait(None, self._reap_rest)
            return None
        self._wait(run, lambda: run.reports.last)
        return run, time.monotonic() - begin_s

    def _order(self, checkpoint: str | None) -> TrialRun:
        spec = TrialSpec("preemption", 0, self._runs, {}, str(self._folder / "trial"), checkpoint)
        self._runs += 1
        return TrialRun(spec, self._arguments)

    def suspend(self, run: SlotRun, *, pause: bool = False) -> RunEnd:
        """Suspends a run after some more steps, and waits until the slot is free.

        `pause` keeps its process paused, if the driver can offload its GPU memory.

        Raises:
            RuntimeError: if it ends in another way.
        """
        first = run.reports.step
        self._wait(run, lambda: run.reports.step > first)
        run.suspend(DEADLINE_S, pause=pause)
        self._wait(run, lambda: run.has_ended)
        if pause and self._gpus:
            run.offload_gpus(self._gpus.bytes_by_process())
        try:
            self._wait_until_free(lambda: not pause or self._try_freeze(run))
        except CudaCheckpointError as error:
            self.refusals.append(str(error))
            run.evict()
            run.kill_if_due()
            pause = False
        self._wait_until_free(lambda: pause or _has_died(run))
        self._wait_until_free(lambda: pause or self._reap_rest())
        self._wait_until_free(run.monitor.gpus_free)
        run.happened(Event.CLEAR)
        self._wait_until_free(run.save_outputs)
        end = run.finish()
        if pause:
            self._paused.add(run, run.process_tree)
        if end.outcome != "suspended":
            raise RuntimeError(f"a run of {self._script.name} ended as {end.outcome}: {end.message}\n{end.tail}")
        return end

    def _try_freeze(self, run: SlotRun) -> bool:
        """Freezes a suspended run once its GPU memory is on the host; returns whether it is done."""
        is_off_gpus = run.offload is None or run.offload.is_done()
        return is_off_gpus and run.freeze()

    def gpu_bytes(self, run: SlotRun) -> int:
        """Memory that a run uses on the slot's GPUs."""
        return run.monitor.measure_gpu_bytes(run.processes)

    def _reap_rest(self) -> bool:
        self._paused.poll()
        return descendants.kill_and_reap((self._zygote.pid, *self._paused.pids))

    def wait_until_ready(self) -> None:
        self._wait(None, lambda: self._zygote.ready)

    def _fork(self, request: ForkRequest, descriptors: Sequence[int]) -> int:
        self._zygote.request_fork(request, descriptors)
        self._wait(None, lambda: not self._zygote.is_forking)
        answer = self._zygote.take_answer()
        if not isinstance(answer, int):
            raise RuntimeError(f"the zygote did not fork: {answer}")
        return answer

    def _wait_until_free(self, condition: Callable[[], object]) -> None:
        end_s = time.monotonic() + DEADLINE_S
        while not condition():
            if time.monotonic() > end_s:
                raise RuntimeError(f"the slot of {self._script.name} is not free after {DEADLINE_S:g} s")
            time.sleep(_CLEAR_POLL_S)

    def _wait(self, run: SlotRun | None, condition: Callable[[], object]) -> None:
        end_s = time.monotonic() + DEADLINE_S
        while not condition():
            if self._zygote.failure or time.monotonic() > end_s:
                raise RuntimeError(f"{self._script.name} makes no progress: {self._zygote.failure or 'timeout'}")
            if run is not None and run.has_ended:
                run.happened(Event.CLEAR)
                raise RuntimeError(f"a run of {self._script.name} ended: {run.finish()}")
            wait_readable((*self._zygote.watched_fds, *(run.watched_fds if run else ())), _POLL_S)
            self._zygote.poll()
            if run is not None:
                run.poll()


def _has_died(run: SlotRun) -> bool:
    run.poll()
    return run.has_died


@contextlib.contextmanager
def slot_for(script: Path, arguments: Sequence[str], folder: Path, gpus: Sequence[int] = ()) -> Iterator[BenchmarkSlot]:
    """Yields a slot whose zygote is ready for a script. Makes this process a subreaper, as executors are."""
    process.adopt_orphans()
    folder.mkdir()
    preload = script_facts(EntryPoint(script, script.parent)).preload
    zygote = Zygote(preload, slot_environment(gpus=gpus), folder / "zygote.out", (*PROGRAM, LAUNCHER))
    try:
        slot = BenchmarkSlot(script, arguments, folder, zygote, gpus)
        slot.wait_until_ready()
        yield slot
    finally:
        zygote.close()
        while not descendants.kill_and_reap():
            time.sleep(_CLEAR_POLL_S)


def _spawn(request: ForkRequest, descriptors: Sequence[int], gpus: Sequence[int]) -> int:
    """Starts a request for the zygote as a new process; returns its id."""
    changes = {name: value for name, value in request.environment.items() if value is not None}
    targets = (1, 2, REPORT_FD, CONTROL_FD)
    # Moved out of the way first: a source may be another's target.
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE_FD) for descriptor in descriptors]
    try:
        return os.posix_spawn(
            sys.executable,
            [sys.executable, "-P", "-m", "dike.trial.launch", str(request.folder / request.script), *request.arguments],
            {**slot_environment(gpus=gpus), **changes},
            file_actions=[(os.POSIX_SPAWN_DUP2, *pair) for pair in zip(moved, targets, strict=True)],
            setsid=True,
        )
    finally:
        for descriptor in moved:
            os.close(descriptor)
