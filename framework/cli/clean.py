"""`dike clean`: removes old checkpoints of ended runs and searches."""

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

IN_USE = "in use"
YOUNG = "written to since"
UNKNOWN = "neither a run of dike run nor a search in the database"
RESUMABLE = "trials that --resume can continue"
BEST = "the best trial of its search"


@dataclass
class CleanupReport:
    """What is removed, or could be.

    Attributes:
        contents: path below the folder -> what is removed of it.
        left: reason for which something is kept -> count.
        errors: path -> why it cannot be read or removed.
    """

    contents: dict[str, Content] = field(default_factory=dict)
    left: Counter[str] = field(default_factory=Counter)
    errors: dict[str, str] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        return sum(content.size_bytes for content in self.contents.values())

    def to_json(self, folder: Path, *, removed: bool) -> dict[str, Any]:
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
    folder: Annotated[Path, typer.Argument(help="Folder that contains the runs' folders.")] = Path(RUNS_FOLDER),
    older_than: Annotated[
        str, typer.Option(metavar="TIME", help="Only folders that have not changed for this time, such as 30d or 12h.")
    ] = "30d",
    outputs: Annotated[
        bool,
        typer.Option("--outputs", help="Also remove what scripts have written and printed."),
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Remove the checkpoints; without it they are only listed.")
    ] = False,
    storage: StorageOption = None,
    output_format: Annotated[Format, typer.Option("--format", help="How to print the result.")] = Format.TABLE,
) -> None:
    """Removes old checkpoints.

    Lists the checkpoints of ended runs and searches; with --yes, removes them. Checkpoints of a search's best trial
    are never removed.
    """
    from framework.project.run_folders import RunFolders

    before_s = time.time() - read_age("--older-than")(older_than)
    if not folder.is_dir():
        raise BadInputError(f"The folder {folder} does not exist; name the folder that contains the runs' folders.")
    folders = RunFolders(folder, results_too=outputs)
    with _searches(folder, storage) as store:
        found = _scan(folder, folders, store, before_s, remove=yes)
    if output_format is Format.JSON:
        print_json(found.to_json(folder, removed=yes))
    else:
        _print(found, folder, removed=yes)
    if found.errors:
        path, reason = next(iter(found.errors.items()))
        raise DikeError(f"What is in {folder / path} cannot be {'removed' if yes else 'read'}: {reason}.")


@contextlib.contextmanager
def _searches(folder: Path, storage: str | None) -> Iterator[Store | None]:
    """Opens the database of the searches below a folder; yields None if there is none."""
    from framework.project.entry_point import SEARCHES_FILE
    from framework.search.store import Store

    beside = folder / SEARCHES_FILE
    if storage is None and not beside.exists():
        yield None
        return
    with contextlib.closing(Store(storage or f"sqlite:///{beside}", must_exist=True)) as store:
        yield store


def _scan(folder: Path, folders: RunFolders, store: Store | None, before_s: float, *, remove: bool) -> CleanupReport:
    """Finds what is old, and with `remove` removes it under the lock of its run or search."""
    from framework.project.run_folders import TRASH

    found = CleanupReport()
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
                _scan_search(folder, folders, name, store, search, found, before_s, remove=remove)
            else:
                _scan_run(folders, name, found, before_s, remove=remove)
        except OSError as error:
            found.errors[name] = str(error.strerror or error)
    return found


def _scan_run(folders: RunFolders, name: str, found: CleanupReport, before_s: float, *, remove: bool) -> None:
    from framework.project.run_folders import LOCK

    if LOCK not in folders.parts(name):
        found.left[UNKNOWN] += 1
        return
    with folders.lock_idle(name) as run:
        # A service's job with this --checkpoint-dir is its last owner.
        if run is None or folders.last_owner(name) not in (None, run):
            found.left[IN_USE] += 1
        else:
            _remove_if_old(folders, (name,), found, before_s, remove=remove)


def _scan_search(
    folder: Path,
    folders: RunFolders,
    name: str,
    store: Store,
    search: SearchSummary,
    found: CleanupReport,
    before_s: float,
    *,
    remove: bool,
) -> None:
    from framework.search.records import SearchOutcome

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
        result = SearchOutcome(spec.name, search.ended_s is not None, trials, spec.mode, spec.checkpoint_dir)
        dispensable = {f"trial-{trial.number}" for trial in result.dispensable()}
        best = {f"trial-{trial.number}" for trial in result.leading}
        known = {f"trial-{trial.number}" for trial in trials}
        for part in folders.parts(name):
            if part in dispensable:
                _remove_if_old(folders, (name, part), found, before_s, remove=remove)
            elif spec.entry.is_function and (folder / name / part).resolve() == spec.entry.script.parent.resolve():
                # The function that the trials call: needed while one of them may still run.
                if result.complete and not search.failure and all(trial.state.has_ended() for trial in trials):
                    _remove_if_old(folders, (name, part), found, before_s, remove=remove)
            elif part in known:
                found.left[BEST if part in best else RESUMABLE] += 1


def _remove_if_old(
    folders: RunFolders, path: tuple[str, ...], found: CleanupReport, before_s: float, *, remove: bool
) -> None:
    content = folders.content(*path)
    if content is None:
        return
    if content.changed_s >= before_s:
        found.left[YOUNG] += 1
        return
    if remove:
        folders.remove(*path)
    found.contents["/".join(path)] = content


def _print(found: CleanupReport, folder: Path, *, removed: bool) -> None:
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
