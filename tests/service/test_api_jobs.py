"""Jobs through the REST API: submitted, listed, read, ended, submitted again; permissions."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from backports import tarfile  # Python's own has filters since 3.11.4; Debian 12 has 3.11.2

from dike import plain_files
from dike.trial import folders
from executor.outputs import LIMIT_VARIABLE, Outputs
from framework.mesos import events
from framework.mesos.offers import NO_OFFER
from framework.scheduler.records import JobState, ProgressPoint, TaskRecord
from framework.search.records import TrialState
from framework.search.store import Store
from framework.search.trials import train_command
from framework.service.api import outputs as api_outputs
from framework.service.api.backend import nearest
from framework.service.api.cluster_schemas import ClusterView
from framework.service.api.schemas import JobDetails, JobList, JobView, Submitted
from tests.search.stored_search import FULL, SPEC, add_losses, report
from tests.service.api_stage import BUNDLE, DEADLINE_S, ApiStage, api_stage, form, training
from tests.trees import make_deep
from tests.waiting import wait_until

pytestmark = pytest.mark.integration

OF_A_JOB = ("", "/events", "/progress", "/tasks", "/explain", "/plan")
OF_ITS_OWNER = ("/logs", "/bundle", "/outputs")


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiStage]:
    with api_stage(tmp_path_factory.mktemp("service")) as running:
        yield running


@pytest.fixture(scope="module")
def alice(stage: ApiStage) -> Iterator[httpx.Client]:
    with stage.client("alice") as client:
        yield client


@pytest.fixture(scope="module")
def bob(stage: ApiStage) -> Iterator[httpx.Client]:
    with stage.client("bob") as client:
        yield client


@pytest.fixture(scope="module")
def root(stage: ApiStage) -> Iterator[httpx.Client]:
    with stage.client("root") as client:
        yield client


def search(name: str) -> dict[str, Any]:
    spec = dataclasses.asdict(dataclasses.replace(SPEC, name=name, script="train.py"))
    return {"kind": "search", "spec": spec}


def detail(answer: httpx.Response, status: int) -> str:
    """The sentence of an error."""
    assert answer.status_code == status, answer.text
    values = answer.json()
    assert list(values) == ["detail"]
    return str(values["detail"])


def test_a_job_is_taken_in_runs_and_is_ended(stage: ApiStage, alice: httpx.Client) -> None:
    answer = alice.post("/api/v1/jobs", files=form(training(arguments=["--x", "ä"], environment={"SECRET": "s"})))
    assert answer.status_code == 201
    submitted = Submitted.model_validate_json(answer.content)
    assert (submitted.state, submitted.user, submitted.yours) == (JobState.QUEUED, "alice", True)
    path = f"/api/v1/jobs/{submitted.id}"
    assert alice.get(f"{path}/bundle").content == BUNDLE

    stage.inbox.put(events.OffersArrived((stage.mesos.offer(cpus=4),)))
    stage.wait_for_state(submitted.id, JobState.RUNNING)
    running = JobDetails.model_validate_json(alice.get(path).content)
    assert running.started_s is not None
    assert running.request is not None
    assert running.request["environment"] == {"SECRET": "s"}
    tasks = alice.get(f"{path}/tasks").json()["tasks"]
    assert {task["name"] for task in tasks} == {"ps:0", "worker:0"}
    assert running.live_tasks == len(tasks) == 2
    plan = alice.get(f"{path}/plan").json()["plan"]
    assert {f"{task['role']}:{task['index']}" for task in plan["tasks"]} == {"ps:0", "worker:0"}

    answer = alice.post(f"{path}/kill")
    assert answer.status_code == 202
    assert JobView.model_validate_json(answer.content).kill_requested
    wait_until(lambda: {task["task_id"] for task in tasks} <= set(stage.mesos.killed), "the kill of its tasks")
    for task in tasks:
        agent = {"value": task["agent_id"]}
        status = {"task_id": {"value": task["task_id"]}, "agent_id": agent, "state": "TASK_KILLED"}
        stage.inbox.put(events.StatusUpdate(status))
    stage.wait_for_state(submitted.id, JobState.KILLED)
    ended = JobDetails.model_validate_json(alice.get(path).content)
    assert ended.ended_s is not None
    assert ended.result is not None
    assert [one["state"] for one in alice.get(f"{path}/tasks").json()["tasks"]] == ["killed", "killed"]
    happened = alice.get(f"{path}/events").json()
    assert [one["kind"] for one in happened["events"]][-1] == "ended"
    assert alice.get(f"{path}/events", params={"after": happened["after"]}).json() == {**happened, "events": []}
    # To end it once more does nothing.
    assert alice.post(f"{path}/kill").json()["state"] == "killed"


def test_others_see_that_a_job_runs_but_nothing_of_its_own(
    stage: ApiStage, alice: httpx.Client, bob: httpx.Client, root: httpx.Client
) -> None:
    path = f"/api/v1/jobs/{stage.submit('alice')}"
    for part in OF_A_JOB:
        assert bob.get(path + part).status_code == 200, part
    seen = JobDetails.model_validate_json(bob.get(path).content)
    assert (seen.request, seen.result, seen.yours) == (None, None, False)
    for part in OF_ITS_OWNER:
        assert "belongs to alice; only alice or an administrator may do that." in detail(bob.get(path + part), 403)
        assert alice.get(path + part).status_code == root.get(path + part).status_code == 200
    for part in ("/kill", "/again"):
        assert "belongs to alice" in detail(bob.post(path + part), 403)
    assert alice.get(path).json()["kill_requested"] is False
    assert root.post(f"{path}/kill").status_code == 202


def test_nothing_is_told_without_a_valid_token(stage: ApiStage) -> None:
    path = f"/api/v1/jobs/{stage.submit('alice')}"
    with stage.client(None) as client:
        document = client.get("/openapi.json").json()
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic YTpi"}):
            for one in ("/api/v1/jobs", "/api/v1/jobs/none", "/api/v1/cluster", "/api/v1/me", path, f"{path}/logs"):
                answer = client.get(one, headers=headers)
                assert "Authorization: Bearer TOKEN" in detail(answer, 401)
                assert answer.headers["www-authenticate"] == "Bearer"
            assert client.post("/api/v1/jobs", files=form(training()), headers=headers).status_code == 401
            assert client.post(f"{path}/kill", headers=headers).status_code == 401
        assert client.get("/healthz").status_code == client.get("/metrics").status_code == 200
        assert client.get("/").status_code == 200
        assert client.get("/sign-in").json() == {"proxy": False}
    wanted = {path: one.get("security") for path, methods in document["paths"].items() for one in methods.values()}
    assert {path for path, tokens in wanted.items() if not tokens} == {"/healthz", "/sign-in"}
    assert {path for path, tokens in wanted.items() if tokens and {} in tokens} == {"/metrics"}


def test_jobs_are_listed_in_pages_and_by_user_and_state(
    stage: ApiStage, alice: httpx.Client, bob: httpx.Client, root: httpx.Client
) -> None:
    ids = [stage.submit("bob") for _ in range(5)]
    bob.post(f"/api/v1/jobs/{ids[0]}/kill")
    stage.wait_for_state(ids[0], JobState.KILLED)
    pages = []
    before = None
    while True:
        params = {"user": "bob", "limit": 2, **({"before": before} if before else {})}
        page = JobList.model_validate_json(alice.get("/api/v1/jobs", params=params).content)
        pages.append([job.id for job in page.jobs])
        before = page.before
        if before is None:
            break
    assert pages == [ids[4:2:-1], ids[2:0:-1], ids[:1]]
    ended = alice.get("/api/v1/jobs", params={"user": "bob", "state": ["killed", "failed"]}).json()["jobs"]
    assert [(job["id"], job["state"]) for job in ended] == [(ids[0], "killed")]
    assert alice.get("/api/v1/jobs", params={"user": "nobody"}).json() == {"jobs": [], "before": None, "counts": {}}
    assert alice.get("/api/v1/jobs", params={"user": "bob", "limit": 1}).json()["counts"] == {"queued": 4, "killed": 1}
    assert "state" in detail(alice.get("/api/v1/jobs", params={"state": "sleeping"}), 422)
    assert "limit" in detail(alice.get("/api/v1/jobs", params={"limit": 0}), 422)
    near = detail(alice.get("/api/v1/jobs", params={"before": f"{ids[1]}x"}), 404)
    assert near == f"There is no job '{ids[1]}x'; did you mean '{ids[1]}'?"


def test_those_that_run_come_before_the_queue_and_that_before_those_that_have_ended(tmp_path: Path) -> None:
    with api_stage(tmp_path) as stage, stage.client("alice") as alice:
        runs = stage.submit("bob")
        stage.inbox.put(events.OffersArrived((stage.mesos.offer(cpus=4),)))
        stage.wait_for_state(runs, JobState.RUNNING)
        ended = [stage.submit("alice") for _ in range(2)]
        for job_id in ended:
            alice.post(f"/api/v1/jobs/{job_id}/kill")
            stage.wait_for_state(job_id, JobState.KILLED)
        # Bob holds a share of the cluster already, so users who come later are served before his other jobs.
        waits = [stage.submit(user) for user in ("bob", "alice", "alice")]
        queue = [waits[1], waits[2], waits[0]]

        def listed(**params: Any) -> list[JobView]:
            found: list[JobView] = []
            before: dict[str, str] = {}
            while True:
                answer = alice.get("/api/v1/jobs", params={"order": "queue", "limit": 2, **params, **before})
                page = JobList.model_validate_json(answer.content)
                assert page.counts == {"running": 1, "queued": 3, "killed": 2}
                found += page.jobs
                if page.before is None:
                    return found
                before = {"before": page.before}

        wait_until(lambda: [job.queue_position for job in listed()][1:4] == [1, 2, 3], "the places in the queue")
        jobs = listed()
        assert [job.id for job in jobs] == [runs, *queue, *reversed(ended)]
        assert [job.queue_position for job in jobs] == [None, 1, 2, 3, None, None]
        assert [job.id for job in listed(state=["queued", "killed"])] == [*queue, *reversed(ended)]
        waited_s = {job.id: job.waiting_s for job in jobs if job.waiting_s is not None}
        assert waited_s.keys() == set(queue)
        # By the clock of the wall, which may be set while we look.
        since_s = {job.id: time.time() - job.submitted_s for job in jobs}
        assert all(0 <= waited == pytest.approx(since_s[id_], abs=DEADLINE_S) for id_, waited in waited_s.items())
        assert "order" in detail(alice.get("/api/v1/jobs", params={"order": "oldest"}), 422)


def test_what_cannot_be_a_job_is_refused_in_one_sentence(stage: ApiStage, alice: httpx.Client) -> None:
    jobs = len(stage.store.jobs())
    refused = {
        "no part 'bundle'": {"request": ("r", json.dumps(training()))},
        "no part 'request'": {"bundle": ("b", BUNDLE)},
        "not JSON": form("{"),
        "tar": form(training(), b"not an archive"),
        "kind": form({}),
        "script": form(training(script="../../etc/passwd")),
        "profile": form(training(profile={})),
        "arguments.0": form(training(arguments=[1])),
        "constraints": form(training(constraints="rack")),
        "unknown": form(training(unknown=1)),
        "trial_count": form({"kind": "search", "spec": {**search("s")["spec"], "trial_count": "many"}}),
        "not a name for a job": form(search("../x")),
    }
    for said, files in refused.items():
        answer = alice.post("/api/v1/jobs", files=files)
        assert answer.status_code in (400, 422)
        sentence = detail(answer, answer.status_code)
        assert said in sentence
        assert "\n" not in sentence
    for text in (b"[" * 100_000, b'{"kind": NaN}', b'{"kind": 1e999}', b'"\\ud800"', b"\xff"):
        assert alice.post("/api/v1/jobs", files=form(text)).status_code in (400, 422)
    assert "multipart" in detail(alice.post("/api/v1/jobs", json=training()), 422)
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    assert detail(alice.post("/api/v1/jobs", content=b"rubbish", headers=headers), 400)
    assert len(stage.store.jobs()) == jobs


def test_unknown_jobs_and_routes_are_404(alice: httpx.Client, bob: httpx.Client) -> None:
    for part in (*OF_A_JOB, *OF_ITS_OWNER, "/trials", "/slices", "/losses", "/importance"):
        assert "no job 'none'" in detail(alice.get(f"/api/v1/jobs/none{part}"), 404)
    assert "no job 'none'" in detail(bob.post("/api/v1/jobs/none/kill"), 404)
    detail(alice.get("/api/v1/nothing"), 404)
    detail(alice.get("/api/v1/jobs/none/nothing"), 404)
    detail(alice.delete("/api/v1/jobs"), 405)


def test_a_job_can_be_submitted_again(stage: ApiStage, alice: httpx.Client, root: httpx.Client) -> None:
    first = stage.submit("alice", arguments=["--steps", "7"])
    answer = alice.post(f"/api/v1/jobs/{first}/again")
    assert answer.status_code == 201
    second = answer.json()["id"]
    assert second != first
    assert alice.get(f"/api/v1/jobs/{second}").json()["request"]["arguments"] == ["--steps", "7"]
    assert alice.get(f"/api/v1/jobs/{second}/bundle").content == BUNDLE
    # The user who submits it again owns it.
    assert root.post(f"/api/v1/jobs/{first}/again").json()["user"] == "root"


def test_a_training_job_is_called_what_its_user_wants(stage: ApiStage, alice: httpx.Client, bob: httpx.Client) -> None:
    assert stage.submit("alice", name="mnist+1.x") == "mnist+1.x"
    assert "There is a job 'mnist+1.x' already" in detail(
        bob.post("/api/v1/jobs", files=form(training(name="mnist+1.x"))), 400
    )
    assert "choose another" in detail(bob.post("/api/v1/jobs", files=form(training(name="last"))), 400)
    for name in ("", ".", "-x", "a/b", "a b", "ä", "x" * 201, 7):
        assert "name" in detail(bob.post("/api/v1/jobs", files=form(training(name=name))), 400)
    for again in ("mnist+1.x-2", "mnist+1.x-3"):
        assert alice.post("/api/v1/jobs/mnist+1.x/again").json()["id"] == again


def test_a_search_that_was_killed_is_resumed_by_its_owner(
    stage: ApiStage, alice: httpx.Client, bob: httpx.Client, root: httpx.Client
) -> None:
    wait_until(lambda: alice.get("/api/v1/cluster").json()["agents"] is not None, "the agents")
    path = "/api/v1/jobs/resumed"
    assert alice.post("/api/v1/jobs", files=form(search("resumed"))).status_code == 201
    assert "is queued; it continues automatically" in detail(alice.post(f"{path}/resume"), 400)
    for user, asked in ((root, None), (alice, {"constraints": ["rack:IN:r7"]}), (alice, {"constraints": []})):
        alice.post(f"{path}/kill")
        stage.wait_for_state("resumed", JobState.KILLED)
        assert "belongs to alice" in detail(bob.post(f"{path}/resume"), 403)
        assert "constraints" in detail(alice.post(f"{path}/resume", json={"constraints": ["rack"]}), 422)
        answer = user.post(f"{path}/resume", json=asked)
        assert answer.status_code == 200, answer.text
        resumed = Submitted.model_validate_json(answer.content)
        assert (resumed.state, resumed.user) == (JobState.QUEUED, "alice")
        assert resumed.constraints == (asked or {}).get("constraints", [])
        assert [warning for warning in resumed.warnings if "rack" in warning] == resumed.warnings
        assert len(resumed.warnings) == len(resumed.constraints)
    assert "is a training job" in detail(alice.post(f"/api/v1/jobs/{stage.submit()}/resume"), 400)


def test_progress_is_thinned_and_holds_only_numbers_that_json_knows(stage: ApiStage, alice: httpx.Client) -> None:
    job_id = stage.submit("alice")
    points = [ProgressPoint(step, 1e9 + step, loss=None if step == 999 else 1 / (step + 1)) for step in range(1000)]
    stage.store.history.add_progress(job_id, points)
    path = f"/api/v1/jobs/{job_id}"
    assert alice.get(path).json()["progress"] == {"step": 999, "time_s": 1e9 + 999, "loss": None, "samples_per_s": None}
    steps = [point["step"] for point in alice.get(f"{path}/progress", params={"limit": 10}).json()["points"]]
    assert steps == list(range(99, 1000, 100))
    late = alice.get(f"{path}/progress", params={"after_step": 996}).json()["points"]
    assert [point["step"] for point in late] == [997, 998, 999]


def test_the_cluster_is_shown_with_our_tasks(stage: ApiStage, alice: httpx.Client) -> None:
    job_id = stage.submit("alice")
    held = {"cpus": 1.0, "mem": 64.0}
    task = TaskRecord("T-1", job_id, "S-1", "agent-1", "127.0.0.1", "worker:0", "running", held, executor_id="E-1")
    stage.store.save([task], {})
    # Published about once a second.
    wait_until(lambda: alice.get("/api/v1/cluster").json()["agents"] is not None, "the agents")
    view = ClusterView.model_validate_json(alice.get("/api/v1/cluster").content)
    assert (view.framework_id, view.connected, view.master) == ("F-1", True, stage.master.address)
    assert view.agents is not None
    assert [agent.node for agent in view.agents] == ["agent-0", "agent-1"]
    [_, agent] = view.agents
    assert agent.total == {"cpus": 8.0, "mem": 4096.0, "disk": 1000.0, "gpus": 0.0, "ports": 1001.0}
    assert agent.active
    assert agent.attributes == {"rack": "r1", "speed": "2.5"}
    assert agent.held == {"cpus": 1.0, "mem": 64.0}
    assert [(one.task_id, one.job_id) for one in agent.tasks] == [("T-1", job_id)]


def test_a_job_that_can_never_fit_is_taken_in_with_a_warning(stage: ApiStage, alice: httpx.Client) -> None:
    wait_until(lambda: alice.get("/api/v1/cluster").json()["agents"] is not None, "the agents")
    answer = alice.post("/api/v1/jobs", files=form(training(constraints=["rack:IN:r7"])))
    assert answer.status_code == 201
    [warning] = answer.json()["warnings"]
    assert "rack" in warning
    assert alice.post("/api/v1/jobs", files=form(training())).json()["warnings"] == []
    path = f"/api/v1/jobs/{answer.json()['id']}/explain"
    wait_until(lambda: alice.get(path).json()["verdict"] == "constraints", "the verdict")
    explanation = alice.get(path).json()
    assert "rack" in explanation["sentence"]
    assert {row["node"] for row in explanation["agents"]} == {"agent-0", "agent-1"}
    # Where the job knows no more than that no offer comes, its list says what the explanation does.
    stage.pause()
    for said, shown in ((NO_OFFER, explanation["sentence"]), ("It plans.", "It plans.")):
        stage.store.change_job(answer.json()["id"], waiting=said)
        assert alice.get(path.removesuffix("/explain")).json()["waiting"] == shown
    jobs = len(stage.store.jobs())
    assert "rack" in detail(alice.post("/api/v1/jobs", files=form(training(constraints=["rack"]))), 400)
    assert len(stage.store.jobs()) == jobs


def test_what_a_script_said_last_is_told_to_its_owner_only(
    stage: ApiStage, alice: httpx.Client, bob: httpx.Client
) -> None:
    job_id = alice.post("/api/v1/jobs", files=form(training())).json()["id"]
    stage.store.change_job(job_id, failure="worker:0 is failed", result={"last_words": "ValueError: mine"})
    path = f"/api/v1/jobs/{job_id}"
    assert alice.get(path).json()["failure"] == "ValueError: mine; worker:0 is failed"
    assert bob.get(path).json()["failure"] == "worker:0 is failed"


def test_what_a_script_has_written_is_handed_out_to_its_owner(
    stage: ApiStage, alice: httpx.Client, bob: httpx.Client, tmp_path: Path
) -> None:
    job_id = alice.post("/api/v1/jobs", files=form(training(name="written"))).json()["id"]
    path = f"/api/v1/jobs/{job_id}/outputs"
    assert "has not begun" in alice.get(path).json()["unreachable"]
    stage.store.change_job(job_id, result={"checkpoint_dir": str(tmp_path / "run")})
    assert "Nothing has been brought back yet" in alice.get(path).json()["unreachable"]

    workspace = tmp_path / "workspace"
    (workspace / "logs").mkdir(parents=True)
    record = stage.store.job(job_id)
    assert record is not None
    brought = Outputs(workspace, str(tmp_path / "run"), record.folder_name, 0, {LIMIT_VARIABLE: "1K"})
    brought.restore()
    (workspace / "model.keras").write_bytes(bytes(range(256)))
    (workspace / "logs" / "a b").write_text("1")
    (workspace / "large").write_bytes(bytes(2000))
    brought.save()
    found = alice.get(path).json()
    assert [(file["path"], file["size_bytes"]) for file in found["files"]] == [("logs/a b", 1), ("model.keras", 256)]
    assert found["left_behind"] == {"large": "2000 bytes, over the limit"}
    assert found["unreachable"] == ""
    answer = alice.get(f"{path}/content", params={"path": "model.keras"})
    assert answer.content == bytes(range(256))
    assert "attachment" in answer.headers["Content-Disposition"]
    assert alice.get(f"{path}/content", params={"path": "logs/a b"}).text == "1"
    for wrong in ("large", "../dike-outputs.json", "logs", "no"):
        assert wrong in detail(alice.get(f"{path}/content", params={"path": wrong}), 404)
    for asked in (path, f"{path}/content?path=model.keras"):
        assert "alice" in detail(bob.get(asked), 403)


def test_a_folder_that_another_job_has_written_to_is_not_handed_out(
    stage: ApiStage, alice: httpx.Client, bob: httpx.Client, tmp_path: Path
) -> None:
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    others = Outputs(workspace, str(tmp_path / "run"), "of-alice", 0, {})
    others.restore()
    (workspace / "secret").write_text("secret")
    others.save()
    request = training(checkpoint_dir=str(tmp_path / "run"))
    job_id = bob.post("/api/v1/jobs", files=form(request)).json()["id"]
    assert bob.get(f"/api/v1/jobs/{job_id}/outputs").json()["files"] == []
    detail(bob.get(f"/api/v1/jobs/{job_id}/outputs/content", params={"path": "secret"}), 404)


def test_the_model_of_a_job_is_handed_out_to_its_owner(
    stage: ApiStage, alice: httpx.Client, bob: httpx.Client, tmp_path: Path
) -> None:
    job_id = alice.post("/api/v1/jobs", files=form(training(name="modelled"))).json()["id"]
    path, folder, workspace = f"/api/v1/jobs/{job_id}/model", tmp_path / "run", tmp_path / "workspace"
    stage.store.change_job(job_id, result={"checkpoint_dir": str(folder)})
    workspace.mkdir()
    record = stage.store.job(job_id)
    assert record is not None
    Outputs(workspace, str(folder), "somebody else's", 0, {}).save()
    folders.write(f"{folder}/run-0-step-9", {"variables.npz": bytes(range(256)) * 3000}, {"kind": "model", "step": 9})
    (folder / "run-0-step-9" / "link").symlink_to("/etc/passwd")
    (folder / "run-0-step-10").symlink_to("/etc")
    (folder / "run-0-step-11").mkdir()
    assert "has kept no model" in detail(alice.get(path), 404)
    Outputs(workspace, str(folder), record.folder_name, 1, {}).save()
    with tarfile.open(fileobj=io.BytesIO(alice.get(path).content)) as archive:
        archive.extractall(tmp_path / "got", filter="data")
    got = tmp_path / "got" / "run-0-step-9"
    assert folders.problem(str(got)) == ""
    assert sorted(file.name for file in got.iterdir()) == ["dike-trial.json", "variables.npz"]
    assert "no best epoch" in detail(alice.get(path, params={"epoch": "best"}), 404)
    assert "alice" in detail(bob.get(path), 403)


def owned(stage: ApiStage, alice: httpx.Client, folder: Path, record: dict[str, Any] | bytes | None = None) -> str:
    """A job of alice's whose script has written the record of its outputs itself; the path of the job."""
    job_id = alice.post("/api/v1/jobs", files=form(training())).json()["id"]
    stage.store.change_job(job_id, result={"checkpoint_dir": str(folder)})
    job = stage.store.job(job_id)
    assert job is not None
    folder.mkdir()
    if not isinstance(record, bytes):
        whole = {
            "owner": job.folder_name,
            "number": 0,
            "kept": {},
            "limit_bytes": None,
            "left_behind": {},
            "deleted": {},
        }
        record = json.dumps({**whole, **(record or {})}).encode()
    (folder / "dike-outputs.json").write_bytes(record)
    return f"/api/v1/jobs/{job_id}"


LEFT = {"a\udc80\ud800": "\ud800" * 2000, **{str(number): "z" for number in range(3000)}}


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ({"kept": {"f": [10**30, 5]}}, "Nothing has been brought back yet"),
        ({"kept": {"f": [5, -1]}}, "Nothing has been brought back yet"),
        ({"kept": {"f": [5, 10**400]}}, "Nothing has been brought back yet"),
        ({"owner": "\ud800" * 5000}, "Another job writes to"),
        (b'{"owner": ' + b"[" * 100_000, "Nothing has been brought back yet"),
        (b"[" + b"[]," * 1_000_000 + b"[]]", "Nothing has been brought back yet"),
        (b" " * (9 << 20), "is larger than 8 MiB; look there."),
        ({"left_behind": LEFT, "kept": {"f" * 5000: [5, 5], "\ud800": [5, 5], "../x": [5, 5], "g": [5, 6]}}, ""),
    ],
)
def test_a_record_of_outputs_that_a_script_has_written_costs_its_owner_a_list_at_most(
    stage: ApiStage, alice: httpx.Client, tmp_path: Path, record: dict[str, Any] | bytes, told: str
) -> None:
    path = owned(stage, alice, tmp_path / "run", record)
    answer = alice.get(f"{path}/outputs")
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert told in found["unreachable"]
    assert len(answer.content) < 100_000
    if not told:
        assert [file["path"] for file in found["files"]] == ["g"]
        assert len(found["left_behind"]) == 1000
    for asked in ("f", "../x", "g", "f" * 4000):
        detail(alice.get(f"{path}/outputs/content", params={"path": asked}), 404)


@pytest.mark.parametrize("what", ["deep", "many"])
def test_a_model_of_too_many_or_too_deep_folders_is_not_sent(
    stage: ApiStage, alice: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    path = owned(stage, alice, tmp_path / "run")
    model = tmp_path / "run" / "run-0-step-1"
    folders.write(str(model), {"weights": b"1"}, {"kind": "script", "step": 1})
    make_deep(model, 900 if what == "deep" else 60, "big", b"2")
    if what == "many":
        with tarfile.open(fileobj=io.BytesIO(alice.get(f"{path}/model").content)) as archive:
            assert sorted(len(name.split("/")) for name in archive.getnames()) == [2, 2, 62]
        monkeypatch.setattr(plain_files, "MAX_FILES", 10)
    descriptors = len(os.listdir("/proc/self/fd"))
    said = detail(alice.get(f"{path}/model"), 409)
    assert "run-0-step-1 has folders more than 64 deep." in said if what == "deep" else "more than 10 files." in said
    assert len(os.listdir("/proc/self/fd")) <= descriptors


@pytest.mark.parametrize("what", ["model", "outputs/content?path=big"])
def test_a_file_that_becomes_shorter_while_it_is_sent_has_no_end(
    stage: ApiStage, alice: httpx.Client, tmp_path: Path, what: str
) -> None:
    size = 128 << 20
    path = owned(stage, alice, tmp_path / "run", {"kept": {"big": [5, size]}})
    model, written = tmp_path / "run" / "run-0-step-1", tmp_path / "run" / "outputs"
    folders.write(str(model), {}, {"kind": "script", "step": 1})
    written.mkdir()
    for folder in (model, written):
        (folder / "big").touch()
        os.truncate(folder / "big", size)
    taken = 0

    def take(answer: httpx.Response) -> None:
        nonlocal taken
        for block in answer.iter_raw():
            taken += len(block)
            for folder in (model, written):
                os.truncate(folder / "big", 10)

    with alice.stream("GET", f"{path}/{what}") as answer:
        assert answer.status_code == 200
        with pytest.raises(httpx.RemoteProtocolError):
            take(answer)
    assert 0 < taken < size / 2
    assert alice.get(f"{path}/outputs").status_code == 200


def test_a_user_who_reads_slowly_has_no_more_than_some_transfers(
    stage: ApiStage, alice: httpx.Client, bob: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_outputs, "MAX_TRANSFERS", 3)
    size = 64 << 20
    path = owned(stage, alice, tmp_path / "run", {"kept": {"big": [5, size], "small": [5, 1]}})
    (tmp_path / "run" / "outputs").mkdir()
    for name, bytes_ in (("big", size), ("small", 1)):
        (tmp_path / "run" / "outputs" / name).touch()
        os.truncate(tmp_path / "run" / "outputs" / name, bytes_)
    content = f"{path}/outputs/content?path="
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(alice.stream("GET", f"{content}big"))
        assert "3 files of alice are being sent already" in detail(alice.get(f"{content}small"), 429)
    wait_until(lambda: alice.get(f"{content}small").status_code == 200, "the end of the other transfers")


def test_what_a_script_has_written_of_its_best_model_hides_no_trial(tmp_path: Path) -> None:
    with api_stage(tmp_path) as stage, stage.client("alice") as alice:
        stage.pause()
        assert alice.post("/api/v1/jobs", files=form(search("digits"))).status_code == 201
        store = Store(stage.store.database.url, engine=stage.store.database.engine)
        store.create_search(dataclasses.replace(SPEC, name="digits", checkpoint_dir=str(tmp_path / "run")))
        store.save_trial(FULL)
        trial = tmp_path / "run" / f"trial-{FULL.number}"
        model = trial / "run-0-step-1"
        model.mkdir(parents=True)
        Outputs(tmp_path, str(trial), "digits", 0, {}).save()
        (model / folders.META).write_text('{"kind": "script", "step": 1}')
        assert alice.get("/api/v1/jobs/digits/trials").json()["best"]["export_command"] is not None
        for content in (
            "[" * 100_000,
            "[1]",
            "{}",
            '{"kind": [], "step": 1}',
            '{"kind": "x", "step": "x"}',
            "null",
            "",
        ):
            (model / folders.META).write_text(content)
            answer = alice.get("/api/v1/jobs/digits/trials")
            assert answer.status_code == 200, content
            assert answer.json()["best"]["export_command"] is None
        (model / folders.META).unlink()
        os.mkfifo(model / folders.META)
        assert alice.get("/api/v1/jobs/digits/trials").json()["best"]["export_command"] is None
        assert alice.get("/api/v1/jobs/digits/outputs").status_code == 200


def test_a_search_shows_trials_slices_and_losses(
    stage: ApiStage, alice: httpx.Client, bob: httpx.Client, root: httpx.Client
) -> None:
    # No loop looks at it: what a search writes is written here.
    stage.pause()
    answer = alice.post("/api/v1/jobs", files=form(search("digits")))
    assert answer.status_code == 201, answer.text
    assert "There is a job 'digits' already" in detail(alice.post("/api/v1/jobs", files=form(search("digits"))), 400)
    path = "/api/v1/jobs/digits"
    empty = alice.get(f"{path}/trials").json()
    assert (empty["trials"], empty["mode"], empty["trial_count"]) == ([], "min", SPEC.trial_count)
    assert alice.get(f"{path}/slices").json() == {"slices": []}
    assert alice.get(f"{path}/losses").json() == {"losses": {}}
    assert "no plan" in detail(alice.get(f"{path}/plan"), 404)

    store = Store(stage.store.database.url, engine=stage.store.database.engine)
    store.create_search(dataclasses.replace(SPEC, name="digits"))
    store.save_trial(dataclasses.replace(FULL, loss=math.nan, metrics={"accuracy": math.inf}))
    add_losses(store, 0, 1, [report(step, math.nan if step == 99 else 1.0) for step in range(100)])
    shown = alice.get(path).json()
    assert shown["trials"] == {"suspended": 1}
    listed = {one["id"]: one for one in alice.get("/api/v1/jobs").json()["jobs"]}
    assert listed["digits"]["best"] == shown["best"] == FULL.value
    [trial] = alice.get(f"{path}/trials").json()["trials"]
    assert (trial["loss"], trial["metrics"], trial["error"]) == (None, {"accuracy": None}, FULL.error)
    # How far a trial is may be known to all; what it was asked with, and where its results are, may not.
    hidden = {"parameters": {}, "checkpoint": None, "error": ""}
    assert bob.get(f"{path}/trials").json()["trials"] == [{**trial, **hidden}]
    assert root.get(f"{path}/trials").json()["trials"] == [trial]
    assert {name: trial[name] for name in ("parameters", "checkpoint", "state", "step")} == {
        "parameters": FULL.parameters,
        "checkpoint": FULL.checkpoint,
        "state": "suspended",
        "step": 120,
    }
    losses = alice.get(f"{path}/losses", params={"limit": 10}).json()["losses"]["0"]
    assert [one["step"] for one in losses] == list(range(9, 100, 10))
    assert losses[-1]["loss"] is None
    assert alice.get(f"{path}/losses", params={"trial": 1}).json() == {"losses": {}}
    assert alice.get(f"{path}/importance").json() == {"trials": 0, "needed": 5, "importances": {}}
    for number in range(6):
        values = {"lr": (0.1, 2, True)[number % 3], "units": 2 + number}
        ended = dataclasses.replace(
            FULL, number=number, parameters=values, state=TrialState.FINISHED, value=float(number)
        )
        store.save_trial(ended)
    weighed = alice.get(f"{path}/importance").json()
    assert (weighed["trials"], set(weighed["importances"])) == (6, {"lr", "units"})
    assert bob.get(f"{path}/importance").json() == {"trials": 6, "needed": 5, "importances": {}}
    found = alice.get(f"{path}/trials").json()
    assert found["ranking"] == list(range(6))
    assert found["best"]["number"] == 0
    assert found["best"]["train_command"] == train_command(
        dataclasses.replace(SPEC, script="train.py"), store.load_trials()[0]
    )
    assert found["best"]["export_command"] is None, "nothing was kept"
    assert bob.get(f"{path}/trials").json()["best"]["train_command"] is None
    assert alice.post(f"{path}/again").json()["id"] == "digits-2"
    assert alice.post(f"{path}/again").json()["id"] == "digits-3"
    # A name that is as long as may be loses its end.
    long = "x" * 200
    assert alice.post("/api/v1/jobs", files=form(search(long))).status_code == 201
    for number in (2, 3):
        assert alice.post(f"/api/v1/jobs/{long}/again").json()["id"] == f"{long[:198]}-{number}"


def test_a_checkpoint_folder_belongs_to_the_user_whose_job_was_first_there(
    stage: ApiStage, alice: httpx.Client, bob: httpx.Client, tmp_path: Path
) -> None:
    folder = tmp_path / "bobs" / "run"
    folder.mkdir(parents=True)
    (tmp_path / "link").symlink_to(folder)
    job = bob.post("/api/v1/jobs", files=form(training(name="bobs", checkpoint_dir=str(folder))))
    assert job.status_code == 201
    for named in (folder, folder / "best", folder.parent, tmp_path / "link", folder / ".." / "run"):
        taken = alice.post("/api/v1/jobs", files=form(training(checkpoint_dir=str(named))))
        assert "is not yours" in detail(taken, 400), named
    assert alice.post("/api/v1/jobs", files=form(training(checkpoint_dir=f"{folder}-2"))).status_code == 201
    assert bob.post("/api/v1/jobs", files=form(training(checkpoint_dir=str(folder)))).status_code == 201


def test_where_checkpoints_lie_is_shown_to_their_owner_only(
    stage: ApiStage, alice: httpx.Client, bob: httpx.Client, tmp_path: Path
) -> None:
    folder = str(tmp_path / "run")
    job_id = bob.post("/api/v1/jobs", files=form(training(checkpoint_dir=folder))).json()["id"]
    stage.store.history.add_events(job_id, [("checkpoint", f"step 3: {folder}/run-0-step-3")])
    stage.store.change_job(job_id, failure=f"{folder} is full", result={"checkpoint_dir": folder})
    path = f"/api/v1/jobs/{job_id}"
    for text in (bob.get(path).text, bob.get(f"{path}/events").text):
        assert folder in text
    for text in (alice.get(path).text, alice.get(f"{path}/events").text):
        assert folder not in text
        assert "(its checkpoint folder)" in text


def test_of_many_long_names_few_are_compared_with_one_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    matches = difflib.get_close_matches

    def counted(word: str, names: list[str], n: int) -> list[str]:
        compared.append(len(names))
        return matches(word, names, n)

    monkeypatch.setattr(difflib, "get_close_matches", counted)
    assert nearest("digit", ["other", "digits"]) == "digits"
    assert nearest("digit", ["other"]) is None
    long = ["q" + "ab" * 95 + str(number) for number in range(1000)]
    assert nearest("q" + "ab" * 95, long) in long
    assert nearest("digit", [f"digits-{number}" for number in range(1000)]).startswith("digits-")
    assert compared[:2] == [2, 1]
    assert compared[2] < 20
    assert compared[3] == 1000
