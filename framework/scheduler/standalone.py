"""Runs one job with a scheduler of its own, for `dike run` and `dike tune`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from framework.mesos import events
from framework.mesos.driver import Driver
from framework.mesos.master import LeadingMaster
from framework.scheduler.background import Threads
from framework.scheduler.feasibility import Sizing
from framework.scheduler.job import Job, JobEntry
from framework.scheduler.journal import Journal
from framework.scheduler.mesos_access import MesosAccess
from framework.scheduler.offer_pool import OfferPool
from framework.scheduler.scheduler import Scheduler
from framework.scheduler.session import drive
from framework.scheduler.waiting_work import publishing

logger = logging.getLogger(__name__)

Kind = TypeVar("Kind", bound=Job)


@dataclass(frozen=True)
class StandaloneJob(Generic[Kind]):
    """A job without a service.

    Attributes:
        job_id: unique.
        make: creates its state machine.
        cancel_timeout_s: maximum duration of its end after Ctrl-C.
        subscribed: called with the framework's id after the subscription.
        interrupted: called after Ctrl-C, before the job is cancelled.
        constraints: which agents it may use.
        sizing: its minimum size, published while it waits; None if unknown.
    """

    job_id: str
    make: Callable[[JobEntry], Kind]
    cancel_timeout_s: float
    subscribed: Callable[[str], None]
    interrupted: Callable[[], None]
    constraints: tuple[str, ...] = ()
    sizing: Sizing | None = None


def run_standalone(job: StandaloneJob[Kind], mesos: MesosAccess, master: LeadingMaster, **settings: Any) -> Kind:
    """Runs a job to its end, under a framework of its own.

    Args:
        job: the job.
        mesos: settings of the subscription.
        master: the master; is updated after an election.
        settings: further fields of `framework.mesos.driver.FrameworkSettings`.

    Returns:
        Its state machine, done and closed.

    Raises:
        BadInputError, JobFailedError: what the job raises, or if the master refuses or removes the framework.
        KeyboardInterrupt: after Ctrl-C, when the job has been cancelled.
    """
    callbacks = events.EventScheduler()
    driver = Driver(mesos.settings(f"dike {job.job_id}", master, **settings), master.uri, callbacks)
    # The job itself reports lost and restored connections to the user.
    scheduler = Scheduler(
        driver,
        journal=Journal(),
        log=logger.info,
        ended=_log_end,
        failed=_raise,
        master=master,
        background=Threads(lambda: callbacks.events.put(events.WorkDone())),
        pool=OfferPool(len(mesos.agents) if master.is_private else None),
    )
    made: list[Kind] = []

    def make(entry: JobEntry) -> Kind:
        made.append(job.make(entry))
        return made[0]

    scheduler.admit(job.job_id, user="", number=0, make=make, constraints=job.constraints)
    with publishing(mesos, master.agents, lambda: scheduler.snapshot, job.sizing):
        drive(
            scheduler,
            driver,
            callbacks,
            master,
            subscribed=job.subscribed,
            interrupted=job.interrupted,
            cancel_timeout_s=job.cancel_timeout_s,
        )
    return made[0]


def _log_end(entry: JobEntry) -> None:
    logger.info("%s has ended", entry.job_id)


def _raise(entry: JobEntry, error: Exception) -> None:
    raise error
