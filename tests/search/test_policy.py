"""The data that a search's policy gets from the database."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dike.exceptions import BadInputError
from framework.policies.trials.dike_policy import DikePolicy
from framework.policies.trials.earlier_trials import MIN_EARLIER_TRIALS
from framework.policies.trials.interface import SlotView, TrialView
from framework.search.objective import Objective
from framework.search.policy import earlier_trials, policy_of
from framework.search.records import SearchSpec, TrialRecord, TrialState
from framework.search.store import Store
from tests.search.search_stage import search_spec
from tests.search.stored_search import add_losses, add_search, report

STEPS = 20


def falls_late(step: int) -> float:
    return 3.0 if step <= STEPS / 2 else 0.5


def flattens(step: int) -> float:
    return max(1.5, 2.9 - 0.2 * step)


def curve(falls: Any, steps: int = STEPS) -> list[float]:
    return [falls(step) for step in range(1, steps + 1)]


CURVES = [curve(falls) for falls, count in ((falls_late, 3), (flattens, MIN_EARLIER_TRIALS - 3)) for _ in range(count)]


@pytest.fixture
def store(storage: str) -> Iterator[Store]:
    with contextlib.closing(Store(storage)) as store:
        yield store


def learning(tmp_path: Path, *names: str, **changes: Any) -> SearchSpec:
    return search_spec(tmp_path, name="new", policy="dike", warm_start_from=names, **changes)


def chosen(store: Store, spec: SearchSpec, *, resumed: bool = False, told: list[str] | None = None) -> int:
    """Of a trial that will fall late and one that has flattened the one that gets the slot."""
    objective = Objective(spec.metric, spec.mode, spec.value)
    trials = []
    for number, losses in enumerate((curve(falls_late, 9), curve(flattens, 9))):
        readings = [objective.reading(report(step, loss, value=loss)) for step, loss in enumerate(losses, 1)]
        trials.append(TrialView(number, 0.0, [reading for reading in readings if reading is not None], [0]))
    policy = policy_of(
        spec, store, [], resumed=resumed, notify=lambda text: None if told is None else told.append(text)
    )
    assert isinstance(policy, DikePolicy)
    return policy.decide(0.0, trials, [SlotView(0)]).runs[0].trial


def test_a_search_learns_from_trials_of_one_before(store: Store, tmp_path: Path) -> None:
    add_search(store, search_spec(tmp_path, name="before"), CURVES)
    store.create_search(learning(tmp_path, "before"))
    assert chosen(store, learning(tmp_path)) == 1
    assert chosen(store, learning(tmp_path, "before")) == 0
    assert store.spec.name == "new"


def test_only_trials_that_were_trained_to_their_end_say_anything(store: Store, tmp_path: Path) -> None:
    add_search(store, search_spec(tmp_path, name="before"), CURVES)
    for number, state in enumerate((TrialState.STOPPED, TrialState.FAILED, TrialState.SUSPENDED), len(CURVES)):
        store.save_trial(TrialRecord(number, {}, state))
        add_losses(store, number, 0, [report(1, 0.1)])
    # One that has reported nothing, or nothing but its beginning.
    store.save_trial(TrialRecord(len(CURVES) + 3, {}, TrialState.FINISHED))
    store.save_trial(TrialRecord(len(CURVES) + 4, {}, TrialState.FINISHED))
    add_losses(store, len(CURVES) + 4, 0, [report(0, 0.1)])
    assert [one.losses for one in earlier_trials(learning(tmp_path, "before"), store)] == CURVES


def test_several_searches_count_together_and_each_once(store: Store, tmp_path: Path) -> None:
    for name, curves in (("one", CURVES[:3]), ("two", CURVES[3:])):
        add_search(store, search_spec(tmp_path, name=name), curves)
    assert len(earlier_trials(learning(tmp_path, "one", "two", "one"), store)) == len(CURVES)
    with pytest.raises(
        BadInputError, match=f"3 trials of one were trained to their end; .* at least {MIN_EARLIER_TRIALS}"
    ):
        earlier_trials(learning(tmp_path, "one"), store)


def test_what_a_run_repeats_after_going_back_counts_once(store: Store, tmp_path: Path) -> None:
    add_search(store, search_spec(tmp_path, name="before"), CURVES)
    add_losses(store, 0, 1, [report(step, 0.25) for step in (STEPS - 2, STEPS - 1, STEPS, STEPS + 1)])
    one = earlier_trials(learning(tmp_path, "before"), store)[0]
    assert list(one.steps) == list(range(1, STEPS + 2))
    assert list(one.losses) == [*CURVES[0], 0.25]


def test_a_search_of_another_version_is_ignored(store: Store, tmp_path: Path) -> None:
    store.create_search(search_spec(tmp_path, name="strange"))
    store.change_search(dataclasses.replace(store.spec, mode="other"), {})  # type: ignore[arg-type]
    add_search(store, search_spec(tmp_path, name="before"), CURVES)
    assert len(earlier_trials(learning(tmp_path, "before"), store)) == len(CURVES)
    with pytest.raises(BadInputError, match="'strange' in this database was written by another version"):
        earlier_trials(learning(tmp_path, "strange"), store)


def test_batch_sizes_are_known(store: Store, tmp_path: Path) -> None:
    add_search(store, search_spec(tmp_path, name="before"), CURVES)
    store.save_trial(TrialRecord(0, {"batch_size": 32}, TrialState.FINISHED))
    one = earlier_trials(learning(tmp_path, "before"), store)[0]
    assert (list(one.steps), one.batch_size) == (list(range(1, STEPS + 1)), 32.0)


def test_a_search_for_something_else_is_refused(store: Store, tmp_path: Path) -> None:
    add_search(store, search_spec(tmp_path, name="before"), CURVES)
    asked = learning(tmp_path, "before", metric="accuracy", mode="max")
    with pytest.raises(
        BadInputError, match="'before' was for the least training loss, and this one is for the greatest acc"
    ):
        policy_of(asked, store, [], resumed=False, notify=print)


def test_one_that_is_not_there_is_refused_at_first_and_done_without_later(store: Store, tmp_path: Path) -> None:
    add_search(store, search_spec(tmp_path, name="before"), CURVES)
    with pytest.raises(BadInputError, match="There is no search 'befor' to learn from here; did you mean 'before'"):
        policy_of(learning(tmp_path, "befor"), store, [], resumed=False, notify=print)
    told: list[str] = []
    assert chosen(store, learning(tmp_path, "befor"), resumed=True, told=told) == 1
    assert "continues without learning from befor: There is no search 'befor'" in told[0]
    assert chosen(store, learning(tmp_path, "before"), resumed=True, told=told) == 0
    assert told[1:] == [f"learns from {len(CURVES)} trials of before"]
    # Another search of that name was made in the meantime.
    other = learning(tmp_path, "before", metric="accuracy", mode="max")
    assert chosen(store, other, resumed=True, told=told) == 0
    assert "was for the least training loss" in told[-1]


def test_a_policy_that_cannot_learn_is_refused(store: Store, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="--warm-start-from is for --policy dike; 'fifo' uses only"):
        policy_of(search_spec(tmp_path, warm_start_from=("before",)), store, [], resumed=False, notify=print)


def test_trials_that_reported_nothing_on_the_way_are_named(store: Store, tmp_path: Path) -> None:
    add_search(store, search_spec(tmp_path, name="before"), CURVES[:1])
    for number in (1, 2):
        store.save_trial(TrialRecord(number, {}, TrialState.FINISHED, value=1.0))
    with pytest.raises(BadInputError, match=r"1 trials of before were .* end, 2 more reported no loss on the way"):
        earlier_trials(learning(tmp_path, "before"), store)
