"""Profiles that were read before, kept in the cache folder: to read one takes an import of TensorFlow.

A profile is kept under a hash of all that it is known to depend on. What it is made of cannot be read out of the hash.
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
MOST_KEPT = 500
"""How many are kept; those that were not used for the longest time go first."""
NEEDED = ("tensorflow", "keras")
OPTIONAL = ("tf_keras", "numpy")
"""Distributions whose versions count for every model."""
HASHED_BYTES = 50 * 2**20
"""Of a folder's files; of those after them size and time of change count."""
MOST_FILES = 50_000
_INSTALLED = frozenset({"site-packages", "dist-packages"})

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class KnownProfile:
    """A model's profile.

    Attributes:
        profile: the profile.
        read_s: when it was read, in seconds since 1970.
        place: the file that it is kept in; None if it cannot be kept.
        is_kept: whether it was read for an earlier command.
    """

    profile: ModelProfile
    read_s: float
    place: Path | None = None
    is_kept: bool = False

    def replaced_by(self, profile: ModelProfile) -> None:
        """A job has found that the model is another one by now: keeps that one.

        Where it is the same, jobs of the script make other variables than their profile tells: none is kept then.
        """
        if self.place is not None:
            same = fingerprint(profile) == fingerprint(self.profile)
            _write(self.place, None if same else profile, time.time())


def kept_profile(
    name: str,
    inputs: object,
    environment: Mapping[str, str],
    read: Callable[[], ModelProfile],
    *,
    again: bool = False,
    serves: Callable[[ModelProfile], bool] = lambda profile: True,
) -> KnownProfile:
    """The profile of a model, read only if none is kept that would be read again.

    Args:
        name: the model's, for people.
        inputs: what it depends on, as JSON values; None if that cannot be known, and nothing is kept.
        environment: of the process that reads it.
        read: reads it, with TensorFlow.
        again: whether it is read in any case.
        serves: whether a kept one will do.

    Raises:
        BadInputError: from `read`.
    """
    place = _place(name, inputs, environment)
    kept = None if again or place is None else _load(place)
    if kept is not None and serves(kept.profile):
        return kept
    now_s = time.time()
    profile = read()
    # Keras' first import writes its settings.
    place = _place(name, inputs, environment)
    if place is not None and not _is_never_kept(place):
        _write(place, profile, now_s)
    return KnownProfile(profile, now_s, place)


def content_of(folder: Path, paths: Iterable[Path]) -> str | None:
    """A hash of names and contents of files; None if they are too many, or one cannot be read.

    Args:
        folder: a folder.
        paths: files and folders below it, in any order.
    """
    digest, left = hashlib.sha256(), HASHED_BYTES
    try:
        known = sorted(itertools.islice(paths, MOST_FILES + 1))
        if len(known) > MOST_FILES:
            return None
        for path in known:
            found = path.stat()
            what: list[Any] = [os.fsdecode(path.relative_to(folder)), stat.S_IFMT(found.st_mode), found.st_mode & 0o111]
            if stat.S_ISREG(found.st_mode):
                left -= found.st_size
                what.append(_hash_of(path) if left >= 0 else [found.st_size, found.st_mtime_ns])
            digest.update(json.dumps(what).encode())
    except OSError as error:
        logger.info("no profile is kept: %s", error)
        return None
    return digest.hexdigest()


def libraries(names: Iterable[str]) -> dict[str, Any]:
    """Library -> what tells a change of it: when it was installed, or its source where it is used as it is written.

    Args:
        names: of top-level modules; those that are not there are left out.
    """
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


def _place(name: str, inputs: object, environment: Mapping[str, str]) -> Path | None:
    """The file for a model as it is now, with TensorFlow, Keras, their settings and Dike; None if none can be kept."""
    if inputs is None:
        return None
    try:
        folder = private_cache_dir() / FOLDER
    except (OSError, DikeError) as error:
        logger.warning("no profile is kept: %s", error)
        return None
    try:
        versions = {distribution: version(distribution) for distribution in NEEDED}
    except PackageNotFoundError:
        return None
    for distribution in OPTIONAL:
        with contextlib.suppress(PackageNotFoundError):
            versions[distribution] = version(distribution)
    interpreter = [sys.executable, platform.python_version()]
    settings = _keras_settings(environment)
    key = [inputs, dict(environment), versions, interpreter, _hash_of(settings) if settings.is_file() else "", _own()]
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    stem = re.sub(r"\W", "-", name, flags=re.ASCII)[:80]
    return folder / f"{stem}-{digest[:32]}.json"


def _own() -> str | None:
    """What reads profiles: a version of Dike, or its source as it is just being written."""
    own = Path(dike.__path__[0])
    return content_of(own, own.rglob("*.py"))


def _keras_settings(environment: Mapping[str, str]) -> Path:
    """What Keras is set to: the type of numbers, the order of a picture's axes."""
    home = environment.get("KERAS_HOME")
    return (Path(home) if home else Path("~/.keras").expanduser()) / "keras.json"


def _hash_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _load(place: Path) -> KnownProfile | None:
    try:
        values = _values(place)
        if values is None or values["profile"] is None:
            return None
        kept = KnownProfile(ModelProfile.from_json(values["profile"]), float(values["read_s"]), place, is_kept=True)
    except (OSError, ValueError, TypeError, KeyError, RecursionError, BadInputError) as error:
        logger.warning("the profile kept in %s is of no use: %s", place, error)
        return None
    with contextlib.suppress(OSError):
        os.utime(place)
    return kept


def _is_never_kept(place: Path) -> bool:
    """Whether jobs have shown that this profile is of no use later (`KnownProfile.replaced_by`)."""
    try:
        values = _values(place)
        return values is not None and values["profile"] is None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return False


def _values(place: Path) -> Any:
    try:
        return json.loads(place.read_bytes())
    except FileNotFoundError:
        return None


def _write(place: Path, profile: ModelProfile | None, read_s: float) -> None:
    """Writes a profile, or that none is to be kept, whole or not at all."""
    values = {"read_s": read_s, "profile": None if profile is None else profile.to_json()}
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=place.parent) as folder:
            draft = Path(folder) / place.name
            draft.write_text(json.dumps(values), encoding="utf-8")
            draft.replace(place)
        _remove_oldest(place.parent)
    except OSError as error:
        logger.warning("the profile is not kept in %s: %s", place, error)


def _remove_oldest(folder: Path) -> None:
    used: dict[Path, float] = {}
    for path in folder.glob("*.json"):
        with contextlib.suppress(FileNotFoundError):  # another command has removed it
            used[path] = path.stat().st_mtime
    for path in sorted(used, key=used.__getitem__)[: max(0, len(used) - MOST_KEPT)]:
        path.unlink(missing_ok=True)
