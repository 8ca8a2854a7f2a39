"""What the script's Python functions behind `tf.data` keep from one call to the next, carried to another process.

`Dataset.from_generator`, `tf.numpy_function` and `tf.py_function` call functions of the script. Such a function may
count its epochs or shuffle a list in place, so the batches of an epoch depend on the epochs before it. Saved are the
plain values (`dike.plain_values`) that it reaches by its closure, its global variables, its object, and the functions
of the script that it calls.
"""

from __future__ import annotations

import base64
import contextlib
import dis
import functools
import sys
import sysconfig
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from dike import plain_values
from dike.main_script import cell_content, with_inner

_LIBRARIES = tuple(
    {*(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")), str(Path(__file__).parent)}
)
_CONTAINERS = (list, dict, set, deque)
_MAX_VALUES = 300_000
_MAX_ARRAY_BYTES = 1 << 24
"""What holds more is taken for data: of a list only the order of its parts is saved."""


class _Variable:
    """A variable that a function of the script reaches, and what it was when the function was registered.

    Args:
        name: its name, with the object that it is an attribute of.
        read: returns its value; None where it has none, or none any more.
        write: sets another value.
    """

    def __init__(self, name: str, read: Callable[[], Any], write: Callable[[Any], None]) -> None:
        self.name = name
        self._read = read
        self._write = write
        value = read()
        self._first = _pack(value)
        self._parts = list(value) if self._first is None and type(value) is list else None
        self._mark = _mark(value)

    @property
    def change(self) -> Any:
        """Its value as JSON values; None if it is as it was, or cannot be saved."""
        value = self._read()
        if self._parts is not None and type(value) is list:
            return None if _mark(value) == self._mark else _order(value, self._parts)
        packed = _pack(value)
        return None if packed == self._first else packed

    @property
    def is_lost(self) -> bool:
        """Whether it has changed, or will, and cannot be saved."""
        value = self._read()
        if _is_iterator(value):
            return True
        return _mark(value) != self._mark and _pack(value) is None and self.change is None

    def restore(self, saved: Any) -> None:
        """Sets it to what `change` returned, which is None for the value it had first."""
        target = self._read()
        if self._parts is not None:
            order = range(len(self._parts)) if saved is None else saved.get("order", ())
            if type(target) is list and len(order) == len(self._parts):
                target[:] = [self._parts[number] for number in order]
            return
        packed = self._first if saved is None else saved
        if packed is None or packed == _pack(target):
            return
        value = _unpack(packed)
        # In place where that is possible, for others may refer to the same container.
        if type(target) is not type(value):
            self._write(value)
        elif isinstance(target, list):
            target[:] = value
        elif isinstance(target, deque | set | dict):
            target.clear()
            getattr(target, "extend" if isinstance(target, deque) else "update")(value)
        elif _is_array(target) and target.shape == value.shape and target.dtype == value.dtype:
            target[...] = value
        else:
            self._write(value)


class DataFunctions:
    """The functions of a script that `tf.data` calls."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Callable[[], Any], dict[str, _Variable]]] = {}
        self._counts: Counter[str] = Counter()
        self._awaited: dict[str, Any] = {}
        self.around_calls: Callable[[], AbstractContextManager[object]] | None = None
        """Makes a context for each call of a function by `tf.data`; None for nothing."""

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._known)

    def register(self, registered: Any) -> None:
        """TensorFlow may call `registered` from now on, a function of the script or one of its own around it."""
        for function in _of_script(registered, set()):
            anchor = function.__self__ if isinstance(function, MethodType) else function
            number = id(anchor)
            if number in self._known:
                continue
            code = _code_of(function)
            place = f"{code.co_qualname}:{code.co_firstlineno}"
            key = f"{place}:{self._counts[place]}"
            self._counts[place] += 1
            found = {f"{key}:{each.name}": each for each in _reach(function, set(), "")}
            self._known[number] = (_reference(anchor, functools.partial(self._forget, number)), found)
            self._restore(found)

    def _forget(self, number: int, _: Any) -> None:
        del self._known[number]

    @property
    def _variables(self) -> dict[str, _Variable]:
        return {key: each for _, found in list(self._known.values()) for key, each in found.items()}

    def state(self) -> dict[str, Any]:
        """By variable its value as JSON values; None for one that has not changed."""
        return {**self._awaited, **{key: each.change for key, each in sorted(self._variables.items())}}

    def restore(self, saved: dict[str, Any]) -> None:
        """Goes back to what `state` returned; variables that are not in it stay as they are."""
        self._awaited = dict(saved)
        self._restore(self._variables)

    def _restore(self, variables: dict[str, _Variable]) -> None:
        for key in sorted(variables.keys() & self._awaited.keys()):
            variables[key].restore(self._awaited.pop(key))

    def lost(self) -> list[str]:
        """Names of the variables that cannot be saved."""
        return sorted({each.name for each in self._variables.values() if each.is_lost})


functions = DataFunctions()


def watch(script_ops: ModuleType) -> None:
    """Registers functions from now on, and is around their calls.

    Args:
        script_ops: TensorFlow's module of that name.
    """
    registry: Any = script_ops.FuncRegistry
    insert, call = registry.insert, registry.__call__

    @functools.wraps(insert)
    def own_insert(self: Any, func: Any) -> Any:
        functions.register(func)
        return insert(self, func)

    @functools.wraps(call)
    def own_call(self: Any, token: str, device: str, args: Any) -> Any:
        around = functions.around_calls
        with contextlib.nullcontext() if around is None else around():
            return call(self, token, device, args)

    registry.insert, registry.__call__ = own_insert, own_call


def _is_of_script(path: str | None) -> bool:
    if path is None or path.startswith(("<", *_LIBRARIES)):
        return False
    return not {"site-packages", "dist-packages"} & set(Path(path).parts)


def _is_script_class(kind: type) -> bool:
    """Whether the script defines it. A model or a layer of its own is not looked into: that has variables elsewhere."""
    modules = {each.__module__.partition(".")[0] for each in kind.__mro__}
    if modules & {"tensorflow", "keras", "tf_keras"}:
        return False
    return _is_of_script(getattr(sys.modules.get(kind.__module__), "__file__", None))


def _code_of(function: Any) -> CodeType:
    while isinstance(function, functools.partial):
        function = function.func
    plain = function.__func__ if isinstance(function, MethodType) else function
    code: CodeType = plain.__code__ if isinstance(plain, FunctionType) else type(plain).__call__.__code__
    return code


def _of_script(value: Any, seen: set[int]) -> Iterator[Any]:
    """The functions of the script among what a function of TensorFlow's is made of."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, functools.partial):
        if next(_of_script(value.func, seen), None) is not None:
            yield value
    elif isinstance(value, FunctionType | MethodType):
        if _is_of_script(_code_of(value).co_filename):
            yield value
            return
        for cell in getattr(value, "__closure__", None) or ():
            yield from _of_script(cell_content(cell), seen)
    elif type(value).__name__ == "EagerFunc":
        yield from _of_script(value._func, seen)
    elif type(value).__name__ == "_GeneratorState":
        yield from _of_script(value._generator, seen)
    elif callable(value) and not isinstance(value, type) and _is_script_class(type(value)):
        yield value


def _reach(value: Any, seen: set[int], name: str) -> Iterator[_Variable]:
    """The variables that a function, or an object, of the script reaches.

    Args:
        value: the function or object.
        seen: what has been looked at, by id.
        name: how it is reached.
    """
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, functools.partial):
        for part in (value.func, *value.args, *value.keywords.values()):
            yield from _reach(part, seen, name)
    elif isinstance(value, MethodType):
        yield from _reach(value.__self__, seen, name)
        yield from _reach(value.__func__, seen, name)
    elif isinstance(value, FunctionType):
        if _is_of_script(value.__code__.co_filename):
            yield from _reach_function(value, seen)
    elif _is_script_class(type(value)):
        yield from _reach_object(value, seen, name or type(value).__name__)


def _reach_function(function: FunctionType, seen: set[int]) -> Iterator[_Variable]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        read = functools.partial(cell_content, cell)
        yield from _look_at(name, read, functools.partial(setattr, cell, "cell_contents"), seen)
    found = function.__globals__
    for name in sorted(_names(function.__code__) & found.keys()):
        yield from _look_at(name, functools.partial(found.get, name), functools.partial(found.__setitem__, name), seen)


def _reach_object(owner: Any, seen: set[int], name: str) -> Iterator[_Variable]:
    reference = _reference(owner)
    for attribute in list(getattr(owner, "__dict__", ())):
        read = functools.partial(_attribute, reference, attribute)
        yield from _look_at(f"{name}.{attribute}", read, functools.partial(_set, reference, attribute), seen)
    for kind in filter(_is_script_class, type(owner).__mro__):
        for function in [each for each in vars(kind).values() if isinstance(each, FunctionType)]:
            yield from _reach(function, seen, "")


def _reference(value: Any, at_end: Callable[[Any], Any] | None = None) -> Callable[[], Any]:
    """A weak reference, where there can be one."""
    try:
        return weakref.ref(value, at_end)
    except TypeError:  # it has slots
        return functools.partial(_same, value)


def _same(value: Any) -> Any:
    return value


def _attribute(owner: Callable[[], Any], name: str) -> Any:
    return getattr(owner(), name, None)


def _set(owner: Callable[[], Any], name: str, value: Any) -> None:
    setattr(owner(), name, value)


def _look_at(name: str, read: Callable[[], Any], write: Callable[[Any], None], seen: set[int]) -> Iterator[_Variable]:
    value = read()
    is_plain = value is None or isinstance(value, bool | int | float | str | bytes | tuple)
    if is_plain or isinstance(value, _CONTAINERS) or _is_array(value) or _is_iterator(value):
        yield _Variable(name, read, write)
    else:
        yield from _reach(value, seen, name)


def _names(code: CodeType) -> set[str]:
    """Global names that code refers to, and functions inside of it."""
    instructions = (each for one in with_inner(code) for each in dis.get_instructions(one))
    return {each.argval for each in instructions if each.opname.endswith(("_GLOBAL", "_NAME"))}


def _is_array(value: Any) -> bool:
    return type(value).__name__ == "ndarray"


def _is_iterator(value: Any) -> bool:
    return hasattr(type(value), "__next__")


def _mark(value: Any) -> Any:
    """Differs if the variable has another value, or if its value is another than it was."""
    if _is_array(value):
        return (id(value), value.reshape(-1)[:: max(1, value.size // 1024)].tolist())
    return plain_values.identities(value)


def _order(parts: list[Any], first: list[Any]) -> Any:
    """The places that the parts of a list had first; None if there are others."""
    places = {id(part): number for number, part in enumerate(first)}
    order = [places.get(id(part)) for part in parts]
    return None if len(order) != len(first) or None in order else {"order": order}


def _pack(value: Any) -> Any:
    """The value as JSON values; None for one that is not plain, or that is large."""
    arrays: list[Any] = []
    if _size(value, 0) > _MAX_VALUES:
        return None
    try:
        packed = plain_values.pack(value, arrays, _MAX_ARRAY_BYTES)
    except (plain_values.NotPlainError, plain_values.LargeArrayError):
        return None
    encoded = [[each.dtype.str, each.shape, base64.b64encode(each.tobytes()).decode("ascii")] for each in arrays]
    return {"value": packed, "arrays": encoded}


def _size(value: Any, size: int) -> int:
    """Values in a container beside `size` others, counted no further than the limit; 16 MiB of arrays reach it."""
    size += 1
    if _is_array(value):
        return size + value.nbytes * _MAX_VALUES // _MAX_ARRAY_BYTES
    if isinstance(value, (*_CONTAINERS, tuple)):
        for part in list(value.values() if isinstance(value, dict) else value):
            if size > _MAX_VALUES:
                break
            size = _size(part, size)
    return size


def _unpack(packed: Any) -> Any:
    arrays = [
        np.frombuffer(base64.b64decode(content), dtype).reshape(shape).copy()
        for dtype, shape, content in packed["arrays"]
    ]
    return plain_values.unpack(packed["value"], arrays)
