"""Reads files that a script or another account has written, within limits and without leaving their folder.

Links cannot lead out of the folder, pipes and devices do not block, and depth is limited.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import stat
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

MAX_DEPTH = 64
"""Maximum depth of a folder tree that is read or copied; removing has no limit."""
MAX_FILES = 100_000
"""Maximum number of files in a folder that is copied or sent."""
_MAX_LINKS = 8
_MIN_BYTES_PER_VALUE = 6
"""Minimum size of a value in the JSON that Dike writes. Hostile JSON may use two, which take a hundred in memory."""
_MAX_REMOVE_PASSES = 8
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_VALUE_STARTS = re.compile(rb"[\[{,]")


class NotPlainError(OSError):
    """Something is not a plain file, or exceeds a limit; `strerror` says what."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(errno.EINVAL, why, name)

    def __str__(self) -> str:
        return f"{self.filename} {self.strerror}"


def open_plain(name: str, folder: int | None = None) -> BinaryIO:
    """Opens a plain file, relative to the open folder `folder` if given.

    Raises NotPlainError if it is something else, such as a link; OSError if it cannot be opened.
    """
    try:
        # O_NONBLOCK: it may be a pipe.
        opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise NotPlainError(name, "is not a plain file") from error
        raise
    try:
        found = os.fstat(opened)
        if not stat.S_ISREG(found.st_mode):
            raise NotPlainError(name, "is not a plain file")
        disk = os.fstatvfs(opened)
        # A sparse file of any size could be read for days and fill the memory.
        if found.st_size > disk.f_blocks * disk.f_frsize > 0:
            raise NotPlainError(name, "is larger than the disk that it is on")
        return os.fdopen(opened, "rb")
    except BaseException:
        os.close(opened)
        raise


def open_below(folder: str | int, path: str) -> BinaryIO:
    """Opens a plain file below a folder, which must not be a link, following links that stay below it.

    Raises NotPlainError if it is not a plain file, or outside the folder; OSError if it cannot be opened.
    """
    if isinstance(folder, int):
        return _opened_below(folder, path)
    try:
        top = os.open(folder, _FOLDER)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotPlainError(folder, "is a link") from error
        raise
    try:
        return _opened_below(top, path)
    finally:
        os.close(top)


def _opened_below(top: int, path: str) -> BinaryIO:
    left = _parts(path, path)
    at: list[str] = []
    links = 0
    while left:
        part = left.pop()
        if part == "..":
            if not at:
                raise NotPlainError(path, "leads out of its folder")
            at.pop()
            continue
        if len(at) >= MAX_DEPTH:
            raise NotPlainError(path, f"is more than {MAX_DEPTH} folders deep")
        here = _folder_at(top, at)
        try:
            found = os.stat(part, dir_fd=here, follow_symlinks=False)
            if stat.S_ISLNK(found.st_mode):
                links += 1
                if links > _MAX_LINKS:
                    raise NotPlainError(path, f"is a link to a link, more than {_MAX_LINKS} times")
                left += _parts(os.readlink(part, dir_fd=here), path)
            elif left:
                at.append(part)
            else:
                return open_plain(part, here)
        finally:
            os.close(here)
    raise NotPlainError(path, "is not a plain file")


def _parts(path: str, named: str) -> list[str]:
    """The parts of a relative path, last one first."""
    if path.startswith("/"):
        raise NotPlainError(named, "leads out of its folder")
    if "\0" in path:
        raise NotPlainError(named.replace("\0", "?"), "is not a file name")
    return [part for part in reversed(path.split("/")) if part not in ("", ".")]


def _folder_at(top: int, at: Sequence[str]) -> int:
    here = os.open(".", _FOLDER, dir_fd=top)
    for part in at:
        above = here
        try:
            here = os.open(part, _FOLDER, dir_fd=above)
        finally:
            os.close(above)
    return here


def read_below(folder: str | int, path: str, limit_bytes: int) -> bytes:
    """Reads a plain file below a folder; see `open_below`. Raises NotPlainError if it is larger than `limit_bytes`."""
    with open_below(folder, path) as file:
        return read(file, path, limit_bytes)


def read(file: BinaryIO, name: str, limit_bytes: int) -> bytes:
    """Reads an open plain file, up to its current size. Raises NotPlainError if it is larger than `limit_bytes`."""
    size = os.fstat(file.fileno()).st_size
    if size > limit_bytes:
        raise NotPlainError(name, f"is larger than {limit_bytes} bytes")
    return file.read(size)


def parse_json(content: bytes) -> Any:
    """Parses JSON that Dike has written, or claims to have, with bounded memory.

    Raises ValueError if it is not JSON, nested too deeply, or has more values than Dike writes in that size.
    """
    if (
        len(content) > 1 << 16
        and sum(1 for _ in _VALUE_STARTS.finditer(content)) > len(content) // _MIN_BYTES_PER_VALUE
    ):
        raise ValueError("too many values")
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def check_archive(archive: zipfile.ZipFile, size_bytes: int) -> None:
    """Raises ValueError if a zip archive expands beyond the size of its file: Dike does not compress."""
    if sum(info.file_size for info in archive.infolist()) > size_bytes:
        raise ValueError("an archive that expands when it is unpacked")


def walk(folder: int, name: str) -> Iterator[tuple[Sequence[str], str, os.stat_result]]:
    """Walks a folder tree in the open folder `folder`, each folder before its content; no link is followed.

    At most two folders are open at a time, at any depth. If `name` is not a folder, it alone is yielded.

    Yields:
        The names of the folders above the entry, from `name` on; the entry's name and status.
    """
    found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    yield [], name, found
    if not stat.S_ISDIR(found.st_mode):
        return
    here = os.open(name, _FOLDER, dir_fd=folder)
    at = [name]
    # The folders above: identity, and names of the subfolders not visited yet.
    above: list[tuple[tuple[int, int], list[str]]] = []
    try:
        left: list[str] | None = None
        while True:
            if left is None:
                left = []
                with os.scandir(here) as entries:
                    for entry in entries:
                        found = entry.stat(follow_symlinks=False)
                        if stat.S_ISDIR(found.st_mode):
                            left.append(entry.name)
                        yield at, entry.name, found
            elif left:
                at.append(left.pop())
                above.append((_identity(here), left))
                _change_to(here, at[-1])
                left = None
            elif above:
                at.pop()
                _change_to(here, "..")
                known, left = above.pop()
                if _identity(here) != known:
                    raise NotPlainError(name, "is being moved")
            else:
                return
    finally:
        os.close(here)


def _change_to(folder: int, name: str) -> None:
    """Redirects the descriptor of an open folder to an entry of it."""
    opened = os.open(name, _FOLDER, dir_fd=folder)
    try:
        os.dup2(opened, folder, inheritable=False)
    finally:
        os.close(opened)


def _identity(folder: int) -> tuple[int, int]:
    found = os.fstat(folder)
    return found.st_dev, found.st_ino


def check_bounds(name: str, depth: int, count: int) -> None:
    """Raises NotPlainError for a file deeper than `MAX_DEPTH`, or after `count` others if these reach `MAX_FILES`."""
    if depth > MAX_DEPTH:
        raise NotPlainError(name, f"has folders more than {MAX_DEPTH} deep")
    if count >= MAX_FILES:
        raise NotPlainError(name, f"has more than {MAX_FILES:,} files")


def copy_tree(folder: str, target: str) -> None:
    """Copies the content of a folder: plain files, links to plain files, and folders. Checks all before it writes.

    Raises NotPlainError if it has something else, exceeds `check_bounds`, or is larger than the target's free space.
    """
    top = os.open(folder, _FOLDER)
    try:
        size_bytes = count = 0
        found = []
        for above, name, what in walk(top, "."):
            path = "/".join((*above[1:], name))
            check_bounds(path, len(above), count)
            is_file = stat.S_ISREG(what.st_mode) or stat.S_ISLNK(what.st_mode)
            if above and is_file:
                try:
                    with open_below(top, path) as file:
                        size_bytes += os.fstat(file.fileno()).st_size
                except FileNotFoundError as error:
                    if stat.S_ISLNK(what.st_mode):
                        raise NotPlainError(path, "is a link to nothing") from error
                    raise
            elif not stat.S_ISDIR(what.st_mode):
                raise NotPlainError(path, "is neither a file nor a folder")
            if above:
                count += 1
                found.append((path, is_file))
        if size_bytes > shutil.disk_usage(target).free:
            raise NotPlainError(folder, "is larger than the free space on the disk")
        for path, is_file in found:
            if is_file:
                copy_file(top, path, f"{target}/{path}")
            else:
                os.makedirs(f"{target}/{path}", exist_ok=True)
    finally:
        os.close(top)


def copy_file(folder: str | int, path: str, target: str) -> None:
    """Copies a plain file below a folder, with its mode and times; see `open_below`."""
    with open_below(folder, path) as source, open(target, "wb") as copy:
        found = os.fstat(source.fileno())
        shutil.copyfileobj(source, copy)
        copy.flush()
        os.fchmod(copy.fileno(), stat.S_IMODE(found.st_mode) & 0o777)
        os.utime(copy.fileno(), ns=(found.st_atime_ns, found.st_mtime_ns))


def remove(folder: int, name: str) -> None:
    """Removes a folder tree of any depth, in the open folder `folder`; no link is followed."""
    place = os.open(name, _FOLDER, dir_fd=folder)
    try:
        while names := os.listdir(place):
            for each in names:
                if stat.S_ISDIR(os.stat(each, dir_fd=place, follow_symlinks=False).st_mode):
                    _remove_flat(place, each)
                else:
                    os.unlink(each, dir_fd=place)
    finally:
        os.close(place)
    os.rmdir(name, dir_fd=folder)


def _remove_flat(place: int, name: str) -> None:
    """Removes a folder after moving its subfolders to `place`, so that no path becomes deep."""
    here = os.open(name, _FOLDER, dir_fd=place)
    try:
        for _ in range(_MAX_REMOVE_PASSES):  # another process may still write there
            for each in os.listdir(here):
                if stat.S_ISDIR(os.stat(each, dir_fd=here, follow_symlinks=False).st_mode):
                    os.rename(each, secrets.token_hex(8), src_dir_fd=here, dst_dir_fd=place)
                else:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(each, dir_fd=here)
            try:
                os.rmdir(name, dir_fd=place)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            else:
                return
    finally:
        os.close(here)
    raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), name)
