"""From what the database has of a job to its state machine, for a new job and for one that goes on."""

from __future__ import annotations

from datetime import UTC, datetime

from framework.job_state import stored_checkpoint_dir
from framework.service.records import JobKind, JobRecord
from framework.service.requests import TrainingRequest, read_request
from framework.service.search_tenant import make_search
from framework.service.seat import Seat
from framework.service.sizing import TrainingSizing
from framework.service.surroundings import Surroundings
from framework.service.tenant import Tenant
from framework.service.watchers import Notebook, TrainingWatcher
from framework.training import TrainingJob


def make_tenant(record: JobRecord, seat: Seat, notebook: Notebook, around: Surroundings) -> Tenant:
    """A job's state machine; it goes on where `record.state_data` says.

    Raises:
        BadInputError: if what the database has of it cannot be used any more.
    """
    if record.kind is JobKind.SEARCH:
        return make_search(record, seat, notebook, around)
    return _training(record, seat, notebook, around)


def _training(record: JobRecord, seat: Seat, notebook: Notebook, around: Surroundings) -> TrainingJob:
    request = read_request(record.request)
    assert isinstance(request, TrainingRequest)
    never_before = record.id
    if request.name is not None:
        # Checkpoints outlive their jobs' records: those of an earlier job of this name are none of this one's.
        never_before += f"-{datetime.fromtimestamp(record.submitted_s, UTC):%Y%m%d-%H%M%S}"
    # Where it has checkpoints already it stays, should this service have another root.
    folder = request.checkpoint_dir or stored_checkpoint_dir(record.state_data)
    folder = folder or f"{around.checkpoint_root.rstrip('/')}/{never_before}"
    spec = request.to_spec(
        job_id=record.id,
        claims_as=never_before,
        checkpoint_dir=folder,
        bundle_url=around.bundle_url(record.bundle_token),
        python=around.python,
        container=around.mounts.container(request, folder),
        hand_out_gpus=around.hand_out_gpus,
    )
    seat.sizing = TrainingSizing(spec)
    if spec.elastic is not None:
        # It is found out in the background, from now on.
        around.demand("")
    watcher = TrainingWatcher(notebook, spec.is_chief)
    state = record.state_data and {**record.state_data, "received": around.store.received(record.id)}
    job = TrainingJob(
        spec,
        seat,
        watcher,
        around.agents(record.constraints),
        demand=around.demand,
        state=state,
        launched=seat.tasks.keys(),
        patient=True,
        background=seat.background,
    )
    last = around.store.last_progress(record.id) if record.state_data is not None else None
    if last is not None and job.result.steps is None:
        job.result.steps, job.result.loss = last.step, last.loss
    return job
