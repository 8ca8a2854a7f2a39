"""The Mesos executor: takes one task and gives it to the slot that its order asks for."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

from dike._version import __version__
from executor.channel import Slot, TaskChannel, TaskEnd
from executor.driver import ExecutorDriver, pymesos
from executor.elastic_slot import ElasticSlot
from executor.messages import LaunchOrder, decode
from executor.slot import JobSlot
from executor.slot_order import SlotOrder
from executor.trial_slot import TrialSlot

logger = logging.getLogger(__name__)

ACKNOWLEDGE_TIMEOUT_S = 15.0
LAUNCH_TIMEOUT_S = 180.0
"""How long an executor waits for its task: an agent that was restarted meanwhile may have given the task up."""
SHUTDOWN_GRACE_S = 0.5
"""Shorter than the least grace Mesos gives an executor."""


class Dispatcher(pymesos.Executor):
    """Runs its one task in a slot, then ends, so that Mesos has its resources back at once.

    The callbacks only hand work over; `main` runs the slot on the main thread.
    """

    def __init__(self, sandbox: Path) -> None:
        self._sandbox = sandbox
        self._arrived = threading.Event()
        self._channel: TaskChannel | None = None
        self._slot: Slot | None = None

    def main(self, driver: ExecutorDriver) -> None:
        """Waits for the task, runs it, reports its end and waits until the agent knows.

        Args:
            driver: a started driver that calls this object back.
        """
        if not self._arrived.wait(LAUNCH_TIMEOUT_S):
            logger.error("no task came within %g s", LAUNCH_TIMEOUT_S)
            return
        state = "the refusal of the task"
        if self._slot is not None and self._channel is not None:
            try:
                end = self._slot.run()
            except Exception as error:
                # Nobody else would tell the user why the slot ended.
                logger.exception("the slot failed")
                end = TaskEnd("TASK_FAILED", f"the executor failed: {error!r}")
            self._channel.update(end.state, end.message, end.data)
            state = end.state
        if not driver.wait_for_acknowledgements(ACKNOWLEDGE_TIMEOUT_S):
            logger.error("the agent did not acknowledge %s", state)

    # Callbacks of pymesos, on its thread.

    def launchTask(self, driver: pymesos.MesosExecutorDriver, task: dict[str, Any]) -> None:  # noqa: N802
        """Takes the slot's task."""
        channel = TaskChannel(driver, task["task_id"]["value"], self._sandbox)
        if self._slot is not None:
            channel.update("TASK_FAILED", "this slot has a task already")
            return
        try:
            self._slot = make_slot(channel, task["data"])
            self._channel = channel
        except (KeyError, TypeError, ValueError) as error:
            message = f"this order is of another version of Dike than the agent's {__version__}: {error!r}"
            channel.update("TASK_FAILED", message)
        self._arrived.set()

    def frameworkMessage(self, driver: pymesos.MesosExecutorDriver, message: str) -> None:  # noqa: N802
        """The framework wants something of the slot."""
        if self._slot is not None:
            self._slot.told(message)

    def killTask(self, driver: pymesos.MesosExecutorDriver, task_id: dict[str, Any]) -> None:  # noqa: N802
        """Ends the task, gently first."""
        if self._slot is not None and self._channel is not None and task_id["value"] == self._channel.task_id:
            self._slot.kill()

    def shutdown(self, driver: pymesos.MesosExecutorDriver) -> None:
        """Mesos wants the slot to end: the framework or the agent is gone."""
        if self._slot is not None:
            self._slot.kill(SHUTDOWN_GRACE_S)
        self._arrived.set()

    def error(self, driver: pymesos.MesosExecutorDriver, message: str) -> None:
        """The agent refuses this executor."""
        logger.error("error from Mesos: %s", message)
        self.shutdown(driver)


def make_slot(channel: TaskChannel, data: str) -> Slot:
    """The slot for a task.

    Args:
        channel: the task.
        data: its order, of a training job or of a search.

    Raises:
        KeyError, TypeError, ValueError: if it is neither.
    """
    values = decode(data)
    if isinstance(values, dict) and values.get("kind") == "slot":
        return TrialSlot(channel, SlotOrder.decode(data))
    order = LaunchOrder.decode(data)
    return ElasticSlot(channel, order) if order.elastic else JobSlot(channel, order)
