"""The job's state machine, fed with events; only Mesos' calls are fakes, the planner is real."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from typing import Any

import pytest

from dike.checkpoints import fingerprint
from dike.exceptions import BadInputError, InfeasibleError
from dike.process import EXIT_CODE_OTHER_LAYOUT, EXIT_CODE_OTHER_MODEL
from dike.profile import Api
from executor.messages import LaunchOrder, LogChunk, Outcome, Report
from framework.mesos import events
from framework.mesos.offers import NO_OFFER_TIMEOUT_S
from framework.mesos.tasks import TaskState, executor_of
from framework.project.failure_summary import MAX_SUMMARY_CHARS
from framework.scheduler.agents import no_matching_agent_error
from framework.scheduler.job import Need
from framework.scheduler.offer_pool import MAX_COLLECT_S, SETTLE_S
from framework.scheduler.reconciler import INITIAL_RETRY_S, RECONCILE_AFTER_S
from framework.scheduler.task_tracker import KILL_RETRY_S
from framework.training.controller import REPLACEMENT_TIMEOUT_S
from framework.training.spec import JobTask
from solver import NodeClass
from solver.settings import PlanSettings
from tests.profiles import made_up_profile
from tests.training.job_stage import GIB, JobStage, ended, profile, spec


def test_all_tasks_are_launched_together_with_one_cluster_spec() -> None:
    stage = JobStage(spec())
    tasks = stage.start(agents=2)
    assert {name.split(":")[0] for name in tasks} == {"ps", "worker"}
    orders = [LaunchOrder.decode(info["data"]) for info in stage.mesos.accepted]
    assert len(orders) == len(tasks)
    assert all(order.task.cluster == orders[0].task.cluster for order in orders)
    addresses = [address for role in orders[0].task.cluster.values() for address in role]
    assert len(set(addresses)) == len(tasks)
    assert sorted(addresses) == sorted(stage.job.result.addresses.values())
    assert [order.stream_logs for order in orders].count(True) == 1


@pytest.mark.parametrize("isolate_tasks", [False, True])
def test_what_is_launched_is_what_was_planned(isolate_tasks: bool) -> None:
    stage = JobStage(spec(isolate_tasks=isolate_tasks))
    tasks = stage.start(agents=2).values()
    executors = {executor_of(info): info["executor"]["resources"] for info in stage.mesos.accepted}
    assert len(executors) == (len(tasks) if isolate_tasks else 2)
    for agent in ("S0", "S1"):
        here = [task for task in tasks if task.agent_id == agent]
        infos = [info["resources"] for info in stage.mesos.accepted if info["agent_id"]["value"] == agent]
        pieces = itertools.chain(*infos, *(executors[one] for one in {task.executor_id for task in here}))
        totals: Counter[str] = Counter()
        for piece in pieces:
            totals[piece["name"]] += piece.get("scalar", {}).get("value", 0)
        assert totals["cpus"] == pytest.approx(sum(task.planned.cpus for task in here), abs=1e-3)
        assert totals["mem"] == pytest.approx(sum(task.planned.mem_mb for task in here), abs=1e-3)


def test_offers_are_waited_for_while_they_keep_coming_but_not_for_ever() -> None:
    stage = JobStage(spec())
    began_s = stage.now
    while not stage.mesos.accepted:
        stage.offer(stage.mesos.offer(0, cpus=0.5, mem=1024))
        stage.wait(SETTLE_S / 2)
    assert MAX_COLLECT_S <= stage.now - began_s < MAX_COLLECT_S + SETTLE_S


def test_no_more_offers_are_waited_for_where_all_agents_that_there_are_have_made_one() -> None:
    stage = JobStage(spec(), own_agents=2)
    stage.offer(stage.mesos.offer(0))
    stage.wait(0.0)
    assert not stage.mesos.accepted
    stage.offer(stage.mesos.offer(1))
    stage.wait(0.0)
    assert stage.mesos.accepted


def find_other_layout(stage: JobStage) -> None:
    """A job starts, and its chief finds the checkpoints of the other kind of job."""
    stage.start()
    chief = next(task for task in stage.job.tasks if stage.job_spec.is_chief(task.planned))
    stage.update(chief, "TASK_FAILED", ended(EXIT_CODE_OTHER_LAYOUT))
    stage.end_killed()


def test_a_job_is_planned_to_fit_the_checkpoints_that_it_finds() -> None:
    stage = JobStage(spec(planning=PlanSettings()))
    find_other_layout(stage)
    assert "are of a job with parameter servers; planning again" in stage.observer.notes[-1]
    stage.start()
    assert "ps:0" in {task.name for task in stage.job.tasks}
    assert stage.job.result.restarts == 0
    # The next service knows it, too.
    state = stage.job.to_state()
    assert state["plain"] is False
    stage.begin(spec(planning=PlanSettings()), state)
    stage.subscribe()
    assert stage.job.to_state()["plain"] is False


def test_a_job_of_both_kinds_of_checkpoints_ends() -> None:
    stage = JobStage(spec(planning=PlanSettings()))
    find_other_layout(stage)
    assert not stage.job.done
    find_other_layout(stage)
    assert stage.job.done
    assert "are of both kinds" in stage.job.result.failure


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--strategy ps", {}),
        ("--min-workers", {"planning": PlanSettings(), "min_workers": 2}),
        ("--elastic", {"planning": PlanSettings(), "elastic": (1, 2), "max_workers": None}),
    ],
)
def test_requested_parameter_servers_cannot_resume_a_job_without(option: str, values: dict[str, Any]) -> None:
    stage = JobStage(spec(**values))
    find_other_layout(stage)
    assert stage.job.done
    says = f"are of a job without parameter servers; leave out {option}, or name another folder"
    assert says in stage.job.result.failure
    assert "worker:0 cannot resume from /checkpoints. " in stage.job.result.failure


def test_a_restarted_plain_job_stays_plain() -> None:
    stage = JobStage(spec(planning=PlanSettings()))
    (task,) = stage.start().values()
    assert task.planned.is_plain
    stage.say(task, Report(task.task_id, {"type": "checkpoint", "path": "run-0-step-10", "step": 10}))
    stage.update(task, "TASK_LOST")
    assert stage.job.need is Need.REPLACE_LOST
    assert stage.job.to_state()["plain"] is True


def test_a_rescinded_offer_is_not_used() -> None:
    stage = JobStage(spec())
    gone = stage.mesos.offer(0)
    stage.offer(gone, stage.mesos.offer(1))
    stage.handle(events.OfferRescinded(gone["id"]["value"]))
    stage.wait(SETTLE_S + 0.1)
    assert {info["agent_id"]["value"] for info in stage.mesos.accepted} == {"S1"}


def test_too_little_on_offer_is_declined_and_named() -> None:
    stage = JobStage(spec())
    offer = stage.mesos.offer(0, cpus=0.1)
    stage.offer(offer)
    stage.wait(SETTLE_S + 0.1)
    assert not stage.mesos.accepted
    assert stage.mesos.declined == [offer["id"]["value"]]
    assert "agent-0 0.1 cpus" in stage.observer.waits[0]
    stage.start()
    assert stage.mesos.accepted


def test_agents_without_ports_are_named() -> None:
    stage = JobStage(spec())
    stage.offer(stage.mesos.offer(0, ports=False))
    stage.wait(SETTLE_S + 0.1)
    assert "ports" in stage.observer.waits[0]


def test_a_job_that_can_never_fit_ends_at_once() -> None:
    small = NodeClass(name="S0", count=1, cpus=0.1, mem_bytes=GIB, gpus=0, gpu_model=None, disk_bytes=GIB)
    stage = JobStage(spec(), all_agents=[small])
    stage.offer(stage.mesos.offer(0, cpus=0.1))
    with pytest.raises(InfeasibleError, match="can never start"):
        stage.wait(SETTLE_S + 0.1)


def test_no_offer_at_all_is_told() -> None:
    stage = JobStage(spec(), all_agents=[])
    stage.wait(NO_OFFER_TIMEOUT_S + 1)
    assert stage.observer.waits == ["No agent is registered with the Mesos master."]


@pytest.mark.parametrize("has_offers", [False, True])
def test_constraints_that_no_agent_meets_are_told(has_offers: bool) -> None:
    def no_agents() -> list[NodeClass]:
        raise no_matching_agent_error(["rack:IS:r7"])

    stage = JobStage(spec())
    stage.begin(spec(), all_agents=no_agents, patient=True)
    stage.subscribe()
    if has_offers:
        stage.offer(stage.mesos.offer(0, cpus=0.1))
    stage.wait(NO_OFFER_TIMEOUT_S + 1)
    assert stage.observer.waits[0].startswith("No agent meets --constraint rack:IS:r7.")


def test_a_v1_job_ends_well_when_its_last_worker_has() -> None:
    stage = JobStage(spec())
    tasks = stage.start()
    workers = [task for name, task in tasks.items() if name.startswith("worker")]
    for worker in workers:
        assert not stage.job.result.succeeded
        stage.update(worker, "TASK_FINISHED", ended(0))
    assert stage.mesos.killed == [tasks["ps:0"].task_id]
    stage.end_killed()
    assert stage.job.done
    assert stage.job.result.succeeded


def test_a_keras_job_ends_well_when_its_chief_has() -> None:
    stage = JobStage(spec(profile=profile(Api.KERAS)))
    tasks = stage.start()
    stage.update(tasks["chief:0"], "TASK_FINISHED", ended(0))
    stage.end_killed()
    assert stage.job.done
    assert stage.job.result.succeeded


def test_output_that_did_not_come_with_the_end_is_told_and_not_waited_for() -> None:
    stage = JobStage(spec(profile=profile(Api.KERAS)))
    tasks = stage.start()
    chief = tasks["chief:0"]
    stage.say(chief, LogChunk(chief.task_id, "stdout", 0, b"one "))
    stage.update(chief, "TASK_FINISHED", ended(0, {"stdout": 7}))
    stage.end_killed()
    assert stage.job.done
    assert stage.job.result.succeeded
    assert "lost in transit" in stage.observer.notes[0]


def test_updates_may_come_twice_and_late() -> None:
    stage = JobStage(spec(profile=profile(Api.KERAS)))
    tasks = stage.start()
    chief = tasks["chief:0"]
    stage.update(chief, "TASK_FINISHED", ended(0))
    stage.update(chief, "TASK_FINISHED", ended(0))
    stage.update(chief, "TASK_RUNNING")
    assert chief.state is TaskState.FINISHED
    assert len(stage.mesos.acknowledged) == len(tasks) + 3


def test_a_task_of_an_earlier_attempt_is_ended() -> None:
    stage = JobStage(spec())
    tasks = stage.start()
    stage.handle(
        events.StatusUpdate(
            {"task_id": {"value": "job.worker-0.old"}, "agent_id": {"value": "S0"}, "state": "TASK_RUNNING"}
        )
    )
    assert stage.mesos.killed == ["job.worker-0.old"]
    assert all(not task.state.is_terminal() for task in tasks.values())


def test_a_lost_ps_restarts_the_whole_job_under_new_ids() -> None:
    stage = JobStage(spec())
    before = stage.start()
    stage.step(before["worker:0"], 10)
    stage.update(before["ps:0"], "TASK_LOST", message="agent removed", reason="REASON_AGENT_REMOVED")
    assert set(stage.mesos.killed) == {task.task_id for name, task in before.items() if name != "ps:0"}
    stage.end_killed()
    after = stage.start()
    assert set(after) == set(before)
    assert not {task.task_id for task in after.values()} & {task.task_id for task in before.values()}
    assert not {task.port for task in after.values()} & {task.port for task in before.values()}
    assert stage.job.result.restarts == 1
    assert "ps:0 was lost on agent-0" in stage.observer.restarts[0]


def test_restarts_are_bounded_and_the_failure_names_everything() -> None:
    stage = JobStage(spec(max_restarts=1))
    for _ in range(2):
        tasks = stage.start()
        stage.step(tasks["worker:0"], 10)
        stage.update(tasks["ps:0"], "TASK_FAILED", ended(-9), message="ended by signal 9 (SIGKILL)")
        stage.end_killed()
    assert stage.job.done
    result = stage.job.result
    assert not result.succeeded
    for part in ("ps:0", "agent-0", "SIGKILL", "/sandbox", "--max-restarts"):
        assert part in result.failure
    assert result.failed_tail == "the tail"


def test_a_job_that_gets_on_survives_any_number_of_failures() -> None:
    stage = JobStage(spec(max_restarts=2))
    for step, need in ((10, Need.START), (20, Need.REPLACE_LOST), (20, Need.REPLACE_LOST), (20, Need.START)):
        assert stage.job.need is need
        tasks = stage.start()
        chief = tasks["worker:0"]
        stage.say(chief, Report(chief.task_id, {"type": "checkpoint", "step": step, "path": "/checkpoints/x"}))
        stage.update(tasks["ps:0"], "TASK_LOST", message="agent removed", reason="REASON_AGENT_REMOVED")
        stage.end_killed()
    assert stage.job.done
    assert stage.job.result.restarts == 3
    assert "2 in a row without a newer checkpoint" in stage.job.result.failure


TRACEBACK = """Traceback (most recent call last):
  File "train.py", line 7, in <module>
    raise ValueError("my own mistake")
ValueError: my own mistake
"""


@pytest.mark.parametrize(
    ("tail", "words"),
    [
        (TRACEBACK.replace("ValueError", "OSError"), "OSError: my own mistake (train.py, line 7)"),
        # It was caught, and something said afterwards.
        (f"{TRACEBACK}step 3, loss 0.5\n", "ValueError: my own mistake (train.py, line 7)"),
        ("reading\nno such data set\n\n", "no such data set"),
        (f"error {'x' * 1000}\n", f"error {'x' * (MAX_SUMMARY_CHARS - 6)}..."),
    ],
)
def test_a_script_that_fails_the_same_way_twice_before_a_step_is_given_up(tail: str, words: str) -> None:
    stage = JobStage(spec(max_restarts=10))
    for _ in range(2):
        assert not stage.job.done
        tasks = stage.start()
        outcome = dataclasses.replace(ended(1), tail=tail)
        stage.update(tasks["worker:0"], "TASK_FAILED", outcome, message="exited with status 1")
        stage.end_killed()
    assert stage.job.done
    assert stage.job.result.failure == (
        "worker:0 failed on agent-0: exited with status 1; it failed twice in the same way without "
        "a newer checkpoint; its output is in /sandbox on agent-0"
    )
    assert stage.job.result.last_words == words


FOUND = made_up_profile({"w": (300, 100)}, flops=6e5, batch_size=64)
OTHER_MODEL = "exited with status 77"


def find_other_model(stage: JobStage, reported: object = None) -> dict[str, JobTask]:
    """The job starts, and its chief finds another model than was planned for."""
    tasks = stage.start()
    chief = tasks["worker:0"]
    stage.say(chief, Report(chief.task_id, {"type": "profile", "profile": reported or FOUND.to_json()}))
    stage.update(chief, "TASK_FAILED", ended(EXIT_CODE_OTHER_MODEL), message=OTHER_MODEL)
    stage.end_killed()
    return tasks


def cached_batch_sizes(stage: JobStage) -> list[int | None]:
    """The batch sizes of the model's profile that the tasks of the last launch got."""
    orders = [LaunchOrder.decode(info["data"]) for info in stage.mesos.accepted]
    return [order.task.cached_batch_size for order in orders if order.task.attempt == orders[-1].task.attempt]


def test_another_model_than_the_kept_one_is_planned_for_once() -> None:
    stage = JobStage(spec(profile_is_kept=True, max_restarts=0))
    find_other_model(stage)
    assert set(cached_batch_sizes(stage)) == {64}
    assert "planning again" in stage.observer.notes[-1]
    tasks = stage.start()
    assert set(cached_batch_sizes(stage)) == {None}
    plan = stage.job.result.plan
    assert plan is not None
    assert (plan.profile, stage.job.result.profile) == (FOUND, FOUND)
    assert LaunchOrder.decode(stage.mesos.accepted[-1]["data"]).task.fingerprint == fingerprint(FOUND)
    # Another profile is ignored.
    stage.say(tasks["worker:0"], Report(tasks["worker:0"].task_id, {"type": "profile", "profile": profile().to_json()}))
    assert stage.job.result.profile == FOUND
    for name in ("worker:0", "worker:1"):
        stage.update(tasks[name], "TASK_FINISHED", ended(0))
    stage.end_killed()
    assert stage.job.result.succeeded
    assert stage.job.result.restarts == 0


def test_a_model_that_got_lost_on_its_way_is_read_again_but_not_for_ever() -> None:
    stage = JobStage(spec(profile_is_kept=True, max_restarts=0))
    for nonsense in ({"name": "no profile"}, [1]):
        assert not stage.job.done
        find_other_model(stage, nonsense)
    assert stage.job.done
    assert "--refresh-profile" in stage.job.result.failure


def test_a_plan_of_the_users_is_not_made_anew() -> None:
    first = JobStage(spec())
    first.start()
    stage = JobStage(spec(plan=first.job.result.plan, profile_is_kept=True))
    find_other_model(stage)
    assert stage.job.done
    assert "--plan-only" in stage.job.result.failure


def test_the_same_error_of_another_worker_is_the_same() -> None:
    stage = JobStage(spec(max_restarts=10))
    for name, words in (("worker:0", "OSError: no file x7f31"), ("worker:1", "OSError: no file x9a02")):
        stage.update(stage.start()[name], "TASK_FAILED", raised(words), message="exited with status 1")
        stage.end_killed()
    assert stage.job.done


def raised(words: str) -> Outcome:
    tail = f'Traceback (most recent call last):\n  File "train.py", line 7, in <module>\n    run()\n{words}\n'
    return dataclasses.replace(ended(1), tail=tail)


def attempts_until_given_up(words: str, *, steps: int, saves: bool = False, limit: int = 6) -> int:
    """How often a job is started whose chief always ends with this error."""
    stage = JobStage(spec(max_restarts=limit - 1))
    for attempt in range(1, limit + 1):
        chief = stage.start()["worker:0"]
        for step in range(steps):
            stage.step(chief, step + 1)
        if saves:
            report = {"type": "checkpoint", "step": attempt, "path": "/checkpoints/x"}
            stage.say(chief, Report(chief.task_id, report))
        stage.update(chief, "TASK_FAILED", raised(words), message="exited with status 1")
        stage.end_killed()
        if stage.job.done:
            assert stage.job.result.last_words == f"{' '.join(words.split())} (train.py, line 7)"
            return attempt
    return limit + 1


@pytest.mark.parametrize(
    ("words", "steps", "attempts"),
    [
        # A mistake before the first step: the next attempt would make it, too.
        ("KeyError: 'MY_TOKEN'", 0, 1),
        ("TypeError: unsupported operand", 0, 1),
        ("ValueError: shapes do not match", 0, 1),
        ("RuntimeError: the optimizer has no variables", 0, 1),
        ("__main__.NoData: none", 0, 1),
        ("ValueError: Exception encountered when calling Dense.call().\n\nShapes do not match", 0, 1),
        # Another agent may have the file, or the module.
        ("FileNotFoundError: [Errno 2] No such file or directory: 'data.csv'", 0, 2),
        ("ModuleNotFoundError: No module named 'mine'", 0, 2),
        # Something else may have been wrong for a moment; not twice.
        ("OSError: disk is full, really", 0, 2),
        ("RuntimeError: CUDA error: out of memory", 0, 2),
        ("urllib.error.URLError: <urlopen error timed out>", 0, 2),
        ("tensorflow.python.framework.errors_impl.UnavailableError: worker:1 is away", 0, 2),
        ("RuntimeError: disk is full, really", 3, 2),
        ("KeyError: 'MY_TOKEN'", 3, 2),
        # Errors of other processes may be temporary, provided that the job has trained.
        ("tensorflow.python.framework.errors_impl.UnavailableError: worker:1 is away", 3, 6),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", 3, 6),
    ],
)
def test_a_script_that_is_sure_to_fail_again_is_not_started_again(words: str, steps: int, attempts: int) -> None:
    assert attempts_until_given_up(words, steps=steps) == attempts


def test_a_script_that_gets_on_between_equal_failures_is_started_again() -> None:
    assert attempts_until_given_up("RuntimeError: disk is full", steps=3, saves=True, limit=4) == 5


def test_a_mistake_is_none_where_an_earlier_attempt_has_passed_the_place() -> None:
    stage = JobStage(spec(max_restarts=3))
    chief = stage.start()["worker:0"]
    stage.step(chief, 1)
    stage.update(chief, "TASK_LOST", message="agent removed", reason="REASON_AGENT_REMOVED")
    stage.end_killed()
    stage.update(stage.start()["worker:0"], "TASK_FAILED", raised("KeyError: 'x'"), message="exited with status 1")
    stage.end_killed()
    assert not stage.job.done


def test_an_error_that_was_caught_is_no_mistake() -> None:
    stage = JobStage(spec(max_restarts=3))
    outcome = raised("KeyError: 'x'")
    outcome = dataclasses.replace(outcome, tail=f"{outcome.tail}the mirror is away\n")
    stage.update(stage.start()["worker:0"], "TASK_FAILED", outcome, message="exited with status 1")
    stage.end_killed()
    assert not stage.job.done


def test_an_executor_that_never_reports_points_at_the_installation() -> None:
    stage = JobStage(spec(max_restarts=10))
    reason = "REASON_EXECUTOR_TERMINATED"
    for _ in range(2):
        stage.offer(stage.mesos.offer(0))
        stage.wait(SETTLE_S + 0.1)
        task = stage.job.tasks[0]
        stage.update(task, "TASK_FAILED", message="Executor terminated", source="SOURCE_AGENT", reason=reason)
        stage.end_killed()
    assert stage.job.done
    assert "--agent-python" in stage.job.result.failure


def test_a_task_that_took_too_much_memory_says_which_option_gives_it_more() -> None:
    stage = JobStage(spec(max_restarts=0))
    task = stage.start()["worker:0"]
    message = "Memory limit exceeded: Requested: 576MB Maximum Used: 577MB\n\nMEMORY STATISTICS:\ncache 0"
    reason = "REASON_CONTAINER_LIMITATION_MEMORY"
    stage.update(task, "TASK_FAILED", message=message, source="SOURCE_AGENT", reason=reason)
    stage.end_killed()
    assert "worker:0 failed on " in stage.job.result.failure
    assert (
        "Requested: 576MB Maximum Used: 577MB (--task-mem MIB gives each task at least that)"
        in stage.job.result.failure
    )
    assert "STATISTICS" not in stage.job.result.failure


def test_stale_offers_cost_no_restart() -> None:
    stage = JobStage(spec(max_restarts=0))
    tasks = stage.start()
    for task in tasks.values():
        stage.update(task, "TASK_LOST", message="offers are no longer valid", reason="REASON_INVALID_OFFERS")
    stage.end_killed()
    assert not stage.job.done
    stage.start()
    assert stage.job.result.restarts == 0


def test_a_launch_without_a_master_is_tried_again() -> None:
    stage = JobStage(spec())
    stage.mesos.unavailable = True
    stage.offer(stage.mesos.offer(0))
    stage.wait(SETTLE_S + 0.1)
    assert not stage.job.done
    stage.mesos.unavailable = False
    for task in stage.job.tasks:
        stage.update(task, "TASK_LOST")
    stage.wait(0.1)
    assert stage.start()
    assert stage.job.result.restarts == 0


def test_a_launch_that_the_master_refuses_is_a_failure_told_in_its_words() -> None:
    stage = JobStage(spec(max_restarts=0))
    stage.mesos.refusal = "Failed to send request 400: no such resource"
    stage.offer(stage.mesos.offer(0), stage.mesos.offer(1))
    stage.wait(SETTLE_S + 0.1)
    for task in stage.job.tasks:
        stage.update(task, "TASK_LOST")
    stage.wait(0.1)
    assert stage.job.done
    assert "no such resource" in stage.job.result.failure
    assert len(stage.mesos.declined) == 2


def test_what_could_not_be_declined_is_declined_later() -> None:
    stage = JobStage(spec())
    stage.start()
    stage.mesos.unavailable = True
    late = stage.mesos.offer(3)
    stage.offer(late)
    stage.wait(0.1)
    assert late["id"]["value"] not in stage.mesos.declined
    stage.mesos.unavailable = False
    stage.wait(0.1)
    assert late["id"]["value"] in stage.mesos.declined


def test_a_refused_decline_does_not_end_the_job() -> None:
    stage = JobStage(spec())
    tasks = stage.start()
    stage.mesos.decline_refusal = "Failed to send request 403: Framework is not subscribed"
    stage.offer(stage.mesos.offer(3))
    stage.wait(0.1)
    assert stage.mesos.declined == []
    assert all(not task.state.is_terminal() for task in tasks.values())


def test_offers_are_asked_for_again_when_none_comes() -> None:
    stage = JobStage(spec())
    stage.wait(NO_OFFER_TIMEOUT_S + 1)
    assert stage.mesos.calls == ["revive"]


def test_a_lost_connection_is_reported_once() -> None:
    stage = JobStage(spec())
    stage.start()
    for _ in range(2):
        stage.handle(events.Disconnected())
    stage.handle(events.Subscribed("F", "127.0.0.1:5050"))
    assert [note.partition(" to ")[0] for note in stage.observer.notes] == ["the connection", "connected"]
    assert stage.mesos.calls[-1] == "suppress"


def test_agents_that_are_away_after_a_failure_are_waited_for() -> None:
    small = NodeClass(name="agent-0", count=1, cpus=0.1, mem_bytes=GIB, gpus=0, gpu_model=None, disk_bytes=GIB)
    stage = JobStage(spec(), all_agents=[small])
    tasks = stage.start()
    stage.step(tasks["worker:0"], 10)
    stage.update(tasks["ps:0"], "TASK_LOST", reason="REASON_AGENT_REMOVED")
    stage.end_killed()
    stage.offer(stage.mesos.offer(0, cpus=0.1))
    stage.wait(SETTLE_S + 0.1)
    assert not stage.job.done
    assert len(stage.observer.waits) == 1


def test_a_kill_is_repeated_until_it_is_answered() -> None:
    stage = JobStage(spec())
    stage.start()
    stage.job.cancel()
    stage.wait(0.1)
    first = len(stage.mesos.killed)
    stage.wait(KILL_RETRY_S + 0.1)
    assert len(stage.mesos.killed) == 2 * first
    stage.end_killed()
    assert stage.job.done
    assert not stage.job.result.succeeded


def test_the_master_is_asked_for_tasks_that_nothing_is_heard_of() -> None:
    stage = JobStage(spec())
    stage.offer(stage.mesos.offer(0))
    stage.wait(SETTLE_S + 0.1)
    silent, *others = stage.job.tasks
    for task in others:
        stage.update(task, "TASK_RUNNING")
    stage.wait(INITIAL_RETRY_S)
    assert {silent.task_id: silent.agent_id} in stage.mesos.reconciled
    stage.update(silent, "TASK_RUNNING")
    asked = [tasks for tasks in stage.mesos.reconciled if tasks]
    stage.wait(10 * INITIAL_RETRY_S)
    assert [tasks for tasks in stage.mesos.reconciled if tasks] == asked


def test_live_tasks_are_reconciled_after_a_reconnection() -> None:
    stage = JobStage(spec())
    tasks = stage.start()
    stage.handle(events.Disconnected())
    stage.handle(events.Subscribed("F", "127.0.0.1:5050"))
    stage.wait(0.1)
    assert stage.mesos.reconciled == []
    stage.wait(RECONCILE_AFTER_S)
    assert stage.mesos.reconciled[-1] == {task.task_id: task.agent_id for task in tasks.values()}


def test_wrong_credentials_are_distinguished() -> None:
    stage = JobStage(spec())
    with pytest.raises(BadInputError, match="--secret-file"):
        stage.handle(events.Refused("no", 401))


def test_offers_that_come_while_the_job_runs_are_declined() -> None:
    stage = JobStage(spec())
    stage.start()
    assert stage.mesos.calls == ["suppress"]
    late = stage.mesos.offer(3)
    stage.offer(late)
    stage.wait(SETTLE_S + 0.1)
    assert late["id"]["value"] in stage.mesos.declined


def test_messages_that_make_no_sense_are_survived() -> None:
    stage = JobStage(spec())
    tasks = stage.start()
    stage.handle(events.MessageArrived("S0", "x", "not base64!"))
    worker = tasks["worker:0"]
    stage.say(worker, Report(worker.task_id, {"type": "progress", "step": "many", "loss": None}))
    stage.say(worker, Report(worker.task_id, {"type": "news"}))
    assert worker.step is None


# Worker replacement.


def test_a_worker_rejoins_alone_under_its_old_address() -> None:
    stage = JobStage(spec())
    tasks = stage.start(agents=2)
    worker = tasks["worker:1"]
    stage.step(tasks["worker:0"], 10)
    stage.update(worker, "TASK_FAILED", ended(-9), message="ended by signal 9 (SIGKILL)")
    assert stage.mesos.killed == []
    launched = len(stage.mesos.accepted)
    stage.offer(stage.mesos.offer(int(worker.node[-1]), cpus=worker.planned.cpus))
    # No better offer is waited for.
    stage.wait(0.0)
    (info,) = stage.mesos.accepted[launched:]
    order = LaunchOrder.decode(info["data"])
    assert order.task.name == "worker:1"
    assert worker.address in order.task.cluster["worker"]
    assert info["task_id"]["value"] != worker.task_id
    assert stage.job.result.restarts == 1


def test_workers_lost_together_are_one_failure() -> None:
    stage = JobStage(spec(max_workers=4, max_restarts=1))
    tasks = stage.start(agents=4)
    stage.step(tasks["worker:0"], 10)
    for name in ("worker:1", "worker:2", "worker:3"):
        stage.update(tasks[name], "TASK_FAILED", ended(-9))
    assert stage.job.result.restarts == 1
    assert stage.mesos.killed == []


def test_the_workers_of_a_removed_agent_do_not_wait_for_it() -> None:
    stage = JobStage(spec(max_workers=4, max_restarts=1))
    tasks = stage.start(agents=4)
    stage.step(tasks["worker:0"], 10)
    for name in ("worker:1", "worker:2"):
        stage.update(tasks[name], "TASK_LOST", reason="REASON_AGENT_REMOVED")
    assert stage.job.result.restarts == 1
    assert tasks["ps:0"].task_id in stage.mesos.killed
    stage.end_killed()
    assert not stage.job.done


def test_the_tasks_of_an_agent_that_is_started_anew_are_one_failure() -> None:
    stage = JobStage(spec(max_restarts=1))
    tasks = stage.start()
    stage.step(tasks["worker:0"], 10)
    for name in ("worker:1", "ps:0", "worker:0"):
        stage.update(tasks[name], "TASK_LOST", reason="REASON_AGENT_DISCONNECTED")
    assert stage.job.result.restarts == 1
    stage.end_killed()
    assert not stage.job.done
    assert set(stage.start()) == set(tasks)


def test_a_worker_whose_place_is_not_offered_again_restarts_the_job() -> None:
    stage = JobStage(spec())
    tasks = stage.start(agents=2)
    stage.step(tasks["worker:0"], 10)
    stage.update(tasks["worker:1"], "TASK_FAILED", ended(-9))
    stage.wait(REPLACEMENT_TIMEOUT_S + 1)
    assert tasks["ps:0"].task_id in stage.mesos.killed


@pytest.mark.parametrize("which", ["chief worker", "synchronous"])
def test_other_workers_cannot_rejoin(which: str) -> None:
    stage = JobStage(spec(profile=profile(synchronous=which == "synchronous")))
    tasks = stage.start(agents=2)
    stage.step(tasks["worker:0"], 10)
    stage.update(tasks["worker:0" if which == "chief worker" else "worker:1"], "TASK_FAILED", ended(-9))
    assert tasks["ps:0"].task_id in stage.mesos.killed
