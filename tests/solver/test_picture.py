"""The picture of a plan."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from matplotlib import image
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from dike.exceptions import BadInputError
from solver import PlanRequest, make_plan
from solver.drawing import picture
from solver.drawing.picture import COLOURS, draw_plan
from solver.grouping import group_nodes
from tests.solver.solver_cases import digits, k80, machines, profile


def _texts(path: Path) -> str:
    root = ET.parse(path).getroot()
    assert root.tag.endswith("svg")
    return "\n".join("".join(element.itertext()) for element in root.iter() if element.tag.endswith("text"))


def test_an_svg_names_machines_tasks_and_traffic(tmp_path: Path) -> None:
    plan = make_plan(PlanRequest(profile(), k80()))
    path = tmp_path / "plan.svg"
    draw_plan(plan, path)
    texts = _texts(path)
    for task in plan.tasks:
        assert task.node in texts
        assert task.name in texts
    assert "MiB" in texts


def test_the_labels_of_lines_cover_neither_boxes_nor_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(picture, "save_figure", lambda figure, path: drawn.append(figure))
    draw_plan(make_plan(PlanRequest(profile(), k80())), tmp_path / "plan.svg")
    (axes,) = drawn[0].axes
    renderer = FigureCanvasAgg(drawn[0]).get_renderer()
    labels = [text.get_window_extent(renderer) for text in axes.texts if text.get_text().endswith("iB")]
    frames = [patch.get_window_extent(renderer) for patch in axes.patches if isinstance(patch, Rectangle)]
    assert len(labels) > 3
    assert not any(one.overlaps(other) for one, other in itertools.combinations(labels, 2))
    assert not any(label.overlaps(frame) for label in labels for frame in frames)


def test_a_png_has_the_colours_of_the_roles(tmp_path: Path) -> None:
    path = tmp_path / "plan.png"
    draw_plan(make_plan(PlanRequest(digits(), machines(1))), path)
    pixels = (image.imread(path)[:, :, :3] * 255).round().astype(int)
    found = {f"#{r:02x}{g:02x}{b:02x}" for r, g, b in pixels.reshape(-1, 3)[::7].tolist()}
    assert set(COLOURS.values()) <= found


def test_many_machines_share_boxes(tmp_path: Path) -> None:
    plan = make_plan(PlanRequest(profile(), k80(300)))
    groups = group_nodes(plan.tasks)
    assert len(groups) <= 12
    assert {node for nodes, _ in groups for node in nodes} == {task.node for task in plan.tasks}
    path = tmp_path / "plan.svg"
    draw_plan(plan, path)
    assert "alike" in _texts(path)


@pytest.mark.parametrize("name", ["plan.jpg", "plan", "plan.png.txt"])
def test_other_suffixes_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInputError, match=r"ends in \.pdf, \.png or \.svg"):
        draw_plan(make_plan(PlanRequest(digits(), machines(1))), tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="folder"):
        draw_plan(make_plan(PlanRequest(digits(), machines(1))), tmp_path / "none" / "plan.png")
