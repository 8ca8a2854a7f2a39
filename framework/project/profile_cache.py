"""Caches model profiles, as reading one imports TensorFlow.

The cache key is a hash of all known inputs of a profile; they cannot be recovered from it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import itertools
import json
import logging
import os
import platform
import re
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import dike
from dike.checkpoints import fingerprint
from dike.exceptions import BadInputError, DikeError
from dike.profile import ModelProfile
from framework.user_folders import private_cache_dir

FOLDER = "profiles"
MAX_PROFILES = 500
"""Maximum number of cached profiles; the least recently used are removed first."""
REQUIRED = ("tensorflow", "keras")
OPTIONAL = ("tf_keras", "numpy")
"""Distributions whose versions are part of every key."""
MAX_HASHED_BYTES = 50 * 2**20
"""Amount of a folder's files whose content is hashed; of the others, size and time of modification are."""
MAX_FILES = 50_000
_INSTALLED = frozenset({"site-packages", "dist-packages"})

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CachedProfile:
    """A model's profile.

    Attributes:
        read_s: Unix time at which it was read.
        cache_file: its cache file; None if it cannot be cached.
        is_cached: whether it was read for an earlier command.
    """

    profile: ModelProfile
    read_s: float
    cache_file: Path | None = None
    is_cached: bool = False

    def replace_with(self, profile: ModelProfile) -> None:
        """Caches the profile that a job has found instead.

        If it equals the cached one, jobs of the script create other variables than its profile: then none is cached.
        """
        if self.cache_file is not None:
            same = fingerprint(profile) == fingerprint(self.profile)
            _write(self.cache_file, None if same else profile, time.time())


def cached_profile(
    name: str,
    inputs: object,
    environment: Mapping[str, str],
    read: Callable[[], ModelProfile],
    *,
    refresh: bool = False,
    is_acceptable: Callable[[ModelProfile], bool] = lambda profile: True,
) -> CachedProfile:
    """Returns the cached profile of a model, or reads it.

    Args:
        name: the model's name, for people.
        inputs: all inputs, as JSON values; None if unknown, which disables the cache.
        environment: of the process that reads it.
        read: reads it, with TensorFlow.
        refresh: whether to read it even if one is cached.
        is_acceptable: whether a cached one is acceptable.

    Raises:
        BadInputError: from `read`.
    """
    cache_file = _cache_file(name, inputs, environment)
    kept = None if refresh or cache_file is None else _load(cache_file)
    if kept is not None and is_acceptable(kept.profile):
        return kept
    now_s = time.time()
    profile = read()
    # The path depends on Keras' settings, which its first import writes.
    cache_file = _cache_file(name, inputs, environment)
    if cache_file is not None and not _is_never_cached(cache_file):
        _write(cache_file, profile, now_s)
    return CachedProfile(profile, now_s, cache_file)


def content_of(folder: Path, paths: Iterable[Path]) -> str | None:
    """Hashes names and contents of files below `folder`; None if they are too many, or one cannot be read."""
    digest, left = hashlib.sha256(), MAX_HASHED_BYTES
    try:
        known = sorted(itertools.islice(paths, MAX_FILES + 1))
        if len(known) > MAX_FILES:
            return None
        for path in known:
            found = path.stat()
            what: list[Any] = [os.fsdecode(path.relative_to(folder)), stat.S_IFMT(found.st_mode), found.st_mode & 0o111]
            if stat.S_ISREG(found.st_mode):
                left -= found.st_size
                what.append(_hash_of(path) if left >= 0 else [found.st_size, found.st_mtime_ns])
            digest.update(json.dumps(what).encode())
    except OSError as error:
        logger.info("no profile is cached: %s", error)
        return None
    return digest.hexdigest()


def libraries(names: Iterable[str]) -> dict[str, Any]:
    """Installed library -> time of installation, or hash of its source if it is not in `site-packages`."""
    found: dict[str, Any] = {}
    for name in names:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            continue
        if spec is None or spec.origin is None or not os.path.isfile(spec.origin):
            continue
        origin = Path(spec.origin)
        if spec.submodule_search_locations and _INSTALLED.isdisjoint(origin.parts):
            found[name] = content_of(origin.parent, origin.parent.rglob("*.py"))
        else:
            changed = origin.stat()
            found[name] = [str(origin), changed.st_size, changed.st_mtime_ns]
    return found


def _cache_file(name: str, inputs: object, environment: Mapping[str, str]) -> Path | None:
    """The cache file for a model with TensorFlow, Keras, their settings and Dike; None if it cannot be cached."""
    if inputs is None:
        return None
    try:
        folder = private_cache_dir() / FOLDER
    except (OSError, DikeError) as error:
        logger.warning("no profile is cached: %s", error)
        return None
    try:
        versions = {distribution: version(distribution) for distribution in REQUIRED}
    except PackageNotFoundError:
        return None
    for distribution in OPTIONAL:
        with contextlib.suppress(PackageNotFoundError):
            versions[distribution] = version(distribution)
    interpreter = [sys.executable, platform.python_version()]
    settings = _keras_settings(environment)
    key = [
        inputs,
        dict(environment),
        versions,
        interpreter,
        _hash_of(settings) if settings.is_file() else "",
        _dike_version(),
    ]
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    stem = re.sub(r"\W", "-", name, flags=re.ASCII)[:80]
    return folder / f"{stem}-{digest[:32]}.json"


def _dike_version() -> str | None:
    own = Path(dike.__path__[0])
    return content_of(own, own.rglob("*.py"))


def _keras_settings(environment: Mapping[str, str]) -> Path:
    """Keras' settings file: number type, order of an image's axes."""
    home = environment.get("KERAS_HOME")
    return (Path(home) if home else Path("~/.keras").expanduser()) / "keras.json"


def _hash_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _load(cache_file: Path) -> CachedProfile | None:
    try:
        values = _values(cache_file)
        if values is None or values["profile"] is None:
            return None
        kept = CachedProfile(
            ModelProfile.from_json(values["profile"]), float(values["read_s"]), cache_file, is_cached=True
        )
    except (OSError, ValueError, TypeError, KeyError, RecursionError, BadInputError) as error:
        logger.warning("the profile cached in %s cannot be read: %s", cache_file, error)
        return None
    with contextlib.suppress(OSError):
        os.utime(cache_file)
    return kept


def _is_never_cached(cache_file: Path) -> bool:
    """Whether jobs have shown that this profile must not be cached (`CachedProfile.replace_with`)."""
    try:
        values = _values(cache_file)
        return values is not None and values["profile"] is None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return False


def _values(cache_file: Path) -> Any:
    try:
        return json.loads(cache_file.read_bytes())
    except FileNotFoundError:
        return None


def _write(cache_file: Path, profile: ModelProfile | None, read_s: float) -> None:
    """Writes a profile, or None to cache none, atomically."""
    values = {"read_s": read_s, "profile": None if profile is None else profile.to_json()}
    try:
        cache_file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=cache_file.parent) as folder:
            draft = Path(folder) / cache_file.name
            draft.write_text(json.dumps(values), encoding="utf-8")
            draft.replace(cache_file)
        _remove_oldest(cache_file.parent)
    except OSError as error:
        logger.warning("the profile cannot be cached in %s: %s", cache_file, error)


def _remove_oldest(folder: Path) -> None:
    used: dict[Path, float] = {}
    for path in folder.glob("*.json"):
        with contextlib.suppress(FileNotFoundError):  # another command has removed it
            used[path] = path.stat().st_mtime
    for path in sorted(used, key=used.__getitem__)[: max(0, len(used) - MAX_PROFILES)]:
        path.unlink(missing_ok=True)
