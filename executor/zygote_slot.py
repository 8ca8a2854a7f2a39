"""What slots have in common whose processes are forked from a zygote."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from pathlib import Path
from typing import Protocol

from executor import bundle, descendants
from executor.monitor import RunMonitor
from executor.outputs import Stamp, local_files, remote_copier
from executor.zygote import Zygote

logger = logging.getLogger(__name__)

CLEAR_POLL_S = 0.02
"""How often it is looked whether processes are gone that were killed."""
GPU_RELEASE_TIMEOUT_S = 10.0
"""How long the next process waits for GPU memory that one which is gone should not hold."""


class SetUpError(Exception):
    """Why a slot could not be set up, in one sentence."""


class Held(Protocol):
    """What is in a slot; its text names it."""

    @property
    def monitor(self) -> RunMonitor:
        """Watches it."""

    @property
    def over_s(self) -> float | None:
        """When its process ended, on the monotonic clock; None before."""


def set_up(bundle_url: str, folder: Path) -> dict[str, Stamp]:
    """Makes the folder that processes work in, and what has travelled with the script in it.

    Args:
        bundle_url: where that can be fetched, token included; empty for a slot that runs no script.
        folder: is made.

    Returns:
        The files that have travelled.

    Raises:
        SetUpError: if that cannot be done.
    """
    try:
        if bundle_url:
            bundle.fetch(bundle_url, folder)
        else:
            folder.mkdir()
        return dict(local_files(folder))
    except (bundle.BundleError, OSError) as error:
        raise SetUpError(f"the slot could not be set up: {error}") from error


def clear_all_but(others: Collection[int | None]) -> bool:
    """Ends what descends from this process; to be called until nothing is left.

    Args:
        others: ids of processes that stay, with all that descends from them.

    Returns:
        Whether nothing is left.
    """
    with remote_copier.starting:
        return descendants.clear((remote_copier.pid, *others))


def are_gpus_free(held: Held) -> bool:
    """Whether the GPUs of a slot are seen free of what was in it, nothing of which is left, or have had time for it."""
    assert held.over_s is not None
    if held.monitor.gpus_free():
        return True
    if time.monotonic() - held.over_s < GPU_RELEASE_TIMEOUT_S:
        return False
    logger.warning("%s is gone, but its GPU memory is not seen free", held)
    return True


def end_all(zygote: Zygote) -> None:
    """Ends a zygote and all that descends from this process."""
    zygote.close()
    remote_copier.close()
    while not descendants.clear():
        time.sleep(CLEAR_POLL_S)
