"""Draws a plan: machines as boxes, the tasks in them, and the traffic between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from dike.exceptions import BadInputError
from solver.plan import Plan, PlannedTask
from solver.units import format_bytes

SUFFIXES = (".png", ".svg")
MAX_BOXES = 12
"""With more machines than this, those with like tasks share a box."""
COLOURS = {"ps": "#e8a33d", "worker": "#5b8fd6", "chief": "#7ab37a"}
BOX_WIDTH, GAP = 3.0, 1.4
TASK_HEIGHT, HEAD_HEIGHT = 0.42, 0.55
TASKS_SHOWN = 6

NodeGroup = tuple[tuple[str, ...], tuple[PlannedTask, ...]]


def group_nodes(tasks: Sequence[PlannedTask], merge_above: int = MAX_BOXES) -> list[NodeGroup]:
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
        key = tuple(sum(task.role == role for task in here) for role in COLOURS)
        groups.setdefault(key, []).append(node)
    return [(tuple(nodes), tuple(by_node[nodes[0]])) for nodes in groups.values()]


def check_picture_path(path: Path) -> None:
    """Refuses a file that could not be written.

    Raises:
        BadInputError: if the suffix is neither .png nor .svg, or the folder does not exist.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise BadInputError(f"'{path}' is no picture file; give --picture a name that ends in .png or .svg.")
    if not path.absolute().parent.is_dir():
        raise BadInputError(f"The folder of the picture '{path}' does not exist; make it first.")


def draw_plan(plan: Plan, path: Path) -> None:
    """Draws the plan into a PNG or SVG file.

    Raises:
        BadInputError: if the file cannot be written.
    """
    check_picture_path(path)
    groups = group_nodes(plan.tasks)
    columns = math.ceil(math.sqrt(len(groups)))
    boxes = [_Box.of(group, index, columns) for index, group in enumerate(groups)]
    width = columns * (BOX_WIDTH + GAP)
    height = max(box.bottom_offset for box in boxes) + 1.0
    figure = Figure(figsize=(max(6.0, width), max(4.0, height)))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.02, 0.02, 0.96, 0.96))
    axes.set_axis_off()
    axes.set_xlim(-0.3, max(6.0, width) - 0.3)
    axes.set_ylim(-max(3.2, height - 0.8), 0.9)
    axes.text(0, 0.55, _title(plan), fontsize=12, weight="bold", va="center")
    _draw_traffic(axes, plan, boxes)
    for box in boxes:
        _draw_box(axes, box)
    try:
        # As text, so that an SVG can be searched.
        with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "dike"}):
            figure.savefig(path, dpi=110)
    except OSError as error:
        raise BadInputError(f"The picture '{path}' cannot be written: {error.strerror}.") from error


@dataclass(frozen=True)
class _Box:
    """One box: its group and its place, y growing downwards from 0."""

    group: NodeGroup
    x: float
    y: float
    height: float

    @classmethod
    def of(cls, group: NodeGroup, index: int, columns: int) -> _Box:
        row_height = HEAD_HEIGHT + TASK_HEIGHT * (TASKS_SHOWN + 1) + GAP
        lines = min(TASKS_SHOWN + 1, len(group[1]))
        x, y = (index % columns) * (BOX_WIDTH + GAP), (index // columns) * row_height
        return cls(group, x, y, HEAD_HEIGHT + TASK_HEIGHT * lines + 0.1)

    @property
    def centre(self) -> tuple[float, float]:
        return self.x + BOX_WIDTH / 2, -(self.y + self.height / 2)

    @property
    def bottom_offset(self) -> float:
        return self.y + self.height


def _title(plan: Plan) -> str:
    option = plan.option
    return (
        f"{plan.profile.name}: {option.workers} workers, {option.ps} ps, {plan.samples_per_s:,.0f} samples/s; "
        "lines: bytes per step, each way"
    )


def _draw_box(axes: Axes, box: _Box) -> None:
    nodes, tasks = box.group
    name = nodes[0] if len(nodes) == 1 else f"{nodes[0]} ... ({len(nodes)} alike)"
    axes.add_patch(
        Rectangle((box.x, -box.y - box.height), BOX_WIDTH, box.height, facecolor="#f4f4f4", edgecolor="#555", zorder=3)
    )
    axes.text(box.x + 0.12, -box.y - 0.3, name, fontsize=10, weight="bold", va="center", zorder=5)
    shown = tasks if len(tasks) <= TASKS_SHOWN + 1 else tasks[:TASKS_SHOWN]
    for line, task in enumerate(shown):
        y = -box.y - HEAD_HEIGHT - TASK_HEIGHT * (line + 1)
        patch = Rectangle((box.x + 0.1, y), BOX_WIDTH - 0.2, TASK_HEIGHT - 0.06, facecolor=COLOURS[task.role], zorder=4)
        axes.add_patch(patch)
        label = f"{task.name if len(nodes) == 1 else task.role}  {task.cpus:g} CPU"
        if task.gpus:
            label += f", {task.gpus} GPU"
        axes.text(box.x + 0.2, y + TASK_HEIGHT / 2 - 0.03, label, fontsize=8.5, va="center", zorder=5)
    if len(shown) < len(tasks):
        y = -box.y - HEAD_HEIGHT - TASK_HEIGHT * (TASKS_SHOWN + 0.6)
        axes.text(box.x + 0.2, y, f"and {len(tasks) - len(shown)} more", fontsize=8.5, va="center", zorder=5)


def _draw_traffic(axes: Axes, plan: Plan, boxes: Sequence[_Box]) -> None:
    """A line from each box to each other, as thick as the bytes that go one way in a step of every worker."""
    held = [sum(plan.ps_bytes[task.index] for task in _all_tasks(plan, box) if task.role == "ps") for box in boxes]
    workers = [sum(task.role == "worker" for task in _all_tasks(plan, box)) for box in boxes]
    flows = {
        (i, j): held[i] * workers[j] + held[j] * workers[i]
        for i in range(len(boxes))
        for j in range(i + 1, len(boxes))
        if held[i] * workers[j] + held[j] * workers[i]
    }
    most = max(flows.values(), default=1)
    for (i, j), flow in flows.items():
        axes.add_patch(
            FancyArrowPatch(
                boxes[i].centre,
                boxes[j].centre,
                arrowstyle="<->",
                connectionstyle="arc3,rad=0.12",
                linewidth=0.6 + 3.4 * flow / most,
                color="#b05050",
                alpha=0.55,
                zorder=1,
            )
        )
        if len(flows) <= 2 * MAX_BOXES:
            (x1, y1), (x2, y2) = boxes[i].centre, boxes[j].centre
            axes.text((x1 + x2) / 2, (y1 + y2) / 2, format_bytes(flow), fontsize=7.5, color="#803030", zorder=6)


def _all_tasks(plan: Plan, box: _Box) -> list[PlannedTask]:
    nodes = set(box.group[0])
    return [task for task in plan.tasks if task.node in nodes]
