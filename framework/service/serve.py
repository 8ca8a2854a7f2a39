"""Runs a service: database, master, bundle server, subscription, API."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from dike.exceptions import BadInputError, JobFailedError
from framework.mesos import events
from framework.mesos.connection import FrameworkRemovedError, MesosLostError
from framework.mesos.driver import Driver
from framework.mesos.master import LeadingMaster, leader_age_s
from framework.project.run_folders import absolute_folder
from framework.scheduler.agents import AgentDirectory, AllAgents, no_matching_agent_error
from framework.scheduler.background import Threads
from framework.scheduler.constraints import parse_constraints
from framework.scheduler.fair_share import FairQueue
from framework.scheduler.job_sizes import JobSizes
from framework.scheduler.mesos_access import MesosAccess
from framework.scheduler.session import drive
from framework.scheduler.waiting_work import publishing
from framework.search.optuna_study import load_optuna
from framework.service.election import elected, exit_immediately
from framework.service.job_factory import JobContext
from framework.service.mounts import Mounts
from framework.service.options import ServiceOptions
from framework.service.retention import RetentionPolicy, removing_old_jobs
from framework.service.service import Service
from framework.service.store import ServiceStore
from framework.service.submission import Submissions
from framework.service.users import UserLimits, no_limits
from solver import NodeClass
from solver.network import Network

logger = logging.getLogger(__name__)

CANCEL_TIMEOUT_S = 5.0
NAME = "dike"
ENDING_NOTE = "ending; tasks keep running, and the next service recovers them"
ENDING_WITH_MESOS_NOTE = (
    "ending, and the Mesos that was started for this service with it: tasks end too, and with the next service their "
    "jobs start again from their checkpoints"
)


@dataclass(frozen=True, kw_only=True)
class ServeRequest(ServiceOptions):
    """What `dike serve` was asked to do; `weight` and `limits` are by user."""

    mesos: MesosAccess = field(default_factory=MesosAccess)
    webui_url: str | None = None
    weight: Callable[[str], float] = lambda user: 1.0
    limits: Callable[[str], UserLimits] = no_limits
    network: Network | None = None


Front = Callable[[Submissions, Service, LeadingMaster], AbstractContextManager[None]]
"""The interface to clients, while the service runs."""


def serve(request: ServeRequest, front: Front, note: Callable[[str], None]) -> None:
    """Runs a service until SIGTERM or Ctrl-C; its tasks keep running for the next service on the same database.

    `front` is entered before the subscription and left after it; `note` receives messages for the operator.

    Raises:
        BadInputError: if the database or the master cannot be used.
        JobFailedError: if the master has removed the framework, another service has taken over, or a private Mesos
            failed.
        KeyboardInterrupt: on SIGTERM or Ctrl-C.
    """
    checkpoint_root = absolute_folder(request.checkpoint_root)
    if "://" not in checkpoint_root and Path(checkpoint_root).is_file():
        raise BadInputError(f"The checkpoint root {checkpoint_root} is a file; name a folder with --checkpoint-root.")
    _check_retention(request)
    Mounts(request.mesos.image, checkpoint_root, request.allowed_volumes)  # Validates before anything is started.
    while True:
        try:
            _serve_one_framework(request, checkpoint_root, front, note)
            return
        except FrameworkRemovedError as error:
            note(f"{error} Its tasks are gone: continuing as a new framework, jobs restart from their checkpoints")
        except MesosLostError as error:
            raise JobFailedError(f"{error} Start the service again: its jobs resume from their checkpoints.") from error


def _check_retention(request: ServeRequest) -> None:
    if request.keep_checkpoints_s is None:
        return
    if "://" in request.checkpoint_root:
        raise BadInputError(
            f"--keep-checkpoints removes folders that the service sees, not what is at {request.checkpoint_root}; have "
            "that storage remove what is old."
        )
    if request.keep_s is not None and request.keep_checkpoints_s > request.keep_s:
        raise BadInputError(
            "--keep-checkpoints is longer than --keep, after which the service does not know any more whose the "
            "checkpoints are; make --keep as long at least."
        )


def _serve_one_framework(
    request: ServeRequest, checkpoint_root: str, front: Front, note: Callable[[str], None]
) -> None:
    load_optuna()
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(contextlib.closing(ServiceStore(request.state, request.limits)))
        stack.enter_context(elected(request.ha, note, exit_immediately))
        lease = stack.enter_context(
            store.database.lock(exit_immediately, note if request.standby or request.ha else None)
        )
        master = stack.enter_context(request.mesos.connect())
        bundles = stack.enter_context(request.mesos.bundle_server(store.bundle, master))
        scheduler = events.EventScheduler(functools.partial(leader_age_s, credentials=master.credentials))
        settings = request.mesos.settings(
            NAME,
            master,
            framework_id=store.framework_id(),
            failover_timeout_s=request.failover_timeout_s,
            webui_url=request.webui_url,
            checkpoint=True,
        )
        driver = Driver(settings, master.uri, scheduler, lease.ensure_owned)
        directory = stack.enter_context(contextlib.closing(AgentDirectory(master.ask, request.mesos.role)))
        directory.refresh()
        context = JobContext(
            store=store,
            bundle_url=bundles.url,
            forget_bundle=bundles.forget,
            python=request.mesos.python(master),
            image=request.mesos.image,
            hand_out_gpus=master.is_here,
            checkpoint_root=checkpoint_root,
            agents=functools.partial(agents_for, directory),
            demand=directory.demand,
            allowed_volumes=request.allowed_volumes,
            network=request.network,
            folder=stack.enter_context(request.mesos.run_folder(checkpoint_root, outlives=True)),
        )
        background = Threads(lambda: scheduler.events.put(events.WorkDone()))
        job_sizes = None
        if request.allocation is not None:
            interval_s = request.allocation_interval_s
            job_sizes = JobSizes(request.allocation, interval_s, request.weight, request.sample_runs)
            note(f"elastic jobs get their sizes by {request.allocation}, every {request.allocation_interval_s:g} s")
        service = Service(context, driver, FairQueue(request.weight), directory, master, background, job_sizes)
        if count := len(service.scheduler.jobs):
            note(f"resuming {count} {'job' if count == 1 else 'jobs'}")
        policy = RetentionPolicy(request.keep_s, request.keep_checkpoints_s, Path(checkpoint_root))
        stack.enter_context(removing_old_jobs(store, policy))
        publisher = stack.enter_context(publishing(request.mesos, master.agents, lambda: service.scheduler.snapshot))
        if publisher is not None:
            service.scheduler.pilots = lambda: publisher.pilots
        stack.enter_context(front(Submissions(store, scheduler.events, context.mounts), service, master))
        drive(
            service,
            driver,
            scheduler,
            master,
            subscribed=lambda framework_id: note(f"subscribed at {master.address} as {framework_id}"),
            interrupted=lambda: note(ENDING_NOTE if request.mesos.master else ENDING_WITH_MESOS_NOTE),
            cancel_timeout_s=CANCEL_TIMEOUT_S,
            keep_tasks=True,
        )


def agents_for(directory: AgentDirectory, constraints: Sequence[str]) -> AllAgents:
    """Returns a function that lists the agents that a job with these constraints may use."""
    admitted = parse_constraints(constraints)

    def all_agents() -> list[NodeClass] | None:
        nodes = directory.nodes(admitted)
        if nodes == [] and directory.current():
            raise no_matching_agent_error(constraints)
        return nodes

    return all_agents
