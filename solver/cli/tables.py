"""A model's profile and a plan as tables for the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from dike.profile import ModelProfile
from solver import Plan, PlannedTask, TaskResources
from solver.cli.output import new_table
from solver.grouping import group_nodes
from solver.units import MIB, format_bytes

RULES = {
    "identical_workers": "all workers alike",
    "cpu_gpu_ratio": "CPUs per GPU",
    "task_counts": "numbers of workers and ps",
    "all_gpus_used": "GPUs left idle",
}
"""Gaps below this show as 0.0%."""
MAX_NAMES = 2
MAX_GROUPS = 24


def print_profile(console: Console, profile: ModelProfile) -> None:
    table = new_table(f"Model: {profile.name}")
    table.add_row("parameters", f"{profile.parameters:,} ({format_bytes(profile.parameter_bytes)})")
    table.add_row("variables", f"{len(profile.variables)} ({format_bytes(profile.variable_bytes)})")
    if not profile.is_measurable:
        console.print(table)
        return
    table.add_row("forward, per sample", f"{_flops(profile.flops_forward_per_sample)}")
    table.add_row("training step, per sample", f"{_flops(profile.flops_step_per_sample)}")
    share = f"{profile.longest_path_share:.0%} of the forward pass"
    table.add_row("longest path", f"{_flops(profile.longest_path_flops)}, {share}")
    table.add_row("batch size", f"{profile.batch_size}")
    table.add_row("optimizer", f"{profile.optimizer or 'none'}, {profile.optimizer_slots} slots per parameter")
    table.add_row("interface", f"{profile.api}{', synchronous' if profile.synchronous else ''}")
    table.add_row("layers", ", ".join(f"{name} x {count}" for name, count in _largest(profile.layers)) or "none")
    console.print(table)
    if profile.uncounted_ops:
        names = ", ".join(f"{name} x {count}" for name, count in profile.uncounted_ops.items())
        console.print(f"FLOPs of these operations are not known and not counted: {names}.")


def print_plan(console: Console, plan: Plan) -> None:
    """Prints a plan: the options, the chosen one and the reasons, the placement and the prediction."""
    if plan.options.generated > 1:
        console.print(_options(plan))
    console.print(_chosen(plan))
    console.print(_placement(plan))
    if len(plan.strategies) > 1:
        console.print(_strategies(plan))
    if plan.profile.is_measurable:
        console.print(_prediction(plan))
    if plan.alternatives:
        console.print(_alternatives(plan))
    for sentence in plan.why:
        console.print(f"- {sentence}")
    console.print(_proof(plan) if plan.profile.is_measurable else "Its speed is not predicted.")


def print_layout(console: Console, plan: Plan) -> None:
    """Prints only a plan's tasks and their placement."""
    console.print(_chosen(plan))
    console.print(_placement(plan))


def _options(plan: Plan) -> Table:
    table = new_table("Options")
    table.add_row("generated", _big(plan.options.generated))
    for rule, removed in plan.options.pruned.items():
        table.add_row(f"pruned: {RULES.get(rule, rule)}", _big(removed))
    table.add_row("compared", f"{plan.options.considered:,}, of which {plan.options.solved:,} had to be placed")
    return table


def _chosen(plan: Plan) -> Table:
    table = new_table("Option chosen", "role", "tasks", "CPUs", "GPUs", "memory", "disk")
    rows: list[tuple[str, int, TaskResources | None]] = [
        *(("worker", count, task) for task, count in plan.worker_kinds),
        ("ps", plan.option.ps, plan.option.ps_task),
        ("chief", 1, plan.option.chief),
    ]
    for role, count, task in rows:
        if task is not None and count:
            memory, disk = format_bytes(task.mem_mb * MIB), format_bytes(task.disk_mb * MIB)
            table.add_row(role, str(count), f"{task.cpus:g}", str(task.gpus), memory, disk)
    return table


def _placement(plan: Plan) -> Table:
    table = new_table("Placement", "machines", "tasks on each")
    groups = group_nodes(plan.tasks)
    for nodes, tasks in groups[:MAX_GROUPS]:
        table.add_row(_names(nodes), _tasks(tasks, single=len(nodes) == 1))
    if len(groups) > MAX_GROUPS:
        rest = sum(len(nodes) for nodes, _ in groups[MAX_GROUPS:])
        table.add_row(f"{rest} more", "see --format json")
    return table


def _names(nodes: Sequence[str]) -> str:
    if len(nodes) <= MAX_NAMES:
        return ", ".join(nodes)
    return f"{nodes[0]} ... {nodes[-1]} ({len(nodes)} machines)"


def _tasks(tasks: Sequence[PlannedTask], *, single: bool) -> str:
    """`ps:0, worker:0-3` for one machine, `1 ps, 4 workers` for several."""
    parts = []
    for role in ("chief", "ps", "worker"):
        indices = sorted(task.index for task in tasks if task.role == role)
        if not indices:
            continue
        if not single:
            parts.append(f"{len(indices)} {role}{'s' if len(indices) > 1 and role != 'ps' else ''}")
        elif indices == list(range(indices[0], indices[-1] + 1)) and len(indices) > 1:
            parts.append(f"{role}:{indices[0]}-{indices[-1]}")
        else:
            parts.extend(f"{role}:{index}" for index in indices)
    return ", ".join(parts)


def _prediction(plan: Plan) -> Table:
    table = new_table("Predicted, for one step" if plan.is_plain else "Predicted, for one step of every worker")
    time = plan.step_time_s
    if plan.strategy == "allreduce":
        part = math.ceil(plan.profile.batch_size / plan.option.workers)
        table.add_row("largest part of a batch", f"{part:,} of {plan.profile.batch_size:,} samples")
    are_unlike = len({(task.cpus, task.gpus) for task in plan.tasks if task.role == "worker"}) > 1
    table.add_row("compute of the slowest worker" if are_unlike else "compute", _seconds(time.compute))
    table.add_row("input", _seconds(time.input))
    table.add_row("latency", _seconds(time.latency))
    if plan.strategy == "allreduce":
        table.add_row("exchange of gradients", _seconds(time.network))
    if not plan.is_plain:
        if not plan.profile.synchronous:
            table.add_row("one worker's transfer", _seconds(time.transfer))
        table.add_row("busiest network link", _seconds(time.network))
        table.add_row("busiest ps", _seconds(time.update))
    if plan.option.chief is not None:
        table.add_row("chief", _seconds(time.dispatch))
    table.add_row("total", f"{_seconds(time.total)} ({_how_terms_add_up(plan)})")
    table.add_row("speed", f"{plan.samples_per_s:,.0f} samples/s")
    if not plan.is_plain:
        table.add_row("traffic (Eq. 1)", f"{format_bytes(plan.traffic_bytes)} weighted")
    if plan.option.ps > 1:
        balance = f"{plan.byte_imbalance:.2f} of the mean in bytes, {plan.request_imbalance:.2f} in variables"
        table.add_row("fullest ps", balance)
    return table


def _how_terms_add_up(plan: Plan) -> str:
    time = plan.step_time_s
    if plan.is_plain:
        how = "the sum"
    elif not plan.profile.synchronous:
        how = "a worker's round, or the busiest part"
    elif time.total < (max(time.compute, time.input) + time.network + time.update + time.dispatch) * (1 - 1e-9):
        how = "a worker's work, or what overlaps it if that takes longer"
    else:
        how = "the sum"
    return f"{how}; input overlaps compute" if plan.option.worker.gpus else how


def _strategies(plan: Plan) -> Table:
    """The best plan of each strategy, the chosen one first."""
    table = new_table("Strategies", "strategy", "speed", "tasks", "result")
    for one in plan.strategies:
        counts = f"{one.workers} worker{'' if one.workers == 1 else 's'}"
        tasks = "1 task" if one.strategy == "one" else counts + (f", {one.ps} ps" if one.ps else "")
        table.add_row(one.strategy, f"{one.samples_per_s:,.0f} samples/s", tasks, one.result)
    return table


def _alternatives(plan: Plan) -> Table:
    columns = ("workers", "ps", "CPUs", "GPUs", "samples/s", "speed", "traffic (Eq. 1)")
    table = new_table("Next best options", *columns)
    for entry in plan.alternatives:
        table.add_row(
            str(entry.workers),
            str(entry.ps),
            f"{entry.worker.cpus:g}",
            str(entry.worker.gpus),
            f"{entry.samples_per_s:,.0f}",
            f"{entry.relative:.1%}",
            format_bytes(entry.traffic_bytes),
        )
    return table


def _proof(plan: Plan) -> str:
    measure = "speed by more than 5%" if plan.objective == "throughput" else "traffic (Eq. 1)"
    if plan.optimal:
        proof = f"Proven: no other option within the rules, in any placement, is better in {measure}"
    else:
        measure = "speed" if plan.objective == "throughput" else measure
        proof = f"Not proven best in {measure}: a better plan could gain up to {plan.gap:.1%}"
    return f"{proof}. Solved in {plan.solve_time_s:.2f} s ({plan.formulation})."


def _largest(layers: dict[str, int], limit: int = 8) -> Iterable[tuple[str, int]]:
    return sorted(layers.items(), key=lambda item: (-item[1], item[0]))[:limit]


def _flops(count: float) -> str:
    for unit, factor in (("TFLOPs", 1e12), ("GFLOPs", 1e9), ("MFLOPs", 1e6)):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count / 1e3:.2f} kFLOPs"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.2f} ms"


def _big(count: int) -> str:
    return f"{count:,}" if count < 10**12 else f"about 10^{math.log10(count):.0f}"
