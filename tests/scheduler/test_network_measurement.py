"""`dike agents measure`: the senders and receivers, the computed speeds, and the whole command on a real Mesos."""

from __future__ import annotations

import dataclasses
import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from dike.exceptions import BadInputError, JobFailedError
from dike.profile import Api
from executor.messages import decode, encode
from executor.transfer import CHUNK_BYTES, TransferOrder, TransferResult, listen, send, serve
from framework.embedded.agents import AgentSpec
from framework.embedded.cluster import EmbeddedCluster
from framework.mesos import events
from framework.scheduler.constraints import parse_constraints
from framework.scheduler.network_measurement import NetworkMeasurement, TransferLimits
from framework.scheduler.offer_pool import SETTLE_S
from solver import Plan, make_plan
from solver.cluster_file import read_cluster
from solver.settings import PlanSettings
from tests.mesos.fake_mesos import FakeMesos
from tests.profiles import made_up_profile
from tests.running import run_dike

MIB = 2**20
LIMITS = TransferLimits(64 * MIB, 2.0)


class MeasurementStage:
    """A measurement on agents with fake links: cards, and one uplink for each rack.

    Args:
        cards: agent's number -> Gb/s of its card.
        racks: agent's number -> rack.
        uplink: Gb/s of each rack.
        more: further arguments of the measurement.
    """

    def __init__(
        self, cards: dict[int, float], racks: dict[int, str] | None = None, uplink: float = 1e3, **more: Any
    ) -> None:
        self.now = 0.0
        self.mesos = FakeMesos()
        self.cards = {f"agent-{number}": gbps for number, gbps in cards.items()}
        self.racks = {f"agent-{number}": rack for number, rack in (racks or {}).items()}
        self.uplink = uplink
        self.work = NetworkMeasurement(
            **{
                "mesos": self.mesos,
                "python": "python3",
                "container": None,
                "limits": LIMITS,
                "constraints": parse_constraints(()),
                "clock": lambda: self.now,
                **more,
            }
        )
        self.work.handle(events.Subscribed("F", "127.0.0.1:5050"))
        self.seen = 0

    def offer(self, *numbers: int, **amounts: Any) -> None:
        offers = []
        for number in numbers:
            rack = self.racks.get(f"agent-{number}")
            attributes = [] if rack is None else [{"name": "rack", "type": "TEXT", "text": {"value": rack}}]
            offers.append({**self.mesos.offer(number, **amounts), "attributes": attributes})
        self.work.handle(events.OffersArrived(tuple(offers)))
        self.wait(SETTLE_S + 0.1)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.work.tick()

    def update(self, info: dict[str, Any], state: str, **more: Any) -> None:
        status = {"task_id": info["task_id"], "agent_id": info["agent_id"], "state": state, **more}
        self.work.handle(events.StatusUpdate(status))

    def start(self) -> None:
        for info in self.mesos.accepted:
            self.update(info, "TASK_RUNNING")
        self.work.tick()

    def transfer(self) -> list[tuple[str, str]]:
        """Answers all transfers in progress, as the links would; (sender, receiver) of each."""
        pairs = []
        by_port = {TransferOrder.decode(info["data"]).port: info for info in self.mesos.accepted}
        name = {info["task_id"]["value"]: f"agent-{info['agent_id']['value'][1:]}" for info in self.mesos.accepted}
        said = [(task, decode(data)) for task, data in self.mesos.messages[self.seen :]]
        self.seen = len(self.mesos.messages)
        for task, told in said:
            sender, receiver = name[task], name[by_port[told["port"]]["task_id"]["value"]]
            gbps = min(self.cards[sender], self.cards[receiver])
            if self.racks.get(sender) != self.racks.get(receiver):
                gbps = min(gbps, self.uplink / len(said))
            answer = TransferResult(told["transfer"], 64 * MIB, 8 * 64 * MIB / gbps / 1e9)
            self.work.handle(events.MessageArrived("", task, answer.encode()))
            pairs.append((sender, receiver))
        self.work.tick()
        return pairs

    def finish(self) -> list[list[tuple[str, str]]]:
        rounds = []
        while not self.work.done:
            rounds.append(self.transfer())
            assert rounds[-1], "no transfer is in progress"
        return rounds


def test_cards_are_measured_one_transfer_at_a_time() -> None:
    stage = MeasurementStage({0: 10.0, 1: 1.0, 2: 10.0})
    stage.offer(0, 1, 2)
    assert all(info["executor"]["command"]["arguments"][-1] == "executor.transfer" for info in stage.mesos.accepted)
    stage.start()
    rounds = stage.finish()
    assert all(len(pairs) == 1 for pairs in rounds)
    assert len({pair for pairs in rounds for pair in pairs}) == 6
    network = stage.work.report.network()
    assert {one.name: one.network_gbps for one in network.machines} == stage.cards
    assert network.across_racks_gbps is None


@pytest.mark.parametrize(("uplink", "across"), [(12.0, 12.0), (1e3, None)])
def test_an_uplink_is_known_where_it_carries_less_than_the_cards(uplink: float, across: float | None) -> None:
    racks = {0: "r1", 1: "r1", 2: "r2", 3: "r2"}
    stage = MeasurementStage(dict.fromkeys(racks, 10.0), racks, uplink)
    stage.offer(*racks)
    stage.start()
    rounds = stage.finish()
    assert [len(pairs) for pairs in rounds] == [1] * 12 + [2] * 2
    assert all(stage.racks[sender] != stage.racks[receiver] for pairs in rounds[12:] for sender, receiver in pairs)
    network = stage.work.report.network()
    assert network.across_racks_gbps == across
    assert {(one.name, one.network_gbps, one.rack) for one in network.machines} == {
        (f"agent-{number}", 10.0, rack) for number, rack in racks.items()
    }


def test_what_cannot_be_measured_is_said() -> None:
    stage = MeasurementStage({0: 10.0, 1: 10.0, 2: 10.0})
    stage.offer(0, 1, 2)
    stage.start()
    # A task ends in the middle of a transfer, another one cannot reach its partner, a third is never heard of again.
    stage.update(stage.mesos.accepted[1], "TASK_FAILED", message="the disk is full.")
    stage.work.tick()
    number = decode(stage.mesos.messages[-1][1])["transfer"]
    stage.work.handle(events.MessageArrived("", "", TransferResult(number, error="refused").encode()))
    stage.work.handle(events.MessageArrived("", "", encode({"transfer": 1})))
    stage.work.tick()
    stage.wait(1000.0)
    assert stage.work.report.problems == (
        "The task on agent-1 failed: the disk is full.",
        "agent-2 could not send to agent-0: refused.",
        "agent-0 did not report its transfer to agent-2.",
    )
    assert not stage.work.report.transfers
    with pytest.raises(JobFailedError, match="Fewer than two agents are left"):
        stage.update(stage.mesos.accepted[0], "TASK_LOST")


def test_it_takes_two_agents_with_room() -> None:
    stage = MeasurementStage({0: 10.0})
    with pytest.raises(BadInputError, match=r"needs two agents .* only these have it: agent-0\."):
        stage.offer(0)
    stage = MeasurementStage({0: 10.0, 1: 10.0})
    with pytest.raises(BadInputError, match=r"needs two agents .* only these have it: none\."):
        stage.offer(0, 1, ports=False)
    stage = MeasurementStage({0: 10.0, 1: 10.0}, constraints=parse_constraints(["hostname:LIKE:agent-0"]))
    with pytest.raises(BadInputError, match=r"needs two agents .* only these have it: agent-0\."):
        stage.offer(0, 1)
    stage = MeasurementStage({})
    with pytest.raises(BadInputError, match="No agent has offered anything"):
        stage.wait(30.0)
    stage = MeasurementStage({0: 10.0, 1: 10.0})
    stage.offer(0, 1)
    with pytest.raises(JobFailedError, match="The task on agent-1 did not start within 60 s"):
        stage.wait(61.0)


@pytest.mark.integration
def test_a_transfer_ends_by_size_or_by_time_and_needs_the_token() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    order = TransferOrder("127.0.0.1", port, "t" * 32, 8 * MIB, 60.0)
    threading.Thread(target=serve, args=(listen(order), order), daemon=True).start()
    count, seconds = send(order, "127.0.0.1", port)
    assert 8 * MIB - CHUNK_BYTES <= count < 8 * MIB
    assert seconds > 0
    assert send(dataclasses.replace(order, limit_s=0.0), "127.0.0.1", port)[0] == 0
    with pytest.raises((ValueError, OSError)):
        send(dataclasses.replace(order, token="x" * 32), "127.0.0.1", port)


@pytest.mark.integration
@pytest.mark.mesos
@pytest.mark.timeout(600)
def test_what_is_measured_is_planned_with_live_and_offline(tmp_path: Path) -> None:
    resources = "cpus:2;mem:6144;disk:4096"
    agents = [AgentSpec(resources, f"rack:r{number}") for number in (1, 2)]
    (tmp_path / "train.py").write_text("raise SystemExit('nothing is run')")
    shapes = {f"w{number}": (300, 100 + number) for number in range(4)}
    profile = made_up_profile(shapes, api=Api.KERAS, flops=6e8, batch_size=64)
    (tmp_path / "profile.json").write_text(profile.dumps())
    with EmbeddedCluster(agents) as cluster:
        cluster.wait_for_agents(60)
        done = run_dike("agents", "measure", "--master", cluster.master, "--size", "4MiB", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "wrote network.yaml" in done.stdout
        network = tmp_path / "network.yaml"
        measured = yaml.safe_load(network.read_text())
        assert [(node["name"], node["rack"]) for node in measured["nodes"]] == [("agent-0", "r1"), ("agent-1", "r2")]
        assert all(node["network_gbps"] > 0 for node in measured["nodes"])
        # A speed that no measurement would give shows that plans use the file.
        measured["links"] = {"across_racks_gbps": 0.001}
        network.write_text(yaml.safe_dump(measured))
        options = ("--strategy", "ps", "--network", "network.yaml", "--format", "json")
        live = run_dike(
            *("run", *options, "--master", cluster.master, "--profile", "profile.json", "--plan-only", "train.py"),
            cwd=tmp_path,
        )
        assert live.returncode == 0, live.stderr
    machine = {"cpus": 2, "mem": "6144MiB", "disk": "4096MiB"}
    nodes = [{"name": f"agent-{number}", **machine} for number in range(2)]
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump({"nodes": nodes}))
    offline = run_dike("plan", "profile.json", "--cluster", "cluster.yaml", *options, cwd=tmp_path)
    assert offline.returncode == 0, offline.stderr
    same: dict[str, Any] = {"solve_time_s": 0.0, "strategies": ()}  # offline shows other strategies, too
    plans = [dataclasses.replace(Plan.from_json(json.loads(one.stdout)), **same) for one in (live, offline)]
    assert plans[0] == plans[1]
    unaware = make_plan(PlanSettings(strategy="ps").request(profile, read_cluster(tmp_path / "cluster.yaml")))
    assert plans[0].samples_per_s < unaware.samples_per_s
