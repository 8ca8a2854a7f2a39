"""The process itself: it dies with its parent, has a supervisor, saves at SIGTERM, and its end does not hang."""

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
"""Of a chief that has found its checkpoint folder taken over (`dike.roles.fencing`)."""
EXIT_CODE_OTHER_MODEL = 77
"""Of a chief that has found another model than was planned for, and has reported it (`dike.roles.planned_model`)."""
EXIT_CODE_OTHER_LAYOUT = 78
"""Of a chief whose checkpoint folder is that of a job with parameter servers, and it has none, or the other way
round."""
OWN_EXIT_CODES = (EXIT_CODE_FENCED, EXIT_CODE_OTHER_MODEL, EXIT_CODE_OTHER_LAYOUT)
SAVE_TIMEOUT_S = 5.0
"""How long a chief has after SIGTERM to end its step and save."""

SAVE_TIMEOUT_VARIABLE = "DIKE_SAVE_TIMEOUT_S"
"""Optional environment variable: seconds in the place of SAVE_TIMEOUT_S."""

TEARDOWN_TIMEOUT_S = 10.0
"""How long TensorFlow's own functions may take at the end of a process."""

PARENT_VARIABLE = "DIKE_PARENT_PID"
"""Optional environment variable: the process that must be alive for this one to live."""

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int | None = None) -> None:
    """Makes the kernel kill this process when the thread that started it ends; Linux only.

    Args:
        parent: the process that must be alive for this one to live; None for the one that `PARENT_VARIABLE` names.
    """
    if not sys.platform.startswith("linux"):
        return
    import ctypes  # the `dike` command, which needs only `end_process`, starts without it

    if parent is None:
        parent = int(os.environ.get(PARENT_VARIABLE, os.getppid()))
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call
        os._exit(EXIT_CODE_TERMINATED)


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant whose own parent ends; Linux only.

    Raises:
        OSError: if the kernel refuses.
    """
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def limit(groups: Iterable[str], most_processes: int | None) -> None:
    """Limits what this process, and all that it will start, may use.

    Args:
        groups: folders of control groups, which it enters.
        most_processes: limit for processes and threads of this account (RLIMIT_NPROC), which root does not have; None
            for no limit.

    Raises:
        OSError: if it may not.
    """
    for folder in groups:
        Path(folder, "cgroup.procs").write_text("0", encoding="utf-8")
    if most_processes is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
        most = most_processes if hard == resource.RLIM_INFINITY else min(most_processes, hard)
        resource.setrlimit(resource.RLIMIT_NPROC, (most, most))


def supervise() -> None:
    """Goes on in a child; this process becomes its supervisor, and ends as the child does.

    The supervisor adopts all that the child starts, and ends only when nothing of it is left. So whoever started this
    process finds all that belongs to it below one id. The child is in the same process group; SIGTERM is passed on to
    one that has left it. The supervisor ignores all other signals that can be ignored. To be called before there is any
    thread.
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
        # The ends of pipes that it holds would be the child's for whoever reads them. Errors are still told.
        os.closerange(0, 2)
        os.closerange(3, 1 + max(map(int, os.listdir("/proc/self/fd"))))
        _end_as(_outlive(child))
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(1)


def _pass_on_termination(child: int) -> None:
    with contextlib.suppress(OSError):  # it has just ended, or has become somebody else's
        if os.getpgid(child) != os.getpgrp():
            os.kill(child, signal.SIGTERM)


def _outlive(child: int) -> int:
    """Waits until a child has ended, and ends all that it has left; returns how it ended (`os.wait`)."""
    while True:
        pid, status = os.wait()
        if pid == child:
            break
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # its number may become another's
    while True:
        with open("/proc/thread-self/children") as file:
            for left in file.read().split():
                with contextlib.suppress(PermissionError):  # it has become somebody else's, and is waited for
                    os.kill(int(left), signal.SIGKILL)
        try:
            os.wait()
        except ChildProcessError:
            return status


def _end_as(status: int) -> NoReturn:
    """Ends this process as another has ended."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # the child has left a core file, if there is to be any
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def set_name(name: str) -> None:
    """Shows this process under a name in `top` and `ps -o comm`: forks have the command line of their zygote.

    Args:
        name: what 15 bytes hold of it is shown.
    """
    if sys.platform.startswith("linux"):
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def has_busy_threads() -> bool:
    """Whether another thread of this process runs, waits for a processor or for a disk."""
    own = str(threading.get_native_id())
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it may end meanwhile
            state = Path(f"/proc/self/task/{thread}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
            if state in "RD" and thread != own:
                return True
    return False


def flush_output() -> None:
    """Writes what is held back of standard output and standard error."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            continue  # nobody reads it any more


def end_process(code: int) -> NoReturn:
    """Ends the process at once, its output written: TensorFlow's own teardown takes a second, if it ends at all."""
    flush_output()
    os._exit(code)


def end_if_forked(parent: int, code: int) -> None:
    """Ends a process that the script has forked and let run to its end, as Python would; no-op in the task itself.

    Args:
        parent: the process of the task.
        code: the exit code.
    """
    if os.getpid() != parent:
        atexit._run_exitfuncs()
        end_process(code)


def before_exit(finish: Callable[[], object]) -> None:
    """Has `os._exit`, which runs no exit handlers, call `finish` first, in this process and not in its forks."""
    pid, exit_at_once = os.getpid(), os._exit

    def leave(status: int) -> NoReturn:
        if os.getpid() == pid:
            finish()
        exit_at_once(status)

    os._exit = leave


class Termination:
    """Remembers SIGTERM, so that a training loop can save between two steps.

    A loop asks `requested` after each step, saves and calls `leave`. A thread ends the process when the loop has not
    done so in time: a Python handler alone would never run while a step blocks inside TensorFlow.

    It is about this process alone. Processes that the script forks, such as those of `multiprocessing`, get back the
    default action of SIGTERM: their pools end them by it.
    """

    def __init__(self) -> None:
        self.requested = False
        self._pid = 0
        self._wakeup = -1
        self._forking = threading.local()
        self._received = False
        self._armed = threading.Event()

    def install(self) -> None:
        """Handles SIGTERM from now on. Must be called in the main thread."""
        self._pid = os.getpid()
        reader, self._wakeup = os.pipe()
        os.set_blocking(self._wakeup, False)
        signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        os.register_at_fork(
            before=self._before_fork, after_in_parent=self._after_fork, after_in_child=self._after_fork_in_child
        )
        signal.signal(signal.SIGTERM, self._handle)
        threading.Thread(target=self._watch, args=(reader,), name="dike-sigterm", daemon=True).start()

    def leave(self) -> NoReturn:
        """Ends the process after a save."""
        from dike.reporting import reporter

        reporter().close()
        end_process(EXIT_CODE_TERMINATED)

    @property
    def is_the_scripts(self) -> bool:
        """Whether SIGTERM has come and a handler of the script's own has dealt with it."""
        return self._received and not self._is_ours()

    def can_save(self) -> None:
        """Says that a training loop is running that asks `requested`; before, SIGTERM ends the process at once."""
        self._armed.set()

    def _before_fork(self) -> None:
        # A child that gets SIGTERM before it has let go of our pipe would write into it, as if this process had.
        self._forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def _after_fork(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._forking.mask)

    def _after_fork_in_child(self) -> None:
        self.requested = False
        if self._is_ours():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        current = signal.set_wakeup_fd(-1)
        if current not in (self._wakeup, -1):
            signal.set_wakeup_fd(current)  # the script's own
        os.close(self._wakeup)
        self._after_fork()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A handler of the script's own called the one before it, in a process that the script has forked.
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.requested = True
        if not self._is_ours():
            # The script's own handler called the one before it.
            threading.Thread(target=self._end, name="dike-sigterm-end", daemon=True).start()

    def _is_ours(self) -> bool:
        """Whether the script has left SIGTERM to us."""
        return signal.getsignal(signal.SIGTERM) == self._handle

    def _watch(self, reader: int) -> None:
        while True:
            # Other signals write here too.
            if signal.SIGTERM in os.read(reader, 64):
                self._received = True
                if self._is_ours():
                    break
        self.requested = True
        self._end()

    def _end(self) -> None:
        if self._armed.is_set():
            threading.Event().wait(float(os.environ.get(SAVE_TIMEOUT_VARIABLE, SAVE_TIMEOUT_S)))
        os._exit(EXIT_CODE_TERMINATED)


class Teardown:
    """Ends a process whose teardown hangs.

    Attributes:
        exit_code: the exit code of the process.
    """

    def __init__(self, timeout_s: float = TEARDOWN_TIMEOUT_S) -> None:
        self.exit_code = 0
        self._timeout_s = timeout_s
        self._deadline: threading.Timer | None = None

    def begin(self) -> None:
        """The time begins to count."""
        self._deadline = threading.Timer(self._timeout_s, lambda: os._exit(self.exit_code))
        self._deadline.daemon = True
        self._deadline.start()

    def end(self) -> None:
        """It did not hang."""
        if self._deadline is not None:
            self._deadline.cancel()


termination = Termination()
"""The one of this process."""

teardown = Teardown()
"""The one of this process."""
