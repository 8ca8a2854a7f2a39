"""What a search shows on a terminal of 80 columns, and what it says at its end."""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from dike.exceptions import BadInputError
from framework.cli.export import _check_has_checkpoints
from framework.cli.search_report import _repeats, command_of, report
from framework.cli.search_tables import slices_table, trials_table
from framework.cli.search_view import live_frame, print_result, summary
from framework.policies.trials.interface import Reading
from framework.search.objective import Objective
from framework.search.records import Parameter, SearchResult, SearchSpec, SliceRecord, TrialRecord, TrialState

WIDTH, HEIGHT = 80, 30
FLAGS = {"lr": "--lr", "steps": "--steps", "augment": "--augment"}
SPEC = SearchSpec(
    name="digits",
    script="/scripts/my scripts/train.py",
    arguments=("--data", "a b"),
    flags=FLAGS,
    space=(Parameter("lr", (0.1,)), Parameter("steps", (64, 128)), Parameter("augment", (True, False))),
    sampler="random",
    trial_count=100,
)


def trials(count: int = 100) -> list[TrialRecord]:
    """Four that run, some in every other state; those that wait have no value."""
    states = itertools.chain([TrialState.RUNNING] * 4, itertools.cycle(TrialState))
    records = []
    for number, state in zip(range(count), states, strict=False):
        parameters = {"lr": 0.49767786904433664 / (number + 1), "steps": 64, "augment": True}
        value = None if state is TrialState.WAITING else 1.2345 + number
        records.append(TrialRecord(number, parameters, state, slot=3, step=12345, loss=value, value=value, slot_s=3700))
    return records


def shown(what: RenderableType, width: int = WIDTH) -> str:
    out = Console(file=io.StringIO(), width=width)
    out.print(what)
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def test_only_parameters_are_folded_in_a_narrow_terminal() -> None:
    text = shown(trials_table(trials(10), SPEC, WIDTH))
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "…" not in text
    for word in ("lr=0.497678,", "augment=True", "suspended", "finished", "12,345", "1.234"):
        assert word in text
    assert "convergence" not in text
    assert "1:01:40" in shown(trials_table(trials(10), SPEC, 140), 140)


def test_slices_leave_out_what_a_narrow_terminal_has_no_room_for() -> None:
    records = [
        SliceRecord(12, run, 3, "ip-10-0-0-12.internal", 1e9 + run, 2e9, reason="its loss falls fastest", to_step=12345)
        for run in range(3)
    ]
    for record in records:
        record.outcome, record.rss_bytes, record.suspend_s, record.convergence = "suspended", 2**29, 0.5, 0.25
    text = shown(slices_table(records, WIDTH))
    assert "…" not in text
    assert "suspended" in text
    assert "12,345" in text
    assert "512.0 MiB" not in text
    wide = shown(slices_table(records, 200), 200)
    for word in ("512.0 MiB", "ip-10-0-0-12.internal", "0.25", "suspended in"):
        assert word in wide


def test_the_live_view_fits_the_terminal_with_the_summary_first() -> None:
    lines = shown(live_frame(trials(), SPEC, WIDTH, HEIGHT)).splitlines()
    assert len(lines) < HEIGHT
    assert lines[0].startswith("100 trials: ")
    assert sum("lr=" in line for line in lines) == HEIGHT - 9
    assert len({len(line) for line in lines if "lr=" in line}) == 1


def test_a_best_value_of_zero_is_told() -> None:
    records = [TrialRecord(0, {}, TrialState.FINISHED, value=0.0), TrialRecord(1, {}, TrialState.FINISHED, value=1.0)]
    assert summary(records, SPEC).endswith("best so far: loss 0 (trial 0 at step 0)")


def test_the_best_so_far_does_not_get_worse() -> None:
    """Neither as trials go on, nor as one fails."""
    first, second = (TrialRecord(number, {}, TrialState.RUNNING, step=9) for number in (0, 1))
    told = []
    for trial, value, step in (
        (first, 0.5, 1),
        (first, 0.9, 2),
        (second, 0.4, 7),
        (second, math.nan, 8),
        (first, 0.45, 9),
    ):
        Objective("loss", "min").take(trial, {"train_s": 1.0, "step": step, "value": value})
        told.append(summary([first, second], SPEC).partition("best so far: ")[2])
    second.state = TrialState.FAILED
    told.append(summary([first, second], SPEC).partition("best so far: ")[2])
    assert told == ["loss 0.5 (trial 0 at step 1)"] * 2 + ["loss 0.4 (trial 1 at step 7)"] * 4
    assert "best loss" in shown(trials_table([first, second], SPEC, 140), 140)


@pytest.mark.parametrize("width", [WIDTH, 140])
def test_the_best_trials_are_those_with_a_value(width: int) -> None:
    records = [trial for trial in trials(10) if trial.number in (0, 4)]
    out = Console(file=io.StringIO(), width=width)
    assert isinstance(out.file, io.StringIO)
    print_result(out, SearchResult("digits", False, records, "min", "/ckpt"), SPEC)
    text = out.file.getvalue()
    assert records[1].value is None
    assert "0.497678" in text
    assert "0.0995356" not in text
    assert "…" not in text


def test_the_command_repeats_the_best_trial_digit_by_digit() -> None:
    best = trials(1)[0]
    assert command_of(SPEC, best) == (
        "python '/scripts/my scripts/train.py' --data 'a b' --lr=0.49767786904433664 --steps=64 --augment=true"
    )
    assert command_of(dataclasses.replace(SPEC, call=0), best) is None
    assert command_of(dataclasses.replace(SPEC, flags={}), best) is None


def test_where_no_folder_can_be_made_the_report_goes_on_without_a_plot(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    spec = dataclasses.replace(SPEC, checkpoint_dir=str(tmp_path / "file" / "digits"))
    best = trials(1)[0]
    best.readings.append(Reading(1.0, 1, 1.0, 1.0, 1.0))
    out = Console(file=io.StringIO(), width=140)
    assert isinstance(out.file, io.StringIO)
    report(out, SearchResult("digits", True, [best], "min", spec.checkpoint_dir), spec, "sqlite:///unused.db")
    text = out.file.getvalue()
    assert "There is no plot: " in text
    assert "--lr=0.49767786904433664" in text


def test_an_export_of_a_trial_that_has_no_checkpoints_says_why() -> None:
    finished = TrialRecord(0, {"lr": 0.1}, TrialState.FINISHED, value=0.5)
    with pytest.raises(BadInputError, match="Keras on JAX or PyTorch"):
        _check_has_checkpoints(finished, "digits")
    finished.checkpoint = "/ckpt/trial-0/run-0-step-1"
    _check_has_checkpoints(finished, "digits")


def test_trials_that_repeat_a_point_are_named() -> None:
    records = [TrialRecord(number, {"lr": 0.1, "n": number % 2}) for number in range(4)]
    assert _repeats(SearchResult("digits", True, records, "min", "/ckpt")) == "2 (as 0), 3 (as 1)"
    assert not _repeats(SearchResult("digits", True, records[:2], "min", "/ckpt"))
