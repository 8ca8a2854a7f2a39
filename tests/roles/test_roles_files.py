"""Reports and the mark of a checkpoint folder."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from dike import checkpoints, reporting
from dike.exceptions import BadInputError
from dike.keras3.trial.reports import KerasReports
from dike.profile import Api, VariableSpec
from dike.reporting import PROGRESS_INTERVAL_S, EpochLosses, Reporter
from dike.task import Role, TaskSpec
from dike.trial.runtime import Standing
from dike.trial.spec import TrialSpec
from tests.profiles import made_up_profile
from tests.waiting import DEADLINE_S

PROFILE = made_up_profile({"a": (2, 4), "b": (2,)}, name="model.py", flops=1.0)


class FakeClock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_progress_is_thinned_and_the_last_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    # Every line is looked at: the thread that writes them may be slow to get its turn.
    monkeypatch.setattr(reporting, "_FLUSH_TIMEOUT_S", 120.0)
    reader, writer = os.pipe()
    clock = FakeClock()
    reporter = Reporter(writer, clock)
    reporter.started()
    for step in range(1, 101):
        clock.now_s += PROGRESS_INTERVAL_S / 10
        reporter.progress(step, loss=1.0 / step, unknown=None)
    reporter.checkpoint("folder/model", 100)
    reporter.resumed(100)
    reporter.total(200)
    reporter.rates({0: 1.5, 10: 0.5})
    reporter.progress(101, loss=float("nan"))
    reporter.close()
    os.close(writer)
    with os.fdopen(reader) as lines:
        messages = [json.loads(line) for line in lines]
    progress = [message for message in messages if message["type"] == "progress"]
    assert messages[0] == {"type": "started"}
    assert {"type": "resumed", "step": 100} in messages
    assert {"type": "total", "steps": 200} in messages
    assert {"type": "rates", "workers": {"0": 1.5, "10": 0.5}} in messages
    assert {"type": "checkpoint", "path": "folder/model", "step": 100} in messages
    assert len(progress) == pytest.approx(11, abs=1)
    assert progress[0] == {"type": "progress", "step": 1, "loss": 1.0}
    assert progress[-1] == {"type": "progress", "step": 101, "loss": "nan"}


def test_the_speed_counts_steps_whose_reports_were_kept_back() -> None:
    reader, writer = os.pipe()
    clock = FakeClock()
    reporter = Reporter(writer, clock)
    for epoch in range(20):
        for batch in range(44):
            clock.now_s += 1 / 122
            reporter.progress(epoch * 44 + batch + 1, 32)
        clock.now_s += 0.7  # validation, after which the first batch is reported immediately
    reporter.close()
    os.close(writer)
    with os.fdopen(reader) as lines:
        speeds = [json.loads(line).get("samples_per_s") for line in lines]
    assert speeds[0] is None
    true = 44 * 32 / (44 / 122 + 0.7)
    assert all(speed == pytest.approx(true, rel=0.25) for speed in speeds[8:])


def test_what_was_kept_back_is_written_also_if_nothing_follows() -> None:
    reader, writer = os.pipe()
    reporter = Reporter(writer)
    for step in (1, 2, 3):
        reporter.progress(step)
    with os.fdopen(reader) as lines:
        assert [json.loads(lines.readline())["step"] for _ in range(2)] == [1, 3]
        reporter.close()
        os.close(writer)


def test_a_loss_is_never_that_of_the_first_batch_of_an_epoch_alone() -> None:
    losses = EpochLosses()
    assert losses.smoothed(2.0, 1) == 2.0
    assert losses.smoothed(1.0, 44) == 1.0
    losses.epoch_ended()
    assert losses.smoothed(0.01, 1) == pytest.approx(1.0, abs=0.03)
    assert losses.smoothed(0.5, 22) == pytest.approx(0.75)
    assert losses.smoothed(0.6, 44) == pytest.approx(0.6)
    assert math.isnan(losses.smoothed(math.nan, 45))


class FakeRuntime:
    """Keeps the reported losses."""

    def __init__(self, *, smooths_losses: bool) -> None:
        self.smooths_losses = smooths_losses
        self.spec = TrialSpec("job", 0, 0, {}, "/nowhere", metric="loss")
        self.losses: list[float] = []
        self.standing = Standing()

    def progress(self, step: int, *, loss: float | None = None, **_: object) -> None:
        self.losses += [] if loss is None else [loss]

    def check_metric(self, reported: object) -> None:
        pass


@pytest.mark.parametrize("smooths", [True, False])
def test_losses_of_a_plain_task_are_smoothed_and_those_of_a_trial_are_not(smooths: bool) -> None:
    runtime = FakeRuntime(smooths_losses=smooths)
    reports = KerasReports(runtime)  # type: ignore[arg-type]
    for before in (0, 8):  # two `fit`s of two epochs of four batches each
        reports.fit_begins(before)
        for epoch in range(2):
            for batch in range(4):
                reports.step_done(before + 4 * epoch + batch + 1, 0.0 if batch == 0 else 1.0)
            reports.epoch_done({"loss": 1.0}, is_complete=True)
    second = [0.75 if smooths else 0.0, 1.0, 1.0, 1.0]
    assert runtime.losses == [*(0.0, 1.0, 1.0, 1.0), *second] * 2


LARGE = {"variable": "x" * 4096}
MANY = 400
"""Far more of those than a pipe and the queue hold."""


def assert_ends(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def report_much(reporter: Reporter) -> None:
    for _ in range(MANY):
        reporter.placement(LARGE)


@pytest.mark.parametrize("is_gone_before", [True, False])
def test_a_reader_that_is_gone_stops_nothing(is_gone_before: bool) -> None:
    reader, writer = os.pipe()
    reporter = Reporter(writer)
    if is_gone_before:
        os.close(reader)
    assert_ends(lambda: report_much(reporter))
    if not is_gone_before:
        os.close(reader)
    assert_ends(reporter.close)
    os.close(writer)


def test_a_reader_that_is_slow_stops_nothing_and_gets_whole_lines() -> None:
    reader, writer = os.pipe()
    reporter = Reporter(writer)
    assert_ends(lambda: report_much(reporter))
    lines: list[str] = []
    reading = threading.Thread(target=lambda: lines.extend(os.fdopen(reader)))
    reading.start()
    assert_ends(reporter.close)
    os.close(writer)
    reading.join(DEADLINE_S)
    assert 0 < len(lines) < MANY
    assert all(json.loads(line) == {"type": "placement", "variables": LARGE} for line in lines)


def test_a_folder_belongs_to_the_model_that_marked_it(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoints")
    checkpoints.check_folder(folder, PROFILE)  # not there yet
    checkpoints.mark_folder(folder, checkpoints.fingerprint(PROFILE))
    checkpoints.check_folder(folder, PROFILE)
    checkpoints.check_folder(folder, PROFILE.with_batch_size(99))
    other = dataclasses.replace(PROFILE, variables=(VariableSpec("a", (2, 5), "float32", 40),))
    with pytest.raises(BadInputError, match="another model"):
        checkpoints.check_folder(folder, other)
    for damaged in (b"{", b"\xff", b"[" * 100_000):
        (tmp_path / "checkpoints" / checkpoints.FINGERPRINT_FILE).write_bytes(damaged)
        with pytest.raises(BadInputError, match="damaged"):
            checkpoints.check_folder(folder, PROFILE)
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInputError, match="is a file"):
        checkpoints.check_folder(str(tmp_path / "file"), PROFILE)


def test_a_job_knows_at_which_step_it_first_began(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    chief = TaskSpec(
        "job-1", Role.WORKER, 0, {"worker": ["a:1", "b:1"], "ps": ["c:1"]}, Api.GRAPH, checkpoint_dir=str(folder)
    )
    worker = dataclasses.replace(chief, index=1)
    assert checkpoints.first_step(worker, 7) == 7
    assert not folder.exists()
    assert checkpoints.first_step(chief, 7) == 7
    later = dataclasses.replace(chief, attempt=2)
    assert checkpoints.first_step(later, 30) == 7
    assert checkpoints.first_step(dataclasses.replace(worker, attempt=1), 31) == 7
    # Another job starts in the folder that this one has left. An unreadable file counts as missing.
    other = dataclasses.replace(chief, job_id="job-2", attempt=1)
    assert checkpoints.first_step(other, 40) == 40
    assert checkpoints.first_step(dataclasses.replace(other, attempt=2), 50) == 40
    for attempt, damaged in enumerate((b"[", b"\xff", b'{"job": "job-2", "step": 1e400}'), 3):
        (folder / checkpoints.FIRST_STEP_FILE).write_bytes(damaged)
        assert checkpoints.first_step(dataclasses.replace(other, attempt=attempt), 60 + attempt) == 60 + attempt


def test_a_variable_without_a_plan_has_the_same_ps_everywhere() -> None:
    task = TaskSpec("job", Role.WORKER, 0, {"ps": ["a:1", "b:1", "c:1"], "worker": ["d:1"]}, Api.GRAPH, {"planned": 2})
    again = TaskSpec.loads(dataclasses.replace(task, index=0).dumps())
    names = [f"variable{number}" for number in range(60)]
    assert task.ps_of("planned") == 2
    assert [task.ps_of(name) for name in names] == [again.ps_of(name) for name in names]
    assert {task.ps_of(name) for name in names} == {0, 1, 2}


def test_folders_are_for_their_own_account_only(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        checkpoints.mark_folder(str(tmp_path / "runs" / "train-1"), "one")
    finally:
        os.umask(previous)
    made = [tmp_path / "runs", tmp_path / "runs" / "train-1"]
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in made] == [0o700, 0o700]
