"""Flushes and continues the files that the callbacks of a `fit` write."""

from __future__ import annotations

from keras.callbacks import CSVLogger
from keras.src.callbacks import CallbackList


def settle(callbacks: CallbackList) -> None:
    """Waits for callbacks that Keras calls in other threads, and flushes TensorBoard's files."""
    if callbacks._async_train:
        callbacks._flush_futures()
    for callback in callbacks.callbacks:
        for writer in getattr(callback, "_writers", {}).values():
            writer.flush()


def append_logs(callbacks: CallbackList) -> None:
    """Makes callbacks that write logs append to those of an earlier run."""
    for callback in callbacks.callbacks:
        if isinstance(callback, CSVLogger):
            callback.append = True
