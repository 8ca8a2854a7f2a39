"""Describes the machine of a measurement."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil


def describe_machine() -> str:
    """Returns processor, cores, memory, system and Python version in one line."""
    memory_gib = psutil.virtual_memory().total / 2**30
    return (
        f"{_processor()}, {os.cpu_count()} cores, {memory_gib:.0f} GiB, {platform.system()} "
        f"{platform.release().split('-')[0]}, Python {platform.python_version()}"
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
