"""Small models and clusters for the solver's tests."""

from __future__ import annotations

from dike.profile import Api, ModelProfile, VariableSpec
from solver import Cluster, NodeClass, Plan
from solver.units import GIB

MB = 10**6
RESNET50_SIZES = [9_437_184] * 3 + [8_192_000] + [4_194_304] * 8 + [2_359_296] * 6 + [1_048_576] * 12


def profile(
    sizes: list[int] | None = None,
    *,
    api: Api = Api.KERAS,
    synchronous: bool = False,
    flops: float = 7.755e9,
    longest_share: float = 0.9,
    batch_size: int = 32,
    sample_bytes: int = 602_112,
    slots: int = 1,
) -> ModelProfile:
    """A model with variables of these sizes, by default much like ResNet50."""
    sizes = RESNET50_SIZES if sizes is None else sizes
    variables = tuple(VariableSpec(f"v{i}/kernel", (size // 4,), "float32", size) for i, size in enumerate(sizes))
    return ModelProfile(
        name="model.py",
        api=api,
        parameters=sum(sizes) // 4,
        parameter_bytes=sum(sizes),
        variables=variables,
        flops_forward_per_sample=flops,
        flops_step_per_sample=3 * flops,
        longest_path_flops=longest_share * flops,
        batch_size=batch_size,
        sample_bytes=sample_bytes,
        optimizer="SGD",
        optimizer_slots=slots,
        synchronous=synchronous,
    )


def digits(api: Api = Api.KERAS) -> ModelProfile:
    """The small CNN of the examples."""
    return profile([576, 18_432, 16_384, 1_280], api=api, flops=0.6e6, batch_size=64, sample_bytes=256, slots=0)


def k80(count: int = 5, **changes: object) -> Cluster:
    """The paper's machines."""
    values: dict[str, object] = {
        "name": "k80",
        "count": count,
        "cpus": 8.0,
        "mem_bytes": 32 * GIB,
        "gpus": 4,
        "gpu_model": "K80",
        "disk_bytes": 100 * GIB,
    }
    return Cluster((NodeClass(**{**values, **changes}),))  # type: ignore[arg-type]


def machines(count: int, cpus: float = 2.0, mem_gib: float = 3.0) -> Cluster:
    """Machines without GPUs, each a class of its own, as offers come."""
    return Cluster(tuple(NodeClass(name=f"m{i}", cpus=cpus, mem_bytes=int(mem_gib * GIB)) for i in range(count)))


def k80_node(name: str, cpus: float = 8, gpus: int = 4, gbps: float = 10, rack: str | None = None) -> NodeClass:
    return NodeClass(
        name=name,
        cpus=cpus,
        mem_bytes=32 * GIB,
        gpus=gpus,
        gpu_model="K80" if gpus else None,
        disk_bytes=100 * GIB,
        network_gbps=gbps,
        rack=rack,
    )


def four_variables(**changes: object) -> ModelProfile:
    return profile([40 * MB, 30 * MB, 20 * MB, 10 * MB], **{"api": Api.GRAPH, **changes})  # type: ignore[arg-type]


def places_by_role(plan: Plan) -> dict[str, list[str]]:
    return {
        role: [task.node for task in sorted(plan.tasks, key=lambda task: task.index) if task.role == role]
        for role in ("chief", "ps", "worker")
    }


MIXED = Cluster((k80_node("a"), k80_node("cpu", gpus=0), k80_node("b")))
