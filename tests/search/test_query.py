"""`dike trials`, `dike timeline` and `dike plot`, and what they say of a search that is not there."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from typer.testing import CliRunner, Result

from dike.exceptions import BadInputError
from executor.trial_messages import TrialOutput
from framework.cli import app
from framework.cli.search_tables import format_duration
from framework.search.objective import Objective
from framework.search.plots import draw_search, plot_search
from framework.search.records import Parameter, SearchSpec, SliceRecord, TrialRecord, TrialState
from framework.search.store import Store
from tests.search.stored_search import add_losses

Dike = Callable[..., Result]
BEGIN_S = 1.7e9


def fill(url: str, name: str, count: int) -> None:
    """A search after some time: each trial has had a slice, the first one two, and is running."""
    lr = tuple(round(0.1 / (number + 1), 5) for number in range(count))
    spec = SearchSpec(
        name=name,
        script="/scripts/train.py",
        arguments=(),
        flags={},
        space=(Parameter("lr", lr),),
        sampler="grid",
        trial_count=count,
    )
    with closing(Store(url)) as store:
        store.create_search(spec)
        for number in range(count):
            loss = math.nan if number == 1 else 1.0 / (number + 1)
            state = TrialState.FAILED if number == 1 else TrialState.FINISHED
            trial = TrialRecord(number, {"lr": lr[number]}, state, step=100, loss=loss, value=loss, slot_s=65.0)
            trial.error = "Traceback\nValueError: loss is NaN" if number == 1 else ""
            record = SliceRecord(number, 0, number % 4, "node-1", BEGIN_S + 10 * (number // 4), reason="first slice")
            record.first_step_s, record.end_s = record.start_s + 1, record.start_s + 10
            record.to_step, record.outcome, record.rss_bytes = 100, "finished", 2**29
            store.save_trial(trial)
            store.save_slice(record)
            lines = [(step, 2.0 if step < 100 else loss) for step in range(10, 101, 10)]
            add_losses(
                store,
                number,
                0,
                [
                    {"step": step, "train_s": step * 0.09, "loss": x, "low": x, "high": x, "count": 10}
                    for step, x in lines
                ],
            )
        store.save_trial(TrialRecord(0, {"lr": lr[0]}, TrialState.RUNNING, runs=2, slot=3, step=100, value=1.0))
        store.save_slice(
            SliceRecord(0, 1, 3, "node-1", BEGIN_S + 300, from_step=100, convergence=0.5, reason="fastest")
        )


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/searches.db"


@pytest.fixture
def dike(url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Dike:
    monkeypatch.setenv("DIKE_STORAGE", url)
    monkeypatch.chdir(tmp_path)
    fill(url, "digits", 3)
    return lambda *arguments, **options: CliRunner().invoke(app, [str(argument) for argument in arguments], **options)


@contextmanager
def running(url: str) -> Iterator[Store]:
    """While it lasts a process runs the search: ours."""
    with closing(Store(url)) as store, store.lock("digits"):
        yield store


def test_without_a_name_the_searches_are_listed(dike: Dike, url: str) -> None:
    with running(url):
        shown = dike("trials").stdout
        (search,) = json.loads(dike("trials", "--format", "json").stdout)["searches"]
    for word in ("digits", "/scripts/train.py", "dike", "running", "3: 1 running, 1 finished, 1 failed"):
        assert word in shown
    assert "--resume" not in shown
    assert (search["name"], search["state"], search["trials"]["running"]) == ("digits", "running", 1)
    assert (search["space"][0]["low"], search["space"][0]["high"]) == (None, None)


def test_a_search_whose_process_was_killed_is_interrupted_and_nothing_in_it_runs(dike: Dike, url: str) -> None:
    shown = dike("trials").stdout
    assert "3: 1 interrupted, 1 finished, 1 failed" in shown
    assert "dike: digits was interrupted: its process has ended; dike tune --resume digits resumes it" in shown
    (search,) = json.loads(dike("trials", "--format", "json").stdout)["searches"]
    assert (search["state"], search["trials"]) == ("interrupted", {"interrupted": 1, "finished": 1, "failed": 1})
    shown = dike("trials", "digits").stdout
    assert "running" not in shown
    assert "dike tune --resume digits resumes it" in shown
    answer = json.loads(dike("trials", "digits", "--format", "json").stdout)
    assert answer["state"] == "interrupted"
    first = answer["trials"][0]
    assert (first["state"], first["status"], first["slot"], first["slot_s"]) == ("waiting", "waiting", None, 0.0)
    # Named by hand, the storage is named in the command, too.
    other = url.replace("://", "+pysqlite://")
    assert f"dike tune --resume digits --storage {other} resumes it" in dike("trials", "--storage", other).stdout
    with closing(Store(url)) as store:
        store.open_search("digits")
        store.finish_search("the search was to end after 9 s (--timeout)")
    assert "digits has ended early: the search was to end after 9 s" in dike("trials").stdout
    with closing(Store(url)) as store:
        store.open_search("digits")
        store.finish_search()
    assert "--resume" not in dike("trials", "digits").stdout


def test_states_and_time_move_while_a_trial_holds_a_slot(dike: Dike, url: str) -> None:
    def shown() -> tuple[str, float]:
        first = json.loads(dike("trials", "digits", "--format", "json").stdout)["trials"][0]
        return first["status"], first["slot_s"]

    with running(url) as store:
        (_, _, _, second) = store.load_slices()
        assert shown()[0] == "starting"
        second.start_s = time.time() - 3600
        store.save_slice(second)
        status, seconds = shown()
        assert (status, 3600 <= seconds < 7200) == ("starting", True)
        assert "1:00:0" in dike("trials", "digits").stdout
        trial = store.load_trials(readings=False)[0]
        store.save_trial(dataclasses.replace(trial, retries=1))
        assert shown()[0] == "restarting (try 2)"
        assert "restarting (try 2)" in dike("trials", "digits").stdout
        second.first_step_s = time.time()
        store.save_slice(second)
        assert shown()[0] == "running"


def test_what_a_trial_has_printed_is_shown(dike: Dike, url: str) -> None:
    with running(url) as store:
        store.add_output([TrialOutput("slot", 0, 0, 0, b"one\ntwo\n"), TrialOutput("slot", 0, 1, 0, b"three\n")])
        first, second = "--- run 0 on node-1, from step 0 ---\n", "--- run 1 on node-1, from step 100 ---\n"
        whole = f"{first}one\ntwo\n{second}three\n"
        assert dike("logs", "digits", "--trial", 0).stdout == whole
        assert dike("logs", "digits", "--trial", 0, "--tail", 2).stdout == f"{second}three\n"
        # A trial that has ended is not waited for.
        ended = dike("logs", "digits", "--trial", 2, "-f")
        assert (ended.exit_code, ended.stdout) == (0, "")
    # Nor is a trial whose search is not running.
    stands = dike("logs", "digits", "--trial", 0, "-f")
    assert (stands.stdout, str(stands.exception)) == (
        whole,
        "The trial has not ended, and the search digits does not run.",
    )
    assert str(dike("logs", "digits", "--trial", 1, "-f").exception) == (
        "Trial 1 of digits failed: ValueError: loss is NaN."
    )
    choose = dike("logs", "digits")
    assert "lr=0.1" in choose.stdout
    assert "dike logs digits --trial N shows the output of trial N" in choose.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("digits", "--trial", 3), "The search digits has no trial 3; its trials are 0 to 2."),
        (
            ("digits", "-f"),
            "--follow needs a trial of the search digits; add --trial N.",
        ),
        (("digits", "--task", "chief:0"), "use --trial N instead of --task"),
        (("digits", "--task", "chief:0", "--trial", 0), "--trial is for searches and --task for training jobs"),
        (("dogits", "--storage", "sqlite:///searches.db"), "did you mean 'digits'?"),
    ],
)
def test_which_trial_is_meant_must_be_clear(dike: Dike, arguments: tuple[object, ...], message: str) -> None:
    refused = dike("logs", *arguments).exception
    assert isinstance(refused, BadInputError)
    assert message in str(refused)


def test_the_trials_of_a_search_are_shown(dike: Dike, url: str) -> None:
    with running(url):
        shown = dike("trials", "digits").stdout
        answer = json.loads(dike("trials", "digits", "--format", "json").stdout)
    for word in (
        "lr=0.1",
        "starting",
        "finished",
        "failed",
        "nan",
        "0.3333",
        "1:05",
        "trial 1: ValueError: loss is NaN",
    ):
        assert word in shown
    assert [trial["state"] for trial in answer["trials"]] == ["running", "failed", "finished"]
    assert answer["trials"][1]["loss"] is None
    assert answer["trials"][1]["not_finite"]["loss"] == "nan"
    assert answer["trials"][0]["slot"] == 3
    assert {"agent", "convergence", "created_s", "ended_s"} <= answer["trials"][0].keys()


def test_of_many_trials_those_that_run_and_the_best_are_shown(dike: Dike, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("framework.cli.trials.MAX_SHOWN", 2)
    shown = dike("trials", "digits").stdout
    assert "the table has 2 of 3 trials; dike trials digits --format json has all" in shown.replace("\n", " ")
    assert "lr=0.1 " in shown
    assert "lr=0.03333" in shown
    assert "lr=0.05 " not in shown
    assert len(json.loads(dike("trials", "digits", "--format", "json").stdout)["trials"]) == 3


def test_the_slices_of_a_search_are_shown(dike: Dike, url: str) -> None:
    shown = dike("timeline", "digits").stdout
    for word in ("+5:00", "10.0 s", "node-1", "fastest", "0.5", "0 to 100", "512.0 MiB", "lost"):
        assert word in shown
    assert "GPU" not in shown
    with running(url):
        assert "lost" not in dike("timeline", "digits").stdout
    slices = json.loads(dike("timeline", "digits", "--format", "json").stdout)["slices"]
    assert [(piece["trial"], piece["run"]) for piece in slices] == [(0, 0), (1, 0), (2, 0), (0, 1)]
    assert slices[-1]["end_s"] is None


@pytest.mark.slow
def test_kinds_of_slots_and_speeds_are_shown(dike: Dike, url: str) -> None:
    assert "kind" not in dike("timeline", "digits").stdout
    with closing(Store(url)) as store:
        store.open_search("digits")
        for piece, kind, speed in zip(store.load_slices(), ("k80", "v100", "v100"), (40.0, 1234.5, 0.25), strict=False):
            store.save_slice(dataclasses.replace(piece, kind=kind, samples_per_s=speed))
    wide = {"COLUMNS": "160"}
    shown = dike("timeline", "digits", env=wide).stdout
    for word in ("kind", "samples/s", "k80", "v100", "1,234", "0.25"):
        assert word in shown
    slices = json.loads(dike("timeline", "digits", "--format", "json").stdout)["slices"]
    assert [(piece["kind"], piece["samples_per_s"]) for piece in slices[:2]] == [("k80", 40.0), ("v100", 1234.5)]
    assert "v100 1,234" in dike("trials", "digits", env=wide).stdout
    trials = json.loads(dike("trials", "digits", "--format", "json").stdout)["trials"]
    assert [trial["samples_per_s"] for trial in trials[:2]] == [{"k80": 40.0}, {"v100": 1234.5}]
    assert trials[0]["batch_size"] == 1.0
    assert dike("plot", "digits", "-o", "kinds.svg").exit_code == 0
    assert "slot 1, v100" in Path("kinds.svg").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_a_search_is_drawn(dike: Dike, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"picture{suffix}"
    assert dike("plot", "digits", "-o", path).exit_code == 0
    content = path.read_bytes()
    assert content.startswith({".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[suffix])
    if suffix == ".svg":
        text = content.decode()
        for word in (
            "digits: 3 trials, policy dike",
            "0: lr=0.1",
            "slot 3",
            "best loss so far",
            "training loss",
        ):
            assert word in text


@pytest.mark.slow
def test_many_trials_are_drawn_with_the_best_ones_named(tmp_path: Path, url: str) -> None:
    fill(url, "many", 100)
    path = tmp_path / "many.svg"
    with closing(Store(url)) as store:
        spec = store.open_search("many")
        plot_search(spec, store.load_trials(), store.load_slices(), store.load_losses(), path)
    text = path.read_text()
    assert [f">{number}: lr=" in text for number in (95, 96, 97, 98, 99)] == [True] * 5
    assert ">94: lr=" not in text


@pytest.mark.slow
def test_who_leads_in_the_picture_is_who_leads_in_the_table(url: str) -> None:
    """Trial 0 resumes with a report of a single step, which is far below its loss."""
    spec = SearchSpec("resumed", "/t.py", (), {}, (Parameter("lr", (1, 2)),), "grid", 2)
    pieces = [
        SliceRecord(0, 0, 0, "node-1", BEGIN_S, first_step_s=BEGIN_S),
        SliceRecord(1, 0, 1, "node-1", BEGIN_S, first_step_s=BEGIN_S),
        SliceRecord(0, 1, 0, "node-1", BEGIN_S + 20, first_step_s=BEGIN_S + 20, from_step=100),
    ]
    told = {
        (0, 0): [(50, 1.0, 50, 0.9), (100, 0.5, 50, 0.6)],
        (0, 1): [(101, 0.001, 1, 0.55), (150, 0.5, 49, 0.5)],
        (1, 0): [(50, 0.8, 50, 0.7), (100, 0.3, 50, 0.3)],
    }
    with closing(Store(url)) as store:
        store.create_search(spec)
        objective = Objective("loss", "min")
        for number in (0, 1):
            store.save_trial(TrialRecord(number, {"lr": number}))
        for piece in pieces:
            store.save_slice(piece)
        records = [TrialRecord(number, {"lr": number}) for number in (0, 1)]
        for (number, run), lines in sorted(told.items()):
            reports = [
                {
                    "step": step,
                    "train_s": step * 0.1,
                    "count": count,
                    "value": value,
                    **dict.fromkeys(("loss", "low", "high", "last"), loss),
                }
                for step, loss, count, value in lines
            ]
            add_losses(store, number, run, reports)
            for report in reports:
                objective.apply(records[number], report)
        for record in records:
            store.save_trial(record)
        trials, reports_of = store.load_trials(), store.load_losses()
    figure = draw_search(spec, trials, pieces, reports_of)
    losses, _, best = figure.axes
    # The single step is drawn with those after it.
    line = next(line for line in losses.get_lines() if str(line.get_label()).startswith("0:"))
    assert list(line.get_xdata()) == [50, 100, 150]
    assert min(line.get_ydata()) > 0.4
    (curve,) = best.get_lines()
    assert curve.get_ydata()[-1] == min(trial.value for trial in trials if trial.value is not None) == 0.3
    # The loss of a single step of trial 0 is not its value.
    assert min(curve.get_ydata()) == 0.3
    assert best.texts[-1].get_text() == "1"


def test_the_value_that_a_script_states_is_the_one_drawn(url: str) -> None:
    fill(url, "stated", 1)
    with closing(Store(url)) as store:
        spec = store.open_search("stated")
        add_losses(store, 0, 0, [{"step": 100, "train_s": 9.0, "metrics": {}, "value": 0.7}])
        figure = draw_search(spec, store.load_trials(), store.load_slices(), store.load_losses())
    (curve,) = figure.axes[2].get_lines()
    values = list(curve.get_ydata())
    assert values == [0.7, 0.7]


def test_labels_of_leaders_do_not_cover_each_other() -> None:
    spec = SearchSpec("close", "/t.py", (), {}, (Parameter("lr", (1,)),), "grid", 1)
    count = 40
    slices = [
        SliceRecord(number, 0, number, "a", BEGIN_S, BEGIN_S + 100, first_step_s=BEGIN_S) for number in range(count)
    ]
    trials = [TrialRecord(number, {"lr": 1}, TrialState.FINISHED, value=0.1) for number in range(count)]
    reports = {
        number: [{"run": 0, "step": 1, "train_s": 10 + number % 20 * 0.4 + number, "value": 3.0 / (number + 1)}]
        for number in range(count)
    }
    figure = draw_search(spec, trials, slices, reports)
    renderer = FigureCanvasAgg(figure).get_renderer()
    texts = figure.axes[2].texts
    assert 3 < len(texts) < count
    assert texts[-1].get_text() == str(count - 1)
    boxes = [text.get_window_extent(renderer) for text in texts]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


@pytest.mark.slow
def test_a_search_that_has_not_begun_can_be_shown_and_drawn(dike: Dike, url: str, tmp_path: Path) -> None:
    with closing(Store(url)) as store:
        store.create_search(SearchSpec("new", "/t.py", (), {}, (Parameter("lr", (1,)),), "grid", 1))
    assert dike("trials", "new").exit_code == 0
    assert "No trial has run yet" in dike("timeline", "new").stdout
    assert dike("plot", "new").exit_code == 0
    assert (tmp_path / "new.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("trials", "digit"), "did you mean 'digits'"),
        (("timeline", "digit"), "did you mean 'digits'"),
        (("plot", "digit"), "did you mean 'digits'"),
        (("plot", "digits", "-o", "x.gif"), "ends in .pdf, .png or .svg"),
        (("plot", "digits", "-o", "none/x.png"), "folder of the picture"),
        (("trials", "--storage", "sqlite:///none.db"), "There is no database of searches at none.db"),
        (("trials", "--storage", "none.db"), "not a database URL"),
    ],
)
def test_what_is_not_there_is_named(dike: Dike, arguments: tuple[str, ...], message: str) -> None:
    result = dike(*arguments)
    assert isinstance(result.exception, BadInputError)
    assert result.exception.exit_code == 2
    assert message in str(result.exception)


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.0, "0.0 s"), (59.94, "59.9 s"), (61, "1:01"), (3599.7, "1:00:00"), (90061, "25:01:01")]
)
def test_durations_are_short(seconds: float, shown: str) -> None:
    assert format_duration(seconds) == shown
