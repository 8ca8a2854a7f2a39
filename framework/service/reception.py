"""What clients can ask of a service, from any thread: written to the database first, then told to the loop."""

from __future__ import annotations

import queue
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

from dike.exceptions import BadInputError
from framework import events
from framework.bundle import check, new_token
from framework.runner import new_job_id
from framework.service.mounts import NO_CONTAINERS, Mounts
from framework.service.own_search import reopen_search
from framework.service.records import JobKind, JobRecord
from framework.service.request_fields import NEWEST
from framework.service.requests import SearchJobRequest, TrainingRequest
from framework.service.store import ServiceStore


class Reception:
    """Takes clients' wishes in.

    Args:
        store: the service's database.
        inbox: what the service's loop reads (`framework.events.EventScheduler.events`).
        mounts: what jobs may ask for in their containers.
    """

    def __init__(
        self,
        store: ServiceStore,
        inbox: queue.SimpleQueue[events.Event],
        mounts: Mounts = NO_CONTAINERS,
    ) -> None:
        self.store = store
        self._inbox = inbox
        self._mounts = mounts

    def submit(self, request: TrainingRequest | SearchJobRequest, bundle: bytes, user: str) -> JobRecord:
        """Takes a job in; it is durable when this returns.

        Raises:
            BadInputError: if no job can have that name, or one has it already, the bundle is none, or the job asks for
                folders that it must not have.
        """
        asked = request.to_spec() if isinstance(request, SearchJobRequest) else request
        script, name = asked.script, asked.name
        check(bundle, script)
        self._mounts.check(request)
        if name == NEWEST:
            raise BadInputError(f"'{NEWEST}' is what commands call your newest job; choose another --name.")
        record = JobRecord(
            id=name or new_job_id(Path(script)),
            kind=JobKind(request.kind),
            user=user,
            script=script,
            request=request.model_dump(mode="json"),
            constraints=tuple(request.constraints),
            submitted_s=time.time(),
            bundle_token=new_token(),
        )
        self.store.add_job(record, bundle)
        self._inbox.put(events.JobSubmitted(record.id))
        return record

    def resume(self, record: JobRecord, user: str, constraints: Sequence[str] | None = None) -> None:
        """Has the service go on with a search that has ended, in a user's name; durable when this returns.

        Args:
            record: the search's job.
            user: who asks.
            constraints: which agents it may use from now on; None for those that it might use before.

        Raises:
            BadInputError: if that cannot be; see `reopen_search`.
        """
        reopen_search(self.store, record, user, constraints)
        self._inbox.put(events.JobSubmitted(record.id))

    def kill(self, record: JobRecord, user: str = "") -> None:
        """Asks for a job's end in a user's name; nothing happens to one that has ended."""
        if not record.state.has_ended():
            self.store.change_job(record.id, kill_requested=True)
            self._inbox.put(events.KillRequested(record.id, user))


def new_secret() -> str:
    """A token for a user."""
    return secrets.token_urlsafe(32)
