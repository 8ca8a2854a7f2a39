"""Which agents a job may use."""

from __future__ import annotations

import re
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dike.exceptions import BadInputError, InfeasibleError
from framework.scheduler.agents import AgentDirectory
from framework.scheduler.constraints import MAX_MATCHED_LENGTH, Operator, parse_constraints
from framework.service.requests import TrainingRequest, read_request
from framework.service.serve import agents_for
from tests.properties import examples
from tests.training.job_stage import profile


@pytest.mark.parametrize(
    ("text", "attributes", "admitted"),
    [
        ("rack:IS:r1", {"rack": "r1"}, True),
        ("rack:IS:r1", {"rack": "r2"}, False),
        ("rack:IS:r1", {}, False),
        ("rack:IS_NOT:r1", {"rack": "r1"}, False),
        ("rack:IS_NOT:r1", {}, True),
        ("rack:IN:r1, r2", {"rack": "r2"}, True),
        ("rack:in:r1,r2", {"rack": "r"}, False),
        ("rack:NOT_IN:r1,r2", {"rack": "r3"}, True),
        ("rack:not-in:r1,r2", {"rack": "r1"}, False),
        ("gpu_model:LIKE:K[0-9]+", {"gpu_model": "K80"}, True),
        ("gpu_model:LIKE:K[0-9]", {"gpu_model": "K80"}, False),
        ("gpu_model:UNLIKE:K.*", {"gpu_model": "K80"}, False),
        ("gpu_model:UNLIKE:K.*", {}, True),
        ("hostname:LIKE:gpu-.*", {}, True),
        ("hostname:IS:other", {"hostname": "other"}, False),
        ("zone:IS:a:b", {"zone": "a:b"}, True),
    ],
)
def test_an_agent_is_admitted_or_not(text: str, attributes: dict[str, str], admitted: bool) -> None:
    assert parse_constraints([text]).admits(attributes, "gpu-7") is admitted


def test_all_constraints_have_to_hold_and_those_that_do_not_are_named() -> None:
    constraints = parse_constraints(["rack:IS:r1", "hostname:LIKE:gpu-.*", "zone:IS_NOT:z"])
    assert constraints.admits({"rack": "r1"}, "gpu-1")
    unmet = constraints.unmet({"rack": "r2", "zone": "z"}, "gpu-1")
    assert [str(one) for one in unmet] == ["rack:IS:r1", "zone:IS_NOT:z"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rack", "FIELD:OPERATOR:VALUE"),
        ("rack:IN:", "FIELD:OPERATOR:VALUE"),
        (":IN:r1", "FIELD:OPERATOR:VALUE"),
        ("rack:INN:r1", r"did you mean IN\?.*IS, IS_NOT"),
        ("rack:IN:,,", "lists no value"),
        ("rack:LIKE:[", "not a regular expression"),
        ("rack:LIKE:" + "x" * 201, "longer than 200"),
        ("rack:LIKE:(a+)+", "repeats a group"),
        (r"rack:LIKE:(a)\1", "repeats a group"),
        ("rack:LIKE:(?=a)b", "repeats a group"),
        ("rack:LIKE:a*b*c*d*", "more than 3 repetitions"),
        ("rack:LIKE:" + "(aa|aa)" * 22, "too many"),
    ],
)
def test_a_malformed_constraint_is_refused_in_one_sentence(text: str, message: str) -> None:
    with pytest.raises(BadInputError, match=message) as refused:
        parse_constraints([text])
    assert "\n" not in str(refused.value)


def test_a_request_with_a_malformed_constraint_is_refused() -> None:
    values = TrainingRequest(script="train.py", profile=profile().to_json()).to_json()
    assert read_request({**values, "constraints": ["rack:IS:r1"]}).constraints == ("rack:IS:r1",)
    with pytest.raises(BadInputError, match="rack:IZ:r1"):
        read_request({**values, "constraints": ["rack:IZ:r1"]})


@pytest.mark.filterwarnings("ignore:Possible nested set:FutureWarning")
@given(pattern=st.text(alphabet="ab.*+?|()[]{}1,\\^$", max_size=24), length=st.integers(0, 300))
@examples(150)
def test_whatever_pattern_is_admitted_is_compared_soon(pattern: str, length: int) -> None:
    try:
        constraints = parse_constraints([f"name:LIKE:{pattern}"])
    except BadInputError:
        return
    began = time.process_time()
    text = "a" * length + "!"
    admitted = constraints.admits({"name": text}, "host")
    assert time.process_time() - began < 20.0
    assert admitted == (re.fullmatch(pattern.strip(), text[:MAX_MATCHED_LENGTH]) is not None)


@given(value=st.text(alphabet="abc-", min_size=1, max_size=6), actual=st.text(alphabet="abc-", max_size=6))
def test_an_operator_and_its_opposite_never_agree(value: str, actual: str) -> None:
    for operator, opposite in ((Operator.IS, Operator.IS_NOT), (Operator.IN, Operator.NOT_IN)):
        one, other = (
            parse_constraints([f"f:{name}:{value}"]).admits({"f": actual}, "h") for name in (operator, opposite)
        )
        assert one is not other


def test_no_agent_at_all_and_none_that_is_admitted_are_told_apart() -> None:
    slave = {"id": "S0", "hostname": "agent-0", "active": True, "resources": {"cpus": 4}, "attributes": {"rack": "r1"}}
    slaves = [slave]
    here = threading.current_thread()
    # Requests from the background are not answered: an answer may be late and describe earlier agents.
    directory = AgentDirectory(lambda path: {"slaves": slaves} if threading.current_thread() is here else None)
    directory.refresh()
    assert len(agents_for(directory, ["rack:IS:r1"])() or ()) == 1
    with pytest.raises(InfeasibleError, match="No agent meets --constraint rack:IS:r7"):
        agents_for(directory, ["rack:IS:r7"])()
    slaves.clear()
    directory.refresh()
    assert agents_for(directory, ["rack:IS:r7"])() == []
    directory.close()
