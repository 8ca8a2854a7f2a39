"""What tests wait with: it fails with all that is known, and not before it is sure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.waiting import is_alive, wait_until, whole_lines


def test_the_answer_is_returned_after_as_many_looks_as_it_takes() -> None:
    answers = iter([0, "", None, [], "found"])
    pauses: list[float] = []
    assert wait_until(lambda: next(answers), "an answer", pause=pauses.append) == "found"
    assert len(pauses) == 4
    assert pauses == sorted(pauses)


def test_a_wait_in_vain_says_for_what_and_what_was_said() -> None:
    with pytest.raises(AssertionError, match=r"^waited in vain for a sign: not in 0\.01 s\nthe log$"):
        wait_until(lambda: False, "a sign", said=lambda: "the log", deadline_s=0.01)


def test_what_is_lost_is_not_waited_for() -> None:
    with pytest.raises(AssertionError, match=r"^waited in vain for a sign: it cannot come true any more$"):
        wait_until(lambda: False, "a sign", lost=lambda: True)


def test_what_came_true_just_before_the_end_counts() -> None:
    done: list[bool] = []

    def has_ended() -> bool:
        done.append(True)
        return True

    assert wait_until(lambda: done, "a sign", lost=has_ended) == [True]


@pytest.mark.integration
def test_a_zombie_is_not_alive() -> None:
    assert is_alive(os.getpid())
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        wait_until(lambda: not is_alive(child.pid), "its end")
        assert psutil.pid_exists(child.pid)
    assert not is_alive(child.pid)


def test_half_a_line_of_a_killed_process_is_left_out(tmp_path: Path) -> None:
    diary = tmp_path / "diary.txt"
    assert whole_lines(diary) == []
    lines = ["\n0.1 7 1 0x1.8p-1 .\n", "\n0.1 8 2 0x1.4p-12 .\n"]
    for length in range(len(lines[0])):
        diary.write_text(lines[0][:length] + "".join(lines))
        expected = [["0.1", "7", "1", "0x1.8p-1"], ["0.1", "8", "2", "0x1.4p-12"]]
        # Only its line break is missing: that one is whole.
        assert whole_lines(diary) == expected[:1] * (length == len(lines[0]) - 1) + expected
