"""A played cluster for the hub: a master that offers, filters and launches as Mesos does, jobs of one kind of task."""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from framework import events
from framework.background import Background
from framework.offers import MIB
from framework.service.agents import REFRESH_S, AgentDirectory, AgentFacts
from framework.service.explanation import TaskNeed
from framework.service.hub import Hub
from framework.service.journal import Journal
from framework.service.offer_pool import Offer, agent_id, amounts_of, offer_id
from framework.service.queueing import FairQueue
from framework.service.records import JobState, TaskRecord
from framework.service.reservation import Reservations
from framework.service.seat import Seat
from framework.service.sizing import Fit, Nodes
from framework.service.tenant import Need, Outcome
from tests.framework.played_mesos import PlayedMesos, scalar

STEP_S = 0.5
MEM_OF_CPU = 1024.0


class PlayedMaster(PlayedMesos):
    """Offers what is free and not filtered; launches at once.

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
        """CPUs that nobody holds."""
        held = sum(cpus for where, cpus in self.running.values() if where == agent)
        return self.agents[agent] - self.others.get(agent, 0.0) - held

    def next_offers(self) -> list[Offer]:
        """What the allocator would send now."""
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
        super().acceptOffers(offer_ids, operations, filters)
        for one in offer_ids:
            del self.offered[one["value"]]
        for operation in operations:
            for info in operation["launch"]["task_infos"]:
                agent = f"agent-{info['agent_id']['value'].removeprefix('S')}"
                pieces = [*info["resources"], *info.get("executor", {}).get("resources", ())]
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


class PlayedJob:
    """A job of `count` tasks of one size that start together, wherever there is room (a `Tenant` and its `Sizing`)."""

    is_gang = True

    def __init__(self, seat: Seat, count: int, cpus: float, lasts_s: float = 10.0, key: Hashable = None) -> None:
        self.seat = seat
        self.count = count
        self.cpus = cpus
        self.lasts_s = lasts_s
        self.demand_key = key
        self.looks = 0
        self.placings = 0
        self.offers: list[Offer] = []
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
            case events.OffersArrived():
                self.offers = list(event.offers)
            case events.OfferRescinded():
                self.offers = [offer for offer in self.offers if offer_id(offer) != event.offer_id]
            case events.StatusUpdate():
                self.seat.acknowledgeStatusUpdate(event.status)
                self.done = len(self.seat.tasks) == 0

    def tick(self) -> None:
        if not self.offers or self.keeps_offers:
            return
        self.looks += 1
        by_agent: dict[str, list[Offer]] = {}
        for offer in self.offers:
            by_agent.setdefault(agent_id(offer), []).append(offer)
        self.offers = []
        places: list[str] = []
        for agent, offers in by_agent.items():
            places += [agent] * int(sum(amounts_of(offer)["cpus"] for offer in offers) // self.cpus)
        chosen = places[: self.count]
        if len(chosen) < self.count:
            chosen = []
        else:
            self.need = Need.NOTHING
        for agent, offers in by_agent.items():
            ids = [offer["id"] for offer in offers]
            infos = [self._info(number, offers[0]) for number, place in enumerate(chosen) if place == agent]
            if infos:
                self.seat.acceptOffers(ids, [{"type": "LAUNCH", "launch": {"task_infos": infos}}])
            else:
                self.seat.declineOffer(ids)

    def cancel(self) -> None:
        self.need = Need.NOTHING
        for task in self.seat.tasks.values():
            self.seat.kill(task.task_id, task.agent_id)
        self.done = not self.seat.tasks

    def to_state(self) -> dict[str, Any]:
        return {"launched": sorted(self.seat.tasks)}

    def outcome(self) -> Outcome:
        return Outcome(JobState.FINISHED)

    def close(self) -> None:
        self.offers = []

    def needs(self, nodes: Nodes) -> tuple[TaskNeed, ...]:
        return (TaskNeed("worker", self.count, self.cpus, self.cpus * MEM_OF_CPU),)

    def _fit(self, nodes: Nodes) -> Fit:
        self.placings += 1
        names: list[str] = []
        for node in nodes:
            names += [node.name] * int(min(node.cpus, node.mem_bytes / MIB / MEM_OF_CPU) // self.cpus)
        if len(names) < self.count:
            return Fit(problem=f"{self.count} workers of {self.cpus:g} cpus do not fit.")
        return Fit(frozenset(names[: self.count]))

    def _info(self, number: int, offer: Offer) -> dict[str, Any]:
        return {
            "name": f"{self.seat.job_id} worker:{number}",
            "task_id": {"value": f"{self.seat.job_id}.{number}"},
            "agent_id": offer["agent_id"],
            "resources": [scalar("cpus", self.cpus), scalar("mem", self.cpus * MEM_OF_CPU)],
        }


class VacatingJob(PlayedJob):
    """One that leaves agents when it is asked to, as searches do."""

    def vacatable(self) -> frozenset[str]:
        return frozenset(self.seat.tasks)

    def vacate(self, agent_ids: frozenset[str]) -> None:
        self.vacated |= agent_ids


class PromptDirectory(AgentDirectory):
    """Asks at once, so that what it says does not depend on threads."""

    def __init__(self, master: PlayedMaster) -> None:
        super().__init__(master.ask, clock=lambda: master.now)
        self._master = master
        self._refreshed_s = master.now
        self.refresh()

    def current(self) -> tuple[AgentFacts, ...] | None:
        if self._master.now - self._refreshed_s >= REFRESH_S:
            self._refreshed_s = self._master.now
            self.refresh()
        return self._known


class RecordingJournal(Journal):
    """Keeps in memory what a service writes down."""

    def __init__(self) -> None:
        self.tasks: dict[str, TaskRecord] = {}
        self.states: dict[str, dict[str, Any]] = {}
        self.strangers: list[str] = []
        self.log: list[str] = []

    def intends(self, job_id: str, tasks: Sequence[TaskRecord], state: dict[str, Any]) -> None:
        self.log.append(f"intends {' '.join(task.task_id for task in tasks)}")
        self.tasks |= {task.task_id: task for task in tasks}
        self.states[job_id] = state

    def changed(self, tasks: Sequence[TaskRecord], states: dict[str, dict[str, Any]]) -> None:
        self.tasks |= {task.task_id: task for task in tasks}
        self.states |= states

    def unknown(self, task_id: str, agent_id: str) -> None:
        self.strangers.append(task_id)


class HubStage:
    """A hub on a played master, with a clock that is moved by hand."""

    def __init__(
        self,
        agents: Mapping[str, float],
        others: Mapping[str, float] | None = None,
        weight: Mapping[str, float] | None = None,
        reservations: Reservations | None = None,
        background: Background | None = None,
    ) -> None:
        self.master = PlayedMaster(agents, others)
        self.journal = RecordingJournal()
        self.directory = PromptDirectory(self.master)
        self.failed: list[tuple[str, Exception]] = []
        self.ended: list[str] = []
        self.told: list[tuple[str, str]] = []
        self.jobs: dict[str, PlayedJob] = {}
        self.started_s: dict[str, float] = {}
        self._ends: dict[str, float] = {}
        self._numbers = itertools.count()
        weights = dict(weight or {})
        self.hub = Hub(
            self.master,
            journal=self.journal,
            note=lambda text: None,
            ended=lambda seat: self.ended.append(seat.job_id),
            failed=lambda seat, error: self.failed.append((seat.job_id, error)),
            tell=lambda job_id, text: self.told.append((job_id, text)),
            queue=FairQueue(lambda user: weights.get(user, 1.0)),
            agents=self.directory,
            reservations=reservations,
            background=background,
            clock=lambda: self.master.now,
        )
        self.hub.handle(events.Subscribed("F", "127.0.0.1:5050"))

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
        kind: type[PlayedJob] = PlayedJob,
    ) -> PlayedJob:
        def make(seat: Seat) -> PlayedJob:
            job = kind(seat, count, cpus, lasts_s, key)
            seat.sizing = job
            return job

        self.jobs[job_id] = self.hub.admit(  # type: ignore[assignment]
            job_id, user, next(self._numbers), make, constraints=constraints
        ).tenant
        return self.jobs[job_id]

    def step(self, seconds: float = STEP_S) -> None:
        """Time passes, tasks start and end, offers come, the hub looks after it all."""
        self.master.now += seconds
        for task_id in [task for task, end_s in self._ends.items() if end_s <= self.master.now]:
            self.update(task_id, "TASK_FINISHED")
        offers = self.master.next_offers()
        if offers:
            self.hub.handle(events.OffersArrived(tuple(offers)))
        self.hub.tick()
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
        self.hub.handle(events.StatusUpdate(status))
