"""The process of a slot, or of several: it is forked from a zygote, holds the tasks' own processes, and speaks to the
executor.

So what has been imported once serves all tasks of an executor, or of a machine. The executor is at the other end of a
connection (file descriptor 3); when that ends, so do the slots with all that is in them.
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
from executor.channel import TERMINAL, Slot, TaskChannel
from executor.job_slot import JobSlot
from executor.logs import log_to
from executor.messages import LaunchOrder
from executor.slot_order import SlotOrder, decode_order
from executor.trial_slot import TrialSlots
from executor.zygote import PROGRAM, Zygote

logger = logging.getLogger(__name__)

CONNECTION_FD = 3


def run(argv: Sequence[str]) -> NoReturn:
    """Holds slots to the end of their tasks, and ends the process.

    Args:
        argv: folder for what it writes. Order and tasks come by the connection.
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
    # Before threads start, and before we change what a script would inherit.
    first = zygote.fork_zygote(order.setup.launcher, log, [CONNECTION_FD])
    # Each run of a trial takes some files.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # more than the kernel allows
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    log_to(folder / "executor.log")
    own = Zygote(order.setup.preload, dict(os.environ), log, (*PROGRAM, order.setup.launcher), first)
    executor = ExecutorEnd(connection)
    channel = TaskChannel(executor, task["task"], Path(task["launch"]))
    try:
        holder, executor.slots[channel.task_id] = make_slot(channel, order, own)
        add = holder.add if isinstance(holder, TrialSlots) else None
        threading.Thread(target=executor.obey, args=(add,), name="executor", daemon=True).start()
        holder.run()
    except Exception as error:
        # Nobody else would tell the user why the slots ended.
        logger.exception("the slots failed")
        for task_id in {channel.task_id, *executor.slots}:
            TaskChannel(executor, task_id, folder).update("TASK_FAILED", f"the executor failed: {error!r}")
    os._exit(0)


def make_slot(channel: TaskChannel, order: LaunchOrder | SlotOrder, own: Zygote) -> tuple[JobSlot | TrialSlots, Slot]:
    """The slot for a task, and what holds it.

    Args:
        channel: the task.
        order: of a training job or of a search.
        own: forks the slot's processes.
    """
    if isinstance(order, LaunchOrder):
        job = JobSlot(channel, order, own)
        return job, job
    trials = TrialSlots(order, channel.sandbox, own)
    return trials, trials.add(channel)


class ExecutorEnd:
    """The executor, seen from a slot's process; any thread may call it.

    Attributes:
        slots: those whose tasks have not ended, by the tasks' ids.
    """

    def __init__(self, connection: Connection) -> None:
        self.slots: dict[str, Slot] = {}
        self._connection = connection
        self._sending = threading.Lock()
        self._asking = threading.Lock()
        self._answered = threading.Condition()
        self._was_taken: bool | None = None
        self._is_gone = False

    def sendStatusUpdate(self, status: dict[str, Any]) -> None:  # noqa: N802 (as pymesos calls it)
        """Has the executor send a status update; one that is gone has nobody to send it to."""
        if status["state"] in TERMINAL:
            self.slots.pop(status["task_id"]["value"], None)
        with contextlib.suppress(OSError):
            self._send({"update": status})

    def sendFrameworkMessage(self, data: str) -> None:  # noqa: N802
        """Has the executor send a framework message, and waits until the agent has taken it.

        Raises:
            OSError: if the agent has not, or the executor is gone.
        """
        with self._asking:
            self._was_taken = None
            self._send({"message": data})
            with self._answered:
                self._answered.wait_for(lambda: self._is_gone or self._was_taken is not None)
            if not self._was_taken:
                raise OSError("the agent did not take it")

    def processStarted(self, pid: int) -> None:  # noqa: N802
        """Tells the executor of a process that leads a group."""
        with contextlib.suppress(OSError):  # it is gone
            self._send({"group": pid, "is_over": False})

    def processEnded(self, pid: int) -> None:  # noqa: N802
        """Tells the executor that nothing is left of it."""
        with contextlib.suppress(OSError):  # it is gone
            self._send({"group": pid, "is_over": True})

    def obey(self, add: Callable[[TaskChannel], Slot] | None) -> None:
        """Hands over what the executor says, until it is gone; the slots end then.

        Args:
            add: makes a slot for one more task; None for a training job, whose task has the process for itself.
        """
        while True:
            try:
                said = json.loads(self._connection.recv_bytes())
            except (EOFError, OSError):
                break
            if "taken" in said:
                with self._answered:
                    self._was_taken = bool(said["taken"])
                    self._answered.notify_all()
                continue
            task_id = said["task"]
            if "launch" in said and add is not None:
                self.slots[task_id] = add(TaskChannel(self, task_id, Path(said["launch"])))
            elif (slot := self.slots.get(task_id)) is None:
                pass  # its task has ended
            elif "told" in said:
                slot.told(said["told"])
            else:
                slot.kill(said["kill"])
        logger.error("the executor is gone: the slot ends")
        with self._answered:
            self._is_gone = True
            self._answered.notify_all()
        for slot in list(self.slots.values()):
            slot.kill(0.0)

    def _send(self, message: dict[str, Any]) -> None:
        with self._sending:
            self._connection.send_bytes(json.dumps(message).encode())
