"""Figure files: drawn without a display, byte-identical for the same figure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dike.exceptions import BadInputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".pdf", ".png", ".svg")


def check_picture_path(path: Path) -> None:
    """Validates the path of a picture.

    Raises:
        BadInputError: if the suffix is none of these, or the folder does not exist.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise BadInputError(f"'{path}' is not a picture file; use a name that ends in .pdf, .png or .svg.")
    if not path.absolute().parent.is_dir():
        raise BadInputError(f"The folder of the picture '{path}' does not exist; make it first.")


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches."""
    # Imported late, here and below: the import takes half as long as all others together.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Writes a PNG, SVG or PDF file.

    Raises:
        BadInputError: if the file cannot be written.
    """
    import matplotlib as mpl

    check_picture_path(path)
    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix.lower())
    try:
        # As text, so that an SVG can be searched.
        with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "dike"}):
            figure.savefig(path, dpi=110, metadata=metadata)
    except OSError as error:
        raise BadInputError(f"The picture '{path}' cannot be written: {error.strerror}.") from error
