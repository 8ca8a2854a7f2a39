"""Captures the model at the first call of `fit`, in Keras 3 and in tf_keras."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from types import ModuleType
from typing import Any, NoReturn

from dike.capture import coordinator
from dike.capture.sink import Sink
from dike.exceptions import BadInputError
from dike.keras3.model import check_distributable, synced_layers_of, why_not_split
from dike.main_script import one_line
from dike.profile import Api, ModelProfile
from dike.profiling.keras_profile import has_forward_pass, keras_profile


def install(sink: Sink, keras: ModuleType) -> None:
    api = Api.TF_KERAS if keras.__name__ == "tf_keras" else Api.KERAS
    owner = next(base for base in keras.Model.__mro__ if "fit" in vars(base))
    original = owner.fit
    signature = inspect.signature(original)

    @functools.wraps(original)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        if api is Api.KERAS and keras.backend.backend() != "tensorflow":
            sink.capture_loop(f"by fit with Keras on {keras.backend.backend()}", self.trainable_variables)
        if api is Api.KERAS and coordinator.script_has_strategy():
            sink.refuse(
                f"{sink.script} calls fit under its own ParameterServerStrategy, which Keras 3 cannot do; "
                "remove the strategy, as Dike uses its own."
            )
        if api is Api.KERAS and self._distribute_strategy is not None:
            sink.capture_loop("under a tf.distribute strategy of its own", self.trainable_variables)
        if api is Api.TF_KERAS and (library := coordinator.own_distribution()):
            sink.capture_loop(f"under its own {library}", self.trainable_variables, library)
        why_alone = ""
        if api is Api.KERAS:
            self._assert_compile_called("fit")
            try:
                check_distributable(self)
            except BadInputError as error:
                why_alone = str(error)
        call = signature.bind(self, *args, **kwargs)
        coordinator.fit_begins()

        def grab(iterator: Any) -> NoReturn:
            batch = next(iterator)
            sink.capture(lambda: _profile(sink, api, self, batch, why_alone))

        # Keras prepares the data and builds the model, then calls this as its training step. Everything with effects
        # outside - the user's callbacks, progress, validation - is left out.
        self.train_function = grab
        call.arguments.update(callbacks=None, verbose=0, validation_data=None)
        original(*call.args, **call.kwargs)
        sink.refuse(
            f"fit() in {sink.script} receives no data to train on, so there is nothing to plan; "
            "check its dataset, epochs and steps_per_epoch."
        )

    owner.fit = fit
    train_on_batch = owner.train_on_batch

    @functools.wraps(train_on_batch)
    def captured(self: Any, *args: Any, **kwargs: Any) -> Any:
        coordinator.capture_own_loop(sink, "Model.train_on_batch", lambda: self.trainable_variables)
        return train_on_batch(self, *args, **kwargs)

    owner.train_on_batch = captured


def _profile(sink: Sink, api: Api, model: Any, batch: Any, why_alone: str) -> ModelProfile:
    if api is not Api.KERAS or coordinator.script_has_strategy():
        return dataclasses.replace(_read(sink, api, model, batch), why_alone=why_alone)
    import keras

    has_own_step = type(model).train_step is not keras.Model.train_step
    try:
        if has_forward_pass(model) and not model.built:
            model._symbolic_build(data_batch=batch)
        if not (model.trainable_variables or has_own_step):
            return sink.loop_profile("nothing in its first call of fit", [])
        return dataclasses.replace(_read(sink, api, model, batch), why_alone=why_alone)
    except BadInputError:
        raise
    except Exception as error:
        if not has_own_step:
            raise
        # It may call its model with something else than the batch.
        how = f"by a train_step of its own, which Dike cannot read ({one_line(error)})"
        return sink.loop_profile(how, model.trainable_variables)


def _read(sink: Sink, api: Api, model: Any, batch: Any) -> Any:
    import tensorflow as tf

    if api is Api.TF_KERAS:
        if not model.built:
            inputs = batch[0] if isinstance(batch, tuple | list) else batch
            tf.function(lambda x: model(x, training=True)).get_concrete_function(inputs)
        model.optimizer.build(model.trainable_variables)
    elif has_forward_pass(model):
        model._symbolic_build(data_batch=batch)
    if coordinator.script_has_strategy():
        # The script has a strategy of its own and only needs TF_CONFIG.
        api = Api.COORDINATOR
    if api is not Api.KERAS:
        return keras_profile(sink.script, api, model, batch, sink.batch_size)
    profile = keras_profile(sink.script, api, model, batch, sink.batch_size)
    try:
        why = why_not_split(model, batch)
    except Exception as error:  # a model may do anything, and one task can always train it
        why = f"it cannot be determined ({one_line(error)})"
    return dataclasses.replace(profile, why_not_split=why, synced_layers=synced_layers_of(model))
