"""What functions behind the data keep, brought to another run of the same script."""

from __future__ import annotations

import collections
import functools
import itertools
import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dike import data_functions
from dike.data_functions import DataFunctions

EPOCHS = 0
Epoch = Callable[[], list[Any]]


def counts_in_a_list() -> Epoch:
    made: list[int] = []

    def rows() -> list[Any]:
        made.append(0)
        return [len(made)]

    return rows


def counts_by_nonlocal() -> Epoch:
    count = 0

    def rows() -> list[Any]:
        nonlocal count
        count += 1
        return [count]

    return rows


def counts_globally() -> Epoch:
    def rows() -> list[Any]:
        global EPOCHS
        EPOCHS += 1
        return [EPOCHS]

    return rows


def shuffles_in_place() -> Epoch:
    order, generator = list(range(9)), random.Random(3)

    def rows() -> list[Any]:
        generator.seed(len(order))
        generator.shuffle(order)
        return list(order)

    return rows


def shuffles_an_array() -> Epoch:
    order = np.arange(9)

    def rows() -> list[Any]:
        np.random.default_rng(3).shuffle(order)
        return order.tolist()

    return rows


class Sample:
    def __init__(self, number: int) -> None:
        self.number = number


def shuffles_objects() -> Epoch:
    samples = [Sample(number) for number in range(9)]

    def rows() -> list[Any]:
        random.Random(3).shuffle(samples)
        return [sample.number for sample in samples]

    return rows


class Reader:
    """Its state is in attributes, some of them made late."""

    def __init__(self) -> None:
        self.epoch = 0
        self.seen: collections.deque[int] = collections.deque(maxlen=2)
        self.limits: Any = None

    def __call__(self) -> list[Any]:
        self.epoch += 1
        self.seen.append(self.epoch)
        self.limits = {"low": self.epoch} if self.limits is None else {"low": self.limits["low"] + 2}
        return [self.epoch, list(self.seen), self.limits["low"]]

    def rows(self) -> list[Any]:
        return self()


class Slots:
    __slots__ = ("__dict__", "count")

    def __init__(self) -> None:
        self.total = 0

    def rows(self) -> list[Any]:
        self.total += 1
        return [self.total]


def calls_a_helper() -> Epoch:
    made: set[int] = set()

    def helper(step: int) -> int:
        made.add(len(made) + step)
        return max(made)

    return functools.partial(lambda step: [helper(step)], 2)


MAKERS: dict[str, Callable[[], Epoch]] = {
    each.__name__: each
    for each in (
        counts_in_a_list,
        counts_by_nonlocal,
        counts_globally,
        shuffles_in_place,
        shuffles_an_array,
        shuffles_objects,
        calls_a_helper,
    )
} | {"object": Reader, "method": lambda: Reader().rows, "slots": lambda: Slots().rows}


@pytest.fixture(autouse=True)
def _of_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "EPOCHS", 0)


@pytest.mark.parametrize("name", list(MAKERS))
def test_a_function_resumes_from_its_saved_state(name: str) -> None:
    first = MAKERS[name]()
    of_first = DataFunctions()
    of_first.register(first)
    first(), first()
    saved = json.loads(json.dumps(of_first.state()))
    expected = [first(), first()]
    assert of_first.unsaved() == []
    globals()["EPOCHS"] = 0

    second = MAKERS[name]()
    of_second = DataFunctions()
    of_second.register(second)
    second()
    of_second.restore(saved)
    assert [second(), second()] == expected
    of_second.restore(dict.fromkeys(saved))
    begun = second()
    of_first.restore(dict.fromkeys(saved))
    assert begun == first()  # the initial values


def test_a_function_made_after_the_place_of_the_checkpoint_gets_its_state_then() -> None:
    first, functions = counts_in_a_list(), DataFunctions()
    functions.register(first)
    first(), first()
    saved = functions.state()
    again = DataFunctions()
    again.restore(saved)
    assert again.state() == saved
    second = counts_in_a_list()
    again.register(second)
    assert second() == [3]


def test_iterators_and_changed_objects_are_named_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_functions, "_MAX_ARRAY_BYTES", 64)
    numbers, readers, large, untouched = itertools.count(), [Reader()], np.zeros(9), [Reader()]

    def rows() -> list[Any]:
        readers.append(Reader())
        large[3] += 1
        return [next(numbers), len(untouched)]

    functions = DataFunctions()
    functions.register(rows)
    assert functions.unsaved() == ["numbers"]
    rows()
    assert functions.unsaved() == ["large", "numbers", "readers"]


def test_a_function_that_is_gone_is_forgotten() -> None:
    functions = DataFunctions()
    functions.register(counts_in_a_list())
    functions.register(len)  # not of the script
    assert functions.state() == {}
