"""Trials that train with Keras 3: `fit` reports, is suspended between two steps, and resumes at the same position."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from dike.keras3.fit_call import arguments_of, loss_of
from dike.keras3.trial.reports import KerasReports, reporting_fit
from dike.trial.runtime import TrialRuntime

KNOWN_VERSION = "3.15"
"""Supported version of Keras; others work if they have the attributes used here."""

_NEEDED = {
    "TFEpochIterator": ("_enumerate_iterator", "_get_iterator", "catch_stop_iteration", "reset"),
    "TensorFlowTrainer": ("fit", "make_train_function", "train_on_batch"),
}


def install(runtime: TrialRuntime) -> None:
    """Makes `fit` of every Keras model report and suspend. Called when Keras is imported."""
    import keras

    if keras.backend.backend() != "tensorflow":
        keras.Model.fit = reporting_fit(keras.Model.fit, KerasReports(runtime), keras.callbacks.Callback)
        return
    from keras.src.backend.tensorflow import trainer

    missing = [
        f"{name}.{attribute}"
        for name, attributes in _NEEDED.items()
        for attribute in attributes
        if not hasattr(getattr(trainer, name, None), attribute)
    ]
    if missing:
        print(
            f"dike: Keras {keras.__version__} has no {missing[0]}; trials cannot be suspended with it, as they can "
            f"with Keras {KNOWN_VERSION}.",
            file=sys.stderr,
            flush=True,
        )
        keras.Model.fit = reporting_fit(keras.Model.fit, KerasReports(runtime), keras.callbacks.Callback)
        return
    # These modules import Keras' internals.
    from dike.keras3 import data
    from dike.keras3.trial.fit import KerasScript

    script = KerasScript(runtime)
    own = trainer.TensorFlowTrainer
    if runtime.gang is not None:
        from dike.keras3 import synchronous

        synchronous.install(runtime.gang)
    trainer.TFEpochIterator = data.Batches
    own.fit = _resumable(own.fit, script, reporting_fit(own.fit, script.reports, keras.callbacks.Callback))
    own.train_on_batch = _reporting_step(own.train_on_batch, script)


def _resumable(own_fit: Callable[..., Any], script: Any, reporting: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a suspendable `fit`, which calls `reporting` for models that cannot be suspended."""
    from dike.keras3.data import intercept_iterators
    from dike.keras3.trial import fit as fits

    is_fitting = False

    @functools.wraps(own_fit)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_fitting
        if is_fitting:
            # Called by a step or a callback of the outer fit, of which it is a part.
            with intercept_iterators(lambda batches: None):
                return own_fit(self, *args, **kwargs)
        self._assert_compile_called("fit")
        if self._distribute_strategy is not None:
            return reporting(self, *args, **kwargs)
        is_fitting = True
        try:
            return fits.TrialFit(script, self, arguments_of(own_fit, self, args, kwargs)).run(own_fit)
        finally:
            is_fitting = False

    return fit


def _reporting_step(own: Callable[..., Any], script: Any) -> Callable[..., Any]:
    """Returns a `train_on_batch` that reports the losses of the first model that calls it, and saves it at the end."""
    first: list[Any] = []
    reports, runtime = script.reports, script.runtime

    @functools.wraps(own)
    def train_on_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not first:
            first.append(self)
            reports.training(preemptible=False)
            if runtime.save_at_end is None:
                runtime.save_at_end = lambda: runtime.write_last(lambda: script.save_model(self))
        result = own(self, *args, **kwargs)
        if self is first[0]:
            loss = loss_of(result) if isinstance(result, dict) else result[0] if isinstance(result, list) else result
            reports.batch_done(loss)
        return result

    return train_on_batch
