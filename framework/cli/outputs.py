"""`dike outputs JOB`: lists or copies the files that a job's script has written."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dike.exceptions import BadInputError
from framework.cli.job_names import JOB_HELP, find_job
from framework.cli.option_groups import with_options
from framework.cli.service_options import ServiceAccess, service_access
from solver.cli.output import Format, console, new_table, print_json, say
from solver.units import format_bytes

if TYPE_CHECKING:
    from framework.service.api.schemas import OutputList


@with_options(access=service_access)
def outputs(
    *,
    job: Annotated[str, typer.Argument(help=JOB_HELP, show_default=False)],
    folder: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FOLDER", help="Copy the files into this folder.")
    ] = None,
    trial: Annotated[int | None, typer.Option(min=0, help="For a search: only this trial's files.")] = None,
    access: ServiceAccess,
    output_format: Annotated[Format, typer.Option("--format", help="How to print the result.")] = Format.TABLE,
) -> None:
    """Lists or copies the files that a job's script has written."""
    as_json = output_format is Format.JSON
    out = console(stderr=as_json)
    with access.client() as client:
        job_id = find_job(client, job).id
        found = client.outputs(job_id)
        if trial is not None:
            found = _of_trial(found, trial)
        if found.unreachable and not found.files:
            raise BadInputError(found.unreachable)
        if as_json:
            print_json(found.model_dump(mode="json"))
        elif folder is None:
            _print(found, job_id)
        if folder is not None:
            copies = client.download(job_id, folder, found.files)
            say(out, f"{len(copies)} file{'' if len(copies) == 1 else 's'} copied to {folder}")
            for file in found.files:
                if folder / file.path not in copies:
                    say(out, f"not copied: {file.path} no longer exists")
        for path, reason in found.left_behind.items():
            say(out, f"left behind: {path} ({reason})")
        if found.more:
            say(out, f"more files are in {found.folder}")


def _of_trial(found: OutputList, trial: int) -> OutputList:
    prefix = f"trial-{trial}/"
    files = [file for file in found.files if file.path.startswith(prefix)]
    left = {path: why for path, why in found.left_behind.items() if path.startswith(prefix)}
    if not files and not left:
        raise BadInputError(f"Trial {trial} has no outputs; dike outputs JOB lists those of all trials.")
    return found.model_copy(update={"files": files, "left_behind": left})


def _print(found: OutputList, job_id: str) -> None:
    from rich.text import Text

    table = new_table(f"Outputs of {job_id}", "file", "size", "written")
    for file in found.files:
        written = datetime.datetime.fromtimestamp(file.modified_s)
        table.add_row(Text(file.path), format_bytes(file.size_bytes), f"{written:%Y-%m-%d %H:%M:%S}")
    console().print(table)
