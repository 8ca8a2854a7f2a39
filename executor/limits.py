"""What a run may use at most: the kernel's control groups (cgroups) count it, together with all that the run starts.

A real Mesos agent has isolators for this. The embedded one has none, so executors that find `LIMITS_VARIABLE` make
groups themselves, in version 2 or 1 of the kernel's interface. That takes root, or a session of systemd's that belongs
to this account. Elsewhere `PROCESSES_VARIABLE` limits processes by account (RLIMIT_NPROC), if it is set.
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
"""Environment variable of an executor: set where no isolator of Mesos' limits its tasks."""
PROCESSES_VARIABLE = "DIKE_MOST_PROCESSES"
"""Optional environment variable of an executor: processes and threads that a run may have at once."""
LEAST_PROCESSES = 512
PROCESSES_PER_CPU = 128
"""Without that variable: the machine's CPUs times this, and no fewer than the above."""

_MOUNTS = Path("/proc/self/mountinfo")
_OWN = Path("/proc/self/cgroup")
_PREFIX = "dike-"
_PERIOD_US = 100_000
_CONTROLLERS = ("pids", "memory", "cpu")


@dataclass(frozen=True)
class Limits:
    """What a run may use.

    Attributes:
        processes: processes and threads at once.
        mem_mib: memory, in MiB; 0 for no limit.
        cpus: CPUs.
        more_memory: the option that gives it more.
    """

    processes: int
    mem_mib: float
    cpus: float
    more_memory: str

    @classmethod
    def of_slot(cls, mem_mib: float, cpus: float, more_memory: str) -> Limits:
        """Those of a slot with this memory and these CPUs; a run has at least one CPU, as its start takes that."""
        # Libraries start threads by the CPUs of the machine.
        by_machine = max(LEAST_PROCESSES, PROCESSES_PER_CPU * (os.cpu_count() or 1))
        return cls(_named_processes() or by_machine, mem_mib, max(1.0, cpus), more_memory)


class Group:
    """The control group of one run: a folder, or one for each controller in version 1.

    Args:
        folders: controller -> folder; empty where no group can be made.
        limits: of the run.

    Attributes:
        folders: the folders that a process enters (`dike.process.apply_limits`).
        most_processes: what RLIMIT_NPROC is to be where no group counts processes; None to leave it.
    """

    def __init__(self, folders: Mapping[str, Path], limits: Limits) -> None:
        self.folders = sorted({str(folder) for folder in folders.values()})
        self.most_processes = None if "pids" in folders else _named_processes()
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

    def exceeded(self) -> str:
        """Which limit the run has exceeded, in words; empty if none."""
        if _count(self._pids_events, "max"):
            return (
                f"it had {self._limits.processes} processes and threads at once and asked for more, which its machine "
                f"does not allow a run ({PROCESSES_VARIABLE} of the agent's executors)"
            )
        if _count(self._memory_events, "oom_kill"):
            return (
                f"it needed more memory than the {self._limits.mem_mib:g} MiB that it was given; "
                f"{self._limits.more_memory} MIB gives it more"
            )
        return ""

    def remove(self) -> None:
        """Removes the group, nothing of its run being left."""
        for folder in self.folders:
            _remove(Path(folder))


def _count(events: Path | None, name: str) -> int:
    """How often something has happened in a group, by the kernel's file of such events."""
    with contextlib.suppress(OSError):
        for line in () if events is None else events.read_text().splitlines():
            event, _, count = line.partition(" ")
            if event == name:
                return int(count)
    return 0


class Groups:
    """Makes the groups of one slot process.

    Args:
        limits: of each run.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._numbers = itertools.count()
        self._homes = _make_homes() if os.environ.get(LIMITS_VARIABLE) else {}

    def make(self) -> Group:
        """The group of a run that is about to begin."""
        name = str(next(self._numbers))
        folders = {controller: home / name for controller, home in self._homes.items()}
        try:
            for folder in set(folders.values()):
                folder.mkdir()
            return Group(folders, self._limits)
        except OSError as error:
            logger.warning("a run has no control group: %s", error)
            return Group({}, self._limits)

    def close(self) -> None:
        """Removes all; to be called when nothing of any run is left."""
        for home in set(self._homes.values()):
            _remove(home)


def _named_processes() -> int | None:
    text = os.environ.get(PROCESSES_VARIABLE, "")
    return int(text) if text.isdecimal() and int(text) else None


def _make_homes() -> dict[str, Path]:
    """For each controller that can be had the folder of this process' groups; those of dead processes are removed."""
    homes: dict[str, Path] = {}
    for controllers, parent in _parents():
        home = parent / f"{_PREFIX}{os.getpid()}"
        with contextlib.suppress(OSError):
            for stale in parent.glob(f"{_PREFIX}*"):
                if not Path("/proc", stale.name.removeprefix(_PREFIX)).exists():
                    _remove(stale)
            home.mkdir(exist_ok=True)
            if (home / "cgroup.subtree_control").exists():
                controllers = tuple(each for each in controllers if _enable(parent, home, each))
            homes |= dict.fromkeys(controllers, home)
            if not controllers:
                _remove(home)
    if "pids" not in homes:
        logger.info("runs have no limit of processes: this account cannot make control groups here")
    return homes


def _enable(parent: Path, home: Path, controller: str) -> bool:
    """Has version 2 count by a controller in the groups of `home`; returns whether it does."""
    for folder in (parent, home):
        with contextlib.suppress(OSError):
            (folder / "cgroup.subtree_control").write_text(f"+{controller}")
    return controller in (home / "cgroup.subtree_control").read_text().split()


def _parents() -> Iterator[tuple[tuple[str, ...], Path]]:
    """Where this process may make groups: controllers, and the folder."""
    own = dict(_own_paths())
    for root, mount, kind, options in _mounts():
        if kind == "cgroup2" and "" in own:
            path = _below(mount, root, own[""])
            # Groups with processes in them have no controllers for others below: the highest is the likeliest.
            above = [each for each in (path, *path.parents) if each.is_relative_to(mount)]
            usable = [each for each in above if os.access(each, os.W_OK) and os.access(each / "cgroup.procs", os.W_OK)]
            if usable:
                yield _CONTROLLERS, usable[-1]
        elif kind == "cgroup":
            for controller in _CONTROLLERS:
                if controller in options and controller in own:
                    parent = _below(mount, root, own[controller])
                    if os.access(parent, os.W_OK):
                        yield (controller,), parent


def _own_paths() -> Iterator[tuple[str, str]]:
    """Controller -> path of this process' group; version 2 is the one without a name."""
    with contextlib.suppress(OSError):
        for line in _OWN.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for controller in controllers.split(","):
                yield controller, path


def _mounts() -> Iterator[tuple[str, Path, str, list[str]]]:
    """What is mounted of control groups: root, where, version, controllers."""
    with contextlib.suppress(OSError):
        for line in _MOUNTS.read_text().splitlines():
            left, _, right = line.partition(" - ")
            fields, (kind, _, options) = left.split(), right.split(maxsplit=2)
            if kind in ("cgroup", "cgroup2"):
                yield fields[3], Path(fields[4]), kind, options.split(",")


def _below(mount: Path, root: str, path: str) -> Path:
    """Where the group `path` is, in a hierarchy whose group `root` is mounted."""
    relative = os.path.relpath(path, root)
    return mount if relative.startswith("..") else mount / relative


def _remove(folder: Path) -> None:
    """Removes groups that have no processes any more."""
    with contextlib.suppress(OSError):
        for inner in [each for each in folder.iterdir() if each.is_dir()]:
            _remove(inner)
        folder.rmdir()
