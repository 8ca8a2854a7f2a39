"""A worker that is far slower than the others is replaced: real processes on a real Mesos."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from framework.embedded.agents import AgentSpec
from framework.embedded.cluster import EmbeddedCluster
from tests.profiles import made_up_profile
from tests.running import Running

pytestmark = [pytest.mark.mesos, pytest.mark.tensorflow, pytest.mark.timeout(600)]

SLOW_WORKER = 2
STEPS = 100
PROFILE = made_up_profile({"w": (4, 1)}, flops=1e9)


def test_a_slow_worker_is_replaced_on_another_agent(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    shutil.copy(Path(__file__).parent / "paced_script.py", project / "train.py")
    (tmp_path / "profile.json").write_text(PROFILE.dumps())
    with EmbeddedCluster([AgentSpec(resources="cpus:1;mem:1300;disk:4096")] * 5) as cluster:
        job = Running(
            tmp_path,
            *("run", "--format", "json", "--master", cluster.master, "--elastic", "3:3", "--resize-interval", "2"),
            *("--strategy", "ps", "--checkpoint-interval", "1", "--profile", tmp_path / "profile.json"),
            *(project / "train.py", str(STEPS), str(SLOW_WORKER)),
        )
        try:
            job.wait_for_text(f"worker:{SLOW_WORKER} makes")
            result = job.result()
        finally:
            Running.end_all()
    assert len(result["resizes"]) == 1, job.log
    (replaced,) = result["resizes"]
    assert "is too slow" in replaced["reason"]
    assert f"worker:{SLOW_WORKER}" in replaced["reason"]
    assert (replaced["from_workers"], replaced["to_workers"]) == (3, 3)
    slow_agent = replaced["reason"].split(" on ")[1].split()[0]
    tasks = {f"{task['role']}:{task['index']}": task["node"] for task in result["plan"]["tasks"]}
    assert tasks[f"worker:{SLOW_WORKER}"] != slow_agent
    assert result["steps"] >= replaced["step"] + STEPS
    assert result["restarts"] == 0
