"""A killed search continues in the next service: nothing runs twice, and no report is lost."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from dike.exceptions import BadInputError
from framework.policies.trials.interface import PolicySettings
from framework.search.observer import SearchObserver
from framework.search.records import TrialState
from framework.search.run import SearchRequest, run_search
from framework.search.store import Store
from tests.search.recovery_stage import STEPS, RecoveryStage, loss_of
from tests.search.search_stage import search_spec

TRIALS = 4
MOST_LIVES = 12


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "policy"), list(enumerate(["rr", "dike", "hermes", "hermes2"])))
def test_a_search_survives_any_number_of_deaths(tmp_path: Path, seed: int, policy: str) -> None:
    spec = search_spec(tmp_path, trials=TRIALS, policy=policy, max_slots=2, settings=PolicySettings(quantum_s=3.0))
    stage = RecoveryStage(tmp_path, spec, seed)
    while not stage.search.done:
        if stage.fatal_call is None and stage.random.random() < 0.5:
            stage.fatal_call = stage.random.randint(1, 12)
        if stage.lives > MOST_LIVES:
            stage.fatal_call = None
        stage.step()
        assert stage.now < 5000, "it never ends"
    assert stage.lives > 5
    assert {record.state for record in stage.store.load_trials()} == {TrialState.FINISHED}
    # Every step of every trial exactly once, in spite of the restarts.
    losses = stage.store.load_losses()
    for trial in range(TRIALS):
        told = {report["step"]: report["loss"] for report in losses[trial]}
        assert told == {step: loss_of(trial, step) for step in range(1, STEPS + 1)}
        assert len(losses[trial]) == STEPS
    assert not stage.slots
    slices = stage.store.load_slices()
    assert {(piece.trial, piece.run) for piece in slices} == set(stage.began)
    assert all(piece.end_s is not None and piece.outcome in ("suspended", "finished") for piece in slices)


def test_a_search_that_cannot_continue_keeps_its_end(tmp_path: Path, storage: str) -> None:
    spec = search_spec(tmp_path)
    with closing(Store(storage)) as store:
        store.create_search(spec)
        store.finish_search("it was to end after 5 s")
        before = store.searches()
        with pytest.raises(BadInputError, match="does not exist any more"):
            run_search(SearchRequest(spec, storage, resume=True), SearchObserver())
        assert [(found.failure, found.ended_s) for found in store.searches()] == [
            (before[0].failure, before[0].ended_s)
        ]
        assert before[0].failure
