"""A job's place at the hub: to the job it is Mesos, to the hub it is the job."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from framework import events
from framework.background import AtOnce, Background
from framework.job import TaskState
from framework.offers import address_of
from framework.service.constraints import parse_constraints
from framework.service.offer_pool import Offer, offer_id
from framework.service.records import TaskRecord
from framework.service.sizing import Sizing
from framework.service.tenant import Tenant

INTENDED = "intended"
"""State of a task that has been written down and not heard of."""
NOT_NEEDED = "its job had no more use for it"
"""Message of a task that was ended without anybody having asked for its job's end."""


class Front(Protocol):
    """What a seat asks of the hub."""

    def launch(self, seat: Seat, offers: Sequence[Offer], operations: Sequence[dict[str, Any]]) -> None: ...
    def give_back(self, seat: Seat, offers: Sequence[Offer]) -> None: ...
    def kill(self, seat: Seat, task_id: str, agent_id: str) -> None: ...
    def reconcile(self, seat: Seat, tasks: dict[str, str]) -> None: ...
    def send(self, executor_id: Any, agent_id: Any, data: str) -> None: ...


class Seat:
    """Mesos, as one job sees it (`framework.mesos_calls.MesosCalls`); made by the hub.

    Attributes:
        job_id, user: whose it is.
        number: order of arrival.
        constraints: which agents it may use (`JobRecord.constraints`).
        admitted: the same, read.
        tenant: the job.
        sizing: what it takes; None where nobody has said. Whoever makes the tenant sets it.
        background: where the tenant may do what takes long.
        tasks: id -> task, those that have not ended.
        lent: id -> offer it looks at.
        looked_at: the pool's generation that it has looked at last.
        looked_s: when that was, on the hub's clock; None before.
        acknowledgements: status updates to be acknowledged once they are written down.
        must_save: whether its state has to be written down.
        saved: its state as it was written down last.
        launched: how often it has launched tasks.
        is_overtaken: whether a job behind it has launched since it began to wait.
        is_ending: whether its end was asked for.

    Raises:
        BadInputError: if the constraints make no sense.
    """

    def __init__(
        self,
        front: Front,
        job_id: str,
        user: str,
        number: int,
        constraints: Sequence[str] = (),
        tasks: Iterable[TaskRecord] = (),
        background: Background | None = None,
    ) -> None:
        self._front = front
        self.job_id = job_id
        self.user = user
        self.number = number
        self.constraints = tuple(constraints)
        self.admitted = parse_constraints(constraints)
        self.tenant: Tenant
        self.sizing: Sizing | None = None
        self.background = background or AtOnce()
        self.tasks = {task.task_id: task for task in tasks}
        self.lent: dict[str, Offer] = {}
        self.looked_at: int | None = None
        self.looked_s: float | None = None
        self.acknowledgements: list[dict[str, Any]] = []
        self.must_save = False
        self.saved: dict[str, Any] | None = None
        self.launched = 0
        self.is_overtaken = False
        self.is_ending = False

    @property
    def has_tasks(self) -> bool:
        return bool(self.tasks)

    # What the job asks of Mesos.

    def acceptOffers(self, offer_ids: Any, operations: Any, filters: Any = None) -> None:  # noqa: N802
        """Launches on offers it was lent; what is left of them is offered again."""
        offers = self._take(offer_ids)
        if len(offers) < len(offer_ids):
            # The operations name resources of all of them.
            self._front.give_back(self, offers)
            offers = []
        self._front.launch(self, offers, operations)

    def declineOffer(self, offer_ids: Any, filters: Any = None) -> None:  # noqa: N802
        """Has looked at offers and does not want them."""
        self._front.give_back(self, self._take(offer_ids))

    def acknowledgeStatusUpdate(self, status: dict[str, Any]) -> None:  # noqa: N802
        """Has dealt with a status update; Mesos hears of it once that is written down."""
        self.acknowledgements.append(status)

    def reviveOffers(self) -> None:  # noqa: N802
        """Wants to look at what there is, even if it has before."""
        self.looked_at = None

    def suppressOffers(self) -> None:  # noqa: N802
        """Wants no more: `Tenant.need` says the same."""

    def sendFrameworkMessage(self, executor_id: Any, agent_id: Any, data: str) -> None:  # noqa: N802
        """Sends one of its executors a message."""
        self._front.send(executor_id, agent_id, data)

    def kill(self, task_id: str, agent_id: str) -> None:
        """Asks for a task's end."""
        if task_id in self.tasks and not self.is_ending:
            self.tasks[task_id] = dataclasses.replace(self.tasks[task_id], message=NOT_NEEDED)
        self._front.kill(self, task_id, agent_id)

    def reconcile(self, tasks: dict[str, str]) -> None:
        """Asks for the state of tasks."""
        if tasks:
            self._front.reconcile(self, tasks)

    def _take(self, offer_ids: Iterable[Mapping[str, str]]) -> list[Offer]:
        # A rescinded offer is not lent any more.
        taken = [self.lent.pop(one["value"], None) for one in offer_ids]
        return [offer for offer in taken if offer is not None]


def intended_tasks(job_id: str, offers: Sequence[Offer], operations: Iterable[dict[str, Any]]) -> list[TaskRecord]:
    """The tasks that operations on the offers of one agent launch."""
    first = offers[0]
    return [
        TaskRecord(
            task_id=info["task_id"]["value"],
            job_id=job_id,
            agent_id=info["agent_id"]["value"],
            node=first["hostname"],
            address=address_of(first),
            name=info["name"].rpartition(f"{job_id} ")[2],
            state=INTENDED,
            resources=_amounts([*info.get("resources", ()), *info.get("executor", {}).get("resources", ())]),
            launched_s=time.time(),
        )
        for operation in operations
        for info in operation["launch"]["task_infos"]
    ]


def updated(task: TaskRecord, event: events.StatusUpdate, state: TaskState) -> TaskRecord:
    """The task as a status update has it."""
    is_ours = task.message == NOT_NEEDED and state in (TaskState.KILLING, TaskState.KILLED)
    return dataclasses.replace(
        task,
        state=event.state.removeprefix("TASK_").lower(),
        message=NOT_NEEDED if is_ours else str(event.status.get("message", "")),
        ended_s=time.time() if state.is_terminal() else None,
    )


def ids_of(offers: Iterable[Offer]) -> list[dict[str, str]]:
    """Offers' ids as Mesos wants them in a call."""
    return [{"value": offer_id(offer)} for offer in offers]


def _amounts(pieces: Iterable[dict[str, Any]]) -> dict[str, float]:
    amounts: dict[str, float] = {}
    for piece in pieces:
        if "scalar" in piece:
            amounts[piece["name"]] = round(amounts.get(piece["name"], 0.0) + float(piece["scalar"]["value"]), 3)
        elif piece["name"] == "ports":
            count = sum(int(one["end"]) - int(one["begin"]) + 1 for one in piece["ranges"]["range"])
            amounts["ports"] = amounts.get("ports", 0.0) + count
    return amounts
