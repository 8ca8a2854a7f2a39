"""What the jobs of a service may mount in their containers: the folders that its operator allows."""

from __future__ import annotations

import itertools
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass

from dike.exceptions import BadInputError
from framework.mesos.containers import Container, Volume, needs_mount, parse_volumes
from framework.service.requests import SearchJobRequest, TrainingRequest

PLACES = ("/mnt/", "/data/")
"""Users may mount folders below these paths, besides at a folder's own path. Elsewhere a folder could replace programs
or accounts that the image trusts, and its setuid programs would make a task root in its container."""
SANDBOX = "/mnt/mesos"
"""Mesos mounts the sandbox below it."""


@dataclass(frozen=True)
class Mounts:
    """What a job may mount: `allowed` volumes, at their own path or in `PLACES`, and its checkpoint folder.

    Raises:
        BadInputError: if the root cannot be mounted, or jobs could replace one of these folders by a link.
    """

    image: str | None
    checkpoint_root: str
    allowed: tuple[Volume, ...] = ()

    def __post_init__(self) -> None:
        if self.image is None:
            return
        named = [("--allow-volume", volume) for volume in self.allowed]
        if "://" not in self.checkpoint_root:
            named.append(("--checkpoint-root", Volume(self.checkpoint_root, self.checkpoint_root)))
        for (option, inner), (_, outer) in itertools.permutations(named, 2):
            if not outer.read_only and outer.contains(inner.host):
                raise BadInputError(
                    f"{option} {inner.host} lies in {outer.host}, which jobs can write to; name folders apart from "
                    "each other."
                )

    def check(self, request: TrainingRequest | SearchJobRequest) -> None:
        """Raises `BadInputError` if a request asks for more than the service allows."""
        self.container(request, _named_folder(request) or self.checkpoint_root)

    def container(self, request: TrainingRequest | SearchJobRequest, checkpoint_dir: str) -> Container | None:
        """The container of a job, None without an image; raises `BadInputError` if it asks for more than the service
        allows.
        """
        if self.image is None:
            if request.volumes:
                raise BadInputError(
                    "This service runs jobs in its agents' own file systems, whose folders they see anyway; leave out "
                    "--volume."
                )
            return None
        volumes = parse_volumes(request.volumes)
        for volume in volumes:
            self._check_allowed(volume)
        if needs_mount(checkpoint_dir, volumes):
            volumes = (self._for_checkpoints(request, checkpoint_dir), *volumes)
        _check_nesting(volumes)
        return Container(self.image, volumes)

    def _check_allowed(self, volume: Volume) -> None:
        place = volume.container
        if place != volume.host and (not place.startswith(PLACES) or f"{place}/".startswith(f"{SANDBOX}/")):
            raise BadInputError(
                f"The volume {volume} cannot be mounted at {place} through a service; mount it at its own path or "
                f"below /mnt or /data, but not in {SANDBOX}."
            )
        # Exactly these folders: one below them might be a link that a job has made.
        for allowed in self.allowed:
            if allowed.host == volume.host and (volume.read_only or not allowed.read_only):
                return
        known = ", ".join(
            f"{one.host} ({'read-only' if one.read_only else 'to read and write'})" for one in self.allowed
        )
        raise BadInputError(
            f"The volume {volume} is not allowed by this service; it allows {known or 'none (--allow-volume)'}."
        )

    def _for_checkpoints(self, request: TrainingRequest | SearchJobRequest, folder: str) -> Volume:
        if "://" not in self.checkpoint_root:
            root = Volume(self.checkpoint_root, self.checkpoint_root)
            if root.contains(folder):
                return root
        for allowed in self.allowed:
            place = Volume(allowed.host, allowed.host)
            if not allowed.read_only and place.contains(folder):
                return place
        if _named_folder(request) is None:
            # An earlier service with another root chose this folder.
            return Volume(posixpath.dirname(folder), posixpath.dirname(folder))
        raise BadInputError(
            f"The checkpoint folder {folder} is neither below this service's --checkpoint-root {self.checkpoint_root} "
            "nor in what --allow-volume lets its jobs write to."
        )


NO_CONTAINERS = Mounts(image=None, checkpoint_root="")


def _check_nesting(volumes: Sequence[Volume]) -> None:
    """Refuses a mount point inside another mount: a job could replace it by a link to anywhere in the container."""
    for outer, inner in itertools.permutations(volumes, 2):
        # `Mounts` has checked that folders at their own paths do not lie in a writable one.
        named_so = outer.container == outer.host and inner.container == inner.host
        if outer.contains(inner.container) and not named_so:
            raise BadInputError(
                f"{inner.host} cannot be mounted at {inner.container}, in the place of {outer.host}; mount them apart "
                "from each other."
            )


def _named_folder(request: TrainingRequest | SearchJobRequest) -> str | None:
    return (
        request.to_spec().checkpoint_dir if isinstance(request, SearchJobRequest) else request.checkpoint_dir
    ) or None
