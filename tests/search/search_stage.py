"""A search with a fake Mesos, fake slots and a clock moved by hand; database, sampler and policy are real."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from executor.trial_messages import Losses, RunEnd, RunKey, SlotStatus, Usage, Wanted
from framework.mesos import events
from framework.policies.trials.interface import Decision, Policy, PolicySettings, SlotView, TrialView
from framework.policies.trials.registry import make_policy
from framework.scheduler.agents import AllAgents
from framework.scheduler.job import JobEntry
from framework.scheduler.journal import Journal
from framework.scheduler.offer_pool import SETTLE_S
from framework.scheduler.scheduler import Scheduler
from framework.search.controller import SearchController
from framework.search.observer import SearchObserver
from framework.search.optuna_study import Study
from framework.search.records import Parameter, SearchSpec, TrialRecord
from framework.search.slot_pool import SlotLaunch
from framework.search.slots import Slot
from framework.search.store import Store
from framework.search.trials import TrialTracker
from solver import NodeClass
from tests.mesos.fake_mesos import FakeMesos

QUANTUM_S = 10.0
GIB = 2**30


def search_spec(folder: Path, trials: int = 3, **changes: Any) -> SearchSpec:
    values: dict[str, Any] = {
        "name": "s",
        "script": str(folder / "train.py"),
        "arguments": ("--epochs", "2"),
        "flags": {"lr": "--lr"},
        "space": (Parameter("lr", choices=tuple(round(0.1 * (i + 1), 1) for i in range(trials))),),
        "sampler": "grid",
        "trial_count": trials,
        "policy": "fifo",
        "settings": PolicySettings(quantum_s=QUANTUM_S),
        "checkpoint_dir": str(folder / "checkpoints"),
        "slot_mem_mib": 1024.0,
    }
    return SearchSpec(**{**values, **changes})


class FakeObserver(SearchObserver):
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.waits: list[str] = []
        self.outputs: list[str] = []

    def waiting(self, reason: str) -> None:
        self.waits.append(reason)

    def notify(self, text: str) -> None:
        self.notes.append(text)

    def output(self, text: str) -> None:
        self.outputs.append(text)


class FakeSlot:
    """The executor's side of a slot."""

    def __init__(self, stage: SearchStage, slot: Slot) -> None:
        self.stage = stage
        self.slot = slot
        self.status = SlotStatus(slot.task_id)
        self.made: dict[RunKey, list[dict[str, Any]]] = {}
        """Run -> what it has reported."""

    @property
    def wanted(self) -> Wanted:
        """The last order that was sent to it."""
        told = [data for task_id, data in self.stage.mesos.messages if task_id == self.slot.task_id]
        return Wanted.decode(told[-1]) if told else Wanted(0)

    def update(self, state: str, **more: Any) -> None:
        status = {
            "task_id": {"value": self.slot.task_id},
            "agent_id": {"value": self.slot.agent_id},
            "state": state,
            "source": "SOURCE_EXECUTOR",
            **more,
        }
        self.stage.scheduler.handle(events.StatusUpdate(status))
        self.stage.tick()

    def say(self, **changes: Any) -> None:
        self.status = dataclasses.replace(self.status, **changes)
        self.stage.send(self.slot, self.status.encode())

    def train(self) -> RunKey:
        """Follows its order: the wanted run takes its first step."""
        run = self.wanted.run
        assert run is not None
        self.say(number=self.wanted.number, run=run.key, training=True, preemptible=True)
        self.stage.tick()
        return run.key

    def report(self, step: int, loss: float, **more: Any) -> None:
        self.make(step, loss, **more)
        self.send_reports(first=len(self.made[self.key]) - 1)

    def make(self, step: int, loss: float, **more: Any) -> None:
        """A report that is not sent."""
        report = {
            "type": "progress",
            "step": step,
            "train_s": float(step),
            "loss": loss,
            "low": loss,
            "high": loss,
            "value": loss,
        }
        self.made.setdefault(self.key, []).append({**report, "count": 1, **more})

    def send_reports(self, first: int, key: RunKey | None = None) -> None:
        """Sends what a run has reported, the one in it if no other is named, from a number on."""
        key = key or self.key
        self.stage.send(self.slot, Losses(self.slot.task_id, *key, tuple(self.made[key][first:]), first).encode())

    @property
    def key(self) -> RunKey:
        """The run in it."""
        assert self.status.run is not None
        return self.status.run

    def end(self, outcome: str, **more: Any) -> RunEnd:
        """The run in it ends."""
        more = {"usage": Usage(rss_bytes=1000), **more}
        end = RunEnd(*self.key, outcome, reports=len(self.made.get(self.key, ())), **more)
        self.say(run=None, training=False, ends=(*self.status.ends, end), number=self.wanted.number)
        self.stage.tick()
        return end


class SearchStage:
    """A search on the stage.

    Args:
        spec: the search.
        storage: URL of its database.
        nodes: all agents there are, or what lists them.
        records: trials of an interrupted search.
        patient: whether it waits for other agents where none can hold a slot.

    Attributes:
        views: trial -> what its policy was shown of it the last time that it was asked.
    """

    def __init__(
        self,
        spec: SearchSpec,
        storage: str,
        nodes: list[NodeClass] | AllAgents | None = None,
        records: list[TrialRecord] | None = None,
        *,
        patient: bool = False,
    ) -> None:
        self.now = 1000.0
        self.spec = spec
        self.mesos = FakeMesos()
        self.observer = FakeObserver()
        self.store = Store(storage)
        if records is None:
            self.store.create_search(spec)
            self.study = Study.create(storage, spec)
        else:
            self.store.open_search(spec.name)
            self.study = Study.open(storage, spec)
        self.tracker = TrialTracker(spec, self.store, self.study, records or ())
        self.policy = make_policy(spec.policy, spec.settings)
        self.views: dict[int, TrialView] = {}
        self.launch = SlotLaunch(spec, "http://127.0.0.1:1/bundle/token", "train.py", ("tensorflow",), "python3")
        self.search = SearchController(
            self.launch,
            self._watched(self.policy),
            self.observer,
            self.tracker,
            self.store,
            nodes if callable(nodes) else lambda: nodes,
            clock=lambda: self.now,
            wall_clock=lambda: self.now + 1e9,
            patient=patient,
            storage_option=" --storage X",
        )
        self.fakes: dict[int, FakeSlot] = {}
        self.scheduler = Scheduler(
            self.mesos,
            journal=Journal(),
            log=lambda text: None,
            ended=lambda handle: None,
            failed=_fails,
            clock=lambda: self.now,
        )
        self.scheduler.admit(spec.name, "user", 1, lambda handle: self.search)
        self.scheduler.handle(events.Subscribed("F", "127.0.0.1:5050"))

    def _watched(self, policy: Policy) -> Policy:
        def decide(now_s: float, trials: Sequence[TrialView], slots: Sequence[SlotView]) -> Decision:
            self.views = {trial.id: trial for trial in trials}
            return decided(now_s, trials, slots)

        decided = policy.decide
        policy.decide = decide  # type: ignore[method-assign]
        return policy

    @property
    def trials(self) -> Mapping[int, TrialRecord]:
        return self.tracker.records

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.scheduler.tick()

    def send(self, slot: Slot, data: str) -> None:
        self.scheduler.handle(events.MessageArrived(slot.agent_id, slot.executor_id, data))

    def offer(
        self, agents: int = 1, cpus: float = 2, gpus: int = 0, first: int = 0, **attributes: str
    ) -> list[FakeSlot]:
        """Offers come and settle; the slots that are launched come up."""
        self.tick()
        texts = [{"name": name, "type": "TEXT", "text": {"value": text}} for name, text in attributes.items()]
        offers = tuple(
            {**self.mesos.offer(agent, cpus=cpus, gpus=gpus), "attributes": texts}
            for agent in range(first, first + agents)
        )
        self.scheduler.handle(events.OffersArrived(offers))
        self.tick(SETTLE_S + 0.1)
        new = [FakeSlot(self, slot) for slot in self.search.slots if slot.id not in self.fakes]
        for fake in new:
            self.fakes[fake.slot.id] = fake
            fake.update("TASK_RUNNING")
        self.tick(0.1)
        return new


def _fails(handle: JobEntry, error: Exception) -> None:
    raise error


def node(name: str, cpus: float = 2.0, gpus: int = 0) -> NodeClass:
    return NodeClass(name=name, count=1, cpus=cpus, mem_bytes=8 * GIB, gpus=gpus, gpu_model=None, disk_bytes=GIB)


def stored(storage: str) -> dict[int, Any]:
    store = Store(storage)
    store.open_search("s")
    records = {record.number: record for record in store.load_trials()}
    store.close()
    return records


def fail(stage: SearchStage, slot: FakeSlot, **more: Any) -> None:
    slot.train()
    slot.report(1, 1.0)
    slot.end("failed", message="ValueError: no", tail="Traceback ...", **more)
