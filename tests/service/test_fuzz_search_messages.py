"""Arbitrary messages from the slots of a search: the search continues, and its database keeps its contents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from framework.mesos import events
from framework.search.records import TrialState
from tests.search.search_stage import FakeSlot, SearchStage, search_spec, stored
from tests.service.test_fuzz_messages import JSON, NUMBERS, ODD_TEXT, PATIENT, TASK, encoded, record

SMALL = st.integers(-1, 3)
USAGE = record(rss_bytes=SMALL, cpu=NUMBERS, gpu_mem_bytes=SMALL, gpu_utilisation=NUMBERS)
REPORT = record(
    type=st.just("progress"),
    step=NUMBERS,
    train_s=NUMBERS,
    loss=NUMBERS,
    low=NUMBERS,
    high=NUMBERS,
    count=NUMBERS,
    value=NUMBERS,
    metrics=st.dictionaries(ODD_TEXT, NUMBERS, max_size=2),
)
LOSSES = {
    "task_id": st.just(TASK),
    "trial": SMALL,
    "run": SMALL,
    "reports": st.lists(REPORT, max_size=2),
    "first": SMALL,
    "oldest": SMALL,
}
OUTPUT = {
    "task_id": st.just(TASK),
    "trial": SMALL,
    "run": SMALL,
    "offset": NUMBERS,
    "data": st.sampled_from(["", "AAAA", "/w==", "no base64"]),
    "skipped": SMALL,
}
END = record(
    trial=SMALL,
    run=SMALL,
    outcome=st.sampled_from(["finished", "suspended", "killed", "failed", "else"]),
    exit_code=SMALL,
    checkpoint=st.none() | ODD_TEXT,
    step=SMALL,
    message=ODD_TEXT,
    tail=ODD_TEXT,
    last=REPORT,
    preemptible=st.booleans(),
    suspend_s=NUMBERS,
    seconds=NUMBERS,
    usage=USAGE,
    log=ODD_TEXT,
    reports=SMALL,
    output=SMALL,
)
STATUS = {
    "task_id": st.just(TASK),
    "number": SMALL,
    "run": st.none() | st.tuples(SMALL, SMALL).map(list),
    "training": st.booleans(),
    "preemptible": st.booleans(),
    "suspending": st.booleans(),
    "step": NUMBERS,
    "checkpoint": st.none() | ODD_TEXT,
    "checkpoint_step": NUMBERS,
    "batch_size": NUMBERS,
    "ends": st.lists(END, max_size=2),
    "usage": USAGE,
    "zygote_ready": st.booleans(),
    "losses": st.lists(st.fixed_dictionaries(LOSSES), max_size=1),
    "output": st.lists(st.fixed_dictionaries(OUTPUT), max_size=1),
}
MESSAGES = st.one_of(
    JSON,
    record(kind=st.just("losses"), **LOSSES),
    st.fixed_dictionaries({"kind": st.just("losses"), **LOSSES}),
    record(kind=st.just("trial_output"), **OUTPUT),
    st.fixed_dictionaries({"kind": st.just("trial_output"), **OUTPUT}),
    record(kind=st.just("slot_status"), **STATUS),
    st.fixed_dictionaries({"kind": st.just("slot_status"), **STATUS}),
)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[SearchStage]:
    stage = SearchStage(search_spec(tmp_path, trials=40), f"sqlite:///{tmp_path}/search.db")
    stage.offer(2)
    for slot in stage.fakes.values():
        slot.train()
    try:
        yield stage
    finally:
        stage.store.close()


def honest(stage: SearchStage) -> FakeSlot:
    """The slot that always says what is."""
    return stage.fakes[max(stage.fakes)]


@PATIENT
@given(MESSAGES)
@example(
    {"kind": "losses", "task_id": TASK, "trial": 0, "run": 0, "first": 0, "oldest": 0, "reports": [{"step": 1e300}]}
)
def test_what_a_slot_says_ends_no_search(stage: SearchStage, tmp_path: Path, message: Any) -> None:
    liar = stage.fakes[min(stage.fakes)]
    stage.send(liar.slot, encoded(message, liar.slot.task_id))
    stage.tick(0.5)
    assert not stage.search.done
    assert honest(stage).wanted.run is not None
    assert all(isinstance(trial.state, TrialState) for trial in stored(f"sqlite:///{tmp_path}/search.db").values())


@PATIENT
@given(MESSAGES, st.sampled_from(["TASK_FAILED", "TASK_FINISHED", "TASK_LOST"]))
def test_the_last_words_of_a_slot_end_no_search(stage: SearchStage, tmp_path: Path, message: Any, state: str) -> None:
    liar = stage.fakes[min(stage.fakes)]
    scheduler = events.EventScheduler()
    status = {"task_id": {"value": liar.slot.task_id}, "agent_id": {"value": liar.slot.agent_id}, "state": state}
    scheduler.statusUpdate(None, {**status, "data": encoded(message, liar.slot.task_id)})
    stage.scheduler.handle(scheduler.events.get())
    stage.tick(0.5)
    assert not stage.search.done
    assert honest(stage).wanted.run is not None
    stored(f"sqlite:///{tmp_path}/search.db")
