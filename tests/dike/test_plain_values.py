"""Attributes of callbacks and data sets that a checkpoint holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from dike.keras3.plain_values import Attributes

LIMIT_BYTES = 1000


def saved(limit: dict[str, Any]) -> tuple[dict[str, Any], SimpleNamespace]:
    """What is saved of an object whose attributes change, and an object that got it back."""
    target = SimpleNamespace(best=None, weights=None, data=np.zeros(LIMIT_BYTES), model=object())
    attributes = Attributes(target, **limit)
    target.best, target.weights = (0.5, "loss"), [np.arange(LIMIT_BYTES), np.float32(2)]
    arrays: list[Any] = []
    packed = attributes.save(arrays)
    other = SimpleNamespace(best=None, weights=None)
    Attributes(other, **limit).restore(packed, arrays)
    return packed, other


def test_what_a_callback_has_changed_is_saved_however_large() -> None:
    packed, other = saved({})
    assert packed.keys() == {"best", "weights"}
    assert other.best == (0.5, "loss")
    assert np.array_equal(other.weights[0], np.arange(LIMIT_BYTES))
    assert (other.weights[1].dtype, other.weights[1]) == (np.float32, 2)


def test_large_arrays_of_a_data_set_are_taken_for_data() -> None:
    packed, other = saved({"limit_bytes": LIMIT_BYTES})
    assert packed.keys() == {"best"}
    assert other.weights is None
