"""Keras' `fit` on several GPUs of one machine: each GPU computes an equal part of every batch.

Uses TensorFlow's `MirroredStrategy` (every GPU has all variables, gradients are summed), but leaves the dataset to the
script. TensorFlow would distribute it: each batch made by Python code would go to a single GPU, and a checkpoint could
not hold the iterator's state.
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

_OVERRIDABLE = ("train_step", "compute_loss", "compute_metrics")
_KERAS = {name: getattr(keras.Model, name) for name in _OVERRIDABLE}
_PER_GPU = (
    "gradient_accumulation_steps",
    "clipnorm",
    "global_clipnorm",
    "clipvalue",
    "ema_overwrite_frequency",
    "inner_optimizer",
)
"""Options of an optimizer that act on each GPU's gradients before they are summed, or do not work there."""


class Mirrored(tf.distribute.MirroredStrategy):
    """Splits the arguments of a step, instead of the dataset they come from."""

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        return dataset

    def run(self, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        trains = getattr(fn, "__func__", fn) is trainer.TensorFlowTrainer.train_step
        parts = functools.partial(self._parts, is_none_empty=trains)
        return super().run(fn, tf.nest.map_structure(parts, args), kwargs, options)

    def _parts(self, batch: Any, *, is_none_empty: bool) -> Any:
        """Splits a batch of samples.

        With `is_none_empty`, samples may be in two parts if there are fewer than parts: an empty part would make the
        averages over the batch, which layers store, NaN.
        """
        if batch is None:
            return None
        if not isinstance(batch, tf.Tensor):
            _refuse("its data are ragged or sparse")
        count = self.num_replicas_in_sync
        size = batch.shape[0] or tf.shape(batch)[0]
        bounds = [(size * part // count, size * (part + 1) // count) for part in range(count)]
        if is_none_empty:
            least, most = (min, max) if isinstance(size, int) else (tf.minimum, tf.maximum)
            bounds = [(least(start, size - 1), most(end, least(start, size - 1) + 1)) for start, end in bounds]
        return PerReplica([batch[start:end] for start, end in bounds])


def install(gpus: int) -> None:
    """Makes models, optimizers and variables that are created from now on use several GPUs.

    Does not initialize TensorFlow's devices before the script creates the first of them: scripts configure GPUs before
    that.
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
    own_build, own_make = trainer.TensorFlowTrainer._maybe_symbolic_build, trainer.TensorFlowTrainer.make_train_function

    @functools.wraps(own_build)
    def build(model: Any, iterator: Any = None, data_batch: Any = None) -> None:
        if iterator is None or not is_mirrored(model):
            own_build(model, iterator=iterator, data_batch=data_batch)
        else:
            _check(model)
            # Keras would take a batch for this.
            own_build(model, data_batch=iterator._distributed_dataset.element_spec)

    @functools.wraps(own_make)
    def make_train_function(model: Any, *args: Any, **kwargs: Any) -> Any:
        if is_mirrored(model):
            _check(model)  # the model has its layers only now
            # Keras turns it off under a strategy, but not for a model that was saved with it on.
            model.jit_compile = False
        return own_make(model, *args, **kwargs)

    trainer.TensorFlowTrainer._maybe_symbolic_build = build
    trainer.TensorFlowTrainer.make_train_function = make_train_function
    watch_losses(_refuse_loss)
    # Scripts print `float(optimizer.learning_rate)`, which works with other variables.
    DistributedVariable.__float__ = lambda variable: float(variable.numpy())
    DistributedVariable.__int__ = lambda variable: int(variable.numpy())


def unsupported_reason(model: Any) -> str:
    """Returns why several GPUs cannot share the batches of a compiled model's `fit`, as a clause; empty if they can."""
    for name in _OVERRIDABLE:
        if getattr(getattr(model, name), "__func__", None) is not _KERAS[name]:
            return f"the model has a {name} of its own"
    found = [("run_eagerly", model.run_eagerly), ("steps_per_execution", model.steps_per_execution > 1)]
    for one in optimizers_of(model):
        found += [(name, getattr(one, name, None)) for name in _PER_GPU]
    for name, is_so in found:
        if is_so:
            return f"the model is compiled with {name}"
    compiled = getattr(model._compile_loss, "_user_loss", None)
    if any(type(one).__call__ is not losses.Loss.__call__ for one in _flat(compiled) if isinstance(one, losses.Loss)):
        return "a loss has a __call__ of its own"
    for layer in model._flatten_layers():
        if getattr(layer, "stateful", False):
            return f"the layer '{layer.name}' is stateful"
        if layer._non_trainable_variables and not type(layer).__module__.startswith("keras."):
            return f"the layer '{layer.name}' has variables that are not trained"
        own = [name for name, value in vars(layer).items() if isinstance(value, tf.Variable)]
        if own:
            return f"'{own[0]}' of '{layer.name}' is a variable that Keras does not know"
    return ""


def _flat(structure: Any) -> list[Any]:
    flat: list[Any] = tf.nest.flatten(structure)
    return flat


def watch_losses(report: Callable[[str], object]) -> Callable[[], None]:
    """Calls `report` with a clause whenever the loss of a batch is not the mean of the losses of its parts.

    Returns:
        Ends the watch.
    """
    own, own_add_loss = losses.reduce_weighted_values, keras.layers.Layer.add_loss

    @functools.wraps(own_add_loss)
    def add_loss(layer: Any, loss: Any) -> None:
        # The loss of an activity regularizer is divided by the number of samples.
        if layer.activity_regularizer is None:
            report(f"the layer '{layer.name}' adds a loss")
        own_add_loss(layer, loss)

    @functools.wraps(own)
    def reduce(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: Any = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        shape = getattr(values, "shape", ())
        if (shape.rank if isinstance(shape, tf.TensorShape) else len(shape)) == 0:
            report("a loss is one number for the whole batch")
        elif mask is not None and reduction != "sum":
            report("a loss ignores masked values")
        elif sample_weight is not None and reduction == "mean_with_sample_weight":
            report("a loss is divided by the samples' weights")
        return own(values, sample_weight, mask, reduction, dtype)

    def end() -> None:
        losses.reduce_weighted_values, keras.layers.Layer.add_loss = own, own_add_loss

    losses.reduce_weighted_values, keras.layers.Layer.add_loss = reduce, add_loss
    return end


def is_mirrored(model: Any) -> bool:
    return isinstance(model._distribute_strategy, Mirrored)


def _check(model: Any) -> None:
    if why := unsupported_reason(model):
        _refuse(why)


def _refuse(why: str) -> NoReturn:
    raise BadInputError(f"Several GPUs cannot share a batch: {why}. Run the job with --gpus-per-task 1.")


def _refuse_loss(why: str) -> None:
    context = tf.distribute.get_replica_context()  # None while a model is being built
    if context is not None and isinstance(context.strategy, Mirrored):
        _refuse(why)


def _strategy(gpus: int) -> Mirrored | None:
    devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    kind = devices[0].device_type
    if len(devices) < gpus:
        message = f"this task has {gpus} GPUs, and TensorFlow sees {len(devices)} {kind}"
    else:
        message = f"{gpus} {kind}s share each batch of fit"
    print(f"dike: {message}.", file=sys.stderr, flush=True)
    return Mirrored([device.name for device in devices[:gpus]]) if len(devices) > 1 else None
