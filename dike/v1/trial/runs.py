"""Log of the results of all session runs, to replay a script up to a checkpoint without training.

A script with a loop of its own has state that no checkpoint has: its counters, its lists, its position in its data.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

MAX_LOG_BYTES = 64 << 20
"""Maximum size of the log; scripts that fetch large arrays at every step reach it."""

_RUN_OVERHEAD_BYTES = 64
"""Approximate size of a run besides its results."""

_END = "end of the data"


class SessionLog:
    def __init__(self) -> None:
        self._lines: list[str] = []
        self._new: list[tuple[str, Sequence[Any] | None]] = []
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._lines) + len(self._new)

    def add(self, key: str, results: Sequence[Any] | None) -> None:
        """`key` identifies the ops of the run; `results` is None at the end of the data."""
        kept = []
        self.size_bytes += _RUN_OVERHEAD_BYTES
        for result in results or ():
            # The script may change results in place.
            kept.append(result.copy() if isinstance(result, np.ndarray) else result)
            self.size_bytes += len(result) if isinstance(result, bytes) else result.nbytes
        self._new.append((key, None if results is None else kept))

    def dumps(self) -> bytes:
        self._lines += [json.dumps([key, _END if results is None else _encode(results)]) for key, results in self._new]
        self._new.clear()
        return "\n".join(self._lines).encode()

    @classmethod
    def loads(cls, text: bytes) -> SessionLog:
        log = cls()
        log._lines = text.decode().splitlines()
        log.size_bytes = len(text)
        return log

    def get(self, number: int) -> tuple[str, list[Any] | None]:
        key, results = json.loads(self._lines[number])
        return key, None if results == _END else [_decode(result) for result in results]


def key_of(names: Sequence[str]) -> str:
    return f"{zlib.crc32(chr(0).join(names).encode()):08x}"


def _encode(results: Sequence[Any]) -> list[Any]:
    return [_encode_one(result) for result in results]


def _encode_one(result: Any) -> list[Any]:
    if isinstance(result, bytes):
        return ["bytes", base64.b64encode(result).decode()]
    if result.dtype == object:
        texts = [base64.b64encode(text).decode() for text in result.ravel()]
        return ["texts", list(result.shape), texts]
    kind = "number" if isinstance(result, np.generic) else "array"
    return [kind, result.dtype.name, list(result.shape), base64.b64encode(result.tobytes()).decode()]


def _decode(encoded: list[Any]) -> Any:
    match encoded:
        case ["bytes", text]:
            return base64.b64decode(text)
        case ["texts", shape, texts]:
            array = np.empty(len(texts), dtype=object)
            array[:] = [base64.b64decode(text) for text in texts]
            return array.reshape(shape)
        case [kind, dtype, shape, text]:
            array = np.frombuffer(base64.b64decode(text), dtype=np.dtype(dtype)).reshape(shape).copy()
            return array[()] if kind == "number" else array
    raise ValueError(f"'{encoded}' is not a result of a run")
