"""Routes of searches: trials, time slices, losses, importance."""

from __future__ import annotations

import shlex
import time
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query

from framework.scheduler.records import JobKind, JobRecord
from framework.search.importance import MIN_TRIALS, finished_trials, importances
from framework.search.records import SearchSpec, TrialRecord, best_trial, ranked
from framework.search.store import Store
from framework.search.trials import train_command
from framework.service.api.backend import Backend, Job, Service, SignedIn, may_manage
from framework.service.api.outputs import kept_model
from framework.service.api.schemas import (
    BestTrialView,
    ImportanceView,
    LossList,
    LossView,
    SliceList,
    SliceView,
    TrialList,
    TrialView,
)
from framework.service.requests import SearchJobRequest, stored_request

router = APIRouter(tags=["searches"])


@router.get("/jobs/{job_id}/trials")
def list_trials(service: Service, user: SignedIn, record: Job) -> TrialList:
    """A search's trials by number."""
    store = opened_search(service, record)
    found = [] if store is None else store.load_trials(readings=False)
    request = stored_request(record)
    assert isinstance(request, SearchJobRequest)
    spec = request.to_spec()
    now_s = time.time()
    views = [TrialView.model_validate(one).model_copy(update={"slot_s": one.held_s(now_s)}) for one in found]
    if not may_manage(record, user):
        hidden: dict[str, Any] = {"parameters": {}, "checkpoint": None, "error": ""}
        views = [view.model_copy(update=hidden) for view in views]
    order = ranked(found, spec.mode)
    best = best_trial(found, spec.mode)
    return TrialList(
        metric=spec.metric,
        mode=spec.mode,
        value=spec.value,
        trial_count=spec.trial_count,
        trials=views,
        best=None if best is None else _best_view(service, record, spec, best, is_yours=may_manage(record, user)),
        ranking=[trial.number for trial in order],
    )


def _best_view(
    service: Backend, record: JobRecord, spec: SearchSpec, best: TrialRecord, *, is_yours: bool
) -> BestTrialView:
    training = exporting = None
    if is_yours:
        training = train_command(spec, best)
        model = kept_model(service, record, best)
        if model is not None:
            exporting = shlex.join(["dike", "export", record.id, "-o", f"best{model.suffix}"])
    return BestTrialView(
        number=best.number,
        in_words=best.in_words(spec.metric),
        train_command=training,
        export_command=exporting,
    )


@router.get("/jobs/{job_id}/slices")
def list_slices(service: Service, record: Job) -> SliceList:
    """A search's time slices, in order of their start."""
    store = opened_search(service, record)
    found = [] if store is None else store.load_slices()
    return SliceList(slices=[SliceView.model_validate(one) for one in found])


@router.get("/jobs/{job_id}/losses")
def list_losses(
    service: Service,
    record: Job,
    trial: Annotated[int | None, Query(ge=0, le=2**31 - 1, description="Only of this trial.")] = None,
    limit: Annotated[
        int, Query(ge=2, le=2000, description="Answer with at most this many of each trial, evenly chosen.")
    ] = 200,
) -> LossList:
    """The losses that a search's trials reported, oldest first."""
    store = opened_search(service, record)
    reports = {} if store is None else store.load_losses(trial, limit)
    return LossList(losses={number: [LossView(**report) for report in ours] for number, ours in reports.items()})


@router.get("/jobs/{job_id}/importance")
def get_importance(service: Service, user: SignedIn, record: Job) -> ImportanceView:
    """The importance of each parameter for the objective, from the finished trials."""
    store = opened_search(service, record)
    found = [] if store is None else store.load_trials(readings=False)
    compared = len(finished_trials(found))
    if not may_manage(record, user):
        return ImportanceView(trials=compared, needed=MIN_TRIALS, importances={})
    request = stored_request(record)
    assert isinstance(request, SearchJobRequest)
    shares = importances(request.to_spec(), found)
    return ImportanceView(trials=compared, needed=MIN_TRIALS, importances=shares)


def opened_search(service: Backend, record: JobRecord) -> Store | None:
    """Opens a job's search for reading; None before it has begun. Raises a 404 for a training job."""
    if record.kind is not JobKind.SEARCH:
        raise HTTPException(404, f"Job '{record.id}' is a training job; it has no trials.")
    return service.searches.opened(record.id)
