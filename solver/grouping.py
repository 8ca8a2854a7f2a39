"""Machines of a plan grouped for people: hundreds that hold the same are one line or one box."""

from __future__ import annotations

from collections.abc import Sequence

from solver.plan import ROLES, PlannedTask

MAX_GROUPS = 12
"""With more machines than this, those with like tasks are one group."""

NodeGroup = tuple[tuple[str, ...], tuple[PlannedTask, ...]]


def group_nodes(tasks: Sequence[PlannedTask], merge_above: int = MAX_GROUPS) -> list[NodeGroup]:
    """Machines with their tasks; where there are many, machines with as many tasks of each role are one group.

    Returns:
        For each group the machines' names and the tasks of the first of them (of the only one, where there is one).
    """
    by_node: dict[str, list[PlannedTask]] = {}
    for task in tasks:
        by_node.setdefault(task.node, []).append(task)
    if len(by_node) <= merge_above:
        return [((node,), tuple(here)) for node, here in by_node.items()]
    groups: dict[tuple[int, ...], list[str]] = {}
    for node, here in by_node.items():
        key = tuple(sum(task.role == role for task in here) for role in ROLES)
        groups.setdefault(key, []).append(node)
    return [(tuple(nodes), tuple(by_node[nodes[0]])) for nodes in groups.values()]
