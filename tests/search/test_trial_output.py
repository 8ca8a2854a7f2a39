"""What trials print: on its way to the database each byte once and in order, in there bounded and in one piece."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from executor.trial_messages import TrialOutput
from framework.cli import logs
from framework.search import output
from framework.search.records import SliceRecord
from framework.search.store import Store
from tests.search.search_stage import FakeSlot, SearchStage

LINE = b"x" * 99 + b"\n"


def piece(run: int, offset: int, data: bytes, skipped: int = 0, trial: int = 0) -> TrialOutput:
    return TrialOutput("slot", trial, run, offset, data, skipped)


def said(store: Store, trial: int = 0, **wanted: Any) -> str:
    return "".join(chunk.text for chunk in store.load_output(trial, **wanted))


def test_the_runs_of_a_trial_are_one_text_that_says_where_each_begins(store: Store) -> None:
    store.save_slice(SliceRecord(0, 0, 0, "node-1", 1.0))
    store.save_slice(SliceRecord(0, 1, 2, "node-2", 2.0, from_step=450))
    store.add_output([piece(0, 0, b"begins\n"), piece(0, 7, b"is suspen"), piece(1, 0, b"other", trial=1)])
    store.add_output([piece(1, 0, b"goes on, \xc3\xa4 \0 \xff\n"), piece(1, 18, b"after a gap\n", 3)])
    assert said(store) == (
        "--- run 0 on node-1, from step 0 ---\nbegins\nis suspen\n"
        "--- run 1 on node-2, from step 450 ---\ngoes on, ä \ufffd \ufffd\n--- 3 B left out ---\nafter a gap\n"
    )
    assert said(store, 1) == "--- run 1 ---\nother"
    assert (store.output_received(0, 0), store.output_received(0, 1), store.output_received(0, 2)) == (16, 30, 0)
    # Reading page by page gives the same text.
    numbers = [chunk.number for chunk in store.load_output(0)]
    assert said(store, limit=2) + "".join(said(store, after=number, limit=1) for number in numbers[1:]) == said(store)


def test_of_much_output_the_beginning_and_the_end_stay(store: Store) -> None:
    many = 100_000
    for begin in range(0, many, 100):
        text = b"".join(b"%099d\n" % line for line in range(begin, begin + 100))
        store.add_output([piece(0, begin * 100, text)])
    kept = [line for line in said(store).splitlines() if not line.startswith("---")]
    assert output.TRIAL_BYTES / 2 < 100 * len(kept) <= output.TRIAL_BYTES
    numbers = [int(line) for line in kept]
    (cut,) = [at for at in range(1, len(numbers)) if numbers[at] != numbers[at - 1] + 1]
    assert numbers[:cut] == list(range(cut))
    assert numbers[cut:] == list(range(many - len(numbers) + cut, many))
    assert min(cut, len(numbers) - cut) > output.TRIAL_BYTES / 1000
    left_out = sum(chunk.text.count("left out") for chunk in store.load_output(0))
    assert left_out == 1
    # What is deleted with the search leaves nothing behind.
    store.delete_search()
    store.create_search(dataclasses.replace(store.spec, name="next"))
    assert said(store) == ""


@pytest.mark.parametrize(("trials", "limit"), [(1, 512 * 1024), (128, 512 * 1024), (512, 128 * 1024), (100_000, 671)])
def test_of_many_trials_less_is_kept_each(trials: int, limit: int) -> None:
    assert output.limit_of(trials) == limit
    assert limit * trials <= 64 * 2**20


def test_a_piece_that_is_too_large_by_itself_is_cut(store: Store) -> None:
    store.create_search(dataclasses.replace(store.spec, name="many", trial_count=100_000))
    for begin in range(0, 5000, 1000):
        store.add_output([piece(0, begin, b"".join(b"%06d \xc3\xa4\n" % at for at in range(begin, begin + 1000, 10)))])
        assert store.output_received(0, 0) == begin + 1000
    text = said(store)
    assert 300 < len(text.encode()) < 671
    assert text.startswith("--- run 0 ---\n--- 4.6 KiB left out ---\n")
    assert text.endswith("004990 ä\n")


def test_following_a_removed_search_ends(store: Store, url: str) -> None:
    store.add_output([piece(0, 0, b"begins\n")])
    with closing(Store(url)) as reader:
        reader.open_search("digits")
        with store.lock("digits"):
            chunks = logs._trial_output(reader, 0, 0, follow=True)
            assert next(chunks).text.endswith("begins\n")
            store.delete_search()
            assert list(chunks) == []


@pytest.fixture
def stage(begin: Any) -> SearchStage:
    stage: SearchStage = begin(trials=1)
    stage.offer(1)
    return stage


def prints(slot: FakeSlot, offset: int, data: bytes, skipped: int = 0) -> None:
    slot.stage.send(slot.slot, TrialOutput(slot.slot.task_id, *slot.key, offset, data, skipped).encode())


def test_what_is_missing_is_asked_for_and_what_comes_twice_counts_once(stage: SearchStage) -> None:
    (slot,) = stage.fakes.values()
    assert slot.wanted.acknowledged_output == ((0, 0, 0),)
    slot.train()
    prints(slot, 0, b"one\n")
    stage.tick(1.1)
    prints(slot, 8, b"three\n")
    stage.tick(1.1)
    assert said(stage.store) == "--- run 0 on agent-0, from step 0 ---\none\n"
    # The slot hears from where on, and sends what it has sent before, cut into other pieces.
    assert slot.wanted.acknowledged_output == ((0, 0, 4),)
    prints(slot, 4, b"two\nth")
    prints(slot, 0, b"one\ntwo\nthree\nfour\n")
    prints(slot, 30, b"nine\n", 11)
    stage.tick(1.1)
    assert said(stage.store).partition("---\n")[2] == "one\ntwo\nthree\nfour\n--- 11 B left out ---\nnine\n"
    stage.store.close()


def test_a_run_has_not_ended_before_its_output_is_there(stage: SearchStage) -> None:
    (slot,) = stage.fakes.values()
    slot.train()
    slot.end("finished", output=12)
    assert stage.trials[0].ended_s is None
    slot.status = dataclasses.replace(slot.status, run=(0, 0))
    prints(slot, 0, b"last words.\n")
    slot.say(run=None)
    stage.tick()
    assert stage.trials[0].ended_s is not None
    assert said(stage.store).endswith("last words.\n")
    stage.store.close()


def test_the_last_words_of_a_slot_hold_the_end_of_the_output(stage: SearchStage, tmp_path: Path) -> None:
    (slot,) = stage.fakes.values()
    slot.train()
    prints(slot, 0, b"one\n")
    end = TrialOutput(slot.slot.task_id, 0, 0, 10, b"four\n")
    slot.status = dataclasses.replace(slot.status, output=(end,))
    slot.update("TASK_KILLED", data=slot.status.encode())
    stage.tick(1.1)
    assert said(stage.store).endswith("one\n--- 6 B left out ---\nfour\n")
    stage.store.close()
