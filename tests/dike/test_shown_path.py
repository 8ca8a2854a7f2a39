"""Paths in messages of a process that works in a copy of its run's folder."""

from __future__ import annotations

import pytest

from dike.checkpoints import SHOWN_FOLDER_VARIABLE, shown


def test_paths_in_the_copy_are_shown_as_those_of_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHOWN_FOLDER_VARIABLE, "/sandbox/mirrors/1:/head/dike-runs/job")
    assert shown("/sandbox/mirrors/1/run-0-step-3") == "/head/dike-runs/job/run-0-step-3"
    assert shown("/sandbox/mirrors/1") == "/head/dike-runs/job"
    assert shown("/sandbox/mirrors/12/run-0-step-3") == "/sandbox/mirrors/12/run-0-step-3"


def test_without_a_copy_paths_are_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SHOWN_FOLDER_VARIABLE, raising=False)
    assert shown("/head/dike-runs/job/run-0-step-3") == "/head/dike-runs/job/run-0-step-3"
