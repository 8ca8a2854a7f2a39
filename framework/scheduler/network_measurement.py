"""Measures the network between agents by short transfers, as a Mesos framework of its own (`dike agents measure`).

Each agent runs one task (`executor.transfer`). First agents send to each other one pair at a time, which measures their
network cards. Then all agents of a rack send to other racks at the same time, which measures the rack's uplink if it
carries less than the cards.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dike.exceptions import BadInputError, InterruptedByUserError, JobFailedError
from executor.messages import encode
from executor.transfer import PEER_TIMEOUT_S, RESULT_TIMEOUT_S, TOKEN_BYTES, TransferOrder, TransferResult
from framework.mesos import events
from framework.mesos.connection import Connection
from framework.mesos.containers import Container, task_container
from framework.mesos.driver import Driver, MesosCalls
from framework.mesos.offers import AgentOffer, by_agent
from framework.mesos.tasks import TaskState, executor_info, take_resources
from framework.scheduler.constraints import Constraints, parse_constraints
from framework.scheduler.mesos_access import MesosAccess
from framework.scheduler.offer_pool import MAX_COLLECT_S, SETTLE_S
from framework.scheduler.session import drive, sigterm_as_interrupt
from solver.network import MachineNetwork, Network

logger = logging.getLogger(__name__)

MAX_PARTNERS = 3
"""Maximum number of agents that each agent sends to."""
CPUS = 1.0
MIN_CPUS = 0.1
MEM_MIB = 256.0
START_TIMEOUT_S = 60.0
OFFER_TIMEOUT_S = 20.0
REFUSE_S = 60.0
UPLINK_LIMIT_RATIO = 0.9
"""An uplink that carries at least this share of the cards' speed is not the bottleneck."""
BITS_PER_GBIT = 1e9


@dataclass(frozen=True)
class TransferLimits:
    """Limits of a transfer."""

    size_bytes: int
    seconds: float


@dataclass(frozen=True)
class Transfer:
    """One transfer.

    Attributes:
        sender, receiver: agents.
        gbps: speed in Gb/s.
        concurrent: whether other transfers out of the same rack ran at the same time.
    """

    sender: str
    receiver: str
    gbps: float
    concurrent: bool


@dataclass(frozen=True)
class NetworkReport:
    """Results of a measurement.

    Attributes:
        racks: agent -> its rack; None if unknown.
        transfers: all completed transfers.
        problems: failures, a sentence each.
    """

    racks: dict[str, str | None]
    transfers: tuple[Transfer, ...]
    problems: tuple[str, ...] = ()

    @property
    def cards_gbps(self) -> dict[str, float]:
        """Agent -> speed of its network card: its maximum while no other transfer ran."""
        found: dict[str, float] = {}
        for one in self.transfers:
            if not one.concurrent:
                for agent in (one.sender, one.receiver):
                    found[agent] = max(found.get(agent, 0.0), one.gbps)
        return found

    @property
    def across_racks_gbps(self) -> float | None:
        """Speed of the slowest uplink; None if no uplink carried less than the cards."""
        cards = self.cards_gbps
        limits = []
        for rack in {rack for rack in self.racks.values() if rack is not None}:
            out = [one for one in self.transfers if one.concurrent and self.racks[one.sender] == rack]
            ends = ({one.sender for one in out}, {one.receiver for one in out})
            most = min(sum(cards.get(agent, 0.0) for agent in end) for end in ends)
            if out and (carried := sum(one.gbps for one in out)) < UPLINK_LIMIT_RATIO * most:
                limits.append(carried)
        return min(limits, default=None)

    def network(self) -> Network:
        across = self.across_racks_gbps
        return Network(
            across_racks_gbps=None if across is None else _rounded(across),
            machines=tuple(
                MachineNetwork(agent, _rounded(gbps), self.racks[agent]) for agent, gbps in self.cards_gbps.items()
            ),
        )


def _rounded(gbps: float) -> float:
    return float(f"{gbps:.3g}")


@dataclass(frozen=True)
class _Round:
    """Transfers that run at the same time: (sender, receiver)."""

    pairs: tuple[tuple[str, str], ...]
    concurrent: bool


@dataclass
class _Agent:
    offer: AgentOffer
    executor_id: str
    port: int
    is_ready: bool = False


class NetworkMeasurement:
    """The framework: launches a task on each agent that offers enough, and starts transfers between them.

    Args:
        mesos: the master.
        python: interpreter on the agents.
        container: container of the tasks; None for the agents' own file system.
        limits: limits of each transfer.
        constraints: which agents to use.
        expected: number of agents, if known.
        progress: receives lines for the user.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        mesos: MesosCalls,
        python: str,
        container: Container | None,
        limits: TransferLimits,
        constraints: Constraints,
        expected: int | None = None,
        progress: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._mesos = mesos
        self._python = python
        self._container = container
        self._limits = limits
        self._constraints = constraints
        self._expected = expected
        self._progress = progress
        self._clock = clock
        self._connection = Connection(progress)
        self._offers: dict[str, dict[str, Any]] = {}
        self._offered_s: list[float] = []
        self._agents: dict[str, _Agent] = {}
        self._started_s = clock()
        self._racks: dict[str, str | None] = {}
        self._rounds: deque[_Round] | None = None
        self._in_flight: dict[str, tuple[str, str]] = {}
        self._is_concurrent = False
        self._round_s = 0.0
        self._numbers = itertools.count()
        self._transfers: list[Transfer] = []
        self._problems: list[str] = []
        self.done = False

    @property
    def report(self) -> NetworkReport:
        """Results up to now."""
        return NetworkReport(self._racks, tuple(self._transfers), tuple(self._problems))

    def cancel(self) -> None:
        """Ends it: Mesos kills the tasks with their framework."""
        self.done = True

    def handle(self, event: events.Event) -> None:
        """Handles one event.

        Raises:
            BadInputError: if the master refuses the framework.
            JobFailedError: if the connection is lost.
        """
        match event:
            case events.Subscribed():
                self._connection.subscribed()
            case events.Disconnected():
                raise JobFailedError("The connection to the Mesos master is lost; measure again.")
            case events.Refused():
                self._connection.refused(event)
            case events.OffersArrived():
                self._on_offers(event.offers)
            case events.OfferRescinded():
                self._offers.pop(event.offer_id, None)
            case events.StatusUpdate():
                self._mesos.acknowledgeStatusUpdate(event.status)
                self._on_update(event)
            case events.MessageArrived():
                try:
                    self._on_result(TransferResult.decode(event.data))
                except ValueError as error:
                    logger.warning("ignoring a malformed message: %s", error)

    def tick(self) -> None:
        """Performs what is due by time.

        Raises:
            BadInputError: if fewer than two agents have room for a task.
            JobFailedError: if fewer than two tasks started.
        """
        now_s = self._clock()
        if not self._agents:
            if self._is_settled(now_s):
                self._launch(now_s)
            return
        if self._rounds is None:
            are_ready = all(agent.is_ready for agent in self._agents.values())
            if not are_ready and now_s - self._started_s < START_TIMEOUT_S:
                return
            self._plan()
        if self._in_flight and now_s - self._round_s >= self._limits.seconds + PEER_TIMEOUT_S + RESULT_TIMEOUT_S:
            for sender, receiver in self._in_flight.values():
                self._problems.append(f"{sender} did not report its transfer to {receiver}.")
            self._in_flight.clear()
        if not self._in_flight:
            self._next_round(now_s)

    # Offers.

    def _on_offers(self, offers: Sequence[dict[str, Any]]) -> None:
        if self._agents:
            self._decline([offer["id"] for offer in offers])
            return
        self._offered_s.append(self._clock())
        self._offers |= {offer["id"]["value"]: offer for offer in offers}

    def _is_settled(self, now_s: float) -> bool:
        if not self._offers:
            if now_s - self._started_s >= OFFER_TIMEOUT_S:
                raise BadInputError(
                    f"No agent has offered anything within {OFFER_TIMEOUT_S:g} s: other frameworks use them all."
                )
            return False
        if self._expected is not None:
            agents = {offer["agent_id"]["value"] for offer in self._offers.values()}
            return len(agents) >= self._expected or now_s - self._offered_s[0] >= MAX_COLLECT_S
        return now_s - self._offered_s[-1] >= SETTLE_S or now_s - self._offered_s[0] >= MAX_COLLECT_S

    def _launch(self, now_s: float) -> None:
        offers, self._started_s = by_agent(self._offers.values()), now_s
        wanted = [one for one in offers if self._constraints.admits(one.attributes, one.names[0])]
        able = [one for one in wanted if _has_room(one)]
        self._problems += [f"{one.node} offers too little for a task." for one in wanted if one not in able]
        if len(able) < 2:
            names = ", ".join(one.node for one in able) or "none"
            raise BadInputError(
                f"A measurement needs two agents with room for a task ({MIN_CPUS:g} cpus, {MEM_MIB:g} MiB and a port). "
                f"Of the agents that meet the constraints, only these have it: {names}."
            )
        unused = [offer_id for one in offers if one not in able for offer_id in one.offer_ids]
        self._decline([{"value": offer_id} for offer_id in unused])
        token, choose = secrets.token_hex(TOKEN_BYTES // 2), secrets.SystemRandom()
        for number, offer in enumerate(able):
            pool = offer.pool
            port, port_resources = pool.take_port((), choose)
            executor_id = f"transfer-{number}"
            cpus = min(CPUS, pool.scalar("cpus"))
            own, rest = take_resources(pool, cpus=cpus, mem_mib=MEM_MIB)
            executor = executor_info(
                executor_id, f"dike {executor_id}", "network", self._python, self._container, own, "executor.transfer"
            )
            order = TransferOrder(offer.address, port, token, self._limits.size_bytes, self._limits.seconds)
            info = {
                "name": f"dike {executor_id}",
                "task_id": {"value": executor_id},
                "agent_id": {"value": offer.agent_id},
                "executor": executor,
                "resources": [*rest, *port_resources],
                "data": order.encode(),
            }
            operation = {"type": "LAUNCH", "launch": {"task_infos": [info]}}
            ids = [{"value": offer_id} for offer_id in offer.offer_ids]
            self._mesos.acceptOffers(ids, [operation], {"refuse_seconds": REFUSE_S})
            self._agents[offer.node] = _Agent(offer, executor_id, port)
            self._racks[offer.node] = offer.node_class().rack
        self._progress(f"starting a task on {len(able)} agents")

    def _decline(self, offer_ids: Sequence[dict[str, str]]) -> None:
        if offer_ids:
            self._mesos.declineOffer(list(offer_ids), {"refuse_seconds": REFUSE_S})

    # Tasks.

    def _on_update(self, event: events.StatusUpdate) -> None:
        state = TaskState.of(event.state)
        node = next((node for node, one in self._agents.items() if one.executor_id == event.task_id), None)
        if node is None:
            return
        if state is TaskState.RUNNING:
            self._agents[node].is_ready = True
        elif state.is_terminal():
            why = event.status.get("message") or event.status.get("reason") or state
            self._problems.append(f"The task on {node} {state.verb}: {str(why).rstrip('.')}.")
            del self._agents[node]
            gone = [number for number, ends in self._in_flight.items() if node in ends]
            for number in gone:
                del self._in_flight[number]
            if len(self._agents) < 2:
                raise JobFailedError(f"Fewer than two agents are left to measure. {' '.join(self._problems)}")

    def _plan(self) -> None:
        """Plans the transfers once all tasks are ready or have timed out."""
        for node in [node for node, agent in self._agents.items() if not agent.is_ready]:
            self._problems.append(f"The task on {node} did not start within {START_TIMEOUT_S:g} s.")
            del self._agents[node]
        if len(self._agents) < 2:
            raise JobFailedError(f"Fewer than two agents are left to measure. {' '.join(self._problems)}")
        # Sorted by rack, so that most neighbours are in the same rack.
        order = sorted(self._agents, key=lambda node: (self._racks[node] or "", node))
        self._rounds = deque(_Round((pair,), concurrent=False) for pair in _sequential_pairs(order))
        count = len(self._rounds)
        self._rounds += _out_of_racks(order, self._racks)
        self._progress(
            f"{count} transfers one after the other, at most {self._limits.seconds:g} s each"
            + (f", then out of {len(self._rounds) - count} racks" if len(self._rounds) > count else "")
        )

    def _next_round(self, now_s: float) -> None:
        assert self._rounds is not None
        pairs: list[tuple[str, str]] = []
        while self._rounds and not pairs:
            now = self._rounds.popleft()
            pairs = [pair for pair in now.pairs if self._agents.keys() >= set(pair)]
            self._is_concurrent = now.concurrent
        self.done = not pairs
        self._round_s = now_s
        for sender, receiver in pairs:
            number = str(next(self._numbers))
            self._in_flight[number] = (sender, receiver)
            to = self._agents[receiver]
            order = {"transfer": number, "host": to.offer.address, "port": to.port}
            agent = self._agents[sender]
            self._mesos.sendFrameworkMessage(
                {"value": agent.executor_id}, {"value": agent.offer.agent_id}, encode(order)
            )

    def _on_result(self, result: TransferResult) -> None:
        ends = self._in_flight.pop(result.transfer, None)
        if ends is None:
            return
        if result.error or result.bytes <= 0 or result.seconds <= 0:
            why = result.error or "too little data arrived to measure the speed"
            self._problems.append(f"{ends[0]} could not send to {ends[1]}: {why}.")
            return
        gbps = 8 * result.bytes / result.seconds / BITS_PER_GBIT
        self._transfers.append(Transfer(*ends, gbps, self._is_concurrent))


def measure_network(
    mesos: MesosAccess,
    limits: TransferLimits,
    constraints: Sequence[str] = (),
    progress: Callable[[str], None] = lambda text: None,
) -> NetworkReport:
    """Measures the network between the agents of a Mesos; all its tasks end.

    Args:
        mesos: which Mesos.
        limits: limits of each transfer.
        constraints: which agents to use.
        progress: receives lines for the user.

    Raises:
        BadInputError: if the master refuses the framework, or fewer than two agents have room for a task.
        JobFailedError: if the connection is lost, or fewer than two tasks start.
        InterruptedByUserError: after Ctrl-C or SIGTERM.
    """
    admitted = parse_constraints(constraints)
    container = task_container(mesos.image, (), None)
    with sigterm_as_interrupt(), mesos.connect() as master:
        callbacks = events.EventScheduler()
        driver = Driver(mesos.settings("dike agents measure", master), master.uri, callbacks)
        agents = len(mesos.agents) if master.is_private else len(master.agents(admitted.admits) or ())
        work = NetworkMeasurement(driver, mesos.python(master), container, limits, admitted, agents or None, progress)
        try:
            drive(
                work,
                driver,
                callbacks,
                master,
                subscribed=lambda _: progress(f"measuring at {master.address}"),
                interrupted=lambda: None,
                cancel_timeout_s=0.0,
            )
        except KeyboardInterrupt:
            raise InterruptedByUserError("Interrupted; nothing was written, and all tasks are being killed.") from None
        return work.report


def _has_room(offer: AgentOffer) -> bool:
    amounts = offer.amounts
    return amounts["cpus"] >= MIN_CPUS and amounts["mem"] >= MEM_MIB and amounts["ports"] >= 1


def _sequential_pairs(order: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Pairs for transfers that run alone: each agent sends to the next few."""
    for step in range(1, min(MAX_PARTNERS, len(order) - 1) + 1):
        for index, sender in enumerate(order):
            yield sender, order[(index + step) % len(order)]


def _out_of_racks(order: Sequence[str], racks: dict[str, str | None]) -> Iterator[_Round]:
    """Pairs all agents of each rack with agents of other racks, to send at the same time."""
    members = defaultdict(list)
    for node in order:
        if (rack := racks[node]) is not None:
            members[rack].append(node)
    if len(members) < 2:
        return
    for rack, senders in members.items():
        others = itertools.cycle([node for other, nodes in members.items() if other != rack for node in nodes])
        yield _Round(tuple(zip(senders, others, strict=False)), concurrent=True)
