"""The tables of a result as values: `results/NAME.json` beside `results/NAME.md`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        heading: the heading, or line in bold, above it.
        rows: the cells, as text.
    """

    heading: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def column(self, name: str) -> dict[str, str]:
        """First cell -> the cell of that column; of several columns with the name, the first."""
        place = self.columns.index(name)
        return {row[0]: row[place] for row in self.rows}


def tables_in(lines: Iterable[str]) -> list[Table]:
    found: list[Table] = []
    heading = ""
    block: list[tuple[str, ...]] = []
    for line in [*lines, ""]:
        if line.startswith("|"):
            block.append(tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]))
            continue
        if len(block) > 2:
            found.append(Table(heading, block[0], tuple(block[2:])))
        block = []
        if bold := re.match(r"\*\*(.+?)\*\*|#+ (.+)", line):
            heading = bold[1] or bold[2]
    return found


def write(name: str, lines: Iterable[str]) -> None:
    """Writes the tables of a result's text."""
    entries = [asdict(table) for table in tables_in(lines)]
    (RESULTS / f"{name}.json").write_text(json.dumps(entries, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read(name: str, heading: str, column: str = "") -> Table:
    """Reads a table of the stored results.

    Args:
        name: name of the benchmark.
        heading: part of the table's heading.
        column: a column it has, if several tables share the heading.

    Raises:
        LookupError: if there is none: the benchmark has changed, and its readers must follow.
    """
    entries = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    for entry in entries:
        if heading in entry["heading"] and (not column or column in entry["columns"]):
            return Table(entry["heading"], tuple(entry["columns"]), tuple(map(tuple, entry["rows"])))
    raise LookupError(f"results/{name}.json has no table '{heading}' with a column '{column}'")


def number(cell: str) -> float:
    """The first number of a cell: `1,173 (1.97)` is 1173."""
    found = re.search(r"-?\d[\d,]*\.?\d*", cell)
    if found is None:
        raise LookupError(f"'{cell}' has no number")
    return float(found[0].replace(",", ""))


def in_brackets(cell: str) -> float:
    """The first number in brackets: `1,173 (1.97)` is 1.97."""
    return number(cell.partition("(")[2])
