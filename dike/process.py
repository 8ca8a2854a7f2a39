"""Process control: death with the parent, supervisors, saving at SIGTERM, a teardown with a time limit."""

from __future__ import annotations

import atexit
import contextlib
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import NoReturn

EXIT_CODE_TERMINATED = 128 + signal.SIGTERM
EXIT_CODE_FENCED = 76
"""The checkpoint folder belongs to a later attempt or another job (`dike.roles.fencing`)."""
EXIT_CODE_OTHER_MODEL = 77
"""The model is not the planned one, and has been reported (`dike.roles.planned_model`)."""
EXIT_CODE_OTHER_LAYOUT = 78
"""The task has parameter servers and the checkpoint folder is of a job without them, or vice versa."""
EXIT_CODE_PEER_LOST = 79
"""Another worker of a synchronous job has ended, so this one cannot continue (`dike.roles.gang`)."""
EXIT_CODE_CANNOT_SPLIT = 80
"""Several workers cannot share the batches of the model; the reason has been reported (`dike.keras3.synchronous`)."""
OWN_EXIT_CODES = (
    EXIT_CODE_FENCED,
    EXIT_CODE_OTHER_MODEL,
    EXIT_CODE_OTHER_LAYOUT,
    EXIT_CODE_PEER_LOST,
    EXIT_CODE_CANNOT_SPLIT,
)
SAVE_TIMEOUT_S = 5.0
"""Maximum time after SIGTERM for a chief to end its step and save."""

SAVE_TIMEOUT_VARIABLE = "DIKE_SAVE_TIMEOUT_S"
"""Overrides SAVE_TIMEOUT_S."""

TEARDOWN_TIMEOUT_S = 10.0
"""Maximum time for TensorFlow's own exit handlers."""

PARENT_VARIABLE = "DIKE_PARENT_PID"
"""Pid of the process whose death ends this one; default is the parent."""

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int | None = None) -> None:
    """Makes the kernel kill this process when its parent ends (the one in `PARENT_VARIABLE` if None); Linux only."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes  # not at the top: the `dike` command needs only `end_process`

    if parent is None:
        parent = int(os.environ.get(PARENT_VARIABLE, os.getppid()))
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call
        os._exit(EXIT_CODE_TERMINATED)


def adopt_orphans() -> None:
    """Makes this process the parent of every orphaned descendant; Linux only. Raises OSError if the kernel refuses."""
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def apply_limits(groups: Iterable[str], max_processes: int | None) -> None:
    """Limits the resources of this process and its future children. Raises OSError if not permitted.

    Args:
        groups: folders of control groups, which it enters.
        max_processes: maximum processes and threads of this account (RLIMIT_NPROC; root is exempt); None for no limit.
    """
    for folder in groups:
        Path(folder, "cgroup.procs").write_text("0", encoding="utf-8")
    if max_processes is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
        limit = max_processes if hard == resource.RLIM_INFINITY else min(max_processes, hard)
        resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))


def supervise() -> None:
    """Continues in a child; this process becomes its supervisor, and ends as the child does.

    The supervisor adopts all descendants of the child and kills those that outlive it, so that all processes are below
    one pid. It forwards SIGTERM to a child that has left its process group, and ignores all other signals that can be
    ignored. Must be called before any thread starts.
    """
    adopt_orphans()
    supervisor = os.getpid()
    child = os.fork()
    if not child:
        die_with_parent(supervisor)
        return
    try:
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: _pass_on_termination(child))
        set_name("dike supervisor")
        # A pipe's reader gets EOF only once all copies of its other end are closed. stderr stays open for tracebacks.
        os.closerange(0, 2)
        os.closerange(3, 1 + max(map(int, os.listdir("/proc/self/fd"))))
        _exit_with_status(_wait_and_kill_orphans(child))
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(1)


def _pass_on_termination(child: int) -> None:
    with contextlib.suppress(OSError):  # it has just ended, or now runs as another account
        if os.getpgid(child) != os.getpgrp():
            os.kill(child, signal.SIGTERM)


def _wait_and_kill_orphans(child: int) -> int:
    """Waits for a child, kills its orphans, and returns its wait status."""
    while True:
        pid, status = os.wait()
        if pid == child:
            break
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # its pid may be reused
    while True:
        with open("/proc/thread-self/children") as file:
            for left in file.read().split():
                with contextlib.suppress(PermissionError):  # runs as another account: waited for instead
                    os.kill(int(left), signal.SIGKILL)
        try:
            os.wait()
        except ChildProcessError:
            return status


def _exit_with_status(status: int) -> NoReturn:
    """Ends this process with another's wait status."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # no second core file after the child's
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def set_name(name: str) -> None:
    """Sets the name in `top` and `ps -o comm` (15 bytes): forks have their zygote's command line."""
    if sys.platform.startswith("linux"):
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def has_busy_threads() -> bool:
    """Whether another thread of this process is running or waits for a CPU or a disk."""
    own = str(threading.get_native_id())
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it may end meanwhile
            state = Path(f"/proc/self/task/{thread}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
            if state in "RD" and thread != own:
                return True
    return False


def flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            continue  # the reader is gone


def end_process(code: int) -> NoReturn:
    """Flushes the output and ends the process immediately: TensorFlow's own teardown takes a second, or hangs."""
    flush_output()
    os._exit(code)


def end_if_forked(parent: int, code: int) -> None:
    """Ends the process if the script has forked it, from the task with pid `parent`, and let it run to its end."""
    if os.getpid() != parent:
        atexit._run_exitfuncs()
        end_process(code)


def before_exit(finish: Callable[[], object]) -> None:
    """Makes `os._exit`, which runs no exit handlers, call `finish` first, in this process but not in its forks."""
    pid, original_exit = os.getpid(), os._exit

    def finish_and_exit(status: int) -> NoReturn:
        if os.getpid() == pid:
            finish()
        original_exit(status)

    os._exit = finish_and_exit


class Termination:
    """Records SIGTERM, so that a training loop can save between two steps.

    A loop checks `requested` after each step, saves and calls `exit`. If it does not in time, a thread ends the
    process: a Python handler alone does not run while a step blocks inside TensorFlow. Processes that the script forks
    get back the default action of SIGTERM, by which `multiprocessing` ends its pools.
    """

    def __init__(self) -> None:
        self.requested = False
        self._pid = 0
        self._wakeup = -1
        self._forking = threading.local()
        self._received = False
        self._armed = threading.Event()

    def install(self) -> None:
        """Must be called in the main thread."""
        self._pid = os.getpid()
        reader, self._wakeup = os.pipe()
        os.set_blocking(self._wakeup, False)
        signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        os.register_at_fork(
            before=self._before_fork, after_in_parent=self._after_fork, after_in_child=self._after_fork_in_child
        )
        signal.signal(signal.SIGTERM, self._handle)
        threading.Thread(target=self._watch, args=(reader,), name="dike-sigterm", daemon=True).start()

    def exit(self) -> NoReturn:
        from dike.reporting import reporter

        reporter().close()
        end_process(EXIT_CODE_TERMINATED)

    @property
    def handled_by_script(self) -> bool:
        """Whether SIGTERM was received and handled by a handler of the script's own."""
        return self._received and not self._is_handler_ours()

    def enable_saving(self) -> None:
        """Gives the training loop time to save at SIGTERM; before this call, SIGTERM ends the process immediately."""
        self._armed.set()

    def _before_fork(self) -> None:
        # A child that gets SIGTERM before it closes our pipe would write to it, as if this process had received it.
        self._forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def _after_fork(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._forking.mask)

    def _after_fork_in_child(self) -> None:
        self.requested = False
        if self._is_handler_ours():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        current = signal.set_wakeup_fd(-1)
        if current not in (self._wakeup, -1):
            signal.set_wakeup_fd(current)  # the script's own
        os.close(self._wakeup)
        self._after_fork()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # Chained from the script's own handler, in a process that the script has forked.
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.requested = True
        if not self._is_handler_ours():
            # Chained from the script's own handler.
            threading.Thread(target=self._end, name="dike-sigterm-end", daemon=True).start()

    def _is_handler_ours(self) -> bool:
        """Whether the script has not replaced our handler."""
        return signal.getsignal(signal.SIGTERM) == self._handle

    def _watch(self, reader: int) -> None:
        while True:
            # All signals write to this pipe.
            if signal.SIGTERM in os.read(reader, 64):
                self._received = True
                if self._is_handler_ours():
                    break
        self.requested = True
        self._end()

    def _end(self) -> None:
        if self._armed.is_set():
            threading.Event().wait(float(os.environ.get(SAVE_TIMEOUT_VARIABLE, SAVE_TIMEOUT_S)))
        os._exit(EXIT_CODE_TERMINATED)


class Teardown:
    """Ends a process whose teardown hangs."""

    def __init__(self, timeout_s: float = TEARDOWN_TIMEOUT_S) -> None:
        self.exit_code = 0
        self._timeout_s = timeout_s
        self._deadline: threading.Timer | None = None

    def begin(self) -> None:
        self._deadline = threading.Timer(self._timeout_s, lambda: os._exit(self.exit_code))
        self._deadline.daemon = True
        self._deadline.start()

    def end(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()


termination = Termination()

teardown = Teardown()
