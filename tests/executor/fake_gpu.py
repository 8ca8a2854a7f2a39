"""In a slot's process without a GPU: what NVIDIA's driver and its management library would say of one.

Every process of a trial holds memory on it, unless the driver has brought that to the host. What the driver is asked
for is written to `$FAKE_GPU`, a line each; `$FAKE_GPU_FAILS` names what it refuses, `$FAKE_GPU_HANGS` what it
never ends. `$FAKE_GPU_BYTES` is what each process holds of 16 GiB. With `$FAKE_GPU_UNSEEN` no library shows the GPU.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import psutil

from executor import trial_slot
from executor.monitor import Gpus

_states: dict[int, str] = {}


class FakeGpus(Gpus):
    """See the module."""

    def __init__(self, devices: Sequence[int] | None) -> None:
        super().__init__(())
        self._devices = devices

    def __bool__(self) -> bool:
        return bool(self._devices) and not os.environ["FAKE_GPU_UNSEEN"]

    def memory_bytes(self) -> int | None:
        return 16 << 30

    def bytes_by_process(self) -> dict[int, int]:
        held = int(os.environ["FAKE_GPU_BYTES"])
        pids = [child.pid for child in psutil.Process().children(recursive=True) if held and _is_trial(child.pid)]
        return {pid: held for pid in pids if _states.get(pid) != "checkpointed"}


def _is_trial(pid: int) -> bool:
    """Whether its output goes where a trial's does; not of one that has just gone."""
    with contextlib.suppress(FileNotFoundError):
        return Path(os.readlink(f"/proc/{pid}/fd/1")).name.startswith("trial-")
    return False


class Process:
    """As `cuda.core.checkpoint.Process`."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    @property
    def state(self) -> str:
        if os.environ.get("FAKE_GPU_FAILS") == "state":
            raise RuntimeError("the driver is too old")
        return _states.get(self._pid, "running")

    def lock(self, timeout_ms: int = 0) -> None:
        self._go("lock", "running", "locked")

    def checkpoint(self) -> None:
        self._go("checkpoint", "locked", "checkpointed")

    def restore(self) -> None:
        self._go("restore", "checkpointed", "locked")

    def unlock(self) -> None:
        self._go("unlock", "locked", "running")

    def _go(self, what: str, before: str, after: str) -> None:
        # A thread of the process itself does the work.
        assert psutil.Process(self._pid).status() != psutil.STATUS_STOPPED
        assert self.state == before
        if os.environ.get("FAKE_GPU_FAILS") == what:
            raise RuntimeError(f"{what} is refused")
        if os.environ.get("FAKE_GPU_HANGS") == what:
            threading.Event().wait()
        _states[self._pid] = after
        with Path(os.environ["FAKE_GPU"]).open("a", encoding="utf-8") as diary:
            diary.write(f"{what}\n")


def install() -> None:
    """Puts it where the product looks for the real ones."""
    trial_slot.Gpus = FakeGpus  # type: ignore[misc]
    core = ModuleType("cuda.core")
    core.checkpoint = ModuleType("cuda.core.checkpoint")  # type: ignore[attr-defined]
    core.checkpoint.Process = Process
    sys.modules |= {"cuda": ModuleType("cuda"), "cuda.core": core, "cuda.core.checkpoint": core.checkpoint}
