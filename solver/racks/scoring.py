"""Converts tasks counted per machine to a placement across racks with the true shards, and evaluates it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from solver.async_rates import Machine, best_rates, slowest_send_s
from solver.placement.naming import Assignment
from solver.placement.problem import State
from solver.racks.max_plus import State as Tasks
from solver.racks.problem import RackProblem, View
from solver.racks.sharding import Place, Uplinks, distribute_shards
from solver.racks.tree import Load
from solver.traffic import weighted_traffic


@dataclass(frozen=True)
class RackPlacement:
    """One option, placed across racks.

    Attributes:
        cycle_s: synchronous: slowest worker's work; asynchronous: mean time of a worker's own round.
        network_s: time of the busiest network card or uplink for one step of every worker; asynchronous: for the steps
            that all workers make in `round_s`.
        samples_bound: upper bound of the option's speed; with equal shards `samples_per_s` itself.
    """

    assignment: Assignment
    cycle_s: float
    network_s: float
    round_s: float
    samples_per_s: float
    traffic_bytes: float
    samples_bound: float


def score_placement(problem: RackProblem, view: View, loads: Sequence[Load]) -> RackPlacement | None:
    """Distributes the true shards and evaluates the result; None if one of them does not fit.

    Args:
        problem: the option.
        view: the problem by which the machines were chosen.
        loads: the machines in use, with all of the option's tasks on them.
    """
    near = [load.state[-1] for load in loads]
    rack_workers = [0] * (max(load.rack for load in loads) + 1)
    for load, workers in zip(loads, near, strict=True):
        rack_workers[load.rack] += workers
    uplinks = Uplinks(problem.uplink_bytes_per_s, tuple(rack_workers), sum(problem.shards))
    states = [_states(problem, load) for load in loads]
    types = [(shard_type,) for shard_type in problem.shard_types]
    holders = [index for index, load in enumerate(loads) if any(load.state[1:-1])]
    if view.exact:
        shards = _shards_by_class(problem, view, [loads[index].state for index in holders])
    else:
        places = [
            Place(loads[index].rack, near[index], tuple(_card_s(states[index], held, near[index]) for held in types))
            for index in holders
        ]
        shards = distribute_shards(places, problem.shards, uplinks)
    distributed = dict(zip(holders, shards, strict=True))
    if any(_card_s(states[index], types[shard], near[index]) == math.inf for index, shard in distributed.items()):
        return None
    stored = [0] * len(rack_workers)
    for index, shard in distributed.items():
        stored[loads[index].rack] += problem.shards[shard]
    busy = [
        (here[types[distributed[index]] if index in distributed else ()], workers)
        for index, (here, workers) in enumerate(zip(states, near, strict=True))
    ]
    if problem.model.profile.synchronous:
        network_s = max(
            *(state.network_s[workers] for state, workers in busy),
            *(uplinks.busy_s(rack, held) for rack, held in enumerate(stored)),
        )
        cycle_s = max(state.work_s for state, workers in busy if workers)
        round_s = problem.round_s(cycle_s, network_s)
    else:
        cards = [problem.tree.machine_types[load.machine_type].card for load in loads]
        slowest = slowest_send_s((state.local_bytes for state, _ in busy), cards)

        def own_rate(state: State, card: float, workers: int) -> float:
            if not workers:
                return 0.0
            transfer_s = problem.model.transfer_by_card_s(card, state.local_bytes, slowest)
            return workers / (state.work_s + transfer_s)

        alike = Counter(
            (card, load.rack, state, workers) for card, load, (state, workers) in zip(cards, loads, busy, strict=True)
        )
        rates = best_rates(
            [
                Machine(
                    own_rate=own_rate(state, card, workers),
                    stored=state.local_bytes,
                    card=card,
                    rack=str(rack),
                    count=count,
                )
                for (card, rack, state, workers), count in alike.items()
            ],
            problem.shared,
        )
        alone = (own_rate(state, card, workers) for card, (state, workers) in zip(cards, busy, strict=True))
        cycle_s = problem.workers / sum(alone)
        round_s = problem.workers / rates.steps_per_s
        network_s = round_s * rates.utilisation
    samples_per_s = problem.workers * problem.model.samples_per_step / round_s
    local = sum(state.local_bytes * workers for state, workers in busy)
    traffic = weighted_traffic(sum(problem.shards), problem.workers, local)
    return RackPlacement(
        _assignment(loads, distributed),
        cycle_s,
        network_s,
        round_s,
        samples_per_s,
        traffic,
        samples_bound=samples_per_s,
    )


def _states(problem: RackProblem, load: Load) -> dict[tuple[int, ...], State]:
    """Possible states of the machine, given the chief, by the types of its shards."""
    possible = problem.tree.machine_types[load.machine_type].states
    return {state.shards: state for state in possible if state.chief == bool(load.state[0])}


def _shards_by_class(problem: RackProblem, view: View, states: Sequence[Tasks]) -> tuple[int, ...]:
    free = [iter([index for index, size in enumerate(problem.shards) if size == sizes[0]]) for sizes in view.classes]
    return tuple(next(free[state[1:-1].index(1)]) for state in states)


def _card_s(states: dict[tuple[int, ...], State], shards: tuple[int, ...], workers: int) -> float:
    """Seconds that the machine's card is busy with these shards; infinite if they do not fit beside the workers."""
    times = states[shards].network_s if shards in states else ()
    return times[workers] if workers < len(times) else math.inf


def _assignment(loads: Sequence[Load], distributed: dict[int, int]) -> Assignment:
    by_shard = sorted(distributed, key=lambda index: distributed[index])
    return Assignment(
        ps=tuple(loads[index].node for index in by_shard),
        workers=tuple(load.node for load in loads for _ in range(load.state[-1])),
        chief=next((load.node for load in loads if load.state[0]), None),
    )
