"""What clients can ask of a service, from any thread: written to the database first, then told to the loop."""

from __future__ import annotations

import queue
import secrets
import time
from pathlib import Path

from framework import events
from framework.bundle import check, new_token
from framework.runner import new_job_id
from framework.service.records import JobKind, JobRecord
from framework.service.requests import SearchJobRequest, TrainingRequest
from framework.service.store import ServiceStore


class Reception:
    """Takes clients' wishes in.

    Args:
        store: the service's database.
        inbox: what the service's loop reads (`framework.events.EventScheduler.events`).
    """

    def __init__(self, store: ServiceStore, inbox: queue.SimpleQueue[events.Event]) -> None:
        self.store = store
        self._inbox = inbox

    def submit(self, request: TrainingRequest | SearchJobRequest, bundle: bytes, user: str) -> JobRecord:
        """Takes a job in; it is durable when this returns.

        Raises:
            BadInputError: if there is a job of that name already, or the bundle is none.
        """
        is_search = isinstance(request, SearchJobRequest)
        script = request.to_spec().script if isinstance(request, SearchJobRequest) else request.script
        check(bundle, script)
        record = JobRecord(
            id=request.to_spec().name if isinstance(request, SearchJobRequest) else new_job_id(Path(script)),
            kind=JobKind.SEARCH if is_search else JobKind.TRAINING,
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

    def kill(self, record: JobRecord, user: str = "") -> None:
        """Asks for a job's end in a user's name; nothing happens to one that has ended."""
        if not record.state.has_ended():
            self.store.change_job(record.id, kill_requested=True)
            self._inbox.put(events.KillRequested(record.id, user))


def new_secret() -> str:
    """A token for a user."""
    return secrets.token_urlsafe(32)
