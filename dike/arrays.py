"""Arrays of any numeric type in one file, without pickle."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from dike import plain_files


def dump_arrays(arrays: Mapping[str, Any]) -> bytes:
    file = io.BytesIO()
    # A type that NumPy itself does not know, such as bfloat16, would lose its name in the file.
    np.savez(file, **{f"{array.dtype.name}:{name}": _raw(array) for name, array in arrays.items()})
    return file.getvalue()


def load_arrays(content: bytes) -> dict[str, Any]:
    """Reads what `dump_arrays` wrote. Raises ValueError for anything else, or if the archive expands."""
    found = {}
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        plain_files.check_archive(archive, len(content))
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        for key in file.files:
            dtype, _, name = key.partition(":")
            array = file[key]
            found[name] = array.view(_dtype(dtype)) if array.dtype.name != dtype else array
    return found


def _raw(array: Any) -> Any:
    if array.dtype.kind != "V":
        return array
    return np.ascontiguousarray(array).reshape(array.shape).view(np.dtype(f"u{array.dtype.itemsize}"))


def _dtype(name: str) -> Any:
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name))
