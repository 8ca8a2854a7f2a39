"""The Mesos executor: has slot processes forked for its tasks, and relays between them and the agent."""

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
from executor.zygote_pool import SLOT_PROCESS, ZygotePool, Zygotes, ZygoteServerClient

logger = logging.getLogger(__name__)

ACKNOWLEDGE_TIMEOUT_S = 15.0
LAUNCH_TIMEOUT_S = 180.0
"""Maximum wait for the first task: a restarted agent may have dropped it."""
SHUTDOWN_GRACE_S = 0.5
"""Shorter than the minimum grace period that Mesos allows an executor."""
TASK_END_TIMEOUT_S = 90.0
"""Maximum time for a task to end once it is killed, beyond the grace period of its processes; then its slot process is
killed. Longer than a zygote may take to answer, and than outputs take to be saved.
"""
CHECK_INTERVAL_S = 5.0
STREAMS = ("stdout", "stderr")


@dataclass
class _Task:
    """A task of a slot process.

    Attributes:
        channel: its outgoing side.
        is_unacknowledged: whether it joined a process with other tasks, which has not reported on it yet.
        deadline_s: monotonic time by which it must have ended; None if it is not being killed.
    """

    channel: TaskChannel
    is_unacknowledged: bool = False
    deadline_s: float | None = None

    @property
    def kill_requested(self) -> bool:
        return self.deadline_s is not None


class SlotProcess:
    """A process of slots (`executor.slot_process`), from the request to the zygote until nothing of it is left.

    Args:
        driver: sends its messages.
        data: the encoded order of its tasks.
        folder: gets its output.
        is_shared: whether later tasks with the same order may join it.

    Attributes:
        data: the encoded order.
        missed_tasks: tasks that joined while it ended and that it never received; to be started again.
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
        self.missed_tasks: list[TaskChannel] = []
        self.has_ended = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def tasks(self) -> Collection[str]:
        return self._tasks.keys()

    @property
    def watched_fds(self) -> list[int]:
        connection = [] if self._connection is None or self._process is None else [self._connection.fileno()]
        return [*connection, *(() if self._process is None else self._process.watched_fds)]

    def accepts(self, data: str) -> bool:
        """Whether a task with this order may join its current tasks."""
        return self._is_shared and data == self.data and any(not task.kill_requested for task in self._tasks.values())

    def add_task(self, channel: TaskChannel) -> None:
        self._tasks[channel.task_id] = _Task(channel, is_unacknowledged=bool(self._tasks))
        if self._process is not None:
            self._launch(channel)

    def make_fork_request(self, setup: Setup, kind: ZygoteKind) -> ForkRequest:
        changes = {**kind.changes(process_environment(setup)), ZYGOTES_VARIABLE: None}
        return ForkRequest(self._folder, (), self._folder, changes, module=SLOT_PROCESS)

    def open_descriptors(self, *, has_sandbox: bool) -> list[int]:
        """Opens its output files and its end of a new connection; the caller closes them.

        A process that was forked unnoticed, for an earlier request, finds its connection closed.
        """
        self._close()
        own_end, peer_end = socket.socketpair()
        self._connection = Connection(own_end.detach())
        if has_sandbox:
            output = [os.dup(descriptor) for descriptor in (1, 2)]
        else:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            output = [os.open(self._folder / stream, flags, 0o644) for stream in STREAMS]
        return [*output, peer_end.detach()]

    def adopt(self, pid: int) -> None:
        """Takes over the forked process; sends it its order and tasks."""
        if self.has_ended:
            return
        try:
            self._process = ForkedProcess(pid)
        except ProcessLookupError:
            self.fail("its process ended immediately")
            return
        # Not earlier: the order may exceed the socket's buffer, and now there is a reader.
        self._send_bytes(self.data.encode())
        for task in self._tasks.values():
            self._launch(task.channel)

    def fail(self, reason: str) -> None:
        """Fails its tasks: it will never have a process."""
        if not self.has_ended:
            for task in list(self._tasks.values()):
                self._report_end(task, "TASK_FAILED", reason)
            self._close()
            self.has_ended = True

    def forward(self, task_id: str, data: str) -> None:
        """Forwards a message of the framework, which repeats it until it is acknowledged."""
        if self._process is not None:
            self._send({"task": task_id, "forward": data})

    def kill(self, task_id: str, grace_s: float | None) -> None:
        task = self._tasks[task_id]
        default_grace_s = float(decode(self.data).get("kill_grace_s", 0.0))
        task.deadline_s = time.monotonic() + TASK_END_TIMEOUT_S + (default_grace_s if grace_s is None else grace_s)
        if self._process is None:
            self._report_end(task, "TASK_KILLED", "killed on request")
            if not self._tasks:
                # If it is forked nevertheless, it finds its connection closed and exits.
                self.fail("killed on request")
            return
        self._send({"task": task_id, "kill": grace_s})
        self._update_deadline(self._process)

    def drain(self, task_id: str) -> None:
        """Has a task save its work and end."""
        if self._process is None:
            self.kill(task_id, None)
        else:
            self._send({"task": task_id, "drain": True})

    def poll(self) -> None:
        """Handles its messages, its deadline and its end."""
        if self._process is None or self.has_ended:
            return
        self._read()
        self._process.kill_if_due()
        self._process.poll()
        if self._process.ended_at_s is None:
            return
        self._read()
        self.has_ended = True
        self._close()
        left = list(self._tasks.values())
        if left:
            for group in self._groups:
                with contextlib.suppress(PermissionError):  # the id is another account's by now
                    signal_group(group, signal.SIGKILL)
        for task in left:
            if task.is_unacknowledged and not task.kill_requested:
                self.missed_tasks.append(task.channel)
            else:
                self._report_end(task, "TASK_FAILED", "the process that held the task was killed")

    def _read(self) -> None:
        while self._connection is not None and self._connection.poll():
            try:
                message = json.loads(self._connection.recv_bytes())
            except (EOFError, OSError):
                self._close()
                return
            if "update" in message:
                self._apply_update(message["update"])
            elif "message" in message:
                self._send({"taken": send(self._driver, message["message"])})
            elif message["is_over"]:
                self._groups.discard(message["group"])
            else:
                self._groups.add(message["group"])

    def _apply_update(self, status: dict[str, Any]) -> None:
        task = self._tasks.get(status["task_id"]["value"])
        if task is not None:
            task.is_unacknowledged = False
            if status["state"] in TERMINAL:
                del self._tasks[task.channel.task_id]
                if self._process is not None:
                    self._update_deadline(self._process)
            self._driver.sendStatusUpdate(status)

    def _update_deadline(self, process: ForkedProcess) -> None:
        """Sets the earliest deadline of its tasks; `TASK_END_TIMEOUT_S` if no task is left."""
        now_s = time.monotonic()
        deadlines_s = [task.deadline_s for task in self._tasks.values() if task.deadline_s is not None]
        process.clear_deadline()
        if deadlines_s or not self._tasks:
            process.set_deadline(min(deadlines_s, default=now_s + TASK_END_TIMEOUT_S) - now_s)

    def _launch(self, channel: TaskChannel) -> None:
        self._send({"task": channel.task_id, "launch": str(channel.sandbox)})

    def _send(self, message: dict[str, Any]) -> None:
        self._send_bytes(json.dumps(message).encode())

    def _send_bytes(self, message: bytes) -> None:
        if self._connection is not None:
            with contextlib.suppress(OSError):  # it has ended; its last messages are still to be read
                self._connection.send_bytes(message)

    def _report_end(self, task: _Task, state: str, message: str) -> None:
        del self._tasks[task.channel.task_id]
        task.channel.update("TASK_KILLED" if task.kill_requested else state, message)

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class Dispatcher(pymesos.Executor):
    """Runs the tasks of one job or search. Ends with the last task, so that Mesos gets the resources back immediately.

    Callbacks only enqueue work; `main` does it on the main thread.

    Args:
        sandbox: the executor's folder.
        executor_id: Mesos' id of the executor; the task of the same id uses the sandbox itself, others a folder in it.
        zygote_socket: socket of this machine's zygote server; empty for none.
    """

    def __init__(self, sandbox: Path, executor_id: str, zygote_socket: str = "") -> None:
        self._sandbox = sandbox
        self._executor_id = executor_id
        self._mailbox: Mailbox[Callable[[], None]] = Mailbox()
        self._local_zygotes = ZygotePool(sandbox)
        self._server_zygotes = ZygoteServerClient(zygote_socket) if zygote_socket else None
        self._processes: list[SlotProcess] = []
        self._has_launched = False
        self._is_shut_down = False

    def main(self, driver: ExecutorDriver) -> None:
        """Runs tasks until the last one has ended and the agent has acknowledged all updates."""
        give_up_s = time.monotonic() + LAUNCH_TIMEOUT_S
        pools: list[Zygotes] = [self._local_zygotes, *([self._server_zygotes] if self._server_zygotes else [])]
        try:
            while not (self._is_shut_down and not self._processes):
                for do in self._mailbox.take():
                    do()
                for pool in pools:
                    pool.poll()
                for process in self._processes[:]:
                    process.poll()
                    if process.has_ended:
                        self._processes.remove(process)
                        for channel in process.missed_tasks:
                            self._start(driver, channel, process.data)
                self._kill_orphans()
                if self._processes or self._mailbox.has_messages:
                    pass
                elif self._has_launched:
                    if not driver.wait_for_acknowledgements(ACKNOWLEDGE_TIMEOUT_S):
                        logger.error("the agent did not acknowledge the end of every task")
                    if not self._mailbox.has_messages:
                        return
                elif time.monotonic() > give_up_s:
                    logger.error("no task came within %g s", LAUNCH_TIMEOUT_S)
                    return
                pool_fds = [descriptor for pool in pools for descriptor in pool.watched_fds]
                process_fds = [descriptor for process in self._processes for descriptor in process.watched_fds]
                wait_readable([self._mailbox.fileno(), *pool_fds, *process_fds], CHECK_INTERVAL_S)
        finally:
            for pool in pools:
                pool.close()

    def _kill_orphans(self) -> None:
        """Kills what killed slot processes have left behind: this process has adopted it."""
        if all(process.pid is not None for process in self._processes):
            known_pids = {*self._local_zygotes.pids, *(process.pid for process in self._processes)}
            for orphan in set(children(os.getpid())) - known_pids:
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(orphan, signal.SIGKILL)
                    os.waitpid(orphan, 0)

    # Callbacks of pymesos, on its thread.

    def launchTask(self, driver: pymesos.MesosExecutorDriver, task: dict[str, Any]) -> None:  # noqa: N802
        self._mailbox.put(functools.partial(self._launch, driver, task["task_id"]["value"], task["data"]))

    def frameworkMessage(self, driver: pymesos.MesosExecutorDriver, message: str) -> None:  # noqa: N802
        self._mailbox.put(functools.partial(self._forward, message))

    def killTask(self, driver: pymesos.MesosExecutorDriver, task_id: dict[str, Any]) -> None:  # noqa: N802
        self._mailbox.put(functools.partial(self._kill, task_id["value"]))

    def drainTask(self, driver: pymesos.MesosExecutorDriver, task_id: dict[str, Any]) -> None:  # noqa: N802
        """Ends a task whose agent is leaving, once it has saved its work."""
        self._mailbox.put(functools.partial(self._drain, task_id["value"]))

    def shutdown(self, driver: pymesos.MesosExecutorDriver) -> None:
        """Ends all tasks: the framework or the agent is gone."""
        self._mailbox.put(self._shut_down)

    def error(self, driver: pymesos.MesosExecutorDriver, message: str) -> None:
        """Logs that the agent refuses this executor, and ends all tasks."""
        logger.error("error from Mesos: %s", message)
        self.shutdown(driver)

    # On the main thread.

    def _launch(self, driver: ExecutorDriver, task_id: str, data: str) -> None:
        self._has_launched = True
        folder = self._sandbox if task_id == self._executor_id else self._sandbox / task_id
        channel = TaskChannel(driver, task_id, folder)
        if self._is_shut_down:
            channel.update("TASK_KILLED", "its executor is shutting down")
            return
        try:
            decode_order(data)
        except (KeyError, TypeError, ValueError) as error:
            message = (
                f"the order was written by another version of Dike than the agent's {__version__}; "
                f"install the same version on both: {error!r}"
            )
            channel.update("TASK_FAILED", message)
            return
        channel.update("TASK_STARTING", "its process is being started")
        folder.mkdir(exist_ok=True)
        self._start(driver, channel, data)

    def _start(self, driver: ExecutorDriver, channel: TaskChannel, data: str) -> None:
        process = next((process for process in self._processes if process.accepts(data)), None)
        if process is not None:
            process.add_task(channel)
            return
        order = decode_order(data)
        # Each slot with GPUs has a process of its own.
        is_shared = isinstance(order, SlotOrder) and order.gpu_devices == ()
        process = SlotProcess(driver, data, channel.sandbox, is_shared=is_shared)
        process.add_task(channel)
        self._processes.append(process)
        self._fork(process, order.setup, has_sandbox=channel.sandbox == self._sandbox)

    def _fork(self, process: SlotProcess, setup: Setup, *, has_sandbox: bool) -> None:
        kind = setup.kind(os.environ)
        request = process.make_fork_request(setup, kind)

        def ask(zygotes: Zygotes) -> None:
            descriptors = process.open_descriptors(has_sandbox=has_sandbox)

            def on_answer(answer: int | str) -> None:
                for descriptor in descriptors:
                    os.close(descriptor)
                if isinstance(answer, int):
                    process.adopt(answer)
                elif zygotes is not self._local_zygotes and not process.has_ended:
                    logger.warning("%s; this executor uses a zygote of its own", answer)
                    ask(self._local_zygotes)
                else:
                    process.fail(f"its process cannot be started: {answer}")

            zygotes.request_fork(kind, request, descriptors, on_answer)

        ask(self._server_zygotes or self._local_zygotes)

    def _forward(self, message: str) -> None:
        try:
            addressed = Addressed.decode(message)
        except ValueError as error:
            logger.warning("message ignored: %s", error)
            return
        if (process := self._process_of(addressed.task_id)) is not None:
            process.forward(addressed.task_id, addressed.data)

    def _kill(self, task_id: str) -> None:
        if (process := self._process_of(task_id)) is not None:
            process.kill(task_id, None)

    def _drain(self, task_id: str) -> None:
        if (process := self._process_of(task_id)) is not None:
            process.drain(task_id)

    def _process_of(self, task_id: str) -> SlotProcess | None:
        return next((process for process in self._processes if task_id in process.tasks), None)

    def _shut_down(self) -> None:
        self._is_shut_down = True
        for process in self._processes:
            for task_id in list(process.tasks):
                process.kill(task_id, SHUTDOWN_GRACE_S)
