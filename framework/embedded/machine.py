"""This machine's CPUs, memory and GPUs, within the limits of its container."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil
import pynvml

MIB = 1 << 20
RESERVED_MEM_MIB = 1024
"""Memory reserved for the system, as by Mesos' own agents; half of all memory on machines with less than twice that."""
CGROUP = Path("/sys/fs/cgroup")


def local_resources() -> str:
    """This machine's CPUs, memory (MiB, less a reserve) and GPUs in Mesos' text form."""
    gpus = len(gpu_models())
    return f"cpus:{_cpus():g};mem:{without_reserve(mem_bytes() // MIB)}" + (f";gpus:{gpus}" if gpus else "")


def without_reserve(mem_mib: int) -> int:
    """Memory for tasks of a machine, or a part of it, with this much memory (MiB)."""
    return mem_mib - RESERVED_MEM_MIB if mem_mib > 2 * RESERVED_MEM_MIB else mem_mib // 2


def shared_resources(agents: int) -> str:
    """`local_resources` divided evenly among agents on this machine; GPUs are not split."""
    parts = dict(part.split(":") for part in local_resources().split(";"))
    shares = {name: float(value) / agents for name, value in parts.items()}
    text = f"cpus:{shares['cpus']:.2f};mem:{int(shares['mem'])}"
    return text + (f";gpus:{int(shares['gpus'])}" if shares.get("gpus", 0) >= 1 else "")


def gpu_models() -> list[str]:
    """The model of each GPU that NVIDIA's management library lists, such as `H200` or `Tesla-K80`.

    Blanks become hyphens, because Mesos' attributes allow none, and the vendor's name is removed.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # No driver or no GPU.
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        names = [pynvml.nvmlDeviceGetName(handle) for handle in handles]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()
    return [attribute_of(name) for name in names]


def attribute_of(gpu_name: str) -> str:
    return "-".join(gpu_name.removeprefix("NVIDIA ").split())


def _cpus() -> float:
    """CPUs this process may use: its affinity, limited by its cgroup's quota."""
    cpus = float(len(os.sched_getaffinity(0)))
    quota = _cgroup("cpu.max", "cpu/cpu.cfs_quota_us").split()
    period = quota[1:] or _cgroup("cpu.max", "cpu/cpu.cfs_period_us").split()
    if quota and period and quota[0].isdigit() and period[0].isdigit():
        cpus = min(cpus, int(quota[0]) / int(period[0]))
    return max(cpus, 0.1)


def mem_bytes() -> int:
    """Memory of this machine, limited by the cgroup."""
    total = int(psutil.virtual_memory().total)
    limit = _cgroup("memory.max", "memory/memory.limit_in_bytes")
    return min(total, int(limit)) if limit.isdigit() else total


def _cgroup(version_2: str, version_1: str) -> str:
    """A setting of this container's cgroup; empty if there is none."""
    for name in (version_2, version_1):
        with contextlib.suppress(OSError):
            return (CGROUP / name).read_text().strip()
    return ""
