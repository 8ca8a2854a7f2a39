"""Saves all that a `fit` needs to go on where it is, whatever the size of the next attempt; and puts it back."""

from __future__ import annotations

from typing import Any

import keras
from keras.src.utils.python_utils import pythonify_logs

from dike.roles.keras_fit.batches import Batches, DataState
from dike.roles.keras_fit.resume import FitCheckpoint, Position, Saved, metric_state
from dike.roles.process import termination
from dike.trial import randomness
from dike.trial.keras_fit.callbacks import settle
from dike.trial.keras_fit.plain_values import Attributes, dump_arrays, load_arrays

_ARRAYS = "arrays.npz"
_CALLBACKS, _DATA = "callbacks", "data"


class FitSaver:
    """Where one `fit` is, from its first step to its last.

    Args:
        model: the Keras model.
        checkpoint: where the `fit` is saved.
        saved: the checkpoint that it goes on from; None to begin.
        position: where it is; brought forward by those who train.
        batches: its data.
        callbacks: Keras' callbacks.
    """

    def __init__(
        self,
        model: Any,
        checkpoint: FitCheckpoint,
        saved: Saved | None,
        position: Position,
        batches: Batches,
        callbacks: Any,
    ) -> None:
        self.position = position
        self._model = model
        self._checkpoint = checkpoint
        self._saved = saved
        self._batches = batches
        self._callbacks = callbacks
        self._attributes: list[Attributes] = []

    @property
    def is_due(self) -> bool:
        """Whether a checkpoint is to be written between two steps."""
        return termination.requested or self._checkpoint.is_due

    def begin(self) -> None:
        """All callbacks know that the training begins: their state is what they change from now on, or that saved."""
        self._batches.track()
        self._attributes = [Attributes(callback) for callback in self._callbacks.callbacks]
        if self._saved is not None:
            position, files = self._saved.position, self._saved.files
            own = {name: content for name, content in files.items() if name != _ARRAYS}
            data = DataState(position.data, self._arrays(_DATA), own)
            self._batches.resume(data, 0 if position.is_trained else position.batch)
            self._restore()

    def restore_finished(self) -> None:
        """Puts back what a `fit` that has nothing left to train had come to."""
        self._attributes = [Attributes(callback) for callback in self._callbacks.callbacks]
        self._restore()

    def _restore(self) -> None:
        assert self._saved is not None
        self._checkpoint.restore(self._saved)
        self._restore_callbacks()
        randomness.restore(self._saved.position.randomness)

    def reenter(self) -> None:
        """The rest of an epoch is due: what its begin does to the callbacks, an earlier attempt has done before."""
        if self._saved is None:
            return
        if self._saved.position.batch:
            self._restore_callbacks()
            randomness.restore(self._batches.unused(self._saved.position.randomness))
        self._saved = None

    def epoch_trained(self, logs: dict[str, Any]) -> None:
        """All batches of the epoch are done, and only its end is left; `logs` are the last ones."""
        self.position.is_trained = True
        self._note(logs)

    def save_within(self, batch: int, logs: dict[str, Any]) -> None:
        """Saves between two steps of an epoch.

        Args:
            batch: batches of the epoch that have been read, all of them trained.
            logs: the last ones.
        """
        self._note(logs)
        self.save(batch)

    def save_if_asked(self) -> None:
        """Saves and leaves if the process was told to end; while nothing trains."""
        # One that a callback has stopped has little to do until its last checkpoint.
        if termination.requested and not self._model.stop_training:
            self.save()

    def save(self, batch: int = 0) -> None:
        """Writes a checkpoint, and ends the process if it was told to end.

        Args:
            batch: as in `save_within`; 0 where the epoch, or all of it but its end, is done.
        """
        if self._checkpoint.is_kept:
            settle(self._callbacks)
            own: list[Any] = []
            data = self._batches.state(batch)
            self.position.data = data.position
            self.position.callbacks = [
                (type(callback).__qualname__, attributes.save(own))
                for callback, attributes in zip(self._callbacks.callbacks, self._attributes, strict=True)
            ]
            self.position.randomness = randomness.state()
            groups = {_CALLBACKS: own, _DATA: data.arrays}
            arrays = {f"{kind}-{number}": array for kind, group in groups.items() for number, array in enumerate(group)}
            self._checkpoint.write(self.position, {**data.files, _ARRAYS: dump_arrays(arrays)})
        if termination.requested:
            termination.leave()

    def _note(self, logs: dict[str, Any]) -> None:
        self.position.logs = pythonify_logs(logs)
        self.position.metrics = metric_state(self._model)

    def _arrays(self, kind: str) -> list[Any]:
        assert self._saved is not None
        named = load_arrays(self._saved.files[_ARRAYS])
        return [named[f"{kind}-{number}"] for number in range(sum(name.startswith(f"{kind}-") for name in named))]

    def _restore_callbacks(self) -> None:
        assert self._saved is not None
        arrays = self._arrays(_CALLBACKS)
        saved = self._saved.position.callbacks
        for callback, attributes, (kind, values) in zip(
            self._callbacks.callbacks, self._attributes, saved, strict=False
        ):
            if type(callback).__qualname__ == kind:
                attributes.restore(values, arrays)


class LeaveValidation(keras.callbacks.Callback):
    """Lets a validation be interrupted: it changes nothing, and the next attempt does it again.

    Attributes:
        saver: saves the `fit`; None before it trains.
    """

    def __init__(self) -> None:
        super().__init__()
        self.saver: FitSaver | None = None

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.saver is not None:
            self.saver.save_if_asked()
