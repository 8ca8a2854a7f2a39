"""What `dike tune` does with the result of a search: prints it, and announces it (`--on-end`)."""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from dike.exceptions import BadInputError
from dike.trial import export
from framework.cli.search_view import print_result
from framework.project.entry_point import hint
from framework.project.failure_summary import failure_summary
from framework.search.database import default_storage
from framework.search.plots import plot_search
from framework.search.records import SearchOutcome, SearchSpec
from framework.search.store import Store
from framework.search.trials import train_command

ANNOUNCE_TIMEOUT_S = 60.0


def announce_end(target: str, result: SearchOutcome) -> None:
    """Posts the result as JSON to a URL, or runs a command with it as input. A failure is a warning.

    The JSON is that of `dike tune --format json`.
    """
    import httpx  # few searches need an HTTP client

    document = json.dumps(result.to_json()).encode()
    try:
        if target.startswith(("http://", "https://")):
            httpx.post(
                target, content=document, headers={"Content-Type": "application/json"}, timeout=ANNOUNCE_TIMEOUT_S
            ).raise_for_status()
        else:
            # The user's own command line; it is never read from a database, where others may write.
            command = ["/bin/sh", "-c", target]
            subprocess.run(command, input=document, stdout=sys.stderr, timeout=ANNOUNCE_TIMEOUT_S, check=True)
    except (httpx.HTTPError, httpx.InvalidURL, OSError, subprocess.SubprocessError) as error:
        print(f"dike: the end of the search could not be announced (--on-end): {error}", file=sys.stderr)


def report(console: Console, result: SearchOutcome, spec: SearchSpec, storage: str) -> None:
    """Prints the best trials and the command that repeats the best one; plots the search beside local checkpoints."""
    print_result(console, result, spec)
    if "://" not in spec.checkpoint_dir and any(trial.value is not None for trial in result.trials):
        _draw(console, spec, storage)
    if repeats := _repeats(result):
        console.print(f"Trials with the same parameters as an earlier one: {repeats}", markup=False, soft_wrap=True)
    for text in _hints(result, spec):
        console.print(text, markup=False, soft_wrap=True)
    command = None if result.best is None else train_command(spec, result.best)
    if command is not None:
        console.print(f"Train with the parameters of the best trial:\n{command}", markup=False, soft_wrap=True)
    exporting = exporting_command(result, storage)
    if exporting is not None:
        console.print(f"Export the model of the best trial's best epoch:\n{exporting}", markup=False, soft_wrap=True)
    which = "N" if result.best is None else str(result.best.number)
    named = "" if storage == default_storage() else f" --storage {shlex.quote(storage)}"
    console.print(
        f"Show the output of a trial: dike logs {spec.name} --trial {which}{named}", markup=False, soft_wrap=True
    )


def exporting_command(result: SearchOutcome, storage: str) -> str | None:
    """Returns the command that exports the best trial's model; None if no model can be read from this machine."""
    best = result.best
    if best is None:
        return None
    try:
        kept = export.find_model(f"{result.checkpoint_dir.rstrip('/')}/trial-{best.number}", None, best.best_step)
    except BadInputError:
        return None
    elsewhere = [] if storage == default_storage() else ["--storage", storage]
    return shlex.join(["dike", "export", result.name, *elsewhere, "-o", f"best{kept.suffix}"])


def _repeats(result: SearchOutcome) -> str:
    """Lists trials with the parameters of an earlier one: `5 (as 2)`."""
    first: dict[tuple[tuple[str, object], ...], int] = {}
    pairs = [(trial.number, first.setdefault(tuple(trial.parameters.items()), trial.number)) for trial in result.trials]
    return ", ".join(f"{number} (as {earlier})" for number, earlier in pairs if number != earlier)


def _hints(result: SearchOutcome, spec: SearchSpec) -> set[str]:
    """Returns advice for trials that did not find an environment variable or a file."""
    errors = (failure_summary(trial.error) for trial in result.trials if trial.error)
    return {text for error in errors if (text := hint(error, spec.entry, spec.environment))}


def _draw(console: Console, spec: SearchSpec, storage: str) -> None:
    path = Path(spec.checkpoint_dir) / "search.png"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        console.print(f"The search cannot be plotted: {error}", markup=False, soft_wrap=True)
        return
    with contextlib.closing(Store(storage)) as store:
        store.open_search(spec.name)
        plot_search(spec, store.load_trials(), store.load_slices(), store.load_losses(), path)
    console.print(f"Plot of the losses, the slots and the best value over time: {path}", markup=False, soft_wrap=True)
