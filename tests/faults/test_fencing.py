"""Only the newest chief may write to a checkpoint folder. Each chief is a process, because fencing ends it."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from dike import checkpoints
from dike.process import EXIT_CODE_FENCED
from dike.profile import Api
from dike.roles import fencing
from dike.task import Role, TaskSpec

pytestmark = pytest.mark.integration


def chief(folder: Path, attempt: int, job: str = "job") -> TaskSpec:
    cluster = {"ps": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"]}
    return TaskSpec(job, Role.WORKER, 0, cluster, Api.GRAPH, {}, str(folder), attempt=attempt)


def exit_code(call: Callable[[TaskSpec], None], task: TaskSpec) -> int:
    """Of a process that does no more than this call."""
    child = os.fork()
    if child == 0:
        try:
            call(task)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        else:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_the_latest_attempt_keeps_the_folder(tmp_path: Path) -> None:
    first, second = chief(tmp_path, 0), chief(tmp_path, 1)
    assert exit_code(fencing.take_ownership, first) == 0
    assert exit_code(fencing.check, first) == 0
    assert exit_code(fencing.take_ownership, second) == 0
    assert exit_code(fencing.check, second) == 0
    assert exit_code(fencing.check, first) == EXIT_CODE_FENCED
    # One that was slow to start finds out before it touches anything.
    assert exit_code(fencing.take_ownership, first) == EXIT_CODE_FENCED
    assert checkpoints.checkpoint_owner(first) == ("job", 1)


def test_a_claim_that_was_written_over_by_an_earlier_attempt_is_made_again(tmp_path: Path) -> None:
    first, second = chief(tmp_path, 0), chief(tmp_path, 1)
    fencing.take_ownership(second)
    checkpoints.write_owner(first)
    assert exit_code(fencing.check, second) == 0
    assert exit_code(fencing.check, first) == EXIT_CODE_FENCED


def test_another_job_that_begins_in_the_folder_gets_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ours, other = chief(tmp_path, 5), chief(tmp_path, 0, "other")
    fencing.take_ownership(ours)
    fencing.take_ownership(other)
    assert exit_code(fencing.check, other) == 0
    assert exit_code(fencing.check, ours) == EXIT_CODE_FENCED
    assert f"has taken over the checkpoint folder '{tmp_path}'" in capfd.readouterr().err


def test_a_damaged_or_missing_claim_is_made_again(tmp_path: Path) -> None:
    task = chief(tmp_path, 3)
    damaged = [b"", b"[]", b'{"job": "job"}', b'{"job": "job", "attempt": "x"}', b'{"job": "job", "attempt": 1e400}']
    for content in (None, *damaged, b"\xff\xfe", b"[" * 100_000):
        claim = tmp_path / checkpoints.OWNER_FILE
        if content is None:
            assert not claim.exists()
        else:
            claim.write_bytes(content)
        assert checkpoints.checkpoint_owner(task) is None
        assert exit_code(fencing.check, task) == 0
        assert checkpoints.checkpoint_owner(task) == ("job", 3)
