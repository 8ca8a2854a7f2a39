"""Saves the state of the script's Python functions behind `tf.data`, so that another process can continue with it.

Functions called by `Dataset.from_generator`, `tf.numpy_function` and `tf.py_function` may count epochs or shuffle a
list in place, so that an epoch depends on those before. Saved are the plain values (`dike.plain_values`) reachable
through a function's closure, its globals, its object, and the script's functions that it calls.
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
from dike.main_script import cell_content, nested_code

_LIBRARIES = tuple(
    {*(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")), str(Path(__file__).parent)}
)
_CONTAINERS = (list, dict, set, deque)
_MAX_VALUES = 300_000
_MAX_ARRAY_BYTES = 1 << 24
"""Larger values count as data: of a large list only the order of its elements is saved."""


class _Variable:
    """A variable that a function of the script reaches, with its value at registration.

    Args:
        name: includes the object that it is an attribute of.
        read: returns its value; None if it has none.
        write: sets its value.
    """

    def __init__(self, name: str, read: Callable[[], Any], write: Callable[[Any], None]) -> None:
        self.name = name
        self._read = read
        self._write = write
        value = read()
        self._first = _pack(value)
        self._parts = list(value) if self._first is None and type(value) is list else None
        self._first_signature = _signature(value)

    @property
    def change(self) -> Any:
        """The changed value as JSON values; None if it is unchanged or cannot be saved."""
        value = self._read()
        if self._parts is not None and type(value) is list:
            return None if _signature(value) == self._first_signature else _permutation(value, self._parts)
        packed = _pack(value)
        return None if packed == self._first else packed

    @property
    def is_unsavable(self) -> bool:
        """Whether it has changed, or will change, and cannot be saved."""
        value = self._read()
        if _is_iterator(value):
            return True
        return _signature(value) != self._first_signature and _pack(value) is None and self.change is None

    def restore(self, saved: Any) -> None:
        """Sets the value that `change` returned; None stands for the initial value."""
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
        # In place where possible, since other variables may refer to the same container.
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
    def __init__(self) -> None:
        self._known: dict[int, tuple[Callable[[], Any], dict[str, _Variable]]] = {}
        self._counts: Counter[str] = Counter()
        self._pending: dict[str, Any] = {}
        self.around_calls: Callable[[], AbstractContextManager[object]] | None = None
        """Context manager for each call of a function by `tf.data`, or None."""

    def __bool__(self) -> bool:
        return bool(self._known)

    def register(self, registered: Any) -> None:
        """Registers the script's function in `registered`, which TensorFlow may have wrapped."""
        for function in _script_functions(registered, set()):
            anchor = function.__self__ if isinstance(function, MethodType) else function
            number = id(anchor)
            if number in self._known:
                continue
            code = _code_of(function)
            place = f"{code.co_qualname}:{code.co_firstlineno}"
            key = f"{place}:{self._counts[place]}"
            self._counts[place] += 1
            found = {f"{key}:{each.name}": each for each in _reachable_variables(function, set(), "")}
            self._known[number] = (_reference(anchor, functools.partial(self._forget, number)), found)
            self._restore(found)

    def _forget(self, number: int, _: Any) -> None:
        del self._known[number]

    @property
    def _variables(self) -> dict[str, _Variable]:
        return {key: each for _, found in list(self._known.values()) for key, each in found.items()}

    def state(self) -> dict[str, Any]:
        """Variable -> its value as JSON values; None if unchanged."""
        return {**self._pending, **{key: each.change for key, each in sorted(self._variables.items())}}

    def restore(self, saved: dict[str, Any]) -> None:
        """Restores what `state` returned, now or when a variable is registered; others stay unchanged."""
        self._pending = dict(saved)
        self._restore(self._variables)

    def _restore(self, variables: dict[str, _Variable]) -> None:
        for key in sorted(variables.keys() & self._pending.keys()):
            variables[key].restore(self._pending.pop(key))

    def unsaved(self) -> list[str]:
        return sorted({each.name for each in self._variables.values() if each.is_unsavable})


functions = DataFunctions()


def watch(script_ops: ModuleType) -> None:
    """Registers all functions given to TensorFlow's module `script_ops` from now on, and wraps their calls."""
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


def _is_script_file(path: str | None) -> bool:
    if path is None or path.startswith(("<", *_LIBRARIES)):
        return False
    return not {"site-packages", "dist-packages"} & set(Path(path).parts)


def _is_script_class(kind: type) -> bool:
    """Whether the script defines it, models and layers excluded: their variables are saved elsewhere."""
    modules = {each.__module__.partition(".")[0] for each in kind.__mro__}
    if modules & {"tensorflow", "keras", "tf_keras"}:
        return False
    return _is_script_file(getattr(sys.modules.get(kind.__module__), "__file__", None))


def _code_of(function: Any) -> CodeType:
    while isinstance(function, functools.partial):
        function = function.func
    plain = function.__func__ if isinstance(function, MethodType) else function
    code: CodeType = plain.__code__ if isinstance(plain, FunctionType) else type(plain).__call__.__code__
    return code


def _script_functions(value: Any, seen: set[int]) -> Iterator[Any]:
    """The script's functions inside a wrapper of TensorFlow's."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, functools.partial):
        if next(_script_functions(value.func, seen), None) is not None:
            yield value
    elif isinstance(value, FunctionType | MethodType):
        if _is_script_file(_code_of(value).co_filename):
            yield value
            return
        for cell in getattr(value, "__closure__", None) or ():
            yield from _script_functions(cell_content(cell), seen)
    elif type(value).__name__ == "EagerFunc":
        yield from _script_functions(value._func, seen)
    elif type(value).__name__ == "_GeneratorState":
        yield from _script_functions(value._generator, seen)
    elif callable(value) and not isinstance(value, type) and _is_script_class(type(value)):
        yield value


def _reachable_variables(value: Any, seen: set[int], name: str) -> Iterator[_Variable]:
    """Variables that a function or object of the script reaches; `seen` are ids of visited values."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, functools.partial):
        for part in (value.func, *value.args, *value.keywords.values()):
            yield from _reachable_variables(part, seen, name)
    elif isinstance(value, MethodType):
        yield from _reachable_variables(value.__self__, seen, name)
        yield from _reachable_variables(value.__func__, seen, name)
    elif isinstance(value, FunctionType):
        if _is_script_file(value.__code__.co_filename):
            yield from _function_variables(value, seen)
    elif _is_script_class(type(value)):
        yield from _object_variables(value, seen, name or type(value).__name__)


def _function_variables(function: FunctionType, seen: set[int]) -> Iterator[_Variable]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        read = functools.partial(cell_content, cell)
        yield from _visit_variable(name, read, functools.partial(setattr, cell, "cell_contents"), seen)
    found = function.__globals__
    for name in sorted(_names(function.__code__) & found.keys()):
        yield from _visit_variable(
            name, functools.partial(found.get, name), functools.partial(found.__setitem__, name), seen
        )


def _object_variables(owner: Any, seen: set[int], name: str) -> Iterator[_Variable]:
    reference = _reference(owner)
    for attribute in list(getattr(owner, "__dict__", ())):
        read = functools.partial(_attribute, reference, attribute)
        yield from _visit_variable(f"{name}.{attribute}", read, functools.partial(_set, reference, attribute), seen)
    for kind in filter(_is_script_class, type(owner).__mro__):
        for function in [each for each in vars(kind).values() if isinstance(each, FunctionType)]:
            yield from _reachable_variables(function, seen, "")


def _reference(value: Any, at_end: Callable[[Any], Any] | None = None) -> Callable[[], Any]:
    """A weak reference where possible, else a strong one."""
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


def _visit_variable(
    name: str, read: Callable[[], Any], write: Callable[[Any], None], seen: set[int]
) -> Iterator[_Variable]:
    value = read()
    is_plain = value is None or isinstance(value, bool | int | float | str | bytes | tuple)
    if is_plain or isinstance(value, _CONTAINERS) or _is_array(value) or _is_iterator(value):
        yield _Variable(name, read, write)
    else:
        yield from _reachable_variables(value, seen, name)


def _names(code: CodeType) -> set[str]:
    """Global names in code, including nested functions."""
    instructions = (each for one in nested_code(code) for each in dis.get_instructions(one))
    return {each.argval for each in instructions if each.opname.endswith(("_GLOBAL", "_NAME"))}


def _is_array(value: Any) -> bool:
    return type(value).__name__ == "ndarray"


def _is_iterator(value: Any) -> bool:
    return hasattr(type(value), "__next__")


def _signature(value: Any) -> Any:
    """Changes with the identity of the value or of a container's elements, and with a sample of an array's values."""
    if _is_array(value):
        return (id(value), value.reshape(-1)[:: max(1, value.size // 1024)].tolist())
    return plain_values.identities(value)


def _permutation(parts: list[Any], first: list[Any]) -> Any:
    """Initial position of each element of a list; None if there are other elements."""
    places = {id(part): number for number, part in enumerate(first)}
    order = [places.get(id(part)) for part in parts]
    return None if len(order) != len(first) or None in order else {"order": order}


def _pack(value: Any) -> Any:
    """The value as JSON values; None if it is not plain or too large."""
    arrays: list[Any] = []
    if _size(value, 0) > _MAX_VALUES:
        return None
    try:
        packed = plain_values.pack(value, arrays, _MAX_ARRAY_BYTES)
    except (plain_values.NotPlainValueError, plain_values.LargeArrayError):
        return None
    encoded = [[each.dtype.str, each.shape, base64.b64encode(each.tobytes()).decode("ascii")] for each in arrays]
    return {"value": packed, "arrays": encoded}


def _size(value: Any, size: int) -> int:
    """`size` plus the number of values in a container, counted up to the limit; 16 MiB of arrays reach it."""
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
