"""`dike jobs [JOB]`: the jobs of a service, or one of them."""

from __future__ import annotations

import itertools
from typing import Annotated, Any

import typer

from framework.cli.job_names import JOB_HELP, find_job
from framework.cli.job_tables import events_table, facts_table, jobs_table, tasks_table
from framework.cli.service_options import ServiceAccess, with_service_options
from framework.service.client import ServiceClient
from framework.service.records import JobKind, JobState
from solver import Plan
from solver.cli.output import Format, console, print_json
from solver.cli.tables import print_layout

EVENTS_SHOWN = 20


@with_service_options
def jobs(
    *,
    job: Annotated[str | None, typer.Argument(help=JOB_HELP, show_default=False)] = None,
    user: Annotated[str | None, typer.Option(help="Only this user's.")] = None,
    ended: Annotated[bool, typer.Option("--all", help="Also those that have ended.")] = False,
    state: Annotated[list[JobState] | None, typer.Option(help="Only those in this state; repeatable.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many, the newest.")] = 100,
    access: ServiceAccess,
    output_format: Annotated[Format, typer.Option("--format", help="How to print the result.")] = Format.TABLE,
) -> None:
    """Shows the jobs of a service that have not ended, or one job: its tasks, its plan, what happened last."""
    with access.client() as client:
        if job is not None:
            _show_one(client, job, output_format)
            return
        states = tuple(state or (one for one in JobState if ended or not one.has_ended()))
        found = list(itertools.islice(client.jobs(user=user, states=states), limit))
    if output_format is Format.JSON:
        print_json({"jobs": [one.model_dump(mode="json") for one in found]})
    elif found:
        out = console()
        out.print(jobs_table(found, out.width))
    else:
        print("There are no such jobs; --all shows those that have ended, too.")


def _show_one(client: ServiceClient, name: str, output_format: Format) -> None:
    job = find_job(client, name)
    tasks = client.tasks(job.id)
    events = client.events(job.id)
    plan = client.plan(job.id) if job.kind is JobKind.TRAINING else None
    if output_format is Format.JSON:
        values: dict[str, Any] = {
            **job.model_dump(mode="json"),
            "tasks": [task.model_dump(mode="json") for task in tasks],
            "plan": plan,
            "events": [event.model_dump(mode="json") for event in events],
        }
        print_json(values)
        return
    out = console()
    out.print(facts_table(job))
    if plan is not None:
        print_layout(out, Plan.from_json(plan))
    if tasks:
        out.print(tasks_table(tasks))
    if events:
        out.print(events_table(events[-EVENTS_SHOWN:]))
