"""Mesos resources: reading what an offer holds, and taking a task's part out of it.

An offer lists resources in pieces - one for each role and reservation - and an operation has to name pieces that the
offer holds. `ResourcePool` keeps the pieces, so that what is taken carries the right role and reservation.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Collection, Iterable, Iterator
from typing import Any

Resource = dict[str, Any]

# Mesos keeps scalars to three decimals.
PRECISION = 3


class ResourcePool:
    """The resources of one or several offers of one agent, from which tasks take their parts.

    Reserved pieces are handed out before unreserved ones, since nobody else can use them.
    """

    def __init__(self, resources: Iterable[Resource]) -> None:
        usable = [copy.deepcopy(piece) for piece in resources if not _is_special(piece)]
        self._pieces = sorted(usable, key=lambda piece: piece.get("role", "*") == "*" and not piece.get("reservations"))

    def scalar(self, name: str) -> float:
        """How much of `cpus`, `mem` (MiB), `disk` (MiB) or `gpus` is left."""
        total = sum(piece["scalar"]["value"] for piece in self._pieces if piece["name"] == name)
        return float(round(total, PRECISION))

    def ports(self) -> list[int]:
        """All ports that are left, ascending."""
        return sorted(port for piece in self._pieces if piece["name"] == "ports" for port in _ports(piece))

    def take_scalar(self, name: str, amount: float) -> list[Resource]:
        """Takes `amount` of a scalar resource.

        Raises:
            ValueError: if not so much is left; nothing is taken then.
        """
        if amount > self.scalar(name) + 10**-PRECISION / 2:
            raise ValueError(f"{amount:g} {name} wanted, {self.scalar(name):g} left")
        taken = []
        missing = round(amount, PRECISION)
        for piece in self._pieces:
            if piece["name"] != name or missing <= 0:
                continue
            part = min(missing, piece["scalar"]["value"])
            if part <= 0:
                continue
            taken.append({**copy.deepcopy(piece), "scalar": {"value": round(part, PRECISION)}})
            piece["scalar"]["value"] = round(piece["scalar"]["value"] - part, PRECISION)
            missing = round(missing - part, PRECISION)
        return taken

    def take_port(self, avoid: Collection[int], choose: random.Random) -> tuple[int, list[Resource]]:
        """Takes one port, if possible none of `avoid`.

        Raises:
            ValueError: if none is left.
        """
        left = self.ports()
        if not left:
            raise ValueError("no port is left")
        port = choose.choice([port for port in left if port not in avoid] or left)
        return port, self.take_ports([port])

    def take_ports(self, wanted: Collection[int]) -> list[Resource]:
        """Takes exactly the ports `wanted`.

        Raises:
            ValueError: if one of them is not left; nothing is taken then.
        """
        missing = set(wanted) - set(self.ports())
        if missing:
            raise ValueError(f"ports {sorted(missing)} are not left")
        taken = []
        for piece in self._pieces:
            if piece["name"] != "ports":
                continue
            here = set(_ports(piece))
            part = here & set(wanted)
            if part:
                taken.append({**copy.deepcopy(piece), "ranges": {"range": list(_ranges(part))}})
                piece["ranges"]["range"] = list(_ranges(here - part))
        return taken


def usable_amounts(resources: Iterable[Resource]) -> dict[str, float]:
    """How much a pool of these pieces would have of `cpus`, `mem`, `disk` and `gpus`, and how many `ports`."""
    amounts = {"cpus": 0.0, "mem": 0.0, "disk": 0.0, "gpus": 0.0, "ports": 0.0}
    for piece in resources:
        if piece["name"] in amounts and not _is_special(piece):
            amounts[piece["name"]] += piece["scalar"]["value"] if "scalar" in piece else len(list(_ports(piece)))
    return {name: round(amount, PRECISION) for name, amount in amounts.items()}


def _is_special(piece: Resource) -> bool:
    """Revocable and shared resources, and disks that are volumes or mounts of their own: not for training tasks."""
    disk = piece.get("disk", {})
    return "revocable" in piece or "shared" in piece or "persistence" in disk or "source" in disk


def _ports(piece: Resource) -> Iterator[int]:
    for bounds in piece.get("ranges", {}).get("range", ()):
        yield from range(int(bounds["begin"]), int(bounds["end"]) + 1)


def _ranges(ports: Iterable[int]) -> Iterator[dict[str, int]]:
    begin = end = None
    for port in sorted(ports):
        if begin is None or end is None:
            begin = end = port
        elif port == end + 1:
            end = port
        else:
            yield {"begin": begin, "end": end}
            begin = end = port
    if begin is not None and end is not None:
        yield {"begin": begin, "end": end}
