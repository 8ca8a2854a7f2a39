"""Output is sent as it comes, and again from wherever it is wanted."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from executor import streams
from executor.channel import TaskChannel
from executor.messages import LogChunk, WantedOutput, decode_message
from executor.streams import OutputSender, OutputSpool
from tests.waiting import wait_until

ALPHABET = b"abcdefghijklmnopqrstuvwxyz"


class FakeDriver:
    """Stands where Mesos' driver would; an agent may be away."""

    def __init__(self) -> None:
        self.is_unreachable = False
        self.chunks: list[LogChunk] = []

    def sendFrameworkMessage(self, data: str) -> None:  # noqa: N802
        if self.is_unreachable:
            raise OSError(errno.ECONNREFUSED, "nobody listens")
        chunk = decode_message(data)
        assert isinstance(chunk, LogChunk)
        self.chunks.append(chunk)

    def sendStatusUpdate(self, status: object) -> None:  # noqa: N802
        pytest.fail("no update is for it to send")

    @property
    def stdout(self) -> bytes:
        """What came, put together; each piece begins where the one before ended."""
        data = b""
        for chunk in self.chunks:
            assert (chunk.stream, chunk.offset) == ("stdout", len(data))
            data += chunk.data
        return data


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def sender(driver: FakeDriver, tmp_path: Path) -> OutputSender:
    return OutputSender(TaskChannel(driver, "task", tmp_path), enabled=True)


@pytest.fixture(autouse=True)
def patient_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends when all is sent, however slow the machine is."""
    monkeypatch.setattr(streams, "DRAIN_TIMEOUT_S", 120.0)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of eleven bytes, and memory for five."""
    monkeypatch.setattr(streams, "SPOOL_FILE_BYTES", 11)
    monkeypatch.setattr(streams, "SPOOL_MEMORY_BYTES", 5)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("step", [1, 3, 4, 11])
def test_a_spool_goes_round_and_keeps_the_newest(tmp_path: Path, step: int) -> None:
    kept = OutputSpool(tmp_path)
    for first in range(0, len(ALPHABET), step):
        kept.append(ALPHABET[first : first + step])
        end = min(first + step, len(ALPHABET))
        assert kept.end == end
        assert kept.last == ALPHABET[max(0, end - 5) : end]
        for offset in range(end + 1):
            begin = max(offset, end - 11)
            for limit in (1, 4, 100):
                assert kept.read(offset, limit) == (begin, ALPHABET[begin : min(begin + limit, end)])
            half = offset if offset >= end - 11 else end - 5
            assert kept.read(offset, 100, catch_up=True) == (half, ALPHABET[half:end])
    assert list(tmp_path.iterdir()) == [], "the user's files are none of ours"


@pytest.mark.usefixtures("small")
def test_without_room_on_the_disk_the_end_is_still_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere, full = OutputSpool(tmp_path / "missing"), OutputSpool(tmp_path)
    full.append(ALPHABET[:4])
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, place: len(data) - 1)
    for kept in (nowhere, full):
        kept.append(ALPHABET[kept.end : 8])
        assert kept.read(0, 100) == (3, b"defgh")
        assert kept.read(6, 1) == (6, b"g")
        assert kept.read(0, 100, catch_up=True) == (6, b"gh")


def test_output_goes_out_as_it_comes_and_again_when_it_is_wanted(driver: FakeDriver, sender: OutputSender) -> None:
    sender.add("stdout", b"one ")
    sender.drain()
    sender.add("stdout", b"two ")
    sender.drain()
    assert driver.stdout == b"one two "
    driver.chunks.clear()
    sender.resend(WantedOutput({"stdout": 2}))
    sender.add("stdout", b"three")
    sender.drain()
    assert driver.chunks[0].offset == 2
    assert b"".join(chunk.data for chunk in driver.chunks) == b"e two three"
    assert {chunk.skipped for chunk in driver.chunks} == {0}


def test_whoever_asks_is_answered_though_nothing_is_missing(driver: FakeDriver, sender: OutputSender) -> None:
    for name, data in (("stdout", b"all"), ("stderr", b"")):
        sender.add("stdout", data)
        sender.drain()
        driver.chunks.clear()
        sender.resend(WantedOutput({name: 10_000}))
        sender.drain()
        assert driver.chunks == [LogChunk("task", name, len(data), b"")]


@pytest.mark.usefixtures("small")
def test_what_cannot_be_sent_again_is_skipped_and_that_is_said(driver: FakeDriver, tmp_path: Path) -> None:
    sender = OutputSender(TaskChannel(driver, "task", tmp_path), enabled=True)
    for first in range(0, len(ALPHABET), 10):
        sender.add("stdout", ALPHABET[first : first + 10])
        sender.drain()
    driver.chunks.clear()
    sender.resend(WantedOutput({"stdout": 3}))
    sender.drain()
    assert driver.chunks[0] == LogChunk("task", "stdout", 15, ALPHABET[15:], skipped=12)
    assert sender.last_output == [LogChunk("task", "stdout", 21, ALPHABET[21:])]


@pytest.mark.usefixtures("small")
def test_a_task_that_writes_faster_than_it_is_listened_to_leaves_out_much_at_once(
    driver: FakeDriver, tmp_path: Path
) -> None:
    taken = threading.Semaphore(0)

    class FakeSlowDriver(FakeDriver):
        def sendFrameworkMessage(self, data: str) -> None:  # noqa: N802
            driver.sendFrameworkMessage(data)
            assert taken.acquire(timeout=60)

    sender = OutputSender(TaskChannel(FakeSlowDriver(), "task", tmp_path), enabled=True)
    sender.add("stdout", ALPHABET[:1])
    wait_until(lambda: len(driver.chunks) == 1, "the first piece")
    for first in range(1, len(ALPHABET), 5):
        sender.add("stdout", ALPHABET[first : first + 5])
    taken.release(2)
    sender.drain()
    assert driver.chunks[1:] == [LogChunk("task", "stdout", 21, ALPHABET[21:], skipped=20)]


def test_an_agent_that_is_away_gets_it_all_when_it_is_back(
    driver: FakeDriver, sender: OutputSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "RETRY_DELAY_S", 0.01)
    monkeypatch.setattr(streams, "DRAIN_TIMEOUT_S", 0.05)
    sender.add("stdout", b"one ")
    sender.drain()
    driver.is_unreachable = True
    sender.add("stdout", b"two ")
    sender.drain()
    sender.add("stdout", b"three")
    driver.is_unreachable = False
    wait_until(lambda: driver.stdout == b"one two three", "all of the output")


def test_a_task_that_sends_no_output_keeps_none(driver: FakeDriver, tmp_path: Path) -> None:
    sender = OutputSender(TaskChannel(driver, "task", tmp_path), enabled=False)
    sender.add("stdout", b"for the sandbox only")
    sender.resend(WantedOutput({"stdout": 0}))
    sender.drain()
    assert (driver.chunks, sender.last_output) == ([], [])
