"""Processes that a zygote has forked for this one to adopt."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time

from executor.process import describe_exit, oom_kills, signal_group, wait_readable


class ForkedProcess:
    """A living process until it is reaped; it leads a process group. All methods belong to one thread.

    Args:
        pid: the process, a child of this one.

    Attributes:
        pid: the one given.
        since_s: when it was seen first, on the monotonic clock.
        over_s: when it was reaped; None before.
        exit_code: its exit code, or minus the signal that ended it; None before, and if it was not our child.
        usage: what the kernel says that it has used; None as `exit_code`.
        killed: whether it was sent SIGKILL because its time was up.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.since_s = time.monotonic()
        self.over_s: float | None = None
        self.exit_code: int | None = None
        self.usage: resource.struct_rusage | None = None
        self.killed = False
        self._oom_kills = oom_kills()
        self._is_short_of_memory = False
        self._pidfd: int | None = os.pidfd_open(pid)
        self._terminated = False
        self._kill_s: float | None = None

    @property
    def watched(self) -> tuple[int, ...]:
        """File descriptors that can be read when there is something to `poll`."""
        return () if self._pidfd is None else (self._pidfd,)

    @property
    def due_s(self) -> float | None:
        """When it will be killed unless it ends before, on the monotonic clock; None if that is not planned."""
        return self._kill_s

    def poll(self) -> None:
        """Takes in its end, and ends what is left of its group."""
        if self._pidfd is None or not wait_readable([self._pidfd], 0):
            return
        # Before its own process is reaped no other group can have its number.
        signal_group(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            _, status, self.usage = os.wait4(self.pid, 0)
            self.exit_code = os.waitstatus_to_exitcode(status)
        if self.exit_code == -signal.SIGKILL and not self.killed:
            self._is_short_of_memory = oom_kills() > self._oom_kills
        self.over_s = time.monotonic()
        self._kill_s = None
        os.close(self._pidfd)
        self._pidfd = None

    def describe_end(self, more_memory: str) -> str:
        """How it ended, in words.

        Args:
            more_memory: the option that gives it more, should the kernel have ended it for want of memory.
        """
        how = describe_exit(self.exit_code)
        if not self._is_short_of_memory:
            return how
        return (
            f"{how}, probably for want of memory: the kernel of its machine ended a process for that meanwhile "
            f"(dmesg says which; {more_memory} MIB plans with more)"
        )

    def terminate(self, grace_s: float, *, alone: bool = False) -> None:
        """Ends it: SIGTERM at the first call, SIGKILL when its time is up.

        Args:
            grace_s: its time, in seconds.
            alone: whether only the process itself is told; its group ends with it all the same.
        """
        self.limit(grace_s)
        if not self._terminated:
            self._terminated = True
            if alone:
                self._signal_leader(signal.SIGTERM)
            else:
                self._signal(signal.SIGTERM)

    def limit(self, left_s: float) -> None:
        """Gives it so many seconds to end, or those that it has left if they are fewer."""
        if not self.killed:
            kill_s = time.monotonic() + left_s
            self._kill_s = kill_s if self._kill_s is None else min(kill_s, self._kill_s)

    def relieve(self) -> None:
        """It has all the time again."""
        self._kill_s = None

    def close(self) -> None:
        """Watches it no more."""
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    def kill_if_due(self) -> bool:
        """Kills it if its time is up; returns whether it did."""
        if self._kill_s is None or time.monotonic() < self._kill_s:
            return False
        self.killed = True
        self._kill_s = None
        self._signal(signal.SIGKILL)
        return True

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            # It has not come to leading a group yet, or is gone.
            self._signal_leader(number)

    def _signal_leader(self, number: signal.Signals) -> None:
        assert self._pidfd is not None
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)
