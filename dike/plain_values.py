"""Serialises plain values as JSON plus arrays, without pickle.

Plain are numbers, text, bytes, paths, arrays, and Python's own containers of these.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from dike.arrays import dump_arrays, load_arrays

_ARRAY, _SCALAR, _BYTES, _PATH = "array", "scalar", "bytes", "path"
_SEQUENCES: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_MAPPINGS: dict[str, type] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_DEQUE, _DEFAULT_DICT = "deque", "defaultdict"
_NAMES = {kind: name for name, kind in (_SEQUENCES | _MAPPINGS).items()}
_FACTORIES: dict[str, type] = {kind.__name__: kind for kind in (list, dict, set, int, float, str)}

LARGE_ARRAY_BYTES = 1 << 26
"""A larger array that an object has from the start counts as data that the script reads again."""


class NotPlainValueError(TypeError):
    """A value is not plain, or contains one that is not."""


class LargeArrayError(ValueError):
    """A value is or contains an array over the limit."""


def pack(value: Any, arrays: list[Any], limit_bytes: float = math.inf) -> Any:
    """Converts a value to JSON values.

    Args:
        value: the value.
        arrays: receives its arrays, which the result refers to by index.
        limit_bytes: maximum size of an array.

    Raises:
        NotPlainValueError: if it is not plain.
        LargeArrayError: if an array is larger.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.hasobject:
            raise NotPlainValueError("an array of objects")
        if value.nbytes > limit_bytes:
            raise LargeArrayError("a large array")
        arrays.append(np.array(value))
        return {_ARRAY if isinstance(value, np.ndarray) else _SCALAR: len(arrays) - 1}
    if type(value) is bytes:
        return {_BYTES: base64.b64encode(value).decode("ascii")}
    if isinstance(value, PurePath):
        return {_PATH: str(value)}
    # Containers are copied: code behind `tf.data` may change them in another thread.
    if type(value) is list:
        return [pack(part, arrays, limit_bytes) for part in list(value)]
    if type(value) in _SEQUENCES.values():
        return {_NAMES[type(value)]: [pack(part, arrays, limit_bytes) for part in _in_order(value)]}
    if type(value) is deque:
        return {_DEQUE: [value.maxlen, [pack(part, arrays, limit_bytes) for part in list(value)]]}
    if type(value) in _MAPPINGS.values():
        return {_NAMES[type(value)]: _pack_items(value, arrays, limit_bytes)}
    if type(value) is defaultdict and getattr(value.default_factory, "__name__", None) in _FACTORIES:
        factory: Any = value.default_factory
        return {_DEFAULT_DICT: [factory.__name__, _pack_items(value, arrays, limit_bytes)]}
    raise NotPlainValueError(type(value).__name__)


def _in_order(value: Any) -> list[Any]:
    """The elements of a tuple, or those of a set sorted by `repr`."""
    return list(value) if type(value) is tuple else sorted(value, key=repr)


def _pack_items(value: Mapping[Any, Any], arrays: list[Any], limit_bytes: float) -> list[Any]:
    return [[pack(each, arrays, limit_bytes) for each in item] for item in list(value.items())]


def unpack(packed: Any, arrays: list[Any]) -> Any:
    if isinstance(packed, list):
        return [unpack(part, arrays) for part in packed]
    if not isinstance(packed, dict):
        return packed
    ((kind, content),) = packed.items()
    if kind == _ARRAY:
        return arrays[content].copy()
    if kind == _SCALAR:
        return arrays[content][()]
    if kind == _BYTES:
        return base64.b64decode(content)
    if kind == _PATH:
        return Path(content)
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](unpack(part, arrays) for part in content)
    if kind == _DEQUE:
        return deque((unpack(part, arrays) for part in content[1]), content[0])
    if kind == _DEFAULT_DICT:
        return defaultdict(_FACTORIES[content[0]], _unpack_items(content[1], arrays))
    return _MAPPINGS[kind](_unpack_items(content, arrays))


def _unpack_items(items: Any, arrays: list[Any]) -> dict[Any, Any]:
    return {unpack(key, arrays): unpack(part, arrays) for key, part in items}


def digest(value: Any, limit_bytes: float = math.inf) -> str | None:
    """Hash of a value; None if it is not plain. Raises LargeArrayError as `pack` does."""
    arrays: list[Any] = []
    try:
        text = json.dumps(pack(value, arrays, limit_bytes))
    except NotPlainValueError:
        return None
    found = hashlib.blake2b(text.encode())
    for array in arrays:
        found.update(f"{array.dtype}{array.shape}".encode())
        found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def identities(value: Any) -> Any:
    """Changes when a container's elements or their order change, or the value is another object."""
    if isinstance(value, dict):
        return [id(part) for part in list(value.values())]
    return [id(part) for part in list(value)] if isinstance(value, list | set | deque) else id(value)


class ChangedAttributes:
    """Plain attributes of an object that change after this is created; large arrays count as data and are ignored.

    Args:
        target: the object, as the script has created it.
        is_data_set: whether a value that replaces data is data as well.

    Attributes:
        unsaved: changed attributes that the last `save` could not save.
    """

    def __init__(self, target: Any, *, is_data_set: bool = False) -> None:
        self._target = target
        self._is_data_set = is_data_set
        self.unsaved: list[str] = []
        self._data: dict[str, Any] = {}
        self._before: dict[str, str | None] = {}
        self._parts: dict[str, Any] = {}
        for name, value in vars(target).items():
            try:
                self._before[name] = digest(value, LARGE_ARRAY_BYTES)
                if self._before[name] is None:
                    self._parts[name] = identities(value)
            except LargeArrayError:
                self._data[name] = value

    def save(self, arrays: list[Any]) -> dict[str, Any]:
        changed = {}
        self.unsaved = []
        for name, value in vars(self._target).items():
            if name in self._data and (self._is_data_set or value is self._data[name]):
                continue
            now = digest(value)
            if now is None and identities(value) != self._parts.get(name):
                self.unsaved.append(name)
            elif now is not None and (name not in self._before or now != self._before[name]):
                changed[name] = pack(value, arrays)
        return changed

    def digests(self) -> dict[str, str | None]:
        return {name: digest(value) for name, value in vars(self._target).items() if name not in self._data}

    def restore(self, saved: Mapping[str, Any], arrays: list[Any]) -> None:
        for name, value in saved.items():
            setattr(self._target, name, unpack(value, arrays))


class CallbackStates:
    """Plain attributes of the callbacks of a Keras 3 or tf_keras `fit`, such as the patience of `EarlyStopping`."""

    def __init__(self, callbacks: Sequence[Any]) -> None:
        self._callbacks = callbacks
        self._attributes: list[ChangedAttributes] = []

    def begin(self) -> None:
        """Tracks changes from now on. Called after all callbacks' `on_train_begin`."""
        self._attributes = [ChangedAttributes(callback) for callback in self._callbacks]

    def save(self, arrays: list[Any], limit_bytes: float = math.inf) -> list[tuple[str, dict[str, Any]]]:
        """For each callback its type's name and its changed attributes, packed.

        A callback whose arrays exceed `limit_bytes` is not saved.
        """
        saved = []
        for callback, attributes in zip(self._callbacks, self._attributes, strict=True):
            first = len(arrays)
            values = attributes.save(arrays)
            if sum(array.nbytes for array in arrays[first:]) > limit_bytes:
                del arrays[first:]
                values = {}
            saved.append((type(callback).__qualname__, values))
        return saved

    def unsaved(self) -> list[str]:
        """Attributes of the script's own callbacks that the last `save` left out."""
        own = [
            (type(callback), attributes)
            for callback, attributes in zip(self._callbacks, self._attributes, strict=True)
            if not type(callback).__module__.startswith(("keras.", "tf_keras."))
        ]
        return sorted({f"{kind.__qualname__}.{name}" for kind, attributes in own for name in attributes.unsaved})

    def restore(self, saved: Sequence[tuple[str, dict[str, Any]]], arrays: list[Any]) -> None:
        for callback, attributes, (kind, values) in zip(self._callbacks, self._attributes, saved, strict=False):
            if type(callback).__qualname__ == kind:
                attributes.restore(values, arrays)


def dump_groups(groups: Mapping[str, Sequence[Any]]) -> bytes:
    """Like `dump_arrays`, for lists of arrays by name."""
    return dump_arrays(
        {f"{name}-{number}": array for name, group in groups.items() for number, array in enumerate(group)}
    )


def load_groups(content: bytes) -> Mapping[str, list[Any]]:
    """A missing name gives an empty list."""
    groups: defaultdict[str, list[Any]] = defaultdict(list)
    named = load_arrays(content)
    for key in sorted(named, key=lambda key: int(key.rpartition("-")[2])):
        groups[key.rpartition("-")[0]].append(named[key])
    return groups
