"""The batches of a `fit`: Keras' own iterator, extended by its position, which can be saved and restored."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TFEpochIterator
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from tensorflow.python.data.ops.options import ExternalStatePolicy
from tensorflow.python.ops import gen_dataset_ops

from dike import randomness
from dike.plain_values import ChangedAttributes
from dike.process import has_busy_threads

_ITERATOR = "iterator"
_SETTLE_TIMEOUT_S = 10.0
"""Maximum time to wait for code that prefetches batches: it may fill a large buffer, or a thread may always be busy."""
_NESTED = ("generators", "functions")
"""Parts of a random state that consist of named parts."""


@dataclass
class DataPosition:
    """Position of a `fit` in its data.

    Attributes:
        made: number of iterators made, including the current one. If the dataset shuffles, each has another order.
        drawn: batches taken from the current one.
        kept: whether the next epoch continues with the current one.
        seen: Keras' count of batches taken from it.
        per_epoch: batches per epoch; None if unknown.
        attributes: packed attributes of a `PyDataset` before the current iterator's first batch.
        attributes_now: its current attributes, packed.
        randomness: random state before that first batch.
    """

    made: int = 0
    drawn: int = 0
    kept: bool = False
    seen: int = 0
    per_epoch: int | None = None
    attributes: dict[str, Any] = field(default_factory=dict)
    attributes_now: dict[str, Any] = field(default_factory=dict)
    randomness: dict[str, Any] = field(default_factory=dict)


class BatchListener(Protocol):
    """Is called between the batches of an epoch."""

    def before_first_batch(self) -> None:
        """Called after `on_epoch_begin`, before the first batch of an epoch or the first one after an interruption."""

    def between_steps(self, batch: int) -> None:
        """Called when `batch` batches of the epoch are done and another may follow."""


class Batches(TFEpochIterator):
    """Keras' iterator over the batches of an epoch. Without tracking or counting it behaves exactly like Keras' own."""

    _listener: BatchListener | None = None
    _attributes: ChangedAttributes | None = None
    _is_counted = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._at = DataPosition()
        self._arrays: list[Any] = []
        self._skip = 0
        self._to_resume: Callable[[], Any] | None = None
        self._replayed: list[Any] = []
        self._used: tuple[dict[str, Any], dict[str, Any]] | None = None
        self._iterator: Any = None
        if _receivers:
            _receivers[-1](self)

    @property
    def made(self) -> int:
        return self._at.made

    @property
    def batch_size(self) -> int | None:
        """None if neither the arguments of `fit` nor the data give it."""
        size: int | None = self.data_adapter.batch_size
        if size is None:
            specs = tf.nest.flatten(self._distributed_dataset.element_spec)
            shapes = [spec.shape for spec in specs if isinstance(spec, tf.TensorSpec)]
            size = next((shape[0] for shape in shapes if shape.rank), None)
        return size

    @property
    def is_python(self) -> bool:
        """Whether Python code makes the batches, possibly with Python's random numbers and ahead of the training."""
        return self._is_py_dataset or self.is_generator

    @property
    def is_generator(self) -> bool:
        return isinstance(self.data_adapter, GeneratorDataAdapter)

    @property
    def is_array(self) -> bool:
        return isinstance(self.data_adapter, ArrayDataAdapter)

    @property
    def is_seeded(self) -> bool:
        """Whether another process shuffles in the same order."""
        return randomness.is_tensorflow_seeded()

    @property
    def _runs_python(self) -> bool:
        """Whether Python code makes the batches, or is called by `tf.data`."""
        specs = tf.nest.flatten(self._distributed_dataset.element_spec)
        is_plain = all(isinstance(spec, tf.TensorSpec | tf.RaggedTensorSpec) for spec in specs)
        return self.is_python or (is_plain and randomness.has_data_functions())

    @property
    def _has_workers(self) -> bool:
        """Whether threads or processes make the batches of a `PyDataset`."""
        return self._is_py_dataset and self.data_adapter.enqueuer is not None

    @property
    def _is_py_dataset(self) -> bool:
        return isinstance(self.data_adapter, PyDatasetAdapter)

    def start_counting(self, made: int = 0) -> None:
        """Counts the iterators made from now on, as if `made` had been made already."""
        self._is_counted = True
        self._at.made = made
        self._skip_iterators(made)

    def _skip_iterators(self, count: int) -> None:
        """Only iterators over a user's dataset depend on how many were made before."""
        for number in range(0 if self.is_python or self.is_array else count):
            self._exhaust(iter(self._distributed_dataset), number, 0)

    def _exhaust(self, iterator: Any, number: int, taken: int) -> None:
        """Takes the batches that Keras would, if those of later iterators depend on them."""
        count = self.data_adapter.num_batches
        # At the end of an epoch of known length, Keras makes an iterator that it does not use.
        is_used = number % 2 == 0 or count is None or self.steps_per_epoch is not None
        if is_used and ((number == 0 and self._has_cache) or self._reshuffles):
            left = None if count is None else max(0, int(count) - taken)
            collections.deque(itertools.islice(iterator, left), maxlen=0)

    @functools.cached_property
    def _has_cache(self) -> bool:
        """Whether the first iterator caches its elements, in its order, for later ones."""
        return any(_is_kind(part, "Cache") for part in _parts(self._distributed_dataset))

    @functools.cached_property
    def _reshuffles(self) -> bool:
        """Whether another part of a finite dataset restarts a shuffle, or starts it later."""
        if self._distributed_dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
            return False
        parts = list(_parts(self._distributed_dataset))
        late = [part._inputs() for part in parts if _is_kind(part, "Repeat")]
        late += [part._inputs()[1:] for part in parts if _is_kind(part, "Concatenate")]
        return any(_is_kind(part, "Shuffle") for inputs in late for each in inputs for part in _parts(each))

    def track(self, listener: BatchListener) -> None:
        """Tracks the position from now on and calls `listener` between batches."""
        self._is_counted = True
        self._listener = listener
        if self._is_py_dataset:
            self._attributes = ChangedAttributes(self.data_adapter.py_dataset, is_data_set=True)

    def position(self, batch: int, arrays: list[Any]) -> DataPosition:
        """Returns the position between two steps or two epochs.

        Args:
            batch: finished batches of the running epoch; 0 between two epochs.
            arrays: output: arrays among a `PyDataset`'s attributes.
        """
        at = self._at
        at.kept = self._current_iterator is not None and self.steps_per_epoch is not None
        # Within an epoch Keras has already counted the batches of the next step.
        at.seen = self._steps_seen - (self.steps_per_execution if batch else 0)
        at.per_epoch = self._num_batches
        if self._attributes is not None:
            arrays.extend(self._arrays)
            at.attributes_now = self._attributes.save(arrays)
        return at

    def iterator_files(self, batch: int, *, even_seeded: bool = False) -> dict[str, bytes]:
        """Returns the iterator's state, if skipping the batches it has given would be wrong or slow.

        `even_seeded`: also within an epoch whose order depends on a seed.
        """
        by_state = even_seeded or not self.is_seeded
        if self.is_python or not (self._at.kept or (batch and by_state)):
            return {}
        files = _save_iterator(self._iterator, without_random_ops=False)
        if files is None and by_state:
            # Keras shuffles arrays with a random op, which has run for the whole epoch before its first batch.
            files = _save_iterator(self._iterator, without_random_ops=True) if self.is_array else None
        return files or {}

    def resume(
        self,
        position: DataPosition,
        arrays: list[Any],
        files: Mapping[str, bytes],
        batch: int,
        step: Callable[[Iterator[Any]], Any],
    ) -> None:
        """Restores a position that `position` and `iterator_files` returned.

        `step` calls the training function once, which creates the variables; the caller undoes its other effects.
        """
        self._at, self._arrays = position, arrays
        self._num_batches = position.per_epoch
        self._skip = batch
        continues = bool(batch) or position.kept
        if self.is_python:
            self._to_resume = self._remake if continues else None
            position.made -= continues
            step(self._first_batches())
            if self.is_generator and position.made and not position.kept:
                # Earlier epochs have exhausted it.
                collections.deque(iter(self._distributed_dataset), maxlen=0)
            if self._attributes is not None:
                self._attributes.restore(position.attributes_now, arrays)
            return
        skipped = position.made - continues
        self._skip_iterators(skipped - 1)
        current = iter(self._distributed_dataset)
        if files and (_has_shuffle(files) or not _has_shuffle(_save_iterator(current, without_random_ops=True))):
            step(current)
            _restore_iterator(current, files)
        elif skipped or not continues:
            # Before the next one is restored: the same Python code may make both.
            step(current)
            self._exhaust(current, skipped - 1, self.steps_per_execution)
            if continues:
                del current  # ends its prefetch thread
                current = self._replay(iter(self._distributed_dataset), position.drawn)
        elif self._runs_python:
            self._replay(current, position.drawn)
            step(self._iterator_over(self._replayed))
        else:
            # The step takes the rest, because no other iterator can give it a batch.
            self._replay(current, position.drawn - self.steps_per_execution)
            step(current)
        self._to_resume = (lambda: current) if continues else None
        position.made -= continues

    def _remake(self) -> Iterator[Any]:
        attributes, at = self._attributes, self._at
        if attributes is None:
            return self._replay(None, at.drawn)
        if self._has_workers:
            enqueuer = self.data_adapter.enqueuer
            enqueuer.stop()
            enqueuer.ready_queue.queue.clear()
        attributes.restore(at.attributes, self._arrays)
        before = attributes.digests()
        iterator = self._replay(None, at.drawn)
        # Attributes that change as batches are made are as before; others may have changed at an epoch's end.
        after = attributes.digests()
        unchanged = {name: value for name, value in at.attributes_now.items() if before.get(name) == after.get(name)}
        attributes.restore(unchanged, self._arrays)
        return iterator

    def _replay(self, iterator: Any, count: int) -> Any:
        """Takes the first `count` batches again; random states are then as before. Makes the iterator if it is None.

        Python code behind the data draws the same random numbers, and a generator that it makes is recognised as the
        earlier one.
        """
        now = randomness.state()
        randomness.restore(self._at.randomness)
        with randomness.watch_data_draws() as drawn_from:
            if self._has_workers:
                self.data_adapter.enqueuer.start()
            if iterator is None:
                iterator = iter(self._distributed_dataset)
            first = randomness.state()
            self._replayed = list(itertools.islice(iterator, min(count, 1)))
            settled = self._settled_randomness()
            self._replayed += itertools.islice(iterator, max(0, min(count, self.steps_per_execution) - 1))
            _draw(iterator, count - len(self._replayed))
            used = self._settled_randomness()
            throughout = drawn_from()
        # Only this code uses its own generators. It may draw from a global one before the first batch, to shuffle, and
        # other code may since: the data uses it throughout only if calls or batches after the first change it.
        before = {
            **(settled if count > 1 else used),
            **dict.fromkeys(throughout),
            "generators": first["generators"],
            "functions": first["functions"],
        }
        self._used = (before, used)
        randomness.restore(self.unused_randomness(now))
        return iterator

    def _settled_randomness(self) -> dict[str, Any]:
        """Returns the random state once code that prefetches batches is done or blocked."""
        state, equal, waited = randomness.state(), 0, 0
        deadline_s = time.monotonic() + _SETTLE_TIMEOUT_S
        while self._runs_python and equal < 2 and waited < 20 and time.monotonic() < deadline_s:
            time.sleep(0.01)
            last, state = state, randomness.state()
            # On a loaded machine a thread may be about to draw but wait for a CPU.
            is_busy = has_busy_threads()
            equal = equal + 1 if state == last and not is_busy else 0
            waited += not is_busy
        return state

    def first_batch(self) -> Any:
        """Returns a batch made by Python code, which may make it again later; random states stay unchanged."""
        now = randomness.state()
        try:
            return next(self._first_batches())
        finally:
            randomness.restore(now)

    def unused_randomness(self, random_state: dict[str, Any]) -> dict[str, Any]:
        """Returns the part of a random state that the data did not consume while its position was restored.

        Python code makes batches ahead of the training, so the saved state of its generators is not the right one.
        """
        return random_state if self._used is None else _unchanged_parts(random_state, *self._used)

    def _first_batches(self) -> Iterator[Any]:
        """Ignores the position, and starts no thread that prefetches."""
        adapter, count = self.data_adapter, self.steps_per_execution
        if self._is_py_dataset:
            length = adapter.num_batches or count
            batches = [adapter._standardize_batch(adapter.py_dataset[number % length]) for number in range(count)]
        else:
            batches = list(itertools.islice(itertools.cycle(adapter._first_batches), count))
        return self._iterator_over(batches)

    def _iterator_over(self, batches: list[Any]) -> Iterator[Any]:
        """Returns an iterator of the type that the training function takes."""
        signature = self._distributed_dataset.element_spec
        return iter(tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature))

    def _get_iterator(self) -> Any:
        return _Iterable(self._make) if self._is_counted else super()._get_iterator()

    def _make(self) -> Any:
        to_resume, self._to_resume = self._to_resume, None
        self._at.made += 1
        self._iterator = self._make_new() if to_resume is None else to_resume()
        return self._iterator

    def _make_new(self) -> Any:
        self._at.drawn = 0
        return iter(self._distributed_dataset)

    def _record_start(self, random_state: dict[str, Any]) -> None:
        self._at.randomness = random_state
        if self._attributes is not None:
            self._arrays = []
            self._at.attributes = self._attributes.save(self._arrays)

    def _enumerate_iterator(self) -> Iterator[tuple[int, int, Any]]:
        if self._listener is None:
            yield from super()._enumerate_iterator()
            return
        skip, self._skip = self._skip, 0
        # Keras counts from 0 for this iterator, but earlier epochs may have used it.
        seen = self._at.seen - skip if self._to_resume is not None else 0
        is_first = True
        # Worker threads start with the epoch.
        random_state = randomness.state() if self._has_workers else None
        for begin, end, iterator in super()._enumerate_iterator():
            if begin < skip:
                continue
            if is_first:
                self._steps_seen += seen
                self._listener.before_first_batch()
            else:
                self._listener.between_steps(begin)
            is_first = False
            if not self._at.drawn:
                self._record_start(random_state or randomness.state())
            self._at.drawn += self.steps_per_execution
            yield begin, end, iterator


class _Iterable:
    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __iter__(self) -> Any:
        return self._make()


def _unchanged_parts(state: dict[str, Any], before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Returns the parts of `state` that are equal before and after, by generator and by function of the data."""
    equal = {key: value for key, value in state.items() if before.get(key) == after.get(key)}
    for kind in _NESTED:
        equal[kind] = {
            key: value for key, value in state[kind].items() if before[kind].get(key) == after[kind].get(key)
        }
    return equal


def _draw(iterator: Iterator[Any], count: int) -> None:
    """Takes up to `count` batches: a step may have had fewer than its share."""
    collections.deque(itertools.islice(iterator, max(0, count)), maxlen=0)


def _parts(dataset: Any) -> Iterator[Any]:
    yield dataset
    for each in dataset._inputs():
        yield from _parts(each)


def _is_kind(dataset: Any, kind: str) -> bool:
    return type(dataset).__name__.strip("_") == f"{kind}Dataset"


def _save_iterator(iterator: Any, *, without_random_ops: bool) -> dict[str, bytes] | None:
    """Saves a `tf.data` iterator, including shuffle buffers, as files; None if a part of it cannot be saved.

    `without_random_ops` omits the state of random ops that the dataset calls.
    """
    policy = ExternalStatePolicy.IGNORE if without_random_ops else ExternalStatePolicy.FAIL
    try:
        state = gen_dataset_ops.serialize_iterator(iterator._iterator_resource, external_state_policy=policy.value)
    except (tf.errors.FailedPreconditionError, tf.errors.UnimplementedError):
        return None
    with tempfile.TemporaryDirectory(prefix="dike-iterator-") as folder:
        tf.raw_ops.SaveV2(
            prefix=f"{folder}/{_ITERATOR}", tensor_names=[_ITERATOR], shape_and_slices=[""], tensors=[state]
        )
        return {name: _read(f"{folder}/{name}") for name in os.listdir(folder)}


def _restore_iterator(iterator: Any, files: Mapping[str, bytes]) -> None:
    with tempfile.TemporaryDirectory(prefix="dike-iterator-") as folder:
        for name, content in files.items():
            with open(f"{folder}/{name}", "wb") as file:
                file.write(content)
        (state,) = tf.raw_ops.RestoreV2(
            prefix=f"{folder}/{_ITERATOR}", tensor_names=[_ITERATOR], shape_and_slices=[""], dtypes=[tf.variant]
        )
    gen_dataset_ops.deserialize_iterator(iterator._iterator_resource, state)


def _has_shuffle(files: Mapping[str, bytes] | None) -> bool:
    """Returns whether a state contains the position of a shuffle.

    It does not once the shuffle is exhausted, so the number of past orders is not known from it.
    """
    return any(b"num_random_samples" in content for content in (files or {}).values())


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


_receivers: list[Callable[[Batches], None]] = []


@contextlib.contextmanager
def intercept_iterators(receiver: Callable[[Batches], None]) -> Iterator[None]:
    """While active, passes every iterator that Keras makes to `receiver`, and to no other receiver."""
    _receivers.append(receiver)
    try:
        yield
    finally:
        _receivers.remove(receiver)
