"""A service resumes a search that has ended, on a fake Mesos: no step is repeated."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dike.exceptions import BadInputError
from executor.trial_messages import Losses, RunEnd
from framework.mesos import events
from framework.project import bundle
from framework.scheduler.journal import StorageUnavailableError
from framework.scheduler.records import JobState
from framework.search.records import Parameter, TrialState
from framework.search.recovery import SearchState
from framework.search.slots import Slot
from framework.search.store import Store
from framework.service.requests import Resumption, read_request
from framework.service.users import OverLimitError, UserLimits
from tests.search.search_stage import search_spec
from tests.service.api_stage import training
from tests.service.searches_stage import SearchesStage

LOSS = {"loss": 1.0, "low": 1.0, "high": 1.0, "count": 1}
REPORT = {"type": "progress", "step": 1, "train_s": 1.0, **LOSS, "value": 1.0}


class ResumingStage(SearchesStage):
    """A stage whose search `s` ends and is resumed."""

    def run_ends(self, slot: Slot, trial: int, outcome: str, run: int = 0) -> None:
        """A trial that was given the slot trains one step and is over, with a checkpoint."""
        self.say(slot, run=(trial, run), training=True, preemptible=True)
        self.send(slot, Losses(slot.task_id, trial, run, (REPORT,)).encode())
        exit_code = 2 if outcome == "bad_input" else 0
        end = RunEnd(trial, run, outcome, exit_code, f"/c/{trial}", step=1, message="no", tail="", reports=1)
        self.say(slot, ends=(end,))
        self.service.tick()

    def slot_ends(self, slot: Slot) -> None:
        assert self.wanted(slot).leave
        self.update(slot, "TASK_FINISHED")
        self.service.tick()

    def kill_job(self) -> None:
        self.submissions.kill(self.job("s"), "ann")
        self.deliver()

    def resume(self, user: str = "ann", **options: Any) -> None:
        self.submissions.resume(self.job("s"), user, Resumption(**options))

    def refused(self) -> str:
        before, asked = self.job("s"), self.inbox.qsize()
        with pytest.raises(BadInputError) as refusal:
            self.resume()
        assert (self.job("s"), self.inbox.qsize()) == (before, asked)
        return str(refusal.value)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[ResumingStage]:
    made = ResumingStage(tmp_path)
    yield made
    made.kill()
    made.store.close()


def is_killed_halfway(stage: ResumingStage, folder: Path) -> Slot:
    """Of three trials one has finished and one is suspended when the search is killed; its slot."""
    stage.submit(search_spec(folder, max_slots=1, checkpoint_dir=""))
    slot = stage.launch("s")
    stage.run_ends(slot, 0, "finished")
    stage.kill_job()
    stage.run_ends(slot, 1, "suspended")
    stage.slot_ends(slot)
    assert stage.job("s").state is JobState.KILLED
    return slot


@pytest.mark.slow
@pytest.mark.parametrize("heard", [True, False])
def test_a_killed_search_resumes_where_it_was(stage: ResumingStage, tmp_path: Path, heard: bool) -> None:
    before = is_killed_halfway(stage, tmp_path)
    stage.resume("root")
    if heard:
        stage.deliver()
    else:
        # The service is killed before it hears of it; the next one has other ideas of where checkpoints are.
        stage.kill()
        stage.start(checkpoint_root="/elsewhere")
    job = stage.job("s")
    assert (job.state, job.user, job.ended_s, job.failure, job.result) == (JobState.QUEUED, "ann", None, "", None)
    assert not job.kill_requested
    told = [event.text for event in stage.store.history.events("s") if event.kind in ("ended", "note")]
    assert told[-2:] == ["killed by ann", "resumed by root"]

    slot = stage.launch("s")
    assert slot.task_id != before.task_id
    run = stage.wanted(slot).run
    assert run is not None
    assert (run.key, run.trial.resume_from) == ((1, 1), "/c/1")
    assert run.trial.folder == f"/checkpoints/{job.folder_name}/trial-1"
    stage.run_ends(slot, 1, "finished", run=1)
    stage.run_ends(slot, 2, "finished")
    stage.slot_ends(slot)
    assert stage.job("s").state is JobState.FINISHED
    assert [(trial.state, trial.runs) for trial in stage.trials("s")] == [
        (TrialState.FINISHED, runs) for runs in (1, 2, 1)
    ]
    assert stage.refused().startswith("The search 's' is complete; add trials with --trials N")


@pytest.mark.slow
def test_a_complete_search_gets_more_trials_and_values(
    stage: ResumingStage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = (Parameter("lr", (0.1, 0.2)),)
    stage.submit(search_spec(tmp_path, max_slots=1, checkpoint_dir="", space=space, sampler="grid", trial_count=2))
    slot = stage.launch("s")
    for trial in range(2):
        stage.run_ends(slot, trial, "finished")
    stage.slot_ends(slot)
    assert stage.job("s").state is JobState.FINISHED
    with monkeypatch.context() as limited:
        limited.setattr(stage.store, "limits", lambda user: UserLimits(trials=2))
        with pytest.raises(OverLimitError, match=r"is 2, and this one has 3"):
            stage.resume(space=(Parameter("lr", (0.3,)),))
    stage.resume(space=(Parameter("lr", (0.3,)),))
    stage.deliver()
    assert stage.job("s").request["spec"]["trial_count"] == 3
    slot = stage.launch("s")
    stage.run_ends(slot, 2, "finished")
    stage.slot_ends(slot)
    assert stage.job("s").state is JobState.FINISHED
    assert [trial.parameters for trial in stage.trials("s")] == [{"lr": 0.1}, {"lr": 0.2}, {"lr": 0.3}]


@pytest.mark.slow
def test_a_trial_that_has_ended_the_search_once_does_not_end_it_again(stage: ResumingStage, tmp_path: Path) -> None:
    stage.submit(search_spec(tmp_path, max_slots=1, on_failure="abort"))
    slot = stage.launch("s")
    stage.run_ends(slot, 0, "bad_input")
    stage.slot_ends(slot)
    assert stage.job("s").failure == "trial 0 failed"
    stage.resume()
    stage.deliver()
    slot = stage.launch("s")
    stage.kill()
    stage.start()
    assert stage.job("s").state is JobState.RUNNING
    stage.run_ends(slot, 1, "finished")
    stage.run_ends(slot, 2, "bad_input")
    stage.slot_ends(slot)
    assert stage.job("s").failure == "trial 2 failed"


@pytest.mark.slow
def test_its_time_begins_anew(stage: ResumingStage, tmp_path: Path) -> None:
    stage.submit(search_spec(tmp_path, max_slots=1, timeout_s=1000.0))
    slot = stage.launch("s")
    stage.kill()
    state = stage.job("s").state_data
    assert state is not None
    long_ago = dataclasses.replace(SearchState.from_json(state), began_s=1e9, first_slot_s=1e9)
    stage.store.change_job("s", state_data=long_ago.to_json())
    stage.start()
    stage.say(slot)
    stage.service.tick()
    stage.slot_ends(slot)
    assert "its time limit of 1000 s" in stage.job("s").failure
    stage.resume()
    stage.deliver()
    assert stage.launch("s").id == 1


@pytest.mark.slow
def test_no_slot_is_called_like_one_before(stage: ResumingStage, tmp_path: Path) -> None:
    stage.submit(search_spec(tmp_path, max_slots=1))
    before = stage.launch("s", comes_up=False)
    stage.kill_job()
    stage.update(before, "TASK_KILLED")
    stage.service.tick()
    stage.resume()
    stage.deliver()
    assert stage.launch("s").task_id != before.task_id


def test_it_waits_behind_the_others_and_where_it_is_told_to(stage: ResumingStage, tmp_path: Path) -> None:
    stage.submit(search_spec(tmp_path))
    stage.kill_job()
    stage.submit(search_spec(tmp_path, name="other"))
    stage.resume(constraints=("rack:IS:r1",))
    assert [job.id for job in stage.store.open_jobs()] == ["other", "s"]
    assert stage.job("s").constraints == ("rack:IS:r1",)
    assert list(read_request(stage.job("s").request).constraints) == ["rack:IS:r1"]
    stage.deliver()
    handle = stage.service.scheduler.job("s")
    assert handle is not None
    assert handle.constraints == ("rack:IS:r1",)


@pytest.mark.slow
def test_what_ended_before_it_was_made_is_made_then(stage: ResumingStage, tmp_path: Path) -> None:
    def is_away(*_: object) -> None:
        raise StorageUnavailableError("The database is away.")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "create_search", is_away)
        stage.submit(search_spec(tmp_path, max_slots=1, checkpoint_dir=""))
    assert (stage.job("s").state, stage.job("s").failure) == (JobState.FAILED, "The database is away.")
    with contextlib.closing(Store(stage.store.database.url)) as searches:
        assert not searches.searches("s")
    stage.resume()
    assert stage.refused() == "The search 's' is queued; it continues automatically."
    stage.deliver()
    slot = stage.launch("s")
    for trial in range(3):
        stage.run_ends(slot, trial, "finished")
    stage.slot_ends(slot)
    assert stage.job("s").state is JobState.FINISHED


def test_searches_that_cannot_be_resumed(stage: ResumingStage, tmp_path: Path) -> None:
    stage.submit(search_spec(tmp_path))
    assert stage.refused() == "The search 's' is queued; it continues automatically."
    stage.submissions.kill(stage.job("s"))
    assert stage.refused() == "The search 's' is queued; ask again when it has ended."
    stage.deliver()
    stage.take_over("s")
    assert "The search 's' is being run by process" in stage.refused()
    training_job = stage.submissions.submit(read_request(training()), bundle.pack(stage.script), "ann")
    with pytest.raises(BadInputError, match=r"is a training job.*--checkpoint-dir"):
        stage.submissions.resume(training_job, "ann", Resumption())


def test_a_search_of_another_user_is_not_resumed(stage: ResumingStage, tmp_path: Path) -> None:
    stage.make_search(search_spec(tmp_path))
    stage.submit(search_spec(tmp_path))
    assert stage.job("s").state is JobState.FAILED
    assert "does not belong to this job" in stage.refused()


@pytest.mark.slow
def test_two_who_ask_at_once_get_one_search(stage: ResumingStage, tmp_path: Path) -> None:
    stage.submit(search_spec(tmp_path))
    stage.kill_job()
    ended = stage.job("s")
    stage.resume()
    with pytest.raises(BadInputError, match="resumed already"):
        stage.submissions.resume(ended, "root", Resumption())
    stage.service.handle(events.JobSubmitted("s"))
    stage.deliver()
    assert [handle.job_id for handle in stage.service.scheduler.jobs] == ["s"]


def test_what_a_failing_script_says_is_for_its_owner_only(stage: ResumingStage, tmp_path: Path) -> None:
    stage.submit(search_spec(tmp_path, max_slots=1, on_failure="abort", checkpoint_dir=""))
    slot = stage.launch("s")
    stage.say(slot, run=(0, 0), training=True, preemptible=True)
    stage.send(slot, Losses(slot.task_id, 0, 0, (REPORT,)).encode())
    end = RunEnd(0, 0, "bad_input", 2, step=1, message="a secret path", tail="", reports=1)
    stage.say(slot, ends=(end,))
    stage.service.tick()
    stage.slot_ends(slot)
    job = stage.job("s")
    assert (job.state, job.failure) == (JobState.FAILED, "trial 0 failed")
    assert (job.result or {})["last_words"] == "a secret path"
    assert "secret" not in " ".join(event.text for event in stage.store.history.events("s"))
