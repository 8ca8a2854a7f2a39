"""Searches of a service on a fake Mesos: services come and go, slots say what a test has them say."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import time
from pathlib import Path
from typing import Any

from sqlalchemy import update

from executor.trial_messages import SlotStatus, Wanted
from framework.mesos import events
from framework.project import bundle
from framework.scheduler.records import JobRecord
from framework.search.controller import SearchController
from framework.search.records import SearchSpec, TrialRecord
from framework.search.slots import Slot
from framework.search.store import Store
from framework.search.tables import SEARCHES
from framework.service.requests import search_request
from framework.service.service import Service
from framework.service.store import ServiceStore
from framework.service.submission import Submissions
from tests.mesos.fake_mesos import FakeMesos
from tests.service.fake_context import fake_context
from tests.waiting import wait_until


class SearchesStage:
    """A database, a fake Mesos, and services that come and go."""

    def __init__(self, folder: Path) -> None:
        self.store = ServiceStore(f"sqlite:///{folder}/service.db")
        self.script = folder / "train.py"
        self.script.touch()
        self.mesos = FakeMesos()
        self.inbox: queue.SimpleQueue[events.Event]
        self.submissions: Submissions
        self.service: Service
        self.start()

    def start(self, checkpoint_root: str = "/checkpoints") -> None:
        """A service, with what the one before it has left in the database."""
        self.inbox = queue.SimpleQueue()
        self.submissions = Submissions(self.store, self.inbox)
        around = fake_context(self.store, checkpoint_root)
        self.service = Service(around, self.mesos)
        self.service.handle(events.Subscribed("F", "127.0.0.1:5050"))
        self.service.tick()

    def kill(self) -> None:
        """The service writes nothing more; its leases end with it, as with a process."""
        for handle in self.service.scheduler.jobs:
            handle.job.release_leases()  # type: ignore[attr-defined]

    def submit(self, spec: SearchSpec) -> None:
        self.submissions.submit(search_request(spec, "train.py", ()), bundle.pack(self.script), "ann")
        self.deliver()

    def deliver(self) -> None:
        """The service hears of what was asked for."""
        while not self.inbox.empty():
            self.service.handle(self.inbox.get())
        self.service.tick()

    def launch(self, name: str, *, comes_up: bool = True) -> Slot:
        """Offers come until the search has a slot, which comes up or not."""
        self.service.handle(events.OffersArrived((self.mesos.offer(cpus=1),)))

        def has_launched() -> bool:
            self.service.tick()
            return bool(self.search(name).slots)

        wait_until(has_launched, "a launch")
        (slot,) = self.search(name).slots
        if comes_up:
            self.update(slot, "TASK_RUNNING")
            self.service.tick()
        return slot

    def update(self, slot: Slot, state: str) -> None:
        status = {"task_id": {"value": slot.task_id}, "agent_id": {"value": slot.agent_id}, "state": state}
        self.service.handle(events.StatusUpdate({**status, "source": "SOURCE_EXECUTOR"}))

    def say(self, slot: Slot, **changes: Any) -> None:
        status = SlotStatus(slot.task_id, **{"number": self.wanted(slot).number, **changes})
        self.send(slot, status.encode())

    def send(self, slot: Slot, data: str) -> None:
        self.service.handle(events.MessageArrived(slot.agent_id, slot.executor_id, data))

    def wanted(self, slot: Slot) -> Wanted:
        """The last order that was sent to a slot."""
        return Wanted.decode([data for task_id, data in self.mesos.messages if task_id == slot.task_id][-1])

    def search(self, name: str) -> SearchController:
        handle = self.service.scheduler.job(name)
        assert handle is not None
        assert isinstance(handle.job, SearchController)
        return handle.job

    def job(self, name: str) -> JobRecord:
        record = self.store.job(name)
        assert record is not None
        return record

    def trials(self, name: str) -> list[TrialRecord]:
        with contextlib.closing(Store(self.store.database.url)) as store:
            store.open_search(name)
            return store.load_trials()

    def make_search(self, spec: SearchSpec) -> None:
        """Does what `dike tune` on the service's database would."""
        with contextlib.closing(Store(self.store.database.url)) as store:
            store.create_search(dataclasses.replace(spec, script="train.py"))

    def take_over(self, name: str) -> None:
        """Does what `dike tune --resume` on another machine would."""
        stranger: dict[str, Any] = {"owner": "stranger", "owner_machine": "elsewhere", "owner_host": "elsewhere"}
        # It does not fall silent, however long the test takes.
        stranger["heartbeat_s"] = time.time() + 3600
        with self.store.database.engine.begin() as connection:
            connection.execute(update(SEARCHES).where(SEARCHES.c.name == name).values(stranger))
