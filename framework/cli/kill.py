"""`dike kill JOB...` ends jobs, `dike release JOB...` starts held ones."""

from __future__ import annotations

from typing import Annotated

import typer

from framework.cli.job_names import JOB_HELP, find_job
from framework.cli.option_groups import with_options
from framework.cli.service_options import ServiceAccess, service_access
from solver.cli.output import console, say


@with_options(access=service_access)
def kill(
    *,
    jobs: Annotated[list[str], typer.Argument(help=JOB_HELP, show_default=False)],
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the jobs end.")] = False,
    access: ServiceAccess,
) -> None:
    """Ends jobs.

    The trials of a search are suspended first, so that it can be resumed.
    """
    out = console()
    with access.client() as client:
        # An unknown name must be reported before any job is killed.
        found = {job.id: job for job in [find_job(client, name) for name in jobs]}
        for job in found.values():
            if job.state.has_ended():
                say(out, f"{job.id} has ended already: {job.state}")
            else:
                client.kill(job.id)
                say(out, f"ending {job.id}")
        if wait:
            for job_id in found:
                ended = client.wait_for_end(job_id, lambda text: say(out, text))
                say(out, f"{job_id} {ended.state.verb}")


@with_options(access=service_access)
def release(
    *, jobs: Annotated[list[str], typer.Argument(help=JOB_HELP, show_default=False)], access: ServiceAccess
) -> None:
    """Lets jobs start that were submitted with --hold."""
    out = console()
    with access.client() as client:
        for job in [find_job(client, name) for name in jobs]:
            client.release(job.id)
            say(out, f"released {job.id}")
