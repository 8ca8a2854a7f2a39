"""Drops the lines that TensorFlow prints on import whatever its log level is; a user can do nothing about them."""

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
    """The lines of a process' output that are worth reading."""
    return "".join(line for line in text.splitlines(keepends=True) if not is_noise(line.encode()))


class Target(Protocol):
    """Where lines go."""

    def write(self, line: bytes, /) -> object: ...
    def flush(self) -> None: ...


def forward(source: BinaryIO, target: Target) -> None:
    """Copies lines as they come until the source ends."""
    for line in source:
        if not is_noise(line):
            target.write(line)
            target.flush()
