"""`dike serve --allocation` from outside: real TensorFlow jobs share a real Mesos."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.allocation import request, serving
from benchmarks.elastic import AGENT, SCRIPT
from framework.embedded.cluster import EmbeddedCluster
from framework.project import bundle
from framework.service.api.client import ServiceClient
from framework.service.explanation import Verdict
from tests.running import DEADLINE_S
from tests.waiting import wait_until

pytestmark = [pytest.mark.mesos, pytest.mark.tensorflow, pytest.mark.timeout(900)]

ENDLESS = 1_000_000


def workers(client: ServiceClient, job_id: str) -> int:
    return sum(".worker-" in task.task_id and task.state == "running" for task in client.tasks(job_id))


def step(client: ServiceClient, job_id: str) -> int:
    progress = client.job(job_id).progress
    return 0 if progress is None else progress.step


def test_jobs_make_room_for_each_other_and_grow_again_under_the_next_service(tmp_path: Path) -> None:
    """Two agents have a GPU each: one job has both, two have one each, a third has to wait."""
    packed, log = bundle.pack(SCRIPT), tmp_path / "service.log"

    def until(condition: Callable[[], bool], what: str) -> None:
        wait_until(condition, what, said=log.read_text, deadline_s=DEADLINE_S)

    with EmbeddedCluster([AGENT] * 2) as cluster:
        cluster.wait_for_agents(60)
        with serving(tmp_path, cluster.master, "drf") as client:
            first = client.submit_request(request(ENDLESS), packed).id
            until(lambda: workers(client, first) == 2 and step(client, first) > 0, "the first job with both GPUs")
            second = client.submit_request(request(ENDLESS), packed).id
            until(lambda: step(client, second) > 0, "the second job")
            assert (workers(client, first), workers(client, second)) == (1, 1)
            changed = step(client, first)
            until(lambda: step(client, first) > changed, "that the first job trains on")
            third = client.submit_request(request(ENDLESS), packed).id
            until(lambda: client.explain(third).verdict is Verdict.TURN, "that the third job waits for its turn")
            assert not client.tasks(third)
            until(lambda: "gives all workers to other jobs" in client.job(third).waiting, "why")
            client.kill(third)
        with serving(tmp_path, cluster.master, "optimus") as client:
            client.kill(first)
            until(lambda: workers(client, second) == 2, "that the second job grows")
            until(lambda: client.job(first).result is not None, "the end of the first job")
            result = client.job(first).result
            assert result is not None
            assert result["restarts"] == 0
            (resize,) = result["resizes"]
            assert (resize["from_workers"], resize["to_workers"]) == (2, 1)
            assert "it is given 1 worker" in resize["reason"]
            assert not [event for event in client.events(second) if event.kind == "restarting"]
