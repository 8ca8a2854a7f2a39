"""Python objects that travel from the process that asks for a search to those that run it: by cloudpickle."""

from __future__ import annotations

import linecache
import os
import pickle
import pickletools
from typing import Any

from dike.exceptions import BadInputError
from dike.main_script import one_line

OBJECT_LIMIT_BYTES = 2**20
"""A sampler or a space is kept in the search's record."""
FUNCTION_LIMIT_BYTES = 50 * 2**20
"""A function travels to every slot, with all that it refers to."""
FUNCTION_SUFFIX = ".function"
"""Ending of a file that holds a function where else a script is."""
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
    import cloudpickle

    try:
        data: bytes = cloudpickle.dumps(value)
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


def dump_function(function: object) -> bytes:
    """Pickles what a trial is to call, and the source of cells, which no file holds.

    Raises:
        BadInputError: see `dumps`.
    """
    what = "function given to dike.tune"
    data = dumps(function, what, FUNCTION_LIMIT_BYTES)
    # A function's code names the file that it is from.
    names = [name for name in linecache.cache if not os.path.isfile(name) and name.encode() in data]
    return pickle.dumps((data, {name: linecache.getlines(name) for name in names}))


def names_in_function(data: bytes) -> set[str]:
    """All text in what `dump_function` returned, the names of modules among it; nothing of the function is loaded.

    Raises:
        BadInputError: see `loads`.
    """
    pickled, _ = loads(data, "function given to dike.tune")
    return {text for _, text, _ in pickletools.genops(pickled) if isinstance(text, str)}


def load_function(data: bytes) -> Any:
    """The function; tracebacks, and libraries that read its source, find that as where it was written.

    Raises:
        BadInputError: see `loads`.
    """
    what = "function given to dike.tune"
    pickled, cells = loads(data, what)
    for name, lines in cells.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    return loads(pickled, what)


def loads(data: bytes, what: str) -> Any:
    """The object; reading it runs code of whoever has written it.

    Raises:
        BadInputError: if it cannot be read here.
    """
    try:
        return pickle.loads(data)  # noqa: S301 - of the user who runs this process
    except Exception as error:
        raise BadInputError(
            f"The {what} cannot be read back ({one_line(error)}); it needs the same Python and the same modules."
        ) from error
