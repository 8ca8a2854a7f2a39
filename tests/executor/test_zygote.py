"""A zygote that does not do its part is ended, replaced, and given up at last."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from executor import zygote
from executor.zygote import ForkRequest, Zygote
from tests.executor.polled_zygote import poll_until

pytestmark = pytest.mark.integration

DEAF = (
    "import socket, sys, time; s = socket.socket(fileno=int(sys.argv[1])); s.send(b'{\"ready\": true}'); time.sleep(60)"
)
SLOW = "import time; time.sleep(60)"


@pytest.fixture
def opened() -> Iterator[list[Zygote]]:
    zygotes: list[Zygote] = []
    yield zygotes
    for each in zygotes:
        each.close()


def started(opened: list[Zygote], tmp_path: Path, program: str) -> Zygote:
    opened.append(Zygote((), dict(os.environ), tmp_path / "zygote.out", (sys.executable, "-c", program)))
    return opened[-1]


def test_one_that_never_becomes_ready_is_given_up(
    opened: list[Zygote], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zygote, "READY_TIMEOUT_S", 0.05)
    slow = started(opened, tmp_path, SLOW)
    first = slow.pid
    poll_until(slow, lambda: slow.failure, "its failure")
    assert slow.failure == "the zygote ended by signal 9 (SIGKILL), 3 times in a row"
    assert (slow.pid, slow.watched_fds, slow.ready) == (None, (), False)
    assert first is not None
    assert not psutil.pid_exists(first)


def test_one_that_does_not_answer_a_request_is_replaced(
    opened: list[Zygote], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zygote, "FORK_TIMEOUT_S", 0.05)
    deaf = started(opened, tmp_path, DEAF)
    poll_until(deaf, lambda: deaf.ready, "a zygote")
    first = deaf.pid
    deaf.request_fork(ForkRequest(tmp_path / "script.py", (), tmp_path, {}), (0, 1, 2, 2))
    poll_until(deaf, lambda: deaf.pid != first, "another zygote")
    assert (deaf.is_forking, deaf.take_answer()) == (False, None)
    poll_until(deaf, lambda: deaf.ready, "a zygote")


def test_a_request_that_cannot_be_sent_is_answered(opened: list[Zygote], tmp_path: Path) -> None:
    deaf = started(opened, tmp_path, DEAF)
    poll_until(deaf, lambda: deaf.ready, "a zygote")
    deaf.request_fork(ForkRequest(tmp_path / "script.py", ("x" * zygote.MESSAGE_BYTES,), tmp_path, {}), (0, 1, 2, 2))
    assert not deaf.is_forking
    assert f"more than {zygote.MESSAGE_BYTES}" in str(deaf.take_answer())
    assert deaf.take_answer() is None


def test_a_program_that_does_not_exist_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Zygote((), {}, tmp_path / "zygote.out", (str(tmp_path / "nothing"),))


def test_closing_ends_it(opened: list[Zygote], tmp_path: Path) -> None:
    deaf = started(opened, tmp_path, DEAF)
    process = psutil.Process(deaf.pid)
    deaf.close()
    assert not process.is_running()
    assert not deaf.ready
