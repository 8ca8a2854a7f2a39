"""Drops lines that TensorFlow prints on import at any log level and that a user can do nothing about."""

from __future__ import annotations

import re
from typing import BinaryIO, Protocol

_NOISE = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR"
    rb"|([IWE]\d{4} \d\d[\d:.]+ +\d+ |\d{4}-\d\d-\d\d [\d:.]+: [IWE] \S*/)"
    rb"(port|cudart_stub|cuda_platform|cuda_executor|cuda_diagnostics|cpu_feature_guard)\.cc:\d+\] "
)


def is_noise(line: bytes) -> bool:
    """Whether a line of a process's standard error is such a line."""
    return _NOISE.match(line) is not None


def without_noise(text: str) -> str:
    """Removes such lines from a process's output."""
    return "".join(line for line in text.splitlines(keepends=True) if not is_noise(line.encode()))


class Target(Protocol):
    def write(self, line: bytes, /) -> object: ...
    def flush(self) -> None: ...


def forward(source: BinaryIO, target: Target) -> None:
    """Copies the other lines until the source ends."""
    for line in source:
        if not is_noise(line):
            target.write(line)
            target.flush()
