"""`dike explain JOB`: why a job does not run yet."""

from __future__ import annotations

import dataclasses
import time
from typing import Annotated

import typer

from framework.cli.job_names import JOB_HELP, find_job
from framework.cli.option_groups import with_options
from framework.cli.service_options import ServiceAccess, service_access
from solver.cli.output import Format, console, print_json


@with_options(access=service_access)
def explain(
    *,
    job: Annotated[str, typer.Argument(help=JOB_HELP, show_default=False)],
    access: ServiceAccess,
    output_format: Annotated[Format, typer.Option("--format", help="How to print the result.")] = Format.TABLE,
) -> None:
    """Explains why a job does not run yet.

    Shows which resources are missing on each agent, and which jobs use them.
    """
    with access.client() as client:
        explanation = client.explain(find_job(client, job).id)
    if output_format is Format.JSON:
        print_json(dataclasses.asdict(explanation))
    else:
        from framework.cli.job_tables import print_explanation

        print_explanation(console(), explanation, time.time())
