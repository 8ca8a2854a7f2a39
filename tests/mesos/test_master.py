"""What a master is asked, beside the subscription."""

from __future__ import annotations

import http.server
import json
import threading
from base64 import b64encode
from collections.abc import Iterator

import pytest

from framework.mesos.master import LeadingMaster, Master, leader_age_s
from framework.scheduler.agents import AgentDirectory, admitted_agents
from framework.scheduler.constraints import parse_constraints

pytestmark = pytest.mark.integration

SLAVE = {
    "id": "S0",
    "hostname": "a",
    "active": True,
    "attributes": {"slots": 4.0, "rack": "r1"},
    "resources": {"cpus": 4, "mem": 1000, "disk": 1000, "gpus": 0, "ports": "[1-9]"},
}
KNOWN = "Basic " + b64encode(b"dike:fjord").decode()


@pytest.fixture
def port() -> Iterator[int]:
    """Where a master answers that has `--authenticate_http_readonly`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({"slaves": [SLAVE]})

        def do_POST(self) -> None:
            self._answer({"get_master": {"elected_time": 0.0}})

        def _answer(self, values: object) -> None:
            content = json.dumps(values).encode()
            self.send_response(200 if self.headers["Authorization"] == KNOWN else 401)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def master(port: int, secret: str | None) -> LeadingMaster:
    return LeadingMaster(
        Master(f"127.0.0.1:{port}", "127.0.0.1", port, "1.11.0", ("dike", secret) if secret is not None else None)
    )


def test_a_master_that_answers_only_whom_it_knows_tells_of_its_agents(port: int) -> None:
    directory = AgentDirectory(master(port, "fjord").ask)
    directory.refresh()
    assert [node.name for node in directory.nodes(parse_constraints(())) or ()] == ["a"]
    assert leader_age_s(f"127.0.0.1:{port}", ("dike", "fjord")) is not None
    assert master(port, "wrong").agents() is None
    assert master(port, None).agents() is None
    assert "fjord" not in repr(master(port, "fjord")._now)


@pytest.mark.parametrize("constraint", ["slots:IS:4", "rack:IS:r1"])
def test_attributes_are_the_same_whoever_tells_of_them(port: int, constraint: str) -> None:
    assert [node.name for node in admitted_agents(master(port, "fjord"), (constraint,)) or ()] == ["a"]
    directory = AgentDirectory(master(port, "fjord").ask)
    directory.refresh()
    assert [node.name for node in directory.nodes(parse_constraints((constraint,))) or ()] == ["a"]
