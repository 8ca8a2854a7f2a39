"""A real Slurm: machines join in an allocation, pilots come and go, and a time limit loses nothing."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from framework.embedded.ports import reserve_blocks
from tests.cluster.slurm_stage import RealSlurm, SlurmCluster, missing_for_slurm, plain_command
from tests.running import Running
from tests.waiting import wait_until, whole_lines

pytestmark = [
    pytest.mark.mesos,
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing_for_slurm()), reason=missing_for_slurm() or "it is installed"),
]
COUNTING = Path(__file__).parents[1] / "search" / "scripts" / "counting.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "slurm" / "cluster.sbatch"
DEADLINE_S = 400.0


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealSlurm]:
    with RealSlurm(tmp_path_factory.mktemp("slurm") / "slurm") as slurm:
        yield slurm


@pytest.fixture
def cluster(tmp_path: Path, slurm: RealSlurm) -> Iterator[SlurmCluster]:
    try:
        with SlurmCluster(tmp_path) as cluster:
            yield cluster
    finally:
        Running.end_all()
        slurm.call("scancel", "--user=root")
        wait_until(lambda: not slurm.queue(), "an empty queue", said=slurm.logs)


def search(cluster: SlurmCluster, lrs: str, steps: int, pause_s: float, diary: Path) -> Running:
    slot = ("--slot-cpus", "1", "--slot-mem", "256", "--checkpoint-interval", "1", "--policy", "fifo")
    script = ("--", "--steps", str(steps), "--pause", str(pause_s), "--diary", diary)
    return cluster.start("tune", COUNTING, "--param", f"lr={lrs}", "--name", "count", *slot, *script)


def losses(diary: Path) -> dict[str, dict[int, str]]:
    """Learning rate -> step -> loss; what was trained twice has to be the same."""
    found: dict[str, dict[int, str]] = {}
    for lr, _, step, loss in whole_lines(diary):
        assert found.setdefault(lr, {}).setdefault(int(step), loss) == loss
    return found


def expected(lr: str, steps: int) -> dict[int, str]:
    loss, found = 1.0, {}
    for step in range(1, steps + 1):
        loss *= 1 - float(lr)
        found[step] = loss.hex()
    return found


def test_machines_join_in_an_allocation(cluster: SlurmCluster) -> None:
    program = (sys.executable, "-P", "-m", "framework", "cluster", "join", cluster.address)
    options = ("--token-file", cluster.token_file(), "--foreground")
    srun = ("srun", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=2", "--mem=2500", "--gres=gpu:1")
    members = plain_command([*srun, *program, *options])
    try:
        found = wait_until(
            lambda: machines if len(machines := cluster.machines()) == 2 else None,
            "two machines",
            said=lambda: members.stdout.read() if members.stdout and members.poll() is not None else "",
            lost=lambda: members.poll() is not None,
        )
        names = [re.sub(r"\d+$", "JOB", one["name"]) for one in found]
        assert names == ["n1-JOB", "n2-JOB"]
        for one in found:
            assert (one["resources"]["cpus"], one["resources"]["mem"], one["resources"]["gpus"]) == (2, 1476, 1)
            assert one["resources"]["gpu_devices"] == "[0-0]"
            assert one["attributes"]["slurm_job"] == int(one["name"].partition("-")[2])
    finally:
        members.terminate()
        members.wait(60)


def test_pilots_come_while_trials_wait_and_go_when_idle(cluster: SlurmCluster, slurm: RealSlurm) -> None:
    pilots = cluster.start("cluster", "slurm", "--max", "2", "--idle", "10s", "--", "--cpus-per-task=2", "--mem=2000")
    wait_until(lambda: "submits 0 to 2" in cluster.output(pilots), "the controller", said=lambda: pilots.log)
    assert slurm.queue() == []
    diary = cluster.folder / "diary.txt"
    tune = search(cluster, "0.1,0.2,0.05,0.02", 60, 0.5, diary)
    tune.wait_for(lambda: cluster.output(pilots).count("has joined") == 2, "two pilots")
    assert tune.process.wait(DEADLINE_S) == 0, tune.log
    assert losses(diary) == {lr: expected(lr, 60) for lr in ("0.1", "0.2", "0.05", "0.02")}
    wait_until(lambda: not slurm.queue(), "the end of idle pilots", said=lambda: cluster.output(pilots))
    wait_until(lambda: cluster.output(pilots).count("has ended") == 2, "the word of it", said=lambda: pilots.log)
    assert "no task for 10 s" in cluster.output(pilots)
    assert cluster.output(pilots).count("submitted") == 2
    pilots.process.terminate()
    assert pilots.process.wait(60) == 0, pilots.log


def test_a_time_limit_loses_nothing(cluster: SlurmCluster, slurm: RealSlurm) -> None:
    # Slurm has limits in minutes, and looks at them every 30 s.
    limited = ("--", "--cpus-per-task=1", "--mem=2000", "--time=1")
    pilots = cluster.start("cluster", "slurm", "--idle", "30s", "--drain", "20s", *limited)
    diary = cluster.folder / "diary.txt"
    steps = 500
    tune = search(cluster, "0.01", steps, 0.2, diary)
    assert tune.process.wait(DEADLINE_S) == 0, tune.log
    assert losses(diary) == {"0.01": expected("0.01", steps)}
    said = cluster.output(pilots)
    assert said.count("has joined") >= 2, said
    # Each step was trained once: nothing was lost.
    assert len(whole_lines(diary)) == steps
    pilots.process.terminate()
    assert pilots.process.wait(120) == 0, pilots.log
    assert slurm.queue() in ([], ["COMPLETING"])


def test_explain_names_the_reason_of_slurm(cluster: SlurmCluster, slurm: RealSlurm) -> None:
    blocker = slurm.call("sbatch", "--parsable", "--nodes=2", "--exclusive", "--wrap=sleep 600", "--output=/dev/null")
    wait_until(lambda: slurm.queue() == ["RUNNING"], "the job that has the nodes", said=slurm.logs)
    [block] = reserve_blocks(1)
    block.claim.close()
    url = f"http://127.0.0.1:{block.first}"
    state = f"sqlite:///{cluster.folder}/service.db"
    serve = ("--listen", url.removeprefix("http://"), "--state", state, "--checkpoint-root", cluster.folder / "service")
    service = cluster.start("serve", *serve)
    service.wait_for_text("subscribed at")
    pilots = cluster.start("cluster", "slurm", "--idle", "20s", "--", "--cpus-per-task=1", "--mem=2000")
    diary = cluster.folder / "diary.txt"
    slot = ("--slot-cpus", "1", "--slot-mem", "256", "--detach", "--service", url)
    script = ("--", "--steps", "5", "--pause", "0.1", "--diary", diary)
    cluster.command("tune", COUNTING, "--param", "lr=0.1,0.2", "--name", "count", *slot, *script)

    def explained() -> str:
        values = json.loads(cluster.command("explain", "count", "--service", url, "--format", "json"))
        return str(values["sentence"])

    sentence = wait_until(
        lambda: found if "in Slurm's queue: Resources." in (found := explained()) else None,
        "Slurm's reason",
        said=lambda: f"{cluster.output(pilots)}\n{explained()}",
    )
    assert sentence.startswith("No agent is registered with the Mesos master. Slurm job ")
    slurm.call("scancel", blocker)
    wait_until(
        lambda: losses(diary) == {lr: expected(lr, 5) for lr in ("0.1", "0.2")}, "both trials", said=lambda: service.log
    )
    wait_until(lambda: "has ended" in cluster.output(pilots), "the end of the pilot", said=lambda: pilots.log)
    for running in (pilots, service):
        running.process.terminate()
        running.process.wait(60)


def test_a_whole_cluster_in_one_job(tmp_path: Path, slurm: RealSlurm) -> None:
    diary = tmp_path / "diary.txt"
    slot = ("--slot-cpus", "1", "--slot-mem", "256", "--name", "whole", "--policy", "fifo")
    script = ("--", "--steps", "20", "--pause", "0.3", "--diary", diary)
    allocated = ("--nodes=2", "--cpus-per-task=2", "--mem=2500", "--gres=gpu:1", "--time=10")
    log = tmp_path / "log"
    submit = ("sbatch", "--parsable", f"--chdir={tmp_path}", f"--output={log}", *allocated)
    command = ("tune", COUNTING, "--param", "lr=0.1,0.2,0.05,0.02", *slot, *script)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    slurm.call("env", f"PATH={path}", *submit, EXAMPLE, *command, cwd=tmp_path)
    wait_until(lambda: not slurm.queue(), "the end of the job", said=lambda: log.read_text() if log.exists() else "")
    assert losses(diary) == {lr: expected(lr, 20) for lr in ("0.1", "0.2", "0.05", "0.02")}, log.read_text()
    said = log.read_text()
    assert len(re.findall(r"joined 'slurm-\d+' as n[12]-\d+: 2 CPUs", said)) == 2, said
    assert len(re.findall(r"left|ending: tasks are saved first", said)) >= 2, said
    assert not list(tmp_path.glob(".dike-*-*")), said


def test_a_machine_leaves_before_the_time_limit_of_its_allocation(cluster: SlurmCluster) -> None:
    """Slurm's own signal would reach every process of the step, tasks included."""
    program = (sys.executable, "-P", "-m", "framework", "cluster", "join", cluster.address)
    options = ("--token-file", cluster.token_file(), "--foreground")
    srun = ("srun", "--cpus-per-task=1", "--mem=2000")
    diary = cluster.folder / "diary.txt"
    tune = search(cluster, "0.01", 1000, 0.1, diary)
    for limit in ("--time=1", "--time=10"):
        member = plain_command([*srun, limit, *program, *options])
        try:
            wait_until(lambda: member.poll() is not None or tune.process.poll() is not None, "its end")  # noqa: B023
            if limit == "--time=1":
                assert tune.process.poll() is None, tune.log
                said = member.communicate()[0]
                assert member.returncode == 0, said
                assert "ending: tasks are saved first" in said
        finally:
            if member.poll() is None:
                member.terminate()
                member.wait(60)
    assert tune.process.wait(60) == 0, tune.log
    assert losses(diary) == {"0.01": expected("0.01", 1000)}
    assert len(whole_lines(diary)) == 1000
