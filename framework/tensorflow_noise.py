"""Drops the lines that TensorFlow prints on import whatever its log level is; a user can do nothing about them."""

from __future__ import annotations

import re
from typing import BinaryIO

_NOISE = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR"
    rb"|[IWE]\d{4} \d\d[\d:.]+ +\d+ (port|cudart_stub|cuda_platform|cuda_executor|cpu_feature_guard)\.cc:\d+\] "
)


def is_noise(line: bytes) -> bool:
    """Whether a line of a process's standard error is such a line."""
    return _NOISE.match(line) is not None


def forward(source: BinaryIO, target: BinaryIO) -> None:
    """Copies lines as they come until the source ends."""
    for line in source:
        if not is_noise(line):
            target.write(line)
            target.flush()
