"""Python objects that travel from the process that asks for a search to those that run it: by cloudpickle."""

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
"""A sampler or a space is kept in the search's record."""
FUNCTION_LIMIT_BYTES = 50 * 2**20
"""A function travels to every slot, with all that it refers to."""
FUNCTION_SUFFIX = ".function"
"""Ending of a file that holds a function where else a script is."""
_FUNCTION = "function given to dike.tune"
_NAMELESS = "<dynamic-code>"
"""Where cloudpickle says that code is from, whatever file that is."""
_PICKLE, _CELLS = "function.pickle", "cells.json"
"""What is in such a file, a zip archive: nothing runs when it is opened."""
_MIB = 2**20


def dumps(value: object, what: str, limit_bytes: int) -> bytes:
    """Pickles an object, with the functions and classes that it uses of the user's own session.

    Args:
        value: the object.
        what: what it is, for people.
        limit_bytes: how large it may become.

    Raises:
        BadInputError: if it cannot be pickled, or becomes larger.
    """
    try:
        data = _pickled(value)
    except Exception as error:
        raise BadInputError(
            f"The {what} cannot be sent to other processes ({one_line(error)}); make what cannot be pickled inside of "
            "the function, or put the call of dike.tune into a file and run that."
        ) from error
    if len(data) > limit_bytes:
        raise BadInputError(
            f"The {what}, with the data that it refers to, takes {len(data) / _MIB:,.1f} MiB; at most "
            f"{limit_bytes // _MIB} MiB can be sent along, so let it load its data from a file."
        )
    return data


def _pickled(value: object) -> bytes:
    """Pickles by value what no file can be imported for, with the names of the files that code is from.

    cloudpickle leaves these names out from 3.1.3 on, and tracebacks then show neither the user's file nor his line.
    """
    import cloudpickle

    reduced = cloudpickle.Pickler.dispatch_table[CodeType]

    def with_file(code: CodeType) -> tuple[Any, ...]:
        make, arguments = reduced(code)
        # A copy, as cloudpickle makes of names: of the same function come the same bytes.
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
    """Pickles what a trial is to call, and the source of cells, which no file holds.

    Raises:
        BadInputError: see `dumps`.
    """
    data = dumps(function, _FUNCTION, FUNCTION_LIMIT_BYTES)
    # A function's code names the file that it is from.
    names = [name for name in linecache.cache if not os.path.isfile(name) and name.encode() in data]
    cells = json.dumps({name: linecache.getlines(name) for name in names})
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        # Without the time: of the same function come the same bytes.
        archive.writestr(zipfile.ZipInfo(_PICKLE), data)
        archive.writestr(zipfile.ZipInfo(_CELLS), cells)
    return file.getvalue()


def names_in_function(data: bytes) -> set[str]:
    """All text in what `dump_function` returned, the names of modules among it; none of its code runs.

    Raises:
        BadInputError: if it cannot be read.
    """
    pickled, _ = _opened(data)
    with _reading(_FUNCTION):
        return {text for _, text, _ in pickletools.genops(pickled) if isinstance(text, str)}


def load_function(data: bytes) -> Any:
    """The function; tracebacks, and libraries that read its source, find that as where it was written.

    Raises:
        BadInputError: see `loads`.
    """
    pickled, cells = _opened(data)
    for name, lines in cells.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    return loads(pickled, _FUNCTION)


def _opened(data: bytes) -> tuple[bytes, dict[str, list[str]]]:
    """The pickle, and the cells' names and lines."""
    with _reading(_FUNCTION), zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.read(_PICKLE), json.loads(archive.read(_CELLS))


def loads(data: bytes, what: str) -> Any:
    """The object; reading it runs code of whoever has written it.

    Raises:
        BadInputError: if it cannot be read here.
    """
    with _reading(what):
        return pickle.loads(data)  # noqa: S301 - of the user who runs this process


@contextlib.contextmanager
def _reading(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise BadInputError(
            f"The {what} cannot be read back ({one_line(error)}); it needs the same Python and the same modules."
        ) from error
