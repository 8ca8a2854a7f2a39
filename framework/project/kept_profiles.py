"""Profiles of the models that come with Keras, kept in the cache folder: to read one takes an import of TensorFlow."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import dike
from dike.exceptions import BadInputError
from dike.profile import ModelProfile
from framework.user_folders import cache_dir

FOLDER = "profiles"
SETTINGS = ("TF_USE_LEGACY_KERAS", "KERAS_BACKEND")
"""Variables that say which Keras makes the model."""

logger = logging.getLogger(__name__)


def kept_profile(name: str, batch_size: int | None, read: Callable[[], ModelProfile]) -> ModelProfile:
    """The profile of a model of `keras.applications`, read only if none is kept that this TensorFlow would give again.

    Args:
        name: the model's.
        batch_size: samples per step; None for the default.
        read: reads it, with TensorFlow.

    Raises:
        BadInputError: from `read`.
    """
    path = _place(name, batch_size)
    kept = None if path is None else _load(path)
    if kept is not None:
        return kept
    profile = read()
    # Keras' first import writes its settings.
    path = _place(name, batch_size)
    if path is not None:
        _keep(profile, path)
    return profile


def _place(name: str, batch_size: int | None) -> Path | None:
    """The file for a model as TensorFlow, Keras, their settings and Dike are now; None if that cannot be known."""
    try:
        libraries = {distribution: version(distribution) for distribution in ("tensorflow", "keras")}
        if os.environ.get("TF_USE_LEGACY_KERAS"):
            libraries["tf_keras"] = version("tf_keras")
    except PackageNotFoundError:
        return None
    if not name.isidentifier():
        return None
    settings = {variable: os.environ.get(variable) for variable in SETTINGS}
    counted_by = hashlib.sha256()
    own = Path(dike.__path__[0])
    for file in sorted([*own.glob("*.py"), *(own / "profiling").glob("*.py"), _keras_settings()]):
        if file.is_file():
            counted_by.update(file.read_bytes())
    key = json.dumps([batch_size, libraries, settings, counted_by.hexdigest()], sort_keys=True)
    return cache_dir() / FOLDER / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _keras_settings() -> Path:
    """What Keras is set to: the type of numbers, the order of a picture's axes."""
    home = os.environ.get("KERAS_HOME")
    return (Path(home) if home else Path("~/.keras").expanduser()) / "keras.json"


def _load(path: Path) -> ModelProfile | None:
    try:
        return ModelProfile.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, BadInputError) as error:
        logger.warning("the profile kept in %s is of no use: %s", path, error)
        return None


def _keep(profile: ModelProfile, path: Path) -> None:
    """Writes a profile whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=path.parent) as folder:
            draft = Path(folder) / path.name
            draft.write_text(profile.dumps(), encoding="utf-8")
            draft.replace(path)
    except OSError as error:
        logger.warning("the profile is not kept in %s: %s", path, error)
