"""Containers of tasks, and the agents' folders that are mounted into them."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dike.exceptions import BadInputError

READ_ONLY = "ro"


@dataclass(frozen=True)
class Volume:
    """A folder of the agent that is mounted into a container.

    Attributes:
        host: its path on the agent, where it must exist.
        container: its path in the container, which Mesos creates.
        read_only: whether tasks can only read it.

    Raises:
        BadInputError: if a path is relative or contains `..`.
    """

    host: str
    container: str
    read_only: bool = False

    def __post_init__(self) -> None:
        for name in ("host", "container"):
            path = getattr(self, name)
            # Mesos creates the mount point as root, and does not check that it is inside the image.
            if not path.startswith("/") or ".." in path.split("/"):
                raise BadInputError(f"'{path}' cannot be mounted in a container; write an absolute path without '..'.")
            object.__setattr__(self, name, _normalize(path))
        if self.container == "/":
            raise BadInputError(
                f"The folder {self.host} cannot be mounted at a container's root; name a folder below it."
            )

    def __str__(self) -> str:
        """Formats it so that `parse_volume` can read it."""
        return ":".join((self.host, self.container, *([READ_ONLY] if self.read_only else [])))

    def contains(self, path: str) -> bool:
        return f"{_normalize(path)}/".startswith(f"{self.container}/")

    def to_mesos(self) -> dict[str, Any]:
        return {
            "mode": "RO" if self.read_only else "RW",
            "container_path": self.container,
            "source": {"type": "HOST_PATH", "host_path": {"path": self.host}},
        }


@dataclass(frozen=True)
class Container:
    """A task's container."""

    image: str
    volumes: tuple[Volume, ...] = ()

    def to_mesos(self) -> dict[str, Any]:
        info: dict[str, Any] = {
            "type": "MESOS",
            "mesos": {"image": {"type": "DOCKER", "docker": {"name": self.image}}},
        }
        if self.volumes:
            # Outer folders first: mounted later, they would hide the inner ones.
            info["volumes"] = [one.to_mesos() for one in sorted(self.volumes, key=lambda one: one.container)]
        return info


def task_container(image: str | None, volumes: Iterable[str], checkpoint_dir: str | None) -> Container | None:
    """Returns the container of a `dike run` or `dike tune`.

    If the checkpoint folder is not below a volume, its parent folder is mounted (unless that is the root): Mesos mounts
    only folders that exist, and the checkpoint folder may not exist yet.

    Args:
        image: None for the agent's own file system.
        volumes: in the form that `parse_volume` reads.
        checkpoint_dir: folder of checkpoints that must be kept when the container ends; None if there is none.

    Raises:
        BadInputError: if a volume is malformed or given without an image, or the checkpoint folder is read-only.
    """
    wanted = parse_volumes(volumes)
    if image is None:
        if wanted:
            raise BadInputError("--volume needs --image: without one, tasks see the folders of their agents anyway.")
        return None
    if checkpoint_dir is not None and needs_mount(checkpoint_dir, wanted):
        above = posixpath.dirname(_normalize(checkpoint_dir))
        mounted = checkpoint_dir if above == "/" else above
        wanted = (Volume(mounted, mounted), *wanted)
    return Container(image, wanted)


def needs_mount(folder: str, volumes: Sequence[Volume]) -> bool:
    """Whether checkpoints in this folder would be deleted with the container.

    Raises:
        BadInputError: if the folder is on a read-only volume.
    """
    if "://" in folder:
        return False
    containing = [volume for volume in volumes if volume.contains(folder)]
    if not containing:
        return True
    innermost = max(containing, key=lambda volume: len(volume.container))
    if innermost.read_only:
        raise BadInputError(f"Checkpoints cannot be written to {folder}: --volume mounts {innermost} read-only.")
    return False


def parse_volumes(texts: Iterable[str]) -> tuple[Volume, ...]:
    """Parses several volumes.

    Raises:
        BadInputError: if one is malformed, or two have the same path in the container.
    """
    volumes = tuple(map(parse_volume, texts))
    places = [volume.container for volume in volumes]
    for place in places:
        if places.count(place) > 1:
            raise BadInputError(f"Two volumes are mounted at {place}; give each its own path in the container.")
    return volumes


def parse_volume(text: str) -> Volume:
    """Parses `HOST[:CONTAINER][:ro]`.

    Raises:
        BadInputError: if it is malformed.
    """
    host, *rest = text.split(":")
    read_only = rest[-1:] == [READ_ONLY]
    places = rest[:-1] if read_only else rest
    if len(places) > 1:
        raise BadInputError(f"'{text}' is not a volume; write HOST, HOST:CONTAINER or HOST:CONTAINER:ro.")
    return Volume(host, places[0] if places else host, read_only)


def _normalize(path: str) -> str:
    return "/" + posixpath.normpath(path).lstrip("/") if path.startswith("/") else posixpath.normpath(path)
