"""A slot in a process of its own, seen from the framework."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import psutil
import pytest

from executor import limits
from executor.limits import LIMITS_VARIABLE, PROCESSES_VARIABLE
from tests.waiting import wait_until

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FAKE_ZYGOTE = (sys.executable, str(HERE / "fake_zygote.py"))
DEADLINE_S = 120.0
LIMITED = {LIMITS_VARIABLE: "1", PROCESSES_VARIABLE: "40"}
"""Environment of a slot process whose runs have control groups."""
Status = TypeVar("Status")


def skip_without_groups() -> None:
    """Skips a test where this account cannot have processes and memory counted."""
    roots = limits._make_roots()
    for root in roots.values():
        limits._remove(root)
    if missing := {"pids", "memory"} - roots.keys():
        pytest.skip(f"no control groups can be made here that count {' and '.join(sorted(missing))}")


class SlotStage(ABC, Generic[Status]):
    """Starts `slot_process.py` and reads what it says.

    Args:
        folder: gets the sandbox and the log.
        order: of the slot, encoded.
        zygote: its zygote's command.
        environment: changes to our own.

    Attributes:
        sandbox: the slot's.
        process: the slot's.
        updates: status updates of its task.
        statuses: the statuses that it has sent.
        groups: leaders of the process groups that it has begun, and of which it has not said that nothing is left.
    """

    def __init__(
        self,
        folder: Path,
        order: str,
        zygote: Sequence[str] = FAKE_ZYGOTE,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.sandbox = folder / "sandbox"
        self.sandbox.mkdir()
        self.updates: list[dict[str, Any]] = []
        self.statuses: list[Status] = []
        self.groups: set[int] = set()
        self._changed = threading.Condition()
        with (folder / "slot.log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "slot_process.py"), str(self.sandbox), order, *zygote],
                env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @abstractmethod
    def take(self, message: str) -> None:
        """Takes a framework message, in base64."""

    def wait_for(self, condition: Callable[[], object], what: Callable[[], object]) -> None:
        """Waits until something that it says makes the condition true."""
        with self._changed:
            assert self._changed.wait_for(condition, DEADLINE_S), what()

    def status_when(self, condition: Callable[[Status], object], since: int | None = None) -> Status:
        """The first status from now on, the newest one included, that is as said.

        Args:
            condition: what it says.
            since: index of the first status to consider; needed if further statuses may follow immediately.
        """
        first = max(0, len(self.statuses) - 1) if since is None else since
        found: list[Status] = []

        def search() -> bool:
            found[:] = [status for status in self.statuses[first:] if condition(status)]
            return bool(found)

        self.wait_for(search, lambda: self.statuses[-1:])
        return found[0]

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def kill(self, grace_s: float) -> None:
        self.say(f"kill {grace_s}")

    def ended(self) -> dict[str, Any]:
        """The last update of the slot's task, once its process has ended."""
        self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        return self.updates[-1]

    def children(self, output: str, *, recursive: bool = False) -> list[psutil.Process]:
        """The slot's children whose output goes to a file whose name begins like that; all descendants, if asked."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=recursive):
            with contextlib.suppress(FileNotFoundError):  # a supervisor has none
                if Path(os.readlink(f"/proc/{process.pid}/fd/1")).name.startswith(output):
                    found.append(process)
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(DEADLINE_S)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            line = json.loads(text)
            with self._changed:
                if "update" in line:
                    self.updates.append(line["update"])
                elif "group" in line:
                    self.groups.add(line["group"])
                elif "over" in line:
                    self.groups.remove(line["over"])
                else:
                    self.take(line["message"])
                self._changed.notify_all()


def wait_gone(pid: int) -> None:
    wait_until(lambda: not psutil.pid_exists(pid), f"the end of process {pid}")
