"""`dike.tune` and `dike.grid_search`: what they ask for, and what they do in a trial's process."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import json
import math
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import RandomSampler

from dike.exceptions import BadInputError, JobFailedError
from dike.trial import search_command, search_space, tuning
from dike.trial.script_api import params
from dike.trial.search_result import SearchResult, TrialResult
from dike.trial.spec import EARLIER_RESULTS
from dike.trial.train_function import arguments_for
from dike.trial.tuning import grid_search, tune
from framework.cli.search_options import function_call
from framework.cli.tune import tune as command
from framework.search.records import Condition, Parameter, TrialRecord, TrialState
from framework.search.space import read_space
from framework.search.store import Store
from framework.service.api.schemas import TrialView
from tests.running import dike_environment
from tests.trial.slot_stage import SlotStage, trial

pytestmark = pytest.mark.integration


def trial_json(number: int, lr: float, loss: float, value: float) -> dict[str, Any]:
    """A trial as the command prints it."""
    return TrialRecord(
        number,
        {"lr": lr},
        TrialState.FINISHED,
        runs=1,
        step=3,
        train_s=1.5,
        slot_s=2.0,
        loss=loss,
        value=value,
        metrics={"f1": value},
    ).to_json()


RESULT: dict[str, Any] = {
    "name": "first",
    "complete": True,
    "failure": "",
    "checkpoint_dir": "/checkpoints",
    "best": trial_json(0, 0.1, 0.25, 0.5),
    "trials": [trial_json(0, 0.1, 0.25, 0.5), trial_json(1, 0.2, math.nan, math.inf)],
}


def test_a_result_is_a_table_with_the_best_trial_first() -> None:
    document = {**RESULT, "trials": [trial_json(number, 0.1, 1.0, value) for number, value in enumerate(VALUES)]}
    document["best"] = document["trials"][2]
    document["trials"][0]["parameters"] = {"kind": "<b>"}
    found = SearchResult.from_json(document)
    frame = found.to_dataframe()
    assert list(frame["number"]) == [2, 1, 0, 3]
    assert list(frame["value"])[:3] == [0.9, 0.5, 0.25]
    assert frame["params_lr"].isna().tolist() == [False, False, True, False]
    table = found._repr_html_()
    assert table.index("0.9") < table.index("0.5")
    assert "<b>" not in table
    assert "&lt;b&gt;" in table


VALUES = (0.25, 0.5, 0.9, math.nan)


def test_a_space_is_written_as_the_command_reads_it(tmp_path: Path) -> None:
    space = {
        "lr": [0.1, 1e-05, 3],
        "rate": (1e-5, 0.1, "log"),
        "units": (2, 64),
        "width": (2, 64.0, "int", "log"),
        "share": (0.0, 1),
        "optimizer": ["sgd", "0.5", "on", "1:2", 'a "b", c'],
        "flag": [True, False],
        "numpy": np.logspace(-2, -1, 2),
        "layers": np.int64(3),
        "steps": range(1, 4),
        "batch-size": 32,
        "dropout": (0.0, 0.5, "step=0.1"),
        "rate_2": FloatDistribution(1e-5, 0.1, log=True),
        "units_2": {"values": IntDistribution(32, 256, step=32), "when": {"layers": 3}},
        "kind": {"values": CategoricalDistribution(["a", "b"]), "when": {"steps": [1, 2], "flag": True}},
    }
    path = tmp_path / "space.yaml"
    path.write_text(search_space.to_yaml(space))
    assert read_space(path) == (
        Parameter("lr", (0.1, 1e-05, 3)),
        Parameter("rate", low=1e-5, high=0.1, log=True),
        Parameter("units", low=2, high=64, is_integer=True),
        Parameter("width", low=2, high=64, is_integer=True, log=True),
        Parameter("share", low=0, high=1),
        Parameter("optimizer", ("sgd", "0.5", "on", "1:2", 'a "b", c')),
        Parameter("flag", (True, False)),
        Parameter("numpy", (0.01, 0.1)),
        Parameter("layers", (3,)),
        Parameter("steps", (1, 2, 3)),
        Parameter("batch-size", (32,)),
        Parameter("dropout", low=0, high=0.5, step=0.1),
        Parameter("rate_2", low=1e-5, high=0.1, log=True),
        Parameter("units_2", low=32, high=256, is_integer=True, step=32, when=(Condition("layers", (3,)),)),
        Parameter("kind", ("a", "b"), when=(Condition("steps", (1, 2)), Condition("flag", (True,)))),
    )


def test_keras_tuners_parameters_are_a_space(tmp_path: Path) -> None:
    keras_tuner = pytest.importorskip("keras_tuner")
    space = keras_tuner.HyperParameters()
    space.Int("layers", 1, 3)
    space.Choice("activation", ["relu", "tanh"])
    with space.conditional_scope("layers", [2, 3]):
        space.Int("units_2", 16, 64, step=16)
    space.Float("lr", 1e-5, 0.1, sampling="log")
    space.Boolean("norm")
    space.Fixed("epochs", 3)
    path = tmp_path / "space.yaml"
    path.write_text(search_space.to_yaml(space))
    assert read_space(path) == (
        Parameter("layers", low=1, high=3, is_integer=True),
        Parameter("activation", ("relu", "tanh")),
        Parameter("units_2", low=16, high=64, is_integer=True, step=16, when=(Condition("layers", (2, 3)),)),
        Parameter("lr", low=1e-5, high=0.1, log=True),
        Parameter("norm", (False, True)),
        Parameter("epochs", (3,)),
    )
    space.Float("odd", 0.1, 0.9, sampling="reverse_log")
    with pytest.raises(BadInputError, match="'odd' of KerasTuner is Float with sampling reverse_log"):
        search_space.to_yaml(space)


def test_a_conditional_argument_needs_a_default() -> None:
    space = {"layers": [1, 2], "units": {"values": [8], "when": {"layers": 2}}}
    with pytest.raises(BadInputError, match="needs 'units', which not all trials have; give it a default"):
        tune(lambda layers, units: 0.0, space)


@pytest.mark.parametrize(
    ("space", "sentence"),
    [
        ({}, "The search space is empty"),
        ([0.1], "The search space is empty"),
        ({"lr": (0.1,)}, r"The range of 'lr' is \(0.1,\)"),
        ({"lr": (0.1, "high")}, "or a list to choose from"),
        ({"lr": (0.1, 0.2, "lag")}, r"write \(low, high\)"),
        ({"lr": (True, False)}, r"write \(low, high\)"),
        ({"lr": (0.1, 0.2, "stp=1")}, r"write \(low, high\)"),
        ({"lr": {"value": [1]}}, r"write \{'values': \[1, 2\]"),
        ({"lr": {"values": [1], "when": [2]}}, r"write \{'values': \[1, 2\]"),
        ({"lr": [0.1, None]}, "The parameter 'lr' takes numbers, booleans and text, not None"),
        ({"lr": [[0.1]]}, r"not \[0.1\]"),
        ({"lr": [float("nan")]}, "is nan; use finite numbers"),
    ],
)
def test_a_space_that_is_none(space: Any, sentence: str) -> None:
    with pytest.raises(BadInputError, match=sentence):
        tune(lambda **parameters: 0.0, space)


def test_a_grid_has_lists() -> None:
    with pytest.raises(BadInputError, match=r"A grid needs a list of values of 'lr', not \(0.1, 0.2\)"):
        grid_search(lambda lr: lr, {"lr": (0.1, 0.2)})


def test_every_option_is_one_of_the_command() -> None:
    from_python_otherwise = {
        *("context", "script", "module", "arguments", "param", "space", "param_style", "outputs_limit"),
        *("detach", "wait", "follow", "service", "token_file", "output_format"),
        *("priority", "time_limit", "after", "hold"),
    }
    hidden = set(inspect.signature(function_call).parameters)
    known = set(inspect.signature(command).parameters)
    assert known - hidden - from_python_otherwise == search_command.OPTIONS, "a new option is one of dike.tune, too"
    with pytest.raises(BadInputError, match=r"no option 'quantom'; did you mean 'quantum'\?"):
        tune(lambda lr: lr, {"lr": [1]}, quantom=3)


def test_options_that_are_given_several_times(monkeypatch: pytest.MonkeyPatch) -> None:
    echo = "import json, sys; print(json.dumps({'arguments': sys.argv[1:]}))"
    monkeypatch.setattr(search_command, "COMMAND", (sys.executable, "-c", echo))
    monkeypatch.setattr(search_command, "running_program", lambda: ("package/train.py", "package.train"))
    options = {"env": {"A": "1", "B": 2}, "volume": ["/data:ro", "/ref"], "constraint": "rack:IN:r1,r2", "name": None}
    search_command.check_options(options)
    arguments = search_command.search(print, "", options, ())["arguments"]
    asked = ["--env", "A=1", "--env", "B=2", "--volume", "/data:ro", "--volume", "/ref"]
    assert arguments[:12] == ["--format", "json", *asked, "--constraint", "rack:IN:r1,r2"]
    at = arguments.index("--")
    assert arguments[at - 2 : at] == ["-m", "package.train"]


def test_a_value_that_an_option_cannot_have_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(search_command, "running_program", lambda: ("train.py", ""))
    with pytest.raises(BadInputError, match="--quantum is 'long'; it must be a finite number"):
        search_command.search(print, "lr: [1]", {"quantum": "long"}, ())


def test_samplers_and_spaces_that_are_objects_travel_as_files(monkeypatch: pytest.MonkeyPatch) -> None:
    echo = "import json, sys; print(json.dumps({'arguments': sys.argv[1:]}))"
    monkeypatch.setattr(search_command, "COMMAND", (sys.executable, "-c", echo))
    monkeypatch.setattr(search_command, "running_program", lambda: ("train.py", ""))
    own = {"sampler": RandomSampler(seed=1), "metric": "loss", "mode": None}
    arguments = search_command.search(print, lambda trial: {}, own, ())["arguments"]
    assert arguments[arguments.index("--sampler") + 1] == "RandomSampler"
    assert {"--sampler-object", "--space-function"} < set(arguments)
    assert "--space" not in arguments
    # A resumed search has all of that in its database, but its lists may have got more values.
    resumed = search_command.search(print, "lr: [1]", {**own, "resume": "s"}, ())["arguments"]
    assert resumed[:5] == ["--format", "json", "--resume", "s", "--space"]
    assert len(resumed) == 6
    arguments = search_command.search(print, lambda trial: {}, {**own, "resume": "s"}, ())["arguments"]
    assert arguments == ["--format", "json", "--resume", "s"]
    with pytest.raises(BadInputError, match="The sampler cannot be sent to other processes"):
        search_command.search(print, "", {"sampler": threading.Lock()}, ())
    data = bytes(2**21)
    with pytest.raises(BadInputError, match=r"function given as the space, .* takes 2.0 MiB; the maximum is 1 MiB"):
        search_command.search(print, lambda trial: {"size": len(data)}, {}, ())


def test_a_process_knows_which_script_or_module_it_runs(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    for name in ("__init__.py", "__main__.py", "train.py"):
        (package / name).write_text("from dike.main_script import running_program\nprint(running_program())\n")
    (package / "__init__.py").write_text("")

    def told(*arguments: str, cwd: Path = tmp_path) -> object:
        path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=cwd, env={**os.environ, **path}, capture_output=True, text=True, check=True)
        return ast.literal_eval(done.stdout)

    assert told("package/train.py") == (str(package / "train.py"), "")
    assert told("-m", "package.train") == (str(package / "train.py"), "package.train")
    assert told("-m", "package") == (str(package / "__main__.py"), "package")
    # A module from elsewhere cannot travel with the working folder.
    assert told("-m", "package.train", cwd=package) is None
    assert told("-c", "import dike.main_script; print(dike.main_script.running_program())") is None


def test_a_job_does_not_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dike.task.current", lambda: object())
    with pytest.raises(BadInputError, match="cannot search inside a job of 'dike run'"):
        tune(lambda lr: lr, {"lr": [1]})


def takes_some(lr: float, *, batch_size: int = 8) -> None:
    """A function of two parameters."""


def takes_by_place(lr: float, /) -> None:
    """A function that cannot be called by name."""


def test_a_function_gets_the_parameters_it_takes() -> None:
    parameters = {"lr": 0.1, "batch-size": 32, "other": True}
    assert arguments_for(takes_some, {"lr": 0.1, "batch-size": 32}) == {"lr": 0.1, "batch_size": 32}
    assert arguments_for(lambda **every: every, parameters) == {"lr": 0.1, "batch_size": 32, "other": True}
    assert arguments_for(lambda: params(other=False), parameters) == {}
    with pytest.raises(BadInputError, match=r"takes no parameter 'batch_siz'; did you mean 'batch_size'\?"):
        arguments_for(takes_some, {"lr": 0.1, "batch_siz": 3})
    with pytest.raises(BadInputError, match=r"takes no parameter 'other'; it takes none\."):
        arguments_for(lambda: None, {"other": 1})
    with pytest.raises(BadInputError, match="needs 'lr', which the search space does not have"):
        arguments_for(takes_some, {"batch_size": 3})
    with pytest.raises(BadInputError, match="needs 'lr'"):
        arguments_for(takes_by_place, parameters)


def asks() -> Any:
    """A function that another one calls."""
    return params(other=False)


def test_a_function_that_asks_by_another_one_takes_any_parameter() -> None:
    def within(lr: float) -> Any:
        return lr, asks()

    assert arguments_for(within, {"lr": 0.1, "other": 1}) == {"lr": 0.1}
    assert arguments_for(lambda lr: within(lr), {"lr": 0.1, "other": 1}) == {"lr": 0.1}
    assert arguments_for(functools.partial(within), {"lr": 0.1, "other": 1}) == {"lr": 0.1}


def test_a_result_is_read() -> None:
    result = SearchResult.from_json(json.loads(json.dumps(RESULT)))
    assert (result.name, result.best_params, result.best_value) == ("first", {"lr": 0.1}, 0.5)
    assert result.trials[0] == result.best
    assert str(result.trials[1].loss) == "nan"
    assert result.trials[1].metrics == {"f1": float("inf")}


def test_figures_that_json_cannot_hold_come_back_as_they_were() -> None:
    record = TrialRecord(0, {}, loss=math.nan, value=math.inf, best_value=0.5, metrics={"f1": -math.inf, "a": 1.0})
    values = json.loads(json.dumps(record.to_json(), allow_nan=False))
    assert (values["loss"], values["value"], values["metrics"]) == (None, None, {"f1": None, "a": 1.0})
    assert values["not_finite"] == {"loss": "nan", "value": "inf", "metrics.f1": "-inf"}
    read = TrialResult.from_json(values, "/checkpoints")
    assert (str(read.loss), read.value, read.best_value, read.metrics) == (
        *("nan", math.inf, 0.5),
        {"f1": -math.inf, "a": 1.0},
    )
    view = TrialView.model_validate(record)
    assert view.not_finite == values["not_finite"]
    assert (view.loss, str(view.to_record().loss), view.to_record().metrics["f1"]) == (None, "nan", -math.inf)


TWO_CALLS = """
import dike
offset = 1.0  # the functions need not be importable, nor the script guarded

def second():
    def train(lr, units=3):
        dike.report(1, accuracy=0.5)
        BODY
    return dike.tune(train, {"lr": [first.best_params["lr"]]})

print("first call")
first = dike.tune(lambda lr: lr + offset, {"lr": [0.1, 0.2]})
print("second call", first.best_value)
try:
    second()
except Exception:
    print("swallowed")
print("never")
"""


def in_second_call(slot: SlotStage, folder: Path, body: str, **spec: Any) -> Any:
    values = {"call": 1, "parameters": {"lr": 0.1}, **spec}
    slot.write(EARLIER_RESULTS, json.dumps([RESULT]))
    return slot.run(slot.write("two.py", TWO_CALLS.replace("BODY", body)), trial(folder, **values))


def test_the_first_call_trains_and_ends_the_process(plain_slot: SlotStage, tmp_path: Path) -> None:
    script = plain_slot.write("two.py", TWO_CALLS.replace("BODY", "pass"))
    run = plain_slot.run(script, trial(tmp_path, call=0, parameters={"lr": 0.25}))
    assert (run.code, run.output) == (0, "first call\n")
    assert run.reports[-1] == {"type": "result", "value": 1.25, "values": {}, "best": 1.25, "best_step": 0}


@pytest.mark.parametrize(
    ("body", "spec", "last"),
    [
        ("return lr + units", {}, {"type": "result", "value": 3.1, "values": {}, "best": 3.1, "best_step": 1}),
        (
            "return {'f1': lr, 'loss': 2}",
            {"metric": "f1"},
            {"type": "result", "value": 0.1, "values": {"f1": 0.1, "loss": 2.0}, "best": 0.1, "best_step": 1},
        ),
    ],
)
def test_what_the_function_returns(
    plain_slot: SlotStage, tmp_path: Path, body: str, spec: dict[str, Any], last: dict[str, Any]
) -> None:
    run = in_second_call(plain_slot, tmp_path, body, **spec)
    assert run.code == 0
    assert run.output == "first call\nsecond call 0.5\n"
    assert run.reports[-1] == last


@pytest.mark.parametrize(
    ("body", "spec", "code", "message"),
    [
        ("raise ValueError('too deep')", {}, 1, "the script failed (ValueError: too deep)"),
        ("return 'good'", {}, 2, "The function given to dike.tune returned a str"),
        ("return {'f2': 1}", {"metric": "f1"}, 2, "does not report a metric 'f1', only accuracy, f2;"),
        ("return None", {}, 2, "The script has reported no training loss"),
        ("dike.tune(train, {'lr': [1]})", {}, 2, "called by the function that it was given"),
        ("pass", {"parameters": {}}, 2, "needs 'lr', which the search space does not have"),
    ],
)
def test_how_a_function_fails(
    plain_slot: SlotStage, tmp_path: Path, body: str, spec: dict[str, Any], code: int, message: str
) -> None:
    run = in_second_call(plain_slot, tmp_path, body, **spec)
    assert run.code == code
    assert message in run.reports[-1]["message"]
    assert "swallowed" not in run.output


def test_a_function_that_has_reported_its_objective_need_not_return_it(plain_slot: SlotStage, tmp_path: Path) -> None:
    run = in_second_call(plain_slot, tmp_path, "pass", metric="accuracy")
    assert run.code == 0
    assert run.reports[-1]["value"] == 0.5


def test_an_earlier_call_that_failed_fails_again(plain_slot: SlotStage, tmp_path: Path) -> None:
    source = """
import dike
from dike.exceptions import JobFailedError
try:
    dike.tune(print, {"lr": [0.1]})
except (JobFailedError, KeyboardInterrupt) as error:
    print(error)
dike.tune(lambda lr: lr, {"lr": [0.1]})
"""
    for error, said in (
        (JobFailedError("No trial has succeeded."), "No trial has succeeded."),
        (KeyboardInterrupt(), ""),
    ):
        plain_slot.write(EARLIER_RESULTS, json.dumps([search_command.outcome_of(error)]))
        spec = trial(tmp_path, call=1, parameters={"lr": 0.1})
        run = plain_slot.run(plain_slot.write("again.py", source), spec)
        assert (run.code, run.output) == (0, f"{said}\n")


@pytest.mark.parametrize(("end", "kind"), [("SIGKILL", JobFailedError), ("SIGINT", KeyboardInterrupt)])
def test_how_a_search_is_ended_from_outside(
    monkeypatch: pytest.MonkeyPatch, end: str, kind: type[BaseException]
) -> None:
    dies = f"import os, signal; signal.signal(signal.SIGINT, signal.SIG_DFL); os.kill(os.getpid(), signal.{end})"
    monkeypatch.setattr(search_command, "COMMAND", (sys.executable, "-c", dies))
    monkeypatch.setattr(tuning, "_outcomes", [])
    with pytest.raises(kind, match="--resume" if end == "SIGKILL" else None):
        tune(lambda x: x, {"x": [1]})
    assert [outcome["exit_code"] for outcome in tuning._outcomes] == [1 if end == "SIGKILL" else 130]


SEARCH = """
import sys
import dike
from dike.exceptions import BadInputError

def train(lr, steps=3, text=""):
    start = dike.checkpoint(lambda folder: None, lambda folder: None)
    for step in range(start + 1, steps + 1):
        dike.report(step, loss=lr / step)
    return lr * 2 + float(sys.argv[1])

options = dict(slots=1, slot_mem=256, slot_cpus=0.5, policy="fifo")
try:
    dike.grid_search(train, {"lr": [1]}, name="wrong", policy="fiffo")
except BadInputError as error:
    print(error)
found = dike.grid_search(train, {"lr": [0.3, 0.1, 0.2], "text": ["x" * 50_000]}, name="grid", **options)
best = found.best_params["lr"]
finer = dike.tune(train, {"lr": (best / 2, best)}, trials=2, name="finer", mode="max", **options)
print(found.complete, best, found.best_value, len(finer.trials))
print(all(best / 2 <= trial.parameters["lr"] <= best for trial in finer.trials))
print(finer.best_value == max(trial.value for trial in finer.trials))
"""


def run_search(folder: Path, source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a script that searches, to its end, which is a good one."""
    (folder / "search.py").write_text(source)
    done = subprocess.run(
        [sys.executable, "search.py", *arguments],
        cwd=folder,
        env={**dike_environment(), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.mesos
def test_the_space_of_the_documentation_is_a_function(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
    (example,) = (code for code in re.findall(r"(?ms)^```python\n(.*?)^```", text) if "def space(trial)" in code)
    done = run_search(tmp_path, example)
    lines = done.stdout.splitlines()
    assert len(lines) == 6
    assert all(("'sgd'" in line) == ("'momentum'" in line) for line in lines)
    assert {line.split()[1] for line in lines} <= {"finished", "stopped"}


@pytest.mark.mesos
def test_a_script_that_searches_twice(tmp_path: Path) -> None:
    done = run_search(tmp_path, SEARCH, "10")
    refusal, numbers, is_within, is_best = done.stdout.splitlines()
    assert "fiffo" in refusal
    assert numbers == "True 0.1 10.2 2"
    assert (is_within, is_best) == ("True", "True")


SPACE_FAILS = """
import dike
from dike.exceptions import BadInputError

def space(trial):
    lr = trial.suggest_float("lr", 0.1, 1.0)
    if trial.number == 2:
        raise ValueError("a rare branch")
    return {"lr": lr}

try:
    dike.tune(lambda lr: lr, space, trials=4, name="late", slots=1, slot_mem=256, trials_per_slot=1)
except BadInputError as error:
    print(error)
"""


@pytest.mark.mesos
def test_a_space_that_fails_late_takes_no_results_with_it(tmp_path: Path) -> None:
    done = run_search(tmp_path, SPACE_FAILS)
    assert "a rare branch" in done.stdout
    with contextlib.closing(Store(f"sqlite:///{tmp_path}/dike-runs/searches.db")) as store:
        store.open_search("late")
        finished = [trial for trial in store.load_trials() if trial.value is not None]
    assert len(finished) == 2, done.stderr
