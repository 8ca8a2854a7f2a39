"""The model, clusters and placements of the measured experiment."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.measured_task import BATCH_SIZE
from benchmarks.shaped_hosts import RACKS
from dike.profile import Api, ModelProfile, VariableSpec
from solver import Cluster, NodeClass, Plan, PlanRequest, make_plan
from solver.evaluation import evaluate
from solver.hardware import known_hardware
from solver.options import PAPER
from solver.placement.naming import Assignment
from solver.resources import WorkerShape
from solver.scenario import Scenario
from solver.units import GIB, MIB

LAYERS = 12
WIDTH = 330
GPU_MODEL = "K80"
SHAPE = WorkerShape(gpus=1, cpus=1.0)
SHARED_HOST_BYTES = 32 * GIB
ONE_TASK_BYTES = 3584 * MIB
"""Memory for a worker (3 GiB and its variables) or a ps (half a GiB and its shard), not for both."""
MAX_ROUND_S = 3.0
"""Layouts with longer predicted rounds are left out unless a method chooses them: each would take a minute."""
WORKERS_PER_PS = 4
"""Fixed ratio of the round-robin baseline."""


@dataclass(frozen=True)
class Case:
    """A cluster and a way to train on it.

    Attributes:
        rates_mbps: shaped speed of each host's network card, Mbit/s.
        gpus: accelerators of each host, one for each possible worker.
        compute_s: seconds an accelerator takes for a step.
        shared: whether a host has memory for workers and a ps together.
        max_layouts: number of layouts to measure.
        uplink_mbps: speed between the racks of `shaped_hosts.RACKS`, Mbit/s; None for a single switch.
    """

    name: str
    rates_mbps: tuple[float, ...]
    gpus: tuple[int, ...]
    compute_s: float
    shared: bool
    synchronous: bool
    max_layouts: int
    uplink_mbps: float | None = None

    def rack(self, host: int) -> str | None:
        """The host's rack; None with a single switch."""
        return None if self.uplink_mbps is None else f"rack-{RACKS[host]}"

    def node(self, host: int) -> str:
        return f"host-{host}"

    def host(self, node: str) -> int:
        return int(node.removeprefix("host-"))


@dataclass(frozen=True)
class Layout:
    """A placement to measure.

    Attributes:
        predicted_s: predicted seconds in which every worker makes one step.
    """

    assignment: Assignment
    predicted_s: float
    methods: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """Tasks of each host: `p0` is ps 0, `2w` are two workers."""
        nodes = sorted({*self.assignment.ps, *self.assignment.workers})
        return " ".join(f"{node}:{self._tasks(node)}" for node in nodes)

    @property
    def steps_per_s(self) -> float:
        """Predicted steps of all workers together."""
        return len(self.assignment.workers) / self.predicted_s

    def _tasks(self, node: str) -> str:
        parts = [f"p{index}" for index, where in enumerate(self.assignment.ps) if where == node]
        workers = self.assignment.workers.count(node)
        return "+".join([*parts, f"{workers}w"] if workers else parts)


def profile(case: Case) -> ModelProfile:
    """The chain of dense layers, with FLOPs that keep a GPU busy for `compute_s`."""
    size = 4 * WIDTH * WIDTH
    arithmetic = 6.0 * LAYERS * WIDTH * WIDTH
    busy = case.compute_s * known_hardware().gpu(GPU_MODEL).training_flops_per_s / BATCH_SIZE
    return ModelProfile(
        name="chain of dense layers",
        api=Api.GRAPH,
        parameters=LAYERS * WIDTH * WIDTH,
        parameter_bytes=LAYERS * size,
        variables=tuple(VariableSpec(f"layer_{i:02}", (WIDTH, WIDTH), "float32", size) for i in range(LAYERS)),
        flops_forward_per_sample=(arithmetic + busy) / 3,
        flops_step_per_sample=arithmetic + busy,
        longest_path_flops=(arithmetic + busy) / 3,
        batch_size=BATCH_SIZE,
        sample_bytes=4 * WIDTH,
        optimizer="SGD",
        synchronous=case.synchronous,
    )


def cluster(case: Case, measured_mbps: Sequence[float], uplink_mbps: float | None = None) -> Cluster:
    """The hosts as the solver's cluster.

    Args:
        case: the cluster.
        measured_mbps: payload rate of each host's card.
        uplink_mbps: payload rate between the racks, if any.
    """
    nodes = (
        NodeClass(
            name=case.node(host),
            cpus=8.0,
            mem_bytes=SHARED_HOST_BYTES if case.shared else ONE_TASK_BYTES,
            gpus=case.gpus[host],
            gpu_model=GPU_MODEL,
            network_gbps=mbps / 1e3,
            rack=case.rack(host),
        )
        for host, mbps in enumerate(measured_mbps)
    )
    return Cluster(tuple(nodes), across_racks_gbps=None if uplink_mbps is None else uplink_mbps / 1e3)


def layouts(case: Case, where: Cluster) -> list[Layout]:
    """Returns the layouts to measure: each method's choice, the best predicted ones, and a sample of the others.

    Equivalent layouts count once.
    """
    scenario = Scenario.of(profile(case), where, known_hardware())
    found: dict[object, Layout] = {}
    for assignment in _assignments(case):
        layout = Layout(
            assignment, evaluate(scenario, SHAPE, scenario.shards(len(assignment.ps)), assignment).step_time.total
        )
        found.setdefault(_equivalence_class(case, scenario, assignment), layout)
    chosen: dict[object, Layout] = {}
    for method, assignment in _methods(case, scenario):
        key = _equivalence_class(case, scenario, assignment)
        layout = chosen.get(key, found[key])
        chosen[key] = Layout(layout.assignment, layout.predicted_s, (*layout.methods, method))
    rest = [key for key, layout in found.items() if key not in chosen and layout.predicted_s <= MAX_ROUND_S]
    rest.sort(key=lambda key: -found[key].steps_per_s)
    wanted = max(0, case.max_layouts - len(chosen))
    best = rest[: wanted // 3]
    others = rest[len(best) :]
    count = min(len(others), wanted - len(best))
    sampled = [others[(2 * index + 1) * len(others) // (2 * count)] for index in range(count)]
    return sorted([*chosen.values(), *(found[key] for key in (*best, *sampled))], key=lambda one: -one.steps_per_s)


def _methods(case: Case, scenario: Scenario) -> Iterator[tuple[str, Assignment]]:
    # The hosts share this machine's cores, so several ps on one host would compete for CPUs.
    plan = PlanRequest(scenario.profile, scenario.cluster, max_gpus_per_worker=1, rules=PAPER)
    yield "Dike", _assignment(make_plan(plan))
    traffic = PlanRequest(scenario.profile, scenario.cluster, objective="traffic", max_gpus_per_worker=1)
    yield "least traffic", _assignment(make_plan(traffic))
    yield "round robin", _round_robin(case)


def _assignment(plan: Plan) -> Assignment:
    nodes = {role: tuple(task.node for task in plan.tasks if task.role == role) for role in ("ps", "worker")}
    return Assignment(nodes["ps"], nodes["worker"], None)


def _round_robin(case: Case) -> Assignment:
    """As many workers as fit, one ps for every four; each task on the next host with room, ps first."""
    hosts = range(len(case.rates_mbps))
    if case.shared:
        places = [case.node(host) for gpu in range(max(case.gpus)) for host in hosts if gpu < case.gpus[host]]
        ps = math.ceil(len(places) / WORKERS_PER_PS)
        # Workers follow the last ps.
        return Assignment(tuple(map(case.node, hosts[:ps])), tuple(places[ps:] + places[:ps]), None)
    ps = math.ceil(len(hosts) / (WORKERS_PER_PS + 1))
    return Assignment(tuple(map(case.node, hosts[:ps])), tuple(map(case.node, hosts[ps:])), None)


def _assignments(case: Case) -> Iterator[Assignment]:
    """Yields every placement with at most one ps on a host."""
    hosts = range(len(case.rates_mbps))
    for count in range(1, len(hosts) + 1):
        for ps in itertools.permutations(hosts, count):
            for workers in itertools.product(*(range(gpus + 1) for gpus in case.gpus)):
                together = any(workers[host] for host in ps)
                if any(workers) and (case.shared or not together):
                    placed = tuple(case.node(host) for host in hosts for _ in range(workers[host]))
                    yield Assignment(tuple(map(case.node, ps)), placed, None)


def _equivalence_class(case: Case, scenario: Scenario, assignment: Assignment) -> object:
    """Key that is equal for layouts that differ in host names only."""
    sizes = scenario.shards(len(assignment.ps)).sizes
    held = dict(zip(assignment.ps, sizes, strict=True))
    racks: dict[str | None, list[tuple[float, int, int, int]]] = {}
    for host, rate in enumerate(case.rates_mbps):
        node = case.node(host)
        tasks = (rate, case.gpus[host], held.get(node, 0), assignment.workers.count(node))
        racks.setdefault(case.rack(host), []).append(tasks)
    return tuple(sorted(tuple(sorted(hosts)) for hosts in racks.values()))
