"""A trial that resumes from any checkpoint trains on as if nothing had happened, for each kind of input."""

from __future__ import annotations

import concurrent.futures
import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.warm import WarmTensorFlow

pytestmark = pytest.mark.tensorflow

_PROGRAM = Path(__file__).parent / "resume_matrix.py"
# Those around the end of an epoch among them: the number of batches is known only then.
_POINTS = {
    "filtered": [3, 4],
    "from_generator": [4, 9],
    "generator_of_batches": [4, 10],
    "generator_shuffles": [1, 6],
    "generator_draws-unseeded": [2],
    "function_counts": [5],
    "more_steps_unknown": [3, 7],
    "fewer_steps_unknown": [4],
    "repeated_twice": [7, 16],
    "cached_order-unseeded": [4],
    "python_generator_once": [4],
    "py_dataset_workers": [1, 6],
    "several_fits": [5, 9],
    "several_steps_unknown": [6],
    "generator_draws-job": [4],
    "validated_shuffled-job": [2, 5],
}
_PARTS = 2
"""Processes that play the whole matrix."""


def _play(folder: Path, *part: str) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_NUM_INTRAOP_THREADS": "1",
        # The servers of a job are in the chief's process, and wait for each other.
        "TF_NUM_INTEROP_THREADS": "8",
    }
    command: list[str | Path] = [sys.executable, _PROGRAM, folder, *part]
    process = warm.run(command, env=environment, timeout=7200, process_class=WarmTensorFlow)
    assert process.returncode == 0, process.stderr


def _differences(kind: str, runs: dict[str, Any]) -> list[str]:
    """What is wrong with a kind's runs, one line each."""
    plain = runs["plain"]["lines"]
    # Nothing that Dike does makes a script the same twice that gives no seed, and jobs observe their data as well.
    first = ("plain", "saving") if kind.endswith(("-unseeded", "-job")) else ("bare", "plain", "saving")
    found = [f"{kind}, {name}: {runs[name]['output']}" for name in first if runs[name]["code"]]
    found += [f"{kind}: {name} is not plain" for name in first if runs[name]["lines"] != plain]
    for run in runs["resumed"]:
        # The results of a `fit` that had returned are there once more.
        expected = [line for line in plain[: run["before"]] if line.startswith("fit ")] + plain[run["before"] :]
        lines = run["lines"]
        if run["workers"] > 1:
            lines, expected = ([line for line in each if line.startswith("data ")] for each in (lines, expected))
        if run["code"] or lines != expected:
            found.append(f"{kind}, {run['name']} (line {run['before']}), {run['output']}")
    return found


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("matrix")
    (folder / "plays.json").write_text(json.dumps(_POINTS))
    _play(folder)
    return functools.cache(lambda kind: json.loads((folder / f"{kind}.json").read_text()))


@pytest.mark.parametrize("kind", list(_POINTS))
def test_a_trial_resumed_anywhere_trains_as_without_dike_or_interruption(recorded: Any, kind: str) -> None:
    runs = recorded(kind)

    assert len(runs["resumed"]) == len(_POINTS[kind])
    assert _differences(kind, runs) == []


@pytest.mark.timeout(7200)
def test_the_whole_matrix(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--hypothesis-profile") != "thorough":
        pytest.skip("'make test-thorough' plays it")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(lambda part: _play(tmp_path, str(part), str(_PARTS)), range(_PARTS)))

    recorded = sorted(path for path in tmp_path.glob("*.json"))
    assert len(recorded) > 100
    assert [line for path in recorded for line in _differences(path.stem, json.loads(path.read_text()))] == []
