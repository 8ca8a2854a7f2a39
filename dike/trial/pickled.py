"""Pickles Python objects that a search sends to other processes, with cloudpickle."""

from __future__ import annotations

import contextlib
import io
import json
import linecache
import os
import pickle
import pickletools
import zipfile
from collections import ChainMap
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import Any, ClassVar

from dike.exceptions import BadInputError
from dike.main_script import one_line

OBJECT_LIMIT_BYTES = 2**20
"""A sampler or a space is stored in the search's record."""
FUNCTION_LIMIT_BYTES = 50 * 2**20
"""A function is sent to every slot, with everything that it refers to."""
FUNCTION_SUFFIX = ".function"
"""Suffix of a file with a pickled function, in place of a script."""
_FUNCTION = "function given to dike.tune"
_NAMELESS = "<dynamic-code>"
"""cloudpickle's file name for all code."""
_PICKLE, _CELLS = "function.pickle", "cells.json"
"""Members of such a file, a zip archive; opening it runs no code."""
_MIB = 2**20


def dumps(value: object, what: str, limit_bytes: int) -> bytes:
    """Pickles an object, including functions and classes of the user's session; `what` names it in messages.

    Raises:
        BadInputError: if it cannot be pickled, or is larger than the limit.
    """
    try:
        data = _pickled(value)
    except Exception as error:
        raise BadInputError(
            f"The {what} cannot be sent to other processes ({one_line(error)}); create what cannot be pickled inside "
            "the function, or put the call of dike.tune into a file and run that."
        ) from error
    if len(data) > limit_bytes:
        raise BadInputError(
            f"The {what}, with the data that it refers to, takes {len(data) / _MIB:,.1f} MiB; the "
            f"maximum is {limit_bytes // _MIB} MiB. Load the data from a file instead."
        )
    return data


def _pickled(value: object) -> bytes:
    """Pickles by value what cannot be imported from a file, with the names of the code's source files.

    cloudpickle drops these names since 3.1.3, and tracebacks would then show neither file nor line.
    """
    import cloudpickle

    reduced = cloudpickle.Pickler.dispatch_table[CodeType]

    def with_file(code: CodeType) -> tuple[Any, ...]:
        make, arguments = reduced(code)
        # A copy, as cloudpickle makes of names, so that equal functions give equal bytes.
        named = ("".join(code.co_filename) if each == _NAMELESS else each for each in arguments)
        return make, tuple(named)

    class Pickler(cloudpickle.Pickler):
        dispatch_table: ClassVar[Mapping[type, Any]] = ChainMap(
            {CodeType: with_file}, cloudpickle.Pickler.dispatch_table
        )

    with io.BytesIO() as file:
        Pickler(file).dump(value)
        return file.getvalue()


def dump_function(function: object) -> bytes:
    """Pickles a trial's function, with the source of notebook cells, which are in no file.

    Raises:
        BadInputError: see `dumps`.
    """
    data = dumps(function, _FUNCTION, FUNCTION_LIMIT_BYTES)
    # A function's code contains the name of its source file.
    names = [name for name in linecache.cache if not os.path.isfile(name) and name.encode() in data]
    cells = json.dumps({name: linecache.getlines(name) for name in names})
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        # Without timestamps, so that equal functions give equal bytes.
        archive.writestr(zipfile.ZipInfo(_PICKLE), data)
        archive.writestr(zipfile.ZipInfo(_CELLS), cells)
    return file.getvalue()


def names_in_function(data: bytes) -> set[str]:
    """Returns all strings in a pickled function, including names of modules. Runs none of its code.

    Raises:
        BadInputError: if it cannot be read.
    """
    pickled, _ = _opened(data)
    with _reading(_FUNCTION):
        return {text for _, text, _ in pickletools.genops(pickled) if isinstance(text, str)}


def load_function(data: bytes) -> Any:
    """Loads a function. Tracebacks, and libraries that read its source, find the source of notebook cells.

    Raises:
        BadInputError: see `loads`.
    """
    pickled, cells = _opened(data)
    for name, lines in cells.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    return loads(pickled, _FUNCTION)


def _opened(data: bytes) -> tuple[bytes, dict[str, list[str]]]:
    with _reading(_FUNCTION), zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.read(_PICKLE), json.loads(archive.read(_CELLS))


def loads(data: bytes, what: str) -> Any:
    """Unpickles an object, which runs code of its author.

    Raises:
        BadInputError: if it cannot be read here.
    """
    with _reading(what):
        return pickle.loads(data)  # noqa: S301 - from the user of this process


@contextlib.contextmanager
def _reading(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise BadInputError(
            f"The {what} cannot be read back ({one_line(error)}); it needs the same Python and the same modules."
        ) from error
