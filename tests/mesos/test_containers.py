"""Volumes of tasks' containers, in the form that Mesos expects."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from dike.exceptions import BadInputError
from framework.mesos.containers import Container, Volume, parse_volume, parse_volumes, task_container
from framework.mesos.offers import by_agent
from framework.search.slot_pool import SlotLaunch, slots_on
from tests.mesos.fake_mesos import FakeMesos
from tests.search.search_stage import search_spec
from tests.training.job_stage import JobStage, spec

IMAGE = "registry/dike:1"


def mounts(task: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Host's path, container's path and mode of what is mounted for a task."""
    container = task["executor"]["container"]
    assert container["type"] == "MESOS"
    assert container["mesos"]["image"] == {"type": "DOCKER", "docker": {"name": IMAGE}}
    return [
        (volume["source"]["host_path"]["path"], volume["container_path"], volume["mode"])
        for volume in container.get("volumes", ())
    ]


@pytest.mark.parametrize(
    ("text", "volume"),
    [
        ("/data", Volume("/data", "/data")),
        ("/data/:/mnt//data", Volume("/data", "/mnt/data")),
        ("/data:/mnt:ro", Volume("/data", "/mnt", read_only=True)),
        ("/data:ro", Volume("/data", "/data", read_only=True)),
    ],
)
def test_a_volume_is_read(text: str, volume: Volume) -> None:
    assert parse_volume(text) == volume
    assert parse_volume(str(volume)) == volume


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["data"], "'data' cannot be mounted"),
        (["/data:mnt"], "'mnt' cannot be mounted"),
        # Mesos would make this one outside of the image, as root.
        (["/data:/mnt/../../../etc"], "without '..'"),
        (["/data/../etc"], "without '..'"),
        (["/data:/"], "container's root"),
        (["/data:/mnt:rw"], "HOST:CONTAINER:ro"),
        (["/data:/mnt:/x:ro"], "HOST:CONTAINER:ro"),
        (["/a:/mnt", "/b:/mnt/"], "Two volumes are mounted at /mnt"),
        ([""], "cannot be mounted"),
    ],
)
def test_what_is_no_volume(texts: list[str], said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        parse_volumes(texts)


@pytest.mark.parametrize(
    ("folder", "volumes", "mounted"),
    [
        # Mesos mounts only existing folders, and the job may create the folder itself.
        ("/shared/runs/one", (), ["/shared/runs:/shared/runs"]),
        ("/one", (), ["/one:/one"]),
        ("gs://bucket/one", (), []),
        (None, (), []),
        ("/shared/runs/one", ("/nfs:/shared",), ["/nfs:/shared"]),
        ("/shared/runs/one", ("/data:ro",), ["/shared/runs:/shared/runs", "/data:/data:ro"]),
        # Only looks as if it held the folder.
        ("/shared-too/one", ("/shared",), ["/shared-too:/shared-too", "/shared:/shared"]),
        ("/data/runs/one", ("/data:ro", "/data/runs"), ["/data:/data:ro", "/data/runs:/data/runs"]),
    ],
)
def test_checkpoints_outlive_their_container(folder: str | None, volumes: tuple[str, ...], mounted: list[str]) -> None:
    assert task_container(IMAGE, volumes, folder) == Container(IMAGE, tuple(map(parse_volume, mounted)))


def test_checkpoints_cannot_go_where_nothing_can_be_written() -> None:
    with pytest.raises(BadInputError, match=r"/shared/one: --volume mounts /shared:/shared:ro read-only"):
        task_container(IMAGE, ("/shared:ro",), "/shared/one")


def test_without_an_image_nothing_is_mounted() -> None:
    assert task_container(None, (), "/shared/one") is None
    with pytest.raises(BadInputError, match="--volume needs --image"):
        task_container(None, ("/data",), "/shared/one")


def test_tasks_of_a_job_are_launched_with_what_is_mounted() -> None:
    container = task_container(IMAGE, ("/shared/runs/data:ro",), "/shared/runs/one")
    stage = JobStage(spec(container=container))
    stage.start()
    assert len(stage.mesos.accepted) > 1
    for task in stage.mesos.accepted:
        # Outer folders first: the other way round they would hide the inner ones.
        assert mounts(task) == [
            ("/shared/runs", "/shared/runs", "RW"),
            ("/shared/runs/data", "/shared/runs/data", "RO"),
        ]
    plain = JobStage(spec())
    plain.start()
    assert all("container" not in task["executor"] for task in plain.mesos.accepted)


def test_slots_are_launched_with_what_is_mounted(tmp_path: Path) -> None:
    launch = SlotLaunch(search_spec(tmp_path), "http://127.0.0.1:1/bundle/token", "train.py", (), "python3")
    launch = dataclasses.replace(launch, container=task_container(IMAGE, (), "/shared/search"))
    _, operation = slots_on(launch, by_agent([FakeMesos().offer()])[0], 0, 0, 2, (), (), {})
    tasks = operation["launch"]["task_infos"]
    assert [mounts(task) for task in tasks] == [[("/shared", "/shared", "RW")]] * 2
