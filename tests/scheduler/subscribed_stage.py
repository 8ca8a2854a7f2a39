"""A scheduler that is subscribed to a real Mesos, and runs while a test waits for a condition."""

from __future__ import annotations

import contextlib
import itertools
import queue
from collections.abc import Callable
from typing import Any

from framework.embedded.cluster import EmbeddedCluster
from framework.mesos import events
from framework.mesos.driver import Driver, FrameworkSettings
from framework.scheduler.agents import AgentDirectory
from framework.scheduler.scheduler import Scheduler
from tests.embedded.embedded_support import leading_master
from tests.scheduler.scheduler_stage import FakeJournal
from tests.waiting import wait_until


class SubscribedStage:
    """A scheduler with a subscription of its own."""

    def __init__(self, cluster: EmbeddedCluster, role: str) -> None:
        self.master = leading_master(cluster)
        self.received = events.EventScheduler()
        principal, secret = cluster.access.credentials
        settings = FrameworkSettings("scheduler", "nobody", role=role, principal=principal, secret=secret)
        self.driver = Driver(settings, self.master.uri, self.received)
        self.directory = AgentDirectory(self.master.ask, role)
        self.directory.refresh()
        self.numbers = itertools.count()
        self.failed: list[Exception] = []
        self.scheduler = Scheduler(
            self.driver,
            journal=FakeJournal(),
            log=lambda text: None,
            ended=lambda handle: None,
            failed=lambda handle, error: self.failed.append(error),
            agents=self.directory,
        )
        self.driver.start()
        self.until(lambda: self.driver.connected, "a subscription")

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Runs until the condition holds."""
        return wait_until(condition, what, said=lambda: self.failed, lost=lambda: self.failed, pause=self._handle)

    def _handle(self, pause_s: float) -> None:
        with contextlib.suppress(queue.Empty):
            self.scheduler.handle(self.received.events.get(timeout=pause_s))
        self.scheduler.tick()

    def close(self) -> None:
        self.driver.stop()
        self.driver.join()
        self.directory.close()
