"""A service's jobs as tables for the terminal."""

from __future__ import annotations

import datetime
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from framework.cli.search_tables import format_duration
from framework.scheduler.queue_options import Priority
from framework.scheduler.records import INTENDED, JobState, TaskRecord
from framework.search.records import TrialRecord, describe_parameters
from framework.service.explanation import AgentRow, Explanation, Verdict
from solver.cli.output import new_table
from solver.units import MIB, format_bytes

if TYPE_CHECKING:
    from framework.service.api.cluster_schemas import AgentView
    from framework.service.api.schemas import EventView, JobDetails, JobView

_STYLES = {JobState.RUNNING: "green", JobState.FAILED: "red", JobState.QUEUED: "dim", JobState.KILLED: "dim"}
WIDE_TERMINAL_COLUMNS = 120
"""Narrower terminals get fewer columns."""


def jobs_table(jobs: Sequence[JobView], width: int) -> Table:
    """Makes a table with one line per job.

    Args:
        jobs: in the order to show.
        width: width of the terminal in characters.
    """
    is_wide = width >= WIDE_TERMINAL_COLUMNS
    now_s = time.time()
    columns: list[tuple[str, Callable[[JobView], Text]]] = [
        ("job", lambda job: Text(job.id)),
        ("user", lambda job: Text(job.user)),
        ("state", lambda job: Text(_state(job), _STYLES.get(job.state, ""))),
    ]
    if any(job.waiting_s is not None for job in jobs):
        columns += [
            ("queue", lambda job: Text(str(job.queue_position or ""))),
            ("waiting", lambda job: Text("" if job.waiting_s is None else format_duration(job.waiting_s))),
        ]
    if is_wide:
        columns += [("kind", lambda job: Text(job.kind)), ("submitted", lambda job: Text(_date(job.submitted_s)))]
    else:
        columns += [("submitted", lambda job: Text(_short_date(job.submitted_s, now_s)))]
    columns += [
        ("time", lambda job: Text(_time(job, now_s))),
        ("tasks", lambda job: Text(str(job.live_tasks or ""))),
        ("progress", lambda job: Text(_progress(job))),
    ]
    table = new_table("Jobs", *(name for name, _ in columns))
    table.columns[0].no_wrap = True
    for job in jobs:
        table.add_row(*(cell(job) for _, cell in columns))
    return table


def remarks(jobs: Sequence[JobView]) -> list[str]:
    """Returns why jobs wait or failed, one line each: too long for the table."""
    return [f"{job.id}: {reason}" for job in jobs if (reason := job.failure or job.waiting)]


def describe_counts(counts: Mapping[JobState, int]) -> str:
    """Formats the number of jobs in each state: `2 running, 5 queued, 31 finished`."""
    order = (JobState.RUNNING, JobState.ENDING, JobState.QUEUED, JobState.FINISHED, JobState.FAILED, JobState.KILLED)
    return ", ".join(f"{counts[state]} {state}" for state in order if counts.get(state))


def facts_table(job: JobDetails, metric: str = "", best: TrialRecord | None = None) -> Table:
    """Makes a table of a job's details.

    Args:
        job: the job.
        metric: the objective, if it is a search.
        best: its best trial; None if there is none.
    """
    facts = {
        "state": _state(job)
        if job.queue_position is None
        else f"{_state(job)}, position {job.queue_position} in the queue",
        "failure": job.failure,
        "user": job.user,
        "script": job.script,
        "arguments": " ".join((job.request or {}).get("arguments", ())),
        "constraints": ", ".join(job.constraints),
        "priority": "" if job.priority is Priority.NORMAL else str(job.priority),
        "submitted": _date(job.submitted_s),
        "waiting": "" if job.waiting_s is None else format_duration(job.waiting_s),
        "started": _date(job.started_s),
        "ended": _date(job.ended_s),
        "progress": _progress(job),
        "best trial": "" if best is None else _trial(best, metric),
        "checkpoints": str((job.result or {}).get("checkpoint_dir") or ""),
        "waits for": job.waiting,
        "resume with": _resuming_command(job),
    }
    table = new_table(f"{job.kind.capitalize()} job {job.id}")
    for name, value in facts.items():
        if value:
            table.add_row(name, Text(value))
    return table


def last_events(events: Sequence[EventView], count: int) -> list[EventView]:
    """Returns the last events; of consecutive checkpoints only the newest."""
    shown = [
        event
        for event, following in itertools.zip_longest(events, events[1:])
        if event.kind != "checkpoint" or following is None or following.kind != "checkpoint"
    ]
    return shown[-count:]


def agents_table(agents: Sequence[AgentView]) -> Table:
    """Makes a table of a cluster's agents, with their used and last offered resources."""
    resources = ("cpus", "mem", "gpus")
    table = new_table(
        "Agents", "agent", "state", *(f"{name} used" for name in resources), "offered", "tasks", "attributes"
    )
    for agent in agents:
        table.add_row(
            Text(agent.node),
            Text("active") if agent.active else Text("gone", "red"),
            *(_used(agent, name) for name in resources),
            "never" if agent.offered is None else describe_amounts(agent.offered) or "nothing",
            str(len(agent.tasks) or ""),
            Text(", ".join(f"{name}:{value}" for name, value in agent.attributes.items())),
        )
    return table


def tasks_table(tasks: Sequence[TaskRecord]) -> Table:
    """Makes a table of a job's tasks, in the order of their launch."""
    table = new_table("Tasks", "task", "agent", "state", "launched", "time", "resources", "message")
    for task in tasks:
        table.add_row(
            Text(task.name),
            Text(task.node),
            # Stored before the launch; Mesos has not reported it yet.
            Text("launching" if task.state == INTENDED else task.state),
            _date(task.launched_s),
            format_duration((task.ended_s or time.time()) - task.launched_s),
            describe_amounts(task.resources),
            Text(task.message),
        )
    return table


def events_table(events: Sequence[EventView]) -> Table:
    """Makes a table of a job's events."""
    table = new_table("Last events", "time", "event", "")
    for event in events:
        table.add_row(_date(event.time_s), event.kind, Text(event.text))
    return table


def describe_amounts(amounts: dict[str, float]) -> str:
    """Formats amounts of resources, memory and disk given in MiB: `2 cpus, 1.0 GiB mem`."""
    parts = []
    for name, amount in amounts.items():
        is_bytes = name in ("mem", "disk")
        shown = name.removesuffix("s") if amount == 1 and not is_bytes else name
        parts.append(f"{format_bytes(amount * MIB) if is_bytes else f'{amount:g}'} {shown}" if amount else "")
    return ", ".join(filter(None, parts))


def print_explanation(out: Console, explanation: Explanation, now_s: float) -> None:
    """Prints an explanation; `now_s` in seconds since the epoch."""
    out.print(f"{explanation.job_id}: {explanation.sentence}", markup=False, soft_wrap=True)
    if explanation.needs:
        table = new_table("Minimum resources", "task", "count", "each")
        for need in explanation.needs:
            table.add_row(need.name, str(need.count), describe_amounts(need.amounts))
        out.print(table)
    if explanation.agents:
        out.print(_explanation_table(explanation.job_id, explanation.agents, now_s))
    if explanation.ahead:
        out.print(f"Ahead of it in the queue: {', '.join(explanation.ahead)}.", markup=False, soft_wrap=True)
    if explanation.verdict is Verdict.ENDED:
        return
    if explanation.last_offer_s is None:
        out.print("The Mesos master has sent no offer yet.")
    else:
        out.print(f"The last offer arrived {_ago(explanation.last_offer_s, now_s)}.")
    for sentence in explanation.could_be_freed:
        out.print(f"- {sentence}", markup=False, soft_wrap=True)


def _explanation_table(job_id: str, agents: tuple[AgentRow, ...], now_s: float) -> Table:
    table = new_table("Agents", "agent", "total", "free", "offered", "missing", "obstacles", "used by")
    table.columns[-1].overflow = "fold"
    for agent in agents:
        users = [
            f"{'this job' if job == job_id else job}: {describe_amounts(amounts)}"
            for job, amounts in agent.held_by_jobs.items()
        ]
        if any(agent.held_by_others.values()):
            users.append(f"other frameworks: {describe_amounts(agent.held_by_others)}")
        table.add_row(
            Text(agent.node),
            describe_amounts(agent.total),
            "unknown" if agent.free is None else describe_amounts(agent.free) or "nothing",
            "never" if agent.offered_s is None else _ago(agent.offered_s, now_s),
            describe_amounts(agent.missing),
            Text("\n".join(agent.obstacles)),
            Text("\n".join(users)),
        )
    return table


def _ago(seconds: float, now_s: float) -> str:
    return f"{format_duration(max(0.0, now_s - seconds))} ago"


def _used(agent: AgentView, resource: str) -> str:
    used, total = agent.used.get(resource, 0.0), agent.total.get(resource, 0.0)
    if resource == "mem":
        return f"{format_bytes(used * MIB)} of {format_bytes(total * MIB)}"
    return f"{used:g} of {total:g}" if total else ""


def _trial(trial: TrialRecord, metric: str) -> str:
    parts = [
        f"trial {trial.number}: {metric} {trial.value:.5g}",
        describe_parameters(trial.parameters),
        trial.checkpoint,
    ]
    return "; ".join(filter(None, parts))


def _resuming_command(job: JobDetails) -> str:
    """Returns the command that resumes a search with unfinished trials; empty for other jobs and users."""
    if job.request is None or job.trials is None or not job.state.has_ended():
        return ""
    ended = sum(count for state, count in job.trials.items() if state.has_ended())
    return f"dike tune --resume {job.id} --detach" if ended < job.request["spec"]["trial_count"] else ""


def _state(job: JobView) -> str:
    if job.kill_requested and not job.state.has_ended():
        return "ending"
    return str(job.state)


def _progress(job: JobView) -> str:
    if job.trials is not None:
        best = [] if job.best is None else [f"best {job.best:.4g}"]
        return ", ".join([f"{count} {state}" for state, count in job.trials.items() if count] + best)
    if job.progress is None:
        return ""
    loss = "" if job.progress.loss is None else f", loss {job.progress.loss:.4g}"
    return f"step {job.progress.step:,}{loss}"


def _time(job: JobView, now_s: float) -> str:
    """Formats the time since a job's first task started."""
    return "" if job.started_s is None else format_duration((job.ended_s or now_s) - job.started_s)


def _short_date(seconds: float, now_s: float) -> str:
    """Formats the time, with the date if it is not today."""
    then, now = (datetime.datetime.fromtimestamp(one).astimezone() for one in (seconds, now_s))
    return f"{then:%H:%M}" if then.date() == now.date() else f"{then:%m-%d %H:%M}"


def _date(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{datetime.datetime.fromtimestamp(seconds).astimezone():%Y-%m-%d %H:%M:%S}"
