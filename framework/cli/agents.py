"""`dike agents`: the cluster as a service sees it."""

from __future__ import annotations

from typing import Annotated

import typer

from framework.cli.option_groups import with_options
from framework.cli.service_options import ServiceAccess, service_access
from solver.cli.output import Format, console, print_json


@with_options(access=service_access)
def agents(
    *,
    access: ServiceAccess,
    output_format: Annotated[Format, typer.Option("--format", help="How to print the result.")] = Format.TABLE,
) -> None:
    """Shows the agents of a service's cluster.

    Shows what of each agent is used, and what it offered last.
    """
    with access.client() as client:
        cluster = client.cluster()
    if output_format is Format.JSON:
        print_json(cluster.model_dump(mode="json"))
    elif cluster.agents:
        from framework.cli.job_tables import agents_table

        console().print(agents_table(cluster.agents))
    else:
        print("No agent is registered." if cluster.agents == [] else "The master has not told of its agents yet.")
