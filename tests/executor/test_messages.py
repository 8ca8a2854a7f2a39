"""Orders, reports and outcomes survive their journey; anything else is refused."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dike import typed
from dike.profile import Api
from dike.task import Role, TaskSpec
from executor.environment import Setup
from executor.messages import (
    LaunchOrder,
    LogChunk,
    Outcome,
    Report,
    WantedOutput,
    decode_last_output,
    decode_message,
    encode,
)

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
    own = {"cpus": 1.5, "gpu_devices": devices, "stream_logs": True}
    order = LaunchOrder(TASK, "http://host/bundle/token", "train.py", ("--lr", "0.1"), {"A": "b"}, **own)
    assert LaunchOrder.decode(order.encode()) == order


def test_scripts_that_import_numpy_besides_share_a_zygote() -> None:
    setups = [Setup("dike.launch", preload, {}) for preload in (("tensorflow",), ("numpy", "tensorflow"))]
    assert len({setup.kind({}) for setup in setups}) == 1
    alone, torch = (Setup("dike.launch", preload, {}).kind({}) for preload in (("numpy",), ("numpy", "torch")))
    assert (alone.preload, torch.preload) == (("numpy",), ("numpy", "torch"))
    named = Setup("dike.launch", ("numpy", "sklearn.datasets"), {}).kind({})
    assert named.preload == ("sklearn.datasets",)


def test_scripts_that_import_tensorflow_or_keras_share_a_zygote() -> None:
    def preloads(environment: dict[str, str]) -> set[tuple[str, ...]]:
        asked = (("tensorflow",), ("keras",), ("keras", "tensorflow"), ("tensorflow", "keras"))
        return {Setup("dike.launch", ("scipy", *each, "h5py"), environment).kind({}).preload for each in asked}

    assert preloads({}) == {("scipy", "tensorflow", "keras", "h5py")}
    # With another backend Keras does not import TensorFlow, nor does TensorFlow a Keras that it does not use.
    for variable in ("KERAS_BACKEND", "TF_USE_LEGACY_KERAS"):
        assert len(preloads({variable: "1"})) == 4
    assert Setup("dike.launch", ("scipy", "keras.applications"), {}).kind({}).preload == ("scipy", "keras.applications")


def test_scripts_with_other_numbers_of_threads_share_a_zygote() -> None:
    asked = ({}, {"OMP_NUM_THREADS": "2"}, {"OPENBLAS_NUM_THREADS": "4"})
    assert len({Setup("dike.launch", ("numpy",), environment).kind({}) for environment in asked}) == 1


@given(st.binary(), st.integers(0, 2**62), st.sampled_from(["stdout", "stderr"]), st.integers(0, 3))
def test_a_log_chunk_survives(data: bytes, offset: int, stream: str, skipped: int) -> None:
    chunk = LogChunk("task", stream, offset, data, skipped)
    assert decode_message(chunk.encode()) == chunk


@pytest.mark.parametrize("offset", [-1, typed.MAX_INT - 2])
def test_a_log_chunk_that_ends_where_no_stream_does_is_a_value_error(offset: int) -> None:
    with pytest.raises(ValueError, match="malformed"):
        decode_message(LogChunk("task", "stdout", offset, b"end").encode())


def test_a_report_and_an_outcome_survive() -> None:
    report = Report("task", {"type": "progress", "step": 3, "loss": 0.5})
    assert decode_message(report.encode()) == report
    outcome = Outcome(-9, {"stdout": 3}, "tail", "/sandbox")
    assert Outcome.decode(outcome.encode()) == outcome
    last = [LogChunk("task", "stdout", 1, b"\xc3\n")]
    assert Outcome.decode(outcome.encode(last)) == outcome
    assert decode_last_output(outcome.encode(last)) == last
    assert decode_last_output(outcome.encode()) == []


def test_what_is_wanted_again_survives() -> None:
    wanted = WantedOutput({"stderr": 17})
    assert WantedOutput.decode(wanted.encode()) == wanted
    for other in ({"kind": "other"}, {"kind": "wanted_output", "offsets": 3}, []):
        with pytest.raises(ValueError, match=r"malformed|not a message"):
            WantedOutput.decode(encode(other))


@pytest.mark.parametrize("last", [3, [3], [{"task_id": "task", "stream": "other", "offset": 0, "data": ""}]])
def test_last_output_of_another_kind_is_a_value_error(last: object) -> None:
    with pytest.raises(ValueError, match="malformed"):
        decode_last_output(encode({"last_output": last}))


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
