"""Profiles the models that come with Keras: `keras:ResNet50`."""

from __future__ import annotations

import dataclasses
import difflib
import inspect

from dike.exceptions import BadInputError
from dike.profile import Api, ModelProfile
from dike.profiling.keras_profile import keras_profile

_BATCH_SIZE = 32


def application_profile(name: str, batch_size: int | None = None) -> ModelProfile:
    """Profiles `keras.applications.NAME` at its default input size, trained by plain SGD."""
    import tensorflow as tf

    from dike.keras3.model import synced_layers_of

    models = {
        key: value
        for key, value in vars(tf.keras.applications).items()
        if inspect.isfunction(value) and not key.startswith("_")
    }
    if name not in models:
        lower = {key.lower(): key for key in models}
        near = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.0)
        raise BadInputError(
            f"There is no model 'keras:{name}' in keras.applications; did you mean 'keras:{lower[near[0]]}'?"
        )
    model = models[name](weights=None)
    model.compile(optimizer="sgd", loss="sparse_categorical_crossentropy")
    model.optimizer.build(model.trainable_variables)
    size = batch_size or _BATCH_SIZE
    batch = (tf.TensorSpec((size, *model.input_shape[1:])), tf.TensorSpec((size,), tf.int32))
    profile = keras_profile(f"keras:{name}", Api.KERAS, model, batch)
    return dataclasses.replace(profile, why_not_split="", synced_layers=synced_layers_of(model))
