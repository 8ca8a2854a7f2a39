"""Processes forked by a zygote and adopted by this process."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time

from executor.process import describe_exit, oom_kills, signal_group, wait_readable


class ForkedProcess:
    """A child of this process that leads a process group, until it is reaped. All methods belong to one thread.

    Attributes:
        started_at_s: monotonic time at which it was adopted.
        ended_at_s: monotonic time at which it was reaped; None before.
        exit_code: its exit code, or minus the signal that ended it; None before, and if it was not a child of this one.
        usage: resource usage by the kernel; None as `exit_code`.
        killed: whether it was killed (SIGKILL) at its deadline.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.started_at_s = time.monotonic()
        self.ended_at_s: float | None = None
        self.exit_code: int | None = None
        self.usage: resource.struct_rusage | None = None
        self.killed = False
        self._oom_kills = oom_kills()
        self._oom_suspected = False
        self._pidfd: int | None = os.pidfd_open(pid)
        self._is_terminated = False
        self._deadline_s: float | None = None

    @property
    def watched_fds(self) -> tuple[int, ...]:
        """File descriptors that become readable when `poll` has something to do."""
        return () if self._pidfd is None else (self._pidfd,)

    @property
    def deadline_s(self) -> float | None:
        """Monotonic time at which it is killed; None for no deadline."""
        return self._deadline_s

    def poll(self) -> None:
        """Reaps it if it has ended, and kills the rest of its group."""
        if self._pidfd is None or not wait_readable([self._pidfd], 0):
            return
        # Before the leader is reaped: until then its id cannot be reused.
        signal_group(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            _, status, self.usage = os.wait4(self.pid, 0)
            self.exit_code = os.waitstatus_to_exitcode(status)
        if self.exit_code == -signal.SIGKILL and not self.killed:
            self._oom_suspected = oom_kills() > self._oom_kills
        self.ended_at_s = time.monotonic()
        self._deadline_s = None
        os.close(self._pidfd)
        self._pidfd = None

    def describe_end(self, more_memory: str) -> str:
        """Describes its end; names the option `more_memory` if the kernel may have killed it for memory."""
        how = describe_exit(self.exit_code)
        if not self._oom_suspected:
            return how
        return (
            f"{how}, probably because the machine ran out of memory: its kernel killed a process for that meanwhile "
            f"(dmesg shows which; {more_memory} MIB plans with more)"
        )

    def terminate(self, grace_s: float, *, leader_only: bool = False) -> None:
        """Sends SIGTERM on the first call; SIGKILL follows `grace_s` seconds later.

        SIGTERM goes to the whole group unless `leader_only`; the rest of the group is killed after the leader's end.
        """
        self.set_deadline(grace_s)
        if not self._is_terminated:
            self._is_terminated = True
            if leader_only:
                self._signal_leader(signal.SIGTERM)
            else:
                self._signal(signal.SIGTERM)

    def set_deadline(self, timeout_s: float) -> None:
        """Sets the deadline; never postpones an earlier one."""
        if not self.killed:
            deadline_s = time.monotonic() + timeout_s
            self._deadline_s = deadline_s if self._deadline_s is None else min(deadline_s, self._deadline_s)

    def clear_deadline(self) -> None:
        self._deadline_s = None

    def close(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    def kill_if_due(self) -> bool:
        """Kills it if its deadline has passed; returns whether it did."""
        if self._deadline_s is None or time.monotonic() < self._deadline_s:
            return False
        self.killed = True
        self._deadline_s = None
        self._signal(signal.SIGKILL)
        return True

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            # It does not lead a group yet, or has ended.
            self._signal_leader(number)

    def _signal_leader(self, number: signal.Signals) -> None:
        assert self._pidfd is not None
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)
