"""Plain values - numbers, text, arrays and containers of these - as JSON with the arrays beside it, without pickle."""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dike.arrays import dump_arrays, load_arrays

_ARRAY, _TUPLE, _DICT, _SCALAR = "array", "tuple", "dict", "scalar"


DATA_BYTES = 1 << 26
"""A larger array that is there at the beginning is taken for data that the script reads again."""


class NotPlainError(TypeError):
    """The value is, or holds, something else."""


class LargeArrayError(ValueError):
    """It is, or holds, a large array."""


def pack(value: Any, arrays: list[Any], limit_bytes: float = math.inf) -> Any:
    """The value as JSON values.

    Args:
        value: the value.
        arrays: gets the arrays that it holds, which the result refers to by number.
        limit_bytes: of an array.

    Raises:
        NotPlainError: if it is, or holds, anything that is not plain.
        LargeArrayError: if it is, or holds, an array that is larger.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.hasobject:
            raise NotPlainError("an array of objects")
        if value.nbytes > limit_bytes:
            raise LargeArrayError("a large array")
        arrays.append(np.array(value))
        return {_ARRAY if isinstance(value, np.ndarray) else _SCALAR: len(arrays) - 1}
    if type(value) is list:
        return [pack(part, arrays, limit_bytes) for part in value]
    if type(value) is tuple:
        return {_TUPLE: [pack(part, arrays, limit_bytes) for part in value]}
    if type(value) is dict:
        return {_DICT: [[pack(each, arrays, limit_bytes) for each in item] for item in value.items()]}
    raise NotPlainError(type(value).__name__)


def unpack(packed: Any, arrays: list[Any]) -> Any:
    """The value that `pack` was given."""
    if isinstance(packed, list):
        return [unpack(part, arrays) for part in packed]
    if not isinstance(packed, dict):
        return packed
    ((kind, content),) = packed.items()
    if kind == _ARRAY:
        return arrays[content].copy()
    if kind == _SCALAR:
        return arrays[content][()]
    if kind == _TUPLE:
        return tuple(unpack(part, arrays) for part in content)
    return {unpack(key, arrays): unpack(part, arrays) for key, part in content}


def digest(value: Any, limit_bytes: float = math.inf) -> str | None:
    """Differs for values that differ; None for one that is not plain.

    Raises:
        LargeArrayError: see `pack`.
    """
    arrays: list[Any] = []
    try:
        text = json.dumps(pack(value, arrays, limit_bytes))
    except NotPlainError:
        return None
    found = hashlib.blake2b(text.encode())
    for array in arrays:
        found.update(f"{array.dtype}{array.shape}".encode())
        found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return found.hexdigest()


class Attributes:
    """Those attributes of an object that are plain, and change; data that it was given are not looked at.

    Args:
        target: the object, as the script has made it.
        is_data_set: whether what it puts in the place of its data is data as well.
    """

    def __init__(self, target: Any, *, is_data_set: bool = False) -> None:
        self._target = target
        self._is_data_set = is_data_set
        self._data: dict[str, Any] = {}
        self._before: dict[str, str | None] = {}
        for name, value in vars(target).items():
            try:
                self._before[name] = digest(value, DATA_BYTES)
            except LargeArrayError:
                self._data[name] = value

    def save(self, arrays: list[Any]) -> dict[str, Any]:
        """What has changed since this was made, packed."""
        changed = {}
        for name, value in vars(self._target).items():
            if name in self._data and (self._is_data_set or value is self._data[name]):
                continue
            now = digest(value)
            if now is not None and (name not in self._before or now != self._before[name]):
                changed[name] = pack(value, arrays)
        return changed

    def restore(self, saved: Mapping[str, Any], arrays: list[Any]) -> None:
        """Puts back what `save` returned."""
        for name, value in saved.items():
            setattr(self._target, name, unpack(value, arrays))


class CallbackStates:
    """What the callbacks of a `fit`, of Keras 3 or tf_keras, keep in plain attributes, as `EarlyStopping` its patience.

    Args:
        callbacks: all of them.
    """

    def __init__(self, callbacks: Sequence[Any]) -> None:
        self._callbacks = callbacks
        self._attributes: list[Attributes] = []

    def begin(self) -> None:
        """All callbacks know that the training begins: their state is what they change from now on."""
        self._attributes = [Attributes(callback) for callback in self._callbacks]

    def save(self, arrays: list[Any], limit_bytes: float = math.inf) -> list[tuple[str, dict[str, Any]]]:
        """Of each callback its type's name and its attributes, packed.

        Args:
            arrays: gets the arrays among them.
            limit_bytes: of a callback's arrays; nothing is saved of one that has more.
        """
        saved = []
        for callback, attributes in zip(self._callbacks, self._attributes, strict=True):
            others = len(arrays)
            values = attributes.save(arrays)
            if sum(array.nbytes for array in arrays[others:]) > limit_bytes:
                del arrays[others:]
                values = {}
            saved.append((type(callback).__qualname__, values))
        return saved

    def restore(self, saved: Sequence[tuple[str, dict[str, Any]]], arrays: list[Any]) -> None:
        """Puts back what `save` returned, with the arrays that it gave."""
        for callback, attributes, (kind, values) in zip(self._callbacks, self._attributes, saved, strict=False):
            if type(callback).__qualname__ == kind:
                attributes.restore(values, arrays)


def dump_groups(groups: Mapping[str, Sequence[Any]]) -> bytes:
    """As `dump_arrays`, for lists of arrays by name."""
    return dump_arrays(
        {f"{name}-{number}": array for name, group in groups.items() for number, array in enumerate(group)}
    )


def load_groups(content: bytes) -> Mapping[str, list[Any]]:
    """What `dump_groups` was given, empty lists for names that it was not."""
    groups: defaultdict[str, list[Any]] = defaultdict(list)
    named = load_arrays(content)
    for key in sorted(named, key=lambda key: int(key.rpartition("-")[2])):
        groups[key.rpartition("-")[0]].append(named[key])
    return groups
