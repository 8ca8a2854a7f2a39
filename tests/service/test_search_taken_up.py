"""Another service takes over a search, on a fake Mesos: the search is unchanged, and no data is lost."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from dike.exceptions import BadInputError
from executor.trial_messages import Losses, RunEnd
from framework.mesos import events
from framework.scheduler.records import JobState
from framework.search.records import TrialState
from framework.search.store import Store
from framework.service.retention import remove_old_searches
from tests.search.search_stage import search_spec
from tests.search.stored_search import add_search
from tests.service.searches_stage import SearchesStage

LONG_AFTER_S = 1e10


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[SearchesStage]:
    made = SearchesStage(tmp_path)
    yield made
    made.kill()
    made.store.close()


@pytest.mark.slow
@pytest.mark.parametrize("is_launched", [False, True])
def test_under_another_checkpoint_root_it_resumes_where_its_checkpoints_are(
    stage: SearchesStage, tmp_path: Path, is_launched: bool
) -> None:
    stage.submit(search_spec(tmp_path, checkpoint_dir=""))
    slots = [stage.launch("s").task_id] if is_launched else []
    stage.service.cancel()
    stage.start(checkpoint_root="/elsewhere")
    assert stage.job("s").state is (JobState.RUNNING if is_launched else JobState.QUEUED), stage.job("s").failure
    assert stage.search("s").result.checkpoint_dir == f"/checkpoints/{stage.job('s').folder_name}"
    assert [slot.task_id for slot in stage.search("s").slots] == slots
    assert not stage.mesos.killed


def test_a_search_made_by_others_is_not_taken_for_the_jobs(stage: SearchesStage, tmp_path: Path) -> None:
    with contextlib.closing(Store(stage.store.database.url)) as store:
        spec = dataclasses.replace(search_spec(tmp_path), script="train.py")
        store.create_search(spec)
        stage.submit(search_spec(tmp_path))
        assert "There is a search 's' already" in stage.job("s").failure
        # It outlives the job.
        assert remove_old_searches(stage.store, LONG_AFTER_S) == ["s"]
        assert store.open_search("s") == spec


def test_a_search_learns_from_one_of_the_service_and_continues_when_that_is_removed(
    stage: SearchesStage, tmp_path: Path
) -> None:
    with contextlib.closing(Store(stage.store.database.url)) as store:
        add_search(store, search_spec(tmp_path, name="before"), [[3.0, 2.0 - 0.1 * number] for number in range(8)])
        asked = search_spec(tmp_path, policy="dike", warm_start_from=("before",))
        with pytest.raises(BadInputError, match="There is no search 'later' to learn from here"):
            stage.submit(dataclasses.replace(asked, warm_start_from=("later",)))
        stage.submit(asked)
        stage.launch("s")
        store.delete_search()
    stage.service.cancel()
    stage.start()
    assert stage.job("s").state is JobState.RUNNING, stage.job("s").failure


@pytest.mark.slow
def test_a_search_that_was_taken_over_ends_alone(stage: SearchesStage, tmp_path: Path) -> None:
    for name in ("s", "other"):
        stage.submit(search_spec(tmp_path, name=name, max_slots=1))
    slots = {name: stage.launch(name) for name in ("s", "other")}
    stage.take_over("s")
    for slot in slots.values():
        stage.say(slot, run=(0, 0), training=True, preemptible=True, checkpoint="/c/1", checkpoint_step=1)
    stage.service.tick()
    assert stage.job("s").state is JobState.FAILED
    assert "search 's' was taken over by process" in stage.job("s").failure
    assert stage.mesos.killed == [slots["s"].task_id]
    assert stage.job("other").state is JobState.RUNNING
    assert [trial.checkpoint for trial in stage.trials("other") if trial.runs] == ["/c/1"]
    assert [trial.checkpoint for trial in stage.trials("s") if trial.runs] == [None]


def test_the_end_of_a_search_that_was_taken_over_leaves_it_as_it_is(stage: SearchesStage, tmp_path: Path) -> None:
    stage.submit(search_spec(tmp_path))
    stage.take_over("s")
    stage.service.handle(events.KillRequested("s"))
    stage.service.tick()
    assert stage.job("s").state is JobState.KILLED
    with contextlib.closing(Store(stage.store.database.url)) as store:
        assert [summary.ended_s for summary in store.searches()] == [None]


@pytest.mark.slow
def test_a_trial_that_failed_ends_the_search_even_if_the_service_was_killed_at_that_moment(
    stage: SearchesStage, tmp_path: Path
) -> None:
    stage.submit(search_spec(tmp_path, max_slots=1, on_failure="abort"))
    slot = stage.launch("s")
    stage.say(slot, run=(0, 0), training=True, preemptible=True)
    report = {"type": "progress", "step": 1, "train_s": 1.0, "loss": 1.0, "low": 1.0, "high": 1.0, "count": 1}
    stage.send(slot, Losses(slot.task_id, 0, 0, (report,)).encode())
    stage.service.scheduler.save()
    end = RunEnd(0, 0, "bad_input", exit_code=2, message="lr is too small", tail="Traceback", reports=1)
    stage.say(slot, ends=(end,))
    assert stage.trials("s")[0].state is TrialState.FAILED
    stage.kill()
    stage.start()
    stage.say(slot, ends=(end,))
    stage.service.tick()
    assert stage.wanted(slot).run is None
    stage.update(slot, "TASK_FINISHED")
    stage.service.tick()
    assert stage.job("s").state is JobState.FAILED
    assert stage.job("s").failure == "trial 0 failed"
    assert [trial.runs for trial in stage.trials("s")] == [1, 0, 0]


@pytest.mark.slow
def test_a_task_that_comes_back_when_its_job_is_forgotten_is_ended(stage: SearchesStage, tmp_path: Path) -> None:
    stage.submit(search_spec(tmp_path, max_slots=1))
    slot = stage.launch("s")
    stage.service.handle(events.KillRequested("s"))
    stage.update(slot, "TASK_UNREACHABLE")
    stage.service.tick()
    assert stage.job("s").state is JobState.KILLED
    assert stage.store.delete_jobs(LONG_AFTER_S, remove_old_searches(stage.store, LONG_AFTER_S)) == 1
    stage.update(slot, "TASK_RUNNING")
    stage.service.tick()
    assert stage.mesos.killed[-1:] == [slot.task_id]
    stage.update(slot, "TASK_KILLED")
    stage.service.tick()
    assert len(stage.mesos.acknowledged) == 4
    assert stage.store.tasks() == []
