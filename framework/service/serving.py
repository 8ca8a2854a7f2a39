"""Runs a service from its options to its end: database, master, bundles, subscription, API."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from framework import events
from framework.bundle import BundleServer
from framework.driver import Driver
from framework.elastic.demand import demand_on
from framework.job_plan import AllAgents
from framework.master import Master
from framework.service.reception import Reception
from framework.service.service import Service
from framework.service.store import ServiceStore
from framework.service.tenants import Surroundings
from framework.session import MesosAccess, drive, is_on_this_machine

logger = logging.getLogger(__name__)

WEEK_S = 7 * 24 * 3600.0
CANCEL_TIMEOUT_S = 5.0
NAME = "dike"


@dataclass(frozen=True)
class ServeRequest:
    """What `dike serve` was asked to do.

    Attributes:
        state: URL of the database.
        mesos: where jobs run.
        checkpoint_root: folder for the checkpoints of jobs that name none; the same path on all agents.
        failover_timeout_s: how long Mesos keeps tasks while no service is there.
        webui_url: where the web page is; None if there is none.
    """

    state: str
    mesos: MesosAccess = field(default_factory=MesosAccess)
    checkpoint_root: str = "dike-runs"
    failover_timeout_s: float = WEEK_S
    webui_url: str | None = None


Front = Callable[[Reception, Service, Master], AbstractContextManager[None]]
"""What clients talk to, while the service runs."""


def serve(request: ServeRequest, front: Front, note: Callable[[str], None]) -> None:
    """Runs a service until SIGTERM or Ctrl-C; its tasks go on, for the next service on the same database.

    Args:
        request: the options.
        front: entered before the subscription, left after it.
        note: tells the operator something.

    Raises:
        BadInputError: if database or master cannot be used.
        JobFailedError: if the master has ended the framework.
        KeyboardInterrupt: when it was told to end.
    """
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(contextlib.closing(ServiceStore(request.state)))
        master = stack.enter_context(request.mesos.connect())
        bundles = stack.enter_context(BundleServer(store.bundle, request.mesos.our_address(master)))
        scheduler = events.EventScheduler()
        settings = request.mesos.settings(
            NAME,
            framework_id=store.framework_id(),
            failover_timeout_s=request.failover_timeout_s,
            webui_url=request.webui_url,
            checkpoint=True,
        )
        driver = Driver(settings, master.uri, scheduler)
        around = Surroundings(
            store=store,
            bundle_url=bundles.url,
            python=request.mesos.python(master),
            image=request.mesos.image,
            hand_out_gpus=is_on_this_machine(master),
            checkpoint_root=request.checkpoint_root,
            agents=functools.partial(_agents, master),
            demand=functools.partial(demand_on, master),
        )
        service = Service(around, driver)
        stack.enter_context(front(Reception(store, scheduler.events), service, master))
        drive(
            service,
            driver,
            scheduler,
            master,
            subscribed=lambda framework_id: note(f"subscribed at {master.address} as {framework_id}"),
            interrupted=lambda: note("ending; tasks go on and are found again by the next service"),
            cancel_timeout_s=CANCEL_TIMEOUT_S,
            keep_tasks=True,
        )


def _agents(master: Master, constraints: tuple[str, ...]) -> AllAgents:
    return master.agents


@contextlib.contextmanager
def no_front(reception: Reception, service: Service, master: Master) -> Iterator[None]:
    """Nobody but this process can ask for anything."""
    yield
