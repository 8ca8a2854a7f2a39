"""`dike agents`: a service's cluster; `dike agents measure`: its network."""

from __future__ import annotations

import dataclasses
import datetime
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dike.exceptions import BadInputError, JobFailedError
from framework.cli.mesos_options import MESOS_PANELS, mesos_access
from framework.cli.option_groups import with_options
from framework.cli.service_options import ServiceAccess, service_access
from framework.scheduler.task_options import AgentOptions
from solver.cli.help import with_panels
from solver.cli.option_groups import options_of, panels_of
from solver.cli.output import Format, console, new_table, print_json, say

if TYPE_CHECKING:
    from rich.table import Table

    from framework.scheduler.mesos_access import MesosAccess
    from framework.scheduler.network_measurement import NetworkReport

MIN_TRANSFER_BYTES, MAX_TRANSFER_BYTES = 4 * 2**20, 64 * 2**30
"""Bounds of --size. Shorter transfers end before their speed is measurable."""

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.callback(invoke_without_command=True)
@with_options(access=service_access)
def agents(
    *,
    context: typer.Context,
    access: ServiceAccess,
    output_format: Annotated[Format, typer.Option("--format", help="How to print the result.")] = Format.TABLE,
) -> None:
    """Shows the agents of a service's cluster.

    For each agent: the resources in use and its last offer.
    """
    if context.invoked_subcommand is not None:
        return
    with access.client() as client:
        cluster = client.cluster()
    if output_format is Format.JSON:
        print_json(cluster.model_dump(mode="json"))
    elif cluster.agents:
        from framework.cli.job_tables import agents_table

        console().print(agents_table(cluster.agents))
    else:
        print(
            "No agent is registered." if cluster.agents == [] else "The Mesos master has not reported its agents yet."
        )


PANELS = {
    "The transfers": ("size", "seconds"),
    **panels_of(AgentOptions),
    "Output": ("output", "output_format"),
    **MESOS_PANELS,
}


@app.command(cls=with_panels(PANELS))
@with_options(mesos=mesos_access, chosen=options_of(AgentOptions))
def measure(
    *,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="The network file to write (YAML).")
    ] = Path("network.yaml"),
    size: Annotated[str, typer.Option(metavar="SIZE", help="Maximum data that one transfer sends.")] = "64MiB",
    seconds: Annotated[float, typer.Option(min=0.1, max=60, help="Maximum time of one transfer, seconds.")] = 2.0,
    chosen: AgentOptions,
    mesos: MesosAccess,
    output_format: Annotated[Format, typer.Option("--format", help="How to print the result.")] = Format.TABLE,
) -> None:
    """Measures the network between the agents of a Mesos cluster.

    Runs a small task on each agent that has room. First one pair of tasks at a time sends data, then all tasks of a
    rack send to other racks. Writes a file for the --network option of dike run, dike plan and dike serve.
    """
    from framework.scheduler.network_measurement import TransferLimits, measure_network
    from solver.cluster_file import write_network
    from solver.units import parse_bytes

    try:
        limits = TransferLimits(int(parse_bytes(size)), seconds)
    except ValueError as error:
        raise BadInputError(f"'{size}' is not a value of --size: {error}.") from None
    if not MIN_TRANSFER_BYTES <= limits.size_bytes <= MAX_TRANSFER_BYTES:
        raise BadInputError(f"--size is {size}; it must be 4MiB to 64GiB.")
    if not output.parent.is_dir() or output.is_dir():
        raise BadInputError(f"The network file {output} cannot be written; name a file in an existing folder.")
    as_json = output_format is Format.JSON
    notify = functools.partial(say, console(stderr=True))
    report = measure_network(mesos, limits, chosen.constraints, lambda text: None if as_json else notify(text))
    for problem in report.problems:
        notify(problem)
    if not report.transfers:
        raise JobFailedError("No transfer was completed, so the network file is not written.")
    when = datetime.datetime.now().astimezone()
    about = f"Measured by dike agents measure on {when:%Y-%m-%d %H:%M}: up to {size} or {seconds:g} s a transfer, Gb/s."
    write_network(output, report.network(), about)
    if as_json:
        print_json(_as_json(report))
        return
    console().print(_table(report))
    across = report.across_racks_gbps
    if across is not None:
        say(console(), f"The slowest rack's uplink carries {across:.3g} Gb/s.")
    say(console(), f"wrote {output}; give it to dike run, dike plan or dike serve as --network")


def _as_json(report: NetworkReport) -> dict[str, Any]:
    return {
        "network_gbps": report.cards_gbps,
        "across_racks_gbps": report.across_racks_gbps,
        "racks": report.racks,
        "transfers": [dataclasses.asdict(one) for one in report.transfers],
        "problems": list(report.problems),
    }


def _table(report: NetworkReport) -> Table:
    table = new_table("Network", "agent", "rack", "sent", "received", "card")
    for agent, card in report.cards_gbps.items():
        alone = [one for one in report.transfers if not one.concurrent]
        sent = max((one.gbps for one in alone if one.sender == agent), default=None)
        received = max((one.gbps for one in alone if one.receiver == agent), default=None)
        cells = ("-" if gbps is None else f"{gbps:.3g} Gb/s" for gbps in (sent, received, card))
        table.add_row(agent, report.racks[agent] or "-", *cells)
    return table
