"""Resources of a task."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field

from dike.profile import ModelProfile
from solver.units import GIB, MIB

CPU_STEP = 0.25
"""Workers' CPUs are multiples of this."""
TASK_BASE_MIB = 512
"""Private memory of a TensorFlow process that has imported TensorFlow and run (its code is shared)."""
GPU_WORKER_BASE_MIB = 3 * 1024
"""Host memory of a process that drives one GPU."""
FURTHER_GPU_MIB = 1024
"""Host memory for each further GPU of the same process."""
MAX_MEMORY_BYTES = 2.0**80
"""Cap of a memory estimate; no machine has more."""
ACTIVATION_BYTES_PER_FLOP = 1 / 64
"""Rough: ResNet50 keeps about 100 MB of activations for 7.8 GFLOPs forward of one sample."""
PREFETCHED_BATCHES = 4
CHECKPOINTS_KEPT = 3

Amounts = tuple[int, int, int, int]
"""Thousandths of a CPU, MiB of memory, MiB of disk, GPUs."""


@dataclass(frozen=True)
class TaskResources:
    """Resources of one task.

    Attributes:
        mem_mb: memory in MiB, Mesos' unit.
        disk_mb: disk space in MiB.
    """

    cpus: float
    mem_mb: int
    disk_mb: int
    gpus: int = 0

    @property
    def cpu_millis(self) -> int:
        """CPUs in thousandths, the precision of Mesos, rounded up."""
        return math.ceil(self.cpus * 1000 - 1e-6)

    @property
    def amounts(self) -> Amounts:
        """All four resources."""
        return self.cpu_millis, self.mem_mb, self.disk_mb, self.gpus


@dataclass(frozen=True, order=True)
class WorkerShape:
    """GPUs and CPUs of a worker, which vary between options."""

    gpus: int
    cpus: float


@dataclass(frozen=True)
class TaskSizes:
    """Resources of each role of one model's job.

    Attributes:
        helper_cpus: CPUs of the chief, and the fewest of a ps.
        ps_cpus: CPUs of a ps; 0 for the fewest.
        least_mem_mb: minimum memory of each task, in MiB.
    """

    profile: ModelProfile
    helper_cpus: float
    least_mem_mb: int = 0
    ps_cpus: float = 0.0
    _workers: dict[WorkerShape, TaskResources] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, profile: ModelProfile, largest_node_cpus: float, least_mem_mb: int = 0) -> TaskSizes:
        """Sizes for a cluster by the CPUs of its largest machine: a ps gets an eighth of them, at most one CPU."""
        return cls(profile, max(0.01, math.floor(min(1.0, largest_node_cpus / 8) * 1000) / 1000), least_mem_mb)

    def __post_init__(self) -> None:
        if not self.ps_cpus:
            object.__setattr__(self, "ps_cpus", self.helper_cpus)

    def ps(self, shard_bytes: int) -> TaskResources:
        """A ps with variables of this size, their optimizer slots and one gradient."""
        held = (2 + self.profile.optimizer_slots) * shard_bytes
        return TaskResources(self.ps_cpus, self._memory_mb(TASK_BASE_MIB + _mib(held)), disk_mb=64)

    @functools.cached_property
    def variable_bytes(self) -> int:
        """Size of all variables, from the profile; cached, as it is used very often."""
        return self.profile.variable_bytes or self.profile.parameter_bytes

    @functools.cached_property
    def chief(self) -> TaskResources | None:
        """The separate chief, with one copy of the variables while it writes a checkpoint; None if there is none."""
        if not self.profile.api.has_separate_chief:
            return None
        memory = TASK_BASE_MIB + _mib(2 * self.variable_bytes)
        return TaskResources(self.helper_cpus, self._memory_mb(memory), disk_mb=128 + self._checkpoints_mib)

    def worker(self, shape: WorkerShape) -> TaskResources:
        """A worker: variables and gradients, prefetched batches, and on CPUs the activations."""
        if shape not in self._workers:
            memory = self._worker_mib(shape, self.profile.batch_size * max(1, shape.gpus))
            disk = 128 + (0 if self.profile.api.has_separate_chief else self._checkpoints_mib)
            self._workers[shape] = TaskResources(shape.cpus, self._memory_mb(memory), disk, shape.gpus)
        return self._workers[shape]

    def _worker_mib(self, shape: WorkerShape, samples: int) -> int:
        held = 2 * self.variable_bytes + PREFETCHED_BATCHES * samples * self.profile.sample_bytes
        if shape.gpus:
            base = GPU_WORKER_BASE_MIB + FURTHER_GPU_MIB * (shape.gpus - 1)
        else:
            base = TASK_BASE_MIB
            # The FLOPs of a profile may make the product infinite.
            activations = samples * self.profile.flops_forward_per_sample * ACTIVATION_BYTES_PER_FLOP
            held += int(min(activations, MAX_MEMORY_BYTES))
        return base + _mib(held)

    def plain(self, shape: WorkerShape) -> TaskResources:
        """A job's only task: a worker that also has the optimizer's slots and writes the checkpoints.

        Its GPUs share a batch.
        """
        held = self.profile.optimizer_slots * self.variable_bytes
        memory = self._memory_mb(self._worker_mib(shape, self.profile.batch_size) + _mib(held))
        return TaskResources(shape.cpus, memory, 128 + self._checkpoints_mib, shape.gpus)

    def _memory_mb(self, needed: int) -> int:
        return max(needed, self.least_mem_mb)

    @property
    def _checkpoints_mib(self) -> int:
        return _mib(CHECKPOINTS_KEPT * (1 + self.profile.optimizer_slots) * self.variable_bytes)


def gpu_bytes(variable_bytes: int) -> int:
    """Minimum GPU memory to train variables of that size: the variables, their gradients and a workspace."""
    return 2 * variable_bytes + GIB // 4


def _mib(count: float) -> int:
    return math.ceil(count / MIB)
