"""The resources and attributes of an embedded agent, in Mesos' text form."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dike.exceptions import BadInputError
from framework.embedded.machine import local_resources, shared_resources
from framework.embedded.ports import PortBlock
from framework.mesos.resources import GPU_DEVICES

SCALARS = ("cpus", "mem", "disk", "gpus")
MISSPELT = {"cpu": "cpus", "gpu": "gpus", "memory": "mem"}
RESOURCE_NAME = re.compile(r"[A-Za-z_][\w.-]*(\([\w./*-]+\))?")
SCALAR = re.compile(r"\d+(\.\d+)?")
RANGE = re.compile(r"(\d+)-(\d+)")
SET = re.compile(r"\{[^{};:]*\}")
ATTRIBUTE_NAME = re.compile(r"[\w./-]+")
ATTRIBUTE_VALUE = re.compile(r"[\w./, +@=\[\]{}-]+")
MAX_GPUS = 4096
MAX_NUMBERS = {"ports": 65535, GPU_DEVICES: MAX_GPUS - 1}
"""Largest number in the ranges of a resource."""


@dataclass(frozen=True)
class AgentSpec:
    """One agent of an embedded cluster.

    Attributes:
        resources: in Mesos' text form, `cpus:4;mem:4096;gpus:2;ports:[31000-31099]`, mem and disk in MiB. Empty for
            this machine's CPUs, memory less a reserve, and GPUs. Defaults: a free range of ports, device numbers of
            GPUs (`gpu_devices:[0-1]`) unique in the cluster, and the machine's CPUs, memory and disk.
        attributes: in Mesos' text form, `rack:r1;gpu_model:K80`.
    """

    resources: str = ""
    attributes: str = ""

    def validated(self) -> AgentSpec:
        """Validates and normalizes the spec.

        Raises:
            BadInputError: Mesos would refuse or misread a part of it, or the numbers of GPUs and device numbers differ.
        """
        checked = replace(
            self,
            resources=";".join(_check_resource(part) for part in _parts(self.resources)),
            attributes=";".join(_check_attribute(part) for part in _parts(self.attributes)),
        )
        devices = checked.gpu_devices()
        if checked.specifies(GPU_DEVICES) and len(devices) != checked.scalar("gpus"):
            raise BadInputError(
                f'"{checked.resources}" has {checked.scalar("gpus"):g} GPUs and {len(devices)} device numbers: '
                f"name one for each, as in gpus:2;{GPU_DEVICES}:[0-1], or none."
            )
        return checked

    def with_cpus_and_memory(self) -> AgentSpec:
        """Adds this machine's CPUs and memory if the text does not give them; Mesos would, without the reserve."""
        own = [part for part in _parts(local_resources()) if part.startswith(("cpus:", "mem:"))]
        missing = [part for part in own if not self.specifies(part.partition(":")[0])]
        return replace(self, resources=";".join(filter(None, (self.resources, *missing))))

    def specifies(self, resource: str) -> bool:
        """Whether the text gives an amount of `resource`, for any role."""
        return any(re.split(r"[:(]", part, maxsplit=1)[0].strip() == resource for part in _parts(self.resources))

    def scalar(self, resource: str) -> float:
        """The amount of a scalar resource in a checked text, summed over roles; 0 if it is not given."""
        amount = 0.0
        for part in _parts(self.resources):
            name, _, value = part.partition(":")
            if name.split("(")[0] == resource:
                amount += float(value)
        return amount

    def gpu_devices(self) -> set[int]:
        return {
            device
            for part in _parts(self.resources)
            if re.split(r"[:(]", part, maxsplit=1)[0] == GPU_DEVICES
            for found in RANGE.finditer(part.partition(":")[2])
            for device in range(int(found[1]), int(found[2]) + 1)
        }

    def with_defaults(self, models: Sequence[str], blocks: list[PortBlock], devices: Iterator[int]) -> AgentSpec:
        """Fills in missing resources, ports and the GPU model; removes the block that it uses from `blocks`."""
        resources = self.resources or local_resources()
        if not self.specifies(GPU_DEVICES):
            resources = ";".join(
                itertools.chain.from_iterable(_with_devices(part, devices) for part in _parts(resources))
            )
        if not self.specifies("ports"):
            resources += f";ports:{blocks.pop(0)}"
        attributes = self.attributes
        named = {part.split(":")[0] for part in attributes.split(";")}
        has_gpus = replace(self, resources=resources).scalar("gpus") > 0
        if has_gpus and "gpu_model" not in named and len(set(models)) == 1:
            attributes = ";".join(filter(None, (attributes, f"gpu_model:{models[0]}")))
        return AgentSpec(resources, attributes)


def unnamed_devices(specs: Sequence[AgentSpec]) -> Iterator[int]:
    """Yields device numbers that no spec names, in ascending order without end.

    Raises:
        BadInputError: two specs name the same one.
    """
    named: set[int] = set()
    for spec in specs:
        devices = spec.gpu_devices()
        if twice := named & devices:
            raise BadInputError(f"Two agents name GPU {min(twice)}; leave {GPU_DEVICES} out to give each its own.")
        named |= devices
    return (device for device in itertools.count() if device not in named)


def _with_devices(part: str, devices: Iterator[int]) -> Iterator[str]:
    """Yields a resource, and after GPUs their device numbers, for the same role."""
    yield part
    name, _, amount = part.partition(":")
    kind, parenthesis, role = name.partition("(")
    if kind == "gpus" and float(amount) > 0:
        ranges = ",".join(f"{device}-{device}" for device in itertools.islice(devices, int(float(amount))))
        yield f"{GPU_DEVICES}{parenthesis}{role}:[{ranges}]"


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(";") if part.strip()]


def _check_resource(part: str) -> str:
    name, colon, value = (piece.strip() for piece in part.partition(":"))
    if not colon or not RESOURCE_NAME.fullmatch(name):
        raise BadInputError(f'"{part}" is not a resource: write name:amount, such as "cpus:4;mem:4096;gpus:2".')
    kind = name.split("(")[0]
    if kind in MISSPELT:
        raise BadInputError(f'There is no resource "{kind}" in "{part}"; did you mean {MISSPELT[kind]}?')
    if kind in SCALARS and not SCALAR.fullmatch(value):
        raise BadInputError(f'The amount of {kind} in "{part}" is not a number of zero or more, such as {kind}:4.')
    if kind == "gpus" and float(value) > MAX_GPUS:
        raise BadInputError(f'An agent has up to {MAX_GPUS} GPUs, not as in "{part}": write gpus:1.')
    if kind == "gpus" and float(value) != int(float(value)):
        raise BadInputError(f'GPUs come in whole numbers, not as in "{part}": write gpus:1.')
    if kind == "cpus" and float(value) == 0:
        raise BadInputError(f'An agent needs CPUs, but "{part}" gives it none: write cpus:1 or more.')
    if kind in ("ports", GPU_DEVICES) or value.startswith("["):
        return f"{name}:{_check_ranges(kind, part, value)}"
    if not (SCALAR.fullmatch(value) or SET.fullmatch(value)):
        raise BadInputError(f'The amount in "{part}" is none of a number, a [range-range] and a {{set}}.')
    return f"{name}:{value}"


def _check_ranges(kind: str, part: str, value: str) -> str:
    inside = value[1:-1] if value.startswith("[") and value.endswith("]") else ""
    ranges = [RANGE.fullmatch(piece.strip()) for piece in inside.split(",")]
    largest = MAX_NUMBERS.get(kind)
    for found in ranges:
        if found is None or int(found[1]) > int(found[2]) or (largest is not None and int(found[2]) > largest):
            bound = "" if largest is None else f" of numbers up to {largest}"
            example = "[0-1]" if kind == GPU_DEVICES else "[31000-31099]"
            raise BadInputError(f'"{part}" is not a list of ranges{bound}: write {kind}:{example}.')
    return "[" + ",".join(found[0] for found in ranges if found) + "]"


def _check_attribute(part: str) -> str:
    name, colon, value = (piece.strip() for piece in part.partition(":"))
    if not colon or not ATTRIBUTE_NAME.fullmatch(name) or not ATTRIBUTE_VALUE.fullmatch(value):
        raise BadInputError(f'"{part}" is not an attribute: write name:value, such as "rack:r1;gpu_model:K80".')
    return f"{name}:{value}"


def private_agents(count: int, resources: str = "", attributes: str = "") -> tuple[AgentSpec, ...]:
    """Specs of equal agents on this machine, which share its resources unless `resources` is given."""
    return (AgentSpec(resources or shared_resources(count), attributes),) * count
