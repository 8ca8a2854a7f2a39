"""What a search shows on a terminal of 80 columns, and what it says at its end."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import math
import shlex
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from dike.exceptions import BadInputError
from framework.cli.export import _check_has_checkpoints
from framework.cli.search_report import _repeats, report
from framework.cli.search_tables import slices_table, trials_table
from framework.cli.search_view import live_frame, print_result, summary
from framework.policies.trials.interface import Reading
from framework.search.records import (
    Parameter,
    SearchOutcome,
    SearchSpec,
    SliceRecord,
    TrialRecord,
    TrialState,
    best_trial,
    ranked,
)
from framework.search.trials import train_command

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
    assert summary(records, SPEC).endswith("best: trial 0 (finished): loss 0")


def test_one_rule_says_which_trial_is_best() -> None:
    """A finished trial goes before those that were stopped or still run; of failed ones none is best."""
    states = (TrialState.STOPPED, TrialState.FINISHED, TrialState.FINISHED, TrialState.FAILED, TrialState.RUNNING)
    values = (0.1, 0.4, 0.3, 0.0, 0.2)
    records = [
        TrialRecord(number, {}, state, value=value, best_value=value / 2, best_step=7, step=9)
        for number, (state, value) in enumerate(zip(states, values, strict=True))
    ]
    assert [trial.number for trial in ranked(records, "min")] == [2, 1, 0, 4, 3]
    result = SearchOutcome("digits", False, records, "min", "/ckpt")
    assert result.best is best_trial(records, "min") is records[2]
    assert summary(records, SPEC).endswith("best: trial 2 (finished): loss 0.3, at best 0.15 at step 7")
    out = Console(file=io.StringIO(), width=140)
    assert isinstance(out.file, io.StringIO)
    print_result(out, result, SPEC)
    assert [line.split()[1] for line in out.file.getvalue().splitlines() if "0." in line] == ["2", "1", "0", "4"]
    assert best_trial([records[0], records[3], records[4]], "min") is records[0]
    assert best_trial([TrialRecord(0, {}, TrialState.FINISHED, value=math.nan)], "max") is None


@pytest.mark.parametrize("width", range(50, 160, 5))
def test_no_step_is_shown_beside_a_value_that_is_not_of_it(width: int) -> None:
    records = [TrialRecord(0, {"lr": 0.1}, TrialState.FINISHED, step=90, value=0.4, best_value=0.3, best_step=40)]
    spec = dataclasses.replace(SPEC, metric="val_accuracy", mode="max")
    text = shown(trials_table(records, spec, width), width)
    assert ("at step" in text) == ("best val_accuracy" in text) == ("0.3 at 40" in text)


@pytest.mark.parametrize("width", [WIDTH, 140])
def test_the_best_trials_are_those_with_a_value(width: int) -> None:
    records = [trial for trial in trials(10) if trial.number in (0, 4)]
    out = Console(file=io.StringIO(), width=width)
    assert isinstance(out.file, io.StringIO)
    print_result(out, SearchOutcome("digits", False, records, "min", "/ckpt"), SPEC)
    text = out.file.getvalue()
    assert records[1].value is None
    assert "0.497678" in text
    assert "0.0995356" not in text
    assert "…" not in text


def test_the_command_repeats_the_best_trial_digit_by_digit() -> None:
    best = trials(1)[0]
    assert train_command(SPEC, best) == (
        "python '/scripts/my scripts/train.py' --data 'a b' --lr=0.49767786904433664 --steps=64 --augment=true"
    )
    assert train_command(dataclasses.replace(SPEC, call=0), best) is None


def test_the_command_gives_parameters_to_scripts_that_ask_dike_for_them() -> None:
    best = dataclasses.replace(trials(1)[0], parameters={"lr": 0.1, "name": "-q it's"})
    flagged = dataclasses.replace(SPEC, reads_params=True, script="p.py", arguments=(), flags={"name": "--name"})
    command = train_command(flagged, best)
    assert command is not None
    variable, *words = shlex.split(command)
    assert words == ["python", "p.py", "--name=-q it's"]
    name, _, text = variable.partition("=")
    assert name == "DIKE_PARAMS"
    assert json.loads(text) == best.parameters


def test_without_a_writable_folder_the_report_has_no_plot(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    spec = dataclasses.replace(SPEC, checkpoint_dir=str(tmp_path / "file" / "digits"))
    best = trials(1)[0]
    best.readings.append(Reading(1.0, 1, 1.0, 1.0, 1.0))
    out = Console(file=io.StringIO(), width=140)
    assert isinstance(out.file, io.StringIO)
    report(out, SearchOutcome("digits", True, [best], "min", spec.checkpoint_dir), spec, "sqlite:///unused.db")
    text = out.file.getvalue()
    assert "The search cannot be plotted: " in text
    assert "--lr=0.49767786904433664" in text


def test_an_export_of_a_trial_that_has_no_checkpoints_says_why() -> None:
    finished = TrialRecord(0, {"lr": 0.1}, TrialState.FINISHED, value=0.5)
    with pytest.raises(BadInputError, match="Keras on JAX or PyTorch"):
        _check_has_checkpoints(finished, "digits")
    finished.checkpoint = "/ckpt/trial-0/run-0-step-1"
    _check_has_checkpoints(finished, "digits")


def test_trials_that_repeat_a_point_are_named() -> None:
    records = [TrialRecord(number, {"lr": 0.1, "n": number % 2}) for number in range(4)]
    assert _repeats(SearchOutcome("digits", True, records, "min", "/ckpt")) == "2 (as 0), 3 (as 1)"
    assert not _repeats(SearchOutcome("digits", True, records[:2], "min", "/ckpt"))
