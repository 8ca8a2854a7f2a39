"""What the callbacks of a `fit` write."""

from __future__ import annotations

from keras.callbacks import CSVLogger
from keras.src.callbacks import CallbackList


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
