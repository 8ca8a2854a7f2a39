"""Common parts of slots whose processes are forked from a zygote."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from pathlib import Path
from typing import Protocol

from executor import bundle, descendants
from executor.monitor import RunMonitor
from executor.outputs import Stamp, list_files, remote_copier
from executor.zygote import Zygote

logger = logging.getLogger(__name__)

EXIT_POLL_INTERVAL_S = 0.02
"""Interval of checks whether killed processes have ended."""
GPU_RELEASE_TIMEOUT_S = 10.0
"""Maximum wait for GPU memory to be released by processes that have ended."""


class SetUpError(Exception):
    """The slot could not be set up; the message is one sentence."""


class SlotOccupant(Protocol):
    """A run or attempt in a slot; `str` names it."""

    @property
    def monitor(self) -> RunMonitor: ...

    @property
    def ended_at_s(self) -> float | None: ...


def set_up(bundle_url: str, folder: Path) -> dict[str, Stamp]:
    """Creates the slot's folder with the bundle, if there is one; returns the stamps of its files.

    Raises:
        SetUpError: if that fails.
    """
    try:
        if bundle_url:
            bundle.fetch(bundle_url, folder)
        else:
            folder.mkdir()
        return dict(list_files(folder))
    except (bundle.BundleError, OSError) as error:
        raise SetUpError(f"the slot cannot be set up: {error}") from error


def kill_descendants_except(excluded: Collection[int | None]) -> bool:
    """Kills and reaps the descendants of this process, but for its remote copier and those in `excluded`.

    Returns whether nothing is left; call it until nothing is.
    """
    with remote_copier.start_lock:
        return descendants.kill_and_reap((remote_copier.pid, *excluded))


def are_gpus_free(occupant: SlotOccupant) -> bool:
    """Whether an ended occupant holds no GPU memory, or has had `GPU_RELEASE_TIMEOUT_S` to release it."""
    assert occupant.ended_at_s is not None
    if occupant.monitor.gpus_free():
        return True
    if time.monotonic() - occupant.ended_at_s < GPU_RELEASE_TIMEOUT_S:
        return False
    logger.warning("%s has ended, but its GPU memory is still in use", occupant)
    return True


def kill_all(zygote: Zygote) -> None:
    """Kills the zygote and all descendants of this process."""
    zygote.close()
    remote_copier.close()
    while not descendants.kill_and_reap():
        time.sleep(EXIT_POLL_INTERVAL_S)
