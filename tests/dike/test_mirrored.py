"""Keras' `fit` on two devices, each with a part of every batch: what it computes on one, up to rounding."""

from __future__ import annotations

import json
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
    assert len(said["alone"]) == 13
    for name, losses in said["alone"].items():
        assert said["both"][name] == pytest.approx(losses, rel=1e-3), name


def test_a_step_of_its_own_is_refused_and_the_way_out_named(said: dict[str, Any]) -> None:
    assert "the model has a train_step of its own" in said["refused"]
    assert "--gpus-per-task 1" in said["refused"]
