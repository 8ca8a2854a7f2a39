"""`dike explain JOB`: why a job does not run, or not yet."""

from __future__ import annotations

import dataclasses
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from framework.cli.job_names import JOB_HELP, find_job
from framework.cli.job_tables import describe_amounts
from framework.cli.search_tables import format_duration
from framework.cli.service_options import ServiceAccess, with_service_options
from framework.service.explanation import AgentRow, Explanation, Verdict
from solver.cli.output import Format, console, print_json
from solver.cli.tables import new_table


@with_service_options
def explain(
    *,
    job: Annotated[str, typer.Argument(help=JOB_HELP, show_default=False)],
    access: ServiceAccess,
    output_format: Annotated[Format, typer.Option("--format", help="How to print the result.")] = Format.TABLE,
) -> None:
    """Says what stands in a job's way: what is missing on which agent and by how much, and who holds it."""
    with access.client() as client:
        explanation = client.explain(find_job(client, job).id)
    if output_format is Format.JSON:
        print_json(dataclasses.asdict(explanation))
    else:
        print_explanation(console(), explanation, time.time())


def print_explanation(out: Console, explanation: Explanation, now_s: float) -> None:
    """Prints an explanation.

    Args:
        out: where to.
        explanation: what there is to say.
        now_s: seconds since the epoch.
    """
    out.print(f"{explanation.job_id}: {explanation.sentence}", markup=False, soft_wrap=True)
    if explanation.needs:
        table = new_table("It takes at least", "task", "count", "each")
        for need in explanation.needs:
            table.add_row(need.name, str(need.count), describe_amounts(need.amounts))
        out.print(table)
    if explanation.agents:
        out.print(_agents_table(explanation.agents, now_s))
    if explanation.ahead:
        out.print(f"Served before it: {', '.join(explanation.ahead)}.", markup=False, soft_wrap=True)
    if explanation.verdict is Verdict.ENDED:
        return
    if explanation.last_offer_s is None:
        out.print("No offer has come from the Mesos master yet.")
    else:
        out.print(f"The last offer came {_ago(explanation.last_offer_s, now_s)}.")
    for sentence in explanation.could_be_freed:
        out.print(f"- {sentence}", markup=False, soft_wrap=True)


def _agents_table(agents: tuple[AgentRow, ...], now_s: float) -> Table:
    table = new_table("Agents", "agent", "has", "free", "offered", "missing", "in the way", "held by")
    table.columns[-1].overflow = "fold"
    for agent in agents:
        holders = [f"{job}: {describe_amounts(amounts)}" for job, amounts in agent.held_by_jobs.items()]
        if any(agent.held_by_others.values()):
            holders.append(f"other frameworks: {describe_amounts(agent.held_by_others)}")
        table.add_row(
            Text(agent.node),
            describe_amounts(agent.total),
            "not known" if agent.free is None else describe_amounts(agent.free) or "nothing",
            "never" if agent.offered_s is None else _ago(agent.offered_s, now_s),
            describe_amounts(agent.missing),
            Text("\n".join(agent.obstacles)),
            Text("\n".join(holders)),
        )
    return table


def _ago(seconds: float, now_s: float) -> str:
    return f"{format_duration(max(0.0, now_s - seconds))} ago"
