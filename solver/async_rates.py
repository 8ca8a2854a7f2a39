"""Rates of asynchronous workers: each works at its own rate, as far as the links allow all of them together.

Machine i stores S_i of the M shard bytes, its link carries c_i bytes/s each way, and its workers make z_i steps/s
together; X = sum z_i. A worker pulls and pushes M bytes per step. Links are full duplex and one worker's pulls overlap
another's pushes, so a machine sends (pulls served to workers elsewhere, its own workers' pushes) as much as it
receives:

    0 <= z_i <= a_i / (work_i + transfer_i)          its a_i workers, each alone on the network
    S_i (X - z_i) + (M - S_i) z_i <= u c_i           its network card; the same for a rack and its uplink
    2 S_i z_i <= within                              the exchange inside the machine
    max_j s_j X <= a ps' update rate,  X <= 1 / a step's dispatch time

A worker alone waits for its own card, or for the card of the ps machine that takes longest to send its shards
(`slowest_send_s`). Workers that do not wait for each other collide on links: these carry a share u of their speed
(`LINK_SHARE`). A worker beside its ps continues while remote ones wait. The model takes the rates with the most samples
per second; for identical workers that is the greatest X.

No general linear program is needed: for a given X every constraint concerns a single machine or rack and leaves it an
interval [low_i, high_i] for z_i. X is feasible if every interval is non-empty and sum low <= X <= sum high. All
feasible (X, z) form a polyhedron with 0 in it, so the feasible X are an interval [0, X*] and bisection finds X*; for a
given X the most samples come from the workers with the largest batches first, and that value is concave in X. An
interval's ends are linear in X and in a_i between their kinks, high_i concave and low_i convex, so identical workers
are best spread evenly over identical machines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

LINK_SHARE = 0.8
"""Usable share of a link that several asynchronous workers keep busy: while two of them pull, none pushes. Rounded from
two and three workers with one ps in TensorFlow on links of 100 Mbit/s, with compute and without
(`benchmarks/measured.py`): 74 to 84%. A second measurement gave 66 to 75%; the value stays, as with 0.7 the planner
would leave out workers that brought 4 to 6% of the speed there."""
PRECISION = 1e-13
"""Relative width at which bisection ends."""
ROUNDING = 1e-9
"""Machines whose times differ by at most this share are equally slow."""
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Machine:
    """A machine with its workers, or several identical ones.

    Attributes:
        own_rate: steps/s of one machine's workers together if nothing but themselves limits them.
        card: bytes/s of its network card, each way.
    """

    own_rate: float
    stored: int
    card: float
    rack: str | None = None
    samples: float = 1.0
    count: int = 1


@dataclass(frozen=True)
class Shared:
    """Limits that all machines share.

    Attributes:
        uplink: bytes/s of each rack's uplink, each way; infinite if racks do not matter.
        max_steps_per_s: steps/s that the busiest ps and the chief allow.
    """

    total_bytes: int
    within: float
    uplink: float = math.inf
    max_steps_per_s: float = math.inf


@dataclass(frozen=True)
class Rates:
    """Rates that a placement reaches.

    Attributes:
        utilisation: share of the time for which the busiest link (network card, rack uplink or a machine's inside) is
            in use; 1 at `LINK_SHARE` of its speed. Where the machines' rates are not unique, those with equal samples
            use the same share of the rest of their links.
    """

    steps_per_s: float
    samples_per_s: float
    utilisation: float


Range = tuple[float, float]


def slowest_send_s(stored: Iterable[float], cards: Iterable[float]) -> float:
    """Seconds that the slowest ps machine takes to send its shards once; 0 without any.

    Args:
        stored: shard bytes on each machine.
        cards: bytes/s of its network card.
    """
    return max((held / card for held, card in zip(stored, cards, strict=True)), default=0.0)


def wait_s(stored: float, card: float, slowest_s: float) -> float:
    """Seconds that a machine's worker waits for the slowest ps machine (`slowest_send_s`), unless that is its own.

    Assumes that a worker on the slowest machine waits for no other.
    """
    return slowest_s if stored / card < slowest_s * (1 - ROUNDING) else 0.0


def link_range(
    stored: float,
    total_bytes: float,
    steps_per_s: float,
    link: float,
    within: float = math.inf,
    own_rate: float = math.inf,
) -> Range | None:
    """Minimum and maximum steps/s of the workers behind a link, if all workers make `steps_per_s`; None if infeasible.

    Args:
        stored: shard bytes behind the link.
        total_bytes: all shard bytes.
        steps_per_s: X, the steps of all workers together.
        link: bytes/s of the link, each way; `LINK_SHARE` of it is used.
        within: bytes/s between tasks of one machine; infinite for a rack.
        own_rate: steps/s of the workers behind the link if nothing but themselves limits them.
    """
    left, each = link * LINK_SHARE - stored * steps_per_s, total_bytes - 2 * stored
    low, high = 0.0, own_rate
    if stored:
        high = min(high, within / (2 * stored))
    if each > 0:
        high = min(high, left / each)
    elif each < 0:
        # A step of a worker here saves the link more than it costs, as it needs none of the local shards served.
        low = max(low, left / each)
    elif left < 0:
        return None
    return (low, high) if low <= high else None


def total_rate(machines: Sequence[Machine], shared: Shared) -> float:
    """Computes X*: the maximum steps/s of all workers together; 0 without workers."""
    low, high = 0.0, min(shared.max_steps_per_s, sum(machine.own_rate * machine.count for machine in machines))
    if _ranges(machines, shared, high) is not None:
        return high
    while high - low > PRECISION * high:
        middle = (low + high) / 2
        if _ranges(machines, shared, middle) is None:
            high = middle
        else:
            low = middle
    return low


def best_rates(machines: Sequence[Machine], shared: Shared) -> Rates:
    """Computes the rates with the most samples per second."""
    steps_per_s = total_rate(machines, shared)
    if len({machine.samples for machine in machines if machine.own_rate}) > 1:
        steps_per_s = _argmax(lambda rate: _samples_at(machines, shared, rate), steps_per_s)
    each = _rates_at(machines, shared, steps_per_s)
    samples = sum(rate * machine.samples * machine.count for rate, machine in zip(each, machines, strict=True))
    return Rates(steps_per_s, samples, _utilisation(machines, shared, each, steps_per_s))


END_TOLERANCE = 1e-7
"""A concave function that does not fall over the last such share of its range is greatest at the end."""


def _argmax(value: Callable[[float], float], high: float) -> float:
    """Maximises a concave function over [0, `high`] (golden section)."""
    low, ends = 0.0, high
    if value(ends) >= value(ends * (1 - END_TOLERANCE)):
        return ends
    left, right = high - _GOLDEN * high, _GOLDEN * high
    at_left, at_right = value(left), value(right)
    while high - low > PRECISION * ends:
        if at_left > at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = value(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = value(right)
    return max((ends, low), key=value)


def _samples_at(machines: Sequence[Machine], shared: Shared, steps_per_s: float) -> float:
    each = _rates_at(machines, shared, steps_per_s)
    return sum(rate * machine.samples * machine.count for rate, machine in zip(each, machines, strict=True))


@dataclass(frozen=True)
class _Ranges:
    """At one X: the range of each machine, the machines of each rack, and the range of each rack."""

    machines: list[Range]
    racks: dict[str | None, list[int]]
    of_rack: dict[str | None, Range]


def _ranges(machines: Sequence[Machine], shared: Shared, steps_per_s: float) -> _Ranges | None:
    """Ranges of each machine and rack at that X; None if X is infeasible."""
    each: list[Range] = []
    racks: dict[str | None, list[int]] = {}
    for index, machine in enumerate(machines):
        found = link_range(
            machine.stored, shared.total_bytes, steps_per_s, machine.card, shared.within, machine.own_rate
        )
        if found is None:
            return None
        each.append(found)
        racks.setdefault(machine.rack, []).append(index)
    of_rack: dict[str | None, Range] = {}
    for rack, members in racks.items():
        low, high = (sum(each[i][end] * machines[i].count for i in members) for end in (0, 1))
        if math.isfinite(shared.uplink):
            stored = sum(machines[i].stored * machines[i].count for i in members)
            clipped = link_range(stored, shared.total_bytes, steps_per_s, shared.uplink)
            if clipped is None:
                return None
            low, high = max(low, clipped[0]), min(high, clipped[1])
        if low > high:
            return None
        of_rack[rack] = low, high
    least, most = (sum(ends[end] for ends in of_rack.values()) for end in (0, 1))
    return _Ranges(each, racks, of_rack) if least <= steps_per_s <= most else None


def _rates_at(machines: Sequence[Machine], shared: Shared, steps_per_s: float) -> list[float]:
    """Steps/s of each machine (of one, if there are several) with the most samples at that feasible X."""
    ranges = _ranges(machines, shared, steps_per_s)
    assert ranges is not None, "these steps per second are feasible"
    rates = [low for low, _ in ranges.machines]
    tiers = [
        {
            rack: [i for i in members if machines[i].samples == samples and machines[i].own_rate]
            for rack, members in ranges.racks.items()
        }
        for samples in sorted({machine.samples for machine in machines}, reverse=True)
    ]

    def total(members: Sequence[int]) -> float:
        return sum(rates[i] * machines[i].count for i in members)

    def room(tier: Sequence[int]) -> float:
        return sum((ranges.machines[i][1] - rates[i]) * machines[i].count for i in tier)

    def lift(tier: Sequence[int], wanted: float) -> None:
        left = room(tier)
        share = min(1.0, max(0.0, wanted / left)) if left > 0 else 0.0
        for i in tier:
            rates[i] += share * (ranges.machines[i][1] - rates[i])

    for tier in tiers:
        for rack, members in tier.items():
            lift(members, ranges.of_rack[rack][0] - total(ranges.racks[rack]))
    for tier in tiers:
        rooms = {
            rack: max(0.0, min(ranges.of_rack[rack][1] - total(ranges.racks[rack]), room(members)))
            for rack, members in tier.items()
        }
        wanted, left = steps_per_s - total(range(len(machines))), sum(rooms.values())
        for rack, members in tier.items():
            lift(members, rooms[rack] * min(1.0, wanted / left) if left > 0 else 0.0)
    return rates


def _utilisation(machines: Sequence[Machine], shared: Shared, rates: Sequence[float], steps_per_s: float) -> float:
    busiest, stored, own = 0.0, dict[str | None, float](), dict[str | None, float]()
    for machine, rate in zip(machines, rates, strict=True):
        moved = machine.stored * (steps_per_s - rate) + (shared.total_bytes - machine.stored) * rate
        busiest = max(busiest, moved / (machine.card * LINK_SHARE), 2 * machine.stored * rate / shared.within)
        stored[machine.rack] = stored.get(machine.rack, 0.0) + machine.stored * machine.count
        own[machine.rack] = own.get(machine.rack, 0.0) + rate * machine.count
    for rack, here in stored.items():
        crossing = here * (steps_per_s - own[rack]) + (shared.total_bytes - here) * own[rack]
        busiest = max(busiest, crossing / (shared.uplink * LINK_SHARE))
    return busiest
