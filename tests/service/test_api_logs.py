"""Output through the REST API: in pages, followed, after a broken connection."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from executor.trial_messages import TrialOutput
from framework.scheduler.records import JobState
from framework.search.records import SliceRecord, TrialRecord, TrialState
from framework.search.store import Store
from framework.service.api import backend
from framework.service.users import Users
from tests.search.stored_search import SPEC
from tests.service.api_stage import DEADLINE_S, ApiStage, api_stage, form
from tests.waiting import wait_until

pytestmark = pytest.mark.integration

LIMIT = 2
JSON_LINES = {"Accept": "application/x-ndjson"}


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiStage]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(backend, "FOLLOWER_LIMIT", LIMIT)
        with api_stage(tmp_path_factory.mktemp("service")) as running:
            # What the loop would write is written here.
            running.pause()
            yield running


class Follower(threading.Thread):
    """Follows a job's output on a thread of its own."""

    def __init__(self, stage: ApiStage, job_id: str, **params: Any) -> None:
        super().__init__()
        self._stage = stage
        self._path = f"/api/v1/jobs/{job_id}/logs"
        self._params = {"follow": True, **params}
        self.lines: list[dict[str, Any]] = []
        self.start()

    def run(self) -> None:
        with (
            self._stage.client() as client,
            client.stream("GET", self._path, params=self._params, headers=JSON_LINES) as answer,
        ):
            for line in answer.iter_lines():
                if line:
                    self.lines.append(json.loads(line))

    @property
    def text(self) -> str:
        return "".join(line.get("text", "") for line in self.lines)

    def end(self) -> list[dict[str, Any]]:
        self.join(DEADLINE_S)
        assert not self.is_alive()
        return self.lines


def end_job(stage: ApiStage, job_id: str) -> None:
    stage.store.change_job(job_id, state=JobState.FINISHED, ended_s=1e9)


def test_output_is_text_or_json_lines(stage: ApiStage) -> None:
    job_id = stage.submit()
    stage.store.history.add_output(job_id, [("worker:0", "stdout", "one\nä"), ("ps:0", "stderr", "two\n")])
    path = f"/api/v1/jobs/{job_id}/logs"
    with stage.client() as client:
        plain = client.get(path)
        assert plain.headers["content-type"] == "text/plain; charset=utf-8"
        assert plain.text == "one\nätwo\n"
        assert client.get(path, params={"task": "ps:0"}).text == "two\n"
        assert client.get(path, params={"task": "ps:1"}).text == ""
        lines = [json.loads(line) for line in client.get(path, headers=JSON_LINES).iter_lines()]
        assert [(line["task"], line["stream"], line["text"]) for line in lines] == [
            ("worker:0", "stdout", "one\nä"),
            ("ps:0", "stderr", "two\n"),
        ]
        assert client.get(path, params={"after": lines[0]["number"]}).text == "two\n"
        assert client.get(path, params={"after": lines[1]["number"]}).text == ""
        for bad in ({"after": -1}, {"after": 2**63}, {"follow": "maybe"}, {"task": "x" * 65}):
            assert client.get(path, params=bad).status_code == 422


def test_long_output_comes_whole_and_in_order(stage: ApiStage) -> None:
    job_id = stage.submit()
    stage.store.history.add_output(job_id, [("worker:0", "stdout", f"{number}\n") for number in range(1000)])
    with stage.client() as client:
        text = client.get(f"/api/v1/jobs/{job_id}/logs").text
    assert text.split() == [str(number) for number in range(1000)]


def test_a_follower_gets_everything_until_the_job_has_ended(stage: ApiStage) -> None:
    job_id = stage.submit()
    stage.store.history.add_output(job_id, [("worker:0", "stdout", "before\n")])
    follower = Follower(stage, job_id)
    wait_until(lambda: follower.text == "before\n", "the first line")
    stage.store.history.add_output(job_id, [("worker:0", "stdout", "during\n")])
    wait_until(lambda: follower.text == "before\nduring\n", "the second line")
    # Written at the very end, as the service does: output first, then the state.
    stage.store.history.add_output(job_id, [("worker:0", "stdout", "last\n")])
    end_job(stage, job_id)
    lines = follower.end()
    assert follower.text == "before\nduring\nlast\n"
    assert lines[-1] == {"ended": "finished"}
    # After a broken connection: nothing is lost, and nothing comes twice.
    again = Follower(stage, job_id, after=lines[1]["number"])
    assert [line.get("text") for line in again.end()] == ["last\n", None]


def test_a_follower_of_a_deleted_job_ends(stage: ApiStage) -> None:
    job_id = stage.submit()
    stage.store.history.add_output(job_id, [("worker:0", "stdout", "x")])
    follower = Follower(stage, job_id)
    wait_until(lambda: follower.text == "x", "the text")
    end_job(stage, job_id)
    stage.store.delete_jobs(2e9)
    assert follower.end()[-1] in ({"ended": "finished"}, {"ended": None})


def test_a_follower_whose_token_is_taken_away_reads_no_more(stage: ApiStage) -> None:
    job_id = stage.submit()
    stage.store.history.add_output(job_id, [("worker:0", "stdout", "before")])
    follower = Follower(stage, job_id)
    wait_until(lambda: follower.text == "before", "the text")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Users, "authenticate", lambda users, token: None)
        stage.store.history.add_output(job_id, [("worker:0", "stdout", "after")])
        assert [line["text"] for line in follower.end()] == ["before"]
    end_job(stage, job_id)


@pytest.fixture
def search(stage: ApiStage) -> Iterator[Store]:
    """What a service writes of a search, of the job `digits`, is written by a test."""
    spec = dataclasses.asdict(dataclasses.replace(SPEC, script="train.py"))
    with stage.client() as client:
        answer = client.post("/api/v1/jobs", files=form({"kind": "search", "spec": spec}))
    assert answer.status_code == 201, answer.text
    store = Store(stage.store.database.url, engine=stage.store.database.engine)
    yield store
    end_job(stage, "digits")


def test_what_a_trial_prints_is_followed_through_its_runs_to_its_end(stage: ApiStage, search: Store) -> None:
    path = "/api/v1/jobs/digits/logs"
    with stage.client() as client:
        # Nothing of the search has begun yet.
        assert client.get(path, params={"trial": 1}).text == ""
        follower = Follower(stage, "digits", trial=1)
        search.create_search(dataclasses.replace(SPEC, name="digits"))
        record = TrialRecord(1, {"lr": 0.1}, TrialState.RUNNING)
        search.save_trial(record)
        search.save_slice(SliceRecord(1, 0, 0, "node-1", 1.0))
        search.add_output([TrialOutput("slot", 1, 0, 0, b"one\n"), TrialOutput("slot", 0, 0, 0, b"another's\n")])
        wait_until(lambda: follower.text.endswith("one\n"), "the first run")
        search.save_trial(dataclasses.replace(record, state=TrialState.SUSPENDED))
        search.save_slice(SliceRecord(1, 1, 0, "node-2", 2.0, from_step=7))
        search.add_output([TrialOutput("slot", 1, 1, 0, b"two\n")])
        search.save_trial(dataclasses.replace(record, state=TrialState.FINISHED))
        whole = "--- run 0 on node-1, from step 0 ---\none\n--- run 1 on node-2, from step 7 ---\ntwo\n"
        lines = follower.end()
        assert follower.text == whole
        assert lines[-1] == {"ended": "finished"}
        assert {line["task"] for line in lines[:-1]} == {"trial:1"}
        assert client.get(path, params={"trial": 1}).text == whole
        again = client.get(path, params={"trial": 1, "after": lines[0]["number"]}).text
        assert whole == lines[0]["text"] + again
        missing = client.get(path, params={"trial": 4})
        assert (missing.status_code, missing.json()["detail"]) == (
            404,
            "The search 'digits' has no trial 4; its trials are 0 to 3.",
        )
        assert client.get(path, params={"trial": -1}).status_code == 422
        job_id = stage.submit()
        assert "training job" in client.get(f"/api/v1/jobs/{job_id}/logs", params={"trial": 0}).json()["detail"]
    with stage.client("bob") as stranger:
        assert stranger.get(path, params={"trial": 1}).status_code == 403


def test_only_so_many_may_follow_and_places_are_given_up(stage: ApiStage) -> None:
    job_id = stage.submit()
    stage.store.history.add_output(job_id, [("worker:0", "stdout", "x")])
    path = f"/api/v1/jobs/{job_id}/logs"
    with stage.client() as client, contextlib.ExitStack() as following:
        # Many that go away in the middle.
        for _ in range(5):
            with contextlib.ExitStack() as leaving:
                wait_until(lambda leaving=leaving: begins(client, path, leaving), "a place")
        for _ in range(LIMIT):
            wait_until(lambda: begins(client, path, following), "a place")
        refused = client.get(path, params={"follow": True})
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "10"
        assert "follow" in refused.json()["detail"]
        # Without following there is no limit.
        assert client.get(path).text == "x"
        end_job(stage, job_id)


def begins(client: httpx.Client, path: str, stack: contextlib.ExitStack) -> bool:
    """Begins to follow, until the stack is left; the place of one that has just gone is given up a moment later."""
    answer = stack.enter_context(client.stream("GET", path, params={"follow": True}))
    if answer.status_code != 200:
        return False
    # Closing the iterator would close the connection.
    text = answer.iter_text()
    stack.callback(text.close)
    return next(text) == "x"


def test_a_user_leaves_places_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "USER_FOLLOWER_LIMIT", 2)
    monkeypatch.setattr(backend, "FOLLOWER_LIMIT", 3)
    followers = backend.Followers()
    assert [followers.acquire("alice") for _ in range(2)] == ["", ""]
    assert "the maximum of a user" in followers.acquire("alice")
    assert followers.acquire("bob") == ""
    assert "Too many clients" in followers.acquire("bob")
    followers.release("alice")
    assert followers.acquire("bob") == ""
    assert "the maximum of a user" in followers.acquire("bob")
