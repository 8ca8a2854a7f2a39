"""A training job that is stored, and continued by another service: at every stage, with a fake Mesos."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dike.exceptions import BadInputError, InfeasibleError
from dike.process import EXIT_CODE_OTHER_MODEL
from dike.profile import Api
from executor.messages import LaunchOrder, LogChunk, Report, WantedOutput
from framework.mesos.tasks import TaskState
from framework.scheduler.job import Need
from framework.scheduler.offer_pool import SETTLE_S
from framework.scheduler.reconciler import RECONCILE_AFTER_S
from framework.scheduler.records import JobState
from framework.scheduler.task_tracker import KILL_RETRY_S
from framework.training.spec import JobSpec
from framework.training.state import Phase
from solver import NodeClass
from tests.mesos.fake_mesos import FakeMesos
from tests.profiles import made_up_profile
from tests.properties import examples
from tests.training.job_stage import GIB, JobStage, ended, profile, spec

SMALL = NodeClass(name="S0", count=1, cpus=0.1, mem_bytes=GIB, gpus=0, gpu_model=None, disk_bytes=GIB)


class FakeWritingMesos(FakeMesos):
    """Stores the job's state at each launch."""

    def __init__(self) -> None:
        super().__init__()
        self.states: list[Any] = []
        self.stage: JobStage | None = None

    def acceptOffers(self, offer_ids: Any, operations: Any, filters: Any = None) -> None:  # noqa: N802
        assert self.stage is not None
        self.states.append(self.stage.written_state())
        super().acceptOffers(offer_ids, operations, filters)


def written_at_launch(job_spec: JobSpec) -> tuple[JobStage, FakeWritingMesos]:
    stage = JobStage(job_spec)
    mesos = FakeWritingMesos()
    mesos.stage, stage.mesos = stage, mesos
    stage.begin(job_spec, None)
    stage.subscribe()
    return stage, mesos


def test_a_waiting_job_continues_to_wait() -> None:
    stage = JobStage(spec())
    stage.take_over(spec())
    assert stage.job.need is Need.START
    assert stage.start()
    assert {LaunchOrder.decode(info["data"]).task.attempt for info in stage.mesos.accepted} == {0}


def test_a_running_job_keeps_its_tasks() -> None:
    stage = JobStage(spec())
    before = stage.start()
    launched = len(stage.mesos.accepted)
    stage.step(before["worker:0"], 7, 0.5)
    stage.take_over(spec())
    stage.wait(KILL_RETRY_S + 1)
    tasks = {task.name: task for task in stage.job.tasks}
    assert [task.task_id for task in tasks.values()] == [task.task_id for task in before.values()]
    assert (len(stage.mesos.accepted), stage.mesos.killed) == (launched, [])
    stage.step(tasks["worker:0"], 8, 0.25)
    for name, task in tasks.items():
        if name.startswith("worker"):
            stage.update(task, "TASK_FINISHED", ended(0))
    stage.end_killed()
    outcome = stage.job.outcome()
    assert stage.job.done
    assert outcome.state is JobState.FINISHED
    assert outcome.result is not None
    assert (outcome.result["steps"], outcome.result["loss"], outcome.result["restarts"]) == (8, 0.25, 0)


def test_a_task_that_failed_meanwhile_restarts_the_job_and_counts() -> None:
    stage = JobStage(spec())
    tasks = stage.start()
    stage.take_over(spec())
    stage.update(tasks["ps:0"], "TASK_FAILED", ended(1))
    stage.end_killed()
    assert (stage.job.need, stage.job.result.restarts) == (Need.REPLACE_LOST, 1)
    stage.take_over(spec())
    assert (stage.job.need, stage.job.result.restarts) == (Need.REPLACE_LOST, 1)
    again = stage.start()
    assert not {task.task_id for task in again.values()} & {task.task_id for task in tasks.values()}


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_stopping_job_stops_until_all_tasks_have_ended(comes_back: bool) -> None:
    stage = JobStage(spec())
    tasks = stage.start()
    if comes_back:
        stage.update(tasks["ps:0"], "TASK_LOST")
    else:
        stage.job.cancel()
    stage.mesos.killed.clear()
    stage.take_over(spec())
    stage.wait(0.1)
    live = {task.task_id for task in tasks.values() if not task.state.is_terminal()}
    assert set(stage.mesos.killed) == live
    stage.wait(100 * KILL_RETRY_S)
    assert not stage.job.done, "silence is no end"
    assert stage.job.need is Need.NOTHING
    stage.end_killed()
    assert stage.job.done is not comes_back
    if comes_back:
        assert stage.job.need is Need.REPLACE_LOST
    else:
        assert stage.job.outcome().state is JobState.KILLED


def test_a_job_that_has_ended_stays_ended() -> None:
    stage = JobStage(spec())
    tasks = stage.start()
    stage.step(tasks["worker:0"], 9, 0.125)
    for name, task in tasks.items():
        if name.startswith("worker"):
            stage.update(task, "TASK_FINISHED", ended(0))
    stage.end_killed()
    result = stage.job.result.to_json()
    stage.take_over(spec())
    stage.job.cancel()
    assert stage.job.done
    assert stage.job.outcome().state is JobState.FINISHED
    assert stage.job.outcome().result == result


def test_a_job_keeps_the_model_that_its_chief_has_found() -> None:
    job_spec = spec(profile_is_kept=True)
    found = made_up_profile({"w": (300, 100)}, flops=6e5, batch_size=64)
    stage = JobStage(job_spec)
    chief = stage.start()["worker:0"]
    stage.say(chief, Report(chief.task_id, {"type": "profile", "profile": found.to_json()}))
    stage.update(chief, "TASK_FAILED", ended(EXIT_CODE_OTHER_MODEL))
    stage.end_killed()
    stage.take_over(job_spec)
    stage.start()
    stage.take_over(job_spec)
    assert stage.job.result.plan is not None
    assert stage.job.result.plan.profile == found
    assert LaunchOrder.decode(stage.mesos.accepted[-1]["data"]).task.cached_batch_size is None


def test_all_tasks_are_written_down_before_the_first_is_launched() -> None:
    stage, mesos = written_at_launch(spec())
    stage.start(agents=2)
    agents = {info["agent_id"]["value"] for info in mesos.accepted}
    assert len(mesos.states) == len(agents)
    for state in mesos.states:
        assert {task["task_id"] for task in state["tasks"]} == {info["task_id"]["value"] for info in mesos.accepted}
        assert state["phase"] == Phase.RUNNING


@pytest.mark.parametrize("intended", [False, True])
def test_tasks_that_were_only_to_be_launched_restart_the_job_and_do_not_count(intended: bool) -> None:
    """Killed before anything was written of a part of the launch, or after that and before the call."""
    job_spec = spec(max_restarts=0, profile=profile(synchronous=True))
    stage, mesos = written_at_launch(job_spec)
    stage.start(agents=2)
    *launched, last = [info["task_id"]["value"] for info in mesos.accepted]
    stage.begin(job_spec, mesos.states[-1], [*launched, last] if intended else launched)
    stage.subscribe(master_age_s=RECONCILE_AFTER_S)
    stage.wait(0.1)
    for task_id in launched:
        stage.update(stage.launched[task_id], "TASK_RUNNING")
    if intended:
        assert not stage.mesos.killed, "nothing was heard of it yet"
        stage.update(stage.launched[last], "TASK_LOST", reason="REASON_RECONCILIATION", source="SOURCE_MASTER")
    assert set(stage.mesos.killed) == set(launched)
    stage.end_killed()
    assert (stage.job.need, stage.job.result.restarts) == (Need.REPLACE_LOST, 0)
    stage.start(agents=2)
    ids = [info["task_id"]["value"] for info in mesos.accepted]
    assert len(set(ids)) == len(ids), "launched twice"


def test_a_task_whose_script_could_not_be_fetched_without_a_service_does_not_count() -> None:
    job_spec = spec(max_restarts=0)
    stage, mesos = written_at_launch(job_spec)
    stage.start()
    stage.begin(job_spec, mesos.states[0])
    stage.subscribe()
    for task in stage.job.tasks:
        stage.update(task, "TASK_STARTING")
        stage.update(task, "TASK_FAILED", ended(1))
    stage.wait(0.1)
    assert (stage.job.need, stage.job.result.restarts) == (Need.REPLACE_LOST, 0)
    for task in stage.start().values():
        stage.update(task, "TASK_FAILED", ended(1))
    stage.wait(0.1)
    assert stage.job.outcome().state is JobState.FAILED


def test_a_task_that_was_seen_running_and_is_lost_counts() -> None:
    stage = JobStage(spec(max_restarts=0, profile=profile(synchronous=True)))
    tasks = stage.start()
    stage.take_over(spec(max_restarts=0, profile=profile(synchronous=True)))
    stage.update(tasks["worker:0"], "TASK_LOST", reason="REASON_RECONCILIATION", source="SOURCE_MASTER")
    stage.end_killed()
    assert stage.job.outcome().state is JobState.FAILED


def test_a_worker_that_was_to_rejoin_is_waited_for_anew() -> None:
    job_spec = spec(max_restarts=1)
    stage = JobStage(job_spec)
    tasks = stage.start(agents=1)
    stage.step(tasks["worker:0"], 5)
    lost = tasks["worker:1"]
    stage.update(lost, "TASK_FAILED", ended(1))
    stage.take_over(job_spec)
    assert (stage.job.need, stage.mesos.killed) == (Need.REPLACE_LOST, [])
    stage.offer(stage.mesos.offer(0))
    stage.wait(SETTLE_S + 0.1)
    back = next(task for task in stage.job.tasks if task.name == "worker:1")
    assert (back.address, back.state) == (lost.address, TaskState.STAGING)
    assert back.task_id != lost.task_id
    assert stage.job.result.restarts == 1


def test_a_rejoining_worker_is_written_down_before_it_is_launched() -> None:
    stage, mesos = written_at_launch(spec())
    tasks = stage.start()
    stage.step(tasks["worker:0"], 5)
    stage.update(tasks["worker:1"], "TASK_FAILED", ended(1))
    stage.offer(stage.mesos.offer(0))
    stage.wait(SETTLE_S + 0.1)
    assert mesos.accepted[-1]["task_id"]["value"] in {task["task_id"] for task in mesos.states[-1]["tasks"]}


@pytest.mark.parametrize(("age_s", "after_s"), [(None, RECONCILE_AFTER_S), (0.0, RECONCILE_AFTER_S), (1e4, 0.0)])
def test_states_are_asked_for_once_the_master_can_know_them(age_s: float | None, after_s: float) -> None:
    stage = JobStage(spec())
    tasks = stage.start()
    stage.begin(spec(), stage.written_state())
    stage.subscribe(age_s)
    stage.wait(max(0.0, after_s - 1.0))
    if after_s:
        assert not stage.mesos.reconciled
        stage.wait(1.1)
    assert stage.mesos.reconciled == [{task.task_id: task.agent_id for task in tasks.values()}]


def test_missing_output_is_requested() -> None:
    job_spec = spec(profile=profile(Api.KERAS))
    stage = JobStage(job_spec)
    chief = stage.start()["chief:0"]
    stage.say(chief, LogChunk(chief.task_id, "stdout", 0, b"one "))
    # All received output is in the database, except the blank.
    stage.begin(job_spec, {**stage.written_state(), "received": {chief.task_id: {"stdout": 3}}})
    stage.subscribe()
    asked = [(to, WantedOutput.decode(data)) for to, data in stage.mesos.messages]
    assert asked == [(chief.task_id, WantedOutput({"stdout": 3, "stderr": 0}))]
    stage.observer.output = b""
    stage.say(chief, LogChunk(chief.task_id, "stdout", 10, b"three "))
    stage.say(chief, LogChunk(chief.task_id, "stdout", 3, b" meanwhile three "))
    stage.say(chief, LogChunk(chief.task_id, "stdout", 20, b"four "))
    assert stage.observer.output == b" meanwhile three four "
    stage.update(stage.launched[chief.task_id], "TASK_FINISHED", ended(0, {"stdout": 25}))
    stage.end_killed()
    assert stage.job.done
    assert stage.observer.notes == []


def test_output_that_never_came_because_no_service_was_there_is_not_called_lost() -> None:
    job_spec = spec(profile=profile(Api.KERAS))
    stage = JobStage(job_spec)
    chief = stage.start()["chief:0"]
    stage.say(chief, LogChunk(chief.task_id, "stdout", 0, b"all there is"))
    stage.take_over(job_spec)
    stage.update(stage.launched[chief.task_id], "TASK_FINISHED", ended(0, {"stdout": 12}))
    stage.end_killed()
    assert stage.job.done
    assert stage.observer.notes == [
        "the output that chief:0 wrote while no service was running is missing here; it is in /sandbox on agent-0"
    ]


def test_a_patient_job_waits_where_it_fits_nothing_yet() -> None:
    nodes = [SMALL]
    stage = JobStage(spec())
    for patient in (False, True):
        stage.begin(spec(), all_agents=lambda: list(nodes), patient=patient)
        stage.subscribe()
        stage.offer(stage.mesos.offer(0, cpus=0.1))
        if not patient:
            with pytest.raises(InfeasibleError, match="can never start"):
                stage.wait(SETTLE_S + 0.1)
    stage.wait(SETTLE_S + 0.1)
    assert "can never start on the agents there are" in stage.observer.waits[-1]
    nodes[0] = NodeClass(name="S0", cpus=8, mem_bytes=64 * GIB, disk_bytes=64 * GIB)
    assert stage.start()


@pytest.mark.parametrize(
    "damage", [{"version": 0}, {"phase": "dancing"}, {"tasks": [{}]}, {"plan": {"tasks": []}}, {"attempt": "many"}]
)
def test_a_state_that_cannot_be_read_is_one_clear_sentence(damage: dict[str, Any]) -> None:
    stage = JobStage(spec())
    stage.start()
    with pytest.raises(BadInputError, match="written by another version of Dike"):
        stage.begin(spec(), {**stage.written_state(), **damage})


# Any course of events.

ACTIONS = st.one_of(
    st.just(("offer",)),
    st.tuples(st.just("wait"), st.sampled_from([0.1, 1.0, 30.0])),
    st.tuples(
        st.just("update"),
        st.integers(0, 4),
        st.sampled_from(["TASK_RUNNING", "TASK_FINISHED", "TASK_FAILED", "TASK_LOST", "TASK_KILLED", "TASK_GONE"]),
    ),
    st.tuples(st.just("step"), st.integers(0, 4), st.integers(1, 99)),
    st.just(("cancel",)),
)


def act(stage: JobStage, action: tuple[Any, ...]) -> None:
    tasks = stage.job.tasks
    match action:
        case ("offer",):
            stage.offer(stage.mesos.offer(0), stage.mesos.offer(1))
            stage.wait(SETTLE_S + 0.1)
        case ("wait", seconds):
            stage.wait(seconds)
        case ("update", index, state) if tasks:
            stage.update(tasks[index % len(tasks)], state, ended(0 if state == "TASK_FINISHED" else 1))
        case ("step", index, step) if tasks:
            task = tasks[index % len(tasks)]
            stage.say(task, Report(task.task_id, {"type": "progress", "step": step, "loss": 1.0}))
        case ("cancel",):
            stage.job.cancel()


@examples(30)
@given(actions=st.lists(ACTIONS, max_size=12), api=st.sampled_from([Api.GRAPH, Api.KERAS]), moment=st.integers(0, 12))
def test_state_is_restored_unchanged_and_the_job_continues(
    actions: list[tuple[Any, ...]], api: Api, moment: int
) -> None:
    job_spec = spec(profile=profile(api))
    stage = JobStage(job_spec)
    stage.offer(stage.mesos.offer(0))
    stage.wait(SETTLE_S + 0.1)
    for number, action in enumerate(actions):
        act(stage, action)
        state = stage.written_state()
        assert stage.written_state() == state, "it is not stable"
        again = JobStage(job_spec)
        again.begin(job_spec, state)
        assert again.written_state() == state
        if number == moment and not stage.job.done:
            stage.take_over(job_spec)
    for _ in range(200):
        if stage.job.done:
            break
        stage.job.cancel()
        for task in stage.launched.values():
            if not task.state.is_terminal():
                stage.update(task, "TASK_KILLED")
        stage.wait(1.0)
    assert stage.job.done, "it never ends"
    ids = [info["task_id"]["value"] for info in stage.mesos.accepted]
    assert len(set(ids)) == len(ids), "launched twice"
