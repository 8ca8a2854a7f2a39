"""One job on a hub of its own that ends with it: what `dike run` and `dike tune` have inside."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from framework import events
from framework.background import Threads
from framework.driver import Driver
from framework.master import LeadingMaster
from framework.service.hub import Hub
from framework.service.journal import Journal
from framework.service.seat import Seat
from framework.service.tenant import Tenant
from framework.session import MesosAccess, drive

logger = logging.getLogger(__name__)

Kind = TypeVar("Kind", bound=Tenant)


@dataclass(frozen=True)
class PrivateJob(Generic[Kind]):
    """A job without a service.

    Attributes:
        job_id: unique.
        make: makes its state machine, which uses the seat as its Mesos.
        cancel_timeout_s: how long it may take to end after Ctrl-C.
        subscribed: called with the framework's id once the master has taken it in.
        interrupted: called after Ctrl-C, before the job is cancelled.
        constraints: which agents it may use.
    """

    job_id: str
    make: Callable[[Seat], Kind]
    cancel_timeout_s: float
    subscribed: Callable[[str], None]
    interrupted: Callable[[], None]
    constraints: tuple[str, ...] = ()


def run_privately(job: PrivateJob[Kind], mesos: MesosAccess, master: LeadingMaster, **settings: Any) -> Kind:
    """Runs a job to its end, under a framework of its own.

    Args:
        job: what to run.
        mesos: how to subscribe.
        master: where; hears which one leads after an election.
        settings: further fields of `framework.driver.FrameworkSettings`.

    Returns:
        Its state machine, done and closed.

    Raises:
        BadInputError, JobFailedError: what the job raises, or if the master refuses the framework or throws it out.
        KeyboardInterrupt: after Ctrl-C, when the job has been cancelled.
    """
    scheduler = events.EventScheduler()
    driver = Driver(mesos.settings(f"dike {job.job_id}", **settings), master.uri, scheduler)
    # Connections lost and found are told by the job itself.
    hub = Hub(
        driver,
        journal=Journal(),
        note=logger.info,
        ended=_has_ended,
        failed=_raise,
        master=master,
        background=Threads(lambda: scheduler.events.put(events.WorkDone())),
    )
    made: list[Kind] = []

    def make(seat: Seat) -> Kind:
        made.append(job.make(seat))
        return made[0]

    hub.admit(job.job_id, user="", number=0, make=make, constraints=job.constraints)
    drive(
        hub,
        driver,
        scheduler,
        master,
        subscribed=job.subscribed,
        interrupted=job.interrupted,
        cancel_timeout_s=job.cancel_timeout_s,
    )
    return made[0]


def _has_ended(seat: Seat) -> None:
    logger.info("%s has ended", seat.job_id)


def _raise(seat: Seat, error: Exception) -> None:
    raise error
