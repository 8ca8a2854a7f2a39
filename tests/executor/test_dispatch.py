"""One executor, three kinds of slots: the order says which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dike.profile import Api
from dike.task import Role, TaskSpec
from executor.channel import TaskChannel
from executor.dispatch import Dispatcher, make_slot
from executor.elastic_slot import ElasticSlot
from executor.messages import LaunchOrder, Outcome, encode
from executor.slot import JobSlot
from executor.slot_order import SlotOrder
from executor.trial_messages import decode_slot_message
from executor.trial_slot import TrialSlot

TASK = TaskSpec("job", Role.WORKER, 0, {"ps": [], "worker": ["127.0.0.1:2"]}, Api.GRAPH, {}, "/checkpoints")
NOWHERE = "http://127.0.0.1:9/bundle"
JOB = LaunchOrder(TASK, NOWHERE, "train.py").encode()
ELASTIC = LaunchOrder(TASK, NOWHERE, "train.py", gpu_devices=(), elastic=True).encode()
SEARCH = SlotOrder("search", NOWHERE, "train.py", gpu_devices=()).encode()


class Edge:
    """Stands where Mesos' driver would."""

    def __init__(self) -> None:
        self.updates: list[dict[str, Any]] = []
        self.messages: list[str] = []

    def sendStatusUpdate(self, status: dict[str, Any]) -> None:  # noqa: N802
        self.updates.append(status)

    def sendFrameworkMessage(self, data: str) -> None:  # noqa: N802
        self.messages.append(data)

    def wait_for_acknowledgements(self, timeout_s: float) -> bool:
        return timeout_s > 0


def launched(tmp_path: Path, *orders: str) -> tuple[Dispatcher, Edge]:
    dispatcher, edge = Dispatcher(tmp_path), Edge()
    for number, order in enumerate(orders):
        dispatcher.launchTask(edge, {"task_id": {"value": f"task-{number}"}, "data": order})
    return dispatcher, edge


def test_the_order_says_which_slot(tmp_path: Path) -> None:
    channel = TaskChannel(Edge(), "task", tmp_path)
    assert isinstance(make_slot(channel, JOB), JobSlot)
    assert isinstance(make_slot(channel, ELASTIC), ElasticSlot)
    assert isinstance(make_slot(channel, SEARCH), TrialSlot)


@pytest.mark.parametrize("order", [encode({"kind": "slot"}), encode([]), encode({"x": 1}), "?"])
def test_an_order_of_another_version_fails_the_task_and_ends_the_executor(tmp_path: Path, order: str) -> None:
    dispatcher, edge = launched(tmp_path, order)
    dispatcher.main(edge)  # type: ignore[arg-type]
    (update,) = edge.updates
    assert update["state"] == "TASK_FAILED"
    assert "another version of Dike" in update["message"]


def test_a_slot_takes_one_task(tmp_path: Path) -> None:
    _, edge = launched(tmp_path, JOB, SEARCH)
    (update,) = edge.updates
    assert (update["task_id"]["value"], update["state"]) == ("task-1", "TASK_FAILED")


@pytest.mark.integration
@pytest.mark.parametrize("order", [JOB, ELASTIC, SEARCH])
def test_a_bundle_out_of_reach_fails_the_task(tmp_path: Path, order: str) -> None:
    dispatcher, edge = launched(tmp_path, order)
    dispatcher.main(edge)  # type: ignore[arg-type]
    assert [update["state"] for update in edge.updates] == ["TASK_STARTING", "TASK_FAILED"]
    assert "could not be fetched" in edge.updates[-1]["message"]
    assert all(update["task_id"]["value"] == "task-0" for update in edge.updates)
    if order is not SEARCH:
        assert Outcome.decode(edge.updates[-1]["data"]).exit_code is None


def test_nonsense_from_the_framework_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for order in (JOB, ELASTIC, SEARCH):
        dispatcher, edge = launched(tmp_path, order)
        dispatcher.frameworkMessage(edge, encode({"kind": "other"}))
        assert edge.updates == []
    assert caplog.text.count("message ignored") == 3
    with pytest.raises(ValueError, match="kind"):
        decode_slot_message(encode({"kind": "other"}))


def test_a_shutdown_before_the_task_ends_the_executor(tmp_path: Path) -> None:
    dispatcher, edge = launched(tmp_path)
    dispatcher.shutdown(edge)
    dispatcher.main(edge)  # type: ignore[arg-type]
    assert edge.updates == []
