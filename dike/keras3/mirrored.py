"""Keras' `fit` on several GPUs of one machine: each of them takes an equal part of every batch.

It is TensorFlow's `MirroredStrategy` (every GPU has the variables, gradients are added up) around data that stay the
script's own. TensorFlow would hand out a data set by itself: batches that Python code makes would go to one GPU each,
and an iterator would no longer be something that a checkpoint can hold.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras.src.backend.tensorflow import core, optimizer, trainer
from tensorflow.python.distribute.values import PerReplica

from dike.exceptions import BadInputError
from dike.keras3.model import why_not_mirrored


class Mirrored(tf.distribute.MirroredStrategy):
    """Splits what a step is given, in place of the data set that it comes from.

    Args:
        devices: names of the devices, two at least.
    """

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """The data set itself."""
        return dataset

    def run(self, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        """As `MirroredStrategy.run`, with tensors of samples in `args`."""
        return super().run(fn, tf.nest.map_structure(self._parts, args), kwargs, options)

    def _parts(self, batch: Any) -> Any:
        if not isinstance(batch, tf.Tensor):
            return batch  # None, where there are no labels or weights
        count = self.num_replicas_in_sync
        size = batch.shape[0] or tf.shape(batch)[0]
        return PerReplica([batch[size * part // count : size * (part + 1) // count] for part in range(count)])


def install(gpus: int) -> None:
    """Has models, optimizers and variables that are made from now on live on so many GPUs.

    Nothing is asked of TensorFlow before the script makes the first of them: scripts set their GPUs up before that.

    Args:
        gpus: those that the task has.
    """
    strategy = functools.cache(lambda: _strategy(gpus))

    def scoped(own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def make(*args: Any, **kwargs: Any) -> Any:
            if tf.distribute.has_strategy() or (mirrored := strategy()) is None:
                return own(*args, **kwargs)
            with mirrored.scope():
                return own(*args, **kwargs)

        return make

    for owner, method in (
        (core.Variable, "_initialize"),
        (optimizer.TFOptimizer, "__init__"),
        (optimizer.TFOptimizer, "add_variable_from_reference"),
        (trainer.TensorFlowTrainer, "__init__"),
    ):
        setattr(owner, method, scoped(getattr(owner, method)))
    trainer.TensorFlowTrainer._maybe_symbolic_build = _build


def shares(model: Any) -> bool:
    """Whether GPUs share the batches of the model's `fit`.

    Raises:
        BadInputError: if they are to, and cannot.
    """
    if not isinstance(model._distribute_strategy, Mirrored):
        return False
    if why := why_not_mirrored(model):
        raise BadInputError(f"Several GPUs cannot share this fit: {why}. Run the job with --gpus-per-task 1.")
    return True


def _strategy(gpus: int) -> Mirrored | None:
    devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    if len(devices) < gpus:
        print(
            f"dike: this task has {gpus} GPUs, and TensorFlow sees {len(devices)} {devices[0].device_type}.",
            file=sys.stderr,
            flush=True,
        )
    return Mirrored([device.name for device in devices[:gpus]]) if len(devices) > 1 else None


def _build(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
    """Makes what a model still lacks, as Keras does under a strategy, without taking a batch for it."""
    if self._distribute_strategy is None:
        return
    if iterator is not None:
        data_batch = iterator._distributed_dataset.element_spec
    with self._distribute_strategy.scope():
        self._symbolic_build(data_batch=data_batch)
