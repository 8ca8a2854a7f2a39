"""Jobs that are stopped and started again with other numbers of processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dike.profile import Api
from tests.roles.roles_stage import SCRIPTS, Process, RolesStage

pytestmark = pytest.mark.tensorflow

SLOW_S = 0.2
ENVIRONMENT = {"DIKE_SAVE_TIMEOUT_S": "120", "SLOW_S": str(SLOW_S)}


def steps(process: Process, kind: str) -> list[int]:
    return [int(message.get("step", message.get("steps"))) for message in process.reported(kind)]


def test_a_fit_that_changes_its_size_trains_each_sample_once_in_each_epoch(tmp_path: Path) -> None:
    kinds = ("arrays", "endless", "py_dataset")
    sizes = ((1, 2), (2, 1), (1, 3), (2, 2))
    splits: list[Any] = []
    saved = 0
    for attempt, (ps, workers) in enumerate(sizes):
        with RolesStage(
            Api.KERAS,
            SCRIPTS / "keras_elastic.py",
            tmp_path,
            ps,
            workers,
            kinds,
            environment=ENVIRONMENT,
            attempt=attempt,
            forked=True,
        ) as job:
            chief = job.chief
            assert chief.wait() == (143 if attempt < len(kinds) else 0)
            # Each `fit` before is restored, and the one that was interrupted, at the step at which it was left.
            resumed = steps(chief, "resumed")
            assert len(resumed) == attempt
            assert resumed[-1:] == ([saved] if attempt else [])
            if attempt < len(kinds):
                saved = steps(chief, "checkpoint")[-1]
                assert steps(chief, "total")[-1] == 90 * (attempt + 1)
                # In the middle of an epoch, or in the validation after its last step.
                assert saved - 90 * attempt == 30 if kinds[attempt] == "endless" else saved % 30
            else:
                result = chief.result
            splits.append([line for line in chief.text.splitlines() if line.startswith("SPLIT ")])
    # What the script draws without a seed is the same in every attempt.
    assert all(split == splits[0] and len(split) == 1 for split in splits)
    for kind, fit in result["fits"].items():
        assert fit["counts"] == [3.0], kind
        # The callback's own counter continues.
        assert fit["steps"] == 90
    assert result["fits"]["endless"]["validations"] == 6
    assert result["fits"]["arrays"]["losses"] == [0.0, -8.0, -16.0]


def losses(process: Process) -> list[float]:
    return [float(line.split()[1]) for line in process.text.splitlines() if line.startswith("LOSS ")]


def trained_at(process: Process, expected: list[float]) -> list[int]:
    """The step of each of its losses, never an earlier one than before."""
    indices = [expected.index(pytest.approx(loss, rel=1e-5)) for loss in losses(process)]
    assert indices == sorted(indices)
    return indices


def reference(count: int) -> list[float]:
    """The losses of gradient descent on the whole data, as the script does it, computed by NumPy."""
    inputs = np.random.RandomState(0).randn(64, 4).astype("float32")
    targets = inputs @ np.array([1.0, -2.0, 3.0, -4.0], "float32")
    weights, found = np.zeros(4, "float32"), []
    for _ in range(count):
        errors = inputs @ weights - targets
        found.append(float(np.mean(errors**2)))
        weights = weights - 0.02 * 2 * inputs.T @ errors / len(inputs)
    return found


def test_a_synchronous_job_keeps_its_global_batch_with_fewer_workers(tmp_path: Path) -> None:
    script, expected = SCRIPTS / "graph_elastic.py", reference(40)
    with RolesStage(
        Api.GRAPH, script, tmp_path, 1, 2, ("40",), environment=ENVIRONMENT, forked=True, replicas=2
    ) as job:
        chief, slow = job.chief, job.worker(1)
        assert chief.wait() == 143
        # TensorFlow makes a session once more whose connection is lost as it begins.
        assert set(steps(chief, "resumed")) <= {0}
        assert set(steps(chief, "total")) == {40}
        saved = steps(chief, "checkpoint")[-1]
        # While a worker is not there yet, TensorFlow takes both gradients of a step from the other.
        found = trained_at(chief, expected)
        assert len(found) == 15
        assert found[-1] < saved <= found[-1] + 2
        assert set(trained_at(slow, expected)) & set(found)
        # A worker that waits for another is not a slow one.
        rates = {
            index: [message["workers"][str(index)] for message in job.worker(index).reported("rates")]
            for index in (0, 1)
        }
        assert 0 < max(rates[1]) < 1.2 / SLOW_S < max(rates[0])

    # One worker gives both gradients of a step, and the steps count from the job's first start.
    with RolesStage(
        Api.GRAPH, script, tmp_path, 2, 1, ("40",), environment=ENVIRONMENT, forked=True, replicas=2, attempt=1
    ) as job:
        assert job.chief.wait() == 0
        assert steps(job.chief, "resumed") == [saved]
        assert steps(job.chief, "total") == [40]
        assert steps(job.chief, "progress")[-1] == 40
        twice = [loss for loss in expected[saved:] for _ in range(2)]
        assert losses(job.chief) == pytest.approx(twice, rel=1e-5)
