"""What a slot of a search is launched with."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from executor.environment import Setup
from executor.limits import Limits
from executor.messages import LaunchOrder, decode, encode

LAUNCHER = "dike.trial.launch"
"""Turns a zygote's fork into a trial's process."""


@dataclass(frozen=True)
class SlotOrder:
    """What an executor has to know of its slot; travels in `TaskInfo.data`.

    Attributes:
        search: name of the search.
        bundle_url: where the script's folder can be fetched, token included.
        script: path of the script inside the bundle.
        preload: modules that the zygote imports, so that trials find them in memory.
        environment: variables set for the trials on top of the executor's own.
        cpus: CPUs that Mesos gave to the slot; sizes thread pools.
        gpu_devices: device indices for `CUDA_VISIBLE_DEVICES`; None where Mesos isolates GPUs itself.
        suspend_timeout_s: how long a trial may take to save and end before it is killed.
        stall_timeout_s: a trial that reports and prints nothing and uses no CPU for so long is ended; None for never.
        always_stay: whether processes of suspended trials stay where a new one is expected to be sooner, too;
            `Wanted.memory_bytes` says whether they may stay at all.
        most_mem_mib: memory that a trial may use, in MiB; 0 for no limit.
    """

    search: str
    bundle_url: str
    script: str
    preload: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    cpus: float = 1.0
    gpu_devices: tuple[int, ...] | None = None
    suspend_timeout_s: float = 30.0
    always_stay: bool = False
    stall_timeout_s: float | None = None
    most_mem_mib: float = 0.0

    @property
    def limits(self) -> Limits:
        """What a trial may use."""
        return Limits.of_slot(self.most_mem_mib, self.cpus, "--slot-mem")

    @property
    def setup(self) -> Setup:
        """How its trials are set up."""
        # The order of a set of strings is the same in every slot a trial comes to.
        own = {"PYTHONHASHSEED": "0", **self.environment}
        return Setup(LAUNCHER, self.preload, own, self.cpus, self.gpu_devices)

    def encode(self) -> str:
        """The order as base64 text, the form of bytes in Mesos' JSON."""
        return encode({"kind": "slot", **dataclasses.asdict(self)})

    @classmethod
    def decode(cls, data: str) -> SlotOrder:
        """Reads what `encode` wrote.

        Raises:
            ValueError: if it is something else.
        """
        try:
            values = dict(decode(data))
            if values.pop("kind", None) != "slot":
                raise ValueError("not an order for a slot")
            devices = values["gpu_devices"]
            return cls(
                **{
                    **values,
                    "preload": tuple(values["preload"]),
                    "gpu_devices": None if devices is None else tuple(devices),
                }
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"malformed order for a slot: {error}") from error


def decode_order(data: str) -> LaunchOrder | SlotOrder:
    """Reads what an executor is launched with.

    Raises:
        KeyError, TypeError, ValueError: if it is neither for a training job nor for a search.
    """
    values = decode(data)
    is_search = isinstance(values, dict) and values.get("kind") == "slot"
    return SlotOrder.decode(data) if is_search else LaunchOrder.decode(data)
