"""Profiles of the models that come with Keras: read once, and again where anything that they depend on has changed."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dike.exceptions import BadInputError
from dike.profile import ModelProfile
from framework.project import kept_profiles
from framework.project.kept_profiles import kept_profile
from tests.profiles import made_up_profile

TIMEOUT_S = 300.0
PROFILE = made_up_profile({"w": (2, 3)}, flops=1e6)


class Reader:
    """Reads a profile, and counts how often."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> ModelProfile:
        self.times += 1
        return dataclasses.replace(PROFILE, batch_size=self.times)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the profiles; Keras has settings of its own, too."""
    monkeypatch.setenv("DIKE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras"))
    return tmp_path / "cache" / "profiles"


def test_a_profile_is_read_once(cache: Path) -> None:
    read = Reader()
    assert kept_profile("ResNet50", None, read) == kept_profile("ResNet50", None, read)
    assert read.times == 1
    assert [path.name.startswith("ResNet50-") for path in cache.iterdir()] == [True]


def test_each_model_and_each_batch_has_its_own() -> None:
    read = Reader()
    wanted = [("ResNet50", None), ("ResNet50", 8), ("ResNet50", 16), ("VGG16", 8)]
    first = [kept_profile(*one, read) for one in wanted]
    assert [kept_profile(*one, read) for one in wanted] == first
    assert read.times == len(wanted)


@pytest.mark.parametrize("library", ["tensorflow", "keras"])
def test_another_version_reads_it_anew(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Reader()
    kept_profile("ResNet50", None, read)
    versions = {"tensorflow": "2.21.0", "keras": "3.15.1", library: "99.0"}
    monkeypatch.setattr(kept_profiles, "version", versions.__getitem__)
    kept_profile("ResNet50", None, read)
    kept_profile("ResNet50", None, read)
    assert read.times == 2


@pytest.mark.parametrize(("name", "value"), [("TF_USE_LEGACY_KERAS", "1"), ("KERAS_BACKEND", "jax")])
def test_another_keras_reads_it_anew(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Reader()
    monkeypatch.delenv(name, raising=False)
    kept_profile("ResNet50", None, read)
    monkeypatch.setenv(name, value)
    kept_profile("ResNet50", None, read)
    assert read.times == 2


def test_what_keras_is_set_to_counts_as_it_is_after_its_first_import(tmp_path: Path) -> None:
    settings = tmp_path / "keras" / "keras.json"
    read = Reader()

    def first() -> ModelProfile:
        settings.parent.mkdir()
        settings.write_text('{"image_data_format": "channels_last"}')
        return read()

    kept_profile("ResNet50", None, first)
    kept_profile("ResNet50", None, read)
    assert read.times == 1
    settings.write_text('{"image_data_format": "channels_first"}')
    kept_profile("ResNet50", None, read)
    assert read.times == 2


@pytest.mark.parametrize("content", [b"", b'{"name": "cut of', b"[]", b"\xff\xfe"])
def test_a_damaged_one_is_made_anew(content: bytes, cache: Path) -> None:
    read = Reader()
    kept_profile("ResNet50", None, read)
    (path,) = cache.iterdir()
    path.write_bytes(content)
    again = kept_profile("ResNet50", None, read)
    assert again == kept_profile("ResNet50", None, read)
    assert read.times == 2


def test_a_profile_is_had_where_none_can_be_kept(cache: Path) -> None:
    cache.parent.write_text("a file where the folder should be")
    read = Reader()
    kept_profile("ResNet50", None, read)
    kept_profile("ResNet50", None, read)
    assert read.times == 2


def test_nothing_is_kept_of_what_cannot_be_told_apart(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Reader()
    kept_profile("../ResNet50", None, read)

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(kept_profiles, "version", missing)
    kept_profile("ResNet50", None, read)
    assert not cache.exists()


def test_a_refusal_is_not_kept(cache: Path) -> None:
    def refuse() -> ModelProfile:
        raise BadInputError("There is no such model.")

    with pytest.raises(BadInputError, match="no such model"):
        kept_profile("ResNet5", None, refuse)
    assert not cache.exists()


@pytest.mark.tensorflow
def test_the_second_time_tensorflow_is_not_needed(tmp_path: Path) -> None:
    def profile(**more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "framework", "profile", "keras:MobileNet", "--format", "json"]
        return subprocess.run(
            command, env={**os.environ, **more}, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S
        )

    first = profile()
    assert json.loads(first.stdout)["name"] == "keras:MobileNet", first.stderr
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tensorflow.py").write_text("raise ImportError('it was looked for')\n")
    again = profile(PYTHONPATH=f"{tmp_path / 'broken'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    assert again.stdout == first.stdout, again.stderr
