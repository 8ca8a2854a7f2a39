"""Attributes of callbacks and data sets that a checkpoint holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dike.keras3 import plain_values
from dike.keras3.plain_values import Attributes

LARGE = 1000


def test_what_has_changed_is_saved_however_large_but_no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_values, "DATA_BYTES", LARGE)
    target = SimpleNamespace(
        best=None, weights=None, same=3, data=np.zeros(LARGE), mean=np.zeros(LARGE), model=object()
    )
    attributes, data_set = Attributes(target), Attributes(target, is_data_set=True)
    target.best, target.weights = (0.5, "loss"), [np.arange(LARGE), np.float32(2), np.zeros((0, 2))]
    target.data[0] = 1
    target.mean = target.mean + 1
    arrays: list[Any] = []
    packed = attributes.save(arrays)
    assert packed.keys() == {"best", "weights", "mean"}
    assert data_set.save([]).keys() == {"best", "weights"}
    target.weights[0][0] = 7  # what was saved is what it was then
    other = SimpleNamespace(best=None, weights=None, same=4)
    Attributes(other).restore(packed, arrays)
    assert (other.best, other.same) == ((0.5, "loss"), 4)
    assert np.array_equal(other.weights[0], np.arange(LARGE))
    assert (other.weights[1].dtype, other.weights[1]) == (np.float32, 2)
    assert other.weights[2].shape == (0, 2)
