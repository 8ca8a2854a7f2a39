"""The client of the REST API towards servers that break off, refuse, or are something else."""

from __future__ import annotations

import http.server
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest

from dike.exceptions import BadInputError, DikeError
from framework.cli.following import FollowMode
from framework.service.api import client as client_module
from framework.service.api import client_http
from framework.service.api.client import ServiceClient
from framework.service.api.client_http import ServiceUnavailableError, is_loopback_url
from framework.service.api.schemas import JobDetails, Submitted

Answer = tuple[int, str]
"""Status and body."""


@contextmanager
def answering(answer: Callable[[str, str], Answer]) -> Iterator[tuple[ServiceClient, list[str]]]:
    """A client, and what it asked a server that answers so: method and path to status and body."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply("GET")

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.reply("POST")

        def reply(self, method: str) -> None:
            asked.append(f"{method} {self.path}")
            status, body = answer(method, self.path)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 (the base class' name)
            """Logs nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with ServiceClient(f"http://127.0.0.1:{server.server_address[1]}", "a-token") as client:
            yield client, asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def lines(*numbers: int) -> str:
    return "".join(
        json.dumps({"number": number, "task": "worker:0", "stream": "stdout", "text": f"{number}\n"}) + "\n\n"
        for number in numbers
    )


JOB = {
    "id": "job",
    "kind": "training",
    "user": "ann",
    "script": "train.py",
    "constraints": [],
    "state": "finished",
    "submitted_s": 1.0,
    "started_s": 2.0,
    "ended_s": 3.0,
    "kill_requested": False,
    "waiting": "",
    "failure": "",
    "live_tasks": 0,
    "progress": None,
    "trials": None,
    "best": None,
    "yours": True,
}


@pytest.mark.integration
@pytest.mark.parametrize(("resumed", "shown"), [(False, "3\n7\n8\n"), (True, "8\n")])
def test_of_a_resumed_job_only_what_is_new_is_shown(
    resumed: bool, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    details = JobDetails.model_validate({**JOB, "request": {}, "result": None}).model_dump_json()

    def answer(method: str, path: str) -> Answer:
        if "/logs" not in path:
            return 200, details
        numbers = [number for number in (3, 7) if "after=0" in path]
        following = "follow=true" in path
        return 200, lines(*numbers, *([8] if following else [])) + json.dumps({"ended": "finished"}) + "\n"

    with answering(answer) as (client, _):
        submitted = Submitted.model_validate({**JOB, "warnings": []})
        FollowMode(wait=False, follow=True, as_json=False).after(client, submitted, resumed=resumed)
    said = capsys.readouterr()
    assert said.out == shown
    assert said.err.startswith(f"dike: {'resumed' if resumed else 'submitted'} job\n")


@pytest.mark.integration
def test_a_broken_stream_resumes_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "RECONNECT_PAUSE_S", 0.01)
    parts = {"0": (200, lines(3, 7)), "7": (200, lines(8) + json.dumps({"ended": "finished"}) + "\n")}
    failures = iter([(503, json.dumps({"detail": "The service is starting."}))])

    def answer(method: str, path: str) -> Answer:
        after = path.partition("after=")[2].partition("&")[0]
        return next(failures, parts[after]) if after == "7" else parts[after]

    said: list[str] = []
    with answering(answer) as (client, asked):
        chunks = list(client.logs("job", follow=True, note=said.append))
    assert [chunk.number for chunk in chunks] == [3, 7, 8]
    assert len(asked) == 3
    assert len(said) == 2
    assert "trying again" in said[0]
    assert "is back" in said[1]


@pytest.mark.integration
def test_only_questions_are_asked_again() -> None:
    with answering(lambda method, path: (503, json.dumps({"detail": "Too busy."}))) as (client, asked):
        with pytest.raises(ServiceUnavailableError, match="Too busy"):
            client.kill("job")
        assert asked == ["POST /api/v1/jobs/job/kill"]
        with pytest.raises(ServiceUnavailableError, match="Too busy"):
            client.job("job")
        assert len(asked) > 2


@pytest.mark.integration
@pytest.mark.parametrize(
    ("answer", "error", "said"),
    [
        ((200, "<html>Welcome to nginx</html>"), BadInputError, "is not a Dike service"),
        ((200, '{"user": "ann"}'), BadInputError, "a version that this dike does not understand"),
        ((302, ""), BadInputError, "is not a Dike service"),
        ((400, '{"detail": "That makes no sense."}'), BadInputError, "That makes no sense."),
        ((403, '{"detail": "That is not yours."}'), BadInputError, "That is not yours."),
        ((401, '{"detail": "There is no token."}'), BadInputError, "does not know this token; give the right one"),
        ((500, '{"detail": "Something broke."}'), DikeError, "has failed: Something broke."),
    ],
)
def test_every_other_answer_is_one_sentence(answer: Answer, error: type[DikeError], said: str) -> None:
    with answering(lambda method, path: answer) as (client, _), pytest.raises(error) as raised:
        client.me()
    assert said in str(raised.value)
    assert raised.value.exit_code == error.exit_code


@pytest.mark.parametrize("url", ["ftp://host", "http://", "host:8680", "http://user:password@host", "http://host:port"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(BadInputError, match="not the address of a service"):
        ServiceClient(url, None)


@pytest.mark.parametrize("token", ["", "two words", "zwölf", "line\nbreak"])
def test_what_is_no_token(token: str) -> None:
    with pytest.raises(BadInputError, match="not one word of ASCII") as raised:
        ServiceClient("http://127.0.0.1:1", token)
    assert not token or token not in str(raised.value)


def test_which_addresses_are_on_this_machine() -> None:
    assert is_loopback_url("http://127.0.0.1:8680")
    assert is_loopback_url("http://[::1]:8680")
    assert is_loopback_url("http://localhost:8680")
    assert not is_loopback_url("https://dike.example.org")
    assert not is_loopback_url("http://127.0.0.1.example.org")


@pytest.mark.integration
def test_who_has_been_silent_for_long_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_http, "TIMEOUT", httpx.Timeout(0.3))
    monkeypatch.setattr(client_http, "MAX_RETRIED_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = client_http.ServiceHttp(f"http://127.0.0.1:{silent.getsockname()[1]}", None)
        with pytest.raises(ServiceUnavailableError, match="No Dike service answers"):
            client.get("/jobs", dict)
        client.close()
        silent.accept()
        silent.setblocking(False)
        with pytest.raises(BlockingIOError):
            silent.accept()


@pytest.mark.integration
def test_a_request_that_may_have_arrived_is_not_said_to_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_http, "TIMEOUT", httpx.Timeout(0.3))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = client_http.ServiceHttp(f"http://127.0.0.1:{silent.getsockname()[1]}", None)
        with pytest.raises(ServiceUnavailableError, match="may have done what it was asked for: look at dike jobs"):
            client.post("/jobs", dict, json={})
    with pytest.raises(ServiceUnavailableError, match="No Dike service answers"):
        client.post("/jobs", dict, json={})
    client.close()
