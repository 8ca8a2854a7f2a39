"""ChangedAttributes of callbacks and data sets that a checkpoint holds."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dike import plain_values
from dike.plain_values import ChangedAttributes

LARGE = 1000


def test_what_has_changed_is_saved_however_large_but_no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_values, "LARGE_ARRAY_BYTES", LARGE)
    target = SimpleNamespace(
        best=None, weights=None, same=3, data=np.zeros(LARGE), mean=np.zeros(LARGE), model=object()
    )
    attributes, data_set = ChangedAttributes(target), ChangedAttributes(target, is_data_set=True)
    target.best, target.weights = (0.5, "loss"), [np.arange(LARGE), np.float32(2), np.zeros((0, 2))]
    target.data[0] = 1
    target.mean = target.mean + 1
    arrays: list[Any] = []
    packed = attributes.save(arrays)
    assert packed.keys() == {"best", "weights", "mean"}
    assert data_set.save([]).keys() == {"best", "weights"}
    target.weights[0][0] = 7  # what was saved is what it was then
    other = SimpleNamespace(best=None, weights=None, same=4)
    ChangedAttributes(other).restore(packed, arrays)
    assert (other.best, other.same) == ((0.5, "loss"), 4)
    assert np.array_equal(other.weights[0], np.arange(LARGE))
    assert (other.weights[1].dtype, other.weights[1]) == (np.float32, 2)
    assert other.weights[2].shape == (0, 2)


PLAIN = [
    {"a", "b"},
    frozenset({1, 2}),
    deque([1, 2], maxlen=3),
    b"bytes",
    Path("data") / "file",
    OrderedDict(b=1, a=2),
    Counter("abca"),
    defaultdict(list, {3: [(1, None)]}),
    {"nested": [deque([{1}]), {2.5: (True,)}]},
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_containers_are_what_they_were(value: Any) -> None:
    target = SimpleNamespace(value=None)
    attributes = ChangedAttributes(target)
    target.value = value
    arrays: list[Any] = []
    packed = json.loads(json.dumps(attributes.save(arrays)))
    other = SimpleNamespace(value=None)
    ChangedAttributes(other).restore(packed, arrays)
    assert (type(other.value), other.value) == (type(value), value)
    assert getattr(other.value, "maxlen", None) == getattr(value, "maxlen", None)
    assert getattr(other.value, "default_factory", None) == getattr(value, "default_factory", None)
    assert attributes.unsaved == []


def test_what_has_changed_and_is_not_plain_is_named() -> None:
    target = SimpleNamespace(model=object(), samples=[object()], same=[object()], late=None)
    attributes = ChangedAttributes(target)
    attributes.save([])
    assert attributes.unsaved == []
    target.samples.append(object())
    target.late = object()
    target.new = open
    attributes.save([])
    assert attributes.unsaved == ["samples", "late", "new"]
