"""The process that starts a cluster's daemons and outlives its owner only to clean up.

    python -SEsP supervisor.py OWNER_PID WORK_DIR [FILE_OR_FOLDER_TO_REMOVE ...]

A program of its own that needs only the standard library. The owner writes one JSON object per line to its standard
input and reads one answer per line:

    {"command": "start", "name": ..., "argv": [...], "env": {...}, "log": ...}   -> {"pid": ...}
    {"command": "keep", "name": ...}                      -> {"pid": ...}   (from then on it is restarted)
    {"command": "signal", "name": ..., "signal": ...}     -> {"pid": ...}   (a daemon ended or stopped so stays so)
    {"command": "look", "name": ...}                      -> {"pid": ..., "status": null or its exit status}
    {"command": "given_up"}                               -> name of a daemon no longer restarted: last exit status
    {"command": "detach"}                                 -> {}   (from then on only SIGTERM ends it)
    {"command": "stop"}                                   no answer: it ends

A kept daemon that ends, or is stopped for `STALL_TIMEOUT_S`, is restarted with the same command. After `MAX_RESTARTS`
consecutive restarts that each ended within `STABLE_RUN_S` it is given up.

When the input or the owner ends, or on SIGTERM, agents are asked to shut down (SIGUSR1 also ends their executors), then
all remaining processes are killed: daemons, their descendants, and all processes with the cluster's work folder in
MESOS_DIRECTORY, as executors and their children have. Then the named files and folders are removed.
Orphans become children of the supervisor (PR_SET_CHILD_SUBREAPER), so a double fork does not escape. If the supervisor
itself is killed, the system kills the daemons (see `daemon.die_with_parent`).

It is single-threaded, as the system ties the end of the daemons to the thread that started them.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import sys
import time
from typing import Any

PR_SET_CHILD_SUBREAPER = 36
POLL_INTERVAL_S = 0.1
SHUTDOWN_TIMEOUT_S = 8.0
KILL_TIMEOUT_S = 10.0
ENDING_SIGNALS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1})
STALL_TIMEOUT_S = 5.0
STABLE_RUN_S = 60.0
MAX_RESTARTS = 3
RESTART_DELAYS_S = (0.0, 0.5, 2.0)
"""Delay before each restart; the cause of the failure may pass meanwhile."""
AGENT_PREFIX = "agent-"
STANDARD_INPUT, STANDARD_OUTPUT, STANDARD_ERROR = 0, 1, 2


def task_processes(work_dir: str) -> list[int]:
    """Ids of the processes in containers of the cluster in `work_dir`, found by their environment."""
    mark = b"\0MESOS_DIRECTORY=" + os.fsencode(work_dir) + b"/"
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/environ", "rb") as file:
                    if mark in b"\0" + file.read():
                        found.append(int(entry))
            except OSError:
                continue  # It has ended, or belongs to another account.
    return found


def descendants(ancestor: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            state, parent = fields[0], int(fields[1])
            if state != b"Z":
                children.setdefault(parent, []).append(int(entry))
    found, waiting = [], [ancestor]
    while waiting:
        for child in children.get(waiting.pop(), ()):
            found.append(child)
            waiting.append(child)
    return found


def send(pid: int, signal_number: int) -> None:
    """Sends a signal to a process that may have ended."""
    try:
        os.kill(pid, signal_number)
    except ProcessLookupError:
        return


class SupervisedDaemon:
    """A started daemon and its state.

    Attributes:
        status: exit status; None while it runs.
        is_kept: whether it is restarted when it ends.
    """

    def __init__(self, argv: list[str], env: dict[str, str], log: str) -> None:
        self._command = argv, env, log
        self.is_kept = False
        self._restarts = 0
        """Number of consecutive restarts."""
        self._restart_due_s: float | None = None
        """Time of the next restart."""
        self._start()

    def _start(self) -> None:
        self.status: int | None = None
        self._stopped_s: float | None = None
        self._is_stopped_by_owner = False
        """Whether the owner has stopped it."""
        self._started_s = time.monotonic()
        self.pid = start(*self._command)

    @property
    def is_given_up(self) -> bool:
        """Whether it ended and is no longer restarted."""
        return self.is_kept and self.status is not None and self._restart_due_s is None

    def mark_stopped(self) -> None:
        self._stopped_s = time.monotonic()

    def mark_continued(self) -> None:
        self._stopped_s = None

    def signal(self, number: int) -> None:
        self.is_kept = self.is_kept and number not in ENDING_SIGNALS
        if number in (signal.SIGSTOP, signal.SIGCONT):
            self._is_stopped_by_owner = number == signal.SIGSTOP
        if self.status is None:
            send(self.pid, number)

    def mark_ended(self, status: int) -> None:
        """Records its end and schedules a restart."""
        self.status = status
        now_s = time.monotonic()
        if now_s - self._started_s >= STABLE_RUN_S:
            self._restarts = 0
        if self.is_kept and self._restarts < MAX_RESTARTS:
            self._restart_due_s = now_s + RESTART_DELAYS_S[self._restarts]

    def supervise(self) -> None:
        """Restarts it if due, and kills it if it has been stopped for too long."""
        now_s = time.monotonic()
        if not self.is_kept:
            return
        if self.status is None and self._stopped_s is not None and not self._is_stopped_by_owner:
            if now_s - self._stopped_s >= STALL_TIMEOUT_S:
                self._stopped_s = None
                send(self.pid, signal.SIGKILL)
        elif self._restart_due_s is not None and now_s >= self._restart_due_s:
            self._restart_due_s = None
            self._restarts += 1
            try:
                self._start()
            except OSError as error:
                argv, _, _ = self._command
                print(f"{argv[0]} could not be restarted: {error}", file=sys.stderr, flush=True)
                self.mark_ended(1)


class Supervisor:
    def __init__(self, owner: int, work_dir: str) -> None:
        self._owner: int | None = owner
        self._work_dir = work_dir
        self._daemons: dict[str, SupervisedDaemon] = {}
        self._stopping = False
        self._input = b""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def _on_signal(self, number: int, frame: object) -> None:
        self._stopping = True

    def serve(self) -> None:
        while not self._stopping:
            inputs = [STANDARD_INPUT] if self._owner else []
            readable, _, _ = select.select(inputs, [], [], POLL_INTERVAL_S)
            self._reap()
            for daemon in self._daemons.values():
                daemon.supervise()
            if readable:
                self._read()
            elif self._owner and os.getppid() != self._owner:
                self._stopping = True  # A child of the owner may keep the pipe open.

    def _read(self) -> None:
        data = os.read(STANDARD_INPUT, 1 << 16)
        if not data:
            self._stopping = True
        *lines, self._input = (self._input + data).split(b"\n")
        for line in lines:
            request = json.loads(line)
            if request["command"] == "stop":
                self._stopping = True
                return
            try:
                answer = self._answer(request)
            except OSError as error:
                answer = {"error": str(error)}
            try:
                os.write(STANDARD_OUTPUT, json.dumps(answer).encode() + b"\n")
            except BrokenPipeError:
                self._stopping = True
                return
            if request["command"] == "detach":
                self._detach()

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        command = request["command"]
        if command == "detach":
            return {}
        self._reap()
        if command == "given_up":
            return {name: daemon.status for name, daemon in self._daemons.items() if daemon.is_given_up}
        name = request["name"]
        if command == "start":
            self._daemons[name] = SupervisedDaemon(request["argv"], request["env"], request["log"])
        daemon = self._daemons[name]
        if command == "keep":
            daemon.is_kept = True
            if daemon.status is not None:  # It ended after the owner's last request.
                daemon.mark_ended(daemon.status)
        elif command == "signal":
            daemon.signal(request["signal"])
        return {"pid": daemon.pid, "status": daemon.status}

    def _detach(self) -> None:
        self._owner = None
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, STANDARD_INPUT)
        os.dup2(nowhere, STANDARD_OUTPUT)
        os.close(nowhere)

    def _reap(self) -> None:
        """Reaps children, adopted ones included, and records which daemons are stopped."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for daemon in self._daemons.values():
                if daemon.pid == pid and daemon.status is None:
                    if os.WIFSTOPPED(status):
                        daemon.mark_stopped()
                    elif os.WIFCONTINUED(status):
                        daemon.mark_continued()
                    else:
                        daemon.mark_ended(os.waitstatus_to_exitcode(status))

    def _running(self, names: list[str]) -> list[int]:
        self._reap()
        return [self._daemons[name].pid for name in names if self._daemons[name].status is None]

    def clean_up(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        agents = [name for name in self._daemons if name.startswith(AGENT_PREFIX)]
        for pid in self._running(agents):
            send(pid, signal.SIGCONT)
            send(pid, signal.SIGUSR1)
        deadline = time.monotonic() + SHUTDOWN_TIMEOUT_S
        while self._running(agents) and time.monotonic() < deadline:
            time.sleep(0.02)
        # Agents first: a running one would report a killed executor as a failure.
        for pid in self._running(list(self._daemons)):
            send(pid, signal.SIGKILL)
        deadline = time.monotonic() + KILL_TIMEOUT_S
        while time.monotonic() < deadline:
            self._reap()
            left = {*descendants(os.getpid()), *task_processes(self._work_dir)} - {os.getpid()}
            if not left:
                return
            for pid in left:
                send(pid, signal.SIGKILL)
            time.sleep(0.02)


def start(argv: list[str], env: dict[str, str], log: str) -> int:
    """Starts a process whose output is appended to the file `log`; returns its id."""
    actions = [
        (os.POSIX_SPAWN_OPEN, STANDARD_INPUT, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, STANDARD_OUTPUT, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
        (os.POSIX_SPAWN_DUP2, STANDARD_OUTPUT, STANDARD_ERROR),
    ]
    return os.posix_spawn(argv[0], argv, env, file_actions=actions, setsigdef=[signal.SIGPIPE])


def main(owner: str, work_dir: str, *leftovers: str) -> None:
    for entry in os.listdir("/proc/self/fd"):
        if int(entry) > STANDARD_ERROR:  # Reserved ports: kept open here, not in the daemons.
            try:
                os.set_inheritable(int(entry), False)
            except OSError:
                continue  # The listing's own descriptor.
    supervisor = Supervisor(int(owner), work_dir)
    try:
        supervisor.serve()
    finally:
        supervisor.clean_up()
        os.chdir("/")
        for path in leftovers:
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(FileNotFoundError):  # The cache may have been cleaned meanwhile.
                    os.remove(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
