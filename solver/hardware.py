"""What known hardware does in training; the figures and their sources are in `hardware.yaml`."""

from __future__ import annotations

import functools
import importlib.resources
import re
from collections.abc import Mapping
from dataclasses import dataclass

import yaml

from dike.profile import Api
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
class ApiCosts:
    """What training through one of TensorFlow's interfaces costs on top of the step itself, mostly Python.

    Attributes:
        latency_s: seconds it adds to every step of a worker, however many workers there are.
        plain_s: seconds of Python in every step of a job's only task; None where no such job is run.
        further_gpu_s: seconds that each further GPU adds to those.
        dispatch_s: seconds of the separate chief for each worker's step, one after the other; 0 without one.
        source: where the figures come from.
    """

    latency_s: float
    dispatch_s: float
    source: str
    plain_s: float | None = None
    plain_source: str = ""
    further_gpu_s: float = 0.0
    further_gpu_source: str = ""


@dataclass(frozen=True)
class Hardware:
    """Speeds of everything that takes part in a step.

    Attributes:
        gpus: known GPUs by lower-case model name.
        unknown_gpu: what stands in for other GPUs.
        core_training_flops_per_s: one CPU core's FLOP/s in whole training steps.
        parallel_share: share of one operation that several cores speed up (Amdahl's law).
        core_input_bytes_per_s: bytes of finished samples one CPU core prepares in a second.
        step_latency_s: seconds every step takes apart from its work, whatever the API.
        apis: what each API adds.
        ps_bytes_per_s: bytes of variables for which one CPU core of a ps serves a worker's step in a second: sends
            them, receives their gradients and updates them.
        ps_request_bytes: a variable, however small, takes a ps as long as so many bytes more.
        overlap: whether a synchronous step's transfers, updates and dispatching run beside its work, so that the
            longer of the two counts; otherwise they come one after the other.
    """

    gpus: Mapping[str, Gpu]
    unknown_gpu: Gpu
    core_training_flops_per_s: float
    parallel_share: float
    core_input_bytes_per_s: float
    step_latency_s: float
    apis: Mapping[Api, ApiCosts]
    ps_bytes_per_s: float
    ps_request_bytes: float
    overlap: bool = False

    def cpu_flops_per_s(self, cpus: float, longest_path_share: float = 1.0) -> float:
        """FLOP/s of a worker with so many CPU cores.

        Of the work W, the operations on the longest path, L = share x W, come one after the other; with c cores each of
        them takes 1 - p + p/c of its time on one (Amdahl's law, p is `parallel_share`). The others fill the cores'
        time between them: with c cores no schedule that leaves no core idle takes longer than L + (W - L)/c (Graham,
        1966; Brent, 1974). Together L (1 - p + p/c) + (W - L)/c. Assumed are that bound as the time, and that the
        backward pass has branches as the forward pass has.

        Args:
            cpus: CPU cores; below one core the share of it.
            longest_path_share: the longest path's share of the FLOPs, 0 to 1.
        """
        if cpus <= 1:
            return cpus * self.core_training_flops_per_s
        serial = longest_path_share * (1 - self.parallel_share)
        return self.core_training_flops_per_s / (serial + (1 - serial) / cpus)

    def knows(self, model: str | None) -> bool:
        """Whether the model is in the table."""
        return self._find(model) is not None

    def gpu(self, model: str | None) -> Gpu:
        """The GPU a name means, as people or NVML write it (`K80`, `NVIDIA A100-SXM4-40GB`)."""
        return self._find(model) or self.unknown_gpu

    def _find(self, model: str | None) -> Gpu | None:
        words = _words(model or "")
        named = [name for name in self.gpus if _words(name) <= words]
        return self.gpus[max(named, key=len)] if named else None


@functools.lru_cache(1000)
def _words(model: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9]+", model.lower()))


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
        apis={api: ApiCosts(**data["tensorflow"]["apis"][api.value]) for api in Api},
        ps_bytes_per_s=data["tensorflow"]["ps_bytes_per_s"],
        ps_request_bytes=data["tensorflow"]["ps_request_bytes"],
    )


def _gpu(model: str, entry: dict[str, object]) -> Gpu:
    return Gpu(
        model=model,
        training_flops_per_s=float(str(entry["training_flops_per_s"])),
        memory_bytes=int(float(str(entry["memory_gib"])) * GIB),
        source=str(entry["source"]),
    )
