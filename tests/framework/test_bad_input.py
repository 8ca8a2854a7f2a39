"""Bad input of `dike run`: one sentence on standard error, exit code 2, no traceback, nothing started."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from dike import checkpoints
from dike.profile import Api
from framework.embedded import AgentSpec, EmbeddedCluster
from tests.profiles import made_up_profile

Dike = Callable[..., "subprocess.CompletedProcess[str]"]

TRAINS = """
import dike as tf
model = tf.keras.Sequential([tf.keras.layers.Input((2,)), tf.keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(tf.zeros((8, 2)), tf.zeros((8, 1)))
"""
PROFILE = made_up_profile({"dense/kernel": (2, 1), "dense/bias": (1,)}, api=Api.KERAS, flops=6)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAINS)
    (tmp_path / "profile.json").write_text(PROFILE.dumps())
    return path


def refused(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    """Asserts the form of a refusal and what its sentence says."""
    assert done.returncode == 2, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("dike: ")
    assert "dike" not in done.stdout
    for part in parts:
        assert part in last
    assert "framework/" not in done.stderr, "a traceback of ours"


def test_a_script_that_is_missing_or_a_folder(dike: Dike, tmp_path: Path) -> None:
    refused(dike("run", "nothing.py"), "nothing.py")
    refused(dike("run", tmp_path), str(tmp_path))


def test_bounds_of_an_elastic_job(dike: Dike, script: Path) -> None:
    refused(dike("run", "--elastic", "4:1", script), "--elastic 4:1", "MIN <= MAX")


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("print('hello'\n", ("train.py",)),
        ("print('hello')\n", ("train.py", "ended without")),
        (
            "import tensorflow as tf\nlayers = [tf.keras.layers.Input((2,)), tf.keras.layers.Flatten()]\n"
            "model = tf.keras.Sequential(layers)\nmodel.compile('sgd', 'mse')\n"
            "model.fit(tf.zeros((8, 2)), tf.zeros((8, 2)))\n",
            ("trainable parameters",),
        ),
    ],
    ids=["syntax error", "never trains", "nothing to train"],
)
def test_a_script_that_cannot_be_planned(dike: Dike, tmp_path: Path, content: str, parts: tuple[str, ...]) -> None:
    (tmp_path / "train.py").write_text(content)
    refused(dike("run", "train.py"), *parts)


def test_a_model_in_the_place_of_a_script(dike: Dike) -> None:
    refused(dike("run", "keras:ResNet50"), "not a training script")


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (("--master", "127.0.0.1:1", "--connect-timeout", "0.3"), ("127.0.0.1:1", "--master")),
        (("--master", "a:b:c"), ("--master",)),
        (("--logs", "some"), ("--logs",)),
        (("--principal", "ann"), ("--secret-file",)),
        (("--secret-file", "nothing"), ("--principal",)),
        (("--principal", "ann", "--secret-file", "nothing"), ("nothing",)),
        (("--plan", "nothing.json"), ("nothing.json",)),
        (("--plan", "profile.json"), ("plan",)),
        (("--resources", "cpus:many"), ("cpus:many",)),
        (("--resources", "cpus:0.05;mem:64"), ("can never start",)),
    ],
)
def test_options_that_make_no_sense(dike: Dike, script: Path, options: tuple[str, ...], parts: tuple[str, ...]) -> None:
    refused(dike("run", "--profile", "profile.json", *options, script), *parts)


def test_a_misspelt_value_is_explained(dike: Dike, script: Path) -> None:
    done = dike("run", "--objective", "luck", script)
    assert done.returncode == 2
    assert "'luck' is not one of 'throughput', 'traffic'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_checkpoint_folder_of_another_model(dike: Dike, script: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "ckpt-1.index").write_bytes(b"")
    (folder / checkpoints.MARKER).write_text(json.dumps({"fingerprint": "another"}))
    refused(dike("run", "--profile", "profile.json", "--checkpoint-dir", folder, script), str(folder))


@pytest.mark.mesos
def test_a_wrong_secret(dike: Dike, script: Path, tmp_path: Path) -> None:
    credentials = tmp_path / "credentials.json"
    credentials.write_text(json.dumps({"credentials": [{"principal": "ann", "secret": "right"}]}))
    (tmp_path / "wrong").write_text("wrong\n")
    (tmp_path / "right").write_text("right\n")
    agents = [AgentSpec(resources="cpus:4;mem:8192")]
    with EmbeddedCluster(agents, framework_credentials=credentials) as cluster:
        cluster.wait_for_agents(60)
        options = ("--profile", "profile.json", "--plan-only", "--master", cluster.master, "--principal", "ann")
        refused(dike("run", *options, "--secret-file", "wrong", script), "--secret-file")
        done = dike("run", *options, "--secret-file", "right", script)
        assert done.returncode == 0, done.stderr
