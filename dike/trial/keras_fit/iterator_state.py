"""Where a `tf.data` iterator is, shuffle buffers included, as files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops.options import ExternalStatePolicy
from tensorflow.python.ops import gen_dataset_ops

_NAME = "iterator"


def save(iterator: Any, *, without_random_ops: bool) -> dict[str, bytes] | None:
    """Name -> content of the files; None if a part of the state cannot be had.

    Args:
        iterator: an iterator over a data set, eager.
        without_random_ops: leave out where the random ops are that the data set calls.
    """
    policy = ExternalStatePolicy.IGNORE if without_random_ops else ExternalStatePolicy.FAIL
    try:
        state = gen_dataset_ops.serialize_iterator(iterator._iterator_resource, external_state_policy=policy.value)
    except (tf.errors.FailedPreconditionError, tf.errors.UnimplementedError):
        return None
    with tempfile.TemporaryDirectory(prefix="dike-iterator-") as folder:
        tf.raw_ops.SaveV2(prefix=f"{folder}/{_NAME}", tensor_names=[_NAME], shape_and_slices=[""], tensors=[state])
        return {name: _read(f"{folder}/{name}") for name in os.listdir(folder)}


def restore(iterator: Any, files: Mapping[str, bytes]) -> None:
    """Brings an iterator over the same data set to where `save` found the other."""
    with tempfile.TemporaryDirectory(prefix="dike-iterator-") as folder:
        for name, content in files.items():
            with open(f"{folder}/{name}", "wb") as file:
                file.write(content)
        (state,) = tf.raw_ops.RestoreV2(
            prefix=f"{folder}/{_NAME}", tensor_names=[_NAME], shape_and_slices=[""], dtypes=[tf.variant]
        )
    gen_dataset_ops.deserialize_iterator(iterator._iterator_resource, state)


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
