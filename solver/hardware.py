"""Training speeds of known hardware; values and sources are in `hardware.yaml`."""

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
    """A GPU model.

    Attributes:
        training_flops_per_s: FLOP/s in whole training steps.
    """

    model: str
    training_flops_per_s: float
    memory_bytes: int
    source: str


@dataclass(frozen=True)
class ApiCosts:
    """Costs of TensorFlow's interfaces on top of the step itself, mostly Python.

    Attributes:
        latency_s: seconds added to every step of a worker, for any number of workers.
        plain_s: seconds of Python in every step of a job's only task; None if there are no such jobs.
        dispatch_s: seconds of the separate chief for each worker's step, sequentially; 0 without one.
    """

    latency_s: float
    dispatch_s: float
    source: str
    plain_s: float | None = None
    plain_source: str = ""


@dataclass(frozen=True)
class Hardware:
    """Speeds of all parts of a step.

    Attributes:
        gpus: known GPUs by lower-case model name.
        unknown_gpu: assumed for other GPUs.
        core_training_flops_per_s: one CPU core's FLOP/s in whole training steps.
        parallel_share: share of one operation that several cores speed up (Amdahl's law).
        core_input_bytes_per_s: bytes of finished samples that one CPU core prepares in a second.
        step_latency_s: constant seconds of every step, for any API.
        apis: additional costs of each API.
        ps_bytes_per_s: bytes of variables for which one CPU core of a ps serves a worker's step in a second: sends
            them, receives their gradients and updates them.
        ps_request_bytes: additional bytes that cost a ps as much time as the request for one variable.
        ring_bytes_per_core_s: bytes that one CPU core of a worker sends in a second of a ring all-reduce, while it
            receives and adds as many.
        ring_hop_s, nccl_hop_s: constant seconds of each of the 2 (n - 1) hops of an all-reduce, on CPUs and on GPUs.
        ring_step_s: constant seconds that all-reduce adds to a step besides its hops.
        overlap: whether a synchronous step's transfers, updates and dispatching overlap its work, so that the longer of
            the two counts; otherwise they are sequential.
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
    ring_bytes_per_core_s: float
    ring_hop_s: float
    nccl_hop_s: float
    ring_step_s: float
    overlap: bool = False

    def cpu_flops_per_s(self, cpus: float, longest_path_share: float = 1.0) -> float:
        """FLOP/s of a worker with `cpus` CPU cores.

        Of the work W, the operations on the longest path, L = share x W, are sequential; with c cores each of them
        takes 1 - p + p/c of its time on one (Amdahl's law, p is `parallel_share`). The others fill the cores' remaining
        time: with c cores no schedule without idle cores takes longer than L + (W - L)/c (Graham, 1966; Brent, 1974).
        Together L (1 - p + p/c) + (W - L)/c. Assumes that bound as the time, and that the backward pass has the
        branches of the forward pass.

        Args:
            cpus: CPU cores; below one core the share of it.
            longest_path_share: the longest path's share of the FLOPs, 0 to 1.
        """
        if cpus <= 1:
            return cpus * self.core_training_flops_per_s
        serial = longest_path_share * (1 - self.parallel_share)
        return self.core_training_flops_per_s / (serial + (1 - serial) / cpus)

    def knows(self, model: str | None) -> bool:
        return self._find(model) is not None

    def gpu(self, model: str | None) -> Gpu:
        """Finds a GPU by its name as written by people or NVML (`K80`, `NVIDIA A100-SXM4-40GB`)."""
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
        ring_bytes_per_core_s=data["tensorflow"]["ring_bytes_per_core_s"],
        ring_hop_s=data["tensorflow"]["ring_hop_s"],
        nccl_hop_s=data["tensorflow"]["nccl_hop_s"],
        ring_step_s=data["tensorflow"]["ring_step_s"],
    )


def _gpu(model: str, entry: dict[str, object]) -> Gpu:
    return Gpu(
        model=model,
        training_flops_per_s=float(str(entry["training_flops_per_s"])),
        memory_bytes=int(float(str(entry["memory_gib"])) * GIB),
        source=str(entry["source"]),
    )
