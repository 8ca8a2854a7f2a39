"""A Keras 3 model's variables by name, their values, and checks for distributed jobs.

Imports Keras only inside functions that are given a model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dike.checkpoints import shown
from dike.exceptions import BadInputError


def named_variables(model: Any) -> list[tuple[str, Any]]:
    """Returns each variable of a Keras or tf_keras model with a unique name, in the order of `model.variables`.

    The name is Keras' path (`conv2d/kernel`), in tf_keras the name without `:0`. The second and later variables of the
    same name get the suffixes `#1`, `#2`, ...
    """
    return unique_names(model.variables)


def unique_names(variables: Iterable[Any]) -> list[tuple[str, Any]]:
    """Like `named_variables`, for any variables in a stable order."""
    seen: Counter[str] = Counter()
    named = []
    for variable in variables:
        path = getattr(variable, "path", None) or variable.name.partition(":")[0]
        named.append((f"{path}#{seen[path]}" if seen[path] else path, variable))
        seen[path] += 1
    return named


def metric_variables(model: Any) -> list[Any]:
    """Returns the variables of all metrics of a Keras 3 model, including those that `model.metrics` omits."""
    metrics = [*model.metrics, *(metric for layer in model._flatten_layers() for metric in layer._metrics)]
    return list({id(variable): variable for metric in metrics for variable in metric.variables}.values())


def without_function(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a model's step without its `tf.function`, in which updates of metrics could not be traced."""
    from tensorflow.python.eager.polymorphic_function import autograph_util

    own = getattr(step, "python_function", None)
    unwrapped: Callable[[Any], Any] = step if own is None else autograph_util.py_func_from_autograph(own)
    return unwrapped


def optimizers_of(model: Any) -> list[Any]:
    """Returns the compiled optimizer, and those that the model's own `train_step` uses."""
    import keras

    optimizers = [] if model.optimizer is None else [model.optimizer]
    for value in vars(model).values():
        if isinstance(value, keras.optimizers.Optimizer) and all(value is not known for known in optimizers):
            optimizers.append(value)
    return optimizers


def check_distributable(model: Any) -> None:
    """Checks that a compiled model can be trained on a cluster. Called before a launch, and again by the chief.

    Raises:
        BadInputError: naming what is not supported.
    """
    if model._distribute_strategy is not None:
        raise BadInputError(
            "The model was made under the script's own tf.distribute strategy; make it outside of its scope()."
        )
    if model.run_eagerly:
        raise BadInputError("compile(run_eagerly=True) is not supported in a distributed job; remove it.")
    optimizers = optimizers_of(model)
    if not optimizers:
        raise BadInputError("Model.fit needs an optimizer in a distributed job; give one to compile().")
    for optimizer in optimizers:
        if optimizer.gradient_accumulation_steps:
            raise BadInputError(
                "gradient_accumulation_steps is not supported in a distributed job: its workers share one "
                "accumulator; remove it and raise batch_size."
            )
        if optimizer.use_ema and optimizer.ema_overwrite_frequency:
            raise BadInputError(
                "ema_overwrite_frequency is not supported in a distributed job: a worker cannot replace weights "
                "that others train; remove it, and the averages replace them at the end."
            )


def why_not_split(model: Any, batch: Any) -> str:
    """Returns why several workers cannot share the batches of a compiled model, as a clause; empty if they may.

    What only a step shows is checked at the first one (`dike.keras3.synchronous`).
    """
    import tensorflow as tf

    tensors = [part for part in tf.nest.flatten(batch) if part is not None]
    if not all(isinstance(part, tf.Tensor) and part.shape.rank for part in tensors):
        return "its data are not plain tensors of samples"
    if len({part.shape[0] for part in tensors}) > 1:
        return "a batch's tensors differ in length"
    for layer in model._flatten_layers():
        if getattr(layer, "stateful", False):
            return f"the layer '{layer.name}' is stateful"
    return ""


def synced_layers_of(model: Any) -> int:
    """Number of layers that need statistics of the whole batch."""
    import keras

    return sum(isinstance(layer, keras.layers.BatchNormalization) for layer in model._flatten_layers())


def named_values(model: Any) -> dict[str, Any]:
    """Returns name -> variable for everything that `values_of` reads, in the same order in all processes of a model.

    Includes the TensorFlow variables among the model's own attributes.
    """
    import tensorflow as tf
    from keras.src.backend.common import global_state
    from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR

    groups = [model.variables, *(optimizer.variables for optimizer in optimizers_of(model)), model.metrics_variables]
    own = [value for value in vars(model).values() if isinstance(value, tf.Variable)]
    groups.append([value for value in own if value.dtype.is_numpy_compatible and value.dtype != tf.string])
    unique = {id(variable): variable for group in groups for variable in group}
    named = dict(unique_names(unique.values()))
    seeds = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    return named if seeds is None else {**named, GLOBAL_SEED_GENERATOR: seeds.state}


def values_of(model: Any) -> dict[str, Any]:
    import numpy as np

    return {name: np.asarray(variable) for name, variable in named_values(model).items()}


def learning_rates_of(model: Any) -> dict[str, Any]:
    """Returns name -> value, as `values_of`, of the learning rates that are variables: those that no schedule sets."""
    import numpy as np

    optimizers = [getattr(optimizer, "inner_optimizer", optimizer) for optimizer in optimizers_of(model)]
    rates = {id(getattr(optimizer, "_learning_rate", None)) for optimizer in optimizers}
    return {name: np.asarray(variable) for name, variable in named_values(model).items() if id(variable) in rates}


def restore_values(model: Any, values: Mapping[str, Any], path: str) -> None:
    """Assigns the output of `values_of` to a built and compiled model; `path` is the checkpoint's, for messages.

    Raises:
        BadInputError: if the values belong to another model.
    """
    from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR, global_seed_generator

    if GLOBAL_SEED_GENERATOR in values:
        global_seed_generator()  # created on first use, which may not have happened yet
    variables = named_values(model)
    variables = {name: value for name, value in variables.items() if name in values or name != GLOBAL_SEED_GENERATOR}
    shapes = {name: tuple(variable.shape) for name, variable in variables.items()}
    saved = {name: tuple(value.shape) for name, value in values.items()}
    if shapes != saved:
        name = next(name for name in {**shapes, **saved} if shapes.get(name) != saved.get(name))
        raise BadInputError(
            f"Checkpoint '{shown(path)}' does not fit the model: variable '{name}' has {_shape(saved.get(name))} there "
            f"and {_shape(shapes.get(name))} here; undo the change to the script, or begin a search of another name."
        )
    for name, variable in variables.items():
        variable.assign(values[name])


def _shape(shape: tuple[int, ...] | None) -> str:
    return "no value" if shape is None else f"shape {list(shape)}"
