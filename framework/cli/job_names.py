"""Finds a job by its name, a prefix of it, or as the user's newest."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from typing import TYPE_CHECKING

from dike.exceptions import BadInputError
from framework.scheduler.records import NEWEST

if TYPE_CHECKING:
    from framework.scheduler.queue_options import QueueOptions
    from framework.service.api.client import ServiceClient
    from framework.service.api.schemas import JobDetails

MAX_SEARCHED_JOBS = 1000
"""Maximum number of jobs, newest first, that are compared with a prefix."""
MAX_SUGGESTIONS = 5
JOB_HELP = f"The job: its name, the start of its name, or '{NEWEST}' for your newest job."


def find_job(client: ServiceClient, name: str) -> JobDetails:
    """Returns the job of this name, the only one that starts with it, or the user's newest.

    Raises:
        BadInputError: if there is none, or several start with it; the message lists them, or similar names.
    """
    job = client.find(name) if name else None
    if job is not None:
        return job
    if name == NEWEST:
        return _newest(client)
    known = [job.id for job in itertools.islice(client.jobs(), MAX_SEARCHED_JOBS)]
    matches = [job_id for job_id in known if name and job_id.startswith(name)]
    if len(matches) == 1:
        return client.job(matches[0])
    if matches:
        more = f" and {len(matches) - MAX_SUGGESTIONS} more" if len(matches) > MAX_SUGGESTIONS else ""
        raise BadInputError(
            f"Several jobs start with '{name}': {', '.join(matches[:MAX_SUGGESTIONS])}{more}; give more of the name."
        )
    nearest = difflib.get_close_matches(name, known, MAX_SUGGESTIONS) or known[:MAX_SUGGESTIONS]
    hint = f"; similar names: {', '.join(nearest)}" if nearest else "; it has no jobs yet"
    raise BadInputError(f"The service at {client.url} has no job '{name}'{hint}.")


def with_job_ids(queue: QueueOptions, client: ServiceClient) -> QueueOptions:
    """Returns the options with the whole names of the jobs of `--after`.

    Raises:
        BadInputError: if one is unknown.
    """
    found = [dataclasses.replace(one, job_id=find_job(client, one.job_id).id) for one in queue.dependencies]
    return dataclasses.replace(queue, after=tuple(map(str, found)))


def _newest(client: ServiceClient) -> JobDetails:
    user = client.me().user
    job = next(client.jobs(user=user), None)
    if job is None:
        raise BadInputError(f"{user} has no job at {client.url} yet; submit one with dike submit.")
    return client.job(job.id)
