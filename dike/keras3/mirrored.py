"""Keras' `fit` on several GPUs of one machine: each of them takes an equal part of every batch.

It is TensorFlow's `MirroredStrategy` (every GPU has the variables, gradients are added up) around data that stay the
script's own. TensorFlow would hand out a data set by itself: batches that Python code makes would go to one GPU each,
and an iterator would no longer be something that a checkpoint can hold.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import core, optimizer, trainer
from keras.src.losses import loss as losses
from tensorflow.python.distribute.values import DistributedVariable, PerReplica

from dike.exceptions import BadInputError
from dike.keras3.model import optimizers_of

_OWN = ("train_step", "compute_loss", "compute_metrics", "make_train_function")
_PER_GPU = (
    "gradient_accumulation_steps",
    "clipnorm",
    "global_clipnorm",
    "clipvalue",
    "ema_overwrite_frequency",
)
"""What an optimizer does on each GPU, to gradients that are not added up yet, or cannot do there."""


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
        if batch is None:
            return None
        if not isinstance(batch, tf.Tensor):
            _refuse("its data are ragged or sparse")
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
    watch_losses(_refuse_loss)
    # Scripts print `float(optimizer.learning_rate)`, which other variables can do.
    DistributedVariable.__float__ = lambda variable: float(variable.numpy())
    DistributedVariable.__int__ = lambda variable: int(variable.numpy())


def why_not(model: Any) -> str:
    """Why several GPUs cannot share the batches of a compiled model's `fit`, as a clause; empty where they can."""
    for name in _OWN:
        if getattr(type(model), name) is not getattr(keras.Model, name):
            return f"the model has a {name} of its own"
    found = [
        ("run_eagerly", model.run_eagerly),
        # Where it is left to Keras, that is no harm: under a strategy it is off.
        ("jit_compile", model.jit_compile and not model._resolve_auto_jit_compile()),
        ("steps_per_execution", model.steps_per_execution > 1),
    ]
    for one in optimizers_of(model):
        for each in (one, getattr(one, "inner_optimizer", one)):
            found += [(name, getattr(each, name, None)) for name in _PER_GPU]
    for name, is_so in found:
        if is_so:
            return f"the model is compiled with {name}"
    for layer in model._flatten_layers():
        if getattr(layer, "stateful", False):
            return f"the layer '{layer.name}' is stateful"
        own = [name for name, value in vars(layer).items() if isinstance(value, tf.Variable)]
        if own:
            return f"'{own[0]}' of '{layer.name}' is a variable that Keras does not know"
    return ""


def watch_losses(tell: Callable[[str], object]) -> Callable[[], None]:
    """Has `tell` called with a clause where a batch's loss is not the mean of its parts' losses.

    Returns:
        What ends that.
    """
    own = losses.reduce_weighted_values

    @functools.wraps(own)
    def reduce(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: Any = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        shape = values.shape
        if (shape.rank if isinstance(shape, tf.TensorShape) else len(shape)) == 0:
            tell("a loss is one number for the whole batch")
        elif mask is not None:
            tell("a loss leaves out what is masked")
        elif reduction == "mean_with_sample_weight":
            tell("a loss is divided by the samples' weights")
        return own(values, sample_weight, mask, reduction, dtype)

    def end() -> None:
        losses.reduce_weighted_values = own

    losses.reduce_weighted_values = reduce
    return end


def shares(model: Any) -> bool:
    """Whether GPUs share the batches of the model's `fit`.

    Raises:
        BadInputError: if they are to, and cannot.
    """
    if not isinstance(model._distribute_strategy, Mirrored):
        return False
    if why := why_not(model):
        _refuse(why)
    return True


def _refuse(why: str) -> NoReturn:
    raise BadInputError(f"Several GPUs cannot share a batch: {why}. Run the job with --gpus-per-task 1.")


def _refuse_loss(why: str) -> None:
    if isinstance(tf.distribute.get_strategy(), Mirrored):
        _refuse(why)


def _strategy(gpus: int) -> Mirrored | None:
    devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    kind = devices[0].device_type
    if len(devices) < gpus:
        said = f"this task has {gpus} GPUs, and TensorFlow sees {len(devices)} {kind}"
    else:
        said = f"{gpus} {kind}s share each batch of fit"
    print(f"dike: {said}.", file=sys.stderr, flush=True)
    return Mirrored([device.name for device in devices[:gpus]]) if len(devices) > 1 else None


def _build(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
    """Makes what a model still lacks, as Keras does under a strategy, without taking a batch for it."""
    if self._distribute_strategy is None:
        return
    if iterator is not None:
        data_batch = iterator._distributed_dataset.element_spec
    with self._distribute_strategy.scope():
        self._symbolic_build(data_batch=data_batch)
