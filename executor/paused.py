"""Runs of trials that are suspended in memory: their processes stand still.

Most have written a checkpoint before. A trial that cannot be saved has none, and begins anew if its process is let go.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import psutil

from executor import cuda_checkpoint
from executor.cuda_checkpoint import CudaCheckpointError
from executor.monitor import RunMonitor, own_bytes
from executor.trial_messages import FULL_SHARE, RunKey, TrialRun
from executor.trial_run import SlotRun

logger = logging.getLogger(__name__)

MOST_PAUSED = 8
"""So many are kept for each slot at most."""
MACHINE_FREE_SHARE = 0.05
"""The machine's memory is short below this share of it: others may use more than Mesos has given them."""


@dataclass(frozen=True)
class _Paused:
    """One of them.

    Attributes:
        run: the run, which is over.
        processes: its supervisor and all that belongs to it; none of them can fork.
        bytes: memory that is theirs alone, which is free again when they are gone.
    """

    run: SlotRun
    processes: Sequence[psutil.Process]
    bytes: int


class PausedRuns:
    """Suspended runs whose processes stand still, of all slots of one process, least recently suspended first.

    All methods belong to one thread.

    Attributes:
        max_count: so many are kept at most, however much memory there is.
        likely: those that the framework has said may go on, the likeliest first.
        refused: whether the GPUs' driver has ever failed to move what one of them holds.
    """

    def __init__(self) -> None:
        self.max_count = MOST_PAUSED
        self.likely: Sequence[RunKey] = ()
        self.refused = False
        self._paused: dict[RunKey, _Paused] = {}
        self._dying: list[_Paused] = []
        """Those that were let go and are not gone yet, in that order."""
        self._let_go_s = 0.0

    def __bool__(self) -> bool:
        return bool(self._paused)

    @property
    def keys(self) -> tuple[RunKey, ...]:
        return tuple(self._paused)

    @property
    def unsaved(self) -> tuple[RunKey, ...]:
        """Those that no checkpoint holds."""
        return tuple(key for key, each in self._paused.items() if each.run.reports.is_unsaved)

    @property
    def unsaved_bytes(self) -> int:
        """Memory of the runs that no checkpoint holds."""
        return _bytes(each for each in self._paused.values() if each.run.reports.is_unsaved)

    @property
    def pids(self) -> frozenset[int]:
        """Ids of their processes, and of those that are about to be gone."""
        return frozenset(process.pid for each in (*self._paused.values(), *self._dying) for process in each.processes)

    def has_dying(self, within_s: float = math.inf) -> bool:
        """Whether processes that were let go within so many seconds are not gone yet."""
        return bool(self._dying) and time.monotonic() - self._let_go_s < within_s

    @property
    def watched(self) -> tuple[int, ...]:
        """File descriptors that can be read when there is something to `poll`."""
        return tuple(descriptor for each in self._paused.values() for descriptor in each.run.watched)

    @property
    def bytes(self) -> int:
        """Memory that is free again when they are gone."""
        return _bytes(self._paused.values())

    def add(self, run: SlotRun, processes: Sequence[psutil.Process]) -> int:
        """Keeps a run that is over, and whose processes stand still; returns the memory that is theirs alone, bytes."""
        self._paused[run.key] = paused = _Paused(run, processes, sum(map(own_bytes, processes)))
        return paused.bytes

    def take(self, order: TrialRun, monitor: RunMonitor) -> SlotRun | None:
        """Goes on with the process of the trial's last run, if it is here and stands where the run is to begin.

        One that stands elsewhere is let go. The new run has its process.

        Args:
            order: what is to run.
            monitor: watches it.
        """
        trial = order.trial
        for key in [key for key in self._paused if key[0] == trial.number]:
            paused = self._paused[key]
            if key[1] != trial.run - 1 or paused.run.reports.checkpoint != trial.resume_from:
                self._let_go(key, "its trial has gone on elsewhere")
            elif self._wake(key):
                del self._paused[key]
                run = SlotRun(order, paused.run.channel, monitor, paused.run)
                monitor.begin_with(paused.processes)
                run.go_on()
                return run
        return None

    def _wake(self, key: RunKey) -> bool:
        """Continues the processes of a run, which then wait for the word to go on; whether that has succeeded.

        A GPU's driver that hangs in it costs the slot, which is not heard of meanwhile.
        """
        paused = self._paused[key]
        for process in paused.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        try:
            if paused.run.off_gpu:
                cuda_checkpoint.to_gpu(paused.run.off_gpu)
        except CudaCheckpointError as error:
            self.refused = True
            self._let_go(key, str(error))
            return False
        return True

    def let_go(self, keys: Iterable[RunKey]) -> None:
        """Ends those that nobody will go on with."""
        for key in keys:
            if key in self._paused:
                self._let_go(key, "nobody will go on with it")

    def let_all_go(self) -> None:
        """Ends all of them."""
        self.let_go(self.keys)

    def make_room(
        self, limit_bytes: int, used_bytes: int, coming_bytes: int = 0, kept: Collection[RunKey] = ()
    ) -> None:
        """Lets some go, the least likely to go on first, if memory is short or they are too many.

        Those that no checkpoint holds go last, and not for their number.

        Args:
            limit_bytes: the slots' memory.
            used_bytes: what is used of it beside them.
            coming_bytes: what will be used besides.
            kept: those that are to go on next, which are not let go.
        """
        saved = sum(not each.run.reports.is_unsaved and key not in kept for key, each in self._paused.items())
        for _ in range(min(saved, len(self._paused) - self.max_count)):
            self._shed("there are too many of them", kept)
        while used_bytes + coming_bytes + self.bytes > FULL_SHARE * limit_bytes:
            if not self._shed("the memory of the slots is short", kept):
                break
        memory = psutil.virtual_memory()
        while memory.available + _bytes(self._dying) - coming_bytes < MACHINE_FREE_SHARE * memory.total:
            if not self._shed("the machine's memory is short", kept):
                break

    def poll(self) -> None:
        """Takes in the end of those that somebody else has killed, and reaps what has been let go."""
        for key, paused in list(self._paused.items()):
            paused.run.poll()
            if paused.run.has_died:
                self._let_go(key, "its process was killed")
        for process in [process for each in self._dying for process in each.processes if process.is_running()]:
            with contextlib.suppress(ChildProcessError):  # as long as its own parent is there, or it is reaped
                os.waitpid(process.pid, os.WNOHANG)
        self._dying = [each for each in self._dying if any(process.is_running() for process in each.processes)]

    def has_room(self, limit_bytes: int, used_bytes: int, coming_bytes: int, kept: Collection[RunKey] = ()) -> bool:
        """Whether a run may be suspended: what follows fits beside it, and beside those that are not let go for it.

        Args:
            limit_bytes: the slots' memory.
            used_bytes: what is used of it beside the suspended runs, the run included.
            coming_bytes: what the next run may have for itself, and what the run brings from its GPUs.
            kept: those that are to go on next.
        """
        stay = [each for key, each in self._paused.items() if key in kept or each.run.reports.is_unsaved]
        staying = _bytes(stay)
        memory = psutil.virtual_memory()
        available = memory.available + _bytes(self._dying) + self.bytes - staying
        return (
            used_bytes + staying + coming_bytes <= FULL_SHARE * limit_bytes
            and len(self.unsaved) < self.max_count
            and available - coming_bytes > MACHINE_FREE_SHARE * memory.total
        )

    def _shed(self, why: str, kept: Collection[RunKey]) -> bool:
        """Lets the one go that is least likely to go on; whether there was one."""
        # One of which nothing has been said has just had to give its slot back.
        unsaid = [key for key in self._paused if key not in self.likely]
        by_use = [*reversed(unsaid), *(key for key in reversed(self.likely) if key in self._paused)]
        order = sorted(by_use, key=lambda key: self._paused[key].run.reports.is_unsaved)
        key = next((key for key in order if key not in kept), None)
        if key is not None:
            self._let_go(key, why)
        return key is not None

    def _let_go(self, key: RunKey, why: str) -> None:
        paused = self._paused.pop(key)
        rest = "nothing of it is saved" if paused.run.reports.is_unsaved else "its checkpoint stays"
        logger.info("%s leaves memory, %s: %s", paused.run, rest, why)
        self._let_go_s = time.monotonic()
        self._dying.append(paused)
        for process in paused.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        paused.run.close()


def _bytes(runs: Iterable[_Paused]) -> int:
    return sum(each.bytes for each in runs)
