"""Draws a plan: machines as boxes with their tasks, and the traffic between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

from solver.drawing.figure_files import check_picture_path, new_figure, save_figure
from solver.grouping import NodeGroup, group_nodes
from solver.plan import Plan, PlannedTask
from solver.units import format_bytes

COLOURS = {"ps": "#e8a33d", "worker": "#5b8fd6", "chief": "#7ab37a"}
BOX_WIDTH, GAP = 3.0, 2.0
TASK_HEIGHT, HEAD_HEIGHT = 0.42, 0.55
MAX_TASKS_SHOWN = 6
LETTER_WIDTH, LABEL_HEIGHT = 0.07, 0.2
"""Size of labels at the lines, with some padding; a unit is an inch."""
MAX_LABELS = 24
"""Maximum number of lines that get labels."""


def draw_plan(plan: Plan, path: Path) -> None:
    """Draws the plan into a PNG or SVG file.

    Raises:
        BadInputError: if the file cannot be written.
    """
    check_picture_path(path)
    boxes = _arrange(group_nodes(plan.tasks))
    left, right = min(box.x for box in boxes) - 0.4, max(box.x for box in boxes) + BOX_WIDTH + 0.4
    top, bottom = max(box.top for box in boxes) + 1.2, min(box.bottom for box in boxes) - 0.4
    right = max(right, left + 9.0)
    figure = new_figure(right - left, top - bottom)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(left, right)
    axes.set_ylim(bottom, top)
    axes.text(left + 0.3, top - 0.5, _title(plan), fontsize=12, weight="bold", va="center")
    _draw_traffic(axes, plan, boxes)
    for box in boxes:
        _draw_box(axes, box)
    save_figure(figure, path)


@dataclass(frozen=True)
class _Box:
    """A box: its group, its left side, its vertical centre, and its height."""

    group: NodeGroup
    x: float
    y: float
    height: float

    @property
    def top(self) -> float:
        return self.y + self.height / 2

    @property
    def bottom(self) -> float:
        return self.y - self.height / 2

    @property
    def centre(self) -> tuple[float, float]:
        return self.x + BOX_WIDTH / 2, self.y


@dataclass(frozen=True)
class _Frame:
    left: float
    bottom: float
    right: float
    top: float

    @classmethod
    def around(cls, x: float, y: float, width: float, height: float) -> _Frame:
        return cls(x - width / 2, y - height / 2, x + width / 2, y + height / 2)

    def covers(self, other: _Frame) -> bool:
        return (
            self.left < other.right and other.left < self.right and self.bottom < other.top and other.bottom < self.top
        )


def _arrange(groups: Sequence[NodeGroup]) -> list[_Box]:
    """Puts boxes on an ellipse, so that no line between two of them runs behind a third."""
    heights = [HEAD_HEIGHT + TASK_HEIGHT * min(MAX_TASKS_SHOWN + 1, len(tasks)) + 0.1 for _, tasks in groups]
    circumference = len(groups) * (max(BOX_WIDTH, *heights) + GAP) if len(groups) > 1 else 0.0
    radius = circumference / (2 * math.pi) * (1.0 if len(groups) > 2 else 1.6)
    boxes = []
    for index, (group, height) in enumerate(zip(groups, heights, strict=True)):
        angle = math.pi - 2 * math.pi * index / len(groups)
        boxes.append(_Box(group, 1.25 * radius * math.cos(angle), radius * math.sin(angle), height))
    return boxes


def _title(plan: Plan) -> str:
    option = plan.option
    if plan.strategy == "allreduce":
        return (
            f"{plan.profile.name}: {option.workers} workers, {plan.samples_per_s:,.0f} samples/s; "
            "lines: bytes that each worker sends around the ring in a step"
        )
    return (
        f"{plan.profile.name}: {option.workers} worker{'' if option.workers == 1 else 's'}, {option.ps} ps, "
        f"{plan.samples_per_s:,.0f} samples/s; "
        "lines: bytes each way, per step of every worker"
    )


def _draw_box(axes: Axes, box: _Box) -> None:
    nodes, tasks = box.group
    name = nodes[0] if len(nodes) == 1 else f"{nodes[0]} ... ({len(nodes)} alike)"
    frame = Rectangle((box.x, box.bottom), BOX_WIDTH, box.height, facecolor="#f4f4f4", edgecolor="#555", zorder=3)
    axes.add_patch(frame)
    axes.text(box.x + 0.12, box.top - 0.3, name, fontsize=10, weight="bold", va="center", zorder=5)
    shown = tasks if len(tasks) <= MAX_TASKS_SHOWN + 1 else tasks[:MAX_TASKS_SHOWN]
    for line, task in enumerate(shown):
        y = box.top - HEAD_HEIGHT - TASK_HEIGHT * (line + 1)
        patch = Rectangle((box.x + 0.1, y), BOX_WIDTH - 0.2, TASK_HEIGHT - 0.06, facecolor=COLOURS[task.role], zorder=4)
        axes.add_patch(patch)
        label = f"{task.name if len(nodes) == 1 else task.role}  {task.cpus:g} CPU"
        if task.gpus:
            label += f", {task.gpus} GPU"
        axes.text(box.x + 0.2, y + TASK_HEIGHT / 2 - 0.03, label, fontsize=8.5, va="center", zorder=5)
    if len(shown) < len(tasks):
        y = box.top - HEAD_HEIGHT - TASK_HEIGHT * (MAX_TASKS_SHOWN + 0.6)
        axes.text(box.x + 0.2, y, f"and {len(tasks) - len(shown)} more", fontsize=8.5, va="center", zorder=5)


def _draw_traffic(axes: Axes, plan: Plan, boxes: Sequence[_Box]) -> None:
    """Draws lines between boxes, their width by the bytes that go one way in a step of every worker."""
    flows = _ring_flows(plan, boxes) if plan.is_plain else _flows_to_servers(plan, boxes)
    most = max(flows.values(), default=1)
    frames = [_Frame(box.x, box.bottom, box.x + BOX_WIDTH, box.top) for box in boxes]
    labels: list[_Frame] = []
    for (i, j), flow in flows.items():
        arrow = FancyArrowPatch(
            boxes[i].centre,
            boxes[j].centre,
            arrowstyle="-",
            linewidth=0.6 + 3.4 * flow / most,
            color="#b05050",
            alpha=0.55,
            zorder=1,
        )
        axes.add_patch(arrow)
        if len(flows) <= MAX_LABELS:
            label = format_bytes(flow)
            x, y = _place_of_label(len(label) * LETTER_WIDTH, boxes[i], boxes[j], [*frames, *labels])
            labels.append(_Frame.around(x, y, len(label) * LETTER_WIDTH, LABEL_HEIGHT))
            background = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
            middle = {"horizontalalignment": "center", "verticalalignment": "center"}
            axes.text(x, y, label, middle, fontsize=7.5, color="#803030", bbox=background, zorder=2)


def _ring_flows(plan: Plan, boxes: Sequence[_Box]) -> dict[tuple[int, int], float]:
    """Bytes between neighbours of the ring: each box sends to the next one, the last to the first."""
    workers, last = plan.option.workers, len(boxes) - 1
    sent = 2 * (workers - 1) / workers * plan.profile.parameter_bytes
    neighbours = [(index, index + 1) for index in range(last)] + [(0, last)] * (last > 1)
    return dict.fromkeys(neighbours, sent)


def _flows_to_servers(plan: Plan, boxes: Sequence[_Box]) -> dict[tuple[int, int], float]:
    """Bytes between parameter servers and workers in different boxes."""
    held = [sum(plan.ps_bytes[task.index] for task in _all_tasks(plan, box) if task.role == "ps") for box in boxes]
    workers = [sum(task.role == "worker" for task in _all_tasks(plan, box)) for box in boxes]
    return {
        (i, j): held[i] * workers[j] + held[j] * workers[i]
        for i in range(len(boxes))
        for j in range(i + 1, len(boxes))
        if held[i] * workers[j] + held[j] * workers[i]
    }


def _place_of_label(width: float, one: _Box, other: _Box, taken: Sequence[_Frame]) -> tuple[float, float]:
    """A point on the line between two boxes where a label covers nothing; the middle if there is none."""
    (x1, y1), (x2, y2) = one.centre, other.centre
    # Near the middle, but not in it, where all lines between opposite boxes would meet.
    for part in (0.42, 0.58, 0.46, 0.54, 0.38, 0.62, 0.34, 0.66, 0.5, 0.3, 0.7, 0.26, 0.74):
        x, y = x1 + part * (x2 - x1), y1 + part * (y2 - y1)
        label = _Frame.around(x, y, width, LABEL_HEIGHT)
        if not any(label.covers(frame) for frame in taken):
            return x, y
    return (x1 + x2) / 2, (y1 + y2) / 2


def _all_tasks(plan: Plan, box: _Box) -> list[PlannedTask]:
    nodes = set(box.group[0])
    return [task for task in plan.tasks if task.node in nodes]
