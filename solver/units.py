"""Units and tolerances; parses and formats sizes and times: `32GiB`, `500MB`, or plain numbers of bytes; `30d`."""

from __future__ import annotations

import re

MIB = 2**20
GIB = 2**30
BYTES_PER_S_PER_GBPS = 1e9 / 8
SPEED_TIE_SHARE = 0.01
"""Predicted speeds closer than this share are equal: the model is not more precise."""
SIMPLE_TIE_SHARE = 0.05
"""A simpler plan is preferred if it is at most this share slower: fewer tasks, then fewer machines."""

_FACTORS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SECONDS = {"d": 86400.0, "h": 3600.0, "min": 60.0, "s": 1.0}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(d|h|min|s)")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)")


def parse_bytes(value: object) -> int:
    """Parses a size in bytes from a number or from text such as `32GiB` (2^30) or `32GB` (10^9).

    Raises:
        ValueError: if it is neither.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, str):
        match = _SIZE.fullmatch(value.strip())
        if match is not None and match[2].lower() in _FACTORS:
            return int(float(match[1]) * _FACTORS[match[2].lower()])
    raise ValueError("a size is a number of bytes or text such as 32GiB or 500MB")


def parse_machine_bytes(value: object) -> int:
    """Parses a machine's memory or disk, as `parse_bytes`.

    Raises:
        ValueError: also if it is below 1 MiB, as the unit is missing then.
    """
    size = parse_bytes(value)
    if 0 < size < MIB:
        number = str(value).strip()
        meant = f"{number}GiB" if number.replace(".", "", 1).isdigit() else "128GiB"
        raise ValueError(f"{number} is {size} bytes, too little for a machine; write the unit, such as {meant}")
    return size


def parse_duration(text: str) -> float:
    """Parses a time such as `30d`, `12h`, `90min` or `45s`, in seconds.

    Raises:
        ValueError: if it is malformed.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError("a time is a number with d, h, min or s behind it, such as 30d or 12h")
    return float(match[1]) * _SECONDS[match[2]]


def format_bytes(count: float) -> str:
    for unit, factor in (("TiB", 2**40), ("GiB", GIB), ("MiB", MIB), ("KiB", 2**10)):
        if abs(count) >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f} B"
