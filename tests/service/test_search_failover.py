"""Searches of a service that is killed in the middle: real Mesos, real trials, a real database."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from framework.embedded.agents import AgentSpec
from framework.embedded.cluster import EmbeddedCluster
from framework.mesos.events import Event
from framework.policies.trials.interface import PolicySettings
from framework.project import bundle
from framework.scheduler.records import JobRecord, JobState
from framework.search.records import Parameter, SearchSpec, TrialState
from framework.search.store import Store
from framework.service.requests import search_request
from framework.service.store import ServiceStore
from framework.service.submission import Submissions
from tests import warm
from tests.waiting import wait_until, whole_lines
from tests.warm import Warm

pytestmark = [pytest.mark.mesos, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
COUNTING = ROOT / "tests" / "search" / "scripts" / "counting.py"
DEADLINE_S = 120.0
MANY_STEPS = 100_000
"""More steps than a trial reaches before the test ends it."""


class SearchFailoverStage:
    """A Mesos, a database, and a service that comes and goes.

    Args:
        folder: gets all files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"sqlite:///{folder}/service.db"
        self.store = ServiceStore(self.url)
        self._inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None

    def submit(self, name: str, lrs: tuple[float, ...], user: str, **changes: Any) -> JobRecord:
        values: dict[str, Any] = {
            "arguments": ("--steps", str(MANY_STEPS), "--pause", "0.02", "--diary", str(self.diary(name))),
            "flags": {"lr": "--lr"},
            "space": (Parameter("lr", choices=lrs),),
            "sampler": "grid",
            "trial_count": len(lrs),
            "slot_mem_mib": 128.0,
            "slot_cpus": 0.25,
            "settings": PolicySettings(quantum_s=1.0),
        }
        spec = SearchSpec(name, str(COUNTING), **{**values, **changes})
        request = search_request(spec, COUNTING.name, ())
        return Submissions(self.store, self._inbox).submit(request, bundle.pack(COUNTING), user)

    def diary(self, name: str) -> Path:
        return self.folder / name / "diary.txt"

    def steps(self, name: str) -> dict[float, dict[int, str]]:
        """Learning rate -> step -> loss, as the trials wrote them; each step once."""
        found: dict[float, dict[int, str]] = defaultdict(dict)
        for lr, _, step, loss in whole_lines(self.diary(name)):
            assert int(step) not in found[float(lr)], f"step {step} of {lr} was done twice"
            found[float(lr)][int(step)] = loss
        return found

    def turns(self, name: str) -> int:
        """How often a trial of a search was given a slot."""
        with contextlib.closing(Store(self.url)) as store:
            store.open_search(name)
            return len(store.load_slices())

    def processes(self, name: str) -> dict[float, set[int]]:
        found: dict[float, set[int]] = defaultdict(set)
        for lr, pid, *_ in whole_lines(self.diary(name)):
            found[float(lr)].add(int(pid))
        return found

    def start(self, master: str) -> None:
        command = [sys.executable, "-m", "tests.faults.service_process", self.url, master, str(self.folder), "-"]
        with (self.folder / "service.log").open("ab") as log:
            self._process = Warm(command, cwd=ROOT, stdout=log, stderr=log)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def wait_for(self, condition: Callable[[], Any], what: str) -> None:
        wait_until(condition, what, said=(self.folder / "service.log").read_text)

    def state(self, name: str) -> JobState:
        record = self.store.job(name)
        assert record is not None
        return record.state


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[SearchFailoverStage]:
    made = SearchFailoverStage(tmp_path)
    for name in ("even", "turns"):
        (tmp_path / name).mkdir()
    yield made
    made.kill()
    made.store.close()


@pytest.fixture(scope="module")
def mesos() -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster([AgentSpec(resources="cpus:1;mem:2048"), AgentSpec(resources="cpus:1;mem:2048")]) as up:
        up.wait_for_agents(60)
        yield up


def undisturbed(lr: float, steps: int) -> dict[int, str]:
    loss, losses = 1.0, {}
    for step in range(1, steps + 1):
        loss *= 1 - lr
        losses[step] = loss.hex()
    return losses


def test_trials_run_on_while_no_service_is_there_and_nothing_they_report_is_lost(
    stage: SearchFailoverStage, mesos: EmbeddedCluster
) -> None:
    stage.submit("even", (0.01, 0.02), "ann", policy="fifo")
    stage.submit("turns", (0.01, 0.02, 0.04), "bob", policy="rr", max_slots=2)
    stage.start(mesos.master)
    stage.wait_for(lambda: len(stage.steps("even")) == 2, "two trials of the one")
    stage.wait_for(lambda: len(stage.steps("turns")) == 3, "turns of the other")
    stage.kill()
    before = {lr: max(steps) for lr, steps in stage.steps("even").items()}
    stage.wait_for(lambda: all(max(stage.steps("even")[lr]) > step + 20 for lr, step in before.items()), "steps alone")
    # One trial ends while the service is down.
    (stage.folder / "even" / "end-0.01").touch()
    slots = {task.task_id for task in stage.store.tasks(live_only=True)}
    last = stage.steps("even")[0.01]
    stage.start(mesos.master)
    # Three trials in two slots: which two of them take turns is for the policy to say.
    turns = stage.turns("turns")
    stage.wait_for(lambda: stage.turns("turns") > turns, "another turn")
    assert {task.task_id for task in stage.store.tasks(live_only=True)} <= slots, "a slot was launched again"
    (stage.folder / "even" / "end-0.02").touch()
    for lr in (0.01, 0.02, 0.04):
        (stage.folder / "turns" / f"end-{lr}").touch()
    for name in ("even", "turns"):
        stage.wait_for(lambda name=name: stage.state(name).has_ended(), f"the end of {name}")
        assert stage.state(name) is JobState.FINISHED
    assert last.items() <= stage.steps("even")[0.01].items()
    assert {lr: len(pids) for lr, pids in stage.processes("even").items()} == {0.01: 1, 0.02: 1}
    assert {task.task_id for task in stage.store.tasks()} == slots
    assert not stage.store.tasks(live_only=True)
    for name in ("even", "turns"):
        check_losses(stage, name)
        assert {"task", "trial", "ended"} <= {event.kind for event in stage.store.history.events(name)}


def check_losses(stage: SearchFailoverStage, name: str) -> None:
    """Each trial's losses are those of an undisturbed one, and the database has all of them, and what was printed."""
    with contextlib.closing(Store(stage.url)) as store:
        store.open_search(name)
        trials, losses, slices = store.load_trials(), store.load_losses(), store.load_slices()
        printed = {trial.number: "".join(chunk.text for chunk in store.load_output(trial.number)) for trial in trials}
    done = stage.steps(name)
    for trial in trials:
        lr = trial.parameters["lr"]
        assert isinstance(lr, float)
        steps = done[lr]
        assert steps == undisturbed(lr, len(steps))
        assert trial.state is TrialState.FINISHED
        lines = [line for line in printed[trial.number].splitlines() if not line.startswith("--- run ")]
        assert lines == [f"loss {float.fromhex(loss):.9f}" for loss in steps.values()]
        told = losses[trial.number]
        assert sum(report["count"] for report in told) == len(steps)
        assert told[-1]["step"] == len(steps)
        assert float.fromhex(steps[told[0]["step"]]) == pytest.approx(told[0]["low"])
    assert all(piece.outcome in ("finished", "suspended") for piece in slices)


def test_a_killed_search_suspends_its_trials_and_can_be_resumed(
    stage: SearchFailoverStage, mesos: EmbeddedCluster
) -> None:
    job = stage.submit("even", (0.01, 0.02), "ann", policy="fifo")
    stage.start(mesos.master)
    stage.wait_for(lambda: len(stage.steps("even")) == 2, "two trials")
    stage.kill()
    # Asked for while no service is there.
    Submissions(stage.store, queue.SimpleQueue()).kill(job)
    stage.start(mesos.master)
    stage.wait_for(lambda: stage.state("even") is JobState.KILLED, "its end")
    record = stage.store.job("even")
    assert record is not None
    assert record.result is not None
    assert [trial["state"] for trial in record.result["trials"]] == ["suspended", "suspended"]
    steps = stage.steps("even")
    assert all(trial["step"] == len(steps[trial["parameters"]["lr"]]) for trial in record.result["trials"])
    stage.kill()
    for lr in (0.01, 0.02):
        (stage.folder / "even" / f"end-{lr}").touch()
    go_on = [sys.executable, "-m", "framework", "tune", "--resume", "even", "--storage", stage.url]
    done = warm.run([*go_on, "--master", mesos.master], cwd=COUNTING.parent, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    with contextlib.closing(Store(stage.url)) as store:
        store.open_search("even")
        assert {trial.state for trial in store.load_trials()} == {TrialState.FINISHED}
    stage.steps("even")
