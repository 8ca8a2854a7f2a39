"""`dike jobs [JOB]`: shows the jobs of a service, or one of them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from framework.cli.job_names import JOB_HELP, find_job
from framework.cli.option_groups import with_options
from framework.cli.service_options import ServiceAccess, service_access
from framework.scheduler.records import JobKind, JobState
from solver.cli.output import Format, console, print_json

if TYPE_CHECKING:
    from framework.service.api.client import ServiceClient
    from framework.service.api.schemas import JobDetails, JobView

EVENTS_SHOWN = 20
TRIALS_SHOWN = 10
PAGE_LIMIT = 1000
"""Maximum number of jobs in one answer of a service."""


@with_options(access=service_access)
def jobs(
    *,
    job: Annotated[str | None, typer.Argument(help=JOB_HELP, show_default=False)] = None,
    user: Annotated[str | None, typer.Option(help="Show only this user's jobs.")] = None,
    ended: Annotated[bool, typer.Option("--all", help="Also show jobs that have ended.")] = False,
    state: Annotated[list[JobState] | None, typer.Option(help="Show only jobs in this state; repeatable.")] = None,
    limit: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="Maximum number of jobs to show: running ones first, then the queue, then ended ones, newest first.",
        ),
    ] = 100,
    access: ServiceAccess,
    output_format: Annotated[Format, typer.Option("--format", help="How to print the result.")] = Format.TABLE,
) -> None:
    """Shows a service's jobs, or one of them.

    Without JOB: running jobs, then queued jobs in service order with their waiting times. --all adds ended jobs. With
    JOB: its tasks, its plan or its best trials, and its last events.
    """
    with access.client() as client:
        if job is not None:
            _show_one(client, job, output_format)
            return
        states = tuple(state or (one for one in JobState if ended or not one.has_ended()))
        found, counts, more = _listed(client, user, states, limit)
    if output_format is Format.JSON:
        print_json({"jobs": [one.model_dump(mode="json") for one in found], "counts": counts})
        return
    from framework.cli.job_tables import describe_counts, jobs_table, remarks

    out = console()
    if found:
        out.print(jobs_table(found, out.width))
        for line in remarks(found):
            out.print(line, markup=False, highlight=False, soft_wrap=True)
    else:
        print("No job matches" + ("." if ended or state else "; --all also shows jobs that have ended."))
    if counts:
        print(describe_counts(counts))
    if more:
        print(f"Only the first {limit} jobs are shown; --limit {2 * limit} shows more.")


def _listed(
    client: ServiceClient, user: str | None, states: tuple[JobState, ...], limit: int
) -> tuple[list[JobView], dict[JobState, int], bool]:
    """Returns jobs in the order of the queue, the number in each state, and whether there are more than `limit`."""
    found: list[JobView] = []
    for page in client.job_pages(user=user, states=states, order="queue", limit=min(limit, PAGE_LIMIT)):
        found += page.jobs
        if len(found) >= limit or page.before is None:
            return found[:limit], page.counts, len(found) > limit or page.before is not None
    raise AssertionError("the last page has no successor")


def _show_one(client: ServiceClient, name: str, output_format: Format) -> None:
    from framework.cli.job_tables import events_table, facts_table, last_events, tasks_table
    from framework.cli.search_tables import best_trials_table
    from framework.search.records import best_trials
    from solver import Plan
    from solver.cli.tables import print_layout

    job = find_job(client, name)
    tasks = client.tasks(job.id)
    events = client.events(job.id)
    plan = client.plan(job.id) if job.kind is JobKind.TRAINING else None
    found = client.trials(job.id) if job.kind is JobKind.SEARCH else None
    views = [] if found is None else found.trials
    found_trials = [view.to_record() for view in views]
    best = [] if found is None else best_trials(found_trials, found.mode)[:TRIALS_SHOWN]
    if output_format is Format.JSON:
        values: dict[str, Any] = {
            **job.model_dump(mode="json"),
            "tasks": [dataclasses.asdict(task) for task in tasks],
            "plan": plan,
            "best_trials": [trial.to_json() for trial in best],
            "events": [event.model_dump(mode="json") for event in events],
        }
        print_json(values)
        return
    out = console()
    out.print(facts_table(job, found.metric if found else "", best[0] if best else None))
    if found is not None and best:
        names = list(dict.fromkeys(name for trial in best for name in trial.parameters))
        out.print(best_trials_table(best, found.metric, found.value, names, _folder(job), out.width))
    if plan is not None:
        print_layout(out, Plan.from_json(plan))
    if tasks:
        out.print(tasks_table(tasks))
    if events:
        out.print(events_table(last_events(events, EVENTS_SHOWN)))


def _folder(job: JobDetails) -> str:
    """Returns the folder of a search's checkpoints; empty if unknown."""
    known = (job.result, (job.request or {}).get("spec"))
    return next((str(values["checkpoint_dir"]) for values in known if values and values.get("checkpoint_dir")), "")
