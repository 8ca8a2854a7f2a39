"""The batches of a `fit`, read on the chief by Keras' own adapters: arrays, datasets, `PyDataset`s, generators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from keras import tree
from keras.src.backend.tensorflow.trainer import TFEpochIterator


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


class Batches:
    """Iterates over the training data, epoch after epoch.

    Args:
        arguments: arguments of `TFEpochIterator`, such as x, y and batch_size.
    """

    def __init__(self, **arguments: Any) -> None:
        self._iterator = TFEpochIterator(distribute_strategy=tf.distribute.get_strategy(), **arguments)
        spec = self._iterator._distributed_dataset.element_spec
        # A dataset may have gaps (`None`) in its elements; they are not sent.
        self._spec = tree.map_structure(lambda part: None if _is_gap(part) else part, spec)
        self.signature = [part for part in tree.flatten(self._spec) if part is not None]

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

    def reset(self) -> None:
        """Begins anew, as Keras does after looking at a first batch."""
        self._iterator.reset()

    def first(self) -> Any:
        """A batch to build the model with."""
        for _, _, iterator in self._iterator:
            batch = tree.map_structure(lambda part: None if _is_gap(part) else part, next(iterator))
            self.reset()
            return batch
        raise ValueError("The training data is empty; give `fit` at least one batch.")

    def epoch(self, skip: int = 0) -> Iterator[Batch]:
        """The batches of the next epoch.

        Args:
            skip: leave out this many at the beginning: they were trained before a restart.
        """
        with self._iterator.catch_stop_iteration():
            for begin, _, iterator in self._iterator:
                data = next(iterator)
                if begin < skip:
                    continue
                tensors = tuple(part for part in tree.flatten(data) if not _is_gap(part))
                shape = tensors[0].shape
                yield Batch(begin, tensors, int(shape[0]) if shape.rank else 1)


def _is_gap(part: Any) -> bool:
    return part is None or isinstance(part, tf.experimental.Optional | tf.OptionalSpec)
