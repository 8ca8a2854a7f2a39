"""The process of one or several slots, forked from a zygote, so that imports are shared by an executor or a machine.

It runs the tasks' own processes, and is connected to the executor by a socket (file descriptor 3). When that closes,
the slots end with all their processes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from dike import process, zygote
from executor.channel import TERMINAL, TaskChannel, TaskSlot
from executor.job_slot import JobSlot
from executor.logs import log_to
from executor.messages import LaunchOrder
from executor.slot_order import SlotOrder, decode_order
from executor.trial_slot import TrialSlots
from executor.zygote import PROGRAM, Zygote

logger = logging.getLogger(__name__)

CONNECTION_FD = 3


def run(argv: Sequence[str]) -> NoReturn:
    """Runs slots until their tasks have ended, then exits. Receives its order and tasks by the socket.

    `argv` is the folder for its output.
    """
    folder = Path(argv[0])
    os.environ[process.PARENT_VARIABLE] = str(os.getpid())
    process.set_name("dike slot")
    process.adopt_orphans()
    connection = Connection(CONNECTION_FD)
    try:
        data = connection.recv_bytes().decode()
        task = json.loads(connection.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)  # the executor is gone
    order = decode_order(data)
    log = folder / "zygote.out"
    # Before threads start, and before changes that scripts would inherit.
    split_off = zygote.fork_zygote(order.setup.launcher, log, [CONNECTION_FD])
    # Each run of a trial has several open files.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # more than the kernel allows
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    log_to(folder / "executor.log")
    own_zygote = Zygote(order.setup.preload, dict(os.environ), log, (*PROGRAM, order.setup.launcher), split_off)
    executor = ExecutorConnection(connection)
    channel = TaskChannel(executor, task["task"], Path(task["launch"]))
    try:
        holder, executor.slots[channel.task_id] = make_slot(channel, order, own_zygote)
        add = holder.add if isinstance(holder, TrialSlots) else None
        threading.Thread(target=executor.receive_messages, args=(add,), name="executor", daemon=True).start()
        holder.run()
    except Exception as error:
        # No other process can report to the user why the slots ended.
        logger.exception("the slots failed")
        for task_id in {channel.task_id, *executor.slots}:
            TaskChannel(executor, task_id, folder).update("TASK_FAILED", f"the executor failed: {error!r}")
    os._exit(0)


def make_slot(
    channel: TaskChannel, order: LaunchOrder | SlotOrder, own_zygote: Zygote
) -> tuple[JobSlot | TrialSlots, TaskSlot]:
    """Creates the slot for a task; returns what runs the slots of this process, and the slot."""
    if isinstance(order, LaunchOrder):
        job = JobSlot(channel, order, own_zygote)
        return job, job
    trials = TrialSlots(order, channel.sandbox, own_zygote)
    return trials, trials.add(channel)


class ExecutorConnection:
    """The connection to the executor. Thread-safe. `slots` maps ids of tasks that have not ended to their slots."""

    def __init__(self, connection: Connection) -> None:
        self.slots: dict[str, TaskSlot] = {}
        self._connection = connection
        self._send_lock = threading.Lock()
        self._request_lock = threading.Lock()
        self._answered = threading.Condition()
        self._was_taken: bool | None = None
        self._is_gone = False

    def sendStatusUpdate(self, status: dict[str, Any]) -> None:  # noqa: N802 (as pymesos calls it)
        """Sends a status update by the executor; a no-op if that has ended."""
        if status["state"] in TERMINAL:
            self.slots.pop(status["task_id"]["value"], None)
        with contextlib.suppress(OSError):
            self._send({"update": status})

    def sendFrameworkMessage(self, data: str) -> None:  # noqa: N802
        """Sends a framework message by the executor, and waits until the agent accepts it.

        Raises:
            OSError: if the agent has not accepted it, or the executor has ended.
        """
        with self._request_lock:
            self._was_taken = None
            self._send({"message": data})
            with self._answered:
                self._answered.wait_for(lambda: self._is_gone or self._was_taken is not None)
            if not self._was_taken:
                raise OSError("the agent did not accept it")

    def processStarted(self, pid: int) -> None:  # noqa: N802
        with contextlib.suppress(OSError):  # it is gone
            self._send({"group": pid, "is_over": False})

    def processEnded(self, pid: int) -> None:  # noqa: N802
        with contextlib.suppress(OSError):  # it is gone
            self._send({"group": pid, "is_over": True})

    def receive_messages(self, add: Callable[[TaskChannel], TaskSlot] | None) -> None:
        """Dispatches the executor's messages until it has ended; then ends the slots.

        `add` creates a slot for one more task; None for a training job, whose process has only one.
        """
        while True:
            try:
                message = json.loads(self._connection.recv_bytes())
            except (EOFError, OSError):
                break
            if "taken" in message:
                with self._answered:
                    self._was_taken = bool(message["taken"])
                    self._answered.notify_all()
                continue
            task_id = message["task"]
            if "launch" in message and add is not None:
                self.slots[task_id] = add(TaskChannel(self, task_id, Path(message["launch"])))
            elif (slot := self.slots.get(task_id)) is None:
                pass  # its task has ended
            elif "forward" in message:
                slot.receive(message["forward"])
            elif "drain" in message:
                slot.drain()
            else:
                slot.kill(message["kill"])
        logger.error("the executor has ended: the slots end")
        with self._answered:
            self._is_gone = True
            self._answered.notify_all()
        for slot in list(self.slots.values()):
            slot.kill(0.0)

    def _send(self, message: dict[str, Any]) -> None:
        with self._send_lock:
            self._connection.send_bytes(json.dumps(message).encode())
