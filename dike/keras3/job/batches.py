"""The batches of a `fit`, read on the chief by Keras' own adapters: arrays, datasets, `PyDataset`s, generators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from keras import tree

from dike.keras3.data import Batches as KerasBatches
from dike.keras3.data import DataPosition, BatchListener
from dike.roles.cluster import log


@dataclass(frozen=True)
class Batch:
    """One step's data.

    Attributes:
        index: number of the batch in its epoch, from 0.
        tensors: its tensors, in the order of the batch's structure.
        samples: how many samples it has.
    """

    index: int
    tensors: tuple[Any, ...]
    samples: int


@dataclass(frozen=True)
class DataState:
    """Where a `fit` is in its data.

    Attributes:
        position: `DataPosition`, as JSON values.
        arrays: those that the position refers to.
        files: state of the iterator over the data, with the order of the epoch in it; none where that is not needed.
    """

    position: dict[str, Any]
    arrays: list[Any]
    files: dict[str, bytes]


class Batches:
    """Iterates over the training data, epoch after epoch.

    Args:
        arguments: arguments of `TFEpochIterator`, such as x, y and batch_size.
    """

    def __init__(self, **arguments: Any) -> None:
        self._iterator = KerasBatches(distribute_strategy=tf.distribute.get_strategy(), **arguments)
        spec = self._iterator._distributed_dataset.element_spec
        # A dataset may have gaps (`None`) in its elements; they are not sent.
        self._spec = tree.map_structure(lambda part: None if _is_gap(part) else part, spec)
        self._listener: BatchListener | None = None
        self.signature = [part for part in tree.flatten(self._spec) if part is not None]
        self._iterator.reset()  # as Keras does once the model is built: a `PyDataset` is told

    @property
    def per_epoch(self) -> int | None:
        """Batches in an epoch; None where that is not known before the first has ended."""
        count = self._iterator.num_batches
        return None if count is None else int(count)

    def pack(self, tensors: Sequence[Any]) -> Any:
        """The structure that `train_step` takes, from the tensors of a batch."""
        waiting = iter(tensors)
        flat = [None if part is None else next(waiting) for part in tree.flatten(self._spec)]
        return tree.pack_sequence_as(self._spec, flat)

    def first(self) -> Any:
        """A batch to build the model with, or what is known of its shapes where that will do."""
        # Keras itself does not look: what shuffles has another order each time it is read, and may draw the random
        # numbers that the next model begins with.
        if not self._iterator.is_array and all(_has_shape(part) for part in self.signature):
            return self._spec
        if self._iterator.is_python:
            return _without_gaps(self._iterator.first_batch())
        for _, _, iterator in self._iterator:
            batch = _without_gaps(next(iterator))
            self._iterator.reset()  # begins anew, as Keras does after looking at a first batch
            return batch
        raise ValueError("The training data is empty; give `fit` at least one batch.")

    def track(self) -> None:
        """Keeps the position from now on. To be called before the first epoch."""
        self._iterator.track(self)

    def before_first_batch(self) -> None:
        """See `BatchListener`."""
        assert self._listener is not None
        self._listener.before_first_batch()

    def between_steps(self, batch: int) -> None:
        """See `BatchListener`."""
        assert self._listener is not None
        self._listener.between_steps(batch)

    def state(self, batch: int) -> DataState:
        """Where it is, between two steps or two epochs.

        Args:
            batch: batches of the running epoch that have been read; 0 between two epochs.
        """
        arrays: list[Any] = []
        position = dict(vars(self._iterator.position(batch, arrays)))  # no deep copies of thousands of random numbers
        # An array's order is small; a dataset's may bring a shuffle buffer, and is better read once more.
        return DataState(position, arrays, self._iterator.iterator_files(batch, even_seeded=self._iterator.is_array))

    def resume(self, state: DataState, batch: int) -> None:
        """Goes back to a position, so that the epoch goes on with the batches that are left of it, in its order.

        Args:
            state: what `state` returned.
            batch: batches of the running epoch that are done; 0 between two epochs.
        """
        position = DataPosition(**state.position)
        data = self._iterator
        if not (batch or position.kept or data.is_python):
            data.start_counting(position.made)  # the next epoch has an order of its own
            return
        if position.drawn and not state.files and (data.is_generator or not (data.is_python or data.is_seeded)):
            kind = "a Python generator" if data.is_generator else "a dataset whose order cannot be saved"
            log(f"the data come from {kind}: it begins anew, and its first {position.drawn} batches are passed over.")
        data.resume(position, state.arrays, state.files, batch, next)

    def unused_randomness(self, randomness: Mapping[str, Any]) -> dict[str, Any]:
        """The part of a random state that the data, brought to where it was, has not used."""
        return self._iterator.unused_randomness(dict(randomness))

    def epoch(self, listener: BatchListener) -> Iterator[Batch]:
        """The batches of the next epoch, or those left of the one that was interrupted.

        Args:
            listener: is told of every batch, before it is read.
        """
        self._listener = listener
        with self._iterator.catch_stop_iteration():
            for begin, _, iterator in self._iterator:
                tensors = tuple(part for part in tree.flatten(next(iterator)) if not _is_gap(part))
                shape = tensors[0].shape
                yield Batch(begin, tensors, int(shape[0]) if shape.rank else 1)


def _has_shape(part: Any) -> bool:
    """Whether all but the number of samples is known of a part of a batch."""
    return isinstance(part, tf.TensorSpec) and part.shape.rank is not None and None not in part.shape.as_list()[1:]


def _without_gaps(batch: Any) -> Any:
    return tree.map_structure(lambda part: None if _is_gap(part) else part, batch)


def _is_gap(part: Any) -> bool:
    return part is None or isinstance(part, tf.experimental.Optional | tf.OptionalSpec)
