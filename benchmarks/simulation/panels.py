"""Figures of comparisons: a row of three panels for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Result = TypeVar("Result")
MAX_NAME_CHARS = 40
"""Maximum number of characters side by side below a panel."""


class Named(Protocol):
    @property
    def name(self) -> str: ...


def draw_rows(
    rows: Sequence[tuple[str, Sequence[Result]]],
    draw: Callable[[Sequence[Axes], Sequence[Result]], None],
    path: Path,
) -> None:
    """Draws a row of three panels for each comparison (title and results) into a PNG, SVG or PDF file.

    Raises:
        BadInputError: if the file cannot be written.
    """
    # matplotlib loads slowly, and tables do not need it.
    from solver.drawing.figure_files import check_picture_path, new_figure, save_figure

    check_picture_path(path)
    figure = new_figure(13, 3.6 * len(rows))
    for panels, (title, results) in zip(figure.subplots(len(rows), 3, squeeze=False), rows, strict=True):
        draw(panels, results)
        panels[0].set_title(title, loc="left", fontsize=11)
    figure.tight_layout()
    save_figure(figure, path)


def rotate_names(axes: Axes, results: Sequence[Named]) -> None:
    """Rotates the names below the bars if they would overlap."""
    if max(len(result.name) for result in results) * len(results) > MAX_NAME_CHARS:
        axes.tick_params(axis="x", labelrotation=30, labelsize=9)
