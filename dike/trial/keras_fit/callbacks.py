"""Keras' list of callbacks, which also tells of steps and epochs once all callbacks know of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from keras.callbacks import CSVLogger
from keras.src.callbacks import CallbackList
from keras.src.utils.python_utils import pythonify_logs


class Listener(Protocol):
    """Who wants to know how far the training is."""

    @property
    def is_skipped(self) -> bool:
        """Whether an earlier run has done all of it, and told the callbacks."""

    @property
    def batches_per_epoch(self) -> int | None:
        """None if that is not known yet."""

    def begin(self) -> None:
        """The training is about to begin; all callbacks know of it."""

    def step_done(self, last_batch: int, logs: Any) -> None:
        """The batches up to `last_batch` of the epoch are done."""

    def epoch_logs(self, logs: dict[str, float]) -> dict[str, float]:
        """An epoch's results, of which Keras knows `logs`."""

    def epoch_done(self, epoch: int, logs: dict[str, float]) -> None:
        """An epoch is done; all callbacks know of it."""


def settle(callbacks: CallbackList) -> None:
    """Waits for callbacks that Keras calls in other threads, and lets TensorBoard's files be written."""
    if callbacks._async_train:
        callbacks._flush_futures()
    for callback in callbacks.callbacks:
        for writer in getattr(callback, "_writers", {}).values():
            writer.flush()


def append_logs(callbacks: CallbackList) -> None:
    """Lets the logs that callbacks write go on with what an earlier run wrote."""
    for callback in callbacks.callbacks:
        if isinstance(callback, CSVLogger):
            callback.append = True


class TrialCallbacks(CallbackList):
    """The callbacks of one `fit`.

    Keras makes its own list when it knows how many batches an epoch has; so this one, made earlier, tells the
    callbacks of model and parameters only when the training begins. Nothing is called in between.

    Args:
        arguments: all arguments of `fit`.
        model: the model.
        listener: is told of everything last.
        appends: whether logs that the callbacks write go on with what is in them.
    """

    def __init__(self, arguments: Mapping[str, Any], model: Any, listener: Listener, *, appends: bool) -> None:
        given, verbose = arguments["callbacks"], arguments["verbose"]
        is_list = isinstance(given, CallbackList)
        super().__init__(
            list(given.callbacks) if is_list else given,
            add_history=not is_list,
            add_progbar=not is_list and verbose != 0,
        )
        self._given_params = given.params if is_list else None
        self._arguments = arguments
        self._trained_model = model
        self._listener = listener
        if appends:
            append_logs(self)

    def on_train_begin(self, logs: Any = None) -> None:
        own = {key: self._arguments[key] for key in ("verbose", "epochs")}
        self.set_model(self._trained_model)
        self.set_params(self._given_params or {**own, "steps": self._listener.batches_per_epoch})
        super().on_train_begin(logs)
        self._listener.begin()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_end(batch, logs)
        self._listener.step_done(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        known = self._listener.epoch_logs(pythonify_logs(logs))
        super().on_epoch_end(epoch, known)
        self._listener.epoch_done(epoch, known)

    def on_train_end(self, logs: Any = None) -> None:
        if self._listener.is_skipped:
            self._on_end()
        else:
            super().on_train_end(logs)
