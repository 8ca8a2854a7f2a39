"""The embedded Mesos itself: what it offers, how it starts, and that its daemons can be killed and restarted."""

from __future__ import annotations

import signal
import socket
import threading
from pathlib import Path

import psutil
import pytest

from dike.exceptions import BadInputError, DikeError
from framework.embedded import cluster as cluster_module
from framework.embedded import ports as ports_module
from framework.embedded import settings
from framework.embedded.agents import AgentSpec
from framework.embedded.cluster import Agent, EmbeddedCluster
from framework.embedded.machine import attribute_of, local_resources
from framework.embedded.ports import BLOCK_SIZE, is_free, reserve_blocks
from tests.embedded.embedded_support import RawFramework, alive, with_argument
from tests.waiting import wait_until

SMALL = AgentSpec("cpus:2;mem:512;disk:100")


def daemons(cluster: EmbeddedCluster) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in (cluster.master_pid, *(agent.pid for agent in cluster.agents))]


@pytest.mark.mesos
def test_starts_what_was_asked_for_and_stops() -> None:
    cluster = EmbeddedCluster([AgentSpec("cpus:4;mem:4096;gpus:2", "rack:r1;gpu_model:K80"), SMALL])
    with cluster:
        state = cluster.state()
        assert state["version"] == "1.11.0"
        agents = {agent["hostname"]: agent for agent in state["slaves"]}
        assert sorted(agents) == ["agent-0", "agent-1"]
        offered = agents["agent-0"]["resources"]
        assert (offered["cpus"], offered["mem"], offered["gpus"]) == (4, 4096, 2)
        assert agents["agent-0"]["attributes"] == {"rack": "r1", "gpu_model": "K80"}
        assert agents["agent-1"]["resources"]["disk"] == 100
        assert agents["agent-1"]["attributes"] == {}
        assert all(agent["active"] for agent in agents.values())
        ranges = [agent["resources"]["ports"] for agent in agents.values()]
        assert len(set(ranges)) == 2
        running = daemons(cluster)
        assert len(alive(running)) == 3
        work_dir = cluster.work_dir
    assert not alive(running)
    assert not work_dir.exists()
    cluster.stop()  # A second time is nothing.


@pytest.mark.mesos
def test_two_clusters_at_once_share_no_port() -> None:
    with EmbeddedCluster([SMALL, SMALL]) as one, EmbeddedCluster([SMALL, SMALL]) as other:
        assert one.master != other.master
        ports: set[int] = set()
        for cluster in (one, other):
            assert len(cluster.state()["slaves"]) == 2
            for agent in cluster.state()["slaves"]:
                first, last = (int(port) for port in agent["resources"]["ports"].strip("[]").split("-"))
                block = set(range(first, last + 1))
                assert len(block) == BLOCK_SIZE
                assert not block & ports
                ports |= block
        other.stop()
        assert len(one.state()["slaves"]) == 2


@pytest.mark.mesos
def test_default_agent_offers_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "gpu_models", list)  # The declared resources come from elsewhere.
    with EmbeddedCluster(work_dir=tmp_path / "kept") as cluster:
        (agent,) = cluster.state()["slaves"]
        declared = dict(part.split(":") for part in local_resources().split(";"))
        assert agent["resources"]["cpus"] == float(declared["cpus"])
        assert agent["resources"]["mem"] == float(declared["mem"]) < psutil.virtual_memory().total / 2**20
        assert agent["resources"]["gpus"] == float(declared.get("gpus", 0))
    assert (tmp_path / "kept" / "master.log").stat().st_size > 0
    assert (tmp_path / "kept" / "agent-0.log").stat().st_size > 0


@pytest.mark.mesos
def test_gpu_model_is_filled_in_for_gpu_agents_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "gpu_models", lambda: ["H200", "H200"])
    specs = [AgentSpec("cpus:1;gpus:2"), AgentSpec("cpus:1;gpus:1", "gpu_model:K80"), AgentSpec("cpus:1", "rack:r2")]
    with EmbeddedCluster(specs) as cluster:
        attributes = {agent["hostname"]: agent["attributes"] for agent in cluster.state()["slaves"]}
    assert attributes == {"agent-0": {"gpu_model": "H200"}, "agent-1": {"gpu_model": "K80"}, "agent-2": {"rack": "r2"}}


@pytest.mark.mesos
def test_gpus_are_announced_with_device_numbers_that_no_other_agent_has() -> None:
    texts = ("cpus:1;gpus:2", "cpus:1", "cpus:1;gpus:2;gpu_devices:[1-2]", "cpus:1;gpus(ml):1;gpus:1")
    with EmbeddedCluster([AgentSpec(text) for text in texts]) as cluster:
        agents = {agent["hostname"]: agent for agent in cluster.state()["slaves"]}
    announced = {name: agent["unreserved_resources"].get("gpu_devices") for name, agent in agents.items()}
    assert announced == {"agent-0": "[0-0, 3-3]", "agent-1": None, "agent-2": "[1-2]", "agent-3": "[5-5]"}
    assert agents["agent-3"]["reserved_resources"]["ml"]["gpu_devices"] == "[4-4]"


@pytest.mark.parametrize("resources", ["gpus:2;gpu_devices:[0-0]", "gpus:1;gpu_devices:[0-1]", "gpu_devices:[0-0]"])
def test_device_numbers_that_do_not_match_the_gpus_are_refused(resources: str) -> None:
    with pytest.raises(BadInputError, match="name one for each"):
        AgentSpec(resources).validated()


def test_agents_that_name_the_same_gpu_are_refused() -> None:
    with pytest.raises(BadInputError, match="Two agents name GPU 1; leave gpu_devices out"):
        EmbeddedCluster([AgentSpec("gpus:2;gpu_devices:[0-1]"), AgentSpec("gpus:2;gpu_devices:[1-2]")])


def test_the_bound_of_device_numbers_is_said() -> None:
    with pytest.raises(BadInputError, match="of numbers up to 4095"):
        AgentSpec("gpus:1;gpu_devices:[0-99999999999]").validated()


def test_gpu_name_as_attribute() -> None:
    assert attribute_of("NVIDIA H200") == "H200"
    assert attribute_of("NVIDIA A100-SXM4-40GB") == "A100-SXM4-40GB"
    assert attribute_of("Tesla K80") == "Tesla-K80"


@pytest.mark.mesos
def test_agent_is_killed_and_comes_back() -> None:
    with EmbeddedCluster([SMALL, SMALL]) as cluster:
        before = {agent["hostname"]: agent["id"] for agent in cluster.state()["slaves"]}
        (killed,) = [psutil.Process(cluster.agents[1].pid)]
        cluster.kill_agent(1)
        assert not alive([killed])
        wait_until(lambda: len([a for a in cluster.state()["slaves"] if a["active"]]) == 1, "the master has noticed")
        cluster.restart_agent(1)
        cluster.wait_for_agents(60)
        assert cluster.agents[1].pid != killed.pid
        assert {agent["hostname"]: agent["id"] for agent in cluster.state()["slaves"]} == before


@pytest.mark.mesos
def test_agent_that_leaves_is_forgotten_at_once() -> None:
    with EmbeddedCluster([SMALL, SMALL]) as cluster:
        cluster.kill_agent(0, signal.SIGUSR1)
        wait_until(lambda: [a["hostname"] for a in cluster.state()["slaves"]] == ["agent-1"], "it has left")
        with pytest.raises(DikeError, match="agent-0 did not register"):
            cluster.wait_for_agents(0.2)


@pytest.mark.mesos
def test_master_is_killed_and_agents_come_back_with_their_tasks() -> None:
    with EmbeddedCluster([SMALL]) as cluster:
        info = {"failover_timeout": 600.0, "checkpoint": True}
        framework = RawFramework(cluster.master, **info)
        framework.launch("steady", {"value": "sleep 7103.5"})
        framework.wait_for("steady", "TASK_RUNNING")
        wait_until(lambda: with_argument("7103.5"), "the command runs")
        agents_before = [agent["id"] for agent in cluster.state()["slaves"]]
        cluster.kill_master()
        with pytest.raises(DikeError, match="does not answer"):
            cluster.state()
        cluster.restart_master()
        cluster.wait_for_agents(60)
        assert [agent["id"] for agent in cluster.state()["slaves"]] == agents_before
        assert len(with_argument("7103.5")) == 1
    assert not with_argument("7103.5")


@pytest.mark.mesos
def test_daemon_that_cannot_start_is_reported_with_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    made = settings.master_environment
    monkeypatch.setattr(settings, "master_environment", lambda *of: made(*of) | {"MESOS_CREDENTIALS": "/absent.json"})
    cluster = EmbeddedCluster([SMALL])
    with pytest.raises(DikeError, match="master ended") as caught:
        cluster.start()
    assert "absent.json" in str(caught.value)
    assert not cluster.work_dir.exists()
    assert not with_argument(str(cluster.work_dir))


@pytest.mark.mesos
def test_a_library_that_cannot_be_loaded_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "ensure_library", lambda: tmp_path / "absent.so")
    with pytest.raises(DikeError, match=r"(?s)master ended\..*absent\.so: cannot open"):
        EmbeddedCluster([SMALL]).start()


@pytest.mark.mesos
def test_a_zookeeper_that_makes_no_sense_is_reported_by_the_master() -> None:
    with pytest.raises(DikeError, match=r"(?s)master-\d ended\..*mesos: "):
        EmbeddedCluster([SMALL], zookeeper="zk://127.0.0.1").start()


@pytest.mark.mesos
def test_a_start_fails_at_once_when_the_cluster_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a script turns out not to train before the agents of `dike run` have registered."""
    looked = threading.Event()

    def look(cluster: EmbeddedCluster) -> list[Agent]:
        looked.set()
        return cluster.agents

    monkeypatch.setattr(EmbeddedCluster, "_missing_agents", look)
    with EmbeddedCluster([SMALL]).starting() as cluster:
        assert looked.wait(60)
    with pytest.raises(DikeError, match="is not running"):
        cluster.wait_started()
    assert not with_argument(str(cluster.work_dir))


@pytest.mark.mesos
def test_lost_port_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Someone takes the master's port between its choice and its use."""
    thief = socket.socket()

    def reserve_and_rob(count: int) -> list[object]:
        blocks = reserve_blocks(count)
        thief.bind(("", blocks[0].first))
        thief.listen()
        return list(blocks)

    monkeypatch.setattr(cluster_module, "reserve_blocks", reserve_and_rob)
    with thief, EmbeddedCluster([SMALL]) as cluster:
        stolen = thief.getsockname()[1]
        assert not cluster.master.endswith(f":{stolen}")
        assert len(cluster.state()["slaves"]) == 1


@pytest.mark.integration
def test_reserved_blocks_are_free_and_held() -> None:
    first = reserve_blocks(2)
    second = reserve_blocks(2)
    try:
        taken = [port for block in (*first, *second) for port in block]
        assert len(set(taken)) == len(taken) == 4 * BLOCK_SIZE
        assert all(is_free(port) for port in taken)
    finally:
        for block in (*first, *second):
            block.claim.close()


@pytest.mark.integration
def test_a_block_with_a_busy_port_is_passed_over() -> None:
    (block,) = reserve_blocks(1)
    block.claim.close()
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", block.first + 50))
        (other,) = reserve_blocks(1)
    other.claim.close()
    # Another cluster may have left one before it.
    assert other.first != block.first


@pytest.mark.integration
def test_more_blocks_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not where others reserve theirs: clusters that start at this moment would find none.
    monkeypatch.setattr(ports_module, "FIRST_PORT", ports_module.END_PORT)
    monkeypatch.setattr(ports_module, "END_PORT", ports_module.END_PORT + 3 * BLOCK_SIZE)
    with pytest.raises(DikeError, match="only 3 are available"):
        reserve_blocks(4)
    for block in reserve_blocks(3):  # None stayed reserved.
        block.claim.close()


def test_number_of_agents_is_bounded() -> None:
    for count in (0, 111):
        with pytest.raises(BadInputError, match=f"1 to 110 agents, not {count}"):
            EmbeddedCluster([SMALL] * count)


@pytest.mark.parametrize(
    ("resources", "checked"),
    [
        ("", ""),
        (" cpus : 4 ; mem:4096; ", "cpus:4;mem:4096"),
        ("cpus(dike):1.5;gpus:0", "cpus(dike):1.5;gpus:0"),
        ("ports:[31000-31099, 32000-32001]", "ports:[31000-31099,32000-32001]"),
        ("disks:{sda,sdb}", "disks:{sda,sdb}"),
    ],
)
def test_resources_are_read(resources: str, checked: str) -> None:
    assert AgentSpec(resources).validated().resources == checked


@pytest.mark.parametrize(
    "resources",
    [
        "cpus",
        "cpus:",
        ":4",
        "cpus=4",
        "cpus:four",
        "cpus:-1",
        "cpus:nan",
        "cpus:0",
        "mem:4GiB",
        "gpus:1.5",
        "gpus:[0-1]",
        "gpu_devices:2",
        "gpu_devices:[4096-4096]",
        "gpus:99999999999",
        "ports:31000",
        "ports:[31000]",
        "ports:[31099-31000]",
        "ports:[60000-70000]",
        "ports:[]",
        "cpus:4,mem:1",
        "foo:bar",
    ],
)
def test_malformed_resources_are_named(resources: str) -> None:
    with pytest.raises(BadInputError) as caught:
        AgentSpec(resources).validated()
    assert f'"{resources}"' in str(caught.value)


@pytest.mark.parametrize("attributes", ["rack", "rack:", ":r1", "rack:r1:r2", "ra ck:r1", "rack:r1|r2"])
def test_malformed_attributes_are_named(attributes: str) -> None:
    with pytest.raises(BadInputError) as caught:
        EmbeddedCluster([AgentSpec("", attributes)])
    assert f'"{attributes}"' in str(caught.value)
