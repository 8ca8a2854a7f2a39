"""`dike clean`: removes old checkpoints of runs and searches that have ended."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dike.exceptions import BadInputError, DikeError
from framework.cli.trials import StorageOption
from framework.project.entry_point import RUNS_FOLDER
from framework.service.options import read_age
from solver.cli.output import Format, console, new_table, print_json, say
from solver.units import format_bytes

if TYPE_CHECKING:
    from framework.project.run_folders import Content, RunFolders
    from framework.search.store import SearchSummary, Store

IN_USE = "something runs there"
YOUNG = "written to since"
UNKNOWN = "no run of dike run, nor a search in the database"
MAY_GO_ON = "trials that --resume goes on with"
BEST = "the best trial of its search"


@dataclass
class Found:
    """What there is to remove.

    Attributes:
        contents: path below the folder -> what of it.
        left: why something is left alone -> how often.
        errors: path -> why it cannot be looked at or removed.
    """

    contents: dict[str, Content] = field(default_factory=dict)
    left: Counter[str] = field(default_factory=Counter)
    errors: dict[str, str] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        return sum(content.size_bytes for content in self.contents.values())

    def to_json(self, folder: Path, *, removed: bool) -> dict[str, Any]:
        """As JSON values."""
        contents = self.contents.items()
        return {
            "folder": str(folder),
            "removed": removed,
            "size_bytes": self.size_bytes,
            "folders": [
                {"path": path, "size_bytes": content.size_bytes, "changed_s": content.changed_s}
                for path, content in contents
            ],
            "left": dict(self.left),
            "errors": self.errors,
        }


def clean(
    folder: Annotated[Path, typer.Argument(help="The folder that the runs' folders are in.")] = Path(RUNS_FOLDER),
    older_than: Annotated[
        str, typer.Option(metavar="TIME", help="Only folders unchanged for this long, such as 30d or 12h.")
    ] = "30d",
    outputs: Annotated[
        bool,
        typer.Option("--outputs", help="Remove also what scripts have written and printed."),
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Remove the checkpoints; without it they are only listed.")
    ] = False,
    storage: StorageOption = None,
    output_format: Annotated[Format, typer.Option("--format", help="How to print the result.")] = Format.TABLE,
) -> None:
    """Removes old checkpoints.

    Lists those of runs and searches that have ended, and removes them with --yes. It never removes a best trial's.
    """
    from framework.project.run_folders import RunFolders

    before_s = time.time() - read_age("--older-than")(older_than)
    if not folder.is_dir():
        raise BadInputError(f"There is no folder {folder}; name the one that the runs' folders are in.")
    folders = RunFolders(folder, results_too=outputs)
    with _searches(folder, storage) as store:
        found = _look(folder, folders, store, before_s, remove=yes)
    if output_format is Format.JSON:
        print_json(found.to_json(folder, removed=yes))
    else:
        _print(found, folder, removed=yes)
    if found.errors:
        path, reason = next(iter(found.errors.items()))
        raise DikeError(f"What is in {folder / path} cannot be {'removed' if yes else 'looked at'}: {reason}.")


@contextlib.contextmanager
def _searches(folder: Path, storage: str | None) -> Iterator[Store | None]:
    """The database of the searches below a folder; None if there is none."""
    from framework.project.entry_point import SEARCHES_FILE
    from framework.search.store import Store

    beside = folder / SEARCHES_FILE
    if storage is None and not beside.exists():
        yield None
        return
    with contextlib.closing(Store(storage or f"sqlite:///{beside}", must_exist=True)) as store:
        yield store


def _look(folder: Path, folders: RunFolders, store: Store | None, before_s: float, *, remove: bool) -> Found:
    """Looks for what is old, and removes it if that is wanted, as long as nobody can begin to use it."""
    from framework.project.run_folders import TRASH

    found = Found()
    searches: dict[Path, SearchSummary] = {}
    if store is not None:
        searches = {Path(search.spec.checkpoint_dir).resolve(): search for search in store.searches()}
    if remove:
        try:
            folders.empty_trash()
        except OSError as error:
            found.errors[TRASH] = str(error.strerror or error)
    for name in folders.names():
        search = searches.get((folder / name).resolve())
        try:
            if search is not None and store is not None:
                _look_at_search(folder, folders, name, store, search, found, before_s, remove=remove)
            else:
                _look_at_run(folders, name, found, before_s, remove=remove)
        except OSError as error:
            found.errors[name] = str(error.strerror or error)
    return found


def _look_at_run(folders: RunFolders, name: str, found: Found, before_s: float, *, remove: bool) -> None:
    from framework.project.run_folders import LOCK

    if LOCK not in folders.parts(name):
        found.left[UNKNOWN] += 1
        return
    with folders.lock_idle(name) as run:
        # A job of a service that was told to use the folder claims it in its own name.
        if run is None or folders.last_owner(name) not in (None, run):
            found.left[IN_USE] += 1
        else:
            _take(folders, (name,), found, before_s, remove=remove)


def _look_at_search(
    folder: Path,
    folders: RunFolders,
    name: str,
    store: Store,
    search: SearchSummary,
    found: Found,
    before_s: float,
    *,
    remove: bool,
) -> None:
    from framework.search.records import SearchResult

    spec = search.spec
    last_sign_s = store.last_heartbeat_s(spec.name) or search.created_s
    if search.is_running:
        found.left[IN_USE] += 1
        return
    if last_sign_s >= before_s:
        found.left[YOUNG] += 1
        return
    with contextlib.ExitStack() as stack:
        if remove:
            try:
                stack.enter_context(store.lock(spec.name, last_sign_s=last_sign_s))
            except BadInputError:
                found.left[IN_USE] += 1
                return
        store.open_search(spec.name)
        trials = store.load_trials(readings=False)
        result = SearchResult(spec.name, search.ended_s is not None, trials, spec.mode, spec.checkpoint_dir)
        dispensable = {f"trial-{trial.number}" for trial in result.dispensable()}
        best = {f"trial-{trial.number}" for trial in result.leading}
        known = {f"trial-{trial.number}" for trial in trials}
        for part in folders.parts(name):
            if part in dispensable:
                _take(folders, (name, part), found, before_s, remove=remove)
            elif spec.entry.is_function and (folder / name / part).resolve() == spec.entry.script.parent.resolve():
                # The function that the trials call: needed as long as one may go on.
                if result.complete and not search.failure and all(trial.state.has_ended() for trial in trials):
                    _take(folders, (name, part), found, before_s, remove=remove)
            elif part in known:
                found.left[BEST if part in best else MAY_GO_ON] += 1


def _take(folders: RunFolders, path: tuple[str, ...], found: Found, before_s: float, *, remove: bool) -> None:
    content = folders.content(*path)
    if content is None:
        return
    if content.changed_s >= before_s:
        found.left[YOUNG] += 1
        return
    if remove:
        folders.remove(*path)
    found.contents["/".join(path)] = content


def _print(found: Found, folder: Path, *, removed: bool) -> None:
    from rich.text import Text

    out = console()
    if found.contents:
        table = new_table(f"Old checkpoints in {folder}", "folder", "size", "last written")
        for path, content in found.contents.items():
            written = time.strftime("%Y-%m-%d %H:%M", time.localtime(content.changed_s))
            table.add_row(Text(path), format_bytes(content.size_bytes), written)
        out.print(table)
    for path, reason in found.errors.items():
        say(out, f"left alone: {path} ({reason})")
    for reason, count in sorted(found.left.items()):
        say(out, f"left alone: {count} ({reason})")
    size = format_bytes(found.size_bytes)
    if not found.contents:
        say(out, "there is nothing to remove")
    elif removed:
        say(out, f"removed: {size}")
    else:
        say(out, f"nothing is removed; with --yes these {size} are")
