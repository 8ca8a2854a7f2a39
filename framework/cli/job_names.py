"""Finding the job that a user means."""

from __future__ import annotations

import difflib
import itertools
from typing import TYPE_CHECKING

from dike.exceptions import BadInputError
from framework.scheduler.records import NEWEST

if TYPE_CHECKING:
    from framework.service.api.client import ServiceClient
    from framework.service.api.schemas import JobDetails

MAX_LOOKED_AT = 1000
"""Of how many jobs, the newest, the beginning of a name is looked for."""
MAX_SHOWN = 5
JOB_HELP = f"The job: its name, the beginning of it, or '{NEWEST}' for your newest."


def find_job(client: ServiceClient, name: str) -> JobDetails:
    """The job of this name, the only one that begins so, or the user's newest.

    Raises:
        BadInputError: if there is none, or several begin so; the message names them, or the nearest.
    """
    job = client.find(name) if name else None
    if job is not None:
        return job
    if name == NEWEST:
        return _newest(client)
    known = [job.id for job in itertools.islice(client.jobs(), MAX_LOOKED_AT)]
    meant = [job_id for job_id in known if name and job_id.startswith(name)]
    if len(meant) == 1:
        return client.job(meant[0])
    if meant:
        more = f" and {len(meant) - MAX_SHOWN} more" if len(meant) > MAX_SHOWN else ""
        raise BadInputError(
            f"Several jobs begin with '{name}': {', '.join(meant[:MAX_SHOWN])}{more}; write more of it."
        )
    nearest = difflib.get_close_matches(name, known, MAX_SHOWN) or known[:MAX_SHOWN]
    hint = f"; the nearest are {', '.join(nearest)}" if nearest else "; it has no jobs yet"
    raise BadInputError(f"The service at {client.url} knows no job '{name}'{hint}.")


def _newest(client: ServiceClient) -> JobDetails:
    user = client.me().user
    job = next(client.jobs(user=user), None)
    if job is None:
        raise BadInputError(f"{user} has no job at {client.url} yet; submit one with dike submit.")
    return client.job(job.id)
