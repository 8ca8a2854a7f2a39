"""Checkpoints of a `fit`: all variables by name, and the position in the training.

A `fit` resumes at that position with any number of workers and ps.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.utils.python_utils import pythonify_logs

from dike import checkpoints, randomness
from dike.exceptions import BadInputError
from dike.keras3.callbacks import settle
from dike.keras3.job.batches import DataState, JobBatches
from dike.keras3.model import metric_variables, unique_names, values_of
from dike.keras3.model_files import ModelFiles, ModelSnapshot
from dike.plain_values import CallbackStates, dump_groups, load_groups
from dike.process import termination
from dike.reporting import reporter
from dike.roles import fencing
from dike.roles.cluster import log_restored
from dike.task import TaskSpec
from dike.trial import folders

_STATE_KEY = "state/.ATTRIBUTES/VARIABLE_VALUE"
_FILES_KEY = "files/.ATTRIBUTES/VARIABLE_VALUE"
_ARRAYS = "arrays.npz"
_CALLBACKS, _DATA = "callbacks", "data"
_MAX_CHECKPOINTS = 3


@dataclass
class Position:
    """Position in a `fit`.

    Attributes:
        epoch: current or next epoch.
        batch: finished batches of that epoch.
        is_trained: whether all of them are done, and only validation and callbacks of the epoch are left.
        step: batches done in all epochs, and in earlier `fit`s.
        epochs: the script's `epochs`.
        stopped: whether a callback ended the training before the last epoch.
        history: Keras' `History`: name -> one value per epoch, a number or a list of them.
        history_epochs: numbers of those epochs.
        metrics: state of the metrics within an epoch: variable's name -> values.
        logs: the last step's logs.
        data: position in the data; `DataState.position`.
        evaluations: number of iterators over the validation data; if it shuffles, each has another order.
        callbacks: type name and packed attributes of each callback.
        randomness: the random state (`dike.randomness`).
    """

    epoch: int = 0
    batch: int = 0
    is_trained: bool = False
    step: int = 0
    epochs: int = 0
    stopped: bool = False
    history: dict[str, list[Any]] = field(default_factory=dict)
    history_epochs: list[int] = field(default_factory=list)
    metrics: dict[str, list[float]] = field(default_factory=dict)
    logs: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    evaluations: int = 0
    callbacks: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    randomness: dict[str, Any] = field(default_factory=dict)

    def is_finished(self, epochs: int) -> bool:
        """Returns whether a script that asks for `epochs` has nothing left to train."""
        return self.epoch >= epochs or (self.stopped and self.epochs == epochs)

    def end_epoch(self) -> None:
        self.epoch += 1
        self.batch, self.is_trained = 0, False
        self.metrics, self.logs = {}, {}

    def last_step(self, per_epoch: int) -> int:
        """Returns the step at which the `fit` ends unless it is stopped earlier, with `per_epoch` batches per epoch."""
        begun = per_epoch if self.is_trained else self.batch
        return self.step - begun + (self.epochs - self.epoch) * per_epoch


@dataclass(frozen=True)
class SavedState:
    """A loaded checkpoint. `files` are the binary parts of the position."""

    path: str
    position: Position
    files: dict[str, bytes]


class FitCheckpoint:
    """Writes and reads the checkpoints of one `fit` of a script.

    Args:
        task: the chief's task.
        number: index of this call of `fit` in the script.
        variables: name -> local TensorFlow variable.
    """

    def __init__(self, task: TaskSpec, number: int, variables: Mapping[str, Any]) -> None:
        self._task = task
        self._variables = dict(variables)
        self._saved_s = time.monotonic()
        self._number = number
        self._state = tf.Variable("", dtype=tf.string, trainable=False)
        self._files = tf.Variable(tf.constant([], tf.string), shape=[None], trainable=False)
        self._manager = None
        if task.checkpoint_dir:
            fencing.take_ownership(task)
            folder = f"{task.checkpoint_dir.rstrip('/')}/fit-{number}"
            whole = tf.train.Checkpoint(state=self._state, files=self._files, variables=self._variables)
            self._manager = tf.train.CheckpointManager(whole, folder, max_to_keep=_MAX_CHECKPOINTS)

    @property
    def is_enabled(self) -> bool:
        return self._manager is not None

    @property
    def is_due(self) -> bool:
        return time.monotonic() - self._saved_s >= self._task.checkpoint_interval_s

    def write(self, position: Position, files: Mapping[str, bytes], *, is_last: bool) -> None:
        if self._manager is None:
            return
        state = {"position": vars(position), "shapes": self._shapes(), "files": list(files)}
        self._state.assign(json.dumps(state))
        self._files.assign(tf.constant(list(files.values()), tf.string))
        fencing.check(self._task)
        # Files are never overwritten: a process killed during the write would leave no readable one.
        newest = self._manager.latest_checkpoint
        min_number = 0 if newest is None else int(newest.rpartition("-")[2]) + 1
        self._saved_s = time.monotonic()
        checkpoints.write_checkpoint(lambda: self._save(position.step, min_number), is_last=is_last)

    def _save(self, step: int, min_number: int) -> None:
        assert self._manager is not None
        path = self._manager.save(checkpoint_number=max(step, min_number))
        checkpoints.record_checksums(path)
        self._saved_s = time.monotonic()
        reporter().checkpoint(path, step)

    def write_model(self, model: Any, step: int) -> None:
        """Writes the trained model beside the checkpoints, for `dike export`."""
        if self._manager is None:
            return
        fencing.check(self._task)
        newest = self._manager.latest_checkpoint
        number = None if newest is None else checkpoints.step_of(newest)
        kept = ModelSnapshot(step, 0.0, values_of(model), ModelFiles(model).layout(), checkpoint=number)
        path = f"{self._task.checkpoint_dir.rstrip('/')}/run-{self._number}-step-{step}"
        checkpoints.retry_while_disk_full(lambda: kept.write(path))
        folders.prune(path, keep=1)

    def read(self) -> SavedState | None:
        """Returns the newest undamaged checkpoint; None if there is none.

        Raises:
            BadInputError: if the checkpoint belongs to another model.
        """
        path = checkpoints.newest_intact(self._manager.directory) if self._manager is not None else None
        if path is None:
            return None
        reader = tf.train.load_checkpoint(path)
        state = json.loads(reader.get_tensor(_STATE_KEY))
        shapes = self._shapes()
        if state["shapes"] != shapes:
            different = sorted(
                name for name in {*shapes, *state["shapes"]} if shapes.get(name) != state["shapes"].get(name)
            )
            raise BadInputError(
                f"Checkpoint '{checkpoints.shown(path)}' is of another model: variable '{different[0]}' differs; "
                "name another folder with --checkpoint-dir."
            )
        files = dict(zip(state["files"], (bytes(content) for content in reader.get_tensor(_FILES_KEY)), strict=True))
        return SavedState(path, Position(**state["position"]), files)

    def restore(self, saved: SavedState) -> None:
        status = tf.train.Checkpoint(variables=self._variables).restore(saved.path)
        status.assert_existing_objects_matched().expect_partial()
        position = saved.position
        log_restored(saved.path, position.epoch, position.batch)
        reporter().resumed(position.step)

    def _shapes(self) -> dict[str, list[int]]:
        return {name: variable.shape.as_list() for name, variable in self._variables.items()}


class FitSaver:
    """Saves and restores one `fit`. `Fit` and `Epoch` advance its `position`."""

    def __init__(
        self,
        model: Any,
        checkpoint: FitCheckpoint,
        saved: SavedState | None,
        position: Position,
        batches: JobBatches,
        callbacks: Any,
    ) -> None:
        self.position = position
        self._model = model
        self._checkpoint = checkpoint
        self._saved = saved
        self._batches = batches
        self._callbacks = callbacks
        self._states = CallbackStates(callbacks.callbacks)

    @property
    def is_due(self) -> bool:
        return termination.requested or self._checkpoint.is_due

    def begin(self) -> None:
        """Restores data, callbacks and variables.

        Called after `on_train_begin`: changes of callbacks from then on are saved.
        """
        self._batches.track()
        self._states.begin()
        if self._saved is not None:
            position, files = self._saved.position, self._saved.files
            own = {name: content for name, content in files.items() if name != _ARRAYS}
            data = DataState(position.data, self._arrays(_DATA), own)
            self._batches.resume(data, 0 if position.is_trained else position.batch)
            self._restore()

    def restore_finished(self) -> None:
        self._states.begin()
        self._restore()

    def _restore(self) -> None:
        assert self._saved is not None
        self._checkpoint.restore(self._saved)
        self._restore_callbacks()
        randomness.restore(self._saved.position.randomness)

    def resume_epoch(self) -> None:
        """Restores callbacks and random state again, because an interrupted epoch already ran `on_epoch_begin`."""
        if self._saved is None:
            return
        if self._saved.position.batch:
            self._restore_callbacks()
            randomness.restore(self._batches.unused_randomness(self._saved.position.randomness))
        self._saved = None

    def epoch_trained(self, logs: dict[str, Any]) -> None:
        """Marks all batches of the epoch as done."""
        self.position.is_trained = True
        self._record_logs(logs)

    def save_within(self, batch: int, logs: dict[str, Any]) -> None:
        """Saves between two steps of an epoch, of which `batch` batches are read and trained."""
        self._record_logs(logs)
        self.save(batch)

    def save_if_terminating(self) -> None:
        """Saves and exits if the process was asked to end. Call only while no step is in flight."""
        # A fit that a callback has stopped writes its last checkpoint soon.
        if termination.requested and not self._model.stop_training:
            self.save()

    def save(self, batch: int = 0, *, is_last: bool = False) -> None:
        """Writes a checkpoint, and exits if the process was asked to end."""
        if self._checkpoint.is_enabled:
            settle(self._callbacks)
            own: list[Any] = []
            data = self._batches.state(batch)
            self.position.data = data.position
            self.position.callbacks = self._states.save(own)
            self.position.randomness = randomness.state()
            arrays = dump_groups({_CALLBACKS: own, _DATA: data.arrays})
            self._checkpoint.write(self.position, {**data.files, _ARRAYS: arrays}, is_last=is_last)
        if termination.requested:
            termination.exit()

    def _record_logs(self, logs: dict[str, Any]) -> None:
        known = pythonify_logs(logs)
        self.position.logs = dict(zip(known, plain(known.values()), strict=True))
        self.position.metrics = metric_state(self._model)

    def _arrays(self, kind: str) -> list[Any]:
        assert self._saved is not None
        return load_groups(self._saved.files[_ARRAYS])[kind]

    def _restore_callbacks(self) -> None:
        assert self._saved is not None
        self._states.restore(self._saved.position.callbacks, self._arrays(_CALLBACKS))


class InterruptibleValidation(keras.callbacks.Callback):
    """Saves and exits during a validation: it changes nothing, and the next attempt repeats it."""

    def __init__(self) -> None:
        super().__init__()
        self.saver: FitSaver | None = None

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.saver is not None:
            self.saver.save_if_terminating()


def plain(values: Iterable[Any]) -> list[Any]:
    return [np.asarray(value).tolist() for value in values]


def metric_state(model: Any) -> dict[str, list[float]]:
    return {name: np.ravel(variable.numpy()).tolist() for name, variable in unique_names(metric_variables(model))}


def restore_metrics(model: Any, state: Mapping[str, list[float]]) -> None:
    """Metrics that are not in the state start at zero."""
    for name, variable in unique_names(metric_variables(model)):
        values = state.get(name)
        if values is not None and len(values) == int(np.prod(variable.shape)):
            variable.assign(np.reshape(values, variable.shape))
