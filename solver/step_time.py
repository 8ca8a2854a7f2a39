"""Predicts the time of a training step, by which options are compared (docs/planner.md, 'Step time')."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dike.profile import ModelProfile
from solver.async_rates import Shared, wait_s
from solver.hardware import Hardware
from solver.nodes import NodeKind
from solver.resources import WorkerShape, gpu_bytes
from solver.shards import Shards


@dataclass(frozen=True)
class StepTime:
    """Predicted seconds in which all workers make as many steps as there are workers, with its terms.

    Synchronous training adds the terms up (compute and input overlap on GPUs), or takes the longer of the work and the
    rest if transfers overlap it. In asynchronous training each worker repeats its own round - compute, latency,
    transfer - as fast as the links allow for all of them (solver.async_rates); `update` and `dispatch` are the minimum
    `total` that the busiest ps and the chief allow.

    Attributes:
        compute: forward, backward and the exchange between a worker's own GPUs.
        input: preparing the batch on the worker's CPUs.
        latency: constant time of every step.
        transfer: one worker's own pull and push, with the network to itself (asynchronous only, else 0).
        network: the busiest network card or rack uplink, or the busiest machine's inside; asynchronous: its time in use
            within `total`, so that the network is the limit if both are equal.
        update: the busiest ps sending variables to all workers and receiving their gradients.
        dispatch: the separate chief dispatching one step to each worker.
    """

    compute: float
    input: float
    latency: float
    transfer: float
    network: float
    update: float
    dispatch: float
    total: float


@dataclass(frozen=True)
class StepModel:
    """Step times of one model with workers of one shape.

    Attributes:
        total_bytes: size of all variables, moved twice by every worker in every step.
    """

    profile: ModelProfile
    shape: WorkerShape
    hardware: Hardware
    within_node_bytes_per_s: float
    total_bytes: int
    ps_cpus: float = 1.0

    @property
    def overlap(self) -> bool:
        """Whether a synchronous step's transfers, updates and dispatching overlap its work."""
        return self.hardware.overlap

    @property
    def samples_per_step(self) -> int:
        """Samples of one worker's step; each of its GPUs takes one batch."""
        return self.profile.batch_size * max(1, self.shape.gpus)

    def fits_gpu(self, kind: NodeKind) -> bool:
        """Whether the variables and their gradients fit the memory of the machine's GPUs."""
        return gpu_bytes(self.total_bytes) <= self.hardware.gpu(kind.gpu_model).memory_bytes

    def compute_s(self, kind: NodeKind) -> float:
        """Compute seconds of one worker's step on this kind of machine, with the gradient exchange of its GPUs."""
        return self.arithmetic_s(kind) + self.exchange_s

    def arithmetic_s(self, kind: NodeKind) -> float:
        """Seconds of the forward and backward pass and the update.

        On CPUs the longest path limits the use of more cores (`Hardware.cpu_flops_per_s`). A GPU runs TensorFlow's
        kernels sequentially, on one stream, so there parallel branches gain nothing.
        """
        batch_flops = self.profile.batch_size * self.profile.flops_step_per_sample
        if not self.shape.gpus:
            return batch_flops / self.hardware.cpu_flops_per_s(self.shape.cpus, self.profile.longest_path_share)
        return batch_flops / self.hardware.gpu(kind.gpu_model).training_flops_per_s

    @property
    def exchange_s(self) -> float:
        """Seconds of the gradient sum over a worker's GPUs (ring all-reduce); 0 with one GPU or none."""
        gpus = max(1, self.shape.gpus)
        return 2 * (gpus - 1) / gpus * self.total_bytes / self.within_node_bytes_per_s

    @property
    def latency_s(self) -> float:
        """Constant seconds of every step of a worker: TensorFlow's own, and those of the API."""
        return self.python_s(self.hardware.step_latency_s + self.hardware.apis[self.profile.api].latency_s)

    def python_s(self, of_a_core_s: float) -> float:
        """Seconds of work that occupies a core: longer with a part of one, unless it overlaps a GPU.

        Args:
            of_a_core_s: seconds with a whole core.
        """
        return of_a_core_s if self.shape.gpus else of_a_core_s / min(1.0, self.shape.cpus)

    @property
    def input_s(self) -> float:
        """Seconds in which a worker's CPUs prepare the samples of a step."""
        rate = self.shape.cpus * self.hardware.core_input_bytes_per_s
        return self.samples_per_step * self.profile.sample_bytes / rate

    def busy_s(self, kind: NodeKind) -> float:
        """Seconds of compute and input of a step. GPUs compute while the CPUs prepare the next batch."""
        compute, prepare = self.compute_s(kind), self.input_s
        return max(compute, prepare) if self.shape.gpus else compute + prepare

    def work_s(self, kind: NodeKind) -> float:
        """Seconds of a worker's step without any transfer."""
        return self.busy_s(kind) + self.latency_s

    def transfer_s(self, kind: NodeKind, local_bytes: int, slowest_s: float = 0.0) -> float:
        """Seconds in which one worker pulls the variables and pushes the gradients, alone on the network.

        Args:
            kind: the machine.
            local_bytes: shard bytes on the same machine.
            slowest_s: seconds that the slowest ps machine takes to send its shards once (`solver.async_rates`).
        """
        return self.transfer_by_card_s(kind.network_bytes_per_s, local_bytes, slowest_s)

    def transfer_by_card_s(self, card: float, local_bytes: int, slowest_s: float) -> float:
        """`transfer_s` of a machine with a network card of that speed, in bytes/s."""
        remote_s = max((self.total_bytes - local_bytes) / card, wait_s(local_bytes, card, slowest_s))
        return 2 * remote_s + 2 * local_bytes / self.within_node_bytes_per_s

    def network_s(self, kind: NodeKind, local_bytes: int, workers: int, all_workers: int) -> float:
        """Seconds that a machine's network card is busy while every worker makes one step.

        `local_bytes`: shard bytes on it.
        """
        sent = local_bytes * (all_workers - workers)
        received = workers * (self.total_bytes - local_bytes)
        return max(
            2 * max(sent, received) / kind.network_bytes_per_s,
            2 * local_bytes * workers / self.within_node_bytes_per_s,
        )

    def load(self, shards: Shards) -> float:
        """Load of the busiest ps for one worker's step, in bytes: its shard, and the costs of its requests."""
        each = self.hardware.ps_request_bytes
        loads = (size + count * each for size, count in zip(shards.sizes, shards.requests, strict=True))
        return max(loads) if shards.total else 0.0

    def update_s(self, load: float, all_workers: int) -> float:
        """CPU seconds of the busiest ps for one step of every worker."""
        return all_workers * load / (self.hardware.ps_bytes_per_s * self.ps_cpus)

    def dispatch_s(self, all_workers: int) -> float:
        """Seconds in which a separate chief dispatches one step to every worker."""
        return all_workers * self.hardware.apis[self.profile.api].dispatch_s

    def shared(self, load: float, uplink_bytes_per_s: float = math.inf) -> Shared:
        """Limits that asynchronous workers share (solver.async_rates).

        Args:
            load: of the busiest ps (`load`).
            uplink_bytes_per_s: speed of each rack's uplink, each way; infinite if racks do not matter.
        """
        busiest = max(self.update_s(load, 1), self.dispatch_s(1))
        max_steps_per_s = 1 / busiest if busiest > 0 else math.inf
        return Shared(self.total_bytes, self.within_node_bytes_per_s, uplink_bytes_per_s, max_steps_per_s)

    def round_s(self, cycle_s: float, network_s: float, load: float, all_workers: int) -> float:
        """Seconds in which every worker makes one step, synchronously."""
        rest = network_s + self.update_s(load, all_workers) + self.dispatch_s(all_workers)
        return max(cycle_s, rest) if self.overlap else cycle_s + rest

    def network_limit_s(self, round_s: float, work_s: float, load: float, all_workers: int) -> float:
        """Maximum network time with which a synchronous step takes at most `round_s`; negative if there is none."""
        left = round_s - self.update_s(load, all_workers) - self.dispatch_s(all_workers)
        if self.overlap:
            return left if work_s <= round_s else -1.0
        return left - work_s
