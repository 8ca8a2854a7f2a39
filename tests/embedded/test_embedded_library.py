"""The file that holds Mesos: found, checked, edited once, and refused when it is not right."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import stat
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from dike.exceptions import BadInputError, DikeError
from framework.embedded import elf, library
from framework.embedded.cluster import EmbeddedCluster

ROOT = Path(__file__).resolve().parents[2]
NOWHERE = "http://127.0.0.1:1/simple/"
"""The URL of a package index without a server."""
DEADLINE_S = 120
LIBRARY_SHA256 = "96f9212ca20793fc5d3b3507285b67f22ae6ee25b85924fa953f01c7ebcaa0b7"
"""Of the edited library; both it and elf.PATCH_VERSION change when the edit does."""


@pytest.fixture(scope="session")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real archive: the one the environment names, else a fresh download."""
    named = os.environ.get(library.FILE_VARIABLE)
    return Path(named) if named else library.download_archive(tmp_path_factory.mktemp("mesos") / library.ARCHIVE_NAME)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, no local file, and no index."""
    monkeypatch.setenv("DIKE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_INDEX_URL", NOWHERE)
    monkeypatch.delenv(library.FILE_VARIABLE, raising=False)
    return tmp_path / "cache"


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


@pytest.mark.integration
def test_local_file_replaces_the_download(archive: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.FILE_VARIABLE, str(archive))
    made = library.ensure_library()
    assert made.is_relative_to(empty_cache)
    assert hashlib.sha256(made.read_bytes()).hexdigest() == LIBRARY_SHA256
    assert files_in(empty_cache) == [made.name, "lock"]
    monkeypatch.delenv(library.FILE_VARIABLE)
    changed_at = made.stat().st_mtime_ns
    assert library.ensure_library() == made  # Neither file nor index is asked again.
    assert made.stat().st_mtime_ns == changed_at


@pytest.mark.integration
def test_damaged_file_is_refused(
    archive: Path, empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytearray(archive.read_bytes())
    data[len(data) // 2] ^= 1
    damaged = tmp_path / library.ARCHIVE_NAME
    damaged.write_bytes(data)
    monkeypatch.setenv(library.FILE_VARIABLE, str(damaged))
    with pytest.raises(BadInputError) as caught:
        library.ensure_library()
    assert str(damaged) in str(caught.value)
    assert library.ARCHIVE_SHA256 in str(caught.value)
    assert files_in(empty_cache) == ["lock"]


def test_missing_local_file_is_named(empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.FILE_VARIABLE, str(tmp_path / "absent.tar.gz"))
    with pytest.raises(BadInputError, match=r"absent\.tar\.gz"):
        library.ensure_library()


@pytest.mark.integration
def test_neither_file_nor_index(empty_cache: Path) -> None:
    with pytest.raises(DikeError) as caught:
        library.ensure_library()
    message = str(caught.value)
    assert library.FILE_VARIABLE in message
    assert "--master" in message
    assert files_in(empty_cache) == ["lock"]


def test_cache_that_cannot_be_written(empty_cache: Path) -> None:
    empty_cache.write_text("a file where the folder should be")
    with pytest.raises(DikeError, match="DIKE_CACHE"):
        library.ensure_library()


@pytest.mark.integration
def test_processes_at_once_make_it_once(archive: Path, empty_cache: Path) -> None:
    script = """
import ctypes, json, sys
from framework.embedded import library
real, made = library.make_loadable, []
library.make_loadable = lambda image: made.append(1) or real(image)
sys.stdin.readline()
path = library.ensure_library()
ctypes.CDLL(str(path))
print(json.dumps([str(path), path.stat().st_ino, len(made)]))
"""
    environment = os.environ | {library.FILE_VARIABLE: str(archive)}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=ROOT,
        )
        for _ in range(3)
    ]
    answers = []
    for worker in workers:  # All have started; now they build in parallel.
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    for worker in workers:
        out, _ = worker.communicate(timeout=DEADLINE_S)
        assert worker.returncode == 0
        answers.append(json.loads(out))
    assert len({(path, inode) for path, inode, _ in answers}) == 1
    assert sorted(made for _, _, made in answers) == [0, 0, 1]
    assert files_in(empty_cache) == [Path(answers[0][0]).name, "lock"]


@pytest.mark.integration
def test_a_killed_process_leaves_nothing_that_looks_finished(archive: Path, empty_cache: Path) -> None:
    script = """
import os
from framework.embedded import library
library.make_loadable = lambda image: os.kill(os.getpid(), 9)
library.ensure_library()
"""
    environment = os.environ | {library.FILE_VARIABLE: str(archive)}
    ended = subprocess.run([sys.executable, "-c", script], env=environment, cwd=ROOT, timeout=DEADLINE_S, check=False)
    assert ended.returncode == -9
    assert not library.cached_library().exists()


@pytest.mark.parametrize("changed", ["folder", "file"])
def test_a_copy_that_others_could_have_changed_is_made_anew(
    changed: str, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_make", lambda target: target.write_bytes(b"ours") and target.chmod(0o600))
    made = library.ensure_library()
    made.write_bytes(b"theirs")
    assert library.ensure_library().read_bytes() == b"theirs", (
        "the content is not checked each time: only this account can write there"
    )
    (made.parent if changed == "folder" else made).chmod(0o777)
    assert library.ensure_library().read_bytes() == b"ours"
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (made.parent, made)]
    assert not any(mode & (stat.S_IWGRP | stat.S_IWOTH) for mode in modes)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_cache_of_another_account_is_refused(empty_cache: Path) -> None:
    folder = library.cached_library().parent
    folder.mkdir(parents=True)
    (folder / library.cached_library().name).write_bytes(b"theirs")
    os.chown(folder, 65534, 65534)
    with pytest.raises(DikeError, match="belongs to another account"):
        library.ensure_library()


@pytest.mark.parametrize(
    ("system", "machine", "libc"),
    [("Darwin", "arm64", ""), ("Linux", "aarch64", "glibc"), ("Linux", "x86_64", "musl"), ("Windows", "AMD64", "")],
)
def test_other_platforms_are_told_what_to_do(
    system: str, machine: str, libc: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(platform, "libc_ver", lambda *_: (libc, ""))
    with pytest.raises(BadInputError) as caught:
        EmbeddedCluster().start()
    message = str(caught.value)
    for alternative in ("--master", "dike plan"):
        assert alternative in message
    assert "\n" not in message
    assert message.rstrip(".").count(". ") == 0


@pytest.mark.integration
def test_edited_library_needs_only_what_every_system_has(archive: Path) -> None:
    with tarfile.open(archive) as tar:
        (member,) = [one for one in tar.getmembers() if one.name.endswith(library.MODULE_SUFFIX)]
        file = tar.extractfile(member)
        assert file is not None
        original = file.read()
    with pytest.raises(elf.ElfError):
        elf.make_loadable(original[: len(original) // 4])
    made = elf._SharedLibrary(elf.make_loadable(original))
    needed = {made.string(value) for tag, value in made.dynamic if tag == elf.DT_NEEDED}
    assert needed
    assert not needed & elf.DROPPED_LIBRARIES
    before = elf._SharedLibrary(original)
    assert {before.string(value) for tag, value in before.dynamic if tag == elf.DT_NEEDED} - needed == (
        elf.DROPPED_LIBRARIES
    )
    assert not {name for _, name, _ in made.version_needs()} & elf.DROPPED_LIBRARIES


@pytest.mark.parametrize("image", [b"", b"not a library at all" * 10, b"\x7fELF\x02\x01" + bytes(100)])
def test_what_is_no_library_is_refused(image: bytes) -> None:
    with pytest.raises(elf.ElfError):
        elf.make_loadable(image)


@pytest.mark.integration
def test_this_platform_loads_it() -> None:
    # In a process of its own: it brings its own protobuf, which other libraries of the tests also have.
    program = "import ctypes, sys; ctypes.CDLL(sys.argv[1])._ZN5mesos8internal14VersionProcessC1Ev"
    command = [sys.executable, "-c", program, str(library.ensure_library())]
    done = subprocess.run(command, timeout=DEADLINE_S, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
