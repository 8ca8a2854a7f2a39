"""The master's side of a framework, fake: hands out offers, remembers calls."""

from __future__ import annotations

import itertools
from typing import Any

from executor.messages import Addressed
from framework.mesos.driver import CallRefusedError, MasterUnavailableError
from framework.mesos.tasks import executor_of


def scalar(name: str, value: float) -> dict[str, Any]:
    return {"name": name, "type": "SCALAR", "scalar": {"value": value}, "role": "*"}


class FakeMesos:
    """The master's side of a subscription: hands out offers, remembers calls."""

    def __init__(self) -> None:
        self.accepted: list[dict[str, Any]] = []
        self.declined: list[str] = []
        self.killed: list[str] = []
        self.acknowledged: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.reconciled: list[dict[str, str]] = []
        self.executors: dict[tuple[str, str], Any] = {}
        self.messages: list[tuple[str, str]] = []
        """Task id and message, in order."""
        self.unavailable = False
        self.refusal = ""
        self.decline_refusal = ""
        self._serial = itertools.count()

    def offer(
        self, agent: int = 0, cpus: float = 2, mem: float = 8192, ports: bool = True, gpus: int = 0
    ) -> dict[str, Any]:
        first = 31000 + 100 * agent
        resources = [scalar("cpus", cpus), scalar("mem", mem), scalar("disk", 10_000)]
        if gpus:
            resources.append(scalar("gpus", gpus))
        if ports:
            resources.append(
                {"name": "ports", "type": "RANGES", "ranges": {"range": [{"begin": first, "end": first + 99}]}}
            )
        return {
            "id": {"value": f"O{next(self._serial)}"},
            "agent_id": {"value": f"S{agent}"},
            "hostname": f"agent-{agent}",
            "url": {"address": {"hostname": f"agent-{agent}", "ip": "127.0.0.1", "port": 5051}},
            "resources": resources,
        }

    def acceptOffers(self, offer_ids: Any, operations: Any, filters: Any = None) -> None:  # noqa: N802
        if self.unavailable:
            raise MasterUnavailableError("gone")
        if self.refusal:
            raise CallRefusedError(self.refusal)
        for operation in operations:
            for info in operation["launch"]["task_infos"]:
                self._check_executor(info)
                self.accepted.append(info)

    def _check_executor(self, info: dict[str, Any]) -> None:
        """As Mesos does: whatever is launched into an executor carries the same ExecutorInfo."""
        place = info["agent_id"]["value"], executor_of(info)
        executor = info.get("executor")
        assert self.executors.setdefault(place, executor) == executor, "another ExecutorInfo of the same id"

    def declineOffer(self, offer_ids: Any, filters: Any = None) -> None:  # noqa: N802
        assert filters["refuse_seconds"] > 0
        if self.unavailable:
            raise MasterUnavailableError("gone")
        if self.decline_refusal:
            raise CallRefusedError(self.decline_refusal)
        self.declined += [offer_id["value"] for offer_id in offer_ids]

    def acknowledgeStatusUpdate(self, status: dict[str, Any]) -> None:  # noqa: N802
        self.acknowledged.append(status)

    def reviveOffers(self) -> None:  # noqa: N802
        self.calls.append("revive")

    def suppressOffers(self) -> None:  # noqa: N802
        self.calls.append("suppress")

    def kill(self, task_id: str, agent_id: str) -> None:
        self.killed.append(task_id)

    def reconcile(self, tasks: dict[str, str]) -> None:
        self.reconciled.append(tasks)

    def refuse(self) -> None:
        """A call that is lost."""
        raise MasterUnavailableError("gone")

    def sendFrameworkMessage(self, executor_id: Any, agent_id: Any, data: str) -> None:  # noqa: N802
        if self.unavailable:
            raise MasterUnavailableError("gone")
        try:
            told = Addressed.decode(data)
        except ValueError:
            # To an executor that has one task, such as those that measure the network.
            told = Addressed(executor_id["value"], data)
        if any(info["task_id"]["value"] == told.task_id for info in self.accepted):
            assert self.executor_of(told.task_id) == executor_id["value"]
        self.messages.append((told.task_id, told.data))

    def executor_of(self, task_id: str) -> str:
        """Id of the executor that a task was launched into; the task's where that was elsewhere."""
        infos = (info for info in self.accepted if info["task_id"]["value"] == task_id)
        return next(map(executor_of, infos), task_id)
