"""Measures the share of the best throughput that each planning method reaches, on the paper's and random clusters."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.planning_methods import ALL_PLANNERS
from benchmarks.planning_methods.exhaustive import exhaust
from dike.profile import Api, ModelProfile
from dike.profiling.keras_profile import keras_profile
from framework.project.profiling import load_profile
from solver import Cluster, NodeClass, Plan, PlanRequest
from solver.baselines.setting import Setting
from solver.comparison import compare
from solver.drawing.figure_files import new_figure, save_figure
from solver.evaluation import evaluate
from solver.placement.naming import Assignment
from solver.request import scenario_of
from solver.resources import WorkerShape
from solver.search.space import has_similar_workers
from solver.units import GIB, SIMPLE_TIE_SHARE, SPEED_TIE_SHARE

TITLE = "Per cent of the best throughput, by method"
MODELS = {"R50": "ResNet50", "R152": "ResNet152", "IncV3": "InceptionV3"}
INPUTS = ("Cifar10", "ImageNet")
CIFAR10_SIDE = {"IncV3": 75}
"""Image side for models that do not take 32 x 32; InceptionV3 needs at least 75 x 75."""
BATCH = 32
ITERATIVE = "iterative"
SHOWN = tuple(name for name in ALL_PLANNERS if name not in (ITERATIVE, "one", "allreduce"))
"""Without `one` and `allreduce`: parameter servers are requested."""
IN_RULES = "best inside the paper's rules"
MODES = ("sync", "async")
NETWORKS_GBPS = (1, 10, 25)
RANDOM_CLUSTERS = 300
SEED = 2024
HIGH_SHARE = 0.95
MUCH_FASTER = 1 / (1 - SIMPLE_TIE_SHARE) + SPEED_TIE_SHARE
"""Ratio of speeds that the preference for simple plans does not explain."""
RESULTS = Path(__file__).parent / "results"
CASES_PLOT, RANDOM_PLOT = RESULTS / "optimum_share.svg", RESULTS / "optimum_share_random.svg"
COLOURS = {
    "dike": "#5b8fd6",
    "dike_traffic": "#a9c4ea",
    "sar_tuned": "#7ab37a",
    "sar_basic": "#c9d98a",
    "first_fit": "#b05050",
    "optimus": "#e8a33d",
    ITERATIVE: "#333333",
    IN_RULES: "#888888",
}


@dataclass(frozen=True)
class Case:
    """One job on one cluster.

    Attributes:
        label: training mode, model, input and cluster, as far as the case has them.
        shares: method -> speed relative to the fastest plan; with brute force also `ITERATIVE` and `IN_RULES`.
        brute_force: whether the iterative method, which refuses large clusters, has run.
        gap: upper bound of the relative gain of any placement over Dike's plan.
        within_rules: speed of the fastest other method whose plan keeps Dike's rules, relative to Dike's plan; 0 if
            none is much faster.
    """

    label: tuple[str, ...]
    shares: Mapping[str, float]
    brute_force: bool
    gap: float
    within_rules: float


def measure() -> Iterator[str]:
    """Reports the tables, and draws two plots beside the results."""
    profiles = {(model, images): _profile(model, images) for model in MODELS for images in INPUTS}
    yield "Speeds are predictions, and **the best is the step-time model's own opinion**: that Dike comes near the best"
    yield "of all placements is by construction; how far off the others are, under the same model, is the finding."
    yield "*Iterative* tries every placement of every option with workers all alike and no more parameter servers (ps)"
    yield f"than machines, which may share machines; `{IN_RULES}` is the best of what those leave, by brute"
    yield "force too. `dike` also looks at ps with more CPUs, at workers that differ, and at machines without GPUs. It"
    yield "keeps rules that the others do not: the simplest plan within 5% of the fastest, one ps on a machine, and no"
    yield "asynchronous worker that is more than three times as slow as the fastest. `dike_traffic` is Eq. 1 alone; for"
    yield "the others see `solver/baselines`."
    yield ""
    yield f"Batch {BATCH} a GPU; no separate chief, as with TensorFlow 1. Cifar10: 32 x 32 x 3, 10 classes; InceptionV3"
    yield "takes no less than 75 x 75, so there the images are scaled up to that. ImageNet: the models' own sizes."
    yield ""
    like = list(_paper_cases(profiles, {str(size): _instances(size, 0) for size in (5, 10, 20)}))
    yield "### Five, ten and twenty like instances"
    yield ""
    yield "The paper's homogeneous set: 8 CPUs, 4 K80, 32 GiB, 10 Gb/s each. Share of the fastest plan of all methods"
    yield "(*Iterative* ends on five only):"
    yield ""
    yield from _summary({f"{mode}, {images}": _labelled(like, mode, images) for mode in MODES for images in INPUTS})
    yield ""
    yield _guarantee(like)
    yield ""
    yield from _table(("training", "model", "input", "instances"), like)
    yield ""
    five = list(_paper_cases(profiles, {str(cpu_only): _instances(5, cpu_only) for cpu_only in (1, 2, 3, 4)}))
    assert all(case.brute_force for case in five)
    yield "### Five instances, one to four of them without GPUs"
    yield ""
    yield "The machines as before. Share of the fastest plan of all methods:"
    yield ""
    yield from _summary({f"{mode}, {images}": _labelled(five, mode, images) for mode in MODES for images in INPUTS})
    yield ""
    yield _guarantee(five)
    yield ""
    yield from _table(("training", "model", "input", "CPU-only"), five)
    yield ""
    draw_cases(_labelled(five, "sync"), CASES_PLOT)
    yield f"![share of the fastest plan, synchronous training]({CASES_PLOT.name})"
    yield ""
    larger = list(_paper_cases(profiles, {str(size): _instances(size, size // 5) for size in (10, 20)}))
    yield "### Ten and twenty instances, a fifth of them without GPUs"
    yield ""
    yield f"Iterative ends on none of these. {_guarantee(larger)}"
    yield ""
    yield from _table(("training", "model", "input", "instances"), larger)
    yield ""
    randoms = list(_random_cases(list(profiles.values())))
    yield f"### {RANDOM_CLUSTERS} random clusters"
    yield ""
    yield "3 to 5 machines of 4, 8 or 16 CPUs, 32 or 64 GiB and 0, 1, 2 or 4 GPUs (K80, P100 or V100), with GPUs in at"
    yield f"least one; a network of 1, 10 or 25 Gb/s; one of the six jobs above, synchronous or not; seed {SEED}."
    yield f"{_guarantee(randoms)} Share of the fastest plan of all methods:"
    yield ""
    networks = {f"{gbps} Gb/s": _labelled(randoms, f"{gbps} Gb/s") for gbps in NETWORKS_GBPS}
    yield from _summary({"all": randoms, **networks, **{mode: _labelled(randoms, mode) for mode in MODES}})
    yield ""
    yield from _distribution(randoms)
    draw_distribution(randoms, RANDOM_PLOT)
    yield ""
    yield f"![distribution over random clusters]({RANDOM_PLOT.name})"


def _guarantee(cases: Sequence[Case]) -> str:
    """Describes how close the other methods come to `dike`, and the proven gaps of its plans."""
    others = [
        max(share for name, share in case.shares.items() if name != "dike") / case.shares["dike"] for case in cases
    ]
    beaten = sum(ratio > MUCH_FASTER for ratio in others)
    within_rules = sum(case.within_rules > MUCH_FASTER for case in cases)
    gaps = [case.gap for case in cases if case.gap]
    proven = len(cases) - len(gaps)
    return (
        f"In {beaten} of {len(cases)} cases another method is more than {MUCH_FASTER - 1:.0%} faster than `dike` (at "
        f"most by {max(0.0, max(others) - 1):.1%}), in {within_rules} of these with a plan that keeps Dike's rules. "
        f"{proven} plans are proven within 5%; the gap of the others is at most {max(gaps, default=0.0):.1%}."
    )


def _profile(model: str, images: str) -> ModelProfile:
    name = MODELS[model]
    if images == "ImageNet":
        profile = load_profile(f"keras:{name}", batch_size=BATCH)
    else:
        import keras
        import tensorflow as tf

        side = CIFAR10_SIDE.get(model, 32)
        network = getattr(keras.applications, name)(weights=None, input_shape=(side, side, 3), classes=10)
        network.compile(optimizer="sgd", loss="sparse_categorical_crossentropy")
        network.optimizer.build(network.trainable_variables)
        batch = (tf.TensorSpec((BATCH, side, side, 3)), tf.TensorSpec((BATCH,), tf.int32))
        profile = keras_profile(f"keras:{name}", Api.KERAS, network, batch)
    return dataclasses.replace(profile, name=f"{model} {images}", api=Api.GRAPH)


def _instances(count: int, cpu_only: int) -> Cluster:
    gpu = NodeClass(
        name="gpu", count=count - cpu_only, cpus=8, mem_bytes=32 * GIB, gpus=4, gpu_model="K80", disk_bytes=100 * GIB
    )
    return Cluster((gpu, dataclasses.replace(gpu, name="cpu", count=cpu_only, gpus=0, gpu_model=None)))


def _case(label: tuple[str, ...], request: PlanRequest) -> Case:
    rows = compare(request, planners=ALL_PLANNERS).rows
    shares = {row.method: row.share for row in rows}
    gap = next(row.gap for row in rows if row.method == "dike")
    faster = [name for name in (*SHOWN, ITERATIVE) if shares[name] > shares["dike"] * MUCH_FASTER]
    kept = [shares[name] for name in faster if _keeps_rules(request, ALL_PLANNERS[name](request))]
    within_rules = max(kept, default=0.0) / shares["dike"]
    if not shares[ITERATIVE]:
        shown = {name: shares[name] for name in SHOWN}
        return Case(label, shown, brute_force=False, gap=gap, within_rules=within_rules)
    setting = Setting.of(request)
    choice = exhaust(setting, inside_rules=True)
    in_rules = evaluate(setting.scenario, choice.shape, choice.shards, choice.assignment).samples_per_s
    shares[IN_RULES] = in_rules / max(row.samples_per_s for row in rows)
    shown = {name: shares[name] for name in (*SHOWN, ITERATIVE, IN_RULES)}
    return Case(label, shown, brute_force=True, gap=gap, within_rules=within_rules)


def _keeps_rules(request: PlanRequest, plan: Plan) -> bool:
    """Whether a plan has one ps on a machine at most, and no asynchronous worker that is too slow."""
    servers = tuple(task.node for task in plan.tasks if task.role == "ps")
    workers = [task for task in plan.tasks if task.role == "worker"]
    shapes = tuple(WorkerShape(task.gpus, task.cpus) for task in workers)
    assignment = Assignment(servers, tuple(task.node for task in workers), None, shapes)
    return len(set(servers)) == len(servers) and has_similar_workers(scenario_of(request), assignment)


def _paper_cases(profiles: Mapping[tuple[str, str], ModelProfile], clusters: Mapping[str, Cluster]) -> Iterator[Case]:
    for mode in MODES:
        for (model, images), profile in profiles.items():
            for text, cluster in clusters.items():
                job = dataclasses.replace(profile, synchronous=mode == "sync")
                yield _case((mode, model, images, text), PlanRequest(job, cluster))


def _random_cases(profiles: Sequence[ModelProfile]) -> Iterator[Case]:
    chance = np.random.default_rng(SEED)
    for _ in range(RANDOM_CLUSTERS):
        network, mode = int(chance.choice(NETWORKS_GBPS)), MODES[int(chance.integers(2))]
        job = dataclasses.replace(profiles[int(chance.integers(len(profiles)))], synchronous=mode == "sync")
        nodes: list[NodeClass] = []
        while not any(node.gpus for node in nodes):
            nodes = [_random_node(chance, f"m{index}", network) for index in range(int(chance.integers(3, 6)))]
        case = _case((f"{network} Gb/s", mode), PlanRequest(job, Cluster(tuple(nodes))))
        assert case.brute_force
        yield case


def _random_node(chance: np.random.Generator, name: str, network_gbps: int) -> NodeClass:
    gpus = int(chance.choice([0, 1, 2, 4]))
    gpu_model = str(chance.choice(["K80", "P100", "V100"]))
    return NodeClass(
        name=name,
        cpus=int(chance.choice([4, 8, 16])),
        mem_bytes=int(chance.choice([32, 64])) * GIB,
        gpus=gpus,
        gpu_model=gpu_model if gpus else None,
        disk_bytes=100 * GIB,
        network_gbps=network_gbps,
    )


def _labelled(cases: Sequence[Case], *words: str) -> list[Case]:
    return [case for case in cases if set(words) <= set(case.label)]


def _methods(cases: Sequence[Case]) -> tuple[str, ...]:
    return max((tuple(case.shares) for case in cases), key=len)


def _summary(groups: Mapping[str, Sequence[Case]]) -> Iterator[str]:
    yield f"| method | {' | '.join(f'{name}: mean, worst' for name in groups)} |"
    yield "|---" * (1 + len(groups)) + "|"
    for method in _methods([case for cases in groups.values() for case in cases]):
        if not all(method in case.shares for cases in groups.values() for case in cases):
            continue
        of_groups = [[case.shares[method] for case in cases] for cases in groups.values()]
        cells = [f"{statistics.mean(shares):.1%}, {min(shares):.1%}" for shares in of_groups]
        yield f"| {method} | {' | '.join(cells)} |"


def _table(columns: Sequence[str], cases: Sequence[Case]) -> Iterator[str]:
    methods = _methods(cases)
    yield f"| {' | '.join((*columns, *methods))} |"
    yield "|---" * (len(columns) + len(methods)) + "|"
    for case in cases:
        cells = (f"{case.shares[method]:.1%}" if method in case.shares else "-" for method in methods)
        yield f"| {' | '.join((*case.label, *cells))} |"


def _distribution(cases: Sequence[Case]) -> Iterator[str]:
    yield f"| method | worst | 5th percentile | 25th | median | at least {HIGH_SHARE:.0%} of the best |"
    yield "|---|---|---|---|---|---|"
    for method in cases[0].shares:
        shares = np.array([case.shares[method] for case in cases])
        cells = [f"{value:.1%}" for value in np.percentile(shares, [0, 5, 25, 50])]
        yield f"| {method} | {' | '.join(cells)} | {np.mean(shares >= HIGH_SHARE):.0%} of the clusters |"


def draw_cases(cases: Sequence[Case], path: Path) -> None:
    """Draws grouped bars as in the paper's Figure 4: a panel for each model, a group for each input and cluster.

    Args:
        cases: labelled by training mode, model, input and number of machines without GPUs.
        path: a .png or .svg file.
    """
    models = list(dict.fromkeys(case.label[1] for case in cases))
    figure = new_figure(9.0, 2.4 * len(models) + 0.6)
    panels = figure.subplots(len(models), 1, squeeze=False)
    for axes, model in zip(panels[:, 0], models, strict=True):
        here = _labelled(cases, model)
        for index, method in enumerate(SHOWN):
            places = np.arange(len(here)) + (index - (len(SHOWN) - 1) / 2) * 0.8 / len(SHOWN)
            heights = [100 * case.shares[method] for case in here]
            axes.bar(places, heights, 0.8 / len(SHOWN), color=COLOURS[method], label=method)
        axes.set_xticks(range(len(here)), [f"{case.label[2]}\n{case.label[3]} CPU-only" for case in here], fontsize=8)
        axes.set_ylim(0, 105)
        axes.set_ylabel(f"{model}: % of the fastest")
        axes.grid(axis="y", alpha=0.3)
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="upper center", ncols=len(SHOWN), fontsize=8)
    figure.tight_layout(rect=(0, 0, 1, 0.96))
    save_figure(figure, path)


def draw_distribution(cases: Sequence[Case], path: Path) -> None:
    """Draws each method's cumulative distribution of shares, into a .png or .svg file."""
    figure = new_figure(7.0, 4.2)
    axes = figure.add_subplot()
    clusters = 100 * np.arange(1, len(cases) + 1) / len(cases)
    for method in cases[0].shares:
        shares = np.sort([100 * case.shares[method] for case in cases])
        axes.step(shares, clusters, "--" if method == IN_RULES else "-", color=COLOURS[method], label=method)
    axes.set_xlabel("speed, % of the fastest")
    axes.set_ylabel("% of the clusters with no more than that")
    axes.set_title(f"{len(cases)} random clusters of 3 to 5 machines", fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    save_figure(figure, path)
