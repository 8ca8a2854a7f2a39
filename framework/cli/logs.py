"""`dike logs JOB`: what a job's tasks have written."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from framework.cli.job_names import JOB_HELP, find_job
from framework.cli.option_groups import with_options
from framework.cli.service_options import ServiceAccess, service_access
from solver.cli.output import console, say


@with_options(access=service_access)
def logs(
    *,
    job: Annotated[str, typer.Argument(help=JOB_HELP, show_default=False)],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Stay until the job has ended.")] = False,
    task: Annotated[str | None, typer.Option(help="Only this task's, such as worker:0.")] = None,
    tail: Annotated[
        int | None, typer.Option(min=0, help="Only the last so many lines, and with -f what comes.")
    ] = None,
    access: ServiceAccess,
) -> None:
    """Shows what a job prints.

    With -f the exit code is 1 if the job fails.
    """
    from framework.cli.following import check_success, print_output

    out = console(stderr=True)
    with access.client() as client:
        found = find_job(client, job)
        streams = {"stdout": sys.stdout, "stderr": sys.stderr}
        print_output(client, found, streams, lambda text: say(out, text), task=task, follow=follow, tail=tail)
        if follow:
            check_success(client.wait_for_end(found.id, lambda text: say(out, text)))
