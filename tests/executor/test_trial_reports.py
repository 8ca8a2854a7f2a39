"""What report lines add up to, whatever pieces they come in."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dike.trial.spec import TrialSpec, step_of_checkpoint
from executor import trial_reports
from executor.process import describe_exit
from executor.trial_reports import KeptReports, RunReports

TRIAL = TrialSpec("search", 3, 1, {"lr": 0.1}, "/checkpoints/3/", resume_from="/checkpoints/3/run-0-step-20")


def test_what_is_said_of_a_trial_is_read() -> None:
    other = dataclasses.replace(TRIAL, mode="max", every_value=True)
    assert [TrialSpec.loads(each.dumps()) for each in (TRIAL, other)] == [TRIAL, other]
    with pytest.raises(TypeError):
        TrialSpec.loads("[]")


def lines(*contents: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(content).encode() + b"\n" for content in contents)


def reports(*contents: dict[str, Any]) -> RunReports:
    read = RunReports(TRIAL)
    read.feed(lines(*contents))
    return read


PROGRESS = [{"type": "progress", "step": step, "loss": "nan", "metrics": {"a": step}} for step in range(21, 60)]


@given(st.integers(1, 200))
def test_lines_may_come_in_pieces(size: int) -> None:
    read = RunReports(TRIAL)
    data = lines(*PROGRESS)
    for start in range(0, len(data), size):
        read.feed(data[start : start + size])
    assert read.losses.take(len(PROGRESS)) == (0, tuple(PROGRESS))
    assert not read.losses.has_unsent
    assert (read.step, read.last) == (59, PROGRESS[-1])


def test_the_newest_checkpoint_is_the_one_the_trial_came_with_until_it_writes_its_own() -> None:
    read = reports(*PROGRESS[:2])
    assert (read.checkpoint, read.checkpoint_step) == (TRIAL.resume_from, 20)
    read.feed(lines({"type": "checkpoint", "path": "/checkpoints/3/run-1-step-22", "step": 22, "train_s": 1.0}))
    assert (read.checkpoint, read.checkpoint_step) == ("/checkpoints/3/run-1-step-22", 22)


@pytest.mark.parametrize("step", [0, 7, 10**9])
def test_the_step_of_a_checkpoint_is_in_its_name(step: int) -> None:
    assert step_of_checkpoint(TRIAL.checkpoint_path(step)) == step


@pytest.mark.parametrize("path", ["/checkpoints/3", "run-1-step-x", ""])
def test_other_names_hold_no_step(path: str) -> None:
    assert step_of_checkpoint(path) == 0


def test_a_run_may_become_preemptible_and_cease_to_be() -> None:
    read = reports({"type": "training", "preemptible": False})
    assert (read.training, read.preemptible, read.was_preemptible) == (True, False, False)
    read.feed(lines({"type": "training", "preemptible": True}, {"type": "training", "preemptible": False}))
    assert (read.preemptible, read.was_preemptible) == (False, True)


def test_a_batch_size_is_remembered() -> None:
    read = reports({"type": "training", "preemptible": False})
    assert read.batch_size is None
    read.feed(
        lines({"type": "training", "preemptible": True, "batch_size": 32}, {"type": "training", "preemptible": 0})
    )
    assert read.batch_size == 32


def test_a_result_stands_in_for_value_and_metrics() -> None:
    read = reports(PROGRESS[0], {"type": "result", "value": 0.5, "values": {"b": 2}})
    assert read.last == {**PROGRESS[0], "value": 0.5, "metrics": {"a": 21, "b": 2}}


SUSPENDED = {"type": "suspended", "path": "/checkpoints/3/run-1-step-30", "step": 30}
REFUSAL = {"type": "bad_input", "message": "no flag --lr"}
FAILURE = {"type": "failed", "message": "ValueError: no"}


@pytest.mark.parametrize(
    ("content", "exit_code", "stopped", "outcome"),
    [
        (SUSPENDED, 75, "", ("suspended", "")),
        (SUSPENDED, 75, "too slow", ("suspended", "")),
        (SUSPENDED, -9, "too slow", ("killed", "too slow")),
        (FAILURE, 75, "", ("failed", "ValueError: no")),
        (REFUSAL, 2, "", ("bad_input", "no flag --lr")),
        (REFUSAL, 1, "", ("failed", "exited with status 1")),
        (FAILURE, 2, "", ("failed", "ValueError: no")),
        (FAILURE, 0, "too slow", ("finished", "")),
        (FAILURE, -15, "its slot was killed", ("killed", "its slot was killed")),
        ({"type": "started"}, -11, "", ("failed", "ended by signal 11 (SIGSEGV)")),
    ],
)
def test_an_outcome_needs_both_the_exit_code_and_the_last_words(
    content: dict[str, Any], exit_code: int, stopped: str, outcome: tuple[str, str]
) -> None:
    assert reports(content).outcome(exit_code, describe_exit(exit_code), stopped) == outcome


@pytest.mark.parametrize(
    "line",
    [
        b"no JSON",
        b"\xff\xfe",
        b"3",
        b"[]",
        b"{}",
        b'{"type": "other"}',
        b'{"type": "progress"}',
        b'{"type": "progress", "step": "many"}',
        b'{"type": "progress", "step": null}',
        b'{"type": "checkpoint", "path": "p"}',
        b'{"type": "result", "values": 3, "value": 1}',
    ],
)
def test_nonsense_changes_nothing(line: bytes, caplog: pytest.LogCaptureFixture) -> None:
    read = RunReports(TRIAL)
    read.feed(line + b"\n" + lines(PROGRESS[0]))
    assert (read.step, read.last, read.checkpoint) == (21, PROGRESS[0], TRIAL.resume_from)
    assert "report" in caplog.text


def kept(count: int) -> KeptReports:
    reports = KeptReports()
    for step in range(count):
        reports.add({"step": step})
    return reports


def steps(taken: tuple[int, tuple[dict[str, Any], ...]]) -> tuple[int, list[int]]:
    first, contents = taken
    return first, [content["step"] for content in contents]


def test_reports_are_kept_until_they_are_known() -> None:
    reports = kept(5)
    assert steps(reports.take(3)) == (0, [0, 1, 2])
    assert steps(reports.take(3)) == (3, [3, 4])
    assert not reports.has_unsent
    reports.acknowledge(2)
    assert steps(reports.take(9)) == (2, [2, 3, 4])
    # An answer to an earlier message comes late.
    reports.acknowledge(1)
    assert steps(reports.take(9)) == (2, [2, 3, 4])
    reports.acknowledge(99)
    assert (reports.oldest, reports.count, reports.has_unsent) == (5, 5, False)


def test_of_too_many_values_the_oldest_go_and_a_message_holds_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_reports, "MAX_KEPT_VALUES", 5)
    monkeypatch.setattr(trial_reports, "MAX_VALUES_PER_MESSAGE", 3)
    reports = RunReports(TRIAL)
    for step in range(4):
        reports.feed(lines({"type": "progress", "step": step, "values": [[1, step, 0.5], [2, step, 0.5]]}))
    assert "values" not in reports.last
    taken = [reports.losses.take(9) for _ in range(3)]
    assert [steps(each) for each in taken] == [(0, [0, 1, 2]), (3, [3]), (4, [])]
    assert [len(each.get("values", ())) for _, some in taken for each in some] == [0, 0, 2, 2]
    reports.losses.acknowledge(4)
    for step in range(4, 6):
        reports.feed(lines({"type": "progress", "step": step, "values": [[1, step, 0.5], [2, step, 0.5]]}))
    assert [len(each["values"]) for each in reports.losses.take(1)[1]] == [2]


def test_of_too_many_reports_the_oldest_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_reports, "MAX_KEPT_REPORTS", 3)
    reports = kept(5)
    assert (reports.oldest, reports.count) == (2, 5)
    assert steps(reports.take(9)) == (2, [2, 3, 4])


def test_what_was_kept_back_counts_only_if_it_is_not_reported_any_more() -> None:
    kept_back = {**PROGRESS[0], "type": "kept_back", "step": 6}
    read = reports({**PROGRESS[0], "step": 4}, kept_back)
    assert (read.step, read.losses.count) == (4, 1)
    read.finish()
    assert (read.step, read.last["step"], read.losses.count) == (6, 6, 2)
    read.feed(lines(kept_back, {**PROGRESS[0], "step": 7}))
    read.finish()
    assert (read.step, read.losses.count) == (7, 3)
