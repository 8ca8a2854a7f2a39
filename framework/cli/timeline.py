"""`dike timeline NAME`: shows the time slices of a search."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from framework.cli.trials import FormatOption, StorageOption
from solver.cli.output import Format, console, print_json

if TYPE_CHECKING:
    from framework.search.records import SliceRecord


def timeline(
    name: Annotated[str, typer.Argument(help="Name of the search.", show_default=False)],
    storage: StorageOption = None,
    output_format: FormatOption = Format.TABLE,
) -> None:
    """Shows which trial of a search used which slot, when and why."""
    from framework.cli.search_tables import slices_table
    from framework.search.database import default_storage
    from framework.search.store import Store

    with contextlib.closing(Store(storage or default_storage(), must_exist=True)) as store:
        store.open_search(name)
        [search] = store.searches(name)
        records = store.load_slices()
    for record in records:
        if record.end_s is None and not search.is_running:
            # A killed search has not stored the ends of its slices.
            record.outcome = "lost"
    if output_format is Format.JSON:
        print_json({"name": name, "slices": [_to_json(record) for record in records]})
    else:
        out = console()
        out.print(slices_table(records, out.width) if records else "No trial has run yet.")


def _to_json(record: SliceRecord) -> dict[str, Any]:
    from framework.search.objective import finite_or_none

    return {**dataclasses.asdict(record), "convergence": finite_or_none(record.convergence)}
