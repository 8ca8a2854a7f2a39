"""What tasks that run in a container image find of their agent's file system."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dike.exceptions import BadInputError

READ_ONLY = "ro"


@dataclass(frozen=True)
class Volume:
    """A folder of the agent, inside a container.

    Attributes:
        host: its path on the agent; Mesos wants it to be there.
        container: its path in the container; Mesos makes it there.
        read_only: whether tasks can only read it.

    Raises:
        BadInputError: if a path is not absolute, or climbs.
    """

    host: str
    container: str
    read_only: bool = False

    def __post_init__(self) -> None:
        for name in ("host", "container"):
            path = getattr(self, name)
            # Mesos makes the mount point as root, and does not look whether it is still inside the image.
            if not path.startswith("/") or ".." in path.split("/"):
                raise BadInputError(f"'{path}' cannot be mounted in a container; write an absolute path without '..'.")
            object.__setattr__(self, name, _normalize(path))
        if self.container == "/":
            raise BadInputError(f"The folder {self.host} cannot take the place of a container's whole file system.")

    def __str__(self) -> str:
        """As `parse_volume` reads it."""
        return ":".join((self.host, self.container, *([READ_ONLY] if self.read_only else [])))

    def contains(self, path: str) -> bool:
        """Whether a path in the container leads into it."""
        return f"{_normalize(path)}/".startswith(f"{self.container}/")

    def to_mesos(self) -> dict[str, Any]:
        """Mesos' Volume."""
        return {
            "mode": "RO" if self.read_only else "RW",
            "container_path": self.container,
            "source": {"type": "HOST_PATH", "host_path": {"path": self.host}},
        }


@dataclass(frozen=True)
class Container:
    """What a task runs in.

    Attributes:
        image: name of a Docker image.
        volumes: what is mounted there.
    """

    image: str
    volumes: tuple[Volume, ...] = ()

    def to_mesos(self) -> dict[str, Any]:
        """Mesos' ContainerInfo."""
        info: dict[str, Any] = {
            "type": "MESOS",
            "mesos": {"image": {"type": "DOCKER", "docker": {"name": self.image}}},
        }
        if self.volumes:
            # Outer folders first: mounted later, they would hide the inner ones.
            info["volumes"] = [one.to_mesos() for one in sorted(self.volumes, key=lambda one: one.container)]
        return info


def task_container(image: str | None, volumes: Iterable[str], checkpoint_dir: str | None) -> Container | None:
    """The container of a `dike run` or `dike tune`, whose user says what is mounted.

    Mesos mounts only what is there, and the folder for checkpoints may have to be made first; so it is the one above
    it that is mounted, unless that is the root.

    Args:
        image: None for the agent's own file system.
        volumes: as `parse_volume` reads them.
        checkpoint_dir: folder for checkpoints that has to outlive the container; None if there is none.

    Raises:
        BadInputError: if something is no volume, or checkpoints cannot be written.
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
    """Whether checkpoints in this folder would be gone with the container.

    Raises:
        BadInputError: if they could not be written there.
    """
    if "://" in folder:
        return False
    holding = [volume for volume in volumes if volume.contains(folder)]
    if not holding:
        return True
    innermost = max(holding, key=lambda volume: len(volume.container))
    if innermost.read_only:
        raise BadInputError(f"Checkpoints cannot be written to {folder}: --volume mounts {innermost} read-only.")
    return False


def parse_volumes(texts: Iterable[str]) -> tuple[Volume, ...]:
    """Reads several volumes.

    Raises:
        BadInputError: if one is none, or two have the same place in the container.
    """
    volumes = tuple(map(parse_volume, texts))
    places = [volume.container for volume in volumes]
    for place in places:
        if places.count(place) > 1:
            raise BadInputError(f"Two folders are to be mounted at {place}; give each a place of its own.")
    return volumes


def parse_volume(text: str) -> Volume:
    """Reads `HOST[:CONTAINER][:ro]`.

    Raises:
        BadInputError: if it is something else.
    """
    host, *rest = text.split(":")
    read_only = rest[-1:] == [READ_ONLY]
    places = rest[:-1] if read_only else rest
    if len(places) > 1:
        raise BadInputError(f"'{text}' is not a volume; write HOST, HOST:CONTAINER or HOST:CONTAINER:ro.")
    return Volume(host, places[0] if places else host, read_only)


def _normalize(path: str) -> str:
    return "/" + posixpath.normpath(path).lstrip("/") if path.startswith("/") else posixpath.normpath(path)
