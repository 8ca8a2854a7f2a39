"""A search to put into a database, and a trial of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from framework.policies.trials.interface import Milestone, PolicySettings
from framework.search.records import Parameter, SearchSpec, TrialRecord, TrialState
from framework.search.store import Store, _add_losses

SPEC = SearchSpec(
    name="digits",
    script="/scripts/train.py",
    arguments=("--epochs", "2"),
    flags={"lr": "--lr"},
    space=(Parameter("lr", (0.1, 2, True, "x")), Parameter("units", low=2, high=64, is_integer=True, log=True)),
    sampler="tpe",
    trial_count=4,
    policy="hermes",
    settings=PolicySettings(milestones=(Milestone(0.5, 20.0),)),
    earlier_results=({"loss": 0.5, "nested": [1, 2]},),
    environment={"A": "b"},
)

FULL = TrialRecord(
    number=0,
    parameters={"lr": 0.1, "units": 3, "nesterov": True, "optimizer": "sgd"},
    state=TrialState.SUSPENDED,
    runs=2,
    failures=1,
    step=120,
    train_s=12.5,
    slot_s=14.0,
    loss=0.25,
    value=0.5,
    best_value=0.375,
    best_step=60,
    metrics={"accuracy": 0.9},
    convergence=0.01,
    checkpoint="/checkpoints/trial-0/run-1-step-120",
    checkpoint_step=120,
    agent="node-1",
    slot=3,
    batch_size=64.0,
    error="Traceback: ä",
    reports=7,
    created_s=1.7e9,
    ended_s=1.7e9 + 60,
)


def add_search(store: Store, spec: SearchSpec, curves: Sequence[Sequence[float]]) -> None:
    """Makes a search that has ended: a trial for each curve, which has a loss for each step."""
    store.create_search(spec)
    for number, losses in enumerate(curves):
        trial = TrialRecord(number, {"lr": 0.1}, TrialState.FINISHED, runs=1, step=len(losses), loss=losses[-1])
        store.save_trial(trial)
        add_losses(store, number, 0, [report(step, loss) for step, loss in enumerate(losses, 1)])
    store.finish_search()


def add_losses(store: Store, trial: int, run: int, reports: Sequence[Mapping[str, Any]]) -> None:
    """Keeps a run's reports, and leaves the trial unchanged."""
    with store._transaction() as connection:
        _add_losses(connection, store._require_id(), trial, run, reports)


def report(step: int, loss: float | None = None, **others: Any) -> dict[str, Any]:
    numbers = {} if loss is None else {"loss": loss, "low": loss, "high": loss, "count": 1}
    return {"step": step, "train_s": step * 0.5, **numbers, **others}
