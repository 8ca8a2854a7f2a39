"""`dike tune` from outside: a real Mesos, real processes, the command as a user types it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import signal
import sqlite3
import subprocess
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from optuna.storages import RDBStorage

from framework.embedded.agents import AgentSpec
from framework.embedded.cluster import EmbeddedCluster
from framework.search.store import Store
from tests import task_processes, warm
from tests.running import dike_command, dike_environment
from tests.search.locks import locked_by
from tests.search.stored_search import SPEC, add_search
from tests.waiting import wait_until, whole_lines
from tests.warm import Warm

pytestmark = [pytest.mark.mesos, pytest.mark.timeout(300)]

DEADLINE_S = 120.0
OBSERVATION_S = 1.0
"""What it takes to ask a master on a busy machine for its state."""
PAUSE_S = 0.05
"""What a trial's step takes at least."""
LONG = 1000
"""Steps of a trial that runs until the test ends it, with pauses of `LONG_PAUSE_S`."""
LONG_PAUSE_S = 0.2
COUNTING = Path(__file__).parent / "scripts" / "counting.py"
HELD_GPU = Path(__file__).parent / "scripts" / "held_gpu.py"
SLOT = ("--slot-mem", "256", "--slot-cpus", "0.5")


class Tune:
    """Runs `dike` in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.diary = folder / "diary.txt"
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str | Path) -> subprocess.Popen[str]:
        process = Warm(
            dike_command(*arguments),
            cwd=self.folder,
            env=dike_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def hurry(self, *lrs: str) -> None:
        """The trials with these learning rates make no pauses from now on."""
        for lr in lrs:
            (self.folder / f"hurry-{lr}").touch()

    def run(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return warm.run(dike_command(*arguments), cwd=self.folder, env=dike_environment(), timeout=DEADLINE_S)

    def json(self, *arguments: str | Path) -> Any:
        done = self.run(arguments[0], "--format", "json", *arguments[1:])
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def trajectories(self) -> dict[str, dict[int, str]]:
        """Learning rate -> step -> loss, as the trials wrote them; what was trained twice has to be the same."""
        losses: dict[str, dict[int, str]] = defaultdict(dict)
        for lr, _, step, loss in whole_lines(self.diary):
            assert losses[lr].setdefault(int(step), loss) == loss, f"step {step} of {lr}"
        return losses

    def last_step(self, lr: str) -> int:
        """The last step that a trial has written."""
        return max((int(step) for of_lr, _, step, _ in whole_lines(self.diary) if of_lr == lr), default=0)

    def newest_process(self) -> int:
        """The process that wrote last."""
        return int(whole_lines(self.diary)[-1][1])

    def runs(self) -> dict[str, set[int]]:
        """Learning rate -> processes that the trial has had."""
        runs: dict[str, set[int]] = defaultdict(set)
        for lr, pid, _, _ in whole_lines(self.diary):
            runs[lr].add(int(pid))
        return runs

    def processes(self) -> set[int]:
        """Processes that the trials have had."""
        return set().union(*self.runs().values())


@pytest.fixture
def tune(tmp_path: Path) -> Iterator[Tune]:
    tune = Tune(tmp_path)
    yield tune
    for process in tune.started:
        process.kill()


@pytest.fixture(scope="module")
def mesos() -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster([AgentSpec(resources="cpus:2;mem:2048;gpus:2"), AgentSpec(resources="cpus:2;mem:2048")]) as up:
        up.wait_for_agents(60)
        yield up


def expected(lr: str, steps: int) -> dict[int, str]:
    loss, losses = 1.0, {}
    for step in range(1, steps + 1):
        loss *= 1 - float(lr)
        losses[step] = loss.hex()
    return losses


def command(tune: Tune, *more: str | Path, lr: str = "0.1,0.2,0.05,0.02", steps: int = 30) -> list[str | Path]:
    pause_s = LONG_PAUSE_S if steps == LONG else PAUSE_S
    extra = ["--", "--steps", str(steps), "--pause", str(pause_s), "--diary", tune.diary]
    if "--" in more:
        at = more.index("--")
        more, extra = more[:at], [*extra, *more[at + 1 :]]
    if "--policy" not in more:
        more = (*more, "--policy", "fifo")
    return ["tune", COUNTING, "--param", f"lr={lr}", "--name", "count", "--quantum", "0.3", *SLOT, *more, *extra]


@pytest.mark.parametrize(
    ("suspend", "script"), [("memory", ()), ("checkpoint", ()), ("memory", ("--", "--unsaved"))], ids=str
)
def test_trials_take_turns_and_lose_nothing(tune: Tune, suspend: str, script: tuple[str, ...]) -> None:
    lrs, steps = ("0.1", "0.2", "0.05", "0.02"), 300
    # Losses of steps in quick succession are reported together. With more steps, other trials would be as accurate.
    accurate = ("--metric", "accuracy", "--mode", "max", "--format", "json")
    more = ("--policy", "rr", "--slots", "2", "--suspend", suspend)
    process = tune.start(*command(tune, *more, *accurate, *script, steps=steps))
    how = {"memory": "continued", "checkpoint": "new"}[suspend]
    wait_until(tune.diary.exists, "a trial")
    wait_until(lambda: (how, True) in kinds_of_slices(tune), "a resumed trial")
    tune.hurry(*lrs)
    stdout, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, stderr
    result = json.loads(stdout)
    assert result["complete"]
    assert result["best"]["parameters"] == {"lr": 0.2}
    assert {trial["state"] for trial in result["trials"]} == {"finished"}
    assert max(trial["runs"] for trial in result["trials"]) > 1
    assert tune.trajectories() == {lr: expected(lr, steps) for lr in lrs}
    if script:
        # What is not saved rests on the one process that a trial has.
        assert {lr: len(processes) for lr, processes in tune.runs().items()} == dict.fromkeys(lrs, 1)
        assert len(whole_lines(tune.diary)) == len(lrs) * steps
    assert ("new", False) in kinds_of_slices(tune)
    assert (("continued", True) in kinds_of_slices(tune)) == (suspend == "memory")
    if suspend == "memory":
        assert "continued" in tune.run("timeline", "count").stdout
    outcomes = [piece["outcome"] for piece in slices_of(tune)]
    assert outcomes.count("finished") == 4
    assert set(outcomes) == {"finished", "suspended"}
    assert tune.run("trials", "count").returncode == 0
    assert tune.run("plot", "count", "-o", "plot.svg").returncode == 0
    assert (tune.folder / "plot.svg").stat().st_size > 1000


def slices_of(tune: Tune) -> list[dict[str, Any]]:
    slices = tune.json("timeline", "count")
    return slices["slices"] if isinstance(slices, dict) else slices


def kinds_of_slices(tune: Tune) -> set[tuple[str, bool]]:
    """How time slices have begun to train: in which process, and whether the trial had run before."""
    return {(piece["process"], piece["run"] > 0) for piece in slices_of(tune)}


@pytest.mark.parametrize("policy", [("dike", "--warm-start-from", "before"), ("hermes",)], ids=" ".join)
def test_every_policy_brings_all_trials_to_their_end(tune: Tune, policy: tuple[str, ...]) -> None:
    database = tune.folder / "dike-runs" / "searches.db"
    database.parent.mkdir()
    with contextlib.closing(Store(f"sqlite:///{database}")) as store:
        losses = [[(1 - 0.05 * number) ** step for step in range(1, 13)] for number in range(8)]
        add_search(store, dataclasses.replace(SPEC, name="before"), losses)
    result = tune.json(*command(tune, "--policy", *policy, "--slots", "2", steps=12))
    assert result["complete"]
    assert any(piece["reason"] == "best chance by earlier trials" for piece in slices_of(tune)) == (len(policy) > 1)
    assert tune.trajectories() == {lr: expected(lr, 12) for lr in ("0.1", "0.2", "0.05", "0.02")}
    # Regardless of the grouping of the reports, the value is the last reported loss.
    values = {str(trial["parameters"]["lr"]): trial["value"] for trial in result["trials"]}
    assert values == {lr: float.fromhex(expected(lr, 12)[12]) for lr in values}


def test_another_metric_is_maximised(tune: Tune) -> None:
    result = tune.json(*command(tune, "--metric", "accuracy", "--mode", "max", lr="0.1,0.2", steps=8))
    assert result["best"]["parameters"] == {"lr": 0.2}
    assert result["best"]["value"] == pytest.approx(1 - 0.8**8)


def used_gpus(mesos: EmbeddedCluster) -> float:
    return float(sum(agent["used_resources"].get("gpus", 0) for agent in mesos.state()["slaves"]))


def test_two_frameworks_never_hold_the_same_gpu(tune: Tune, mesos: EmbeddedCluster) -> None:
    def search(name: str) -> subprocess.Popen[str]:
        own = ("--param", "lr=0.1", "--name", name, "--slot-gpus", "1", "--master", mesos.master, *SLOT)
        return tune.start("tune", HELD_GPU, *own, "--", "--together", "2", "--diary", tune.diary)

    searches = [search("one"), search("other")]
    try:
        for one in searches:
            _, said = one.communicate(timeout=DEADLINE_S)
            assert one.returncode == 0, said
    finally:
        for one in searches:
            one.kill()
    assert sorted(tune.diary.read_text().split()) == ["0", "1"]


def test_mesos_has_a_gpu_back_when_nothing_waits_for_it(tune: Tune, mesos: EmbeddedCluster) -> None:
    # Two slots of one GPU each; one trial is soon over, the other is not.
    steps = 4000
    process = tune.start(*command(tune, "--master", mesos.master, "--policy", "fifo", lr="0.5,0.25", steps=steps))
    try:
        wait_until(lambda: used_gpus(mesos) == 2, "two slots")
        wait_until(lambda: len(tune.processes()) == 2, "two trials")
        first = tune.last_step("0.5")
        wait_until(lambda: tune.last_step("0.5") > first, "a step")
        (tune.folder / "end-0.5").touch()
        pid = next(int(pid) for lr, pid, *_ in whole_lines(tune.diary) if lr == "0.5")
        wait_until(lambda: not psutil.pid_exists(pid), "the trial's end")
        # Measured in steps of the other trial, which makes none while the whole machine is paused.
        ended = tune.last_step("0.25")
        wait_until(lambda: used_gpus(mesos) == 1, "the GPU's return")
        assert (tune.last_step("0.25") - ended) * PAUSE_S < 2 + OBSERVATION_S
        assert process.poll() is None
        assert tune.last_step("0.25") < steps
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    wait_until(lambda: used_gpus(mesos) == 0, "both GPUs' return")


def below(ancestor: int, *words: str) -> list[psutil.Process]:
    """Descendants of a process with these words in their command, oldest first."""
    found = []
    for process in psutil.Process(ancestor).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if set(words) <= set(process.cmdline()):
                found.append(process)
    return sorted(found, key=psutil.Process.create_time)


def killed(pid: int) -> list[psutil.Process]:
    """Kills a process that is not about to end by itself anyway; its ancestors, none if it was."""
    try:
        process = psutil.Process(pid)
        # A stopped process cannot end before it is killed.
        process.suspend()
        standstill = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
        wait_until(lambda: process.status() in standstill, "its standstill")
        ancestors = process.parents() if process.status() == psutil.STATUS_STOPPED else []
        process.kill()
    except psutil.NoSuchProcess:
        return []
    return ancestors


def test_killed_trials_zygotes_and_executors_cost_only_what_came_after_the_last_checkpoint(tune: Tune) -> None:
    lrs = ("0.1", "0.05", "0.02")
    process = tune.start(
        *command(
            tune,
            *("--policy", "rr", "--slots", "2", "--checkpoint-interval", "1", "--format", "json"),
            *("--suspend", "checkpoint"),
            lr=",".join(lrs),
            steps=LONG,
        )
    )
    wait_until(lambda: len(tune.processes()) >= 2, "two trials")
    ancestors = wait_until(lambda: killed(tune.newest_process()), "a trial to kill")
    seen = tune.processes()
    wait_until(lambda: tune.processes() - seen, "another trial")

    def in_the_other_slot() -> list[psutil.Process]:
        """Its executor and its zygote; the slot of the trial that has failed is given up just now."""
        slots = [one for one in below(process.pid, "dike.zygote") if one.name() == task_processes.SLOT]
        held = [one for one in slots if one not in ancestors]
        zygotes = [child for one in held[:1] for child in one.children() if child.name() == task_processes.ZYGOTE]
        executors = [one for one in below(process.pid, "-m", "executor") if held and one.cwd() == held[0].cwd()]
        return [executors[0], zygotes[0]] if executors and zygotes else []

    executor, zygote = wait_until(in_the_other_slot, "another slot")
    zygote.kill()
    seen = tune.processes()
    wait_until(lambda: tune.processes() - seen, "a trial after the zygote's death")
    executor.kill()
    tune.hurry(*lrs)
    stdout, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, stderr
    assert json.loads(stdout)["complete"]
    assert tune.trajectories() == {lr: expected(lr, LONG) for lr in lrs}
    assert "ended by signal 9 (SIGKILL)" in stderr


def standing(tune: Tune) -> list[psutil.Process]:
    """Trial processes that are paused in memory."""
    found = []
    for pid in tune.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.status() == psutil.STATUS_STOPPED:
                found.append(process)
    return found


def test_killed_paused_processes_cost_nothing_and_leave_nothing(tune: Tune) -> None:
    lrs = ("0.1", "0.05", "0.02")
    more = ("--policy", "rr", "--slots", "1", "--format", "json")
    process = tune.start(*command(tune, *more, lr=",".join(lrs), steps=LONG))
    wait_until(lambda: len(tune.processes()) == 3 and len(standing(tune)) == 2, "two paused processes")
    standing(tune)[0].kill()
    wait_until(lambda: len(tune.processes()) == 4, "a new process of the killed one's trial")
    left = wait_until(lambda: standing(tune), "a paused process")
    (executor,) = below(process.pid, "-m", "executor")
    executor.kill()
    wait_until(lambda: not any(one.is_running() for one in left), "its end with the executor's")
    wait_until(lambda: len(tune.processes()) > 4, "another process")
    assert wait_until(lambda: standing(tune), "a paused process in the new slot")
    tune.hurry(*lrs)
    stdout, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, stderr
    assert json.loads(stdout)["complete"]
    assert tune.trajectories() == {lr: expected(lr, LONG) for lr in lrs}
    # Each was killed with its checkpoint written, but for the one that ran as the executor did.
    steps = [step for _, _, step, _ in whole_lines(tune.diary)]
    assert len(steps) < len(lrs) * LONG + LONG
    assert not any(psutil.pid_exists(pid) for pid in tune.processes())


def test_a_killed_search_resumes_without_repeating_finished_trials(tune: Tune) -> None:
    lrs = ("0.1", "0.05", "0.02")
    process = tune.start(
        *command(tune, "--policy", "fifo", "--slots", "1", "--checkpoint-interval", "1", lr=",".join(lrs), steps=60)
    )
    # The first has ended, the second has a checkpoint.
    folder = tune.folder / "dike-runs" / "count" / "trial-1"
    wait_until(lambda: list(folder.glob("*/dike-trial.json")), "a checkpoint of the second trial")
    process.kill()
    process.communicate(timeout=DEADLINE_S)
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in tune.processes()), "the end of the killed search")
    steps = [lr for lr, *_ in whole_lines(tune.diary)].count("0.1")
    result = tune.json("tune", "--resume", "count")
    assert result["complete"]
    assert [trial["state"] for trial in result["trials"]] == ["finished"] * 3
    assert [lr for lr, *_ in whole_lines(tune.diary)].count("0.1") == steps
    assert tune.trajectories() == {lr: expected(lr, 60) for lr in lrs}


def test_a_stopped_trial_stays_stopped(tune: Tune) -> None:
    bad, good = "0.02", "0.1"
    # The accuracy after the first step is the learning rate.
    stop = ("--stop", "threshold=0.05", "--metric", "accuracy", "--mode", "max")
    process = tune.start(*command(tune, *stop, "--slots", "2", lr=f"{bad},{good}", steps=LONG))
    wait_until(lambda: tune.last_step(bad) and tune.last_step(good), "both trials")
    wait_until(lambda: tune.json("trials", "count")["trials"][0]["state"] == "stopped", "the end of the bad trial")
    wait_until(lambda: not any(map(psutil.pid_exists, tune.runs()[bad])), "its process gone")
    process.kill()
    process.communicate(timeout=DEADLINE_S)
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in tune.processes()), "the end of the killed search")
    steps = tune.last_step(bad)
    tune.hurry(good)
    stopped, finished = tune.json("tune", "--resume", "count")["trials"]
    assert (stopped["state"], finished["state"]) == ("stopped", "finished")
    assert stopped["runs"] == 1
    assert tune.last_step(bad) == steps < LONG
    assert "stopped" in tune.run("trials", "count").stdout


class Readers:
    """Five that open and close a database of searches about once a second, as its users do.

    Args:
        tune: runs the commands.
        database: the database.
        searches: names of its two searches.
    """

    def __init__(self, tune: Tune, database: Path, searches: tuple[str, str]) -> None:
        self._tune = tune
        self._database = database
        self._over = threading.Event()
        reads: list[Callable[[], object]] = [
            lambda: self._command("trials", searches[0]),
            lambda: self._command("timeline", searches[1]),
            self.finished,
            self.finished,
            self._optuna,
        ]
        self._rounds = [0] * len(reads)
        self._pool = ThreadPoolExecutor(len(reads))
        self._loops = [self._pool.submit(self._loop, number, read) for number, read in enumerate(reads)]

    def finished(self) -> set[tuple[str, int, float]]:
        """Search, number and value of each finished trial, as plain SQLite shows them."""
        statement = (
            "SELECT name, number, value FROM dike_trials JOIN dike_searches ON id = search_id WHERE state = 'finished'"
        )
        with contextlib.closing(sqlite3.connect(self._database)) as connection:
            return set(connection.execute(statement))

    def have_read(self, rounds: int) -> bool:
        """Whether each reader has done `rounds` rounds; raises the error of one that has failed."""
        for loop in self._loops:
            if loop.done():
                loop.result()
        return min(self._rounds) >= rounds

    def end(self) -> None:
        self._over.set()
        self._pool.shutdown()

    def _loop(self, number: int, read: Callable[[], object]) -> None:
        while not self._over.wait(1.0):
            read()
            self._rounds[number] += 1

    def _command(self, command: str, search: str) -> None:
        done = self._tune.run(command, search, "--storage", f"sqlite:///{self._database}")
        assert done.returncode == 0, done.stderr

    def _optuna(self) -> None:
        storage = RDBStorage(f"sqlite:///{self._database}")
        for study in storage.get_all_studies():
            storage.get_all_trials(study._study_id)
        storage.remove_session()
        storage.engine.dispose()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("database", ["dike-runs/searches.db", "searches.db"], ids=["default", "beside the script"])
def test_reading_takes_nothing_from_two_searches_on_one_database(tune: Tune, database: str) -> None:
    lrs, names, path = ("0.1", "0.05", "0.02"), ("one", "other"), tune.folder / database
    script = shutil.copy(COUNTING, tune.folder / "train.py")
    more = ("--policy", "fifo", "--slots", "2", "--checkpoint-interval", "1", "--storage", f"sqlite:///{database}")
    given = ("--", "--steps", str(LONG), "--pause", str(LONG_PAUSE_S), "--diary", tune.diary)
    searches = [
        tune.start("tune", script, "--param", f"lr={','.join(lrs)}", "--name", name, *SLOT, *more, *given)
        for name in names
    ]

    def has_ended() -> bool:
        return any(search.poll() is not None for search in searches)

    wait_until(lambda: len(tune.processes()) == 4, "two trials of each", lost=has_ended)
    readers = Readers(tune, path, names)
    try:
        wait_until(lambda: readers.have_read(1), "a round of each reader")
        # The log has been written to and read; the first trials end in it.
        (tune.folder / "end-0.1").touch()
        wait_until(lambda: len(readers.finished()) == 2, "a trial of each search that has finished", lost=has_ended)
        wait_until(lambda: readers.have_read(3), "two more rounds")
        (tune.folder / "end-0.05").touch()
        finished = wait_until(lambda: len(seen := readers.finished()) == 4 and seen, "another one", lost=has_ended)
        assert not has_ended()
        for search in searches:
            assert locked_by(search.pid, path.with_name("searches.db-shm")), "its log may be deleted by any reader"
            search.kill()
        for search in searches:
            search.communicate(timeout=DEADLINE_S)
        wait_until(lambda: not any(psutil.pid_exists(pid) for pid in tune.processes()), "the end of the trials")
    finally:
        readers.end()
    assert readers.have_read(3)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert readers.finished() == finished
    lines = [tune.diary.read_text().count(f"{lr} ") for lr in lrs[:2]]
    (tune.folder / "end-0.02").touch()
    storage = ("--storage", f"sqlite:///{database}", "--format", "json")
    for search in [tune.start("tune", "--resume", name, *storage) for name in names]:
        stdout, stderr = search.communicate(timeout=DEADLINE_S)
        assert search.returncode == 0, stderr
        assert [trial["state"] for trial in json.loads(stdout)["trials"]] == ["finished"] * 3
    assert readers.finished() > finished
    assert [tune.diary.read_text().count(f"{lr} ") for lr in lrs[:2]] == lines
    steps = tune.trajectories()["0.02"]
    assert steps == expected("0.02", len(steps))


def test_an_interrupted_search_is_suspended_and_resumes_with_its_options(tune: Tune) -> None:
    options = ("--logdir", "tb", "--slots", "1", "--resources", "cpus:2;mem:1024", "--constraint", "hostname:UNLIKE:x")
    process = tune.start(*command(tune, "--policy", "rr", *options, lr="0.1,0.05", steps=LONG))
    wait_until(lambda: len(tune.runs()) == 2, "two trials")
    # What it prints is seen from another terminal.
    follower = tune.start("logs", "count", "--trial", "0", "-f")
    assert follower.stdout is not None
    assert follower.stdout.readline() == "--- run 0 on agent-0, from step 0 ---\n"
    assert follower.stdout.readline().startswith("loss 0.9")
    # It may be the other one's turn.
    reached = tune.last_step("0.1")
    wait_until(lambda: tune.last_step("0.1") > reached, "another step of the trial that is followed")
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert "resume with dike tune --resume count" in stderr
    assert len(whole_lines(tune.diary)) < 2 * LONG
    rest, said = follower.communicate(timeout=DEADLINE_S)
    assert (follower.returncode, "does not run" in said) == (1, True)
    assert rest
    shown = tune.run("trials", "count").stdout
    assert "count was interrupted" in shown
    assert "running" not in shown
    runs = len(list(tune.folder.glob("tb/trial-0/events*")))
    tune.hurry("0.1", "0.05")
    # All of that is stored; a new option applies from now on.
    result = tune.json("tune", "--resume", "count", "--slots", "2")
    assert result["complete"]
    # Not a step was done twice, and each step has printed its line.
    assert len(whole_lines(tune.diary)) == 2 * LONG
    assert len(list(tune.folder.glob("tb/trial-0/events*"))) > runs
    with sqlite3.connect(tune.folder / "dike-runs" / "searches.db") as database:
        spec, options = database.execute("SELECT spec, options FROM dike_searches").fetchone()
    assert json.loads(spec)["max_slots"] == 2
    assert json.loads(options) == {
        "logdir": str(tune.folder / "tb"),
        "constraint": ["hostname:UNLIKE:x"],
        "resources": "cpus:2;mem:1024",
    }
    for trial in result["trials"]:
        printed = tune.run("logs", "count", "--trial", str(trial["number"])).stdout
        lines = [line for line in printed.splitlines() if not line.startswith("---")]
        assert lines == [
            f"loss {float.fromhex(x):.9f}" for x in expected(str(trial["parameters"]["lr"]), LONG).values()
        ]
        # A run that was suspended before it printed anything has no heading.
        assert 1 <= printed.count("--- run ") <= trial["runs"]


def test_a_trial_that_fails_twice_by_the_same_error_is_given_up_with_its_traceback(tune: Tune) -> None:
    result = tune.json(*command(tune, "--", "--fail-at", "3", "--fail-lr", "0.1", lr="0.1,0.2", steps=6))
    states = {trial["parameters"]["lr"]: trial for trial in result["trials"]}
    assert (states[0.1]["state"], states[0.1]["runs"]) == ("failed", 2)
    assert "ValueError: no further than 3" in states[0.1]["error"]
    for run in range(2):
        kept = tune.folder / "dike-runs" / "count" / f"trial-{states[0.1]['number']}" / f"run-{run}.log"
        assert "ValueError: no further than 3" in kept.read_text()
    followed = tune.run("logs", "count", "--trial", str(states[0.1]["number"]), "-f")
    assert followed.returncode == 1
    assert followed.stdout.count("ValueError: no further than 3") == 2
    assert "failed: ValueError: no further than 3." in followed.stderr
    assert states[0.2]["state"] == "finished"


def test_a_trial_that_does_not_save_in_time_is_stopped_and_said_so(tune: Tune) -> None:
    more = ("--policy", "rr", "--slots", "1", "--suspend-timeout", "1")
    done = tune.run(*command(tune, *more, "--", "--hang-once", tune.folder / "hung", lr="0.1,0.2", steps=20))
    assert done.returncode == 0, done.stderr
    assert "was stopped" in done.stdout
    assert tune.trajectories() == {lr: expected(lr, 20) for lr in ("0.1", "0.2")}


WRITING = """
import argparse, json, time
from pathlib import Path
import dike
from helpers.names import HISTORY

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
lr = parser.parse_args().lr
assert Path("data/values.txt").read_text() == "values"
state = {"loss": 1.0}
start = dike.checkpoint(
    lambda folder: Path(folder, "state").write_text(json.dumps(state)),
    lambda folder: state.update(json.loads(Path(folder, "state").read_text())),
)
for step in range(start + 1, 41):
    time.sleep(0.05)
    state["loss"] *= 1 - lr
    with open(HISTORY, "a") as history:
        history.write(f"{lr} {step}\\n")
    dike.report(step, loss=state["loss"])
Path("models").mkdir()
Path("models", "model.txt").write_text(str(lr))
"""


def test_what_trials_write_stays_apart_and_outlives_their_suspensions(tune: Tune) -> None:
    project = tune.folder / "project"
    for folder in ("src/helpers", "data"):
        (project / folder).mkdir(parents=True)
    (project / "src/helpers/names.py").write_text("HISTORY = 'history.txt'\n")
    (project / "src/trial.py").write_text(WRITING)
    (project / "data/values.txt").write_text("values")
    tune.folder = project
    options = ("--name", "writing", "--policy", "rr", "--quantum", "0.3", "--slots", "1", *SLOT)
    result = tune.json("tune", "src/trial.py", "--param", "lr=0.1,0.2", *options)
    assert {trial["state"] for trial in result["trials"]} == {"finished"}
    assert min(trial["runs"] for trial in result["trials"]) > 1
    for trial in result["trials"]:
        lr = trial["parameters"]["lr"]
        outputs = project / f"dike-runs/writing/trial-{trial['number']}/outputs"
        files = {path.relative_to(outputs).as_posix() for path in outputs.rglob("*") if path.is_file()}
        assert files == {"history.txt", "models/model.txt"}
        assert (outputs / "models/model.txt").read_text() == str(lr)
        # Each run found what the one before had written.
        assert (outputs / "history.txt").read_text() == "".join(f"{lr} {step}\n" for step in range(1, 41))
