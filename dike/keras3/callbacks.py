"""The callbacks of a `fit`: their state, and what they write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras.callbacks import CSVLogger
from keras.src.callbacks import CallbackList

from dike.keras3.plain_values import Attributes


class CallbackStates:
    """What the callbacks keep in plain attributes, as `EarlyStopping` its patience.

    Args:
        callbacks: Keras' list of them.
    """

    def __init__(self, callbacks: CallbackList) -> None:
        self._callbacks = callbacks
        self._attributes: list[Attributes] = []

    def begin(self) -> None:
        """All callbacks know that the training begins: their state is what they change from now on."""
        self._attributes = [Attributes(callback) for callback in self._callbacks.callbacks]

    def save(self, arrays: list[Any]) -> list[tuple[str, dict[str, Any]]]:
        """Of each callback its type's name and its attributes, packed.

        Args:
            arrays: gets the arrays among them.
        """
        return [
            (type(callback).__qualname__, attributes.save(arrays))
            for callback, attributes in zip(self._callbacks.callbacks, self._attributes, strict=True)
        ]

    def restore(self, saved: Sequence[tuple[str, dict[str, Any]]], arrays: list[Any]) -> None:
        """Puts back what `save` returned, with the arrays that it gave."""
        for callback, attributes, (kind, values) in zip(
            self._callbacks.callbacks, self._attributes, saved, strict=False
        ):
            if type(callback).__qualname__ == kind:
                attributes.restore(values, arrays)


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
