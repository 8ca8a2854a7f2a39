"""A fake cluster: a master that offers, filters and launches as Mesos does, and jobs of one kind of task."""

from __future__ import annotations

import functools
import itertools
import time
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from framework.mesos import events
from framework.mesos.driver import CallRefusedError, MasterUnavailableError
from framework.mesos.offers import MIB, AgentOffer
from framework.mesos.tasks import executor_of
from framework.scheduler.agents import REFRESH_S, AgentDirectory, AgentFacts
from framework.scheduler.background import Background
from framework.scheduler.fair_share import FairQueue
from framework.scheduler.feasibility import FitResult, Nodes
from framework.scheduler.job import Answer, Decline, JobEntry, JobOutcome, Launch, Message, Need, Planning
from framework.scheduler.job_sizes import JobSizes
from framework.scheduler.journal import Journal
from framework.scheduler.offer_pool import Offer, offer_id
from framework.scheduler.queue_options import Priority
from framework.scheduler.records import JobState, TaskNeed, TaskRecord
from framework.scheduler.reservation import Reservations
from framework.scheduler.scheduler import Scheduler
from tests.mesos.fake_mesos import FakeMesos, scalar

STEP_S = 0.5
MEM_OF_CPU = 1024.0


class FakeMaster(FakeMesos):
    """Offers what is free and not filtered; launches immediately.

    Args:
        agents: agent -> CPUs; a GiB of memory for each.
        others: agent -> CPUs that other frameworks hold.
    """

    def __init__(self, agents: Mapping[str, float], others: Mapping[str, float] | None = None) -> None:
        super().__init__()
        self.now = 1000.0
        self.agents = dict(agents)
        self.others = dict(others or {})
        self.attributes: defaultdict[str, dict[str, str]] = defaultdict(dict)
        self.offered: dict[str, tuple[str, float]] = {}
        self.running: dict[str, tuple[str, float]] = {}
        self.launches: list[str] = []
        self.refused_for_s: list[float] = []
        self._filters: dict[str, tuple[float, float]] = {}
        self._suppressed = False
        self._numbers = itertools.count()

    def free(self, agent: str) -> float:
        """Free CPUs of an agent."""
        held = sum(cpus for where, cpus in self.running.values() if where == agent)
        return self.agents[agent] - self.others.get(agent, 0.0) - held

    def next_offers(self) -> list[Offer]:
        """What the allocator of Mesos would send now."""
        offers = []
        for agent in [] if self._suppressed else self.agents:
            spare = self.free(agent) - sum(cpus for where, cpus in self.offered.values() if where == agent)
            until_s, refused = self._filters.get(agent, (0.0, 0.0))
            if spare > 1e-6 and not (self.now < until_s and spare <= refused):
                number = int(agent.rpartition("-")[2])
                offer = self.offer(number, cpus=spare, mem=spare * MEM_OF_CPU)
                offer["attributes"] = [
                    {"name": name, "type": "TEXT", "text": {"value": text}}
                    for name, text in self.attributes[agent].items()
                ]
                self.offered[offer_id(offer)] = (agent, spare)
                offers.append(offer)
        return offers

    def ask(self, path: str) -> dict[str, Any]:
        """`GET /slaves`, as the master answers it."""
        assert path == "/slaves"
        slaves = []
        for agent, cpus in self.agents.items():
            held = cpus - self.free(agent)
            resources = {"cpus": cpus, "mem": cpus * MEM_OF_CPU, "disk": 10_000.0, "gpus": 0.0, "ports": "[1-99]"}
            slaves.append(
                {
                    "id": f"S{agent.rpartition('-')[2]}",
                    "hostname": agent,
                    "active": True,
                    "attributes": self.attributes[agent],
                    "resources": resources,
                    "unreserved_resources": resources,
                    "used_resources": {"cpus": held, "mem": held * MEM_OF_CPU},
                }
            )
        return {"slaves": slaves}

    def acceptOffers(self, offer_ids: Any, operations: Any, filters: Any = None) -> None:  # noqa: N802
        executors = {self.executor_of(task_id) for task_id in self.running}
        super().acceptOffers(offer_ids, operations, filters)
        for one in offer_ids:
            del self.offered[one["value"]]
        for operation in operations:
            for info in operation["launch"]["task_infos"]:
                agent = f"agent-{info['agent_id']['value'].removeprefix('S')}"
                own = () if executor_of(info) in executors else info.get("executor", {}).get("resources", ())
                executors.add(executor_of(info))
                pieces = [*info["resources"], *own]
                cpus = sum(piece["scalar"]["value"] for piece in pieces if piece["name"] == "cpus")
                assert cpus <= self.free(agent) + 1e-6, "more was launched than there is"
                self.running[info["task_id"]["value"]] = (agent, cpus)
                self.launches.append(info["task_id"]["value"])

    def declineOffer(self, offer_ids: Any, filters: Any = None) -> None:  # noqa: N802
        super().declineOffer(offer_ids, filters)
        self.refused_for_s.append(filters["refuse_seconds"])
        for one in offer_ids:
            agent, cpus = self.offered.pop(one["value"])
            self._filters[agent] = (self.now + filters["refuse_seconds"], cpus)

    def reviveOffers(self) -> None:  # noqa: N802
        super().reviveOffers()
        self._filters.clear()
        self._suppressed = False

    def suppressOffers(self) -> None:  # noqa: N802
        super().suppressOffers()
        self._suppressed = True


class FakeJob:
    """A job of `count` tasks of one size that start together, wherever there is room (a `Job` and its `Sizing`)."""

    is_gang = True

    def __init__(self, handle: JobEntry, count: int, cpus: float, lasts_s: float = 10.0, key: Hashable = None) -> None:
        self.job_handle = handle
        self.count = count
        self.cpus = cpus
        self.lasts_s = lasts_s
        self.equivalence_class = key
        self.looks = 0
        self.placings = 0
        self.unwanted: set[str] = set()
        self.keeps_offers = False
        self.raises: Exception | None = None
        self.seen: list[events.Event] = []
        self.need = Need.START
        self.done = False
        self.vacated: set[str] = set()
        self.fit = functools.cache(self._fit)

    def handle(self, event: events.Event) -> None:
        self.seen.append(event)
        if self.raises is not None:
            raise self.raises
        match event:
            case events.StatusUpdate():
                self.done = len(self.job_handle.tasks) == 0

    def tick(self) -> None:
        """Does nothing by time."""

    def match_offers(self, agents: Sequence[AgentOffer]) -> Answer:
        if not agents:
            return Decline()
        if self.keeps_offers:
            return Planning()
        self.looks += 1
        places = [agent.agent_id for agent in agents for _ in range(int(agent.amounts["cpus"] // self.cpus))]
        chosen = places[: self.count]
        if len(chosen) < self.count:
            return Decline()
        self.need = Need.NOTHING
        infos: dict[str, list[dict[str, Any]]] = {}
        offered = {agent.agent_id: agent for agent in agents}
        for number, place in enumerate(chosen):
            infos.setdefault(place, []).append(self._info(number, offered[place]))
        return Launch({place: {"type": "LAUNCH", "launch": {"task_infos": there}} for place, there in infos.items()})

    def launched(self) -> None:
        """Knows it already."""

    def refused(self, error: MasterUnavailableError | CallRefusedError) -> None:
        raise error

    def messages(self) -> list[Message]:
        return []

    def wanted_tasks(self) -> set[str]:
        return self.job_handle.tasks.keys() - self.unwanted

    def cancel(self) -> None:
        self.need = Need.NOTHING
        self.unwanted = set(self.job_handle.tasks)
        self.done = not self.job_handle.tasks

    def to_state(self) -> dict[str, Any]:
        return {"launched": sorted(self.job_handle.tasks)}

    def outcome(self) -> JobOutcome:
        return JobOutcome(JobState.FINISHED)

    def close(self) -> None:
        """Holds nothing."""

    def needs(self, nodes: Nodes) -> tuple[TaskNeed, ...]:
        return (TaskNeed("worker", self.count, self.cpus, self.cpus * MEM_OF_CPU),)

    def _fit(self, nodes: Nodes) -> FitResult:
        self.placings += 1
        names: list[str] = []
        for node in nodes:
            names += [node.name] * int(min(node.cpus, node.mem_bytes / MIB / MEM_OF_CPU) // self.cpus)
        if len(names) < self.count:
            return FitResult(problem=f"{self.count} workers of {self.cpus:g} cpus do not fit.")
        return FitResult(frozenset(names[: self.count]))

    def _info(self, number: int, agent: AgentOffer) -> dict[str, Any]:
        return {
            "name": f"{self.job_handle.job_id} worker:{number}",
            "task_id": {"value": f"{self.job_handle.job_id}.{number}"},
            "agent_id": {"value": agent.agent_id},
            "resources": [scalar("cpus", self.cpus), scalar("mem", self.cpus * MEM_OF_CPU)],
        }


class FakePreemptibleJob(FakeJob):
    """One that leaves agents when it is asked to, as searches do."""

    def preemptible_tasks(self) -> frozenset[str]:
        return frozenset(self.job_handle.tasks)

    def preempt(self, agent_ids: frozenset[str]) -> None:
        self.vacated |= agent_ids


class FakeDirectory(AgentDirectory):
    """Asks synchronously, so that its answers do not depend on threads."""

    def __init__(self, master: FakeMaster) -> None:
        super().__init__(master.ask, clock=lambda: master.now)
        self._master = master
        self._refreshed_s = master.now
        self.is_known = True
        self.refresh()

    def current(self) -> tuple[AgentFacts, ...] | None:
        if not self.is_known:
            return None
        if self._master.now - self._refreshed_s >= REFRESH_S:
            self._refreshed_s = self._master.now
            self.refresh()
        return self._known


class FakeJournal(Journal):
    """Keeps in memory what a service writes down."""

    def __init__(self) -> None:
        self.tasks: dict[str, TaskRecord] = {}
        self.states: dict[str, dict[str, Any]] = {}
        self.strangers: list[str] = []
        self.log: list[str] = []

    def record_intent(self, job_id: str, tasks: Sequence[TaskRecord], state: dict[str, Any]) -> None:
        self.log.append(f"intends {' '.join(task.task_id for task in tasks)}")
        self.tasks |= {task.task_id: task for task in tasks}
        self.states[job_id] = state

    def record_changes(self, tasks: Sequence[TaskRecord], states: dict[str, dict[str, Any]]) -> None:
        self.tasks |= {task.task_id: task for task in tasks}
        self.states |= states

    def record_unknown_task(self, task_id: str, agent_id: str) -> None:
        self.strangers.append(task_id)


class SchedulerStage:
    """A scheduler on a fake master, with a clock that is moved by hand."""

    def __init__(
        self,
        agents: Mapping[str, float],
        others: Mapping[str, float] | None = None,
        weight: Mapping[str, float] | None = None,
        reservations: Reservations | None = None,
        background: Background | None = None,
        job_sizes: JobSizes | None = None,
    ) -> None:
        self.master = FakeMaster(agents, others)
        self.journal = FakeJournal()
        self.directory = FakeDirectory(self.master)
        self.failed: list[tuple[str, Exception]] = []
        self.ended: list[str] = []
        self.told: list[tuple[str, str]] = []
        self.jobs: dict[str, FakeJob] = {}
        self.started_s: dict[str, float] = {}
        self._ends: dict[str, float] = {}
        self._numbers = itertools.count()
        weights = dict(weight or {})
        self.scheduler = Scheduler(
            self.master,
            journal=self.journal,
            log=lambda text: None,
            ended=lambda handle: self.ended.append(handle.job_id),
            failed=lambda handle, error: self.failed.append((handle.job_id, error)),
            notify=lambda job_id, text: self.told.append((job_id, text)),
            queue=FairQueue(lambda user: weights.get(user, 1.0)),
            agents=self.directory,
            reservations=reservations,
            background=background,
            job_sizes=job_sizes,
            clock=lambda: self.master.now,
        )
        self.scheduler.handle(events.Subscribed("F", "127.0.0.1:5050"))

    def close(self) -> None:
        self.directory.close()

    def submit(
        self,
        job_id: str,
        count: int = 1,
        cpus: float = 1.0,
        *,
        user: str = "ada",
        lasts_s: float = 10.0,
        key: Hashable = None,
        constraints: Sequence[str] = (),
        kind: type[FakeJob] = FakeJob,
        priority: Priority = Priority.NORMAL,
        waited_s: float = 0.0,
    ) -> FakeJob:
        def make(handle: JobEntry) -> FakeJob:
            job = kind(handle, count, cpus, lasts_s, key)
            handle.sizing = job
            return job

        self.jobs[job_id] = self.scheduler.admit(  # type: ignore[assignment]
            job_id,
            user,
            next(self._numbers),
            make,
            constraints=constraints,
            priority=priority,
            submitted_s=time.time() - waited_s,
        ).job
        return self.jobs[job_id]

    def step(self, seconds: float = STEP_S) -> None:
        """Time passes, tasks start and end, offers come, the scheduler looks after it all."""
        self.master.now += seconds
        for task_id in [task for task, end_s in self._ends.items() if end_s <= self.master.now]:
            self.update(task_id, "TASK_FINISHED")
        offers = self.master.next_offers()
        if offers:
            self.scheduler.handle(events.OffersArrived(tuple(offers)))
        self.scheduler.tick()
        for task_id in self.master.running.keys() - self._ends.keys():
            job_id = task_id.rpartition(".")[0]
            self.started_s.setdefault(job_id, self.master.now)
            self._ends[task_id] = self.master.now + (self.jobs[job_id].lasts_s if job_id in self.jobs else 1e9)
            self.update(task_id, "TASK_RUNNING")

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / STEP_S)):
            self.step()

    def update(self, task_id: str, state: str, agent: str = "S0", **more: Any) -> None:
        if state not in ("TASK_RUNNING", "TASK_STARTING"):
            self.master.running.pop(task_id, None)
            self._ends.pop(task_id, None)
        status = {"task_id": {"value": task_id}, "agent_id": {"value": agent}, "state": state, **more}
        self.scheduler.handle(events.StatusUpdate(status))
