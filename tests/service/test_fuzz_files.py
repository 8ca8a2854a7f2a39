"""Files and requests, made by hand or damaged: either one sentence describes the error, or they are used correctly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st

from dike.exceptions import BadInputError, DikeError
from dike.profile import ModelProfile
from framework.scheduler.constraints import parse_constraints
from framework.service.requests import TrainingRequest, read_request, search_request
from solver import Cluster, NodeClass, Plan, PlanRequest, make_plan
from solver.cluster_file import read_cluster
from tests.properties import examples
from tests.search.search_stage import search_spec
from tests.service.mutations import ODD, broken
from tests.training.job_stage import profile

GIB = 2**30
NODE = NodeClass(name="a", count=2, cpus=4.0, mem_bytes=8 * GIB, gpus=0, gpu_model=None, disk_bytes=10 * GIB)


def planned(model: ModelProfile) -> Plan:
    return make_plan(PlanRequest(model, Cluster((NODE,)), max_workers=1, time_limit_s=0.0))


PLAN = planned(profile())
PATIENT = examples(120, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
CLUSTER = {
    "nodes": [
        {"name": "big", "count": 2, "cpus": 8, "mem": "32 GiB", "gpus": 1, "gpu_model": "A100", "rack": "r1"},
        {"name": "small", "cpus": 2, "mem": "4 GiB", "rack": "r2"},
    ],
    "links": {"across_racks_gbps": 1.0, "pairs": [{"between": ["big", "small"], "cost": 2.0}]},
}


def assert_one_sentence(error: BaseException) -> None:
    """What the user reads: a line of text, printable anywhere."""
    text = str(error)
    assert text.strip()
    assert "\n" not in text
    text.encode("utf-8")


@pytest.mark.slow
@PATIENT
@given(st.one_of(st.text(), broken(CLUSTER).map(lambda values: yaml.safe_dump(values, allow_unicode=True))))
@example("nodes: !!python/object/apply:os.system ['true']")
@example("a: &a [*a]")
@example("nodes: &x [{name: a, cpus: 1, mem: 1}, *x]")
@example("[" * 5000)
@example("nodes: [{name: a, cpus: 1, mem: 1 GiB, count: 2026-11-21}]")
@example("nodes: [{name: a, cpus: 1, mem: 1 GiB, count: 2026-13-45}]")
@example("nodes: [{name: a, cpus: 1, mem: 1 GiB, count: !!timestamp foo}]")
@example("nodes: [{name: a, cpus: 1, mem: 1 GiB, count: !!bool x}]")
@example("nodes: [{name: a, cpus: 1, mem: 1 GiB, count: !!int ''}]")
@example(f"nodes: [{{name: a, cpus: 1{':1' * 200}.5, mem: 1 GiB}}]")
def test_a_cluster_file_is_read_or_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        read_cluster(path)
    except BadInputError as error:
        assert_one_sentence(error)


@PATIENT
@given(broken(profile().to_json()))
def test_a_profile_is_read_or_refused_and_can_be_planned(values: Any) -> None:
    try:
        read = ModelProfile.loads(json.dumps(values))
        assert ModelProfile.loads(read.dumps()) == read
        planned(read)
    except DikeError as error:
        assert_one_sentence(error)


@PATIENT
@given(broken(PLAN.to_json()))
def test_a_plan_is_read_or_refused(values: Any) -> None:
    try:
        Plan.loads(json.dumps(values)).dumps()
    except BadInputError as error:
        assert_one_sentence(error)


@pytest.mark.parametrize("read", [ModelProfile.loads, Plan.loads])
@pytest.mark.parametrize("text", ["", "[" * 100_000, "1" * 10_000, "NaN", '"\\ud800"', "{}", "[]"])
def test_json_that_cannot_be_meant_is_refused(read: Any, text: str) -> None:
    with pytest.raises(BadInputError) as refused:
        read(text)
    assert_one_sentence(refused.value)


TRAINING = {
    "kind": "training",
    "script": "folder/train.py",
    "arguments": ["--rate", "0.1"],
    "profile": profile().to_json(),
    "checkpoint_dir": "/checkpoints/a",
    "checkpoint_interval_s": 60.0,
    "max_restarts": 3,
    "objective": "throughput",
    "max_workers": 2,
    "environment": {"NAME": "value"},
    "preload": ["numpy"],
    "constraints": ["rack:IN:r1,r2"],
}
ELASTIC = {**TRAINING, "max_workers": None, "elastic": "1:4", "resize_interval_s": 60.0, "stragglers": "replace"}
MEASURED = {
    **TRAINING,
    "rules": "default,identical_workers",
    "sharding": "optimus",
    "plan_timeout_s": 5.0,
    "measurements": [
        {"ps": ["a"], "workers": ["a", "b"], "gpus": 1, "cpus": 1.5, "seconds": 0.5, "where": "rows.csv, line 2"},
        {"ps": ["a"], "workers": ["b"], "cpus": 1.0, "samples_per_s": 10.0, "batch_size": 8, "shard_bytes": [40_000]},
    ],
}
PLANNED = {**TRAINING, "max_workers": None, "plan": PLAN.to_json()}
SEARCH = search_request(search_spec(Path("/project")), "train.py", ("numpy",)).to_json()


@PATIENT
@given(st.one_of(ODD, *map(broken, (TRAINING, ELASTIC, MEASURED, PLANNED, SEARCH))))
def test_a_request_is_taken_or_refused(values: Any) -> None:
    try:
        request = read_request(values)
    except BadInputError as error:
        assert_one_sentence(error)
        return
    # What is taken can be kept, and be read again by the next service.
    kept = json.loads(json.dumps(request.to_json()))
    again = read_request(kept)
    if isinstance(again, TrainingRequest):
        again.to_spec(job_id="job", checkpoint_dir="/c", bundle_url="http://h/b", python="python3")
    else:
        again.to_spec()


RANGE = {"name": "rate", "low": 0.1, "high": 1.0}


def space_of(**changes: Any) -> dict[str, Any]:
    return {"space": [{**RANGE, **changes}]}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"slot_gpus": -1}, "slot_gpus is -1; it must be at least 0"),
        ({"slot_cpus": 0.0}, "slot_cpus is 0.0; it must be at least 0.1"),
        ({"max_slots": 0}, "max_slots is 0; it must be at least 1"),
        ({"max_slots": -3}, "max_slots"),
        ({"seed": -1}, "seed"),
        ({"timeout_s": -1.0}, "timeout_s"),
        ({"agent_cooldown_s": float("nan")}, "agent_cooldown_s"),
        ({"trial_count": 0}, "trial_count"),
        ({"name": "../up"}, "name: '../up' is not a name for a job; use up to 200 letters"),
        ({"name": "a" * 201}, "not a name for a job; use up to 200 letters"),
        ({"script": "/etc/passwd"}, "script: is a path inside the bundle"),
        ({"policy": "nope"}, "There is no policy 'nope'"),
        ({"warm_start_from": ["earlier"], "policy": "fifo"}, "--warm-start-from is for --policy dike"),
        ({"warm_start_from": ["a b"]}, "warm_start_from.0: 'a b' is not a name"),
        ({"sampler": "nope"}, "There is no sampler 'nope'"),
        ({"sampler_object": "x"}, "A service runs no Python objects of its users"),
        ({"space_function": "x"}, "A service runs no Python objects of its users"),
        ({"stop": "patience"}, "whole number of reports"),
        ({"settings": {"quantum_s": 0.0}}, "settings.quantum_s"),
        ({"settings": {"milestones": [{"decrease": 2.0, "quantum_s": 1.0}]}}, "settings.milestones.0.decrease"),
        ({"arguments": ["a\0b"]}, "arguments.0 holds a NUL"),
        ({"flags": {"rate": "--ra\0te"}}, "flags.rate holds a NUL"),
        ({"environment": {"A=B": "c"}}, "environment holds something that is not an environment variable"),
        ({"environment": {"A": "\0"}}, "environment.A holds a NUL"),
        ({"space": []}, "space is empty"),
        (space_of(low=2.0), "The range of 'rate' is empty"),
        (space_of(low=0.0, log=True), "no logarithm"),
        (space_of(low=0.5, is_integer=True), "has whole numbers as bounds"),
        (space_of(low=0.0, high=1e18, is_integer=True), "too long"),
        ({**space_of(), "sampler": "grid"}, "no grid"),
        ({**space_of(low=0.0, high=1e8, is_integer=True), "sampler": "grid"}, "too long"),
        ({**space_of(choices=[1, 2]), "sampler": "grid", "trial_count": 3}, "fewer points than there are trials"),
        (space_of(choices=list(range(10_001))), "at most 10,000"),
        ({"environment": {f"V{n}": "x" * 4096 for n in range(70)}}, "put what exceeds 262144 into a file"),
    ],
)
def test_a_search_that_cannot_run_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInputError) as refused:
        read_request({**SEARCH, "spec": {**SEARCH["spec"], **changes}})
    assert said in str(refused.value)
    assert_one_sentence(refused.value)


def test_who_asks_for_a_search_that_no_service_takes_is_told() -> None:
    with pytest.raises(BadInputError, match="not a name for a job; use up to 200 letters"):
        search_request(search_spec(Path("/project"), name="a" * 201), "train.py", ())


@pytest.mark.slow
def test_a_job_that_cannot_run_is_refused() -> None:
    with pytest.raises(BadInputError, match=r"arguments\.0 holds a NUL"):
        read_request({**TRAINING, "arguments": ["\0"]})
    variables = [{"name": f"v{n}", "shape": [1], "dtype": "float32", "size_bytes": 4} for n in range(20_001)]
    assert read_request({**TRAINING, "profile": {**profile().to_json(), "variables": variables[1:]}})
    for changes, said in (
        ({"rules": "default,-luck"}, "'luck' is not a rule"),
        ({"plan_timeout_s": 3600.0}, "60 s is the maximum for a job that runs"),
        ({"measurements": [MEASURED["measurements"][0]] * 201}, "it can have at most 200"),
        ({"measurements": [{**MEASURED["measurements"][0], "samples_per_s": 1.0}]}, "either 'seconds' or"),
    ):
        with pytest.raises(BadInputError) as refused:
            read_request({**TRAINING, **changes})
        assert said in str(refused.value)
    with pytest.raises(BadInputError, match="more than 20000 variables"):
        read_request({**TRAINING, "profile": {**profile().to_json(), "variables": variables}})


@pytest.mark.parametrize("elastic", [5, True, {}, [], [1], ["a", "b"], "4:1", [0, 4]])
def test_bounds_that_are_none_are_refused_by_name(elastic: Any) -> None:
    with pytest.raises(BadInputError, match=r"^elastic: .*--elastic"):
        read_request({**ELASTIC, "elastic": elastic})


def test_a_service_takes_shorter_variables_than_a_command_line() -> None:
    with pytest.raises(BadInputError, match=r"environment\.A has 5,000 characters; it can have at most 4,096"):
        read_request({**TRAINING, "environment": {"A": "x" * 5000}})


@pytest.mark.parametrize("values", [TRAINING, ELASTIC, MEASURED, PLANNED, SEARCH])
def test_the_requests_that_are_broken_here_were_whole(values: Any) -> None:
    assert read_request(values).to_json()


@PATIENT
@given(
    st.lists(
        st.text(max_size=30) | st.from_regex(r"[a-z]{1,3}:(IN|IS|LIKE|UNLIKE):.{0,12}", fullmatch=True), max_size=3
    )
)
def test_constraints_are_read_or_refused(texts: list[str]) -> None:
    try:
        constraints = parse_constraints(texts)
    except BadInputError as error:
        assert_one_sentence(error)
        return
    constraints.admits({"rack": "r1", "a": "x" * 1000}, "agent-0")
