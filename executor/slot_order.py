"""What a slot of a search is launched with."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from executor.messages import decode, encode


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
    """

    search: str
    bundle_url: str
    script: str
    preload: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    cpus: float = 1.0
    gpu_devices: tuple[int, ...] | None = None
    suspend_timeout_s: float = 30.0

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
