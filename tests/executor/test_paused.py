"""Which processes of suspended runs are let go to make room."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from executor import paused
from executor.paused import PausedRuns

LIMIT = 1000
"""A slot's memory; 900 of it may be used."""


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> PausedRuns:
    monkeypatch.setattr(paused, "private_bytes", lambda process: process.held)
    machine(monkeypatch, available=1 << 40)
    return PausedRuns()


def machine(monkeypatch: pytest.MonkeyPatch, available: int) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available, total=10_000))


def add(runs: PausedRuns, trial: int, held: int, *, is_unsaved: bool = False, has_died: bool = False) -> None:
    run: Any = SimpleNamespace(
        key=(trial, 0),
        reports=SimpleNamespace(is_unsaved=is_unsaved),
        close=lambda: None,
        poll=lambda: None,
        has_died=has_died,
    )
    # No process has such an id; the fake one counts as running.
    process: Any = SimpleNamespace(pid=(1 << 30) + trial, held=held, kill=lambda: None, is_running=lambda: True)
    runs.add(run, [process])


def test_the_least_likely_is_evicted_first_and_the_one_to_resume_stays(runs: PausedRuns) -> None:
    for trial in range(3):
        add(runs, trial, 200)
    runs.resume_order = [(2, 0), (1, 0), (0, 0)]
    runs.make_room(LIMIT, used_bytes=100, needed_bytes=300, exempt=[(0, 0)])
    assert runs.keys == ((0, 0), (2, 0))
    runs.make_room(LIMIT, used_bytes=100, needed_bytes=5000, exempt=[(0, 0)])
    assert runs.keys == ((0, 0),)
    runs.make_room(LIMIT, used_bytes=100, needed_bytes=5000)
    assert runs.keys == ()


def test_room_counts_those_that_are_not_let_go(runs: PausedRuns) -> None:
    add(runs, 0, 200)
    add(runs, 1, 300)
    assert runs.has_room(LIMIT, used_bytes=100, needed_bytes=800)
    assert not runs.has_room(LIMIT, used_bytes=100, needed_bytes=801)
    assert runs.has_room(LIMIT, used_bytes=100, needed_bytes=500, exempt=[(1, 0)])
    assert not runs.has_room(LIMIT, used_bytes=100, needed_bytes=501, exempt=[(1, 0)])
    add(runs, 2, 100, is_unsaved=True)
    assert not runs.has_room(LIMIT, used_bytes=100, needed_bytes=401, exempt=[(1, 0)])


def test_all_that_have_died_leave_at_once(runs: PausedRuns) -> None:
    for trial in range(3):
        add(runs, trial, 100, has_died=trial > 0)
    runs.poll()
    assert runs.keys == ((0, 0),)


def test_the_machine_keeps_a_twentieth_free(runs: PausedRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    for trial in range(3):
        add(runs, trial, 100)
    machine(monkeypatch, available=600)
    assert runs.has_room(1 << 40, used_bytes=0, needed_bytes=399)
    assert not runs.has_room(1 << 40, used_bytes=0, needed_bytes=400)
    runs.make_room(1 << 40, used_bytes=0, needed_bytes=250)
    # The run that was paused last has no rank, so it is evicted first.
    assert runs.keys == ((0, 0),)
