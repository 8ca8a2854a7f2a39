"""The script's folder travels whole, and nothing outside it can be fetched."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import http.client
import io
import os
import socket
import tarfile
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from dike.exceptions import BadInputError
from executor import bundle as executor_bundle
from framework.embedded.ports import reserve_blocks
from framework.mesos.master import LeadingMaster, Master
from framework.project import bundle
from framework.scheduler.mesos_access import MesosAccess
from framework.search.database import database_files
from framework.search.store import Store
from tests.search.locks import locked_by
from tests.waiting import DEADLINE_S, wait_until

TOKEN = "t" * 32
OTHER = "o" * 32


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "package").mkdir(parents=True)
    (folder / "train.py").write_text("print('hello')\n")
    (folder / "package" / "helper.py").write_text("VALUE = 1\n")
    (folder / "data.bin").write_bytes(b"x" * 1000)
    (folder / ".venv").mkdir()
    (folder / ".venv" / "huge").write_text("not for the cluster")
    (tmp_path / "secret").write_text("not for anybody")
    return folder


def names(archive: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return tar.getnames()


def test_everything_but_the_ignored_is_packed(project: Path) -> None:
    (project / ".dikeignore").write_text("# results\n*.bin\n")
    assert sorted(names(bundle.pack(project / "train.py"))) == [".dikeignore", "package/helper.py", "train.py"]


def test_of_the_runs_a_pickled_function_is_packed_and_nothing_else(project: Path) -> None:
    function = project / "dike-runs" / "first" / "function" / "train.function"
    function.parent.mkdir(parents=True)
    for path in (function, function.parents[1] / "other.function"):
        path.write_bytes(b"pickled")
    packed = [name for name in names(bundle.pack(function, project)) if name.startswith("dike-runs")]
    assert packed == ["dike-runs/first/function/train.function"]


def test_what_is_packed_besides_lies_in_the_folder(project: Path) -> None:
    packed = bundle.pack(project / "train.py", extra_files={".more.json": b"[1]"})
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        more = archive.extractfile(".more.json")
        assert more is not None
        assert more.read() == b"[1]"
    bundle.check(packed, "train.py")


def test_links_out_of_the_folder_are_not_followed(project: Path) -> None:
    (project / "leak").symlink_to(project.parent / "secret")
    (project / "inside").symlink_to(project / "data.bin")
    packed = names(bundle.pack(project / "train.py"))
    assert "leak" not in packed
    assert "inside" in packed


def test_a_link_to_a_script_packs_the_folder_of_the_script(project: Path) -> None:
    link = project.parent / "link.py"
    link.symlink_to(project / "train.py")
    assert "train.py" in names(bundle.pack(link))


def test_a_database_in_use_is_not_even_opened(project: Path) -> None:
    files = database_files(f"sqlite:///{project / 'searches.db'}")
    assert {file.name for file in files} == {f"searches.db{suffix}" for suffix in ("", "-wal", "-shm", "-journal")}
    (project / "link.db").symlink_to(project / "searches.db")
    with contextlib.closing(Store(f"sqlite:///{project / 'link.db'}")):
        held = locked_by(os.getpid(), project / "searches.db-shm")
        assert held
        packed = names(bundle.pack(project / "train.py", exclude=files))
        assert locked_by(os.getpid(), project / "searches.db-shm") == held
    assert sorted(packed) == ["data.bin", "package/helper.py", "train.py"]
    assert database_files(f"sqlite:///{project / 'link.db'}") == files
    assert not database_files("postgresql://user@host/database")


def test_links_that_lead_nowhere_are_left_out(project: Path) -> None:
    (project / "nowhere").symlink_to(project / "missing")
    (project / "circle").symlink_to(project / "circle")
    assert not {"nowhere", "circle"} & set(names(bundle.pack(project / "train.py")))


@pytest.mark.parametrize(("content", "complaint"), [(b"\xff\xfe", "not a list of patterns"), (b"*.py", "itself")])
def test_an_ignore_file_that_cannot_be_meant_is_refused(project: Path, content: bytes, complaint: str) -> None:
    (project / ".dikeignore").write_bytes(content)
    with pytest.raises(BadInputError, match=complaint):
        bundle.pack(project / "train.py")


def test_a_folder_that_is_too_large_is_refused_with_the_remedy(project: Path) -> None:
    (project / "more").mkdir()
    for name in ("a", "b"):
        (project / "more" / name).write_bytes(b"x" * 600)
    told = r"more than 500 B; its largest parts are more \(1\.2 KiB\), data\.bin \(1,?000 B\), .*\.dikeignore"
    with pytest.raises(BadInputError, match=told):
        bundle.pack(project / "train.py", size_limit_bytes=500)


def test_more_files_than_executors_unpack_are_refused(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = bundle.pack(project / "train.py")
    bundle.check(archive, "train.py")
    monkeypatch.setattr(executor_bundle, "MAX_MEMBERS", 1)
    with pytest.raises(BadInputError, match=r"holds more than 1 files; exclude some in .*\.dikeignore"):
        bundle.pack(project / "train.py")
    with pytest.raises(BadInputError, match="it holds more than 1 files"):
        bundle.check(archive, "train.py")


def test_an_ignore_file_counts_for_the_folders_below_it(project: Path) -> None:
    (project / "package" / ".dikeignore").write_text("/notes\n*.bin\n")
    (project / "package" / "notes").write_text("mine")
    (project / "notes").write_text("ours")
    packed = names(bundle.pack(project / "package" / "helper.py", project))
    assert sorted(packed) == ["data.bin", "notes", "package/.dikeignore", "package/helper.py", "train.py"]


def test_a_virtual_environment_stays_whatever_its_name(project: Path) -> None:
    (project / "env").mkdir()
    (project / "env" / "pyvenv.cfg").write_text("home = /usr/bin")
    (project / "env" / "module.py").write_text("x = 1")
    assert not [name for name in names(bundle.pack(project / "train.py")) if name.startswith("env")]


@pytest.mark.integration
def test_the_executor_gets_what_was_packed(project: Path, tmp_path: Path) -> None:
    with bundle.BundleServer({TOKEN: bundle.pack(project / "train.py")}.get, "127.0.0.1") as server:
        executor_bundle.fetch(server.url(TOKEN), tmp_path / "sandbox")
    assert (tmp_path / "sandbox" / "package" / "helper.py").read_text() == "VALUE = 1\n"


@pytest.mark.integration
@pytest.mark.parametrize(
    "path",
    ["/", "/bundle", "/bundle/", "/bundle/wrong", "/bundle/../../secret", "/../../../../etc/passwd", "/%2e%2e/secret"],
)
def test_nothing_else_is_served(project: Path, path: str) -> None:
    with bundle.BundleServer({TOKEN: bundle.pack(project / "train.py")}.get, "127.0.0.1") as server:
        # A plain connection: a client library would tidy the path up before it is sent.
        connection = http.client.HTTPConnection(urlsplit(server.url(TOKEN)).netloc, timeout=DEADLINE_S)
        connection.putrequest("GET", path, skip_host=True)
        connection.endheaders()
        assert connection.getresponse().status == httpx.codes.NOT_FOUND
        connection.close()


@pytest.mark.integration
def test_a_wrong_token_is_refused_in_words(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with bundle.BundleServer({TOKEN: bundle.pack(project / "train.py")}.get, "127.0.0.1") as server:
        with pytest.raises(executor_bundle.BundleError, match="HTTP 404"):
            executor_bundle.fetch(server.url(TOKEN) + "x", tmp_path / "sandbox")
        url = server.url(TOKEN)
    monkeypatch.setattr(executor_bundle, "UNREACHABLE_TIMEOUT_S", 0.0)
    with pytest.raises(executor_bundle.BundleError, match="could not be fetched"):
        executor_bundle.fetch(url, tmp_path / "sandbox")


@pytest.mark.integration
def test_an_executor_comes_again_where_the_service_is_started_anew(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    (block,) = reserve_blocks(1)
    request.addfinalizer(block.claim.close)
    archive = bundle.pack(project / "train.py")
    with contextlib.ExitStack() as stack:

        def pause(pause_s: float) -> None:
            stack.enter_context(bundle.BundleServer({TOKEN: archive}.get, "127.0.0.1", block.first))

        monkeypatch.setattr(executor_bundle, "time", types.SimpleNamespace(monotonic=time.monotonic, sleep=pause))
        executor_bundle.fetch(f"http://127.0.0.1:{block.first}/bundle/{TOKEN}", tmp_path / "sandbox")
    assert (tmp_path / "sandbox" / "train.py").is_file()


@pytest.mark.integration
@pytest.mark.parametrize(
    ("patience", "value"),
    [("framework.project.bundle.QUEUE_TIMEOUT_S", 0.05), ("executor.bundle.RESPONSE_TIMEOUT_S", 0.3)],
)
def test_an_executor_comes_again_where_others_take_all_the_room(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patience: str, value: float
) -> None:
    taken, released = threading.Event(), threading.Event()
    archive = bundle.pack(project / "train.py")

    def find(token: str) -> bytes:
        if token == OTHER:
            taken.set()
            assert released.wait(DEADLINE_S)
        return archive

    monkeypatch.setattr(bundle, "MAX_CONCURRENT_TRANSFERS", 1)
    monkeypatch.setattr(patience, value)
    with (
        bundle.BundleServer(find, "127.0.0.1") as server,
        ThreadPoolExecutor(1) as pool,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(released.set)
        slow = pool.submit(httpx.get, server.url(OTHER), timeout=DEADLINE_S)
        assert taken.wait(DEADLINE_S)
        with monkeypatch.context() as impatient:
            impatient.setattr(executor_bundle, "BUSY_TIMEOUT_S", 0.0)
            with pytest.raises(executor_bundle.BundleError, match=r"HTTP 503|timed out"):
                executor_bundle.fetch(server.url(TOKEN), tmp_path / "impatient")
        waits: list[float] = []

        def pause(pause_s: float) -> None:
            waits.append(pause_s)
            released.set()

        # In that module alone: what earlier tests have left in other threads may sleep too.
        clock = types.SimpleNamespace(monotonic=time.monotonic, sleep=pause)
        monkeypatch.setattr(executor_bundle, "time", clock)
        executor_bundle.fetch(server.url(TOKEN), tmp_path / "sandbox")
        assert set(waits) == {executor_bundle.RETRY_INTERVAL_S}
        assert slow.result().content == archive
    assert (tmp_path / "sandbox" / "train.py").is_file()


@pytest.mark.integration
def test_an_archive_that_climbs_out_is_refused(tmp_path: Path) -> None:
    evil = io.BytesIO()
    with tarfile.open(fileobj=evil, mode="w:gz") as tar:
        tar.addfile(tarfile.TarInfo("../outside"), io.BytesIO())
    with (
        bundle.BundleServer({TOKEN: evil.getvalue()}.get, "127.0.0.1") as server,
        pytest.raises(executor_bundle.BundleError, match="could not be unpacked"),
    ):
        executor_bundle.fetch(server.url(TOKEN), tmp_path / "sandbox" / "bundle")
    assert not (tmp_path / "sandbox" / "outside").exists()


@pytest.mark.integration
def test_the_address_towards_loopback_is_loopback() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        assert bundle.address_towards("127.0.0.1", listener.getsockname()[1]) == "127.0.0.1"


@pytest.mark.integration
def test_executors_are_told_the_address_that_they_can_reach(
    project: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    archive = bundle.pack(project / "train.py")
    (block,) = reserve_blocks(1)
    request.addfinalizer(block.claim.close)
    port = block.first
    mesos = MesosAccess(master="127.0.0.1:5050", advertise_address="gate.example", bundle_port=port)
    master = LeadingMaster(Master("127.0.0.1:5050", "127.0.0.1", 5050, "1.11.0"))
    with mesos.bundle_server({TOKEN: archive}.get, master) as server:
        assert server.url(TOKEN) == f"http://gate.example:{port}/bundle/{TOKEN}"
        # A port forwarder may connect to another address than the one that faces the master.
        executor_bundle.fetch(f"http://127.0.0.2:{port}/bundle/{TOKEN}", tmp_path / "sandbox")
    assert (tmp_path / "sandbox" / "train.py").is_file()
    with dataclasses.replace(mesos, advertise_address=None).bundle_server({TOKEN: archive}.get, master) as server:
        assert server.url(TOKEN) == f"http://127.0.0.1:{port}/bundle/{TOKEN}"


@pytest.mark.integration
def test_the_executors_of_a_job_share_one_archive_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    # Even on a slow machine, no client is rejected with a retry.
    monkeypatch.setattr(bundle, "QUEUE_TIMEOUT_S", DEADLINE_S)
    get = functools.partial(httpx.get, timeout=DEADLINE_S)
    asked: list[str] = []

    def find(token: str) -> bytes | None:
        asked.append(token)
        return token.encode() if token in (TOKEN, OTHER) else None

    with bundle.BundleServer(find, "127.0.0.1") as server, ThreadPoolExecutor(40) as pool:
        urls = [server.url(TOKEN)] * 40 + [server.url(OTHER)] * 40
        answers = pool.map(get, urls)
        assert [answer.text for answer in answers] == [TOKEN] * 40 + [OTHER] * 40
        assert sorted(asked) == sorted((TOKEN, OTHER))
        unknown = server.url("n" * 32)
        assert [get(unknown).status_code for _ in range(2)] == [404, 404]


@pytest.mark.integration
def test_whoever_asks_for_nothing_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    with bundle.BundleServer({TOKEN: b"archive"}.get, "127.0.0.1") as server, monkeypatch.context() as impatient:
        impatient.setattr(bundle, "REQUEST_TIMEOUT_S", 0.2)
        address = urlsplit(server.url(TOKEN))
        with socket.create_connection((address.hostname, address.port), DEADLINE_S) as slow:
            ended = threading.Event()

            def drip() -> None:
                # Never silent, and never done.
                with contextlib.suppress(OSError):
                    slow.sendall(b"GET /")
                    while not ended.wait(0.02):
                        slow.sendall(b"x")

            with ThreadPoolExecutor(1) as pool:
                dripping = pool.submit(drip)
                with contextlib.suppress(ConnectionError):
                    assert slow.recv(1) == b""
                ended.set()
                dripping.result()
        impatient.undo()
        assert httpx.get(server.url(TOKEN), timeout=DEADLINE_S).content == b"archive"


@pytest.mark.integration
def test_too_many_connections_are_told_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "MAX_CONNECTIONS", 2)
    with bundle.BundleServer({TOKEN: b"archive"}.get, "127.0.0.1") as server, contextlib.ExitStack() as stack:
        address = urlsplit(server.url(TOKEN))
        for _ in range(2):
            stack.enter_context(socket.create_connection((address.hostname, address.port), DEADLINE_S))
        assert httpx.get(server.url(TOKEN)).status_code == httpx.codes.SERVICE_UNAVAILABLE
        stack.close()
        wait_until(lambda: httpx.get(server.url(TOKEN)).is_success, "room again")
