"""What known hardware does in training; the figures and their sources are in `hardware.yaml`."""

from __future__ import annotations

import functools
import importlib.resources
import re
from collections.abc import Mapping
from dataclasses import dataclass

import yaml

from solver.units import GIB


@dataclass(frozen=True)
class Gpu:
    """One model of GPU.

    Attributes:
        model: its name.
        training_flops_per_s: FLOP/s in whole training steps.
        memory_bytes: its memory.
        source: where the speed comes from.
    """

    model: str
    training_flops_per_s: float
    memory_bytes: int
    source: str


@dataclass(frozen=True)
class Hardware:
    """Speeds of everything that takes part in a step.

    Attributes:
        gpus: known GPUs by lower-case model name.
        unknown_gpu: what stands in for other GPUs.
        core_training_flops_per_s: one CPU core's FLOP/s in whole training steps.
        parallel_share: share of a step that several cores speed up (Amdahl's law).
        core_input_bytes_per_s: bytes of finished samples one CPU core prepares in a second.
        step_latency_s: seconds every step takes apart from its work.
        dispatch_s: seconds a separate chief needs to hand out one step.
        ps_update_bytes_per_s: bytes of gradients a ps takes in per second.
    """

    gpus: Mapping[str, Gpu]
    unknown_gpu: Gpu
    core_training_flops_per_s: float
    parallel_share: float
    core_input_bytes_per_s: float
    step_latency_s: float
    dispatch_s: float
    ps_update_bytes_per_s: float

    def cpu_flops_per_s(self, cpus: float) -> float:
        """FLOP/s of a worker with so many CPU cores."""
        if cpus <= 1:
            return cpus * self.core_training_flops_per_s
        return self.core_training_flops_per_s / (1 - self.parallel_share + self.parallel_share / cpus)

    def knows(self, model: str | None) -> bool:
        """Whether the model is in the table."""
        return self._find(model) is not None

    def gpu(self, model: str | None) -> Gpu:
        """The GPU a name means, as people or NVML write it (`K80`, `NVIDIA A100-SXM4-40GB`)."""
        return self._find(model) or self.unknown_gpu

    def _find(self, model: str | None) -> Gpu | None:
        words = re.split(r"[^a-z0-9]+", (model or "").lower())
        return next((self.gpus[word] for word in words if word in self.gpus), None)


@functools.cache
def known_hardware() -> Hardware:
    """The table in `hardware.yaml`."""
    text = importlib.resources.files("solver").joinpath("hardware.yaml").read_text(encoding="utf-8")
    data = yaml.safe_load(text)
    gpus = {name.lower(): _gpu(name, entry) for name, entry in data["gpus"].items()}
    return Hardware(
        gpus=gpus,
        unknown_gpu=_gpu("unknown", data["unknown_gpu"]),
        core_training_flops_per_s=data["cpu"]["core_training_flops_per_s"],
        parallel_share=data["cpu"]["parallel_share"],
        core_input_bytes_per_s=data["cpu"]["core_input_bytes_per_s"],
        step_latency_s=data["tensorflow"]["step_latency_s"],
        dispatch_s=data["tensorflow"]["dispatch_s"],
        ps_update_bytes_per_s=data["tensorflow"]["ps_update_bytes_per_s"],
    )


def _gpu(model: str, entry: dict[str, object]) -> Gpu:
    return Gpu(
        model=model,
        training_flops_per_s=float(str(entry["training_flops_per_s"])),
        memory_bytes=int(float(str(entry["memory_gib"])) * GIB),
        source=str(entry["source"]),
    )
