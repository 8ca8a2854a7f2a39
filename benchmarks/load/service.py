"""A real service on a real Mesos, with tasks that end immediately."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from dike.exceptions import DikeError
from dike.profile import Api, ModelProfile, VariableSpec
from framework.embedded.agents import AgentSpec
from framework.embedded.cluster import EmbeddedCluster
from framework.embedded.ports import reserve_blocks
from framework.project import bundle
from framework.scheduler.records import JobState
from framework.scheduler.session import sigterm_as_interrupt
from framework.service.api.client import ServiceClient
from framework.service.requests import TrainingRequest

START_TIMEOUT_S = 60.0
POLL_INTERVAL_S = 0.05
USERS = {"load": "for-the-load-test-only", "other": "for-another-user-of-it"}
"""User -> token."""
PROFILE = ModelProfile(
    name="train.py",
    api=Api.GRAPH,
    parameters=1000,
    parameter_bytes=4000,
    variables=(VariableSpec("w", (1000,), "float32", 4000),),
    flops_forward_per_sample=2e3,
    flops_step_per_sample=6e3,
    longest_path_flops=2e3,
    batch_size=32,
)


@dataclass(frozen=True)
class ServiceUnderLoad:
    """A running service.

    Attributes:
        client: authenticated as the user `load`.
        bundle: the packed script folder.
    """

    client: ServiceClient
    process: psutil.Process
    cluster: EmbeddedCluster
    bundle: bytes

    def another_client(self, user: str) -> ServiceClient:
        return ServiceClient(self.client.url, USERS[user])

    def submit(self, client: ServiceClient | None = None) -> str:
        """Submits a job of one worker and one ps; returns its id."""
        request = TrainingRequest(script="train.py", profile=PROFILE.to_json(), max_workers=1)
        return (client or self.client).submit_request(request, self.bundle).id

    def open_jobs(self) -> int:
        """Returns the number of unfinished jobs of the user `load`."""
        states = tuple(state for state in JobState if not state.has_ended())
        return sum(1 for _ in self.client.jobs(user="load", states=states))

    def memory_mib(self) -> float:
        return float(self.process.memory_info().rss) / 2**20


@contextlib.contextmanager
def service_under_load(agents: int, cpus_of_agent: float) -> Iterator[ServiceUnderLoad]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(sigterm_as_interrupt())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dike-load-")))
        python = folder / "python"
        executor = Path(__file__).with_name("quick_executor.py")
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{executor}"\n')
        python.chmod(0o755)
        (folder / "project").mkdir()
        (folder / "project" / "train.py").write_text("print('never run')\n")
        (folder / "users.yaml").write_text("".join(f"{name}: {{token: {token}}}\n" for name, token in USERS.items()))
        (folder / "users.yaml").chmod(0o600)
        # Tasks do not listen on their ports, so all agents may offer the same.
        spec = AgentSpec(resources=f"cpus:{cpus_of_agent:g};mem:65536;disk:100000;ports:[40000-49999]")
        cluster = stack.enter_context(EmbeddedCluster([spec] * agents))
        (block,) = reserve_blocks(1)
        stack.callback(block.claim.close)
        log = stack.enter_context((folder / "service.log").open("wb"))
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "framework", "serve", "--master", cluster.master),
                *("--listen", f"127.0.0.1:{block.first}", "--state", f"sqlite:///{folder}/service.db"),
                *("--users", folder / "users.yaml", "--agent-python", python, "--checkpoint-root", folder / "runs"),
            ],
            stdout=log,
            stderr=log,
        )
        stack.callback(process.wait)
        stack.callback(process.terminate)
        client = stack.enter_context(ServiceClient(f"http://127.0.0.1:{block.first}", USERS["load"]))
        _wait_until_up(client, process, folder / "service.log")
        packed = bundle.pack(folder / "project" / "train.py")
        yield ServiceUnderLoad(client, psutil.Process(process.pid), cluster, packed)


def _wait_until_up(client: ServiceClient, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            client.me()
        except DikeError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the service does not start:\n{log.read_text()}") from None
            time.sleep(POLL_INTERVAL_S)
        else:
            return
