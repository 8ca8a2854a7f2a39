"""What others have written is read with bounds and in its folder, and no tree is too deep to be removed."""

from __future__ import annotations

import contextlib
import json
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dike import plain_files
from dike.plain_files import NotPlainError
from tests.trees import DEEP, make_deep, removed_afterwards


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def few_descriptors(count: int = 16) -> Iterator[None]:
    """Limits the process to `count` more file descriptors than are open now."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_tree_of_any_depth_is_walked_and_removed_with_few_descriptors(tmp_path: Path) -> None:
    tree, beside = tmp_path / "tree", tmp_path / "beside"
    tree.mkdir()
    beside.mkdir()
    (beside / "kept").touch()
    (tree / "link").symlink_to(beside)
    (tree / "wide").mkdir()
    for number in range(50):
        (tree / "wide" / str(number)).mkdir()
        (tree / "wide" / str(number) / "f").touch()
    make_deep(tree)
    with removed_afterwards(tree), opened(tmp_path) as folder, few_descriptors():
        found = [(len(above), name) for above, name, _ in plain_files.walk(folder, "tree")]
        assert max(found) == (DEEP + 1, "f")
        assert len(found) == 1 + 2 + 2 * 50 + DEEP + 1
        plain_files.remove(folder, "tree")
        with pytest.raises(NotADirectoryError):
            plain_files.remove(folder, "beside/kept")
    assert os.listdir(tmp_path) == ["beside"]
    assert os.listdir(beside) == ["kept"]


def test_a_folder_that_is_moved_while_it_is_walked_leads_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "tree" / "a" / "b").mkdir(parents=True)
    (tmp_path / "elsewhere" / "c").mkdir(parents=True)
    with opened(tmp_path) as folder:
        walked = plain_files.walk(folder, "tree")
        assert [name for _, (_, name, _) in zip(range(3), walked, strict=False)] == ["tree", "a", "b"]
        (tmp_path / "tree" / "a").rename(tmp_path / "elsewhere" / "c" / "a")
        with pytest.raises(NotPlainError, match="is being moved"):
            list(walked)


def _links_in_a_ring(folder: Path) -> None:
    (folder / "a").symlink_to("x")
    (folder / "x").symlink_to("a")


def _deep_file(folder: Path) -> None:
    make_deep(folder, plain_files.MAX_DEPTH)


REFUSED: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "a link out": (lambda at: (at / "x").symlink_to("../secret"), "x", "leads out"),
    "a link to an absolute path": (lambda at: (at / "x").symlink_to(at.parent / "secret"), "x", "leads out"),
    "a folder that is a link": (lambda at: (at / "x").symlink_to(".."), "x/secret", "leads out"),
    "two points": (lambda at: (at / "x").mkdir(), "x/../../secret", "leads out"),
    "an absolute path": (lambda at: None, "/dev/zero", "leads out"),
    "a device": (lambda at: (at / "x").symlink_to("/dev/zero"), "x", "leads out"),
    "a pipe": (lambda at: os.mkfifo(at / "x"), "x", "not a plain file"),
    "a folder": (lambda at: (at / "x").mkdir(), "x", "not a plain file"),
    "the folder itself": (lambda at: None, ".", "not a plain file"),
    "links in a ring": (_links_in_a_ring, "x", "a link to a link"),
    "a hole": (lambda at: os.truncate(_made(at / "x"), 2**50), "x", "larger than the disk"),
    "too much": (lambda at: (at / "x").write_bytes(bytes(11)), "x", "larger than 10 bytes"),
    "too deep": (_deep_file, "d/" * plain_files.MAX_DEPTH + "f", "64 folders deep"),
    "no name": (lambda at: None, "a\0b", "not a file name"),
}


def _made(path: Path) -> Path:
    path.touch()
    return path


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_plain_file_below_the_folder_is_not_read(tmp_path: Path, what: str) -> None:
    (tmp_path / "secret").write_text("secret")
    folder = tmp_path / "folder"
    folder.mkdir()
    make, name, said = REFUSED[what]
    try:
        make(folder)
    except OSError:
        pytest.skip("this file system has no such large files")
    with few_descriptors(), pytest.raises(NotPlainError, match=said):
        plain_files.read_below(str(folder), name, 10)


def test_links_inside_of_the_folder_are_followed(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "blob").write_text("blob")
    (folder / "a" / "up").symlink_to("../blob")
    (folder / "a" / "b" / "up").symlink_to("../../blob")
    (folder / "c").symlink_to("a/b")
    for name in ("blob", "./blob", "a/up", "a/b/up", "c/up", "c/../up", "a/b/../../blob"):
        assert plain_files.read_below(str(folder), name, 4) == b"blob", name
    with pytest.raises(FileNotFoundError):
        plain_files.read_below(str(folder), "a/no", 4)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(OSError, match=r"link|Not a directory"):
        plain_files.open_below(str(tmp_path / "link"), "blob")


def test_json_of_more_values_than_dike_writes_in_so_many_bytes_is_refused() -> None:
    honest = {f"outputs/{number}": [1_700_000_000_000_000_000 + number, number] for number in range(10_000)}
    assert plain_files.parse_json(json.dumps(honest).encode()) == honest
    sums = {str(number): [number, 2**31] for number in range(10_000)}
    assert plain_files.parse_json(json.dumps(sums).encode()) == sums
    for content in (b"[" + b"[]," * 100_000 + b"[]]", b"[" * 100_000, b"[" * 20_000, b"\xff", b"{"):
        with pytest.raises(ValueError):  # noqa: PT011 - of JSON's own among them
            plain_files.parse_json(content)


@pytest.mark.parametrize("what", ["pipe", "link", "deep", "many", "large"])
def test_a_tree_is_copied_whole_or_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "sub" / "empty").mkdir(parents=True)
    (source / "sub" / "run").write_text("run")
    (source / "sub" / "run").chmod(0o4755)
    (source / "same").symlink_to("sub/run")
    target.mkdir()
    plain_files.copy_tree(str(source), str(target))
    assert sorted(str(path.relative_to(target)) for path in target.rglob("*")) == [
        "same",
        "sub",
        "sub/empty",
        "sub/run",
    ]
    assert (target / "same").read_text() == "run"
    assert not (target / "same").is_symlink()
    assert (target / "sub" / "run").stat().st_mode & 0o7777 == 0o755
    match what:
        case "pipe":
            os.mkfifo(source / "x")
        case "link":
            (source / "x").symlink_to("/etc/passwd")
        case "deep":
            make_deep(source, plain_files.MAX_DEPTH + 1)
        case "many":
            monkeypatch.setattr(plain_files, "MAX_FILES", 3)
        case _:
            os.truncate(_made(source / "x"), 2**40)
    other = tmp_path / "other"
    other.mkdir()
    with few_descriptors(), pytest.raises(NotPlainError):
        plain_files.copy_tree(str(source), str(other))
    assert list(other.iterdir()) == []
