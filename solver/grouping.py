"""Groups a plan's machines for display: hundreds with the same tasks become one line or one box."""

from __future__ import annotations

from collections.abc import Sequence

from solver.plan import ROLES, PlannedTask

MAX_GROUPS = 12
"""Maximum number of machines shown singly; with more, those with equal tasks are grouped."""

NodeGroup = tuple[tuple[str, ...], tuple[PlannedTask, ...]]


def group_nodes(tasks: Sequence[PlannedTask], merge_above: int = MAX_GROUPS) -> list[NodeGroup]:
    """Groups machines with the same number of tasks of each role, if there are more than `merge_above`.

    Returns:
        For each group the machines' names and the tasks of the first.
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
