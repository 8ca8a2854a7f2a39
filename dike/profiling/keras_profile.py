"""Profiles a compiled Keras or tf_keras model with one batch of its training data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from dike.keras3.model import named_variables
from dike.profile import Api, ModelProfile
from dike.profiling.graph_flops import Cost, FlopsReader
from dike.profiling.model_profile import Findings

# Cost of a step that cannot be traced (2 to 3 in practice; the gradient costs twice the forward pass).
STEP_PER_FORWARD = 3.0


def keras_profile(name: str, api: Api, model: Any, batch: Any, batch_size: int | None = None) -> ModelProfile:
    """Profiles a built and compiled model; raises BadInputError if it has no trainable parameters.

    Args:
        name: the profile's name.
        api: `KERAS` or `TF_KERAS`.
        model: the model.
        batch: as `train_step` takes it: x, (x, y) or (x, y, sample_weight), of tensors or tensor specs.
        batch_size: samples per step in place of the batch's own.
    """
    own_size = _first_dim(batch)
    size = batch_size or own_size
    specs = _specs(batch, own_size, size)
    inputs = specs[0] if isinstance(specs, tuple | list) else specs
    reader = FlopsReader(size)
    step_graph = _trace(lambda data: model.train_step(data), specs)
    step = reader.graph_cost(step_graph)
    uncounted = reader.uncounted
    if has_forward_pass(model):
        reader = FlopsReader(size)
        forward = forward_cost(model, inputs, reader)
        uncounted = uncounted | reader.uncounted
    else:
        forward = step.times(1 / STEP_PER_FORWARD)
    variables = named_variables(model)
    trainable = list(model.trainable_variables)
    optimizers = _optimizers(model)
    return Findings(
        name=name,
        api=api,
        batch_size=size,
        forward=forward,
        step_flops=step.total,
        variables=variables,
        trainable=trainable,
        layers=_layers(model),
        uncounted=uncounted,
        sample_bytes=_sample_bytes(inputs, size),
        optimizer=optimizer_name(optimizers[0]) if optimizers else "",
        optimizer_slots=max((slots_per_parameter(optimizer, trainable) for optimizer in optimizers), default=0),
    ).profile()


def forward_cost(model: Any, inputs: Any, reader: FlopsReader) -> Cost:
    """Cost of calling a built model on a batch of tensor specs; only traces."""
    return reader.graph_cost(_trace(lambda data: model(data, training=False), inputs))


def optimizer_name(optimizer: Any) -> str:
    """The optimizer's class; for a wrapper that scales the loss, the inner optimizer's class."""
    return type(getattr(optimizer, "inner_optimizer", optimizer)).__name__


def slots_per_parameter(optimizer: Any, trainable: Sequence[Any]) -> int:
    """Variables that a built Keras optimizer keeps for each trainable parameter, rounded; 0 without optimizer."""
    if optimizer is None:
        return 0
    variables = optimizer.variables
    kept = sum(_size(variable) for variable in (variables() if callable(variables) else variables))
    parameters = sum(_size(variable) for variable in trainable)
    # Step counter and learning rate exist once.
    return max(round((kept - 2) / parameters), 0) if parameters else 0


def _optimizers(model: Any) -> list[Any]:
    """The compiled optimizer, or those that the model's own `train_step` uses."""
    if model.optimizer is not None:
        return [model.optimizer]
    return [value for value in vars(model).values() if hasattr(value, "apply_gradients")]


def _size(variable: Any) -> int:
    size = 1
    for dim in variable.shape:
        size *= dim or 1
    return size


def _trace(function: Callable[[Any], Any], specs: Any) -> Any:
    import tensorflow as tf

    return tf.function(function, autograph=False).get_concrete_function(specs).graph


def has_forward_pass(model: Any) -> bool:
    """Whether the model can be called; one with its own `train_step`, such as a GAN, may have no `call`."""
    keras_model = next(
        base
        for base in type(model).__mro__
        if base.__name__ == "Model" and base.__module__.startswith(("keras.", "tf_keras."))
    )
    own_call = getattr(type(model), "call", None) is not getattr(keras_model, "call", None)
    return own_call or bool(getattr(model, "_functional", None))


def _specs(batch: Any, own_size: int, size: int) -> Any:
    import tensorflow as tf

    def spec(tensor: Any) -> Any:
        dims = tf.TensorShape(tensor.shape).as_list()
        if dims and dims[0] in (own_size, None):
            dims[0] = size
        return tf.TensorSpec(dims, tensor.dtype)

    return tf.nest.map_structure(spec, batch)


def _first_dim(batch: Any) -> int:
    import tensorflow as tf

    for tensor in tf.nest.flatten(batch):
        shape = tf.TensorShape(tensor.shape)
        if shape.rank and shape[0]:
            return int(shape[0])
    return 1


def _sample_bytes(inputs: Any, size: int) -> int:
    import tensorflow as tf

    return sum(spec.shape.num_elements() * spec.dtype.size for spec in tf.nest.flatten(inputs)) // size


def _layers(model: Any) -> Counter[str]:
    """Number of layers by class, including those of nested models."""
    layers: Counter[str] = Counter()
    for layer in model._flatten_layers(include_self=False, recursive=True):
        kind = type(layer).__name__
        if kind != "InputLayer" and not getattr(layer, "layers", None) and not _is_metric(layer):
            layers[kind] += 1
    return layers


def _is_metric(layer: Any) -> bool:
    return hasattr(layer, "update_state") and hasattr(layer, "result")
