"""A placement's step time as a function of factors on its terms, so that measurements can say what the factors are.

Each factor stretches one term of `docs/solver.md`, 'Step time'; all 1, it is what `solver.evaluation` predicts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from solver.nnls import Floats
from solver.placement.naming import Assignment
from solver.racks import uplink_s
from solver.resources import WorkerShape
from solver.scenario import Scenario

TERMS = ("compute", "input", "network", "update", "latency", "dispatch")
"""What has a factor. `network` stretches every transfer, over cards, uplinks and inside machines; `latency` is a step's
constant; `dispatch` is the chief's time for each worker."""

_ROWS = np.eye(len(TERMS))


@dataclass(frozen=True)
class StepTerms:
    """One placement's terms; arrays have a column for each of `TERMS`.

    Attributes:
        synchronous: whether the workers wait for each other.
        workers: machines' numbers of workers; those with none are left out.
        computing: for each of these machines a step's work if computing limits it.
        preparing: the same if preparing the input limits it; equal to `computing` where the two do not overlap.
        transfer: for each of these machines one worker's own pull and push.
        network: the busiest network card or uplink.
        update: the busiest ps.
        dispatch: the separate chief.
    """

    synchronous: bool
    workers: Floats
    computing: Floats
    preparing: Floats
    transfer: Floats
    network: Floats
    update: Floats
    dispatch: Floats

    def gradient(self, factors: Floats, *, overlap: bool) -> Floats:
        """Derivatives of the step time by each factor; the step time is this times the factors.

        Args:
            factors: one for each of `TERMS`, above 0.
            overlap: whether a synchronous step's transfers run beside its work.
        """
        busy = self.computing @ factors >= self.preparing @ factors
        work = np.where(busy[:, None], self.computing, self.preparing)
        if self.synchronous:
            cycle = _longest(work, factors)
            rest = self.network + self.update + self.dispatch
            return _longest(np.stack([cycle, rest]), factors) if overlap else cycle + rest
        rounds = work + self.transfer
        times = rounds @ factors
        # The mean round is n / sum of rates, rate = 1 / time; its derivative follows from the rates'.
        rates = float((self.workers / times).sum())
        cycle = self.workers.sum() / rates**2 * ((self.workers / times**2) @ rounds)
        return _longest(np.stack([cycle, self.network, self.update, self.dispatch]), factors)


def step_terms(scenario: Scenario, shape: WorkerShape, shard_bytes: Sequence[int], assignment: Assignment) -> StepTerms:
    """The terms of a placement.

    Args:
        scenario: the model on the cluster.
        shape: what each worker gets.
        shard_bytes: bytes on each ps.
        assignment: machine of every task; several parameter servers may share one.
    """
    model = scenario.model(shape)
    kind_of = {name: kind for kind in scenario.kinds for name in kind.names}
    held: Counter[str] = Counter()
    for node, size in zip(assignment.ps, shard_bytes, strict=True):
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
    uplink = uplink_s(scenario.cluster, assignment, shard_bytes, rack_of)
    transfer = np.array([model.transfer_s(kind_of[node], held[node]) for node in near])[:, None] * network
    return StepTerms(
        synchronous=scenario.profile.synchronous,
        workers=np.array(list(near.values()), dtype=float),
        computing=computing,
        preparing=preparing,
        transfer=transfer,
        network=max(cards, uplink) * network,
        update=model.update_s(max(shard_bytes), count) * update,
        dispatch=model.dispatch_s(count) * dispatch,
    )


def _longest(vectors: Floats, factors: Floats) -> Floats:
    longest: Floats = vectors[int(np.argmax(vectors @ factors))]
    return longest
