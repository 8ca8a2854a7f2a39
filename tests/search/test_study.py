"""The Optuna study of a search: samplers, how a second process continues it, what optuna-dashboard would show."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import importlib.util
import math
import pickle
import re
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState
from sqlalchemy import create_engine, text

from dike.exceptions import BadInputError
from dike.trial import pickled
from framework.search.importance import MAX_COMPARED, MIN_TRIALS, importances
from framework.search.optuna_study import Study
from framework.search.pruners import parse_stop
from framework.search.records import Condition, Parameter, SearchSpec, TrialRecord
from framework.search.records import TrialState as SearchTrialState
from framework.search.samplers import (
    check_sampler,
    default_sampler,
    describe_sampler,
    grid_size,
    learns,
    vary,
    write_object,
)
from framework.search.space import check_policy, extended

GRID = (Parameter("lr", (0.1, 0.03)), Parameter("optimizer", ("sgd", "adam", "lion")), Parameter("nesterov", (True,)))
RANGES = (
    Parameter("lr", low=1e-5, high=0.1, log=True),
    Parameter("units", low=2, high=64, is_integer=True, log=True),
    Parameter("layers", low=1, high=3, is_integer=True),
    Parameter("optimizer", ("sgd", "adam")),
    Parameter("nesterov", (True, False)),
)
NUMBERS = (Parameter("x", low=-1, high=1), Parameter("y", low=-1, high=1))


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/searches.db"


def spec_of(space: tuple[Parameter, ...], sampler: str, count: int, **changes: object) -> SearchSpec:
    spec = SearchSpec(
        name="s",
        script="/train.py",
        arguments=(),
        flags={},
        space=space,
        sampler=sampler,  # type: ignore[arg-type]
        trial_count=count,
    )
    return dataclasses.replace(spec, **changes)  # type: ignore[arg-type]


def load(url: str) -> optuna.Study:
    return optuna.load_study(study_name="s", storage=url)


def test_a_grid_is_tried_once_in_the_users_order(url: str) -> None:
    study = Study.create(url, spec_of(GRID, "grid", grid_size(GRID)))
    asked = [study.ask() for _ in range(study.remaining)]
    assert [number for number, _ in asked] == list(range(6))
    assert [tuple(parameters.values()) for _, parameters in asked] == [
        (lr, optimizer, True) for lr in (0.1, 0.03) for optimizer in ("sgd", "adam", "lion")
    ]
    assert list(asked[0][1]) == ["lr", "optimizer", "nesterov"]
    assert study.remaining == 0
    with pytest.raises(ValueError, match="asked for"):
        study.ask()


@pytest.mark.slow
def test_a_part_of_a_grid_has_points_from_all_over_it(url: str) -> None:
    space = (Parameter("a", low=1, high=1000, is_integer=True), Parameter("b", tuple(range(1000))))
    assert grid_size(space) == 10**6
    study = Study.create(url, spec_of(space, "grid", 20))
    points = [tuple(study.ask()[1].values()) for _ in range(20)]
    assert len(set(points)) == 20
    assert max(point[0] for point in points) > 500 > min(point[0] for point in points)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["random", "tpe", "grid"])
def test_a_second_process_continues_as_the_first_would_have(tmp_path: Path, sampler: str) -> None:
    space = GRID if sampler == "grid" else RANGES
    spec = spec_of(space, sampler, 6)
    whole = Study.create(f"sqlite:///{tmp_path}/whole.db", spec)
    parts = Study.create(f"sqlite:///{tmp_path}/parts.db", spec)
    expected, got = [], []
    for number in range(6):
        expected.append(whole.ask())
        whole.tell(number, 0.1 * number, failed=False)
        got.append(parts.ask())
        parts.tell(number, 0.1 * number, failed=False)
        if number in (1, 4):
            parts = Study.open(f"sqlite:///{tmp_path}/parts.db", spec)
    assert got == expected
    assert len({str(parameters) for _, parameters in got}) == 6
    assert parts.asked() == dict(expected)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_no_point_of_a_finite_space_comes_twice_before_all_have_come(tmp_path: Path, sampler: str) -> None:
    space = (Parameter("depth", low=1, high=4, is_integer=True), Parameter("kind", ("wide", "deep", True)))
    url = f"sqlite:///{tmp_path}/points.db"
    spec = spec_of(space, sampler, 14)
    study = Study.create(url, spec)
    asked = []
    for number in range(14):
        asked.append(study.ask())
        study.tell(number, 0.1 * number, failed=False)
        if number == 9:
            study = Study.open(url, spec)
    assert [number for number, _ in asked] == list(range(14))
    assert len({str(parameters) for _, parameters in asked[:12]}) == 12
    assert study.asked() == dict(asked)


def test_the_seed_changes_what_is_random(tmp_path: Path) -> None:
    asked = [
        Study.create(f"sqlite:///{tmp_path}/{seed}.db", spec_of(RANGES, "random", 1, seed=seed)).ask()
        for seed in (0, 1)
    ]
    assert asked[0] != asked[1]


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_ranges_are_kept_to_and_values_have_their_types(url: str, sampler: str) -> None:
    study = Study.create(url, spec_of(RANGES, sampler, 15))
    while study.remaining:
        number, parameters = study.ask()
        assert 1e-5 <= float(parameters["lr"]) <= 0.1
        assert parameters["units"] in range(2, 65)
        assert type(parameters["units"]) is int
        assert parameters["layers"] in (1, 2, 3)
        assert parameters["optimizer"] in ("sgd", "adam")
        assert type(parameters["nesterov"]) is bool
        study.tell(number, float(parameters["lr"]), failed=False)


@pytest.mark.slow
def test_tpe_looks_near_what_was_good(url: str) -> None:
    study = Study.create(url, spec_of((Parameter("x", low=0.0, high=1.0),), "tpe", 30))
    values = []
    while study.remaining:
        number, parameters = study.ask()
        values.append(float(parameters["x"]))
        study.tell(number, abs(values[-1] - 0.3), failed=False)
    late, early = values[-10:], values[:10]
    assert sum(abs(x - 0.3) for x in late) < sum(abs(x - 0.3) for x in early)


def test_a_trial_whose_asking_was_cut_short_gets_its_parameters(url: str) -> None:
    spec = spec_of(GRID, "grid", 6)
    study = Study.create(url, spec)
    study.ask()
    load(url).ask()  # as a process that was killed before the first parameter was written
    opened = Study.open(url, spec)
    assert opened.asked() == {
        0: {"lr": 0.1, "optimizer": "sgd", "nesterov": True},
        1: {"lr": 0.1, "optimizer": "adam", "nesterov": True},
    }
    assert opened.remaining == 4
    assert opened.ask() == (2, {"lr": 0.1, "optimizer": "lion", "nesterov": True})


@pytest.mark.slow
def test_optuna_shows_how_the_trials_stand(url: str) -> None:
    study = Study.create(url, spec_of(GRID, "grid", 6, mode="max"))
    for _ in range(5):
        study.ask()
    study.report(0, 10, 0.5)
    study.annotate(0, {"state": "suspended", "checkpoint": "/a"})
    study.tell(0, 0.75, failed=False, attributes={"checkpoint": "/b"})
    study.tell(0, 0.1, failed=True)
    study.tell(1, math.nan, failed=False)
    study.tell(2, None, failed=True, attributes={"error": "ValueError"})
    study.tell(3, math.inf, failed=False)
    trials = load(url).trials
    assert [trial.state for trial in trials] == [
        TrialState.COMPLETE,
        TrialState.FAIL,
        TrialState.FAIL,
        TrialState.COMPLETE,
        TrialState.RUNNING,
    ]
    assert (trials[0].value, trials[0].intermediate_values) == (0.75, {10: 0.5})
    assert trials[0].user_attrs == {"state": "suspended", "checkpoint": "/b"}
    assert trials[0].params == {"lr": 0.1, "optimizer": "sgd", "nesterov": True}
    assert trials[1].user_attrs == {"objective": "nan"}
    assert trials[2].user_attrs == {"error": "ValueError"}
    assert trials[3].value == math.inf
    assert load(url).direction == optuna.study.StudyDirection.MAXIMIZE


def test_intermediate_values_are_thinned_and_continue_after_a_restart(url: str) -> None:
    spec = spec_of(GRID, "grid", 6)
    study = Study.create(url, spec)
    study.ask()
    for step in range(0, 50_000, 10):
        study.report(0, step, 1 / (step + 1))
    study = Study.open(url, spec)
    for step in range(40_000, 100_000, 10):
        study.report(0, step, math.nan if step > 90_000 else 0.5)
    steps = sorted(load(url).trials[0].intermediate_values)
    assert 30 <= len(steps) <= 100
    assert steps[:3] == [0, 10, 20]
    assert steps[-1] > 80_000


def test_a_study_that_is_not_dikes_is_left_alone(url: str) -> None:
    foreign = optuna.create_study(study_name="s", storage=url)
    foreign.ask()
    spec = spec_of(GRID, "grid", 6)
    for make in (Study.create, Study.open):
        with pytest.raises(BadInputError, match=r"not Dike's; choose another --name"):
            make(url, spec)


@pytest.mark.slow
def test_create_refuses_a_name_that_is_taken_and_open_makes_what_is_missing(url: str) -> None:
    spec = spec_of(GRID, "grid", 6)
    assert Study.open(url, spec).remaining == 6
    Study.create(url, spec).ask()
    with pytest.raises(BadInputError, match="choose another --name"):
        Study.create(url, spec)


@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_parameter_that_decides_is_the_most_important(mode: str) -> None:
    spec = spec_of(RANGES, "random", 40, mode=mode)
    trials = []
    for number in range(40):
        at = number / 39
        parameters = {"lr": 10 ** (-5 + 4 * at), "units": 2 + number, "layers": 1 + number % 3, "new": number % 2}
        state = SearchTrialState.FINISHED if number else SearchTrialState.FAILED
        trials.append(TrialRecord(number, {**parameters, "optimizer": "sgd"}, state=state, value=(at - 0.5) ** 2))
    # A parameter that the space does not name counts, and one that not all trials have does not.
    trials[1].parameters["nesterov"] = True
    found = importances(spec, trials)
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert set(found) == {"lr", "units", "layers", "new", "optimizer"}
    assert found["lr"] > found["new"]
    assert found["optimizer"] < 0.1
    assert sum(found.values()) == pytest.approx(1)
    assert importances(spec, trials[:MIN_TRIALS]) == {}


def test_of_very_many_trials_some_are_compared(capfd: pytest.CaptureFixture[str]) -> None:
    spec = spec_of(RANGES, "random", 40)
    count = 2 * MAX_COMPARED
    trials = [
        TrialRecord(number, {"lr": 10 ** (-5 + 4 * number / count), "units": 2 + number % 7}, SearchTrialState.FINISHED)
        for number in range(count)
    ]
    for trial in trials:
        trial.value = (trial.number / count - 0.5) ** 2
    found = importances(spec, trials)
    assert found == importances(spec, trials)
    assert found["lr"] > 0.9
    # Optuna announces its studies.
    assert capfd.readouterr() == ("", "")


def test_the_sampler_follows_from_the_space() -> None:
    assert default_sampler(GRID, None, "dike") == "grid"
    assert default_sampler(GRID, 3, "dike") == "grid"
    assert default_sampler(GRID, 6, "dike") == "grid"
    assert default_sampler(GRID, 7, "dike") == "tpe"
    assert default_sampler(RANGES, None, "dike") == "tpe"
    assert default_sampler(RANGES, None, "pbt") == "random"
    with pytest.raises(BadInputError, match="'lr' is a range"):
        grid_size(RANGES)
    assert grid_size((Parameter("n", low=2, high=8, is_integer=True), *GRID)) == 42


def test_a_sampler_that_there_is_not_names_the_nearest() -> None:
    for name, said in (("nsga2", "did you mean nsgaii"), ("TPESampler", "did you mean tpe"), ("x", "there are brute")):
        with pytest.raises(BadInputError, match=said):
            check_sampler(name)


def test_a_package_that_a_sampler_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInputError, match="needs scipy and torch, not installed here; pip install scipy torch"):
        check_sampler("gp")


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["bruteforce", "cmaes", "nsgaii", "nsgaiii", "qmc"])
def test_any_sampler_of_optuna_gives_points(url: str, sampler: str) -> None:
    space = RANGES[1:4] if sampler == "bruteforce" else RANGES
    spec = spec_of(space, sampler, 8)
    if importlib.util.find_spec("scipy") is None and sampler == "qmc":
        pytest.skip("qmc needs scipy")
    check_sampler(sampler)
    study = Study.create(url, spec)
    points = set()
    while study.remaining:
        number, parameters = study.ask()
        points.add(tuple(parameters.values()))
        study.tell(number, float(parameters["units"]), failed=False)
        if number == 4:
            study = Study.open(url, spec)
    assert len(points) == 8


def test_which_samplers_learn_and_what_they_say_of_their_beginning() -> None:
    assert {name: learns(spec_of(GRID, name, 6)) for name in ("grid", "random", "bruteforce", "tpe", "nsgaii")} == {
        "grid": False,
        "random": False,
        "bruteforce": False,
        "tpe": True,
        "nsgaii": True,
    }
    assert describe_sampler(spec_of(RANGES, "random", 20)) == "sampler random"
    assert describe_sampler(spec_of(RANGES, "tpe", 20)) == "sampler tpe (the first 10 trials are random points)"
    assert describe_sampler(spec_of(RANGES, "cmaes", 20)) == "sampler cmaes (the first trial is a random point)"
    few = describe_sampler(spec_of(RANGES, "nsgaii", 20))
    assert few == "sampler nsgaii (all trials are random points: it learns after the first 50)"


def test_a_sampler_of_the_users_own_continues_with_other_points(url: str) -> None:
    own = optuna.samplers.TPESampler(n_startup_trials=3, multivariate=True, seed=1)
    spec = spec_of(
        RANGES, "TPESampler", 6, sampler_object=write_object(pickled.dumps(own, "sampler", 10**6), "sampler", "")
    )
    assert learns(spec)
    assert describe_sampler(spec) == "sampler TPESampler (the first 3 trials are random points)"
    study = Study.create(url, spec)
    points = [study.ask()[1]["lr"] for _ in range(2)]
    study = Study.open(url, spec)
    points += [study.ask()[1]["lr"] for _ in range(2)]
    assert len(set(points)) == 4


def six_points(trial: optuna.Trial) -> dict[str, object]:
    kind = trial.suggest_categorical("kind", ["a", "b"])
    return (
        {"kind": kind, "n": trial.suggest_int("n", 1, 4)}
        if kind == "a"
        else {"kind": kind, "on": trial.suggest_int("on", 0, 1)}
    )


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize("is_told", [False, True])
@pytest.mark.parametrize("kind", ["bruteforce", "BruteForceSampler", "GridSampler"])
def test_a_sampler_that_has_no_more_points_ends_the_asking(url: str, kind: str, *, is_told: bool) -> None:
    grid = {"lr": [0.1, 0.03], "optimizer": ["sgd", "adam", "lion"], "nesterov": [True]}
    own = {
        "BruteForceSampler": optuna.samplers.BruteForceSampler,
        "GridSampler": lambda: optuna.samplers.GridSampler(grid),
    }
    changes = {}
    if kind in own:
        changes["sampler_object"] = write_object(pickled.dumps(own[kind](), "sampler", 10**6), "sampler", "")
    if kind != "GridSampler":
        changes["space_function"] = write_object(pickled.dumps(six_points, "space", 10**6), "space", "")
    spec = spec_of(() if "space_function" in changes else GRID, kind, 20, **changes)
    study = Study.create(url, spec)
    points = []
    while study.remaining:
        number, point = study.ask()
        points.append(str(point))
        if is_told:
            study.tell(number, 1.0, failed=False)
        if number == 2:
            study = Study.open(url, spec)
    assert len(points) == len(set(points)) == 6
    assert Study.open(url, spec).remaining == 0


class FakeSampler(optuna.samplers.RandomSampler):
    def after_trial(self, *_: object) -> None:
        raise RuntimeError("after_trial")


def test_a_sampler_that_fails_at_the_end_of_a_trial_does_not_fail_there_again(url: str) -> None:
    own = write_object(pickled.dumps(FakeSampler(), "sampler", 10**6), "sampler", "")
    study = Study.create(url, spec_of(GRID, "FakeSampler", 6, sampler_object=own))
    number, _ = study.ask()
    with pytest.raises(BadInputError, match=r"sampler FakeSampler failed .*after_trial"):
        study.tell(number, 1.0, failed=False)
    study.tell(number, 1.0, failed=False)
    assert load(url).trials[0].value == 1.0


def depths(trial: optuna.Trial) -> dict[str, float]:
    depth = trial.suggest_int("depth", 1, 2)
    units = {f"units{layer}": 2 ** trial.suggest_int(f"log_units{layer}", 2, 4) for layer in range(depth)}
    return {"depth": depth, **units}


def function_space(space: object, **changes: object) -> SearchSpec:
    return spec_of(
        (), "tpe", 6, space_function=write_object(pickled.dumps(space, "space", 10**6), "space", ""), **changes
    )


def test_a_function_says_which_parameters_a_trial_has(url: str) -> None:
    study = Study.create(url, function_space(depths))
    points = [study.ask()[1] for _ in range(6)]
    assert {tuple(point) for point in points} == {("depth", "units0"), ("depth", "units0", "units1")}
    assert {value for point in points for name, value in point.items() if name != "depth"} <= {4, 8, 16}
    # The process was killed before it had written the last one down.
    assert Study.open(url, function_space(depths)).asked() == dict(enumerate(points))


@pytest.mark.parametrize(
    ("space", "said"),
    [
        (lambda trial: trial.suggest_float("lr", 0, 1), "returned 0.*it returns a dictionary"),
        (lambda trial: {"lr": [1, 2]}, "'lr' takes numbers"),
        (lambda trial: {"lr": trial.suggest("lr")}, r"failed \(test_study.py, line \d+: AttributeError"),
    ],
)
def test_a_function_that_says_no_parameters(url: str, space: object, said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        Study.create(url, function_space(space)).ask()


def test_what_cannot_be_read_back_is_said(url: str) -> None:
    with pytest.raises(BadInputError, match=r"The sampler cannot be read back .*; it needs the same Python"):
        Study.create(url, spec_of(RANGES, "own", 3, sampler_object=write_object(b"cos\nnothing\n.", "sampler", "")))


class Marking:
    """What writes a file when it is read back."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("field", ["sampler_object", "space_function"])
def test_an_object_that_another_account_has_stored_is_not_read_back(
    url: str, field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = tmp_path / "ran"
    what = {"sampler_object": "sampler", "space_function": "space"}[field]
    data = pickle.dumps(Marking(ran))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "other"))
    signed_by_another = write_object(data, what, "")
    monkeypatch.undo()
    own = write_object(data, what, "")
    unsigned = base64.b85encode(data).decode()
    other_use = write_object(data, {"sampler": "space", "space": "sampler"}[what], "")
    other_folder = write_object(data, what, "/elsewhere")
    changed = own.partition(":")[0] + ":" + base64.b85encode(data + b" ").decode()
    for kept in (signed_by_another, unsigned, other_use, other_folder, changed, f":{unsigned}", "ä:ä", "x"):
        spec = spec_of(GRID, "tpe", 6, **{field: kept})
        with pytest.raises(BadInputError, match=rf"^The {what} of search 's' .* does not load it; start a new search"):
            Study.open(url, spec)
    assert not ran.exists()
    key = tmp_path / "other" / "dike" / "signing-key"
    assert key.stat().st_mode & 0o777 == 0o600
    # The account's own is.
    with contextlib.suppress(BadInputError):  # Nothing is no sampler.
        Study.open(url, spec_of(GRID, "tpe", 6, **{field: own}))
    assert ran.exists()


def test_a_key_that_others_may_read_signs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    write_object(b"", "sampler", "")
    (tmp_path / "dike" / "signing-key").chmod(0o644)
    with pytest.raises(BadInputError, match="Others may read the signing key"):
        write_object(b"", "sampler", "")
    (tmp_path / "dike" / "signing-key").chmod(0o600)
    (tmp_path / "dike" / "signing-key").write_text("short")
    with pytest.raises(BadInputError, match="holds no key"):
        write_object(b"", "sampler", "")


@pytest.mark.parametrize("given", ["cmaes", "object"])
def test_the_state_of_cma_es_in_the_database_is_read_if_it_is_this_accounts(
    url: str, given: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("cmaes")
    ran = tmp_path / "ran"
    own = optuna.samplers.CmaEsSampler(n_startup_trials=1, popsize=4, seed=0)
    changes = {"sampler_object": write_object(pickled.dumps(own, "sampler", 10**6), "sampler", "")}
    spec = spec_of(NUMBERS, given, 40, **(changes if given == "object" else {}))
    study = Study.create(url, spec)
    for _ in range(15):
        number, point = study.ask()
        study.tell(number, float(point["x"]) ** 2 + float(point["y"]) ** 2, failed=False)
    assert "starts anew" not in caplog.text
    engine = create_engine(url)
    with engine.begin() as connection:
        kept = "SELECT count(*) FROM trial_system_attributes WHERE key LIKE 'cma:optimizer:%'"
        assert connection.execute(text(kept)).scalar()
        poison = f'"{pickle.dumps(Marking(ran)).hex()}"'
        change = text("UPDATE trial_system_attributes SET value_json = :value WHERE key LIKE 'cma:optimizer:%'")
        connection.execute(change, {"value": poison})
    engine.dispose()
    study = Study.open(url, spec)
    number, _ = study.ask()
    study.tell(number, 1.0, failed=False)
    assert not ran.exists()
    assert "another account wrote the sampler's state in the database" in caplog.text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ahsa", "did you mean asha"),
        ("hyper", "write asha, asha=N, median"),
        ("median=3", "takes no number"),
        ("patience", "whole number of reports"),
        ("patience=0", "whole number of reports"),
        ("asha=1.5", "whole number of reports"),
        ("threshold", "needs a number"),
        ("threshold=nan", "needs a number"),
    ],
)
def test_rules_for_stopping_that_are_none(text: str, said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        parse_stop(text)


def judged(study: Study, *curves: list[float]) -> list[int | None]:
    """Trains one trial after the other; after how many values each is stopped, None for at its end."""
    stopped: list[int | None] = []
    for values in curves:
        number, _ = study.ask()
        after = next((at for at, value in enumerate(values, 1) if study.judge(number, at, value)), None)
        study.tell(number, values[(after or 0) - 1], failed=False, stopped=after is not None)
        stopped.append(after)
    return stopped


def test_patience_counts_values_without_a_better_one(url: str) -> None:
    study = Study.create(url, spec_of(GRID, "grid", 6, stop="patience=3"))
    assert judged(study, [5, 4, 3, 3.5, 3.5, 2.5, 2.6, 2.7, 2.8, 2.9], [math.nan, 1, 2, 3]) == [9, None]
    assert [trial.state for trial in load(url).trials] == [TrialState.PRUNED, TrialState.COMPLETE]
    assert load(url).trials[0].value == 2.8
    assert load(url).best_trial.number == 1


@pytest.mark.parametrize(
    ("values", "after"),
    [
        ([1.0] * 20, 4),  # no improvement
        ([1.0, *[math.nan] * 20], 4),
        ([math.nan] * 20, 3),
        ([math.nan, math.nan, 5.0, 6.0, 4.0, 4.0, 4.0, 4.0], 8),
        ([math.inf, math.inf, math.inf, math.inf], 4),
    ],
)
@pytest.mark.filterwarnings("error")
def test_patience_ends_with_what_is_no_better(url: str, values: list[float], after: int) -> None:
    assert judged(Study.create(url, spec_of(GRID, "grid", 6, stop="patience=3")), values) == [after]


def test_patience_does_not_count_from_a_best_value_that_another_process_may_have_bettered(url: str) -> None:
    spec = spec_of(GRID, "grid", 6, stop="patience=10")
    study = Study.create(url, spec)
    number, _ = study.ask()
    assert not any(study.judge(number, at, 1 / at) for at in range(1, 200))
    study = Study.open(url, spec)
    assert [study.judge(number, at, 1.0) for at in range(200, 220)].index(True) == 9


@pytest.mark.filterwarnings("error")
def test_what_is_nan_alone_is_below_the_median(url: str) -> None:
    study = Study.create(url, spec_of(GRID, "random", 9, stop="median"))
    assert judged(study, *[[1.0]] * 5, [math.nan, math.nan]) == [None] * 5 + [1]


def test_patience_outlives_the_process(url: str) -> None:
    spec = spec_of(GRID, "grid", 6, stop="patience=6", mode="max")
    study = Study.create(url, spec)
    number, _ = study.ask()
    assert not any(study.judge(number, at, value) for at, value in enumerate([0.1, 0.9, *[0.5] * 5], 1))
    study = Study.open(url, spec)
    # One that the study itself does not keep.
    assert study.judge(number, 8, 0.6)
    assert load(url).trials[0].last_step == 7


def test_a_threshold_is_the_worst_that_is_borne(url: str) -> None:
    study = Study.create(url, spec_of(GRID, "grid", 6, stop="threshold=2"))
    assert judged(study, [1, 2, 1], [1, 3, 1], [math.nan]) == [None, 2, 1]
    assert load(url).trials[2].state is TrialState.PRUNED
    assert load(url).trials[2].value is None


def test_the_worse_half_is_stopped_when_enough_have_finished(url: str) -> None:
    study = Study.create(url, spec_of(GRID, "random", 9, stop="median"))
    good = [[3.0 - 0.1 * number, 2, 1] for number in range(5)]
    assert judged(study, *good, [4, 3, 2], [1, 1, 1]) == [None] * 5 + [1, None]


def test_asha_keeps_a_quarter_at_each_rung(url: str) -> None:
    study = Study.create(url, spec_of(GRID, "random", 9, stop="asha=2"))
    curves = [[5, value, value, value, value, value, value, value, value] for value in (1.0, 2.0, 0.5, 3.0)]
    assert judged(study, *curves) == [None, 2, None, 2]


CONDITIONAL = (
    Parameter("layers", (1, 2, 3)),
    Parameter("units_2", low=16, high=48, is_integer=True, step=16, when=(Condition("layers", (2, 3)),)),
    Parameter("units_3", (8, 9), when=(Condition("layers", (3,)), Condition("units_2", (16,)))),
)


def test_a_parameter_with_a_condition_is_in_some_trials_only(url: str) -> None:
    study = Study.create(url, spec_of(CONDITIONAL, "tpe", 30))
    for _ in range(8):
        number, point = study.ask()
        assert ("units_2" in point) == (point["layers"] > 1)
        assert ("units_3" in point) == (point["layers"] == 3 and point.get("units_2") == 16)
        study.tell(number, float(point["layers"]), failed=False)


def test_a_grid_with_conditions_has_each_point_once(url: str) -> None:
    assert grid_size(CONDITIONAL) == 8
    study = Study.create(url, spec_of(CONDITIONAL, "grid", 8))
    points = [study.ask()[1] for _ in range(3)]
    study.close()
    study = Study.open(url, spec_of(CONDITIONAL, "grid", 8))
    points += [study.ask()[1] for _ in range(5)]
    assert points == [
        {"layers": 1},
        *({"layers": 2, "units_2": units} for units in (16, 32, 48)),
        *({"layers": 3, "units_2": 16, "units_3": units} for units in (8, 9)),
        *({"layers": 3, "units_2": units} for units in (32, 48)),
    ]
    assert not study.remaining


def test_random_points_of_a_conditional_space_do_not_repeat(url: str) -> None:
    study = Study.create(url, spec_of(CONDITIONAL, "random", 8))
    points = [tuple(study.ask()[1].items()) for _ in range(8)]
    assert len(set(points)) == 8


def test_a_range_with_steps_has_a_grid(url: str) -> None:
    study = Study.create(url, spec_of((Parameter("drop", low=0.0, high=0.5, step=0.1),), "grid", 6))
    assert [study.ask()[1]["drop"] for _ in range(6)] == [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]


def test_a_complete_search_continues_with_more_trials(url: str) -> None:
    study = Study.create(url, spec_of(RANGES, "tpe", 2))
    for _ in range(2):
        study.tell(study.ask()[0], 1.0, failed=False)
    assert not study.remaining
    study.close()
    longer = extended(spec_of(RANGES, "tpe", 2), 3, ())
    study = Study.open(url, longer)
    assert [study.ask()[0] for _ in range(3)] == [2, 3, 4]
    assert not study.remaining


@pytest.mark.parametrize("sampler", ["grid", "bruteforce", "tpe"])
def test_lists_get_more_values(url: str, sampler: str) -> None:
    space = (Parameter("lr", (0.1, 0.2)), Parameter("kind", ("a", True)))
    spec = spec_of(space, sampler, 4)
    study = Study.create(url, spec)
    before = []
    for _ in range(4):
        number, point = study.ask()
        study.tell(number, 1.0, failed=False)
        before.append(point)
    study.close()
    longer = extended(spec, None if sampler == "grid" else 2, (Parameter("lr", (0.2, 0.3)),))
    assert longer.trial_count == 6
    study = Study.open(url, longer)
    assert list(study.asked().values()) == before
    after = [study.ask()[1] for _ in range(2)]
    if sampler != "tpe":
        assert sorted(map(str, after)) == sorted(map(str, ({"lr": 0.3, "kind": "a"}, {"lr": 0.3, "kind": True})))


@pytest.mark.parametrize(
    ("trials", "space", "sentence"),
    [
        (5, (), "has a trial for each of the 6 points of its grid; add values with --param lr=..."),
        (None, (Parameter("lrr", (1,)),), "has no parameter 'lrr'; did you mean 'lr'?"),
        (None, (Parameter("lr", low=0, high=1),), "'lr' of the search 's' keeps its range"),
    ],
)
def test_what_a_search_cannot_get(trials: int | None, space: tuple[Parameter, ...], sentence: str) -> None:
    with pytest.raises(BadInputError) as caught:
        extended(spec_of(GRID, "grid", 6), trials, space)
    assert sentence in str(caught.value)


def test_only_the_parameters_that_may_change_vary_and_stay_in_their_range() -> None:
    space = (*RANGES, Parameter("dropout", low=0.0, high=0.5, step=0.1), Parameter("size", choices=(8, 16, 32, 64)))
    mutate = ("lr", "layers", "dropout", "size")
    spec = SearchSpec("s", "train.py", (), {}, space, "random", 4, policy="pbt", mutate=mutate)
    before = {"lr": 0.01, "units": 8, "layers": 2, "optimizer": "adam", "nesterov": True, "dropout": 0.2, "size": 16}
    seen: dict[str, set[object]] = {name: set() for name in before}
    for number in range(400):
        varied = vary(spec, before, str(number))
        assert varied == vary(spec, before, str(number))
        for name, value in varied.items():
            seen[name].add(value)
            assert type(value) is type(before[name])
    assert {name: seen[name] for name in ("units", "optimizer", "nesterov")} == {
        "units": {8},
        "optimizer": {"adam"},
        "nesterov": {True},
    }
    assert {0.008, 0.012} < seen["lr"]
    assert all(1e-5 <= value <= 0.1 for value in seen["lr"])
    assert seen["layers"] == {1, 2, 3}
    assert seen["dropout"] == {0.0, 0.1, 0.2, 0.3, 0.4, 0.5}
    assert seen["size"] == {8, 16, 32, 64}
    edge = {vary(spec, {"lr": 0.1, "size": 64}, str(number))["size"] for number in range(50)}
    assert {32, 64} <= edge


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": "fifo"}, "--mutate is for --policy pbt; 'fifo' changes no parameters"),
        ({"mutate": ()}, "needs the parameters that may change while a trial trains: --mutate lr"),
        ({"mutate": ("lrr",)}, "--mutate 'lrr' is not a parameter of the search; did you mean 'lr'?"),
        ({"stop": "median"}, "leave out --stop"),
        ({"sampler": "tpe"}, "before the sampler tpe could learn"),
        ({"space": (), "space_function": "x"}, "a function of Optuna has none"),
    ],
)
def test_options_that_population_based_training_cannot_use(changes: dict[str, object], message: str) -> None:
    spec = SearchSpec("s", "train.py", (), {}, RANGES, "random", 4, policy="pbt", mutate=("lr",))
    check_policy(spec)
    with pytest.raises(BadInputError, match=re.escape(message)):
        check_policy(dataclasses.replace(spec, **changes))


def test_known_trials_are_not_read_again(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SearchSpec("s", "train.py", (), {}, RANGES, "random", 5)
    study = Study.create(url, spec)
    points = dict(study.ask() for _ in range(3))
    study.tell(0, 1.0, failed=False)
    opened = Study.open(url, spec)
    read: list[int] = []
    frozen = opened._frozen
    monkeypatch.setattr(opened, "_frozen", lambda number: read.append(number) or frozen(number))
    assert opened.asked({0, 1}) == {2: points[2]}
    opened.tell(0, 2.0, failed=False)
    opened.tell(1, 3.0, failed=False)
    assert read == [2]
    assert [trial.value for trial in optuna.load_study(study_name="s", storage=url).trials] == [1.0, 3.0, None]
    opened.tell(1, 4.0, failed=False)
    assert optuna.load_study(study_name="s", storage=url).trials[1].value == 3.0
