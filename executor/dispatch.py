"""The Mesos executor: has processes forked that hold its tasks, and stands between them and the agent."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from dike._version import __version__
from executor.channel import TERMINAL, Mailbox, TaskChannel, send
from executor.driver import ExecutorDriver, pymesos
from executor.environment import ZYGOTES_VARIABLE, Setup, ZygoteKind, process_environment
from executor.forked import ForkedProcess
from executor.messages import Addressed, decode
from executor.process import children, signal_group, wait_readable
from executor.slot_order import SlotOrder, decode_order
from executor.zygote import ForkRequest
from executor.zygote_pool import SLOT_PROCESS, ServedZygotes, ZygotePool, Zygotes

logger = logging.getLogger(__name__)

ACKNOWLEDGE_TIMEOUT_S = 15.0
LAUNCH_TIMEOUT_S = 180.0
"""How long an executor waits for its first task: an agent that was restarted meanwhile may have given it up."""
SHUTDOWN_GRACE_S = 0.5
"""Shorter than the least grace Mesos gives an executor."""
END_TIMEOUT_S = 90.0
"""How long a task may take, beyond the grace of what is in its slot, to end once it is told to; then the process that
holds it is killed. Longer than a zygote may take to answer, and outputs to be saved."""
LOOK_S = 5.0
"""How often deadlines are looked at, whatever comes."""
STREAMS = ("stdout", "stderr")


@dataclass
class _Task:
    """One that a process holds.

    Attributes:
        channel: what is said of it.
        is_late: whether it came to others, and the process has not said anything of it yet.
        due_s: when it has to have ended, on the monotonic clock; None if it has not been told to.
    """

    channel: TaskChannel
    is_late: bool = False
    due_s: float | None = None

    @property
    def is_killed(self) -> bool:
        """Whether it has been told to end."""
        return self.due_s is not None


class SlotProcess:
    """The process of slots (`executor.slot_process`), from the decision to fork it until nothing of it is left.

    Args:
        driver: sends what it says.
        data: the order of its tasks, encoded.
        folder: gets what it writes.
        is_shared: whether tasks that come later may be held by it, too, if their order is the same.

    Attributes:
        data: that given.
        missed: tasks that came when it was about to end, once it has: it has not heard of them.
    """

    def __init__(self, driver: ExecutorDriver, data: str, folder: Path, *, is_shared: bool) -> None:
        self._driver = driver
        self.data = data
        self._folder = folder
        self._is_shared = is_shared
        self._connection: Connection | None = None
        self._process: ForkedProcess | None = None
        self._groups: set[int] = set()
        self._tasks: dict[str, _Task] = {}
        self.missed: list[TaskChannel] = []
        self.is_over = False

    @property
    def pid(self) -> int | None:
        """Its id; None as long as it has none."""
        return None if self._process is None else self._process.pid

    @property
    def tasks(self) -> Collection[str]:
        """Ids of the tasks that it holds."""
        return self._tasks.keys()

    @property
    def watched(self) -> list[int]:
        """File descriptors that can be read when there is something to `poll`."""
        connection = [] if self._connection is None or self._process is None else [self._connection.fileno()]
        return [*connection, *(() if self._process is None else self._process.watched)]

    def takes(self, data: str) -> bool:
        """Whether it can hold a task with this order beside those that it holds."""
        return self._is_shared and data == self.data and any(not task.is_killed for task in self._tasks.values())

    def hold(self, channel: TaskChannel) -> None:
        """Has it hold a task."""
        self._tasks[channel.task_id] = _Task(channel, is_late=bool(self._tasks))
        if self._process is not None:
            self._launch(channel)

    def request(self, setup: Setup, kind: ZygoteKind) -> ForkRequest:
        """What a zygote is to be asked for.

        Args:
            setup: of the slots.
            kind: of the zygote.
        """
        changes = {**kind.changes(process_environment(setup)), ZYGOTES_VARIABLE: None}
        return ForkRequest(self._folder, (), self._folder, changes, module=SLOT_PROCESS)

    def descriptors(self, *, has_sandbox: bool) -> list[int]:
        """Its output and its end of a new connection; to be closed by whoever has asked for its process.

        A process that was forked without our knowing, over an earlier request, finds nobody at its own end.

        Args:
            has_sandbox: whether our own output is its sandbox's.
        """
        self._close()
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours.detach())
        if has_sandbox:
            output = [os.dup(descriptor) for descriptor in (1, 2)]
        else:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            output = [os.open(self._folder / stream, flags, 0o644) for stream in STREAMS]
        return [*output, theirs.detach()]

    def started(self, pid: int) -> None:
        """Its process exists."""
        if self.is_over:
            return
        try:
            self._process = ForkedProcess(pid)
        except ProcessLookupError:
            self.failed("its process ended at once")
            return
        # Now that somebody reads it: it may be longer than what a connection holds.
        self._send_bytes(self.data.encode())
        for task in self._tasks.values():
            self._launch(task.channel)

    def failed(self, reason: str) -> None:
        """It will never have a process."""
        if not self.is_over:
            for task in list(self._tasks.values()):
                self._say_end(task, "TASK_FAILED", reason)
            self._close()
            self.is_over = True

    def told(self, task_id: str, data: str) -> None:
        """Hands over what the framework says, which it repeats until it has been heard."""
        if self._process is not None:
            self._send({"task": task_id, "told": data})

    def kill(self, task_id: str, grace_s: float | None) -> None:
        """Has a task end.

        Args:
            task_id: which.
            grace_s: seconds between SIGTERM and SIGKILL for what is in it; None for what its order says.
        """
        task = self._tasks[task_id]
        own_s = float(decode(self.data).get("kill_grace_s", 0.0))
        task.due_s = time.monotonic() + END_TIMEOUT_S + (own_s if grace_s is None else grace_s)
        if self._process is None:
            self._say_end(task, "TASK_KILLED", "killed on request")
            if not self._tasks:
                # One that is forked all the same finds nobody at the other end.
                self.failed("killed on request")
            return
        self._send({"task": task_id, "kill": grace_s})
        self._limit(self._process)

    def poll(self) -> None:
        """Takes in what it says, and its end."""
        if self._process is None or self.is_over:
            return
        self._read()
        self._process.kill_if_due()
        self._process.poll()
        if self._process.over_s is None:
            return
        self._read()
        self.is_over = True
        self._close()
        left = list(self._tasks.values())
        if left:
            for group in self._groups:
                with contextlib.suppress(PermissionError):  # of somebody else by now
                    signal_group(group, signal.SIGKILL)
        for task in left:
            if task.is_late and not task.is_killed:
                self.missed.append(task.channel)
            else:
                self._say_end(task, "TASK_FAILED", "the process that held the task was killed")

    def _read(self) -> None:
        while self._connection is not None and self._connection.poll():
            try:
                said = json.loads(self._connection.recv_bytes())
            except (EOFError, OSError):
                self._close()
                return
            if "update" in said:
                self._updated(said["update"])
            elif "message" in said:
                self._send({"taken": send(self._driver, said["message"])})
            elif said["is_over"]:
                self._groups.discard(said["group"])
            else:
                self._groups.add(said["group"])

    def _updated(self, status: dict[str, Any]) -> None:
        task = self._tasks.get(status["task_id"]["value"])
        if task is not None:
            task.is_late = False
            if status["state"] in TERMINAL:
                del self._tasks[task.channel.task_id]
                if self._process is not None:
                    self._limit(self._process)
            self._driver.sendStatusUpdate(status)

    def _limit(self, process: ForkedProcess) -> None:
        """Gives the process until the first of its tasks' deadlines; END_TIMEOUT_S if it has no task any more."""
        now_s = time.monotonic()
        due_s = [task.due_s for task in self._tasks.values() if task.due_s is not None]
        process.relieve()
        if due_s or not self._tasks:
            process.limit(min(due_s, default=now_s + END_TIMEOUT_S) - now_s)

    def _launch(self, channel: TaskChannel) -> None:
        self._send({"task": channel.task_id, "launch": str(channel.sandbox)})

    def _send(self, message: dict[str, Any]) -> None:
        self._send_bytes(json.dumps(message).encode())

    def _send_bytes(self, message: bytes) -> None:
        if self._connection is not None:
            with contextlib.suppress(OSError):  # it has ended; what it has said last is still to be read
                self._connection.send_bytes(message)

    def _say_end(self, task: _Task, state: str, message: str) -> None:
        del self._tasks[task.channel.task_id]
        task.channel.update("TASK_KILLED" if task.is_killed else state, message)

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class Dispatcher(pymesos.Executor):
    """Runs the tasks it is given, all of one job or search.

    It ends with the last, so that Mesos has its resources back at once.

    The callbacks only hand work over; `main` does all of it, on the main thread.

    Args:
        sandbox: the executor's folder.
        executor_id: its id in Mesos; a task of the same id has the sandbox for itself, others have folders in there.
        served: socket of this machine's zygote server; empty for none.
    """

    def __init__(self, sandbox: Path, executor_id: str, served: str = "") -> None:
        self._sandbox = sandbox
        self._executor_id = executor_id
        self._mailbox: Mailbox[Callable[[], None]] = Mailbox()
        self._own = ZygotePool(sandbox)
        self._served = ServedZygotes(served) if served else None
        self._processes: list[SlotProcess] = []
        self._has_begun = False
        self._is_shut_down = False

    def main(self, driver: ExecutorDriver) -> None:
        """Waits for tasks, runs them, reports their ends and waits until the agent knows.

        Args:
            driver: a started driver that calls this object back.
        """
        give_up_s = time.monotonic() + LAUNCH_TIMEOUT_S
        pools: list[Zygotes] = [self._own, *([self._served] if self._served else [])]
        try:
            while not (self._is_shut_down and not self._processes):
                for do in self._mailbox.take():
                    do()
                for pool in pools:
                    pool.poll()
                for process in self._processes[:]:
                    process.poll()
                    if process.is_over:
                        self._processes.remove(process)
                        for channel in process.missed:
                            self._start(driver, channel, process.data)
                self._sweep()
                if self._processes or self._mailbox.is_waiting:
                    pass
                elif self._has_begun:
                    if not driver.wait_for_acknowledgements(ACKNOWLEDGE_TIMEOUT_S):
                        logger.error("the agent did not acknowledge the end of every task")
                    if not self._mailbox.is_waiting:
                        return
                elif time.monotonic() > give_up_s:
                    logger.error("no task came within %g s", LAUNCH_TIMEOUT_S)
                    return
                of_pools = [descriptor for pool in pools for descriptor in pool.watched]
                of_processes = [descriptor for process in self._processes for descriptor in process.watched]
                wait_readable([self._mailbox.fileno(), *of_pools, *of_processes], LOOK_S)
        finally:
            for pool in pools:
                pool.close()

    def _sweep(self) -> None:
        """Kills what processes of slots have left that were killed themselves: such orphans are ours."""
        if all(process.pid is not None for process in self._processes):
            ours = {*self._own.pids, *(process.pid for process in self._processes)}
            for orphan in set(children(os.getpid())) - ours:
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(orphan, signal.SIGKILL)
                    os.waitpid(orphan, 0)

    # Callbacks of pymesos, on its thread.

    def launchTask(self, driver: pymesos.MesosExecutorDriver, task: dict[str, Any]) -> None:  # noqa: N802
        """Takes a task."""
        self._mailbox.put(functools.partial(self._launch, driver, task["task_id"]["value"], task["data"]))

    def frameworkMessage(self, driver: pymesos.MesosExecutorDriver, message: str) -> None:  # noqa: N802
        """The framework wants something of a task."""
        self._mailbox.put(functools.partial(self._tell, message))

    def killTask(self, driver: pymesos.MesosExecutorDriver, task_id: dict[str, Any]) -> None:  # noqa: N802
        """Ends a task, gently first."""
        self._mailbox.put(functools.partial(self._kill, task_id["value"]))

    def shutdown(self, driver: pymesos.MesosExecutorDriver) -> None:
        """Mesos wants all to end: the framework or the agent is gone."""
        self._mailbox.put(self._shut_down)

    def error(self, driver: pymesos.MesosExecutorDriver, message: str) -> None:
        """The agent refuses this executor."""
        logger.error("error from Mesos: %s", message)
        self.shutdown(driver)

    # On the main thread.

    def _launch(self, driver: ExecutorDriver, task_id: str, data: str) -> None:
        self._has_begun = True
        folder = self._sandbox if task_id == self._executor_id else self._sandbox / task_id
        channel = TaskChannel(driver, task_id, folder)
        if self._is_shut_down:
            channel.update("TASK_KILLED", "its executor was shut down")
            return
        try:
            decode_order(data)
        except (KeyError, TypeError, ValueError) as error:
            message = f"this order is of another version of Dike than the agent's {__version__}: {error!r}"
            channel.update("TASK_FAILED", message)
            return
        channel.update("TASK_STARTING", "its process is started")
        folder.mkdir(exist_ok=True)
        self._start(driver, channel, data)

    def _start(self, driver: ExecutorDriver, channel: TaskChannel, data: str) -> None:
        """Has a task held by a process that there is, or by a new one."""
        process = next((process for process in self._processes if process.takes(data)), None)
        if process is not None:
            process.hold(channel)
            return
        order = decode_order(data)
        # Slots with GPUs have each its own.
        is_shared = isinstance(order, SlotOrder) and order.gpu_devices == ()
        process = SlotProcess(driver, data, channel.sandbox, is_shared=is_shared)
        process.hold(channel)
        self._processes.append(process)
        self._fork(process, order.setup, has_sandbox=channel.sandbox == self._sandbox)

    def _fork(self, process: SlotProcess, setup: Setup, *, has_sandbox: bool) -> None:
        kind = setup.kind(os.environ)
        request = process.request(setup, kind)

        def ask(zygotes: Zygotes) -> None:
            descriptors = process.descriptors(has_sandbox=has_sandbox)

            def answered(answer: int | str) -> None:
                for descriptor in descriptors:
                    os.close(descriptor)
                if isinstance(answer, int):
                    process.started(answer)
                elif zygotes is not self._own and not process.is_over:
                    logger.warning("%s; this executor imports by itself", answer)
                    ask(self._own)
                else:
                    process.failed(f"its process could not be started: {answer}")

            zygotes.ask(kind, request, descriptors, answered)

        ask(self._served or self._own)

    def _tell(self, message: str) -> None:
        try:
            addressed = Addressed.decode(message)
        except ValueError as error:
            logger.warning("message ignored: %s", error)
            return
        if (process := self._holder(addressed.task_id)) is not None:
            process.told(addressed.task_id, addressed.data)

    def _kill(self, task_id: str) -> None:
        if (process := self._holder(task_id)) is not None:
            process.kill(task_id, None)

    def _holder(self, task_id: str) -> SlotProcess | None:
        return next((process for process in self._processes if task_id in process.tasks), None)

    def _shut_down(self) -> None:
        self._is_shut_down = True
        for process in self._processes:
            for task_id in list(process.tasks):
                process.kill(task_id, SHUTDOWN_GRACE_S)
