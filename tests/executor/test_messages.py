"""Orders, reports and outcomes survive their journey; anything else is refused."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dike.profile import Api
from dike.task import Role, TaskSpec
from executor.messages import LaunchOrder, LogChunk, Outcome, Report, decode_message

TASK = TaskSpec(
    job_id="job",
    role=Role.WORKER,
    index=1,
    cluster={"ps": ["127.0.0.1:1"], "worker": ["127.0.0.1:2", "127.0.0.1:3"]},
    api=Api.GRAPH,
    variables={"w": 0},
    checkpoint_dir="/checkpoints",
)


@pytest.mark.parametrize("devices", [None, (), (0, 2)])
def test_an_order_survives(devices: tuple[int, ...] | None) -> None:
    order = LaunchOrder(TASK, "http://host/bundle/token", "train.py", ("--lr", "0.1"), {"A": "b"}, 1.5, devices, True)
    assert LaunchOrder.decode(order.encode()) == order


@given(st.binary(), st.integers(0, 2**63 - 1), st.sampled_from(["stdout", "stderr"]))
def test_a_log_chunk_survives(data: bytes, offset: int, stream: str) -> None:
    chunk = LogChunk("task", stream, offset, data)
    assert decode_message(chunk.encode()) == chunk


def test_a_report_and_an_outcome_survive() -> None:
    report = Report("task", {"type": "progress", "step": 3, "loss": 0.5})
    assert decode_message(report.encode()) == report
    outcome = Outcome(-9, {"stdout": 3}, "tail", "/sandbox")
    assert Outcome.decode(outcome.encode()) == outcome


@given(st.binary())
def test_garbage_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (any text will do)
        decode_message(base64.b64encode(data).decode())


@pytest.mark.parametrize(
    "text",
    [
        '{"type": "log"}',
        '{"type": "report", "x": 1}',
        '{"type": "other"}',
        '{"type": "report", "task_id": "t", "content": 3}',
        "[]",
        "3",
    ],
)
def test_json_of_another_kind_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="message"):
        decode_message(base64.b64encode(text.encode()).decode())
