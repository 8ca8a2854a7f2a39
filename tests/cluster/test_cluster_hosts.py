"""Clusters of several hosts: network namespaces, each with its own folders and host name."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.cluster_hosts import ClusterHosts
from benchmarks.shaped_hosts import unsupported_reason
from framework.cluster.records import AGENT, ClusterFolder, Membership
from tests.cluster.cluster_script import RESOURCES, SCRIPT, final_loss, machines
from tests.waiting import wait_until

NOT_HERE = unsupported_reason()
pytestmark = [
    pytest.mark.mesos,
    pytest.mark.tensorflow,
    pytest.mark.slow,
    pytest.mark.skipif(NOT_HERE is not None, reason=NOT_HERE or ""),
]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterHosts]:
    with ClusterHosts(tmp_path_factory.mktemp("hosts"), 3) as made:
        for host in range(3):
            (made.project(host) / "train.py").write_text(SCRIPT)
        made.make_cluster(RESOURCES)
        yield made


@pytest.fixture(scope="module")
def alone(hosts: ClusterHosts) -> dict[int, float]:
    """Number of epochs -> last loss under `python`."""
    return {count: _loss_alone(hosts, count) for count in (3, 20)}


def _loss_alone(hosts: ClusterHosts, epochs: int) -> float:
    done = hosts.run(0, sys.executable, "train.py", "--epochs", str(epochs))
    (hosts.project(0) / "model.keras").unlink()
    return final_loss(done.stdout)


def output_of(process: object, until: str) -> str:
    """Reads a process' output up to a line that contains a text."""
    lines = []
    for line in process.stdout:  # type: ignore[attr-defined]
        lines.append(line.decode(errors="replace"))
        if until in lines[-1]:
            return "".join(lines)
    raise AssertionError(f"no '{until}' in:\n{''.join(lines)}")


def membership(hosts: ClusterHosts, host: int) -> Membership:
    found = ClusterFolder(hosts.cluster_folder(host)).membership()
    assert found is not None
    return found


def test_a_job_runs_on_another_machine_without_a_shared_folder(hosts: ClusterHosts, alone: dict[int, float]) -> None:
    done = hosts.run(0, "dike", "run", "--constraint", "hostname:IS:host-1", "train.py")
    assert done.returncode == 0, done.stdout
    assert "using the cluster 'cluster' (--private uses this machine alone)" in done.stdout
    assert "worker:0 on host-1" in done.stdout
    assert final_loss(done.stdout) == alone[3]
    [run] = [path for path in (hosts.project(0) / "dike-runs").iterdir() if path.name.startswith("train-")]
    assert (run / "outputs" / "model.keras").is_file()
    assert list(run.glob("run-0-step-*/dike-trial.json"))
    assert not list(run.glob(".dike-*"))


def test_a_member_uses_the_cluster_as_the_head_does(hosts: ClusterHosts, alone: dict[int, float]) -> None:
    done = hosts.run(1, "dike", "run", "--constraint", "hostname:IS:host-2", "train.py")
    assert done.returncode == 0, done.stdout
    assert final_loss(done.stdout) == alone[3]
    [run] = (hosts.project(1) / "dike-runs").iterdir()
    assert (run / "outputs" / "model.keras").is_file()
    store = hosts.cluster_folder(0) / "store"
    assert list((store / "bundles").iterdir()) == []


def test_a_job_with_parameter_servers_spans_machines(hosts: ClusterHosts) -> None:
    done = hosts.run(0, "dike", "run", "--strategy", "ps", "--min-workers", "2", "train.py")
    assert done.returncode == 0, done.stdout
    launched = next(line for line in done.stdout.splitlines() if "launched" in line)
    assert len(set(re.findall(r"on (host-\d)", launched))) > 1, launched


def test_workers_of_several_machines_compute_what_one_computes(hosts: ClusterHosts, alone: dict[int, float]) -> None:
    done = hosts.run(0, "dike", "run", "--strategy", "allreduce", "--min-workers", "2", "train.py")
    assert done.returncode == 0, done.stdout
    launched = next(line for line in done.stdout.splitlines() if "launched" in line)
    assert len(set(re.findall(r"on (host-\d)", launched))) > 1, launched
    assert final_loss(done.stdout) == pytest.approx(alone[3], rel=1e-4)


def test_a_search_uses_all_machines_and_its_best_model_is_here(hosts: ClusterHosts) -> None:
    options = ("--param", "lr=0.03,0.01,0.003", "--name", "all", "--quantum", "1")
    done = hosts.run(0, "dike", "tune", "train.py", *options, "--", "--epochs", "5", "--pause", "0.02")
    assert done.returncode == 0, done.stdout
    assert {"host-0", "host-1", "host-2"} <= set(re.findall(r"slot \d+ on (host-\d) is up", done.stdout)), done.stdout
    exported = hosts.run(0, "dike", "export", "all", "-o", "best.keras")
    assert exported.returncode == 0, exported.stdout
    assert (hosts.project(0) / "best.keras").is_file()


def test_a_network_cut_loses_nothing(hosts: ClusterHosts, alone: dict[int, float]) -> None:
    options = ("--constraint", "hostname:IS:host-1", "--checkpoint-interval", "1")
    job = hosts.start(0, "dike", "run", *options, "train.py", "--epochs", "20", "--pause", "0.05")
    seen = output_of(job, "checkpoint of step")
    hosts.cut(1)
    wait_until(lambda: not machines(hosts).get("host-1"), "the loss of the machine to be noticed")
    hosts.heal(1)
    rest, _ = job.communicate(timeout=180)
    output = seen + rest.decode(errors="replace")
    assert job.returncode == 0, output
    assert "restored" in output
    assert final_loss(output) == alone[20]
    wait_until(lambda: machines(hosts).get("host-1"), "the machine to be back")


def test_a_killed_member_is_replaced_and_comes_back(hosts: ClusterHosts, alone: dict[int, float]) -> None:
    options = ("--constraint", "hostname:LIKE:host-[12]", "--checkpoint-interval", "1")
    job = hosts.start(0, "dike", "run", *options, "train.py", "--epochs", "20", "--pause", "0.05")
    seen = output_of(job, "checkpoint of step")
    [host] = {int(one) for one in re.findall(r"worker:0 on host-(\d)", seen)}
    hosts.kill(host)
    rest, _ = job.communicate(timeout=180)
    output = seen + rest.decode(errors="replace")
    assert job.returncode == 0, output
    assert f"launched worker:0 on host-{3 - host}" in output
    assert final_loss(output) == alone[20]
    back = hosts.run(host, "dike", "cluster", "join")
    assert back.returncode == 0, back.stdout
    assert machines(hosts)[f"host-{host}"]


def test_a_killed_head_comes_back_with_its_tasks(hosts: ClusterHosts, alone: dict[int, float]) -> None:
    options = ("--constraint", "hostname:IS:host-1", "--checkpoint-interval", "1")
    job = hosts.start(0, "dike", "run", *options, "train.py", "--epochs", "20", "--pause", "0.05")
    seen = output_of(job, "checkpoint of step")
    supervisor = json.loads((hosts.cluster_folder(0) / "process.json").read_text())["supervisor_pid"]
    os.kill(supervisor, signal.SIGKILL)
    wait_until(lambda: hosts.run(0, "dike", "cluster", "start", "--resources", RESOURCES[0]).returncode == 0, "a start")
    rest, _ = job.communicate(timeout=180)
    output = seen + rest.decode(errors="replace")
    assert job.returncode == 0, output
    assert "0 restarts" in output
    assert final_loss(output) == alone[20]


def test_a_leaving_member_saves_its_tasks(hosts: ClusterHosts, alone: dict[int, float]) -> None:
    options = ("--constraint", "hostname:LIKE:host-[12]", "--checkpoint-interval", "3600")
    job = hosts.start(0, "dike", "run", *options, "train.py", "--epochs", "20", "--pause", "0.05")
    seen = output_of(job, "Epoch 3/20")
    [host] = {int(one) for one in re.findall(r"worker:0 on host-(\d)", seen)}
    left = hosts.run(host, "dike", "cluster", "leave")
    assert left.returncode == 0, left.stdout
    rest, _ = job.communicate(timeout=180)
    output = seen + rest.decode(errors="replace")
    assert job.returncode == 0, output
    step = re.search(r"restored '.*': step (\d+)", output)
    assert step is not None, output
    assert int(step[1]) >= 20
    assert final_loss(output) == alone[20]
    assert f"host-{host}" not in machines(hosts)
    token = hosts.run(0, "dike", "cluster", "token").stdout
    again = hosts.run(host, *ClusterHosts.join_command(token), "--resources", RESOURCES[host])
    assert again.returncode == 0, again.stdout


def test_a_member_cannot_reach_the_agent_of_another(hosts: ClusterHosts) -> None:
    """The address of another agent leads nowhere, and the head's gateway carries no connection to it."""
    other = membership(hosts, 2)
    port = other.cluster.port + AGENT
    dial = f"import socket, sys\nsocket.create_connection(('{other.cluster.address(other.index)}', {port}), 2)\n"
    assert "refused" in hosts.run(1, sys.executable, "-c", dial).stdout
    open_it = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from framework.cluster import gateway\n"
        "from framework.cluster.authority import client_context\n"
        "from framework.cluster.records import ClusterFolder\n"
        "folder = ClusterFolder(Path(sys.argv[1]))\n"
        "async def ask():\n"
        "    host, _, port = folder.membership().cluster.head.rpartition(':')\n"
        "    reader, writer = await gateway.connect(host, int(port), client_context(folder.keys))\n"
        "    await gateway.send(writer, {'kind': 'open', 'to': 'host-2'})\n"
        "    writer.write(b'GET / HTTP/1.0\\r\\n\\r\\n')\n"
        "    print('answer', await asyncio.wait_for(reader.read(), 20))\n"
        "asyncio.run(ask())\n"
    )
    tried = hosts.run(1, sys.executable, "-c", open_it, str(hosts.cluster_folder(1)))
    assert "answer b''" in tried.stdout, tried.stdout


def test_the_shared_folder_of_the_head_is_used_where_it_is_seen(tmp_path: Path) -> None:
    with ClusterHosts(tmp_path, 2, shared=True) as hosts:
        (hosts.project(0) / "train.py").write_text(SCRIPT)
        hosts.make_cluster(RESOURCES[:2])
        done = hosts.run(0, "dike", "run", "--constraint", "hostname:IS:host-1", "train.py")
        assert done.returncode == 0, done.stdout
        [run] = (hosts.project(0) / "dike-runs").iterdir()
        assert list(run.glob("run-0-step-*/dike-trial.json"))
        sandboxes = hosts.cluster_folder(1) / "mesos" / "agent-0" / "work"
        assert not list(sandboxes.rglob("mirrors"))


def test_time_to_join_is_short(hosts: ClusterHosts) -> None:
    begun_s = time.monotonic()
    token = hosts.run(0, "dike", "cluster", "token").stdout
    again = hosts.run(1, *ClusterHosts.join_command(token), "--name", "second", "--resources", RESOURCES[1])
    assert again.returncode == 0, again.stdout
    assert time.monotonic() - begun_s < 60
    assert machines(hosts)["second"]
