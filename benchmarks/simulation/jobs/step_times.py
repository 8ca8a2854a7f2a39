"""Speeds of jobs with parameter servers: the step-time model on hardware that differs from the estimated one."""

from __future__ import annotations

import dataclasses

import numpy as np

from benchmarks.simulation.jobs.machines import Layout, Machines, even_layout
from dike.profile import Api, ModelProfile
from framework.policies.jobs.interface import TaskNeeds
from solver.choices import Sharding
from solver.evaluation import evaluate
from solver.hardware import Hardware, known_hardware
from solver.options import cpus_per_gpu
from solver.placement.naming import Assignment
from solver.resources import CPU_STEP, WorkerShape
from solver.scenario import Scenario
from solver.shards import DEFAULT_SHARDING, useful_ps_count

BATCH_FACTORS = (4, 8)
"""Global batches of a synchronous job, as multiples of the model's own (that of an asynchronous worker)."""
HIDDEN_SIGMA = 0.25
"""Standard deviation of the logarithm of the true hardware speeds relative to the estimated ones."""


class StepTimes:
    """Speeds by the step-time model, docs/planner.md.

    Args:
        profile: the model; whatever its API, its workers run the script themselves, without a chief.
        network_factor: scales the speed of the network cards.
    """

    def __init__(
        self, profile: ModelProfile, machines: Machines, hardware: Hardware, network_factor: float = 1.0
    ) -> None:
        self._profile = dataclasses.replace(profile, api=Api.GRAPH)
        self._cluster = machines.cluster(network_factor)
        self._hardware = hardware
        self._scenarios: dict[Sharding, Scenario] = {}
        self._speeds: dict[tuple[Layout, int, Sharding], float] = {}
        kind = self._scenario(profile.batch_size, DEFAULT_SHARDING).kinds[0]
        feeding, _ = cpus_per_gpu(profile, hardware, kind)
        share = int((kind.cpus - 1) / kind.gpus / CPU_STEP) * CPU_STEP
        self.shape = WorkerShape(1, max(CPU_STEP, min(feeding, share)))

    @property
    def needs(self) -> TaskNeeds:
        """Resources of the tasks; a ps has room for the whole model."""
        scenario = self._scenario(self._profile.batch_size, DEFAULT_SHARDING)
        return TaskNeeds(
            scenario.sizes.worker(self.shape).amounts, scenario.sizes.ps(scenario.shards(1).sizes[0]).amounts
        )

    def samples_per_s(self, layout: Layout, batch_size: int, *, sharding: Sharding) -> float:
        """Speed of a layout; `batch_size` is global for synchronous models, else each worker's."""
        key = layout, batch_size, sharding
        if key not in self._speeds:
            self._speeds[key] = self._samples_per_s(*key)
        return self._speeds[key]

    def _samples_per_s(self, layout: Layout, batch_size: int, sharding: Sharding) -> float:
        workers = sum(count for count, _ in layout)
        each = -(-batch_size // workers) if self._profile.synchronous else batch_size
        of_cluster = self._scenario(each, sharding)
        names = tuple(map(str, range(len(layout))))
        kinds = (dataclasses.replace(of_cluster.kinds[0], names=names),)
        scenario = dataclasses.replace(of_cluster, kinds=kinds)
        rounds = max(ps for _, ps in layout)
        placed = list(zip(names, layout, strict=True))
        assignment = Assignment(
            tuple(name for turn in range(rounds) for name, (_, ps) in placed if ps > turn),
            tuple(name for name, (count, _) in placed for _ in range(count)),
            None,
        )
        evaluation = evaluate(scenario, self.shape, scenario.shards(len(assignment.ps)), assignment)
        return batch_size / evaluation.step_time.total if self._profile.synchronous else evaluation.samples_per_s

    def _scenario(self, batch_size: int, sharding: Sharding) -> Scenario:
        if sharding not in self._scenarios:
            self._scenarios[sharding] = Scenario.of(self._profile, self._cluster, self._hardware, sharding)
        # Reuses the shards, which do not depend on the batch.
        return dataclasses.replace(self._scenarios[sharding], profile=self._profile.with_batch_size(batch_size))


class PsModel:
    """A model that trains with parameter servers.

    Attributes:
        synchronous: whether the workers wait for each other; the global batch is then the same for any number.
        needs: resources of the tasks.
        max_ps: with more, the largest shard would not shrink.
        batch_sizes: the batches that users choose from.

    Args:
        expected: speeds on the estimated hardware; the same for all seeds.
        rng: draws the true hardware speeds.
    """

    def __init__(
        self, name: str, profile: ModelProfile, machines: Machines, expected: StepTimes, rng: np.random.Generator
    ) -> None:
        self.name = name
        self.synchronous = profile.synchronous
        self._machine, self._gpus = machines.capacity, machines.count * machines.gpus
        self._expected = expected
        self._true = StepTimes(profile, machines, *_draw_hardware(known_hardware(), machines.gpu_model, rng))
        self.needs = expected.needs
        self.max_ps = useful_ps_count(profile, machines.count)
        self.batch_sizes = (
            tuple(factor * profile.batch_size for factor in BATCH_FACTORS)
            if profile.synchronous
            else (profile.batch_size,)
        )

    def max_workers(self, batch_size: int) -> int:
        """The maximum number of workers that each have a sample and a GPU."""
        return min(batch_size, self._gpus) if self.synchronous else self._gpus

    def samples_per_s(self, layout: Layout, batch_size: int, *, sharding: Sharding = DEFAULT_SHARDING) -> float:
        """The true speed."""
        return self._true.samples_per_s(layout, batch_size, sharding=sharding)

    def expected_samples_per_s(self, workers: int, ps: int, batch_size: int) -> float:
        """The step-time model's estimate on the fewest machines, before the job has run; 0 if they do not fit."""
        layout = even_layout(self.needs, (workers, ps), self._machine)
        return 0.0 if layout is None else self._expected.samples_per_s(layout, batch_size, sharding=DEFAULT_SHARDING)


def _draw_hardware(known: Hardware, gpu_model: str, rng: np.random.Generator) -> tuple[Hardware, float]:
    """Draws the true hardware, and the factor of the network speed."""
    gpu_factor, ps_factor, network_factor = np.exp(rng.normal(0, HIDDEN_SIGMA, 3)).tolist()
    gpu = known.gpu(gpu_model)
    faster = dataclasses.replace(gpu, training_flops_per_s=gpu.training_flops_per_s * gpu_factor)
    return (
        dataclasses.replace(
            known,
            gpus={**known.gpus, gpu_model.lower(): faster},
            ps_bytes_per_s=known.ps_bytes_per_s * ps_factor,
        ),
        network_factor,
    )
