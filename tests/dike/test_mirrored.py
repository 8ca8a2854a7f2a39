"""Keras' `fit` on two devices, each with a part of every batch: what it computes on one, up to rounding."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.warm import WarmTensorFlow

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    program = Path(__file__).with_name("mirrored_cases.py")
    folder = tmp_path_factory.mktemp("mirrored")
    done = warm.run([sys.executable, program], timeout=250, cwd=folder, process_class=WarmTensorFlow)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_losses_are_those_of_one_device(said: dict[str, Any]) -> None:
    assert said["replicas"] == 2
    assert len(said["alone"]) == 17
    for name, losses in said["alone"].items():
        assert said["both"][name] == pytest.approx(losses, rel=1e-3), name


def test_what_would_train_otherwise_is_refused_and_the_way_out_named(said: dict[str, Any]) -> None:
    assert len(said["refused"]) == 15
    for why, sentence in said["refused"].items():
        assert why in sentence
        assert "Several GPUs cannot share a batch: " in sentence
        assert "Run the job with --gpus-per-task 1." in sentence


def test_a_model_read_where_there_is_a_gpu_is_shared_all_the_same(said: dict[str, Any]) -> None:
    assert said["gpu"] == ""


def test_a_batch_of_fewer_samples_than_devices_leaves_no_average_without_a_value(said: dict[str, Any]) -> None:
    assert all(map(math.isfinite, said["few"]))


def test_losses_that_are_no_tensors_do_not_fail_a_profile(said: dict[str, Any]) -> None:
    assert said["odd"] == ["a loss is one number for the whole batch"] * 2
