"""`dike plan` as a user runs it."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
import subprocess
import sys
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from dike.described import values_of
from framework.cli import main
from framework.mesos.offers import AgentOffer, by_agent
from framework.scheduler.records import JobKind, JobRecord
from framework.service.requests import MeasuredStep, TrainingRequest, stored_request, training_request
from framework.training.planning import plan_for
from solver import Plan
from solver.cli.planning_options import plan_settings
from solver.cluster_file import read_network
from solver.settings import PlanOptions
from tests.mesos.fake_mesos import FakeMesos
from tests.solver.solver_cases import MB, profile

EXAMPLES = Path(__file__).parents[2] / "examples" / "clusters"
DEADLINE_S = 180.0


def _plan(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The command in this process, without the seconds that a new one takes to load its modules."""
    command = ["dike", "plan", *map(str, arguments)]
    with pytest.MonkeyPatch.context() as patch, io.StringIO() as out, io.StringIO() as err:
        patch.setattr(sys, "argv", command)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
            main()
        return subprocess.CompletedProcess(command, int(ended.value.code or 0), out.getvalue(), err.getvalue())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.json"
    path.write_text(profile().dumps(), encoding="utf-8")
    return path


@pytest.mark.integration
def test_tables(model: Path) -> None:
    command = [sys.executable, "-m", "framework", "plan", str(model), "--cluster", str(EXAMPLES / "five-k80.yaml")]
    command += ["--strategy", "ps"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    for text in (
        "Options",
        "Option chosen",
        "Placement",
        "Strategies",
        "k80-4",
        "samples/s",
        "Next best options",
        "Proven",
    ):
        assert text in done.stdout


def test_three_hundred_machines_do_not_print_three_hundred_rows(model: Path) -> None:
    done = _plan(model, "--cluster", EXAMPLES / "300-nodes.yaml", "--strategy", "ps")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) < 100


def test_json_alone_on_standard_output(model: Path) -> None:
    done = _plan(
        model, "--cluster", EXAMPLES / "mixed.yaml", "--format", "json", "--max-workers", "3", "--batch-size", "16"
    )
    assert done.returncode == 0, done.stderr
    plan = Plan.from_json(json.loads(done.stdout))
    assert plan.option.workers <= 3
    assert plan.profile.batch_size == 16


def test_workers_that_differ_are_told_apart_in_every_table(tmp_path: Path) -> None:
    model = tmp_path / "model.json"
    model.write_text(profile([4 * MB] * 4, flops=1e8).dumps())
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(
        "nodes:\n"
        "  - {name: gpu, count: 1, cpus: 8, mem: 64GiB, gpus: 1, gpu_model: K80, disk: 100GiB, network_gbps: 100}\n"
        "  - {name: cpu, count: 1, cpus: 32, mem: 64GiB, disk: 100GiB, network_gbps: 100}\n"
    )
    base = (model, "--cluster", cluster, "--strategy", "ps")
    plan = Plan.from_json(json.loads(_plan(*base, "--format", "json").stdout))
    gpus = [task.gpus for task in plan.tasks if task.role == "worker"]
    assert len(set(gpus)) == 2, "the case has to have both"
    with_gpus = len(list(filter(None, gpus)))
    told = f"{with_gpus} + {len(gpus) - with_gpus}"
    for question in (("--sweep", "network_gbps=100"), ("--what-if", "network_gbps=100")):
        assert told in _plan(*base, *question).stdout


def test_the_objective_is_passed_on(model: Path) -> None:
    done = _plan(model, "--cluster", EXAMPLES / "five-k80.yaml", "--format", "json", "--objective", "traffic")
    assert json.loads(done.stdout)["objective"] == "traffic"


@pytest.mark.parametrize("options", [(), ("--strategy", "ps"), ("--min-workers", "1", "--rules", "none")])
def test_each_task_has_the_memory_that_is_asked_for(model: Path, options: tuple[str, ...]) -> None:
    few = ("--cluster", EXAMPLES / "mixed.yaml", "--max-workers", "2", *options)
    memory = []
    for asked in ("0", "4000"):
        done = _plan(model, *few, "--format", "json", "--task-mem", asked)
        assert done.returncode == 0, done.stderr
        memory.append({task["mem_mb"] for task in json.loads(done.stdout)["tasks"]})
    assert min(memory[0]) < 4000 <= min(memory[1])
    done = _plan(model, *few, "--task-mem", "100000000")
    assert done.returncode == 2
    assert "each task requests at least 100,000,000 MiB of memory (--task-mem)." in done.stderr


def test_a_picture_is_drawn(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.svg"
    done = _plan(model, "--cluster", EXAMPLES / "laptop.yaml", "--picture", path)
    assert done.returncode == 0, done.stderr
    assert "laptop" in path.read_text(encoding="utf-8")


def test_bad_input_is_one_sentence_and_exit_2(model: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("nodes:\n  - name: a\n    cpus: 0\n    mem: 1GiB\n", encoding="utf-8")
    tiny = tmp_path / "tiny.yaml"
    tiny.write_text("nodes:\n  - name: a\n    cpus: 4\n    mem: 64MiB\n", encoding="utf-8")
    good = EXAMPLES / "laptop.yaml"
    cases: list[tuple[list[str | Path], str]] = [
        ([model, "--cluster", bad], f"{bad}, line 3:"),
        ([model, "--cluster", tmp_path / "none.yaml"], "cannot be read"),
        ([model, "--cluster", tiny], "short"),
        ([model, "--cluster", good, "--picture", "plan.gif"], ".png or .svg"),
        ([tmp_path / "none.json", "--cluster", good], "none.json"),
        ([model, "--cluster", good, "--objective", "fame"], "--objective is 'fame'; it must be one of"),
        ([model, "--cluster", good, "--max-workers", "0"], "--max-workers is 0; it must be at least 1"),
        ([model, "--cluster", good, "--no-such"], "No such option: --no-such; see dike plan --help"),
    ]
    for arguments, says in cases:
        done = _plan(*arguments)
        assert done.returncode == 2, (arguments, done.stderr)
        assert done.stdout == ""
        assert says in done.stderr
        assert "Traceback" not in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


CLUSTER = """
nodes:
  - {name: gpu, count: 2, cpus: 8, mem: 32GiB, disk: 20GiB, gpus: 2, gpu_model: V100, network_gbps: 25, rack: r1}
  - {name: old, count: 2, cpus: 4, mem: 16GiB, disk: 20GiB, gpus: 2, gpu_model: K80, network_gbps: 1, rack: r2}
"""
NETWORK = """
links: {across_racks_gbps: 2, within_node_gbps: 20, across_racks_cost: 4}
nodes:
  - {name: old-1, network_gbps: 0.5}
  - {name: gpu-0, rack: r2}
"""
MEASURED = """
placement,cpus,gpus,seconds
gpu-0:p0+2w|gpu-1:2w,1,1,0.9
gpu-0:p0|gpu-1:p1+2w|old-0:1w,1,1,3.5
"""


def _offers() -> list[AgentOffer]:
    """What the machines of `CLUSTER` offer as agents, which say of themselves what the file says of them."""
    mesos, offers = FakeMesos(), []
    shapes = {"gpu": (8, 32, "V100", 25, "r1"), "old": (4, 16, "K80", 1, "r2")}
    for number, name in enumerate(("gpu-0", "gpu-1", "old-0", "old-1")):
        cpus, mem_gib, model, gbps, rack = shapes[name.partition("-")[0]]
        offer = mesos.offer(number, cpus=cpus, mem=1024 * mem_gib, gpus=2)
        disk = next(one for one in offer["resources"] if one["name"] == "disk")
        disk["scalar"]["value"] = 20 * 1024
        texts = {"gpu_model": model, "rack": rack}
        attributes = [{"name": key, "type": "TEXT", "text": {"value": text}} for key, text in texts.items()]
        attributes.append({"name": "network_gbps", "type": "SCALAR", "scalar": {"value": gbps}})
        offers.append({**offer, "hostname": name, "attributes": attributes})
    return by_agent(offers)


IGNORED = "left out|--strategy ps"
"""Sentences that need not be the same in plans of the same job."""


@pytest.mark.parametrize(
    ("settings", "has_network"),
    [
        pytest.param({}, False, marks=pytest.mark.slow),
        ({"objective": "traffic"}, True),
        ({"rules": "all", "sharding": "round_robin"}, False),
        ({"gpus_per_task": 2}, False),
        ({"task_mem": 5000}, False),
        pytest.param({"sharding": "optimus"}, False, marks=pytest.mark.slow),
        pytest.param({"measurements": True}, True, marks=pytest.mark.slow),
        pytest.param({"plan_timeout": 60.0}, False, marks=pytest.mark.integration),
    ],
)
def test_what_is_planned_offline_is_what_runs(
    model: Path, tmp_path: Path, settings: dict[str, Any], has_network: bool
) -> None:
    """`dike plan` with a file of the machines, and a job of the service on agents that are these machines."""
    cluster, network, measured = tmp_path / "cluster.yaml", tmp_path / "network.yaml", tmp_path / "measured.csv"
    cluster.write_text(CLUSTER)
    network.write_text(NETWORK)
    measured.write_text(MEASURED.lstrip())
    if settings.get("measurements"):
        settings = {"measurements": measured}
    options = [text for name, value in settings.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    links = ["--network", network] if has_network else []
    done = _plan(model, "--cluster", cluster, "--format", "json", *links, *options)
    assert done.returncode == 0, done.stderr
    offline = Plan.from_json(json.loads(done.stdout))

    typed = {**{name: parameter.default for name, parameter in signature(plan_settings).parameters.items()}, **settings}
    planning = plan_settings(**typed)
    asked = values_of(PlanOptions, planning)
    asked["measurements"] = tuple(MeasuredStep.of(row) for row in planning.measurements)
    request = training_request(script="train.py", profile=offline.profile.to_json(), **asked)
    stored = JobRecord("job", JobKind.TRAINING, "user", "train.py", request.to_json(), (), 0.0, "token")
    wanted = stored_request(stored)
    assert isinstance(wanted, TrainingRequest)
    links_known = read_network(network) if has_network else None
    spec = wanted.to_spec(links_known, job_id="job", checkpoint_dir="", bundle_url="", python="python3")
    assert spec.planning == dataclasses.replace(planning, network=links_known)
    agents = _offers()
    live = plan_for(spec, agents, lambda: [agent.node_class() for agent in agents])

    assert max(task.gpus for task in live.tasks) == 1
    # A search whose result is only shown may end early on a busy machine.
    same: dict[str, Any] = {"solve_time_s": 0.0, "why": (), "strategies": ()}
    assert dataclasses.replace(live, **same) == dataclasses.replace(offline, **same)
    assert [text for text in live.why if not re.search(IGNORED, text)] == [
        text for text in offline.why if not re.search(IGNORED, text)
    ]
