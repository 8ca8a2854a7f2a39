"""The process that starts a cluster's daemons and outlives its owner just long enough to clean up.

    python -SEsP supervisor.py OWNER_PID WORK_DIR SECRET_FILE [FOLDER_TO_REMOVE]

A program of its own that needs the standard library only. The owner writes one JSON object a line to its standard input
and reads one answer a line:

    {"command": "start", "name": ..., "argv": [...], "env": {...}, "log": ...}   -> {"pid": ...}
    {"command": "keep", "name": ...}                      -> {"pid": ...}   (from then on it is started again)
    {"command": "signal", "name": ..., "signal": ...}     -> {"pid": ...}   (what it ends or stops is to stay so)
    {"command": "look", "name": ...}                      -> {"pid": ..., "status": null or how it ended}
    {"command": "losses"}                                 -> name of what has been given up: how it ended last
    {"command": "detach"}                                 -> {}   (from then on it ends at SIGTERM only)
    {"command": "stop"}                                   no answer: it ends

A daemon that is kept and ends, or stands still for `STANDSTILL_S`, is started again as it was. It is given up when it
has been started `MOST_STARTS` times in a row and has ended each time within `STEADY_S`.

When the input ends, the owner ends or SIGTERM arrives, agents are asked to leave (SIGUSR1 shuts their executors down),
what is left is killed - daemons, everything descended from them, everything that carries the cluster's work folder in
MESOS_DIRECTORY, as executors and their children do -, the cluster's secret is removed, and a temporary work folder with
it. Processes whose parent has ended become children of the supervisor (PR_SET_CHILD_SUBREAPER), so nothing gets away by
a double fork. If the supervisor itself is killed, the system kills the daemons (see `daemon.end_with`).

It has one thread and starts the daemons from it: the system ties their end to the thread that started them.
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
LOOK_INTERVAL_S = 0.1
LEAVE_TIMEOUT_S = 8.0
KILL_TIMEOUT_S = 10.0
ENDING_SIGNALS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1})
STANDSTILL_S = 5.0
STEADY_S = 60.0
MOST_STARTS = 3
START_PAUSES_S = (0.0, 0.5, 2.0)
"""What is waited before each of them: at first nothing, then so long that what was in the way may be gone."""
AGENT_PREFIX = "agent-"
STANDARD_INPUT, STANDARD_OUTPUT, STANDARD_ERROR = 0, 1, 2


def task_processes(work_dir: str) -> list[int]:
    """Ids of the processes that belong to a container of the cluster in `work_dir`, by their environment."""
    mark = b"\0MESOS_DIRECTORY=" + os.fsencode(work_dir) + b"/"
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/environ", "rb") as file:
                    if mark in b"\0" + file.read():
                        found.append(int(entry))
            except OSError:
                continue  # It has ended, or belongs to someone else.
    return found


def descendants(ancestor: int) -> list[int]:
    """Ids of the living children of `ancestor`, their children and so on."""
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


class Daemon:
    """A process that was asked for, and how it stands.

    Attributes:
        pid: as last started.
        status: how it ended; None while it runs.
        is_kept: whether it is started again when it ends.
    """

    def __init__(self, argv: list[str], env: dict[str, str], log: str) -> None:
        self._what = argv, env, log
        self.is_kept = False
        self._starts = 0
        """How often in a row it was started again."""
        self._due_s: float | None = None
        """When it is started again."""
        self._start()

    def _start(self) -> None:
        self.status: int | None = None
        self._stopped_s: float | None = None
        self._is_paused = False
        """Whether it stands still because the owner wants it to."""
        self._started_s = time.monotonic()
        self.pid = start(*self._what)

    @property
    def is_lost(self) -> bool:
        """Whether it has been given up."""
        return self.is_kept and self.status is not None and self._due_s is None

    def stopped(self) -> None:
        """Its process stands still."""
        self._stopped_s = time.monotonic()

    def continued(self) -> None:
        """Its process goes on."""
        self._stopped_s = None

    def signal(self, number: int) -> None:
        """Sends it a signal of the owner's."""
        self.is_kept = self.is_kept and number not in ENDING_SIGNALS
        if number in (signal.SIGSTOP, signal.SIGCONT):
            self._is_paused = number == signal.SIGSTOP
        if self.status is None:
            send(self.pid, number)

    def ended(self, status: int) -> None:
        """Its process has ended."""
        self.status = status
        now_s = time.monotonic()
        if now_s - self._started_s >= STEADY_S:
            self._starts = 0
        if self.is_kept and self._starts < MOST_STARTS:
            self._due_s = now_s + START_PAUSES_S[self._starts]

    def look_after(self) -> None:
        """Starts it again when that is due, and ends it if it stands still."""
        now_s = time.monotonic()
        if not self.is_kept:
            return
        if self.status is None and self._stopped_s is not None and not self._is_paused:
            if now_s - self._stopped_s >= STANDSTILL_S:
                self._stopped_s = None
                send(self.pid, signal.SIGKILL)
        elif self._due_s is not None and now_s >= self._due_s:
            self._due_s = None
            self._starts += 1
            try:
                self._start()
            except OSError as error:
                print(f"{self._what[0]} could not be started again: {error}", file=sys.stderr, flush=True)
                self.ended(1)


class Supervisor:
    """The daemons of one cluster."""

    def __init__(self, owner: int, work_dir: str) -> None:
        self._owner: int | None = owner
        self._work_dir = work_dir
        self._daemons: dict[str, Daemon] = {}
        self._stopping = False
        self._input = b""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def _on_signal(self, number: int, frame: object) -> None:
        self._stopping = True

    def serve(self) -> None:
        """Answers the owner until it is time to end."""
        while not self._stopping:
            inputs = [STANDARD_INPUT] if self._owner else []
            readable, _, _ = select.select(inputs, [], [], LOOK_INTERVAL_S)
            self._reap()
            for daemon in self._daemons.values():
                daemon.look_after()
            if readable:
                self._read()
            elif self._owner and os.getppid() != self._owner:
                self._stopping = True  # A child of the owner may still hold the pipe open.

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
                self._let_go_of_owner()

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        command = request["command"]
        if command == "detach":
            return {}
        self._reap()
        if command == "losses":
            return {name: daemon.status for name, daemon in self._daemons.items() if daemon.is_lost}
        name = request["name"]
        if command == "start":
            self._daemons[name] = Daemon(request["argv"], request["env"], request["log"])
        daemon = self._daemons[name]
        if command == "keep":
            daemon.is_kept = True
            if daemon.status is not None:  # Between the owner's last look and this.
                daemon.ended(daemon.status)
        elif command == "signal":
            daemon.signal(request["signal"])
        return {"pid": daemon.pid, "status": daemon.status}

    def _let_go_of_owner(self) -> None:
        """Goes on without the owner and its pipes."""
        self._owner = None
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, STANDARD_INPUT)
        os.dup2(nowhere, STANDARD_OUTPUT)
        os.close(nowhere)

    def _reap(self) -> None:
        """Takes note of the children that have ended, adopted ones included, and of daemons that stand still."""
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
                        daemon.stopped()
                    elif os.WIFCONTINUED(status):
                        daemon.continued()
                    else:
                        daemon.ended(os.waitstatus_to_exitcode(status))

    def _running(self, names: list[str]) -> list[int]:
        self._reap()
        return [self._daemons[name].pid for name in names if self._daemons[name].status is None]

    def clean_up(self) -> None:
        """Ends everything that belongs to the cluster."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        agents = [name for name in self._daemons if name.startswith(AGENT_PREFIX)]
        for pid in self._running(agents):
            send(pid, signal.SIGCONT)
            send(pid, signal.SIGUSR1)
        deadline = time.monotonic() + LEAVE_TIMEOUT_S
        while self._running(agents) and time.monotonic() < deadline:
            time.sleep(0.02)
        # Agents first: a killed executor must not look like a failure to one that still runs.
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
    """Starts a process whose output goes to the end of the file `log`; returns its id."""
    actions = [
        (os.POSIX_SPAWN_OPEN, STANDARD_INPUT, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, STANDARD_OUTPUT, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
        (os.POSIX_SPAWN_DUP2, STANDARD_OUTPUT, STANDARD_ERROR),
    ]
    return os.posix_spawn(argv[0], argv, env, file_actions=actions, setsigdef=[signal.SIGPIPE])


def main(owner: str, work_dir: str, secret_file: str, zygotes_link: str, *temporary: str) -> None:
    for entry in os.listdir("/proc/self/fd"):
        if int(entry) > STANDARD_ERROR:  # Reserved ports: held here, not in the daemons.
            try:
                os.set_inheritable(int(entry), False)
            except OSError:
                continue  # The listing's own descriptor.
    supervisor = Supervisor(int(owner), work_dir)
    try:
        supervisor.serve()
    finally:
        supervisor.clean_up()
        for known in (secret_file, zygotes_link):
            with contextlib.suppress(FileNotFoundError):  # Somebody may have cleaned the cache meanwhile.
                os.remove(known)
        os.chdir("/")
        for folder in temporary:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
