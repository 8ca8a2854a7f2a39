"""Profiles are read once, and again where anything that they depend on has changed."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from dike.exceptions import BadInputError
from dike.profile import ModelProfile
from framework.project import profile_cache
from framework.project.profile_cache import CachedProfile, cached_profile, content_of, libraries
from tests.profiles import made_up_profile

TIMEOUT_S = 300.0
PROFILE = made_up_profile({"w": (2, 3)}, flops=1e6)


class FakeReader:
    """Reads a profile, and counts how often."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> ModelProfile:
        self.times += 1
        return dataclasses.replace(PROFILE, batch_size=self.times)


def known(
    inputs: object = (),
    environment: Mapping[str, str] | None = None,
    read: Callable[[], ModelProfile] | None = None,
    **more: Any,
) -> CachedProfile:
    return cached_profile("keras:ResNet50", inputs, environment or {}, read or FakeReader(), **more)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the profiles; Keras has settings of its own, too."""
    monkeypatch.setenv("DIKE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras"))
    return tmp_path / "cache" / f"private-{os.getuid()}" / "profiles"


def test_a_profile_is_read_once(cache: Path) -> None:
    first, again = known(), known()
    assert (first.profile, first.is_cached) == (again.profile, False)
    assert again.is_cached
    assert again.read_s == first.read_s
    assert [path.name.startswith("keras-ResNet50-") for path in cache.iterdir()] == [True]


def test_it_is_read_again_for_who_asks_or_has_no_use_for_it() -> None:
    read = FakeReader()
    known(read=read)
    assert known(read=read, refresh=True).profile.batch_size == 2
    assert known(read=read, is_acceptable=lambda kept: kept.batch_size == 1).profile.batch_size == 3
    assert known(read=read).profile.batch_size == 3


def test_whatever_it_depends_on_has_its_own() -> None:
    read = FakeReader()
    wanted: list[tuple[object, dict[str, str]]] = [(None, {}), ([8], {}), ([16], {}), ([8], {"KERAS_BACKEND": "jax"})]
    first = [known(inputs, environment, read=read).profile for inputs, environment in wanted[1:]]
    assert [known(inputs, environment, read=read).profile for inputs, environment in wanted[1:]] == first
    assert read.times == len(wanted) - 1


@pytest.mark.parametrize("library", ["tensorflow", "keras", "numpy"])
def test_another_version_reads_it_anew(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = FakeReader()
    known(read=read)
    versions = {"tensorflow": "2.21.0", "keras": "3.15.1", "tf_keras": "2.21.0", "numpy": "2.0", library: "99.0"}
    monkeypatch.setattr(profile_cache, "version", versions.__getitem__)
    known(read=read)
    known(read=read)
    assert read.times == 2


def test_what_keras_is_set_to_counts_as_it_is_after_its_first_import(tmp_path: Path) -> None:
    settings = tmp_path / "keras" / "keras.json"
    environment = {"KERAS_HOME": str(settings.parent)}
    read = FakeReader()

    def first() -> ModelProfile:
        settings.parent.mkdir()
        settings.write_text('{"image_data_format": "channels_last"}')
        return read()

    known(environment=environment, read=first)
    known(environment=environment, read=read)
    assert read.times == 1
    settings.write_text('{"image_data_format": "channels_first"}')
    known(environment=environment, read=read)
    assert read.times == 2


@pytest.mark.parametrize(
    "content",
    [b"", b'{"name": "cut of', b"[]", b"1", b"\xff\xfe", b'{"read_s": "x", "profile": {}}', b'{"profile": 1}'],
)
def test_a_damaged_one_is_made_anew(content: bytes, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    read = FakeReader()
    known(read=read)
    (path,) = cache.iterdir()
    path.write_bytes(content)
    assert known(read=read).profile == known(read=read).profile
    assert read.times == 2
    assert "cannot be read" in caplog.text


def test_a_profile_is_had_where_none_can_be_kept(cache: Path) -> None:
    cache.parent.parent.write_text("a file where the folder should be")
    read = FakeReader()
    known(read=read)
    known(read=read)
    assert read.times == 2


def test_nothing_is_kept_of_what_cannot_be_told_apart(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known(None)

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(profile_cache, "version", missing)
    known()
    assert not cache.exists()


def test_a_refusal_is_not_kept(cache: Path) -> None:
    def refuse() -> ModelProfile:
        raise BadInputError("There is no such model.")

    with pytest.raises(BadInputError, match="no such model"):
        known(read=refuse)
    assert not cache.exists()


def test_those_that_were_not_used_for_long_go_first(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_cache, "MAX_PROFILES", 3)
    read = FakeReader()
    for number in range(3):
        place = known([number], read=read).cache_file
        assert place is not None
        os.utime(place, (number, number))
    known([0], read=read)
    known([3], read=read)
    assert len(list(cache.iterdir())) == 3
    assert known([0], read=read).is_cached
    assert not known([1], read=read).is_cached


def test_what_a_job_has_found_is_kept_instead() -> None:
    read = FakeReader()
    known(read=read)
    found = made_up_profile({"w": (2, 4)}, flops=1e6)
    known(read=read).replace_with(found)
    assert known(read=read).profile == found
    assert read.times == 1


def test_a_profile_that_jobs_never_agree_with_is_read_each_time() -> None:
    read = FakeReader()
    known(read=read)
    known(read=read).replace_with(dataclasses.replace(PROFILE, flops_step_per_sample=9e9))
    assert [known(read=read).is_cached, known(read=read).is_cached] == [False, False]
    assert read.times == 3


def test_a_folder_is_what_its_files_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "project"
    (folder / "data").mkdir(parents=True)
    data = folder / "data" / "x.csv"
    data.write_text("1,2")

    def content() -> str | None:
        return content_of(folder, folder.rglob("*"))

    before = content()
    os.utime(data, (1, 1))
    assert content() == before
    data.write_text("1,3")
    changed = content()
    assert changed != before
    data.rename(folder / "data" / "y.csv")
    assert content() not in (before, changed, None)
    # Of more than is worth reading the times count.
    monkeypatch.setattr(profile_cache, "MAX_HASHED_BYTES", 2)
    large = content()
    os.utime(folder / "data" / "y.csv", (2, 2))
    assert content() not in (large, None)
    monkeypatch.setattr(profile_cache, "MAX_FILES", 1)
    assert content() is None


def test_a_library_that_is_used_as_it_is_written_is_what_its_source_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "ourlib" / "layers.py"
    module.parent.mkdir()
    (module.parent / "__init__.py").write_text("")
    module.write_text("WIDTH = 1")
    monkeypatch.syspath_prepend(tmp_path)
    before = libraries(["ourlib", "nosuchlib", "numpy"])
    assert list(before) == ["ourlib", "numpy"]
    module.write_text("WIDTH = 2")
    after = libraries(["ourlib", "numpy"])
    assert after["ourlib"] != before["ourlib"]
    assert after["numpy"] == before["numpy"]


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
