"""The store of a cluster, and mirrors of its folders, over real connections."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor.mirror import (
    MARKER_FILE,
    STAGING_FOLDER,
    WRITER_FILE,
    Mirror,
    RunFolder,
    StoreClient,
    StoreError,
    Writer,
    list_stamps,
)
from framework.cluster import store as stores
from framework.cluster.store import COMMIT_FILE, Store, StoredFolder, StoreServer

pytestmark = pytest.mark.integration

CREDENTIALS = ("dike", "s3cret")
ID = "ab" * 16
FIRST = Writer("job", 0)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def server(root: Path) -> Iterator[StoreServer]:
    serving = StoreServer(("127.0.0.1", 0), Store(root), CREDENTIALS)
    thread = threading.Thread(target=serving.serve_forever, daemon=True)
    thread.start()
    yield serving
    serving.shutdown()
    serving.server_close()
    thread.join()


@pytest.fixture
def client(server: StoreServer) -> StoreClient:
    made = StoreClient(f"127.0.0.1:{server.server_address[1]}", CREDENTIALS)
    made.create_folder(ID)
    return made


@pytest.fixture
def stored(root: Path) -> Path:
    return root / "folders" / ID


def mirror(client: StoreClient, local: Path, below: str = "run") -> Mirror:
    return Mirror(client, RunFolder(ID, "/head/runs"), f"/head/runs/{below}", local)


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def contents(folder: Path) -> dict[str, str]:
    return {path: (folder / path).read_text() for path in list_stamps(folder)}


def test_what_is_pushed_is_in_the_folder_and_is_pulled_elsewhere(
    client: StoreClient, stored: Path, tmp_path: Path
) -> None:
    here, there = mirror(client, tmp_path / "here"), mirror(client, tmp_path / "there")
    here.pull()
    write(here.local, checkpoint__weights="1 2 3", done="yes")
    here.push(FIRST)
    assert contents(stored / "run") == {"checkpoint/weights": "1 2 3", "done": "yes"}
    there.pull()
    assert contents(there.local) == contents(here.local)
    assert list_stamps(there.local) == list_stamps(here.local)


def test_only_changes_travel(client: StoreClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = mirror(client, tmp_path / "here"), mirror(client, tmp_path / "there")
    here.pull()
    write(here.local, a="1", b="2")
    here.push(FIRST)
    there.pull()
    sent: list[int] = []
    fetched: list[str] = []
    stage, fetch = StoreClient.stage, StoreClient.fetch
    monkeypatch.setattr(StoreClient, "stage", lambda self, *of: (sent.append(of[4]), stage(self, *of))[1])
    monkeypatch.setattr(StoreClient, "fetch", lambda self, *of: (fetched.append(of[1]), fetch(self, *of))[1])
    write(here.local, b="three")
    here.push(FIRST)
    there.pull()
    here.push(FIRST)
    assert sent == [len("three")]
    assert fetched == ["run/b"]
    assert contents(there.local) == {"a": "1", "b": "three"}


def test_what_is_removed_here_is_removed_there(client: StoreClient, stored: Path, tmp_path: Path) -> None:
    here, there = mirror(client, tmp_path / "here"), mirror(client, tmp_path / "there")
    here.pull()
    write(here.local, old__a="1", new__a="2")
    here.push(FIRST)
    there.pull()
    (here.local / "old" / "a").unlink()
    here.push(FIRST)
    assert not (stored / "run" / "old").exists()
    there.pull()
    assert contents(there.local) == {"new/a": "2"}
    assert not (there.local / "old").exists()


def test_files_of_others_stay(client: StoreClient, stored: Path, tmp_path: Path) -> None:
    """A run that has lost its connection does not delete what its successor has written."""
    lost, next_one = mirror(client, tmp_path / "lost"), mirror(client, tmp_path / "next")
    lost.pull()
    write(lost.local, run_0="0")
    lost.push(Writer("search", 0))
    next_one.pull()
    write(next_one.local, run_1="1")
    next_one.push(Writer("other", 1))
    write(lost.local, run_0_again="00")
    lost.push(Writer("search", 0))
    assert contents(stored / "run") == {"run_0": "0", "run_1": "1", "run_0_again": "00"}


def test_an_earlier_attempt_cannot_write(client: StoreClient, stored: Path, tmp_path: Path) -> None:
    zombie, current = mirror(client, tmp_path / "zombie"), mirror(client, tmp_path / "current")
    zombie.pull()
    write(zombie.local, state="0")
    zombie.push(Writer("job", 0))
    current.pull()
    write(current.local, state="1")
    current.push(Writer("job", 1))
    write(zombie.local, state="zombie")
    with pytest.raises(StoreError, match="job has a later attempt or run, 1"):
        zombie.push(Writer("job", 0))
    assert contents(stored / "run") == {"state": "1"}


def test_a_commit_is_completed_after_a_crash(
    client: StoreClient, root: Path, stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = mirror(client, tmp_path / "here")
    here.pull()
    write(here.local, a="old", b="old", gone="old")
    here.push(FIRST)
    write(here.local, a="newer", b="newer")
    (here.local / "gone").unlink()

    def crash(self: StoredFolder, staging: Path) -> None:
        changes = json.loads((staging / COMMIT_FILE).read_text())
        # The first file is in its place, the others are not.
        (staging / "0").replace(stored / "run" / changes["files"][0][0])
        raise stores.RefusedError(stores.HTTPStatus.INTERNAL_SERVER_ERROR, "killed")

    with monkeypatch.context() as patch:
        patch.setattr(StoredFolder, "_complete", crash)
        with pytest.raises(StoreError, match="killed"):
            here.push(FIRST)
    assert sorted(contents(stored / "run").values()) != ["newer", "newer"]
    Store(root)
    assert contents(stored / "run") == {"a": "newer", "b": "newer"}
    assert not (stored / STAGING_FOLDER).exists()


def test_a_push_that_does_not_reach_its_commit_changes_nothing(
    client: StoreClient, stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = mirror(client, tmp_path / "here")
    here.pull()
    write(here.local, a="old")
    here.push(FIRST)
    write(here.local, a="newer")

    def lose(*_: object) -> None:
        raise StoreError("the network is down")

    with monkeypatch.context() as patch:
        patch.setattr(StoreClient, "commit", lose)
        with pytest.raises(StoreError):
            here.push(FIRST)
    assert contents(stored / "run") == {"a": "old"}
    here.push(FIRST)
    assert contents(stored / "run") == {"a": "newer"}


def test_a_file_that_changes_during_the_push_is_left_for_the_next_one(
    client: StoreClient, stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = mirror(client, tmp_path / "here")
    here.pull()
    write(here.local, a="1", b="1")
    stage = StoreClient.stage

    def changing(self: StoreClient, *of: object) -> None:
        stage(self, *of)  # type: ignore[arg-type]
        if not (here.local / "late").exists():
            write(here.local, late="x")
            (here.local / "b").write_text("longer")

    monkeypatch.setattr(StoreClient, "stage", changing)
    here.push(FIRST)
    assert contents(stored / "run") == {"a": "1"}
    here.push(FIRST)
    assert contents(stored / "run") == {"a": "1", "b": "longer", "late": "x"}


def test_unfinished_files_and_links_do_not_travel(client: StoreClient, stored: Path, tmp_path: Path) -> None:
    here = mirror(client, tmp_path / "here")
    here.pull()
    write(here.local, kept="1")
    for name in (".dike-trial.json.4711", "ckpt.data-00000-of-00001.tempstate12", ".dike-0123"):
        (here.local / name).write_text("x")
    (here.local / "link").symlink_to("/etc/passwd")
    here.push(FIRST)
    assert contents(stored / "run") == {"kept": "1"}


@pytest.mark.parametrize("path", ["../out", "a/../../out", "/etc/x", "a//b", ".", MARKER_FILE, WRITER_FILE])
def test_paths_do_not_leave_the_folder(client: StoreClient, stored: Path, path: str) -> None:
    changes = {"owner": "job", "number": 0, "below": "", "files": [[path, 1, 1]], "removed": []}
    with pytest.raises(StoreError, match="not a path of a file"):
        client.commit(ID, "cd" * 16, changes)
    with pytest.raises(StoreError, match="not a path of a file"):
        client.commit(ID, "cd" * 16, {**changes, "files": [], "removed": [path]})


def test_a_link_in_the_store_is_not_read_beyond_its_folder(client: StoreClient, stored: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    (stored / "link").symlink_to(tmp_path / "secret")
    with (tmp_path / "got").open("wb") as target, pytest.raises(FileNotFoundError):
        client.fetch(ID, "link", target)


def test_nothing_works_without_the_secret(server: StoreServer, client: StoreClient) -> None:
    stranger = StoreClient(f"127.0.0.1:{server.server_address[1]}", ("dike", "wrong"))
    for request in (
        lambda: stranger.list_files(ID, ""),
        lambda: stranger.create_folder("cd" * 16),
        lambda: stranger.remove_folder(ID),
        lambda: stranger.commit(ID, "cd" * 16, {}),
    ):
        with pytest.raises(StoreError, match="secret is missing"):
            request()


def test_an_entry_may_be_a_link_to_a_folder_of_the_head(client: StoreClient, root: Path, tmp_path: Path) -> None:
    own = tmp_path / "dike-runs" / "job"
    write(own, model="1")
    other = "cd" * 16
    (root / "folders" / other).symlink_to(own)
    there = Mirror(client, RunFolder(other, str(own)), str(own), tmp_path / "there")
    there.pull()
    assert contents(there.local) == {"model": "1"}
    write(there.local, model="two")
    there.push(FIRST)
    assert (own / "model").read_text() == "two"
    client.remove_folder(other)
    assert own.exists()


def test_a_folder_that_a_machine_sees_needs_no_mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    credentials = tmp_path / "credentials.json"
    credentials.write_text(json.dumps({"credentials": [{"principal": "dike", "secret": "s"}]}))
    monkeypatch.setenv("DIKE_STORE", "127.9.9.1:1")
    monkeypatch.setenv("DIKE_STORE_CREDENTIALS", str(credentials))
    folder = RunFolder(ID, str(tmp_path / "runs"))
    (tmp_path / "runs").mkdir()
    assert Mirror.of(folder, str(tmp_path / "runs" / "one"), tmp_path) is not None
    # A folder of the same path on this machine's own disk.
    (tmp_path / "runs" / MARKER_FILE).write_text("cd" * 16)
    assert Mirror.of(folder, str(tmp_path / "runs" / "one"), tmp_path) is not None
    (tmp_path / "runs" / MARKER_FILE).write_text(f"{ID}\n")
    assert Mirror.of(folder, str(tmp_path / "runs" / "one"), tmp_path) is None
    monkeypatch.delenv("DIKE_STORE")
    assert Mirror.of(RunFolder(ID, "/elsewhere"), "/elsewhere", tmp_path) is None


def test_paths_are_those_of_the_head_outside(client: StoreClient, tmp_path: Path) -> None:
    here = mirror(client, tmp_path / "here")
    assert here.to_local("/head/runs/run/ckpt-3") == f"{tmp_path}/here/ckpt-3"
    assert here.to_remote(f"{tmp_path}/here/ckpt-3") == "/head/runs/run/ckpt-3"
    assert here.to_local("/head/runs/run-2/ckpt-3") == "/head/runs/run-2/ckpt-3"


def test_a_damaged_transfer_is_noticed(client: StoreClient, stored: Path, tmp_path: Path) -> None:
    class Damaged(StoreClient):
        def stage(self, folder: str, transaction: str, number: int, source: object, size: int) -> None:
            body = b"x" * size + b"\0\0\0\0"
            path = f"/folders/{folder}/staging/{transaction}/{number}"
            with self._request("PUT", path, body):
                pass

    here = mirror(client, tmp_path / "here")
    here.pull()
    write(here.local, a="1")
    here._store.__class__ = Damaged
    with pytest.raises(StoreError, match="damaged on the way"):
        here.push(FIRST)
    assert not (stored / "run" / "a").exists()


def test_bundles_are_readable_by_their_token(server: StoreServer, client: StoreClient, tmp_path: Path) -> None:
    from executor import bundle

    token = "t" * 32
    client.put_bundle(token, b"archive")
    url = f"http://127.0.0.1:{server.server_address[1]}/bundles/{token}"
    assert b"".join(bundle._download_blocks(url)) == b"archive"
    client.remove_bundle(token)
    with pytest.raises(bundle._DownloadError, match="404"):
        list(bundle._download_blocks(url))


def test_modification_times_are_kept(client: StoreClient, stored: Path, tmp_path: Path) -> None:
    """Older files of a bundle are recognised by their time."""
    here = mirror(client, tmp_path / "here")
    here.pull()
    write(here.local, a="1")
    os.utime(here.local / "a", ns=(10**18, 10**18))
    here.push(FIRST)
    assert (stored / "run" / "a").stat().st_mtime_ns == 10**18
