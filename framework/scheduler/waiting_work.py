"""Publishes what waits in a framework, so that machines are fetched for it (`framework.cluster.pilots`)."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from executor.mirror import StoreClient
from framework.cluster.demand import PILOTS, WAITING, PilotNotice, Waiting, WaitingJob, WaitingTasks, read_pilots
from framework.scheduler.feasibility import Sizing
from framework.scheduler.job import Need
from framework.scheduler.mesos_access import MesosAccess
from framework.scheduler.snapshot import JobFacts, Snapshot
from solver import NodeClass

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 1.0
RENEWAL_S = 8.0
"""An unchanged notice is renewed after this time."""
END_TIMEOUT_S = 2.0
RESOURCES = ("cpus", "mem", "gpus")
ListAgents = Callable[[], list[NodeClass] | None]


class WaitingPublisher:
    """Publishes the waiting jobs of one framework, and reads what is done about them.

    Args:
        store: the cluster's store.
        snapshot: returns the scheduler's snapshot.
        agents: lists the agents; blocks.
        sizing: of a job without a service, whose record has none.

    Attributes:
        pilots: state of `dike cluster slurm` some seconds ago; None if it does not run. May be read from any thread.
    """

    def __init__(
        self, store: StoreClient, snapshot: Callable[[], Snapshot], agents: ListAgents, sizing: Sizing | None = None
    ) -> None:
        self._store = store
        self._snapshot = snapshot
        self._agents = agents
        self._sizing = sizing
        self._name = secrets.token_hex(8)
        self._sent = Waiting()
        self._sent_s: float | None = None
        self._nodes: tuple[NodeClass, ...] = ()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="waiting work", daemon=True)
        self.pilots: PilotNotice | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[WaitingPublisher]:
        self._thread.start()
        try:
            yield self
        finally:
            self._ended.set()
            self._thread.join(END_TIMEOUT_S)

    def _work(self) -> None:
        while not self._ended.wait(LOOK_INTERVAL_S):
            try:
                self.publish(time.monotonic())
            except OSError as error:
                logger.info("what waits is not published: %s", error)
        with contextlib.suppress(OSError):
            self._store.remove_notice(WAITING, self._name)

    def publish(self, now_s: float) -> None:
        """Sends what waits if it has changed, or renews it. Raises `StoreError`."""
        waiting = self._waiting()
        if waiting == self._sent and self._sent_s is not None and now_s - self._sent_s < RENEWAL_S:
            return
        if waiting.jobs:
            self._store.put_notice(WAITING, self._name, dataclasses.asdict(waiting))
            self.pilots = next(map(read_pilots, self._store.notices(PILOTS).values()), None)
        elif self._sent.jobs:
            self.pilots = None
            self._store.remove_notice(WAITING, self._name)
        self._sent, self._sent_s = waiting, now_s

    def _waiting(self) -> Waiting:
        waiting = [facts for facts in self._snapshot().jobs.values() if _waits(facts)]
        if not waiting:
            return Waiting()
        self._nodes = tuple(self._agents() or self._nodes)
        return Waiting(tuple(self._job(facts) for facts in sorted(waiting, key=lambda one: one.job_id)))

    def _job(self, facts: JobFacts) -> WaitingJob:
        sizing = facts.sizing or self._sizing
        try:
            needs = () if sizing is None else sizing.needs(self._nodes)
        except Exception as error:  # The job itself reports it when it plans.
            logger.info("the needs of %s are unknown: %r", facts.job_id, error)
            needs = ()
        counts: Sequence[int] = [need.count for need in needs]
        if facts.missing_tasks is not None and len(needs) == 1:
            counts = [facts.missing_tasks]
        tasks = tuple(
            WaitingTasks(need.name, count, {name: need.amounts[name] for name in RESOURCES if name in need.amounts})
            for need, count in zip(needs, counts, strict=True)
        )
        return WaitingJob(facts.job_id, tasks)


def _waits(facts: JobFacts) -> bool:
    return not facts.is_ending and facts.need in (Need.REPLACE_LOST, Need.START)


@contextlib.contextmanager
def publishing(
    mesos: MesosAccess, agents: ListAgents, snapshot: Callable[[], Snapshot], sizing: Sizing | None = None
) -> Iterator[WaitingPublisher | None]:
    """Publishes within the context what waits, if the Mesos is a cluster of `dike cluster`; else yields None."""
    if mesos.machine is None:
        yield None
        return
    from framework.cluster.sharing import store_client

    with WaitingPublisher(store_client(mesos.machine), snapshot, agents, sizing).running() as publisher:
        yield publisher
