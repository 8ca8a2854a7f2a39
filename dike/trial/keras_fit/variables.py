"""All that a `fit` changes in a model: its variables, its optimizers', its metrics', and Keras' random seeds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR, global_seed_generator

from dike.exceptions import BadInputError
from dike.keras_limits import optimizers_of
from dike.keras_variables import unique_names


def variables_of(model: Any) -> dict[str, Any]:
    """Name -> variable, in an order that is the same in every process that builds the same model.

    Besides those that Keras knows of, the TensorFlow variables among the model's own attributes.
    """
    groups = [model.variables, *(optimizer.variables for optimizer in optimizers_of(model)), model.metrics_variables]
    own = [value for value in vars(model).values() if isinstance(value, tf.Variable)]
    groups.append([value for value in own if value.dtype.is_numpy_compatible and value.dtype != tf.string])
    unique = {id(variable): variable for group in groups for variable in group}
    named = dict(unique_names(unique.values()))
    seeds = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    return named if seeds is None else {**named, GLOBAL_SEED_GENERATOR: seeds.state}


def values_of(model: Any) -> dict[str, Any]:
    """Name -> array."""
    return {name: np.asarray(variable) for name, variable in variables_of(model).items()}


def restore(model: Any, values: Mapping[str, Any], path: str) -> None:
    """Gives the model, built and compiled, the values that `values_of` read.

    Args:
        model: the model.
        values: name -> array.
        path: the checkpoint they are from, for messages.

    Raises:
        BadInputError: if the values are another model's.
    """
    if GLOBAL_SEED_GENERATOR in values:
        global_seed_generator()  # made when it is first needed, which may not have been here yet
    variables = variables_of(model)
    variables = {name: value for name, value in variables.items() if name in values or name != GLOBAL_SEED_GENERATOR}
    shapes = {name: tuple(variable.shape) for name, variable in variables.items()}
    saved = {name: tuple(value.shape) for name, value in values.items()}
    if shapes != saved:
        name = next(name for name in {**shapes, **saved} if shapes.get(name) != saved.get(name))
        raise BadInputError(
            f"Checkpoint '{path}' does not fit the model: variable '{name}' has {_shape(saved.get(name))} there and "
            f"{_shape(shapes.get(name))} here; undo the change to the script, or begin a search of another name."
        )
    for name, variable in variables.items():
        variable.assign(values[name])


def _shape(shape: tuple[int, ...] | None) -> str:
    return "no value" if shape is None else f"shape {list(shape)}"
