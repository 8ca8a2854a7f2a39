"""Output that gets lost on its way is sent again; nothing is shown twice."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from dike.profile import Api
from executor import streams as executor_streams
from executor.channel import TaskChannel
from executor.messages import LogChunk, WantedOutput, decode_message
from executor.streams import OutputSender
from framework.mesos import events
from framework.training import output
from framework.training.output import GAP_REPORT_INTERVAL_S, GAP_TIMEOUT_S, MAX_RESEND_INTERVAL_S, RESEND_INTERVAL_S
from tests.training.job_stage import JobStage, ended, profile, spec
from tests.waiting import wait_until

SPEC = spec(profile=profile(Api.KERAS))


class OutputStage(JobStage):
    """A job whose chief's output is watched."""

    def __init__(self) -> None:
        super().__init__(SPEC)
        self.chief = self.start()["chief:0"]

    def writes(self, offset: int, data: bytes, stream: str = "stdout", skipped: int = 0) -> None:
        self.say(self.chief, LogChunk(self.chief.task_id, stream, offset, data, skipped))

    def wanted(self) -> list[WantedOutput]:
        """What was asked for since the last time."""
        assert {to for to, _ in self.mesos.messages} <= {self.chief.task_id}
        found = [WantedOutput.decode(data) for _, data in self.mesos.messages]
        self.mesos.messages.clear()
        return found

    def subscribe_again(self) -> None:
        self.scheduler.handle(events.Disconnected())
        self.subscribe()


@pytest.fixture
def stage() -> OutputStage:
    return OutputStage()


def test_what_was_lost_is_asked_for_and_comes_in_its_order(stage: OutputStage) -> None:
    stage.writes(0, b"one ")
    stage.writes(8, b"three ")
    stage.writes(14, b"four ")
    assert stage.wanted() == [WantedOutput({"stdout": 4})]
    assert stage.observer.output == b"one "
    stage.writes(4, b"two three ")
    stage.writes(14, b"four five")
    assert stage.observer.output == b"one two three four five"
    stage.wait(10 * RESEND_INTERVAL_S)
    assert (stage.wanted(), stage.observer.notes) == ([], [])


def test_nothing_comes_twice(stage: OutputStage) -> None:
    for offset, data in ((0, b"one two "), (0, b"one "), (4, b"two three"), (4, b"two "), (0, b"one two three four")):
        stage.writes(offset, data)
    assert stage.observer.output == b"one two three four"
    assert (stage.wanted(), stage.observer.notes) == ([], [])


def test_a_new_connection_asks_everybody_who_sends_output(stage: OutputStage) -> None:
    stage.writes(0, b"one ")
    stage.writes(0, b"oh", stream="stderr")
    stage.subscribe_again()
    assert stage.wanted() == [WantedOutput({"stdout": 4, "stderr": 2})]
    # There is no more of the one; the other's executor has not heard, and is asked again, less and less often.
    stage.writes(4, b"")
    for _ in range(100):
        stage.wait(RESEND_INTERVAL_S)
    assert 4 <= len(stage.wanted()) <= 10
    stage.wait(MAX_RESEND_INTERVAL_S)
    assert stage.wanted() == [WantedOutput({"stderr": 2})]
    stage.writes(2, b"", stream="stderr")
    stage.wait(MAX_RESEND_INTERVAL_S)
    assert stage.wanted() == []


def test_an_agent_that_is_back_is_asked_at_once(stage: OutputStage) -> None:
    stage.writes(0, b"one ")
    stage.subscribe_again()
    for _ in range(100):
        stage.wait(RESEND_INTERVAL_S)
    stage.wanted()
    stage.writes(8, b"three ")
    assert stage.wanted() == [WantedOutput({"stdout": 4})]


def test_an_executor_that_never_answers_is_listened_to_all_the_same(stage: OutputStage) -> None:
    stage.writes(0, b"one ")
    stage.writes(8, b"three ")
    stage.wait(GAP_TIMEOUT_S - 1)
    stage.writes(14, b"four ")
    assert stage.observer.output == b"one "
    stage.wait(1)
    assert stage.observer.output == b"one three four "
    stage.writes(19, b"five")
    assert stage.observer.output == b"one three four five"
    expected = "4 bytes that chief:0 wrote to stdout are missing here; they are in its sandbox on agent-0"
    assert stage.observer.notes == [expected]


def test_of_what_comes_ahead_the_newest_is_kept(stage: OutputStage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "MAX_AHEAD_BYTES", 10)
    for offset, data in ((4, b"two "), (8, b"three "), (14, b"four ")):
        stage.writes(offset, data)
    stage.update(stage.chief, "TASK_LOST")
    assert stage.observer.output == b"four "
    assert [note[:8] for note in stage.observer.notes if "are missing here" in note] == ["14 bytes"]


def test_what_came_ahead_precedes_the_end_of_the_output(stage: OutputStage) -> None:
    stage.writes(4, b"two three ")
    last = LogChunk(stage.chief.task_id, "stdout", 8, b"three four")
    stage.update(stage.chief, "TASK_FINISHED", data=ended(0, {"stdout": 18}).encode([last]))
    assert stage.observer.output == b"two three four"


def test_gaps_in_output_that_comes_too_fast_are_told_together(stage: OutputStage) -> None:
    for number in range(1, 50):
        stage.writes(10 * number, b"x", skipped=10)
    assert [note[:9] for note in stage.observer.notes] == ["10 bytes "]
    stage.wait(GAP_REPORT_INTERVAL_S)
    assert [note[:9] for note in stage.observer.notes] == ["10 bytes ", "432 bytes"]
    stage.writes(1_000, b"x", skipped=509)
    stage.update(stage.chief, "TASK_FINISHED")
    assert [note[:9] for note in stage.observer.notes if "are missing here" in note][2:] == ["509 bytes"]


def test_what_the_executor_does_not_have_any_more_is_told(stage: OutputStage) -> None:
    stage.writes(0, b"one ")
    stage.subscribe_again()
    stage.writes(1_000, b"late", skipped=996)
    assert stage.observer.output == b"one late"
    assert [note for note in stage.observer.notes if note.startswith("996 bytes")]
    stage.writes(2_000, b"lost", skipped=900)
    assert stage.observer.output == b"one late", "only 900 of the 996 that are missing are given up"


@pytest.mark.parametrize(("last", "whole"), [((4, b"two"), b"one two"), ((0, b"one two"), b"one two")])
def test_the_end_of_the_output_comes_with_the_end_of_the_task(
    stage: OutputStage, last: tuple[int, bytes], whole: bytes
) -> None:
    stage.writes(0, b"one ")
    chunk = LogChunk(stage.chief.task_id, "stdout", *last)
    stage.update(stage.chief, "TASK_FINISHED", data=ended(0, {"stdout": 7}).encode([chunk]))
    assert stage.observer.output == whole
    stage.end_killed()
    assert stage.job.done, "nothing more was to be waited for"
    assert stage.observer.notes == []


def test_a_task_that_has_ended_is_not_asked(stage: OutputStage) -> None:
    stage.subscribe_again()
    stage.wanted()
    stage.update(stage.chief, "TASK_FINISHED", ended(0, {"stdout": 7}))
    stage.end_killed()
    stage.subscribe_again()
    assert stage.job.done
    assert stage.wanted() == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_whatever_is_lost_the_output_is_whole(
    stage: OutputStage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """A real sender, and a Mesos that loses a quarter of the messages in both directions."""
    monkeypatch.setattr(executor_streams, "CHUNK_BYTES", 70)
    chance = random.Random(seed)
    arrived: list[LogChunk] = []

    class FakeDriver:
        def sendFrameworkMessage(self, data: str) -> None:  # noqa: N802
            if chance.random() < 0.75:
                chunk = decode_message(data)
                assert isinstance(chunk, LogChunk)
                arrived.append(chunk)

        def sendStatusUpdate(self, status: object) -> None:  # noqa: N802
            pytest.fail("no update is for it to send")

    sender = OutputSender(TaskChannel(FakeDriver(), stage.chief.task_id, tmp_path), enabled=True)
    lines = [f"line {number}\n".encode() for number in range(200)]

    def exchange() -> None:
        sender.drain()
        while arrived:
            stage.say(stage.chief, arrived.pop(0))
        for wanted in stage.wanted():
            if chance.random() < 0.75:
                sender.resend(wanted)

    for line in lines:
        sender.add("stdout", line)
        exchange()

    def is_whole() -> bool:
        # The loss of the last message is noticed only by asking.
        stage.subscribe_again()
        exchange()
        stage.wait(RESEND_INTERVAL_S)
        return stage.observer.output == b"".join(lines)

    wait_until(is_whole, "all of the output", said=lambda: stage.observer.output[-200:])
    assert not [note for note in stage.observer.notes if "are missing here" in note]
