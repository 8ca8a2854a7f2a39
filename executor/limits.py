"""Limits of a run's processes, memory and CPUs, enforced by the kernel's control groups (cgroups).

A real Mesos agent has isolators for this. The embedded one has none, so executors with `LIMITS_VARIABLE` create groups
themselves, by version 2 or 1 of the kernel's interface. That takes root, or a systemd session of this account.
Elsewhere `PROCESSES_VARIABLE`, if set, limits processes by account (RLIMIT_NPROC).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

LIMITS_VARIABLE = "DIKE_LIMITS"
"""Variable of an executor: set if no Mesos isolator limits its tasks."""
PROCESSES_VARIABLE = "DIKE_MOST_PROCESSES"
"""Optional variable of an executor: maximum number of processes and threads of a run."""
MIN_PROCESSES = 512
PROCESSES_PER_CPU = 128
"""Default maximum: the machine's CPUs times this, at least `MIN_PROCESSES`."""

_MOUNTS = Path("/proc/self/mountinfo")
_OWN = Path("/proc/self/cgroup")
_PREFIX = "dike-"
_PERIOD_US = 100_000
_CONTROLLERS = ("pids", "memory", "cpu")


@dataclass(frozen=True)
class RunLimits:
    """Limits of a run.

    Attributes:
        processes: maximum number of processes and threads.
        mem_mib: memory, in MiB; 0 for no limit.
        cpus: CPUs.
        more_memory: the option that raises the memory limit.
    """

    processes: int
    mem_mib: float
    cpus: float
    more_memory: str

    @classmethod
    def of_slot(cls, mem_mib: float, cpus: float, more_memory: str) -> RunLimits:
        """The limits of a slot's runs. The minimum is one CPU, which startup takes."""
        # Libraries size thread pools by the CPUs of the machine.
        by_machine = max(MIN_PROCESSES, PROCESSES_PER_CPU * (os.cpu_count() or 1))
        return cls(_configured_max_processes() or by_machine, mem_mib, max(1.0, cpus), more_memory)


class ControlGroup:
    """The control group of one run: one folder, or in version 1 one for each controller.

    Attributes:
        folders: folders that a process joins (`dike.process.apply_limits`).
        max_processes: for RLIMIT_NPROC, if no group counts processes; None to leave it unchanged.
    """

    def __init__(self, folders: Mapping[str, Path], limits: RunLimits) -> None:
        self.folders = sorted({str(folder) for folder in folders.values()})
        self.max_processes = None if "pids" in folders else _configured_max_processes()
        self._limits = limits
        quota_us = int(limits.cpus * _PERIOD_US)
        values = {
            "pids.max": f"{limits.processes}",
            "cpu.max": f"{quota_us} {_PERIOD_US}",
            "cpu.cfs_quota_us": f"{quota_us}",
        }
        if limits.mem_mib:
            values |= dict.fromkeys(("memory.max", "memory.limit_in_bytes"), f"{int(limits.mem_mib * (1 << 20))}")
        for folder, (name, value) in itertools.product(map(Path, self.folders), values.items()):
            if (folder / name).exists():
                (folder / name).write_text(value)
        memory = folders.get("memory")
        is_version_1 = memory is not None and (memory / "memory.limit_in_bytes").exists()
        self._pids_events = folders["pids"] / "pids.events" if "pids" in folders else None
        self._memory_events = memory and memory / ("memory.oom_control" if is_version_1 else "memory.events")

    def exceeded_limit(self) -> str:
        """Describes the limit that the run has exceeded; empty if none."""
        if _count(self._pids_events, "max"):
            return (
                f"it exceeded its limit of {self._limits.processes} processes and threads; "
                f"raise {PROCESSES_VARIABLE} of the agent's executors"
            )
        if _count(self._memory_events, "oom_kill"):
            return f"it exceeded its memory of {self._limits.mem_mib:g} MiB; raise {self._limits.more_memory} MIB"
        return ""

    def remove(self) -> None:
        """Removes the group. All processes of the run must have ended."""
        for folder in self.folders:
            _remove(Path(folder))


def _count(events: Path | None, name: str) -> int:
    with contextlib.suppress(OSError):
        for line in () if events is None else events.read_text().splitlines():
            event, _, count = line.partition(" ")
            if event == name:
                return int(count)
    return 0


class ControlGroups:
    def __init__(self, limits: RunLimits) -> None:
        self._limits = limits
        self._numbers = itertools.count()
        self._roots = _make_roots() if os.environ.get(LIMITS_VARIABLE) else {}

    def make(self) -> ControlGroup:
        name = str(next(self._numbers))
        folders = {controller: root_folder / name for controller, root_folder in self._roots.items()}
        try:
            for folder in set(folders.values()):
                folder.mkdir()
            return ControlGroup(folders, self._limits)
        except OSError as error:
            logger.warning("the control group of a run cannot be created: %s", error)
            return ControlGroup({}, self._limits)

    def close(self) -> None:
        for root_folder in set(self._roots.values()):
            _remove(root_folder)


def _configured_max_processes() -> int | None:
    text = os.environ.get(PROCESSES_VARIABLE, "")
    return int(text) if text.isdecimal() and int(text) else None


def _make_roots() -> dict[str, Path]:
    """Creates this process' folder for each available controller, and removes those of dead processes."""
    roots: dict[str, Path] = {}
    for controllers, parent in _parents():
        root_folder = parent / f"{_PREFIX}{os.getpid()}"
        with contextlib.suppress(OSError):
            for stale in parent.glob(f"{_PREFIX}*"):
                if not Path("/proc", stale.name.removeprefix(_PREFIX)).exists():
                    _remove(stale)
            root_folder.mkdir(exist_ok=True)
            if (root_folder / "cgroup.subtree_control").exists():
                controllers = tuple(each for each in controllers if _enable(parent, root_folder, each))
            roots |= dict.fromkeys(controllers, root_folder)
            if not controllers:
                _remove(root_folder)
    if "pids" not in roots:
        logger.info("runs have no process limit: this account cannot create control groups here")
    return roots


def _enable(parent: Path, root_folder: Path, controller: str) -> bool:
    """Enables a controller in the groups of `root_folder` (version 2); returns whether it is enabled."""
    for folder in (parent, root_folder):
        with contextlib.suppress(OSError):
            (folder / "cgroup.subtree_control").write_text(f"+{controller}")
    return controller in (root_folder / "cgroup.subtree_control").read_text().split()


def _parents() -> Iterator[tuple[tuple[str, ...], Path]]:
    """Folders in which this process may create groups, each with its controllers."""
    own = dict(_own_paths())
    for root, mount, kind, options in _mounts():
        if kind == "cgroup2" and "" in own:
            path = _locate(mount, root, own[""])
            # A group that has processes cannot pass controllers on: the highest writable one is the best choice.
            above = [each for each in (path, *path.parents) if each.is_relative_to(mount)]
            usable = [each for each in above if os.access(each, os.W_OK) and os.access(each / "cgroup.procs", os.W_OK)]
            if usable:
                yield _CONTROLLERS, usable[-1]
        elif kind == "cgroup":
            for controller in _CONTROLLERS:
                if controller in options and controller in own:
                    parent = _locate(mount, root, own[controller])
                    if os.access(parent, os.W_OK):
                        yield (controller,), parent


def _own_paths() -> Iterator[tuple[str, str]]:
    """Controller -> path of this process' group. The name is empty in version 2."""
    with contextlib.suppress(OSError):
        for line in _OWN.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for controller in controllers.split(","):
                yield controller, path


def _mounts() -> Iterator[tuple[str, Path, str, list[str]]]:
    """Mounted control group hierarchies: root, mount point, version, controllers."""
    with contextlib.suppress(OSError):
        for line in _MOUNTS.read_text().splitlines():
            left, _, right = line.partition(" - ")
            fields, (kind, _, options) = left.split(), right.split(maxsplit=2)
            if kind in ("cgroup", "cgroup2"):
                yield fields[3], Path(fields[4]), kind, options.split(",")


def _locate(mount: Path, root: str, path: str) -> Path:
    """The folder of group `path`, in a hierarchy mounted at its group `root`."""
    relative = os.path.relpath(path, root)
    return mount if relative.startswith("..") else mount / relative


def _remove(folder: Path) -> None:
    """Removes groups, whose processes have ended."""
    with contextlib.suppress(OSError):
        for inner in [each for each in folder.iterdir() if each.is_dir()]:
            _remove(inner)
        folder.rmdir()
