"""What surrounds the REST API: limits, headers, names, errors, health, metrics, the address it listens on."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import text

from dike.exceptions import BadInputError
from framework.mesos import events
from framework.project.bundle import SIZE_LIMIT_BYTES
from framework.service import submission
from framework.service.api import front as front_module
from framework.service.api import guard
from framework.service.api.front import ApiFront
from framework.service.users import Users
from tests.service.api_stage import BUNDLE, DEADLINE_S, TOKENS, ApiStage, api_stage, form, training, users_file
from tests.waiting import wait_until

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiStage]:
    with api_stage(tmp_path_factory.mktemp("service")) as running:
        yield running


@pytest.fixture(scope="module")
def alice(stage: ApiStage) -> Iterator[httpx.Client]:
    with stage.client("alice") as client:
        yield client


def test_the_document_names_everything_for_generated_clients(alice: httpx.Client) -> None:
    document = alice.get("/openapi.json").json()
    routes = [route for methods in document["paths"].values() for route in methods.values()]
    names = [route["operationId"] for route in routes]
    assert len(set(names)) == len(names)
    assert all(re.match("(get|list|submit|resubmit|resume|release|kill|explain)_", name) for name in names)
    assert {"submit_job", "list_jobs", "get_job", "kill_job", "get_logs", "list_trials"} <= set(names)
    assert all(route["tags"] and route["description"] for route in routes)
    request = document["components"]["schemas"]["JobRequest"]
    for choice in request["oneOf"]:
        assert choice["$ref"].rpartition("/")[2] in document["components"]["schemas"]


def test_the_document_is_shown_without_another_host(alice: httpx.Client) -> None:
    page = alice.get("/docs").text
    files = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert "swagger-ui/swagger-ui-bundle.js" in files
    for file in files:
        assert alice.get(f"/{file}").status_code == 200, file


def samples(client: httpx.Client) -> dict[str, float]:
    """Series -> value."""
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    return {
        f"{one.name}{dict(sorted(one.labels.items()))}": one.value
        for family in text_string_to_metric_families(answer.text)
        for one in family.samples
    }


def raw(stage: ApiStage, *pieces: bytes, sent: threading.Event | None = None) -> bytes:
    """What the service answers to bytes, until it closes the connection; `sent` is set once all are on their way."""
    if sent is not None:
        sent.clear()
    host, port = stage.url.removeprefix("http://").split(":")
    answer = b""
    with socket.create_connection((host, int(port)), DEADLINE_S) as connection:
        for piece in pieces:
            connection.sendall(piece)
        if sent is not None:
            sent.set()
        while received := connection.recv(2**16):
            answer += received
    return answer


def test_what_is_too_large_is_refused_before_it_is_read(stage: ApiStage, alice: httpx.Client) -> None:
    jobs = len(stage.store.jobs())
    head = f"POST /api/v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKENS['alice']}\r\n"
    # Announced: nothing of it is sent.
    announced = raw(stage, f"{head}Content-Length: {2**40}\r\n\r\n".encode())
    assert announced.startswith(b"HTTP/1.1 413 ")
    assert b'{"detail":"The request\'s body is larger than 54.1 MiB."}' in announced
    # Not announced: in pieces, for ever.
    sent = 0

    def pieces() -> Iterator[bytes]:
        nonlocal sent
        boundary = b"--x\r\nContent-Disposition: form-data; name=bundle; filename=b\r\n\r\n"
        yield boundary
        while True:
            sent += 2**20
            yield bytes(2**20)

    try:
        answer = alice.post(
            "/api/v1/jobs", content=pieces(), headers={"Content-Type": "multipart/form-data; boundary=x"}
        )
        assert answer.status_code == 413
    except httpx.WriteError:
        # The answer was there and the connection closed while we were still sending.
        assert sent > SIZE_LIMIT_BYTES
    assert sent < 2 * SIZE_LIMIT_BYTES
    small = alice.post("/api/v1/jobs/none/kill", content=bytes(2**17))
    assert (small.status_code, "0.0625 MiB" in small.json()["detail"]) == (413, True)
    large_text = alice.post("/api/v1/jobs", files=form(b'"' + bytes(5 * 2**20) + b'"'))
    assert large_text.status_code == 413
    large_bundle = alice.post("/api/v1/jobs", files=form(training(), BUNDLE + bytes(SIZE_LIMIT_BYTES)))
    assert (large_bundle.status_code, large_bundle.json()["detail"]) == (400, "The bundle is larger than 50 MiB.")
    assert len(stage.store.jobs()) == jobs


def test_whoever_sends_too_slowly_is_sent_away(stage: ApiStage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "CHUNK_TIMEOUT_S", 0.2)
    head = f"POST /api/v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKENS['alice']}\r\n"
    answer = raw(
        stage, f"{head}Content-Type: multipart/form-data; boundary=x\r\nContent-Length: 1000\r\n\r\n--x".encode()
    )
    assert answer.startswith(b"HTTP/1.1 408 ")


def test_whoever_asks_for_nothing_is_sent_away(stage: ApiStage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_module, "REQUEST_TIMEOUT_S", 0.2)
    look = front_module._Connection._check_idle
    sent = threading.Event()

    def look_later(connection: Any, answered: Any) -> None:
        # So short a time passes while a test is held up: it counts from when the service can read what was sent.
        connection.loop.call_later(
            0.05, *(look, connection, answered) if sent.is_set() else (look_later, connection, answered)
        )

    monkeypatch.setattr(front_module._Connection, "_check_idle", look_later)
    head = f"POST /api/v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKENS['alice']}\r\n"
    address = urlsplit(stage.url).hostname, urlsplit(stage.url).port
    with socket.create_connection(address, DEADLINE_S) as busy:
        # Its request is there, though its body is not: that has a patience of its own.
        busy.sendall(f"{head}Content-Type: multipart/form-data; boundary=x\r\nContent-Length: 5\r\n\r\n".encode())
        sent.set()
        assert raw(stage, sent=sent) == b""
        assert raw(stage, head.encode(), sent=sent) == b""
        # Nor does one request give a connection the right to stay.
        answered = raw(stage, b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", b"GET /h", sent=sent)
        assert answered.startswith(b"HTTP/1.1 200 ")
        busy.sendall(b"--x--")
        assert busy.recv(2**16).startswith(b"HTTP/1.1 422 ")


def test_headers_without_end_are_not_kept(stage: ApiStage) -> None:
    address = urlsplit(stage.url).hostname, urlsplit(stage.url).port
    sent = 0
    with socket.create_connection(address, DEADLINE_S) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        with contextlib.suppress(ConnectionError):
            while sent < 64 * 2**20:
                sent += connection.send(b"X-More: " + b"x" * 4000 + b"\r\n")
    # The system buffers some of it; the service does not read the rest.
    assert sent < 32 * 2**20


@pytest.mark.parametrize("path", ["jobs", "jobs/any/resume"])
def test_a_body_without_a_token_is_not_waited_for(stage: ApiStage, path: str) -> None:
    head = f"POST /api/v1/{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\nConnection: close\r\n\r\n"
    assert raw(stage, head.encode()).startswith(b"HTTP/1.1 401 ")


def test_answers_tell_browsers_to_be_careful(stage: ApiStage, alice: httpx.Client) -> None:
    for path in ("/", "/api/v1/jobs", "/healthz", "/api/v1/jobs/none", "/nothing"):
        headers = alice.get(path, headers={"Origin": "http://evil.example"}).headers
        assert headers["content-security-policy"].startswith("default-src 'self';")
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert "access-control-allow-origin" not in headers
        assert "server" not in headers
        assert "set-cookie" not in headers
        assert (headers.get("cache-control") == "no-store") == path.startswith("/api/")


@pytest.mark.parametrize(
    ("host", "status"), [("localhost:1", 200), ("Dike.Example", 200), ("[::1]", 200), ("evil.example", 400), ("[", 400)]
)
def test_a_local_service_answers_to_its_own_names_only(stage: ApiStage, host: str, status: int) -> None:
    with stage.client("alice") as client:
        assert client.get("/api/v1/jobs", headers={"Host": host}).status_code == status


def test_no_request_leaves_the_page_s_folder(stage: ApiStage) -> None:
    for path in ("/../users.py", "/..%2fusers.py", "/%2e%2e/users.py", "//etc/passwd", "/.%00/users.py"):
        head = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
        assert raw(stage, head.encode()).startswith((b"HTTP/1.1 404 ", b"HTTP/1.1 400 ")), path


def test_an_error_of_our_own_tells_nothing_but_that(
    stage: ApiStage, alice: httpx.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: object, **others: object) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr(stage.store, "jobs", fail)
    with caplog.at_level(logging.ERROR):
        answer = alice.get("/api/v1/jobs")
    assert answer.status_code == 500
    assert answer.json() == {"detail": "The service failed with an internal error; see its log."}
    assert answer.headers["x-content-type-options"] == "nosniff"
    # The connection is closed once the error is logged, and that is after the answer.
    assert answer.headers["connection"] == "close"
    wait_until(lambda: "a secret" in caplog.text, "a log record")
    assert samples(alice)["dike_http_requests_total{'method': 'GET', 'route': '/api/v1/jobs', 'status': '500'}"] == 1


def test_metrics_count_what_happens(stage: ApiStage, alice: httpx.Client) -> None:
    before = samples(alice)
    job_id = stage.submit()
    alice.get("/api/v1/jobs/none")
    alice.request("BREW", "/coffee")
    assert alice.get("/api/v1other").json()["detail"].startswith("There is nothing at this address; ")
    assert alice.delete("/api/v1/jobs").json()["detail"].startswith("This address does not take that method; ")
    stage.inbox.put(events.OffersArrived((stage.mesos.offer(cpus=4),)))
    wait_until(lambda: stage.store.tasks(job_id=job_id), "the job's tasks")
    task = stage.store.tasks(job_id=job_id)[0]
    status = {"task_id": {"value": task.task_id}, "agent_id": {"value": task.agent_id}, "state": "TASK_FAILED"}
    stage.inbox.put(events.StatusUpdate(status))
    wait_until(lambda: samples(alice)["dike_task_failures_total{}"] > before["dike_task_failures_total{}"], "a failure")
    after = samples(alice)
    route = "'route': '/api/v1/jobs/{job_id}'"
    assert after[f"dike_http_requests_total{{'method': 'GET', {route}, 'status': '404'}}"] >= 1
    assert not [series for series in after if "coffee" in series or "BREW" in series or "v1other" in series]
    assert after["dike_offers_received_total{}"] == before["dike_offers_received_total{}"] + 1
    assert after["dike_launches_total{}"] == before["dike_launches_total{}"] + 2
    assert after["dike_queue_wait_seconds_count{}"] == before["dike_queue_wait_seconds_count{}"] + 1
    assert after["dike_placement_seconds_count{}"] == before["dike_placement_seconds_count{}"] + 1
    assert after["dike_connected{}"] == 1
    assert after["dike_loop_seconds_count{}"] > before["dike_loop_seconds_count{}"]
    assert after["process_resident_memory_bytes{}"] > 0
    kinds = [series for series in after if series.startswith("dike_jobs{'kind': 'training'")]
    assert len(kinds) == 6
    assert sum(after[series] for series in kinds) == len(stage.store.jobs())


def test_whose_jobs_are_open_is_told_to_those_signed_in_only(stage: ApiStage, alice: httpx.Client) -> None:
    stage.submit()
    ours = "dike_open_jobs{'state': 'queued', 'user': 'alice'}"
    assert samples(alice)[ours] >= 1
    with stage.client(None) as nobody:
        answer = nobody.get("/metrics")
        assert (answer.status_code, samples(nobody).keys()) == (
            200,
            {name for name in samples(alice) if not name.startswith(("dike_open_jobs{", "dike_user_"))},
        )
        assert "alice" not in answer.text
        # A client with a token needs to learn that it is wrong.
        refused = nobody.get("/metrics", headers={"Authorization": "Bearer nobodys-token-0123456789"})
    assert refused.status_code == 401
    assert refused.json()["detail"].startswith("This token is unknown")


def test_health_says_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with api_stage(tmp_path) as stage, stage.client(None) as client:
        wait_until(lambda: client.get("/healthz").json()["connected"], "the connection")
        assert client.get("/healthz").json()["status"] == "ok"
        stage.inbox.put(events.Disconnected())
        wait_until(lambda: not client.get("/healthz").json()["connected"], "its loss")
        # Without a master it waits for one, and is well.
        assert client.get("/healthz").status_code == 200
        stage.pause()
        monkeypatch.setattr("framework.service.api.cluster.LOOP_TIMEOUT_S", 0.0)
        hanging = client.get("/healthz")
        assert hanging.status_code == 503
        assert "loop has made no iteration" in hanging.json()["status"]
        with stage.store.database.engine.begin() as connection:
            connection.execute(text("DROP TABLE dike_services"))
        broken = client.get("/healthz")
        assert (broken.status_code, broken.json()["status"]) == (503, "The service's database cannot be reached.")
        failing = client.get("/api/v1/cluster", headers={"Authorization": f"Bearer {TOKENS['alice']}"})
        assert failing.status_code == 503
        assert str(tmp_path) not in failing.text


@pytest.mark.parametrize("listen", ["", "8680", "localhost:", "localhost:65536", "a b:1", "[::1]", "http://x:1"])
def test_an_address_that_is_none_is_refused(tmp_path: Path, listen: str) -> None:
    with pytest.raises(BadInputError, match="is not an address to listen on"):
        ApiFront(listen, Users.of_file(users_file(tmp_path)))


def test_an_address_that_is_taken_is_refused_before_anything_starts(tmp_path: Path) -> None:
    users = Users.of_file(users_file(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BadInputError, match=f"Nothing can listen at 127.0.0.1:{port}: Address already in use"):
            ApiFront(f"127.0.0.1:{port}", users)
    with pytest.raises(BadInputError, match=r"Nothing can listen at no\.such\.host\.invalid:1"):
        ApiFront("no.such.host.invalid:1", users)


def test_many_ask_at_the_same_time(stage: ApiStage) -> None:
    ids: list[str] = []

    def submit() -> None:
        ids.extend(stage.submit("bob") for _ in range(3))

    threads = [threading.Thread(target=submit) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert len(set(ids)) == 24
    with stage.client() as client:
        listed = [job["id"] for job in client.get("/api/v1/jobs", params={"user": "bob"}).json()["jobs"]]
    assert sorted(listed) == sorted(ids)


def test_the_same_address_serves_one_service_after_the_other(tmp_path: Path) -> None:
    with contextlib.closing(ApiFront("127.0.0.1:0", Users.of_file(users_file(tmp_path)))) as front:
        for _ in range(2):
            with api_stage(tmp_path, front=front) as stage, stage.client() as client:
                assert client.get("/api/v1/me").json()["user"] == "alice"
                stage.submit()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{front.url}/healthz", trust_env=False)


def test_answers_do_not_wait_for_acknowledgements(stage: ApiStage) -> None:
    def is_quick() -> bool:
        begun_s = time.monotonic()
        client.get("/api/v1/me")
        return time.monotonic() - begun_s < 0.03

    with stage.client() as client:
        # Where they do, each takes 40 ms; where they do not, one in many takes less on the busiest machine.
        wait_until(is_quick, "a quick answer")


def test_an_address_that_asks_for_nothing_leaves_room_for_others(stage: ApiStage, caplog: Any) -> None:
    address = urlsplit(stage.url).hostname, urlsplit(stage.url).port
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(address, DEADLINE_S)) for _ in range(300)]
        # The oldest were closed to make room, so a client that sends a request is answered.
        assert httpx.get(f"{stage.url}/healthz", timeout=DEADLINE_S).status_code == 200
        with stage.client() as alice:
            assert alice.get("/api/v1/me").status_code == 200
        for connection in idle[: -front_module.ADDRESS_LIMIT]:
            connection.settimeout(DEADLINE_S)
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""
    assert len([one for one in caplog.records if "closed idle connections" in one.getMessage()]) <= 1


def test_whoever_asks_at_once_is_answered_while_strangers_connect_without_end(stage: ApiStage) -> None:
    address = urlsplit(stage.url).hostname, urlsplit(stage.url).port
    over = threading.Event()

    def flood() -> int:
        count = 0
        while not over.is_set():
            with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
                for _ in range(300):
                    stack.enter_context(socket.create_connection(address, DEADLINE_S))
                    count += 1
        return count

    with concurrent.futures.ThreadPoolExecutor() as pool:
        strangers = pool.submit(flood)
        try:
            for _ in range(30):
                assert httpx.get(f"{stage.url}/healthz", timeout=DEADLINE_S, trust_env=False).status_code == 200
                with stage.client() as alice:
                    assert alice.get("/api/v1/me").status_code == 200
        finally:
            over.set()
        assert strangers.result() > 1000


def test_a_user_has_so_many_connections_and_no_more(stage: ApiStage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_module, "USER_LIMIT", 3)
    with contextlib.ExitStack() as stack:
        # Of other tests' users some connection may be open still.
        clients = [stack.enter_context(stage.client("root")) for _ in range(4)]
        answers = [client.get("/api/v1/me") for client in clients]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 503]
        assert "the maximum number of connections of a user" in answers[3].json()["detail"]
        assert clients[0].get("/api/v1/me").status_code == 200
        with stage.client("bob") as bob:
            assert bob.get("/api/v1/me").status_code == 200
        clients[0].close()
        wait_until(lambda: clients[3].get("/api/v1/me").status_code == 200, "a place")


def test_clients_that_do_not_wait_for_their_answers_keep_no_places(
    stage: ApiStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_module, "USER_LIMIT", 3)
    address = urlsplit(stage.url).hostname, urlsplit(stage.url).port
    request = f"GET /api/v1/me HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKENS['bob']}\r\n\r\n"
    for _ in range(50):
        with socket.create_connection(address, DEADLINE_S) as connection:
            connection.sendall(request.encode())
    with stage.client("bob") as bob:
        wait_until(lambda: bob.get("/api/v1/me").status_code == 200, "a place")


def test_one_submission_of_a_user_at_a_time_is_looked_at(stage: ApiStage, monkeypatch: pytest.MonkeyPatch) -> None:
    looked, go_on = threading.Semaphore(0), threading.Event()
    checked: list[int] = []
    at_once: list[int] = []

    def slow(bundle: bytes, script: str) -> None:
        checked.append(1)
        at_once.append(len(checked))
        looked.release()
        assert go_on.wait(DEADLINE_S)
        checked.pop()

    monkeypatch.setattr(submission, "check", slow)

    def submit() -> None:
        with stage.client() as alice:
            assert alice.post("/api/v1/jobs", files=form(training()), timeout=DEADLINE_S).status_code == 201

    with ThreadPoolExecutor(4) as pool:
        submitted = [pool.submit(submit) for _ in range(4)]
        assert looked.acquire(timeout=DEADLINE_S)
        with stage.client("bob") as bob:
            assert bob.get("/api/v1/me").status_code == 200
        go_on.set()
        for one in submitted:
            one.result(DEADLINE_S)
    assert at_once == [1, 1, 1, 1]
