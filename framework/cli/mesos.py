"""`dike mesos up`, `status` and `down`: a private Mesos on this machine."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from dike.exceptions import BadInputError, DikeError
from solver.cli.output import Format, console, print_json

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)


@app.callback()
def mesos() -> None:
    """Starts and stops a private Apache Mesos on this machine."""


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise BadInputError(f"--agents is {text!r}; it must be a whole number of at least 1.")
    return int(text)


@app.command()
def up(
    agents: Annotated[str, typer.Option(metavar="N", help="Number of agents.")] = "1",
    resources: Annotated[
        str,
        typer.Option(
            help="Resources of each agent, such as 'cpus:4;mem:4096;gpus:2' (mem in MiB).",
            show_default="this machine's",
        ),
    ] = "",
    attributes: Annotated[str, typer.Option(help="Attributes of each agent, such as 'rack:r1'.")] = "",
) -> None:
    """Starts a private Mesos that runs until `dike mesos down`, and prints its master's address."""
    from framework.cli.mesos_options import warn
    from framework.embedded import detached
    from framework.embedded.access import PRINCIPAL, exposure_warning
    from framework.embedded.agents import AgentSpec

    cluster = detached.bring_up([AgentSpec(resources, attributes)] * _count(agents))
    print(cluster.master)
    warn(f"Other frameworks authenticate as '{PRINCIPAL}' with the secret in {cluster.secret_file} (HTTP basic).")
    if warning := exposure_warning():
        warn(warning)


@app.command()
def status(
    output_format: Annotated[Format, typer.Option("--format", help="How to print the result.")] = Format.TABLE,
) -> None:
    """Shows the master's address and the agents."""
    from rich.table import Table

    from framework.embedded import detached

    cluster = detached.find()
    if cluster is None:
        raise DikeError("No private Mesos is up: start one with `dike mesos up`.")
    description = cluster.describe()
    if output_format is Format.JSON:
        print_json(description)
        return
    table = Table("agent", "pid", "active", "cpus", "mem MiB", "gpus", "ports", "attributes", title=None)
    for agent in description["agents"]:
        table.add_row(*_row(agent))
    console().print(f"master {description['master']}", f"secret {description['secret_file']}", table, sep="\n")


def _row(agent: dict[str, Any]) -> list[str]:
    amounts = agent["resources"]
    scalars = [f"{amounts[name]:g}" if name in amounts else "-" for name in ("cpus", "mem", "gpus")]
    attributes = ";".join(f"{name}:{value}" for name, value in agent["attributes"].items())
    active = "yes" if agent["active"] else "no"
    return [agent["hostname"], str(agent["pid"]), active, *scalars, amounts.get("ports", "-"), attributes]


@app.command()
def down() -> None:
    """Stops the private Mesos and all tasks that run on it."""
    from framework.embedded import detached

    if not detached.take_down():
        print("No private Mesos was up.", file=sys.stderr)
