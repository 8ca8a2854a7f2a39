"""Slurm without Slurm: what an allocation gives, what is read from its commands, when pilots come and go."""

from __future__ import annotations

import dataclasses
import datetime
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from dike import typed
from dike.exceptions import BadInputError, DikeError
from executor.mirror import StoreClient
from framework.cluster import pilots, slurm
from framework.cluster.authority import Authority
from framework.cluster.demand import PILOTS, WAITING, PilotNotice, Waiting, WaitingJob, WaitingTasks
from framework.cluster.machine import ClusterMachine, MachineOptions
from framework.cluster.pilots import PilotController, PilotOptions, machines_for
from framework.cluster.records import HEAD_ROLE, ClusterFolder, Description, Member, Membership
from framework.cluster.slurm import (
    CONFIGURING,
    PENDING,
    RUNNING,
    Slurm,
    SlurmJob,
    allocation,
    parse_jobs,
    parse_mem_mib,
)
from framework.cluster.store import NOTICE_TIMEOUT_S, Notices, RefusedError

SLOT = {"cpus": 1.0, "mem": 256.0}
NODE = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "gpu_3.example", "SLURM_CPUS_ON_NODE": "8"}


# Allocations.


def test_outside_of_an_allocation_there_is_none() -> None:
    assert allocation({}) is None


@pytest.mark.parametrize(
    ("more", "resources"),
    [
        ({"SLURM_MEM_PER_NODE": "64000"}, "cpus:8;mem:62976"),
        ({"SLURM_MEM_PER_CPU": "500"}, "cpus:8;mem:2976"),
        (
            {"SLURM_MEM_PER_NODE": "64000", "CUDA_VISIBLE_DEVICES": "3,1"},
            "cpus:8;mem:62976;gpus:2;gpu_devices:[1-1,3-3]",
        ),
        ({"SLURM_MEM_PER_NODE": "64000", "CUDA_VISIBLE_DEVICES": "MIG-1,MIG-2"}, "cpus:8;mem:62976;gpus:2"),
        ({"SLURM_MEM_PER_NODE": "64000", "CUDA_VISIBLE_DEVICES": "NoDevFiles"}, "cpus:8;mem:62976"),
        ({"SLURM_MEM_PER_NODE": "64000", "SLURM_GPUS_ON_NODE": "4"}, "cpus:8;mem:62976;gpus:4"),
    ],
)
def test_resources_are_those_allocated(
    more: Mapping[str, str], resources: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = allocation({**NODE, **more})
    assert found is not None
    assert found.resources() == resources
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_GPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**NODE, **more}.items():
        monkeypatch.setenv(name, value)
    options = MachineOptions(attributes="rack:r1")
    assert options.spec.resources == resources
    assert options.spec.attributes == "rack:r1;slurm_job:7"
    assert options.checked_name() == "gpu-3-7"
    assert MachineOptions("mine", "cpus:1;mem:512").spec.resources == "cpus:1;mem:512"
    assert MachineOptions("mine").checked_name() == "mine"


def test_memory_that_no_variable_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "mem_bytes", lambda: 64_000 << 20)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    answers = iter(["JobId=7 MinCPUsNode=8 MinMemoryCPU=1G MinTmpDiskNode=0", "JobId=7 MinMemoryNode=0"])
    monkeypatch.setattr(slurm, "_call", lambda command: next(answers))
    found = allocation(NODE)
    assert found is not None
    assert found.resources() == "cpus:8;mem:7168"
    # Half of the CPUs, half of the memory.
    assert found.resources() == "cpus:8;mem:30976"


@pytest.mark.parametrize(
    ("text", "mib"), [("MinMemoryNode=2500M", 2500), ("MinMemoryNode=1.5G", 1536), ("MinMemoryCPU=100M", 400), ("", 0)]
)
def test_memory_as_scontrol_shows_it(text: str, mib: int) -> None:
    assert parse_mem_mib(text, cpus=4) == mib


def test_the_time_limit_as_scontrol_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = allocation(NODE)
    assert found is not None
    answers = iter(["StartTime=2026-11-28T17:00:00 EndTime=2026-11-28T18:00:00 Deadline=N/A", "EndTime=Unknown"])
    monkeypatch.setattr(slurm, "_call", lambda command: next(answers))
    assert found.end_s() == datetime.datetime(2026, 11, 28, 18).timestamp()
    assert found.end_s() is None


def test_names_of_long_nodes_are_names() -> None:
    found = allocation({**NODE, "SLURM_JOB_ID": "123456", "SLURMD_NODENAME": "n" * 80})
    assert found is not None
    assert len(found.name) == 63
    assert found.name.endswith("n-123456")


# Slurm's commands.


def test_jobs_as_squeue_lists_them() -> None:
    text = (
        "12|PENDING||Resources\n13|RUNNING|n[1-2]|None\nslurm_load_jobs error\n14_1|RUNNING|n1|None\n15|PENDING||a|b\n"
    )
    assert parse_jobs(text) == {
        "12": SlurmJob(PENDING, "", "Resources"),
        "13": SlurmJob(RUNNING, "n[1-2]"),
        "15": SlurmJob(PENDING, "", "a|b"),
    }


def test_commands_and_their_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []
    answer = subprocess.CompletedProcess[str]([], 0, "17;here\n", "")

    def run(command: list[str], **settings: Any) -> subprocess.CompletedProcess[str]:
        called.append(list(command))
        assert "SQUEUE_FORMAT" not in settings["env"]
        return answer

    monkeypatch.setenv("SQUEUE_FORMAT", "%i")
    monkeypatch.setattr(subprocess, "run", run)
    assert Slurm().submit(["--nodes=1"], "#!/bin/sh") == "17"
    Slurm().end("17")
    assert called == [["sbatch", "--parsable", "--nodes=1"], ["scancel", "--batch", "--signal=TERM", "17"]]
    answer = subprocess.CompletedProcess([], 1, "", "sbatch: error: one\nsbatch: error: invalid partition\n")
    with pytest.raises(DikeError, match=r"^sbatch failed: sbatch: error: invalid partition\.$"):
        Slurm().submit([], "")
    monkeypatch.setattr("shutil.which", lambda name: name)
    with pytest.raises(BadInputError, match=r"Slurm would not accept these jobs\. sbatch failed"):
        Slurm().check([], "")
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(BadInputError, match="sbatch is not installed here"):
        Slurm().check([], "")


# What waits, and how many machines hold it.


def search(count: int, name: str = "search", **amounts: float) -> WaitingJob:
    return WaitingJob(name, (WaitingTasks("slot", count, {**SLOT, **amounts}),))


@pytest.mark.parametrize(("count", "machines"), [(1, 1), (4, 1), (5, 2), (100, 3)])
def test_tasks_share_machines(count: int, machines: int) -> None:
    assert machines_for([search(count)], {"cpus": 4.0, "mem": 4000.0, "gpus": 0.0}, limit=3) == (machines, {})


def test_a_task_that_fits_no_machine_gets_none() -> None:
    found, unfit = machines_for([search(1, "a", gpus=4.0), search(1, "b")], {"cpus": 4.0, "mem": 999.0, "gpus": 2.0}, 3)
    assert found == 1
    assert unfit == {"a": "A slot needs 4 gpus, and a machine that `dike cluster slurm` gets from Slurm has 2."}


def test_notices_expire() -> None:
    now = [0.0]
    notices = Notices(lambda: now[0])
    notices.put("waiting", "one", {"jobs": []})
    now[0] = NOTICE_TIMEOUT_S - 1
    notices.put("waiting", "other", {})
    notices.put("pilots", "other", {})
    assert notices.of_kind("waiting") == {"one": {"jobs": []}, "other": {}}
    now[0] = NOTICE_TIMEOUT_S + 1
    assert notices.of_kind("waiting") == {"other": {}}
    notices.remove("waiting", "other")
    assert notices.of_kind("waiting") == {}
    with pytest.raises(RefusedError):
        notices.put("waiting", "../x", {})


# The controller.


class FakeSlurm(Slurm):
    """A queue without limits, in which jobs start when a test says so."""

    def __init__(self) -> None:
        self.queue: dict[str, SlurmJob] = {}
        self.calls: list[str] = []
        self.scripts: list[str] = []
        self.failure = ""

    def check(self, arguments: Sequence[str], script: str) -> None:
        self.arguments = list(arguments)

    def submit(self, arguments: Sequence[str], script: str) -> str:
        if self.failure:
            raise DikeError(self.failure)
        job_id = str(len(self.scripts) + 1)
        self.scripts.append(script)
        self.queue[job_id] = SlurmJob(PENDING, "", "Priority")
        return job_id

    def jobs(self, name: str) -> dict[str, SlurmJob]:
        return dict(self.queue)

    def end(self, job_id: str) -> None:
        self.calls.append(f"end {job_id}")

    def cancel(self, job_id: str) -> None:
        self.calls.append(f"cancel {job_id}")
        self.queue.pop(job_id, None)


class FakeStore:
    """The notices of a store."""

    def __init__(self) -> None:
        self.waiting = Waiting()
        self.pilots: Any = None

    def notices(self, kind: str) -> dict[str, Any]:
        assert kind == WAITING
        return {"framework": dataclasses.asdict(self.waiting), "newer": {"unknown": 1}}

    def put_notice(self, kind: str, name: str, values: Any) -> None:
        assert kind == PILOTS
        self.pilots = values

    def remove_notice(self, kind: str, name: str) -> None:
        self.pilots = None


class Stage:
    """A controller, a fake Slurm and a fake master."""

    def __init__(self, folder: Path, **options: Any) -> None:
        own = ClusterFolder(folder / "cluster")
        own.make()
        Authority.create(own.keys, "test")
        description = Description("test", "127.1.2", 5050, "head:8690", "secret")
        self.machine = ClusterMachine(own, Membership(HEAD_ROLE, "head", 1, "head", description))
        self.machine.state = lambda: self.state  # type: ignore[method-assign]
        self.slurm, self.store, self.said = FakeSlurm(), FakeStore(), list[str]()
        self.now = 1000.0
        self.agents: dict[str, int] = {}
        self.leaving: set[str] = set()
        settings = {"max_jobs": 4, "idle_s": 60.0, **options}
        self.controller = PilotController(
            self.machine,
            PilotOptions(**settings),
            self.said.append,
            self.slurm,
            cast(StoreClient, self.store),
            lambda: self.now,
        )
        self.controller.start()

    @property
    def state(self) -> dict[str, Any]:
        slaves = [
            {
                "id": f"S{job_id}",
                "hostname": f"n1-{job_id}",
                "active": True,
                "attributes": {"slurm_job": float(job_id)},
                "resources": {"cpus": 2.0, "mem": 2000.0},
                **({"drain_info": {"state": "DRAINING"}} if job_id in self.leaving else {}),
            }
            for job_id in self.agents
        ]
        others = [{"id": "own", "hostname": "x", "active": True, "attributes": {}, "resources": {}}]
        tasks = [{"slave_id": f"S{job_id}"} for job_id, count in self.agents.items() for _ in range(count)]
        return {"slaves": [*slaves, *others], "frameworks": [{"tasks": tasks}]}

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / pilots.POLL_INTERVAL_S)):
            self.controller.step()
            self.now += pilots.POLL_INTERVAL_S

    def wait_for(self, *jobs: WaitingJob) -> None:
        self.store.waiting = Waiting(jobs)

    def begin(self, job_id: str, tasks: int = 0) -> None:
        """Slurm starts a pilot, and it joins."""
        self.slurm.queue[job_id] = SlurmJob(RUNNING, "n1")
        self.agents[job_id] = tasks

    def finish(self, job_id: str) -> None:
        self.slurm.queue.pop(job_id)
        self.agents.pop(job_id, None)

    @property
    def notice(self) -> PilotNotice:
        return typed.read(PilotNotice, self.store.pilots)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_one_pilot_until_it_is_known_what_a_machine_holds(stage: Stage) -> None:
    stage.run(20)
    assert not stage.slurm.queue
    stage.wait_for(search(6))
    stage.run(5)
    assert not stage.slurm.queue  # It may be about to start elsewhere.
    stage.run(100)
    assert list(stage.slurm.queue) == ["1"]
    assert stage.notice.queued == {"1": "Priority"}
    assert stage.notice.explain("search") == "Slurm job 1 waits in Slurm's queue: Priority."
    stage.begin("1", tasks=2)
    stage.wait_for(search(4))
    stage.run(5)
    assert list(stage.slurm.queue) == ["1"]
    stage.run(20)
    assert list(stage.slurm.queue) == ["1", "2", "3"]
    assert stage.notice.explain("search") == "The Slurm jobs 2, 3 wait in Slurm's queue: Priority."
    stage.run(100)
    assert list(stage.slurm.queue) == ["1", "2", "3"]


def test_no_more_pilots_than_allowed(stage: Stage) -> None:
    stage.wait_for(search(100))
    stage.run(20)
    stage.begin("1", tasks=2)
    stage.run(30)
    assert len(stage.slurm.queue) == 4
    for job_id in ("2", "3", "4"):
        stage.begin(job_id, tasks=2)
    stage.run(100)
    assert len(stage.slurm.queue) == 4
    assert stage.notice.explain("search") == "All 4 Slurm jobs run that `dike cluster slurm --max` allows."


def test_an_idle_pilot_is_ended_and_its_machine_forgotten(stage: Stage) -> None:
    stage.wait_for(search(1))
    stage.run(20)
    with stage.machine.folder.changing_members() as members:
        members |= {"n1-1": Member(2, "n1", "key", 0.0), "n1-1-2": Member(3, "n1", "key", 0.0)}
        members["n1-11"] = Member(4, "n1", "key", 0.0)
    stage.begin("1", tasks=1)
    stage.wait_for()
    stage.run(600)
    assert stage.slurm.calls == []
    stage.agents["1"] = 0
    stage.run(50)
    assert stage.slurm.calls == []
    stage.run(20)
    assert stage.slurm.calls == ["end 1"]
    stage.run(100)
    assert stage.slurm.calls == ["end 1"]
    stage.finish("1")
    stage.run(5)
    assert list(stage.machine.folder.members()) == ["n1-11"]
    assert stage.said[-2:] == ["ending Slurm job 1: no task for 60 s", "Slurm job 1 has ended"]


def test_a_pilot_that_does_not_end_is_cancelled(stage: Stage) -> None:
    stage.wait_for(search(1))
    stage.run(20)
    stage.begin("1")
    stage.wait_for()
    stage.run(60 + pilots.END_TIMEOUT_S + 30)
    assert stage.slurm.calls == ["end 1", "cancel 1"]


def test_a_queued_pilot_is_cancelled_when_nothing_waits_any_more(stage: Stage) -> None:
    stage.wait_for(search(1))
    stage.run(20)
    stage.wait_for()
    stage.run(80)
    assert stage.slurm.calls == ["cancel 1"]
    assert "ending Slurm job 1: nothing waits any more" in stage.said


def test_some_pilots_always_run(tmp_path: Path) -> None:
    stage = Stage(tmp_path, min_jobs=2)
    stage.run(5)
    assert list(stage.slurm.queue) == ["1", "2"]
    stage.begin("1")
    stage.begin("2")
    stage.run(300)
    assert stage.slurm.calls == []
    stage.finish("1")
    stage.run(10)
    assert list(stage.slurm.queue) == ["2", "3"]


def test_a_pilot_that_drains_is_no_supply(stage: Stage) -> None:
    stage.wait_for(search(1))
    stage.run(20)
    stage.begin("1", tasks=1)
    stage.wait_for()
    stage.run(20)
    stage.leaving.add("1")
    stage.agents["1"] = 0
    stage.wait_for(search(1))
    stage.run(15)
    assert list(stage.slurm.queue) == ["1", "2"]


def test_a_job_that_uses_no_pilot_gets_no_further_one(stage: Stage) -> None:
    stage.wait_for(search(1))
    stage.run(20)
    stage.begin("1")
    stage.run(70)
    assert stage.slurm.calls == ["end 1"]
    stage.finish("1")
    stage.run(300)
    assert not stage.slurm.queue
    assert "ran no task while this job waited" in stage.notice.explain("search")
    stage.wait_for(search(2))
    stage.run(20)
    assert list(stage.slurm.queue) == ["2"]


def test_a_job_that_fits_no_machine_gets_none(stage: Stage) -> None:
    stage.wait_for(search(1))
    stage.run(20)
    stage.begin("1", tasks=1)
    stage.wait_for(search(1, "large", cpus=3.0))
    stage.run(100)
    assert list(stage.slurm.queue) == ["1"]
    assert stage.notice.explain("large").startswith("A slot needs 3 cpus, and a machine")


def test_pilots_that_cannot_join_are_given_up(stage: Stage) -> None:
    stage.wait_for(search(1))
    stage.run(20)
    for number in range(1, pilots.MAX_FAILURES + 1):
        job_id = str(number)
        stage.slurm.queue[job_id] = SlurmJob(RUNNING, "n1")
        stage.run(5)
        (stage.machine.folder.path / "slurm" / f"{job_id}.log").write_text("one\ndike: no such token\n")
        del stage.slurm.queue[job_id]
        if number < pilots.MAX_FAILURES:
            stage.run(pilots.RETRY_INTERVAL_S + 10)
            assert "    dike: no such token" in stage.said
    with pytest.raises(DikeError, match="3 Slurm jobs in a row have ended without joining the cluster"):
        stage.run(5)


def test_a_pilot_that_does_not_join_in_time_is_ended_and_has_failed(stage: Stage) -> None:
    stage.wait_for(search(1))
    stage.run(20)
    stage.slurm.queue["1"] = SlurmJob(CONFIGURING, "n1")
    stage.run(2 * pilots.JOIN_TIMEOUT_S)
    assert stage.slurm.calls == []
    assert stage.notice.queued == {"1": "CONFIGURING"}
    stage.slurm.queue["1"] = SlurmJob(RUNNING, "n1")
    stage.run(10)
    assert stage.notice.explain("search") == "Slurm job 1 starts."
    stage.run(pilots.JOIN_TIMEOUT_S)
    assert stage.slurm.calls == ["end 1"]
    stage.finish("1")
    stage.run(5)
    assert any("has ended without joining" in line for line in stage.said)


def test_a_refused_pilot_is_tried_again_and_explained(stage: Stage) -> None:
    stage.slurm.failure = "sbatch failed: Unable to contact slurm controller."
    stage.wait_for(search(1))
    stage.run(60)
    assert [line for line in stage.said if "Unable" in line] == [f"{stage.slurm.failure}; retrying"]
    assert stage.notice.explain("search") == stage.slurm.failure
    stage.slurm.failure = ""
    stage.run(60)
    assert list(stage.slurm.queue) == ["1"]
    assert stage.notice.problem == ""


def test_pilots_of_an_earlier_controller_are_found(tmp_path: Path, stage: Stage) -> None:
    stage.wait_for(search(1))
    stage.run(20)
    stage.begin("1", tasks=1)
    later = PilotController(
        stage.machine, PilotOptions(max_jobs=1), stage.said.append, stage.slurm, cast(StoreClient, stage.store)
    )
    later.start()
    later.step()
    assert later.pilots["1"].has_joined
    assert "Slurm job 1 of an earlier `dike cluster slurm` is running" in stage.said


def test_the_token_is_private_and_renewed(stage: Stage) -> None:
    file = stage.controller.token_file
    assert file.stat().st_mode & 0o777 == 0o600
    first = file.read_text()
    stage.run(20)
    assert file.read_text() == first
    stage.now += pilots.TOKEN_RENEWAL_S
    stage.run(5)
    assert file.read_text() != first
    assert len(stage.machine.folder.tokens()) == 2


def test_the_script_and_its_options(tmp_path: Path) -> None:
    stage = Stage(tmp_path, nodes=2, drain_s=90.0, arguments=("--gres=gpu:4", "--signal=none"))
    assert stage.slurm.arguments[2:] == [
        *("--nodes=2", "--ntasks-per-node=1", "--signal=B:TERM@90", "--no-requeue", "--gres=gpu:4", "--signal=none")
    ]
    script = stage.controller.script()
    assert script.startswith("#!/bin/bash\n")
    assert f"cluster join head:8690 --token-file {stage.controller.token_file} --foreground --end-with-stdin" in script
    assert "secret" not in script


def test_the_end_cancels_what_is_queued_and_drains_what_runs(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.wait_for(search(2))
    stage.run(20)
    stage.begin("1", tasks=2)
    stage.run(30)
    assert list(stage.slurm.queue) == ["1", "2"]
    monkeypatch.setattr("time.sleep", lambda _: stage.finish("1"))
    assert stage.controller.end(wait_s=60.0)
    assert stage.slurm.calls == ["end 1", "cancel 2"]
    assert stage.store.pilots is None
