"""A service with its API on a real socket, a real database and a loop on a thread; Mesos is a fake."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import io
import json
import queue
import tarfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from framework.mesos import events
from framework.mesos.master import LeadingMaster, Master
from framework.scheduler.agents import AgentDirectory
from framework.scheduler.records import JobState
from framework.service.api.backend import Proxy
from framework.service.api.front import ApiFront
from framework.service.service import Service
from framework.service.store import ServiceStore
from framework.service.submission import Submissions
from framework.service.users import Users
from tests.mesos.fake_mesos import FakeMesos
from tests.service.fake_context import fake_context
from tests.training.job_stage import profile
from tests.waiting import wait_until

DEADLINE_S = 60.0
TOKENS = {"alice": "alices-token-0123456789", "bob": "bobs-token-0123456789", "root": "roots-token-0123456789"}


class _FakeMaster(http.server.BaseHTTPRequestHandler):
    """Lists agents in the format of Mesos 1.11."""

    hostnames: Sequence[str] = ("agent-1", "agent-0")

    def do_GET(self) -> None:
        agents = [
            {
                "id": f"S-{hostname.rpartition('-')[2]}",
                "hostname": hostname,
                "active": True,
                "attributes": {"rack": f"r{hostname.rpartition('-')[2]}", "speed": 2.5},
                "resources": {"cpus": 8.0, "mem": 4096.0, "disk": 1000.0, "gpus": 0.0, "ports": "[31000-32000]"},
                "used_resources": {"cpus": 1.0, "mem": 64.0},
                "offered_resources": {},
            }
            for hostname in self.hostnames
        ]
        body = json.dumps({"slaves": agents}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base class' name)
        """Tests say enough."""


@contextlib.contextmanager
def fake_master(hostnames: Sequence[str] = _FakeMaster.hostnames) -> Iterator[Master]:
    """A master that answers requests for the list of agents only."""
    handler = type("Handler", (_FakeMaster,), {"hostnames": hostnames})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]
        yield Master("zk://127.0.0.1:1/mesos", "127.0.0.1", port, "1.11.0")
        server.shutdown()


def users_file(folder: Path, more: str = "") -> Path:
    """Three users, the last an administrator, and what else the file is to say."""
    lines = [
        f"{name}: {{token_sha256: {hashlib.sha256(token.encode()).hexdigest()}, admin: {str(name == 'root').lower()}}}"
        for name, token in TOKENS.items()
    ]
    path = folder / "users.yaml"
    path.write_text("\n".join([*lines, more]), encoding="utf-8")
    return path


def bundle() -> bytes:
    """A folder with a script, packed."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        content = b"print('hello')\n"
        info = tarfile.TarInfo("train.py")
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


BUNDLE = bundle()


ONE_WORKER = {"strategy": "ps", "max_workers": 1}
"""With a parameter server: one plain task would be faster."""


def training(**changes: Any) -> dict[str, Any]:
    """A training job's request."""
    return {"kind": "training", "script": "train.py", "profile": profile().to_json(), **ONE_WORKER, **changes}


def form(request: Any, archive: bytes = BUNDLE) -> dict[str, Any]:
    """The form that submits a job."""
    text = request if isinstance(request, str | bytes) else json.dumps(request)
    return {"request": ("request.json", text), "bundle": ("bundle.tar.gz", archive)}


class ApiStage:
    """What a test has of the service.

    Attributes:
        url: where the API is.
        store: the database.
        master: of the cluster.
        mesos: what the service asked of Mesos.
        inbox: what the loop reads.
    """

    def __init__(self, url: str, store: ServiceStore, master: Master, service: Callable[[FakeMesos], Service]) -> None:
        self.url = url
        self.store = store
        self.master = master
        self.mesos = FakeMesos()
        self.inbox: queue.SimpleQueue[events.Event] = queue.SimpleQueue()
        self.service = service(self.mesos)
        self._ended = threading.Event()
        self._loop = threading.Thread(target=self._go_round)

    def __enter__(self) -> ApiStage:
        self.inbox.put(events.Subscribed("F-1", self.master.address))
        self._loop.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pause()

    @property
    def is_alive(self) -> bool:
        """Whether the loop goes round."""
        return self._loop.is_alive()

    def pause(self) -> None:
        """The loop stops, for good."""
        self._ended.set()
        self._loop.join(DEADLINE_S)
        assert not self._loop.is_alive()

    def _go_round(self) -> None:
        while not self._ended.wait(0.02):
            while not self.inbox.empty():
                self.service.handle(self.inbox.get())
            self.service.tick()

    def client(self, user: str | None = "alice") -> httpx.Client:
        """A client with a user's token."""
        headers = {} if user is None else {"Authorization": f"Bearer {TOKENS[user]}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=DEADLINE_S, trust_env=False)

    def submit(self, user: str = "alice", **changes: Any) -> str:
        """Submits a training job; returns its id."""
        with self.client(user) as client:
            answer = client.post("/api/v1/jobs", files=form(training(**changes)))
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    def wait_for_state(self, job_id: str, wanted: JobState) -> None:
        """Waits until a job has reached this state."""

        def has_come() -> bool:
            record = self.store.job(job_id)
            assert record is not None
            assert record.state is wanted or not record.state.has_ended(), record
            return record.state is wanted

        wait_until(has_come, f"the state {wanted}")


@contextlib.contextmanager
def api_stage(
    folder: Path, front: ApiFront | None = None, users: Users | None = None, proxy: Proxy | None = None
) -> Iterator[ApiStage]:
    """Runs a service while the context lasts, with an API of its own if none is given."""
    with contextlib.ExitStack() as stack:
        users = users or Users.of_file(users_file(folder))
        if front is None:
            listening = ApiFront("127.0.0.1:0", users, "https://dike.example/", proxy)
            front = stack.enter_context(contextlib.closing(listening))
        store = stack.enter_context(contextlib.closing(ServiceStore(f"sqlite:///{folder}/service.db", users.limits)))
        master = stack.enter_context(fake_master())
        leading = LeadingMaster(master)
        directory = stack.enter_context(contextlib.closing(AgentDirectory(leading.ask)))
        directory.refresh()
        around = fake_context(store, str(folder / "runs"))
        stage = ApiStage(
            front.url, store, master, lambda mesos: Service(around, mesos, agents=directory, master=leading)
        )
        stack.enter_context(front(Submissions(store, stage.inbox), stage.service, leading))
        yield stack.enter_context(stage)
