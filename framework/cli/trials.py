"""`dike trials [NAME]`: lists the searches, or the trials of one."""

from __future__ import annotations

import contextlib
import dataclasses
import html
import os
import shlex
import tempfile
import time
import webbrowser
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

import typer

from solver.cli.output import Format, console, print_json, say

if TYPE_CHECKING:
    from rich.console import Console

    from framework.search.records import Parameter, SearchSpec, TrialRecord
    from framework.search.store import SearchSummary

StorageOption = Annotated[
    str | None,
    typer.Option(
        envvar="DIKE_STORAGE",
        help="Database of searches: sqlite:///FILE or postgresql://...",
        show_default="dike-runs/searches.db",
    ),
]
INTERRUPT_CHECK_S = 0.5
"""Maximum time in which `--page` ends after Ctrl-C."""
MAX_SHOWN = 200
"""Maximum number of trials in a table: those that run, and the best."""
FormatOption = Annotated[Format, typer.Option("--format", help="How to print the result.")]


def trials(
    name: Annotated[
        str | None, typer.Argument(help="Name of the search; without it, all searches are listed.", show_default=False)
    ] = None,
    storage: StorageOption = None,
    page: Annotated[bool, typer.Option("--page", help="Show them in a browser, until you press Ctrl-C.")] = False,
    output_format: FormatOption = Format.TABLE,
) -> None:
    """Shows a search's trials, or lists the searches."""
    from framework.cli.search_tables import describe_best, resume_hint, search_state
    from framework.search.database import STORAGE_VARIABLE, default_storage
    from framework.search.records import best_trial, trials_to_resume
    from framework.search.speeds import SpeedTracker
    from framework.search.store import Store

    options = f"--storage {shlex.quote(storage)}" if storage and storage != os.environ.get(STORAGE_VARIABLE) else ""
    url = storage or default_storage()
    with contextlib.closing(Store(url, must_exist=True)) as store:
        if page:
            if name is not None:
                store.open_search(name)
            _show_until_interrupted(url, name)
            return
        if name is None:
            _list(store.searches(), options, output_format)
            return
        spec = store.open_search(name)
        [search] = store.searches(name)
        records = store.load_trials(readings=False)
        if not search.is_running:
            # A killed search has not stored that its trials no longer run.
            records = trials_to_resume(records, {})
        measured = SpeedTracker(store.load_slices(), {record.number: record for record in records})
    speeds = {record.number: measured.of(record) for record in records}
    if output_format is Format.JSON:
        listed = [{**record.to_json(), "samples_per_s": speeds[record.number]} for record in records]
        best = best_trial(records, spec.mode)
        print_json(
            {
                "name": name,
                "state": search_state(search),
                "failure": search.failure,
                "best": None if best is None else best.number,
                "trials": listed,
            }
        )
        return
    out = console()
    print_trials(out, records, spec, speeds)
    if reached := describe_best(records, spec.metric, spec.mode):
        out.print(f"Best: {reached}", markup=False, highlight=False, soft_wrap=True)
    for record in records:
        if record.error:
            out.print(f"trial {record.number}: {record.error.strip().splitlines()[-1]}", markup=False, soft_wrap=True)
    if advice := resume_hint(search, options):
        say(out, advice)


def _show_until_interrupted(url: str, name: str | None) -> None:
    from framework.scheduler.session import sigterm_as_interrupt

    with contextlib.suppress(KeyboardInterrupt), sigterm_as_interrupt(), shown_in_browser(url, name):
        while True:
            # Not `signal.pause`: a signal that another thread receives, or that comes just before, would not end it.
            time.sleep(INTERRUPT_CHECK_S)


@contextlib.contextmanager
def shown_in_browser(url: str, name: str | None) -> Iterator[None]:
    """Shows the searches of a database in a browser within the context; prints the page's address.

    Args:
        url: the database.
        name: the search to show first; None for the list.
    """
    from framework.service.search_page import search_page

    with search_page(url, name) as address:
        # Others could read a log; the address signs in.
        say(console(stderr=True), f"page: {address}")
        # Without a display, a browser would take over the terminal.
        if os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
            # Other accounts see the arguments of a browser, but not this file.
            with tempfile.NamedTemporaryFile("w", prefix="dike-page-", suffix=".html") as redirection:
                redirection.write(f'<meta http-equiv="refresh" content="0; url={html.escape(address)}">')
                redirection.flush()
                webbrowser.open(f"file://{redirection.name}")
                yield
        else:
            yield


def print_trials(
    out: Console,
    records: Sequence[TrialRecord],
    spec: SearchSpec,
    speeds: Mapping[int, Mapping[str, float]] = MappingProxyType({}),
) -> None:
    """Prints a table of trials, at most `MAX_SHOWN`. `speeds`: trial -> kind of slot -> samples/s."""
    from framework.cli.search_tables import most_interesting, trials_table
    from framework.search.records import best_trial

    shown = sorted(most_interesting(records, spec.mode, MAX_SHOWN), key=lambda record: record.number)
    out.print(trials_table(shown, spec, out.width, speeds=speeds, best=best_trial(records, spec.mode)))
    if len(records) > len(shown):
        say(
            out, f"the table has {len(shown)} of {len(records):,} trials; dike trials {spec.name} --format json has all"
        )


def _list(searches: list[SearchSummary], options: str, output_format: Format) -> None:
    from framework.cli.search_tables import resume_hint, searches_table

    if output_format is Format.JSON:
        print_json({"searches": [_to_json(search) for search in searches]})
    else:
        out = console()
        out.print(searches_table(searches, out.width) if searches else "There are no searches yet.")
        for search in searches:
            if advice := resume_hint(search, options):
                say(out, advice)


def _to_json(search: SearchSummary) -> dict[str, object]:
    from framework.cli.search_tables import search_state, trial_counts

    spec = search.spec
    return {
        "name": spec.name,
        "script": spec.script,
        "policy": spec.policy,
        "sampler": spec.sampler,
        "stop": spec.stop,
        "metric": spec.metric,
        "mode": spec.mode,
        "space": [_parameter_to_json(parameter) for parameter in spec.space],
        "trial_count": spec.trial_count,
        "state": search_state(search),
        "failure": search.failure,
        "created_s": search.created_s,
        "ended_s": search.ended_s,
        "trials": trial_counts(search),
    }


def _parameter_to_json(parameter: Parameter) -> dict[str, object]:
    values = dataclasses.asdict(parameter)
    return {**values, "low": None, "high": None} if parameter.choices else values
