"""Reads the batches of a `fit` on the chief with Keras' own adapters: arrays, datasets, `PyDataset`s, generators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from keras import tree

from dike.keras3.data import Batches as KerasBatches
from dike.keras3.data import BatchListener, DataPosition
from dike.roles.cluster import log


@dataclass(frozen=True)
class Batch:
    index: int
    tensors: tuple[Any, ...]
    samples: int


@dataclass(frozen=True)
class DataState:
    """Position of a `fit` in its data.

    Attributes:
        position: `DataPosition`, as JSON values.
        arrays: arrays that the position refers to.
        files: state of the data iterator, including the epoch's order; empty if not needed.
    """

    position: dict[str, Any]
    arrays: list[Any]
    files: dict[str, bytes]


class JobBatches:
    """Iterates over the training data, epoch after epoch. Takes the arguments of `TFEpochIterator`."""

    def __init__(self, **arguments: Any) -> None:
        self._iterator = KerasBatches(distribute_strategy=tf.distribute.get_strategy(), **arguments)
        spec = self._iterator._distributed_dataset.element_spec
        # Elements of a dataset may contain `None`, which is not sent.
        self._spec = tree.map_structure(lambda part: None if _is_gap(part) else part, spec)
        self._listener: BatchListener | None = None
        self.signature = [part for part in tree.flatten(self._spec) if part is not None]
        self._iterator.reset()  # as Keras does once the model is built: notifies a `PyDataset`

    @property
    def per_epoch(self) -> int | None:
        """None if unknown before the first epoch has ended."""
        count = self._iterator.num_batches
        return None if count is None else int(count)

    def pack(self, tensors: Sequence[Any]) -> Any:
        """Packs the tensors of a batch into the structure that `train_step` takes."""
        waiting = iter(tensors)
        flat = [None if part is None else next(waiting) for part in tree.flatten(self._spec)]
        return tree.pack_sequence_as(self._spec, flat)

    def first(self) -> Any:
        """Returns a batch to build the model with, or its spec if all shapes are known."""
        # Reading a batch would change the order of shuffled data, and may consume random numbers that the next model is
        # initialized with.
        if not self._iterator.is_array and all(_has_shape(part) for part in self.signature):
            return self._spec
        if self._iterator.is_python:
            return _without_gaps(self._iterator.first_batch())
        for _, _, iterator in self._iterator:
            batch = _without_gaps(next(iterator))
            self._iterator.reset()  # restarts, as Keras does after reading a first batch
            return batch
        raise ValueError("The training data is empty; give `fit` at least one batch.")

    def track(self) -> None:
        self._iterator.track(self)

    def before_first_batch(self) -> None:
        assert self._listener is not None
        self._listener.before_first_batch()

    def between_steps(self, batch: int) -> None:
        assert self._listener is not None
        self._listener.between_steps(batch)

    def state(self, batch: int) -> DataState:
        """Returns the position after `batch` batches of an epoch were read; 0 between two epochs."""
        arrays: list[Any] = []
        position = dict(vars(self._iterator.position(batch, arrays)))  # `asdict` would copy thousands of numbers
        # The order of an array is small; that of a dataset may include a shuffle buffer, so rereading is better.
        return DataState(position, arrays, self._iterator.iterator_files(batch, even_seeded=self._iterator.is_array))

    def resume(self, state: DataState, batch: int) -> None:
        """Restores a position, so that the epoch continues with its remaining batches in the same order."""
        position = DataPosition(**state.position)
        data = self._iterator
        if not (batch or position.kept or data.is_python):
            data.start_counting(position.made)  # the next epoch has its own order
            return
        if position.drawn and not state.files and (data.is_generator or not (data.is_python or data.is_seeded)):
            kind = "a Python generator" if data.is_generator else "a dataset whose order cannot be saved"
            log(f"the data come from {kind}: it restarts, and its first {position.drawn} batches are skipped.")
        data.resume(position, state.arrays, state.files, batch, next)

    def unused_randomness(self, randomness: Mapping[str, Any]) -> dict[str, Any]:
        """See `dike.keras3.data.Batches.unused_randomness`."""
        return self._iterator.unused_randomness(dict(randomness))

    def epoch(self, listener: BatchListener) -> Iterator[Batch]:
        """Yields the batches of the next epoch, or the remaining ones of an interrupted epoch."""
        self._listener = listener
        with self._iterator.catch_stop_iteration():
            for begin, _, iterator in self._iterator:
                tensors = tuple(part for part in tree.flatten(next(iterator)) if not _is_gap(part))
                shape = tensors[0].shape
                yield Batch(begin, tensors, int(shape[0]) if shape.rank else 1)


def _has_shape(part: Any) -> bool:
    return isinstance(part, tf.TensorSpec) and part.shape.rank is not None and None not in part.shape.as_list()[1:]


def _without_gaps(batch: Any) -> Any:
    return tree.map_structure(lambda part: None if _is_gap(part) else part, batch)


def _is_gap(part: Any) -> bool:
    return part is None or isinstance(part, tf.experimental.Optional | tf.OptionalSpec)
