"""`dike tune` from outside: a real Mesos, real processes, the command as a user types it."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from framework.embedded import AgentSpec, EmbeddedCluster
from tests.framework.conftest import dike_command, dike_environment
from tests.waiting import wait_until

pytestmark = [pytest.mark.mesos, pytest.mark.timeout(300)]

DEADLINE_S = 120.0
OBSERVATION_S = 1.0
"""What it takes to ask a master on a busy machine for its state."""
PAUSE_S = 0.05
"""What a trial's step takes at least."""
LONG = 4000
"""Steps of a trial that goes on until it is told to hurry."""
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
        process = subprocess.Popen(
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
        return subprocess.run(
            dike_command(*arguments),
            cwd=self.folder,
            env=dike_environment(),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )

    def json(self, *arguments: str | Path) -> Any:
        done = self.run(arguments[0], "--format", "json", *arguments[1:])
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def trajectories(self) -> dict[str, dict[int, str]]:
        """Learning rate -> step -> loss, as the trials wrote them; what was trained twice has to be the same."""
        losses: dict[str, dict[int, str]] = defaultdict(dict)
        for line in self.diary.read_text().splitlines():
            lr, _, step, loss = line.split()
            assert losses[lr].setdefault(int(step), loss) == loss, line
        return losses

    def last_step(self, lr: str) -> int:
        """The last step that a trial has written."""
        lines = self.diary.read_text().splitlines() if self.diary.exists() else []
        return max((int(line.split()[2]) for line in lines if line.startswith(f"{lr} ")), default=0)

    def newest_process(self) -> int:
        """The process that wrote last."""
        return int(self.diary.read_text().splitlines()[-1].split()[1])

    def runs(self) -> dict[str, set[int]]:
        """Learning rate -> processes that the trial has had."""
        runs: dict[str, set[int]] = defaultdict(set)
        text = self.diary.read_text() if self.diary.exists() else ""
        for words in map(str.split, text.splitlines()):
            if len(words) == 4:
                runs[words[0]].add(int(words[1]))
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
    extra = ["--", "--steps", str(steps), "--diary", tune.diary]
    if "--" in more:
        at = more.index("--")
        more, extra = more[:at], [*extra, *more[at + 1 :]]
    if "--policy" not in more:
        more = (*more, "--policy", "fifo")
    return ["tune", COUNTING, "--param", f"lr={lr}", "--name", "count", "--quantum", "0.3", *SLOT, *more, *extra]


def test_trials_take_turns_and_lose_nothing(tune: Tune) -> None:
    lrs, steps = ("0.1", "0.2", "0.05", "0.02"), 300
    # The losses of steps in quick succession are told as one. With more steps others would be as accurate.
    accurate = ("--metric", "accuracy", "--mode", "max", "--format", "json")
    process = tune.start(*command(tune, "--policy", "rr", "--slots", "2", *accurate, steps=steps))
    wait_until(lambda: any(len(pids) > 1 for pids in tune.runs().values()), "a trial that has gone on")
    tune.hurry(*lrs)
    stdout, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, stderr
    result = json.loads(stdout)
    assert result["complete"]
    assert result["best"]["parameters"] == {"lr": 0.2}
    assert {trial["state"] for trial in result["trials"]} == {"finished"}
    assert max(trial["runs"] for trial in result["trials"]) > 1
    assert tune.trajectories() == {lr: expected(lr, steps) for lr in lrs}
    slices = tune.json("slices", "count")
    outcomes = [piece["outcome"] for piece in (slices["slices"] if isinstance(slices, dict) else slices)]
    assert outcomes.count("finished") == 4
    assert set(outcomes) == {"finished", "suspended"}
    assert tune.run("trials", "count").returncode == 0
    assert tune.run("plot", "count", "-o", "plot.svg").returncode == 0
    assert (tune.folder / "plot.svg").stat().st_size > 1000


@pytest.mark.parametrize("policy", ["dike", "hermes"])
def test_every_policy_brings_all_trials_to_their_end(tune: Tune, policy: str) -> None:
    result = tune.json(*command(tune, "--policy", policy, "--slots", "2", steps=12))
    assert result["complete"]
    assert tune.trajectories() == {lr: expected(lr, 12) for lr in ("0.1", "0.2", "0.05", "0.02")}


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
        pid = next(int(line.split()[1]) for line in tune.diary.read_text().splitlines() if line.startswith("0.5 "))
        wait_until(lambda: not psutil.pid_exists(pid), "the trial's end")
        # In the time of the other trial, which stands still where the whole machine does.
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
        # What stands still does not end before it is killed.
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
        others = [one for one in below(process.pid, "-m", "executor") if one not in ancestors]
        # Trials are forks of the zygote, and so younger.
        zygotes = below(others[0].pid, "-m", "dike.zygote") if others else []
        return [others[0], zygotes[0]] if zygotes else []

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


def test_a_killed_search_goes_on_without_running_what_had_finished(tune: Tune) -> None:
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
    lines = tune.diary.read_text().count("0.1 ")
    result = tune.json("tune", "--resume", "count")
    assert result["complete"]
    assert [trial["state"] for trial in result["trials"]] == ["finished"] * 3
    assert tune.diary.read_text().count("0.1 ") == lines
    assert tune.trajectories() == {lr: expected(lr, 60) for lr in lrs}


def test_an_interrupted_search_is_suspended_and_goes_on(tune: Tune) -> None:
    process = tune.start(*command(tune, "--policy", "rr", lr="0.1,0.05", steps=LONG))
    wait_until(lambda: len(tune.runs()) == 2, "two trials")
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert "dike tune --resume count goes on" in stderr
    before = tune.diary.read_text().count("\n")
    assert before < 2 * LONG
    tune.hurry("0.1", "0.05")
    assert tune.json("tune", "--resume", "count")["complete"]
    # Not a step was done twice.
    assert tune.diary.read_text().count("\n") == 2 * LONG


def test_a_trial_that_fails_three_times_is_given_up_with_its_traceback(tune: Tune) -> None:
    result = tune.json(*command(tune, "--", "--fail-at", "3", "--fail-lr", "0.1", lr="0.1,0.2", steps=6))
    states = {trial["parameters"]["lr"]: trial for trial in result["trials"]}
    assert (states[0.1]["state"], states[0.1]["runs"]) == ("failed", 3)
    assert "ValueError: no further than 3" in states[0.1]["error"]
    for run in range(3):
        kept = tune.folder / "dike-runs" / "count" / f"trial-{states[0.1]['number']}" / f"run-{run}.log"
        assert "ValueError: no further than 3" in kept.read_text()
    assert states[0.2]["state"] == "finished"


def test_a_trial_that_does_not_save_in_time_is_stopped_and_said_so(tune: Tune) -> None:
    more = ("--policy", "rr", "--slots", "1", "--suspend-timeout", "1")
    done = tune.run(*command(tune, *more, "--", "--hang-once", tune.folder / "hung", lr="0.1,0.2", steps=20))
    assert done.returncode == 0, done.stderr
    assert "was stopped" in done.stdout
    assert tune.trajectories() == {lr: expected(lr, 20) for lr in ("0.1", "0.2")}
