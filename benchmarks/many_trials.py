"""Searches of many trials: what a trial costs that does nothing, and how long a database of 10,000 takes to read."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import optuna
import psutil

from benchmarks.search.slot import slot_environment
from dike.trial.spec import Value
from framework.search.optuna_study import MARK, open_storage
from framework.search.records import Parameter, SearchSpec, TrialRecord, TrialState
from framework.search.samplers import distribution_of
from framework.search.store import Store
from framework.service.search_page import search_page

TITLE = "Searches of many trials"
TRIALS = {"Dike": 2000, "Optuna": 2000, "Ray Tune": 100, "Ray Tune, `reuse_actors`": 300}
"""Fewer where a trial takes longer."""
STORED_TRIALS = 10_000
SLOTS = 2
RUNNERS = {
    "Dike": "a process, suspendable, with output, usage and limits of its own",
    "Optuna": "a call in a thread (`n_jobs=2`)",
    "Ray Tune": "an actor of its own",
    "Ray Tune, `reuse_actors`": "a call in an actor",
}
"""Name -> what a trial is there."""
SCRIPT = Path(__file__).parent / "search" / "scripts" / "trivial.py"
TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Cost:
    """Wall time of a whole search, and CPU seconds of the whole machine meanwhile."""

    seconds: float
    cpu_s: float


def measure() -> Iterator[str]:
    yield "## Trials of a function that returns a number"
    yield ""
    yield f"Random points of two ranges, {SLOTS} trials at once, results in SQLite (Dike, Optuna) or files (Ray Tune)."
    yield "From the start of the command to its end. The function is `(x - 1)**2 + y**2`."
    yield ""
    yield "| | a trial is | trials | search, s | a trial, s | CPU of the machine per trial, s |"
    yield "|---|---|---|---|---|---|"
    for name, words in RUNNERS.items():
        cost, trials = search_cost(name), TRIALS[name]
        yield (
            f"| {name} | {words} | {trials:,} | {cost.seconds:.0f} | {cost.seconds / trials:.3f} "
            f"| {cost.cpu_s / trials:.3f} |"
        )
    yield ""
    yield f"## A search of {STORED_TRIALS:,} trials in a database"
    yield ""
    yield "SQLite; each trial has two parameters and a value. The whole command, with the start of Python."
    yield ""
    yield "| command | s |"
    yield "|---|---|"
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder, "empty")
        empty.mkdir()
        _store(empty, 1)
        stored = Path(folder, "stored")
        stored.mkdir()
        _store(stored, STORED_TRIALS)
        yield f"| `dike trials`, one search of one trial | {_command_s(empty, 'trials'):.2f} |"
        for arguments in (("trials",), ("trials", "big"), ("trials", "big", "--format", "json"), ("timeline", "big")):
            yield f"| `dike {' '.join(arguments)}` | {_command_s(stored, *arguments):.2f} |"
        for words, where in (("1 trial", empty), (f"{STORED_TRIALS:,} trials", stored)):
            yield (
                f"| `dike tune --resume big`, complete with {words} "
                f"| {_command_s(where, 'tune', '--resume', 'big', '--private'):.2f} |"
            )
        yield ""
        yield "The answers that the page of such a search (`dike trials big --page`) waits for:"
        yield ""
        yield f"| answer | 1 trial, s | {STORED_TRIALS:,} trials, s | MiB |"
        yield "|---|---|---|---|"
        few, many = _page_costs(empty), _page_costs(stored)
        for path, (seconds, size) in many.items():
            yield f"| `{path}` | {few[path][0]:.3f} | {seconds:.2f} | {size / 2**20:.1f} |"


def search_cost(name: str) -> Cost:
    """Runs a whole search in a process of its own; `name` is one of `RUNNERS`."""
    with tempfile.TemporaryDirectory() as folder:
        before, begun_s = psutil.cpu_times(), time.monotonic()
        subprocess.run(
            [sys.executable, SCRIPT, str(TRIALS[name]), str(SLOTS)]
            if name == "Dike"
            else [sys.executable, "-m", "benchmarks.many_trials", name],
            cwd=folder,
            env={**os.environ, **slot_environment(), "PYTHONPATH": _python_path(), "DIKE_PRIVATE": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
            timeout=TIMEOUT_S,
        )
        after = psutil.cpu_times()
        return Cost(time.monotonic() - begun_s, after.user + after.system - before.user - before.system)


def _python_path() -> str:
    return os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", ""))))


def _command_s(folder: Path, *arguments: str) -> float:
    """Returns the least time of three runs of a `dike` command."""
    times_s = []
    for _ in range(3):
        begun_s = time.monotonic()
        command = [sys.executable, "-m", "framework", *arguments]
        environment = {**os.environ, "PYTHONPATH": _python_path()}
        subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, check=True, timeout=TIMEOUT_S)
        times_s.append(time.monotonic() - begun_s)
    return min(times_s)


def _page_costs(folder: Path) -> dict[str, tuple[float, int]]:
    """Route -> least seconds of three answers, and their size in bytes."""
    found = {}
    with search_page(_url(folder)) as address:
        server, _, token = address.partition("/#token=")
        headers = {"Authorization": f"Bearer {token}"}
        with httpx.Client(base_url=f"{server}/api/v1/", headers=headers, trust_env=False, timeout=60) as client:
            for part in ("", "/trials", "/slices", "/losses?limit=20", "/importance"):
                answers = [client.get(f"jobs/big{part}") for _ in range(3)]
                least_s = min(answer.elapsed.total_seconds() for answer in answers)
                found[f"jobs/big{part}"] = (least_s, len(answers[0].content))
    return found


def _url(folder: Path) -> str:
    """The database that `dike` uses in a folder."""
    return f"sqlite:///{folder}/dike-runs/searches.db"


def _store(folder: Path, trials: int) -> None:
    """Writes a finished search `big` to the database that `dike` uses in a folder."""
    (folder / "dike-runs").mkdir()
    (folder / "train.py").touch()
    url = _url(folder)
    space = (Parameter("x", low=-2.0, high=2.0), Parameter("y", low=-2.0, high=2.0))
    spec = SearchSpec("big", str(folder / "train.py"), (), {}, space, "random", trials, checkpoint_dir=str(folder))
    distributions = {one.name: distribution_of(one) for one in space}
    with contextlib.closing(Store(url)) as store:
        store.create_search(spec)
        storage = open_storage(url)
        study = optuna.create_study(storage=storage, study_name="big")
        study.set_user_attr(MARK, {})
        for number in range(trials):
            point: dict[str, Value] = {"x": number / trials, "y": -number / trials}
            store.save_trial(TrialRecord(number, point, TrialState.FINISHED, runs=1, step=1, value=float(number)))
            study.add_trial(
                optuna.trial.create_trial(params=dict(point), distributions=distributions, value=float(number))
            )
        store.finish_search()


def _train(x: float, y: float) -> float:
    return (x - 1) ** 2 + y**2


def _run_optuna() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(storage="sqlite:///optuna.db", sampler=optuna.samplers.RandomSampler())
    study.optimize(
        lambda trial: _train(trial.suggest_float("x", -2, 2), trial.suggest_float("y", -2, 2)),
        n_trials=TRIALS["Optuna"],
        n_jobs=SLOTS,
    )


def _run_ray(name: str) -> None:
    import ray
    from ray import tune

    ray.init(num_cpus=SLOTS, include_dashboard=False, log_to_driver=False, _temp_dir=os.path.abspath("ray"))
    results = tune.Tuner(
        tune.with_resources(lambda config: tune.report({"loss": _train(**config)}), {"cpu": 1}),
        param_space={"x": tune.uniform(-2, 2), "y": tune.uniform(-2, 2)},
        tune_config=tune.TuneConfig(
            metric="loss", mode="min", num_samples=TRIALS[name], reuse_actors=name != "Ray Tune"
        ),
        run_config=tune.RunConfig(storage_path=os.path.abspath("results"), verbose=0),
    ).fit()
    if results.errors:
        raise results.errors[0]


def main() -> None:
    match sys.argv[1]:
        case "Optuna":
            _run_optuna()
        case name:
            _run_ray(name)


if __name__ == "__main__":
    main()
