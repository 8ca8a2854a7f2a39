"""The order that launches a slot of a search."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from executor.environment import Setup
from executor.limits import RunLimits
from executor.messages import LaunchOrder, decode, encode
from executor.mirror import RunFolder

LAUNCHER = "dike.trial.launch"
"""Module that runs a trial's process in a zygote's fork."""


@dataclass(frozen=True)
class SlotOrder:
    """An executor's order to run a slot of a search; sent in `TaskInfo.data`.

    Attributes:
        search: name of the search.
        bundle_url: URL of the search's bundle, token included.
        script: path of the script inside the bundle.
        preload: modules that the zygote imports for all trials.
        environment: variables set for the trials on top of the executor's own.
        cpus: CPUs that Mesos gave to the slot; sizes thread pools.
        gpu_devices: device indices for `CUDA_VISIBLE_DEVICES`; None if Mesos isolates GPUs.
        slots_per_gpu: slots that share its GPU and the memory of that.
        suspend_timeout_s: maximum time for a trial to save and end before it is killed.
        always_pause: whether to pause suspended trials even if a new process is expected to start sooner;
            `Wanted.memory_bytes` decides whether they may be paused at all.
        stall_timeout_s: a trial that reports and prints nothing and uses no CPU for this time is ended; None for never.
        most_mem_mib: memory limit of a trial, in MiB; 0 for no limit.
        folder: how executors that do not see the trials' folders reach them; None if all see them.
    """

    search: str
    bundle_url: str
    script: str
    preload: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    cpus: float = 1.0
    gpu_devices: tuple[int, ...] | None = None
    slots_per_gpu: int = 1
    suspend_timeout_s: float = 30.0
    always_pause: bool = False
    stall_timeout_s: float | None = None
    most_mem_mib: float = 0.0
    folder: RunFolder | None = None

    @property
    def limits(self) -> RunLimits:
        return RunLimits.of_slot(self.most_mem_mib, self.cpus, "--slot-mem")

    @property
    def setup(self) -> Setup:
        # So that sets of strings have the same order in every slot that a trial runs in.
        own = {"PYTHONHASHSEED": "0", **self.environment}
        return Setup(LAUNCHER, self.preload, own, self.cpus, self.gpu_devices)

    def encode(self) -> str:
        return encode({"kind": "slot", **dataclasses.asdict(self)})

    @classmethod
    def decode(cls, data: str) -> SlotOrder:
        """Raises ValueError if it is something else."""
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
                    "folder": RunFolder.read(values["folder"]),
                }
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"malformed order for a slot: {error}") from error


def decode_order(data: str) -> LaunchOrder | SlotOrder:
    """Reads an executor's order; raises KeyError, TypeError or ValueError."""
    values = decode(data)
    is_search = isinstance(values, dict) and values.get("kind") == "slot"
    return SlotOrder.decode(data) if is_search else LaunchOrder.decode(data)
