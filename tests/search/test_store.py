"""What goes into the database of searches comes out, on SQLite and PostgreSQL."""

from __future__ import annotations

import dataclasses
import math
from contextlib import closing

import pytest

from dike.exceptions import BadInputError
from framework.search.records import SliceRecord, TrialRecord, TrialState
from framework.search.store import Store, read_spec
from tests.search.stored_search import FULL, SPEC, add_losses, report


def test_a_search_comes_back_as_it_was_asked_for(store: Store, url: str) -> None:
    with closing(Store(url, must_exist=True)) as other:
        read = other.open_search("digits")
    assert read == SPEC
    assert [type(value) for value in read.space[0].choices] == [float, int, bool, str]


def test_a_search_that_cannot_be_read_is_refused() -> None:
    for text in ("{}", "[]", "no JSON"):
        with pytest.raises(BadInputError, match="another version of Dike"):
            read_spec("digits", text)


def test_a_name_is_given_once(store: Store) -> None:
    with pytest.raises(BadInputError, match="--resume digits"):
        store.create_search(SPEC)


def test_an_unknown_name_gets_the_nearest_one_suggested(store: Store) -> None:
    with pytest.raises(BadInputError, match="did you mean 'digits'"):
        store.open_search("digit")
    with pytest.raises(BadInputError, match="dike trials"):
        store.open_search("something else")


def test_a_trial_comes_back_whole(store: Store) -> None:
    store.save_trial(dataclasses.replace(FULL, state=TrialState.WAITING, step=0))
    store.save_trial(FULL)
    bare = TrialRecord(1, {"lr": 1})
    store.save_trial(bare)
    assert store.load_trials() == [FULL, bare]


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 0.1])
def test_numbers_that_are_none_come_back_as_they_were(store: Store, number: float) -> None:
    store.save_trial(TrialRecord(0, {}, loss=number, value=number, convergence=number, metrics={"a": number}))
    add_losses(store, 0, 0, [report(1, number, metrics={"a": number}, value=number)])
    (trial,) = store.load_trials()
    (reading,) = trial.readings
    numbers = [trial.loss, trial.value, trial.convergence, trial.metrics["a"], reading.loss, reading.low, reading.high]
    for read in [*numbers, store.load_losses()[0][0]["value"]]:
        assert repr(read) == repr(number)


def test_slices_come_back_and_count_the_readings_before_them(store: Store) -> None:
    store.save_trial(TrialRecord(0, {}))
    first = SliceRecord(0, 0, slot=1, agent="node-1", start_s=100.0, reason="first slice")
    store.save_slice(first)
    assert store.load_slices() == [first]
    add_losses(store, 0, 0, [report(10, 2.0), report(20, 1.5)])
    closed = dataclasses.replace(
        first,
        end_s=110.0,
        first_step_s=101.0,
        to_step=20,
        outcome="suspended",
        suspend_s=0.5,
        kind="v100",
        samples_per_s=320.5,
        rss_bytes=2**40,
        cpu=1.5,
    )
    store.save_slice(closed)
    second = SliceRecord(0, 1, slot=2, agent="node-2", start_s=111.0, convergence=0.1, from_step=20, to_step=20)
    store.save_slice(second)
    add_losses(store, 0, 1, [report(30, 1.0)])
    assert store.load_slices() == [closed, second]
    assert store.load_trials()[0].slices == [0, 2]


def test_a_deleted_search_leaves_its_name_free(store: Store) -> None:
    store.save_trial(TrialRecord(0, {}))
    add_losses(store, 0, 0, [report(10, 3.0)])
    store.delete_search()
    assert store.searches() == []
    store.create_search(SPEC)
    assert store.load_trials() == []


def test_the_list_of_searches_says_how_each_stands(store: Store) -> None:
    store.save_trial(FULL)
    store.save_trial(TrialRecord(1, {}))
    with store.lock("digits"):
        (running,) = store.searches()
        assert running.is_running
        assert running.states == {TrialState.SUSPENDED: 1, TrialState.WAITING: 1}
        assert running.ended_s is None
    store.finish_search("interrupted")
    (ended,) = store.searches()
    assert (ended.is_running, ended.failure, ended.spec) == (False, "interrupted", SPEC)
    assert ended.ended_s is not None


def test_the_framework_id_is_kept(store: Store) -> None:
    assert store.framework_id("digits") is None
    store.set_framework_id("digits", "f-1")
    assert store.framework_id("digits") == "f-1"
