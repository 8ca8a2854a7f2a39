"""A placement's step time as a function of factors on its terms, so that measurements can determine the factors.

Each factor stretches one term of `docs/planner.md`, 'Step time'; with all 1 it equals the prediction of
`solver.evaluation`.

Asynchronous workers make X* steps/s, the optimum of a linear program (`solver.async_rates`). It is linear in the
workers' own rates and in the links' speeds as long as the same limits bind. Its derivatives by the own rates come from
X* at slightly higher rates; the rest of X* is due to the links (Euler's theorem), all of which `network` stretches.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from solver.async_rates import Shared, slowest_send_s
from solver.calibration.nnls import Floats
from solver.capacity import Ints
from solver.placement.naming import Assignment, uplink_s
from solver.rate_arrays import PlacementArrays, total_rates
from solver.resources import WorkerShape
from solver.scenario import Scenario
from solver.shards import Shards
from solver.step_time import StepModel
from solver.units import BYTES_PER_S_PER_GBPS

TERMS = ("compute", "input", "network", "update", "latency", "dispatch")
"""Terms with a factor. `network` stretches every transfer, over cards, uplinks and inside machines; `latency` is a
step's constant; `dispatch` is the chief's time for each worker."""

_ROWS = np.eye(len(TERMS))
_NETWORK = TERMS.index("network")
RATE_STEP = 1e-6
"""Share by which own rates are raised for derivatives; between kinks X* is linear in them, so any would do."""


@dataclass(frozen=True)
class Links:
    """Limits that asynchronous workers share; arrays are by machine, those with workers first, as in
    `StepTerms.workers`.

    Attributes:
        racks: for each rack the indices of its machines; empty if racks do not matter.
        uplink: bytes/s of each rack's uplink, each way.
    """

    stored: Floats
    cards: Floats
    racks: tuple[Ints, ...]
    total_bytes: int
    within: float
    uplink: float

    def rates(self, own_rates: Floats, slower: float) -> Floats:
        """Steps/s of all workers together.

        Args:
            own_rates: steps/s by machine with workers if nothing but themselves limits them; several rows for several
                cases.
            slower: factor on the time of every transfer.
        """
        idle = np.zeros((*own_rates.shape[:-1], len(self.stored) - own_rates.shape[-1]))
        shared = Shared(self.total_bytes, self.within / slower, self.uplink / slower)
        own = np.concatenate([own_rates, idle], axis=-1)
        return total_rates(PlacementArrays(own, self.stored, self.cards / slower, shared, racks=self.racks))


@dataclass(frozen=True)
class StepTerms:
    """One placement's terms; arrays have a column for each of `TERMS`.

    Attributes:
        workers: number of workers by machine; machines without any are left out.
        computing: for each of these machines a step's work if computing limits it.
        preparing: the same if preparing the input limits it; equal to `computing` if the two do not overlap.
        transfer: for each of these machines one worker's own pull and push.
        network: the busiest network card or uplink while every worker makes one step (synchronous).
    """

    synchronous: bool
    workers: Floats
    computing: Floats
    preparing: Floats
    transfer: Floats
    network: Floats
    update: Floats
    dispatch: Floats
    links: Links

    def gradient(self, factors: Floats, *, overlap: bool) -> Floats:
        """Derivatives of the step time by each factor; the step time is their product with the factors."""
        busy = self.computing @ factors >= self.preparing @ factors
        work = np.where(busy[:, None], self.computing, self.preparing)
        if self.synchronous:
            cycle = _longest_of(work, factors)
            rest = self.network + self.update + self.dispatch
            return _longest_of(np.stack([cycle, rest]), factors) if overlap else cycle + rest
        rounds = work + self.transfer
        times = rounds @ factors
        own = self.workers / times
        slower = float(factors[_NETWORK])
        together, *raised = self.links.rates(own * (1 + RATE_STEP * np.eye(len(own) + 1, len(own), -1)), slower)
        # Contribution of a machine's own rate to all steps; the links contribute the rest.
        parts = (np.array(raised) - together) / RATE_STEP
        parts_of_links = together - parts.sum()
        cycle = (
            self.workers.sum() / together**2 * ((parts / times) @ rounds + parts_of_links / slower * _ROWS[_NETWORK])
        )
        return _longest_of(np.stack([cycle, self.update, self.dispatch]), factors)


def step_terms(scenario: Scenario, shape: WorkerShape, shards: Shards, assignment: Assignment) -> StepTerms:
    """Computes the terms of a placement.

    `assignment`: machine of every task; several parameter servers may share one.
    """
    model = scenario.model(shape)
    kind_of = {name: kind for kind in scenario.kinds for name in kind.names}
    held: Counter[str] = Counter()
    for node, size in zip(assignment.ps, shards.sizes, strict=True):
        held[node] += size
    near = Counter(assignment.workers)
    count = len(assignment.workers)
    compute, prepare, network, update, latency, dispatch = _ROWS
    exchange = model.exchange_s * network
    arithmetic = np.array([model.arithmetic_s(kind_of[node]) for node in near])[:, None] * compute
    fixed = model.latency_s * latency
    if shape.gpus:
        computing = arithmetic + exchange + fixed
        preparing = np.broadcast_to(model.input_s * prepare + fixed, computing.shape)
    else:
        computing = preparing = arithmetic + model.input_s * prepare + fixed
    cards = max(model.network_s(kind_of[node], held[node], near[node], count) for node in held.keys() | near.keys())
    rack_of = {name: kind.rack for name, kind in kind_of.items()}
    uplink = uplink_s(scenario.cluster, assignment, shards.sizes, rack_of)
    slowest = slowest_send_s(held.values(), (kind_of[node].network_bytes_per_s for node in held))
    transfer = np.array([model.transfer_s(kind_of[node], held[node], slowest) for node in near])[:, None] * network
    return StepTerms(
        synchronous=scenario.profile.synchronous,
        workers=np.array(list(near.values()), dtype=float),
        computing=computing,
        preparing=preparing,
        transfer=transfer,
        network=max(cards, uplink) * network,
        update=model.update_s(model.load(shards), count) * update,
        dispatch=model.dispatch_s(count) * dispatch,
        links=_links(scenario, model, held, [*near, *(held.keys() - near.keys())]),
    )


def _links(scenario: Scenario, model: StepModel, held: Mapping[str, int], nodes: Sequence[str]) -> Links:
    kind_of = {name: kind for kind in scenario.kinds for name in kind.names}
    racks: dict[str | None, list[int]] = {}
    uplink = math.inf
    if scenario.cluster.across_racks_gbps is not None:
        uplink = scenario.cluster.across_racks_gbps * BYTES_PER_S_PER_GBPS
        for index, node in enumerate(nodes):
            racks.setdefault(kind_of[node].rack, []).append(index)
    return Links(
        stored=np.array([held[node] for node in nodes], dtype=float),
        cards=np.array([kind_of[node].network_bytes_per_s for node in nodes]),
        racks=tuple(np.array(members) for members in racks.values()),
        total_bytes=model.total_bytes,
        within=model.within_node_bytes_per_s,
        uplink=uplink,
    )


def _longest_of(vectors: Floats, factors: Floats) -> Floats:
    longest: Floats = vectors[int(np.argmax(vectors @ factors))]
    return longest
