"""What users of a service may have mounted in their jobs' containers: what its operator allows, and checkpoints."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from dike.exceptions import BadInputError
from framework.mesos import events
from framework.mesos.containers import parse_volume
from framework.search.records import SearchSpec
from framework.service.mounts import Mounts
from framework.service.options import read_allowed
from framework.service.requests import SearchJobRequest, TrainingRequest, read_request, search_request
from framework.service.service import Service
from framework.service.store import ServiceStore
from framework.service.submission import Submissions
from tests.mesos.fake_mesos import FakeMesos
from tests.search.search_stage import search_spec
from tests.service.api_stage import BUNDLE, api_stage, form, training
from tests.service.fake_context import fake_context
from tests.waiting import wait_until

IMAGE = "registry/dike:1"
ROOT = "/shared/dike"
ALLOWED = read_allowed(["/data:ro", "/scratch"])


def search(**changes: Any) -> SearchSpec:
    return dataclasses.replace(search_spec(Path("/project"), **{"checkpoint_dir": "", **changes}), script="train.py")


def asked(*volumes: str, folder: str | None = None) -> list[TrainingRequest | SearchJobRequest]:
    """The same, asked for a training job and for a search."""
    return [
        read_request(training(volumes=list(volumes), checkpoint_dir=folder)),
        search_request(search(checkpoint_dir=folder or ""), "train.py", (), volumes=list(volumes)),
    ]


@pytest.mark.parametrize(
    ("volumes", "folder", "mounted"),
    [
        ((), None, [ROOT]),
        ((), f"{ROOT}/mine/one", [ROOT]),
        ((), "gs://bucket/one", []),
        ((), "/scratch/one", ["/scratch"]),
        (("/data:ro",), None, [ROOT, "/data:ro"]),
        (("/data:/mnt/data:ro", "/scratch:ro"), None, [ROOT, "/data:/mnt/data:ro", "/scratch:ro"]),
        (("/scratch:/data/a",), "/data/a/one", ["/scratch:/data/a"]),
        (("/scratch:/mnt/a", "/data:/mnt/b:ro"), None, [ROOT, "/scratch:/mnt/a", "/data:/mnt/b:ro"]),
    ],
)
def test_what_is_mounted(volumes: tuple[str, ...], folder: str | None, mounted: list[str]) -> None:
    mounts = Mounts(IMAGE, ROOT, ALLOWED)
    for request in asked(*volumes, folder=folder):
        mounts.check(request)
        container = mounts.container(request, folder or f"{ROOT}/job")
        assert container is not None
        assert container.image == IMAGE
        assert container.volumes == tuple(map(parse_volume, mounted))


@pytest.mark.parametrize(
    ("volumes", "folder", "said"),
    [
        (("/etc",), None, r"/etc:/etc is not allowed by this service; it allows /data \(read-only\), /scratch"),
        (("/data",), None, r"allows /data \(read-only\)"),
        # Might be a link that a job has made.
        (("/scratch/link",), None, "is not allowed by this service"),
        (("/shared/dike/link",), None, "is not allowed by this service"),
        (("/",), None, "cannot be mounted at a container's root"),
        (
            ("/scratch:/etc",),
            None,
            "cannot be mounted at /etc through a service; mount it at its own path or below /mnt",
        ),
        (("/data:/lib:ro",), None, "cannot be mounted at /lib"),
        (("/scratch:/mnt-too",), None, "cannot be mounted at /mnt-too"),
        (("/scratch:/mnt",), None, "cannot be mounted at /mnt through"),
        (("/scratch:/mnt/mesos",), None, "not in /mnt/mesos"),
        # Where a job may have made a link that leads out.
        (("/scratch:/mnt/a", "/data:/mnt/a/link:ro"), None, "/data cannot be mounted at /mnt/a/link, in the place of"),
        (("/data:/mnt/a/link:ro", "/scratch:/mnt/a"), None, "/data cannot be mounted at /mnt/a/link, in the place of"),
        ((), "/etc/one", f"The checkpoint folder /etc/one is neither below this service's --checkpoint-root {ROOT}"),
        ((), f"{ROOT}/../../etc/one", "is neither below"),
        ((), f"{ROOT}-too/one", "is neither below"),
        ((), "relative/one", "is neither below"),
        ((), "/data/one", "is neither below"),
        (("/data:ro",), "/data/one", "read-only"),
    ],
)
def test_what_is_not_allowed(volumes: tuple[str, ...], folder: str | None, said: str) -> None:
    for kind in range(2):
        with pytest.raises(BadInputError, match=said):
            Mounts(IMAGE, ROOT, ALLOWED).check(asked(*volumes, folder=folder)[kind])


@pytest.mark.parametrize("text", ["data", "/data:/mnt", "/data:/mnt:ro", "/data/../etc", ""])
def test_what_cannot_be_allowed(text: str) -> None:
    with pytest.raises(BadInputError):
        read_allowed([text])


@pytest.mark.parametrize(
    ("root", "allowed", "said"),
    [
        (ROOT, ["/shared"], f"--checkpoint-root {ROOT} lies in /shared, which jobs can write to"),
        (ROOT, [f"{ROOT}/x"], f"--allow-volume {ROOT}/x lies in {ROOT}, which"),
        ("/shared", ["/shared/ref:ro"], "--allow-volume /shared/ref lies in /shared, which"),
        ("gs://bucket", ["/data/ref:ro", "/data"], "--allow-volume /data/ref lies in /data, which"),
        (ROOT, ["/data:ro", "/data/"], "--allow-volume /data lies in /data, which"),
    ],
)
def test_folders_in_what_jobs_can_write_to_are_not_allowed(root: str, allowed: list[str], said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        Mounts(IMAGE, root, read_allowed(allowed))


def test_a_read_only_folder_may_hold_the_checkpoint_root() -> None:
    mounts = Mounts(IMAGE, ROOT, read_allowed(["/shared:ro", "/shared-too"]))
    for request in asked("/shared:/mnt/all:ro"):
        container = mounts.container(request, f"{ROOT}/job")
        assert container is not None
        assert container.volumes == (parse_volume(ROOT), parse_volume("/shared:/mnt/all:ro"))


def test_without_containers_folders_are_free_and_volumes_are_none() -> None:
    mounts = Mounts(None, ROOT)
    for request in asked(folder="/anywhere/one"):
        assert mounts.container(request, "/anywhere/one") is None
    for request in asked("/data"):
        with pytest.raises(BadInputError, match="leave out --volume"):
            mounts.check(request)


@pytest.mark.integration
def test_who_asks_for_what_is_not_there_is_told(tmp_path: Path) -> None:
    with api_stage(tmp_path) as stage, stage.client() as client:
        answers: list[httpx.Response] = [
            client.post("/api/v1/jobs", files=form(training(volumes=volumes))) for volumes in (["/data"], ["data"])
        ]
    assert [answer.status_code for answer in answers] == [400, 400]
    assert "leave out --volume" in answers[0].json()["detail"]
    assert "'data' cannot be mounted" in answers[1].json()["detail"]


class MountsStage:
    """A service whose jobs run in containers; Mesos is a fake."""

    def __init__(self, folder: Path) -> None:
        self.store = ServiceStore(f"sqlite:///{folder}/service.db")
        self.inbox: Any = events.EventScheduler().events

        plain = fake_context(self.store, ROOT)
        around = dataclasses.replace(plain, image=IMAGE, allowed_volumes=ALLOWED)
        self.mesos = FakeMesos()
        self.service = Service(around, self.mesos)
        self.submissions = Submissions(self.store, self.inbox, around.mounts)
        self.service.handle(events.Subscribed("F-1", "127.0.0.1:5050", 1e6))
        self.service.tick()

    def submit(self, request: TrainingRequest | SearchJobRequest) -> str:
        job_id = self.submissions.submit(request, BUNDLE, "ann").id
        self._deliver()
        return job_id

    def launched(self, job_id: str) -> list[dict[str, Any]]:
        """The volumes of the first task that the job gets."""

        def tasks() -> list[dict[str, Any]]:
            return [task for task in self.mesos.accepted if task["executor"]["source"] == job_id]

        self.service.handle(events.OffersArrived((self.mesos.offer(0, cpus=8.0, mem=65536),)))
        wait_until(tasks, "a launch", pause=self._go_on)
        volumes: list[dict[str, Any]] = tasks()[0]["executor"]["container"]["volumes"]
        return volumes

    def _go_on(self, pause_s: float) -> None:
        time.sleep(pause_s)
        self._deliver()
        self.service.tick()

    def _deliver(self) -> None:
        while not self.inbox.empty():
            self.service.handle(self.inbox.get())


@pytest.mark.slow
@pytest.mark.parametrize("is_search", [False, True])
def test_what_is_launched_has_its_volumes(tmp_path: Path, is_search: bool) -> None:
    stage = MountsStage(tmp_path)
    for refused in asked("/etc"):
        with pytest.raises(BadInputError, match="not allowed by this service"):
            stage.submit(refused)
    job_id = stage.submit(asked("/data:/mnt/data:ro")[is_search])
    assert stage.launched(job_id) == [
        parse_volume("/data:/mnt/data:ro").to_mesos(),
        parse_volume(ROOT).to_mesos(),
    ]
    stage.service.cancel()


def test_a_job_stays_where_its_checkpoints_are_should_the_root_change() -> None:
    for request in asked():
        container = Mounts(IMAGE, "/new").container(request, "/old/root/job")
        assert container is not None
        assert container.volumes == (parse_volume("/old/root"),)
