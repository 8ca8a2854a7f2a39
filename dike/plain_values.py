"""Plain values as JSON with the arrays beside it, without pickle.

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
    if type(value) is bytes:
        return {_BYTES: base64.b64encode(value).decode("ascii")}
    if isinstance(value, PurePath):
        return {_PATH: str(value)}
    # Copies: code behind the data may change a container meanwhile, in a thread of its own.
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
    raise NotPlainError(type(value).__name__)


def _in_order(value: Any) -> list[Any]:
    """The parts of a tuple or set; those of a set, whose order is chance, by how they are written."""
    return list(value) if type(value) is tuple else sorted(value, key=repr)


def _pack_items(value: Mapping[Any, Any], arrays: list[Any], limit_bytes: float) -> list[Any]:
    return [[pack(each, arrays, limit_bytes) for each in item] for item in list(value.items())]


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


def identities(value: Any) -> Any:
    """Differs when a container gets other parts or another order, or where a variable gets another object."""
    if isinstance(value, dict):
        return [id(part) for part in list(value.values())]
    return [id(part) for part in list(value)] if isinstance(value, list | set | deque) else id(value)


class Attributes:
    """Those attributes of an object that are plain, and change; data that it was given are not looked at.

    Args:
        target: the object, as the script has made it.
        is_data_set: whether what it puts in the place of its data is data as well.

    Attributes:
        lost: names of those that had changed when it was saved last, and are not plain.
    """

    def __init__(self, target: Any, *, is_data_set: bool = False) -> None:
        self._target = target
        self._is_data_set = is_data_set
        self.lost: list[str] = []
        self._data: dict[str, Any] = {}
        self._before: dict[str, str | None] = {}
        self._parts: dict[str, Any] = {}
        for name, value in vars(target).items():
            try:
                self._before[name] = digest(value, DATA_BYTES)
                if self._before[name] is None:
                    self._parts[name] = identities(value)
            except LargeArrayError:
                self._data[name] = value

    def save(self, arrays: list[Any]) -> dict[str, Any]:
        """What has changed since this was made, packed."""
        changed = {}
        self.lost = []
        for name, value in vars(self._target).items():
            if name in self._data and (self._is_data_set or value is self._data[name]):
                continue
            now = digest(value)
            if now is None and identities(value) != self._parts.get(name):
                self.lost.append(name)
            elif now is not None and (name not in self._before or now != self._before[name]):
                changed[name] = pack(value, arrays)
        return changed

    def digests(self) -> dict[str, str | None]:
        """By name what differs for values that differ."""
        return {name: digest(value) for name, value in vars(self._target).items() if name not in self._data}

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

    def lost(self) -> list[str]:
        """Attributes of the script's own callbacks that the last `save` left out, each as `Callback.attribute`."""
        own = [
            (type(callback), attributes)
            for callback, attributes in zip(self._callbacks, self._attributes, strict=True)
            if not type(callback).__module__.startswith(("keras.", "tf_keras."))
        ]
        return sorted({f"{kind.__qualname__}.{name}" for kind, attributes in own for name in attributes.lost})

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
