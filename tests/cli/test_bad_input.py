"""Bad input of `dike run`: one sentence on standard error, exit code 2, no traceback, nothing started."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dike import checkpoints
from dike.profile import Api
from framework.embedded.agents import AgentSpec
from framework.embedded.cluster import EmbeddedCluster
from tests.profiles import made_up_profile
from tests.running import TIMEOUT_S, dike_command

pytestmark = pytest.mark.integration

Dike = Callable[..., "subprocess.CompletedProcess[str]"]

TRAINS = """
import dike as tf
model = tf.keras.Sequential([tf.keras.layers.Input((2,)), tf.keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(tf.zeros((8, 2)), tf.zeros((8, 1)))
"""
PROFILE = made_up_profile({"dense/kernel": (2, 1), "dense/bias": (1,)}, api=Api.KERAS, flops=6)


@pytest.fixture(scope="module")
def mesos() -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster([AgentSpec(resources="cpus:4;mem:8192")]) as cluster:
        cluster.wait_for_agents(60)
        yield cluster


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


@pytest.mark.parametrize(
    ("shell", "code", "told"),
    [
        ("{dike} plan --help > /dev/full", 1, "No space left on device"),
        ("{dike} --help >&-", 0, ""),
        ("{dike} tune --help | true; exit ${{PIPESTATUS[0]}}", None, ""),
        ("DIKE_LOG=/nowhere/log {dike} trials", 2, "DIKE_LOG names /nowhere/log"),
        ("DIKE_LOG=. {dike} trials", 2, "Is a directory"),
        (
            "own=private-$UID/machines/$(hostname); mkdir -m 700 private-$UID; mkdir -p $own; "
            "echo '[[' > $own/mesos-cluster.json; DIKE_CACHE=. {dike} mesos status",
            1,
            "mesos-cluster.json is damaged",
        ),
        (
            "mkdir -m 777 private-$UID; DIKE_CACHE=. {dike} mesos status",
            1,
            "another account could impersonate this one",
        ),
        ("DIKE_CACHE=train.py {dike} mesos status", 1, "train.py: File exists"),
        ("mkdir gone && cd gone && rmdir ../gone && {dike} trials", 2, "There is no database of searches"),
    ],
)
def test_what_the_system_refuses_is_one_sentence(
    script: Path, tmp_path: Path, shell: str, code: int | None, told: str
) -> None:
    line = shell.format(dike=shlex.join(dike_command()))
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S)
    # A reader that closes the pipe early may do so before `dike` writes.
    assert done.returncode == code if code is not None else done.returncode in (0, 1)
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == (1 if told else 0)


def test_an_option_of_ours_behind_the_script(dike: Dike, script: Path, tmp_path: Path) -> None:
    refused(dike("run", script, "--min-workers", "2"), "--min-workers follows", "dike run --min-workers ...")
    refused(dike("submit", script, "--epochs", "2", "--wait"), "--wait follows", "train.py -- --wait ...")
    refused(dike("run", "-m", "train", "--format=json"), "--format follows train", "dike run --format ... -m train")
    script.write_text(f"{TRAINS}import argparse\nargparse.ArgumentParser().add_argument('--wait')\n")
    for words in ([script, "--wait"], [script, "--", "--min-workers", "2"], ["--", script, "--save", "x"]):
        done = dike("submit", "--profile", "profile.json", "--save", "sent", *words)
        assert done.returncode == 0, done.stderr
        request = json.loads((tmp_path / "sent" / "request.json").read_text())
        assert request["arguments"] == [word for word in words if word not in (script, "--")]


def test_bounds_of_an_elastic_job(dike: Dike, script: Path) -> None:
    refused(dike("run", "--elastic", "4:1", script), "--elastic 4:1", "MIN <= MAX")


def test_an_interval_without_end(dike: Dike, script: Path) -> None:
    refused(
        dike("run", "--checkpoint-interval", "inf", script), "--checkpoint-interval is inf; it must be a finite number"
    )


@pytest.mark.mesos
@pytest.mark.tensorflow
@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("print('hello'\n", ("train.py",)),
        ("print('hello')\n", ("train.py", "ended without")),
    ],
    ids=["syntax error", "never trains"],
)
def test_a_script_that_cannot_be_planned(
    dike: Dike, mesos: EmbeddedCluster, tmp_path: Path, content: str, parts: tuple[str, ...]
) -> None:
    (tmp_path / "train.py").write_text(content)
    refused(dike("run", "--master", mesos.master, "train.py"), *parts)


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
        (("--rules", "luck"), ("'luck' is not a rule",)),
        (("--plan-timeout", "100"), ("60 s is the maximum for a job that runs",)),
        (("--plan", "profile.json", "--sharding", "optimus"), ("is a finished plan; leave it out",)),
        (("--resources", "cpus:many"), ("cpus:many",)),
        (("--resources", "cpus:0.05;mem:64"), ("can never start",)),
    ],
)
def test_options_that_make_no_sense(dike: Dike, script: Path, options: tuple[str, ...], parts: tuple[str, ...]) -> None:
    refused(dike("run", "--profile", "profile.json", *options, script), *parts)


def test_a_misspelt_value_is_explained(dike: Dike, script: Path) -> None:
    done = dike("run", "--objective", "luck", script)
    assert done.returncode == 2
    assert "--objective is 'luck'; it must be one of throughput, traffic" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_checkpoint_folder_of_another_model(dike: Dike, script: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "ckpt-1.index").write_bytes(b"")
    (folder / checkpoints.FINGERPRINT_FILE).write_text(json.dumps({"fingerprint": "another"}))
    refused(dike("run", "--profile", "profile.json", "--checkpoint-dir", folder, script), str(folder))


@pytest.mark.mesos
def test_a_wrong_secret(dike: Dike, mesos: EmbeddedCluster, script: Path, tmp_path: Path) -> None:
    (tmp_path / "wrong").write_text("wrong\n")
    (tmp_path / "wrong").chmod(0o600)
    (tmp_path / "open").write_text("right\n")
    (tmp_path / "open").chmod(0o644)
    opened = dike("run", "--profile", "profile.json", "--principal", "dike", "--secret-file", "open", script)
    refused(opened, "secret file open; run chmod 600 open")
    options = ("--profile", "profile.json", "--plan-only", "--master", mesos.master, "--principal", "dike")
    refused(dike("run", *options, "--secret-file", "wrong", script), "--secret-file")
    done = dike("run", *options, "--secret-file", mesos.access.secret_file, script)
    assert done.returncode == 0, done.stderr
