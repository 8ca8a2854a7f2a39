"""Reads an offer's resources, and takes a task's part out of them.

An offer lists resources in pieces - one for each role and reservation - and an operation has to name pieces of the
offer. `ResourcePool` keeps the pieces, so that the parts taken carry the right role and reservation.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Collection, Iterable, Iterator
from typing import Any

Resource = dict[str, Any]

# Mesos keeps scalars to three decimals.
PRECISION = 3

GPU_DEVICES = "gpu_devices"
"""Ranges of device numbers, advertised by agents without GPU isolation, so that Mesos accounts for the devices."""


class ResourcePool:
    """Remaining resources of one agent's offers.

    Reserved pieces are taken before unreserved ones, because no other role can use them.

    Attributes:
        announces_gpu_devices: whether GPUs have device numbers.
    """

    def __init__(self, resources: Iterable[Resource]) -> None:
        usable = [copy.deepcopy(piece) for piece in resources if not _is_unusable(piece)]
        self._pieces = sorted(usable, key=lambda piece: piece.get("role", "*") == "*" and not piece.get("reservations"))
        self.announces_gpu_devices = any(piece["name"] == GPU_DEVICES for piece in usable)

    def scalar(self, name: str) -> float:
        """Remaining `cpus`, `mem` (MiB), `disk` (MiB) or `gpus`."""
        total = sum(piece["scalar"]["value"] for piece in self._pieces if piece["name"] == name)
        return float(round(total, PRECISION))

    def ports(self) -> list[int]:
        """All remaining ports, ascending."""
        return sorted(self._numbers("ports"))

    def gpu_devices(self) -> list[int]:
        """All remaining device numbers, those of reserved pieces first."""
        return self._numbers(GPU_DEVICES)

    def take_scalar(self, name: str, amount: float) -> list[Resource]:
        """Takes `amount` of a scalar resource.

        Raises:
            ValueError: if less is left; nothing is taken then.
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
        return self._take_numbers("ports", wanted)

    def take_gpu_devices(self, wanted: Collection[int]) -> list[Resource]:
        """Takes exactly the device numbers `wanted`.

        Raises:
            ValueError: if one of them is not left; nothing is taken then.
        """
        return self._take_numbers(GPU_DEVICES, wanted)

    def _numbers(self, name: str) -> list[int]:
        return [number for piece in self._pieces if piece["name"] == name for number in _numbers(piece)]

    def _take_numbers(self, name: str, wanted: Collection[int]) -> list[Resource]:
        missing = set(wanted) - set(self._numbers(name))
        if missing:
            raise ValueError(f"{name} {sorted(missing)} are not left")
        taken = []
        for piece in self._pieces:
            if piece["name"] != name:
                continue
            here = set(_numbers(piece))
            part = here & set(wanted)
            if part:
                taken.append({**copy.deepcopy(piece), "ranges": {"range": list(_ranges(part))}})
                piece["ranges"]["range"] = list(_ranges(here - part))
        return taken


def usable_amounts(resources: Iterable[Resource]) -> dict[str, float]:
    """Sums the usable `cpus`, `mem`, `disk`, `gpus` and number of `ports` of pieces."""
    amounts = {"cpus": 0.0, "mem": 0.0, "disk": 0.0, "gpus": 0.0, "ports": 0.0}
    for piece in resources:
        if piece["name"] in amounts and not _is_unusable(piece):
            amounts[piece["name"]] += piece["scalar"]["value"] if "scalar" in piece else sum(map(len, _spans(piece)))
    return {name: round(amount, PRECISION) for name, amount in amounts.items()}


def _is_unusable(piece: Resource) -> bool:
    """Excludes revocable and shared resources, and disks that are volumes or mounts: tasks cannot rely on them."""
    disk = piece.get("disk", {})
    return "revocable" in piece or "shared" in piece or "persistence" in disk or "source" in disk


def _numbers(piece: Resource) -> Iterator[int]:
    for span in _spans(piece):
        yield from span


def _spans(piece: Resource) -> Iterator[range]:
    for bounds in piece.get("ranges", {}).get("range", ()):
        yield range(int(bounds["begin"]), int(bounds["end"]) + 1)


def _ranges(numbers: Iterable[int]) -> Iterator[dict[str, int]]:
    begin = end = None
    for number in sorted(numbers):
        if begin is None or end is None:
            begin = end = number
        elif number == end + 1:
            end = number
        else:
            yield {"begin": begin, "end": end}
            begin = end = number
    if begin is not None and end is not None:
        yield {"begin": begin, "end": end}
