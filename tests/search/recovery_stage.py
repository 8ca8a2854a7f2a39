"""A search whose service is killed again and again: slots that obey as real ones do, messages that get lost."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dike.trial.spec import step_of_checkpoint
from executor.messages import Addressed
from executor.trial_messages import Losses, RunEnd, RunKey, SlotStatus, TrialRun, Wanted
from executor.trial_reports import KeptReports
from framework.mesos import events
from framework.mesos.tasks import executor_of
from framework.policies.trials.registry import make_policy
from framework.scheduler.job import JobEntry, Need
from framework.scheduler.journal import Journal
from framework.scheduler.reconciler import RECONCILE_AFTER_S
from framework.scheduler.records import TaskRecord
from framework.scheduler.scheduler import Scheduler
from framework.search.controller import SearchController
from framework.search.optuna_study import Study
from framework.search.records import SearchSpec
from framework.search.recovery import SearchState, close_open_slices, load_trials_to_resume
from framework.search.slot_pool import SlotLaunch
from framework.search.store import Store
from framework.search.trials import TrialTracker
from tests.mesos.fake_mesos import FakeMesos
from tests.search.search_stage import FakeObserver

STEPS = 12
TICK_S = 1.0


class Killed(BaseException):
    """The service is gone, in the middle of whatever it did."""


def loss_of(trial: int, step: int) -> float:
    return 1.0 / (step + trial)


class FakeSlot:
    """Does what `executor.trial_slot` does, one step of training a turn."""

    def __init__(self, task_id: str, agent_id: str) -> None:
        self.task_id, self.agent_id = task_id, agent_id
        self.wanted = Wanted(0)
        self.run: TrialRun | None = None
        self.step = 0
        self.checkpoint: str | None = None
        self.ends: list[RunEnd] = []
        self.ended: set[RunKey] = set()
        self.reports: dict[RunKey, KeptReports] = {}
        self.is_over = False

    def take(self, wish: Wanted) -> None:
        if wish.number < self.wanted.number:
            return
        self.wanted = wish
        self.ends = [end for end in self.ends if end.key not in wish.acknowledged_ends]
        for key in wish.acknowledged_ends:
            self.reports.pop(key, None)
        for trial, number, count in wish.acknowledged_reports:
            if (trial, number) in self.reports:
                self.reports[trial, number].acknowledge(count)

    def turn(self, began: dict[RunKey, str]) -> None:
        run, wanted = self.run, self.wanted
        if run is None:
            if wanted.leave:
                self.is_over = not self.ends
            elif wanted.run is not None and wanted.run.key not in self.ended:
                assert wanted.run.key not in began, "a run that was started twice"
                began[wanted.run.key] = self.task_id
                self.run = wanted.run
                self.reports[wanted.run.key] = KeptReports()
                self.checkpoint = wanted.run.trial.resume_from
                self.step = step_of_checkpoint(self.checkpoint) if self.checkpoint else 0
        elif self.step == STEPS:
            self._end("finished")
        elif wanted.leave or wanted.run is None or wanted.run.key != run.key:
            self.checkpoint = run.trial.checkpoint_path(self.step)
            self._end("suspended")
        else:
            self.step += 1
            loss = loss_of(run.trial.number, self.step)
            numbers = {"step": self.step, "train_s": float(self.step), "loss": loss, "low": loss, "high": loss}
            self.reports[run.key].add({"type": "progress", "count": 1, **numbers})

    def messages(self) -> list[str]:
        said = []
        for key, reports in self.reports.items():
            if reports.has_unsent:
                first, taken = reports.take(5)
                said.append(Losses(self.task_id, *key, taken, first, reports.oldest).encode())
        return [*said, self.status().encode()]

    def status(self) -> SlotStatus:
        return SlotStatus(
            self.task_id,
            self.wanted.number,
            None if self.run is None else self.run.key,
            training=self.run is not None and self.step > 0,
            preemptible=True,
            checkpoint=self.checkpoint if self.run is not None else None,
            checkpoint_step=step_of_checkpoint(self.checkpoint) if self.run is not None and self.checkpoint else 0,
            ends=tuple(self.ends),
        )

    def _end(self, outcome: str) -> None:
        assert self.run is not None
        step = step_of_checkpoint(self.checkpoint) if self.checkpoint else 0
        key = self.run.key
        end = RunEnd(*key, outcome, checkpoint=self.checkpoint, step=step, reports=self.reports[key].count)
        self.ends.append(dataclasses.replace(end, preemptible=True))
        self.ended.add(key)
        self.run = None


class FakeJournal(Journal):
    """What outlives a service.

    Args:
        survives: called for each thing that is written; raises where the service dies of it.
    """

    def __init__(self, survives: Callable[[], None]) -> None:
        self._survives = survives
        self.tasks: dict[str, TaskRecord] = {}
        self.state: str | None = None

    def record_intent(self, job_id: str, tasks: Sequence[TaskRecord], state: dict[str, Any]) -> None:
        self.record_changes(tasks, {job_id: state})

    def record_changes(self, tasks: Sequence[TaskRecord], states: dict[str, dict[str, Any]]) -> None:
        self._survives()
        self.tasks |= {task.task_id: task for task in tasks}
        for state in states.values():
            self.state = json.dumps(state)


class RecoveryStage:
    """A search, the slots it has launched, and a Mesos that keeps unacknowledged status updates.

    Args:
        folder: gets the database.
        spec: the search.
        seed: of what gets lost, and of when the service dies.

    Attributes:
        lives: how many services there have been.
        slots: task -> slot, those that run.
        began: run -> the task in which it was started.
    """

    def __init__(self, folder: Path, spec: SearchSpec, seed: int) -> None:
        self.storage = f"sqlite:///{folder}/searches.db"
        self.spec = spec
        self.random = random.Random(seed)
        self.now = 1000.0
        self.lives = 0
        self.slots: dict[str, FakeSlot] = {}
        self.launched: set[str] = set()
        self.began: dict[RunKey, str] = {}
        self.fatal_call: int | None = None
        self._unacknowledged: list[dict[str, Any]] = []
        self._book = FakeJournal(self._survives)
        self._calls = 0
        self._executor_of: dict[str, str] = {}
        self._executors: dict[tuple[str, str], Any] = {}
        self._late: list[tuple[str, str]] = []
        """Messages to slots that arrive a second later, even at a restarted slot."""
        self.store = Store(self.storage)
        self.store.create_search(spec)
        Study.create(self.storage, spec).close()
        self._begin()

    def _begin(self) -> None:
        self.lives += 1
        self._calls = 0
        self.mesos = FakeMesos()
        self.mesos.executors = self._executors
        self.mesos.sendFrameworkMessage = self._send  # type: ignore[method-assign]
        self.mesos.acceptOffers = self._accept  # type: ignore[method-assign]
        self.mesos.acknowledgeStatusUpdate = self._unacknowledged.remove  # type: ignore[method-assign]
        self.mesos.reconcile = self._reconcile  # type: ignore[method-assign]
        self.mesos.kill = self._kill  # type: ignore[method-assign]
        self.store.close()
        self.store = Store(self.storage)
        self.store.open_search(self.spec.name)
        tasks = [task for task in self._book.tasks.values() if not task.has_ended]
        state = None
        if self._book.state is not None:
            state = SearchState.from_json(json.loads(self._book.state))
            living_tasks = {task.task_id for task in tasks}
            state = dataclasses.replace(
                state, slots=tuple(slot for slot in state.slots if slot.task_id in living_tasks)
            )
        live_slots = [] if state is None else [slot.id for slot in state.slots]
        close_open_slices(self.store, self.now, live_slots)
        self.study = Study.open(self.storage, self.spec)
        records = load_trials_to_resume(self.store, self.study, live_slots)
        transaction = self.store._transaction

        def dangerous() -> Any:
            self._survives()
            return transaction()

        self.store._transaction = dangerous  # type: ignore[method-assign]
        self.search = SearchController(
            SlotLaunch(self.spec, "http://127.0.0.1:1/bundle/token", "train.py", (), "python3"),
            make_policy(self.spec.policy, self.spec.settings),
            FakeObserver(),
            TrialTracker(self.spec, self.store, self.study, records),
            self.store,
            lambda: None,
            clock=lambda: self.now,
            wall_clock=lambda: self.now,
            state=state,
        )
        self.scheduler = Scheduler(
            self.mesos,
            journal=self._book,
            log=lambda text: None,
            ended=lambda handle: None,
            failed=_fails,
            clock=lambda: self.now,
        )
        self.scheduler.admit(self.spec.name, "user", 1, lambda handle: self.search, tasks=tasks)
        self.scheduler.handle(events.Subscribed("F", "127.0.0.1:5050", RECONCILE_AFTER_S))

    def _survives(self) -> None:
        """One more thing that the service does; it may be its last."""
        self._calls += 1
        if self.fatal_call is not None and self._calls >= self.fatal_call:
            raise Killed

    def _send(self, executor_id: Any, agent_id: Any, data: str) -> None:
        self._survives()
        chance = self.random.random()
        told = Addressed.decode(data)
        assert self._executor_of[told.task_id] == executor_id["value"]
        if chance > 0.2:
            self._deliver(told.task_id, told.data)
        elif chance > 0.1:
            self._late.append((told.task_id, told.data))

    def _deliver(self, task_id: str, data: str) -> None:
        if task_id in self.slots:
            self.slots[task_id].take(Wanted.decode(data))

    def _accept(self, offer_ids: Any, operations: Any, filters: Any = None) -> None:
        self._survives()
        for info in operations[0]["launch"]["task_infos"]:
            task_id = info["task_id"]["value"]
            assert task_id not in self.launched, "a task that was launched twice"
            assert task_id in self._book.tasks, "it was not written down"
            self.launched.add(task_id)
            self.mesos._check_executor(info)
            self._executor_of[task_id] = executor_of(info)
            self.slots[task_id] = FakeSlot(task_id, info["agent_id"]["value"])
            self._update(task_id, "TASK_RUNNING")
        self._survives()

    def _reconcile(self, tasks: dict[str, str]) -> None:
        for task_id in tasks.keys() - self.slots.keys():
            self._update(task_id, "TASK_LOST", source="SOURCE_MASTER")

    def _kill(self, task_id: str, agent_id: str) -> None:
        self._survives()
        is_there = self.slots.pop(task_id, None) is not None
        self._update(task_id, "TASK_KILLED" if is_there else "TASK_LOST")

    def _update(self, task_id: str, state: str, **more: Any) -> None:
        agent_id = self.slots[task_id].agent_id if task_id in self.slots else "S0"
        ids = {"task_id": {"value": task_id}, "agent_id": {"value": agent_id}}
        self._unacknowledged.append({**ids, "state": state, **more})

    def step(self) -> None:
        """A second passes; the service may die in it, and then there is another one."""
        self.now += TICK_S
        for task_id, data in self._late:
            self._deliver(task_id, data)
        self._late = []
        try:
            self._work()
        except Killed:
            self.fatal_call = None
            self.study.close()
            self._begin()

    def _work(self) -> None:
        for task_id, slot in list(self.slots.items()):
            slot.turn(self.began)
            for data in slot.messages():
                if self.random.random() > 0.2:
                    self.scheduler.handle(events.MessageArrived(slot.agent_id, self._executor_of[task_id], data))
            if slot.is_over:
                self._update(task_id, "TASK_FINISHED", data=slot.status().encode())
                del self.slots[task_id]
        # What is not acknowledged is sent again.
        for status in list(self._unacknowledged):
            self.scheduler.handle(events.StatusUpdate(status))
        if not self.scheduler.pool and self.search.need < Need.NOTHING and len(self.slots) < 2:
            self.scheduler.handle(events.OffersArrived((self.mesos.offer(0, cpus=1),)))
        self.scheduler.tick()


def _fails(handle: JobEntry, error: Exception) -> None:
    raise error
