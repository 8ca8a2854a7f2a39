"""A trial that resumes from any checkpoint trains on as if nothing had happened, for each kind of input."""

from __future__ import annotations

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
# The number of batches in an epoch is known only at its end; 3 and 4 are the checkpoints around the first epoch's end.
_POINTS = {
    "filtered": [3, 4, 11],
    "from_generator": [4, 9, 14],
    "generator_of_batches": [4, 8, 10],
}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("matrix")
    (folder / "plays.json").write_text(json.dumps(_POINTS))
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_NUM_INTRAOP_THREADS": "1",
    }
    process = warm.run([sys.executable, _PROGRAM, folder], env=environment, timeout=500, process_class=WarmTensorFlow)
    assert process.returncode == 0, process.stderr
    return functools.cache(lambda kind: json.loads((folder / f"{kind}.json").read_text()))


@pytest.mark.parametrize("kind", list(_POINTS))
def test_a_trial_is_what_it_is_without_dike_and_saving_changes_nothing(played: Any, kind: str) -> None:
    runs = played(kind)

    assert [runs[name]["code"] for name in ("bare", "plain", "saving")] == [0, 0, 0], runs
    assert runs["plain"]["lines"] == runs["bare"]["lines"]
    assert runs["saving"]["lines"] == runs["bare"]["lines"]


@pytest.mark.parametrize("kind", list(_POINTS))
def test_a_trial_resumed_anywhere_is_the_undisturbed_one(played: Any, kind: str) -> None:
    runs = played(kind)

    assert len(runs["resumed"]) == len(_POINTS[kind])
    for run in runs["resumed"]:
        assert run["code"] == 0, run["output"]
        assert run["lines"] == runs["bare"]["lines"][run["before"] :], run["name"]
