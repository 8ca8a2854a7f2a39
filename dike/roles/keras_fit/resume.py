"""Checkpoints of a `fit`: all variables by name, and where in the training they were taken."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from dike.exceptions import BadInputError
from dike.keras_variables import unique_names
from dike.reporting import reporter
from dike.roles import fencing
from dike.roles.cluster import log
from dike.task import TaskSpec

_STATE_KEY = "state/.ATTRIBUTES/VARIABLE_VALUE"
_FILES_KEY = "files/.ATTRIBUTES/VARIABLE_VALUE"
_KEPT = 3


@dataclass
class Position:
    """Where a `fit` is.

    Attributes:
        epoch: the epoch that runs next or is running.
        batch: batches of that epoch that are done.
        is_trained: whether all of them are, and only the epoch's end is left: validation and callbacks.
        step: batches done in all epochs, and in the `fit`s before.
        epochs: the `epochs` that the script asked for.
        stopped: whether a callback ended the training before the last epoch.
        history: what Keras' `History` has recorded: name -> one value for each epoch.
        history_epochs: numbers of those epochs.
        metrics: state of the metrics in the middle of an epoch: variable's name -> values.
        logs: the last step's logs.
        log_sums: in the middle of an epoch the sums of logs that no metric counts, over `samples`.
        samples: samples of the epoch that are done.
        data: where the data is; `DataState.position`.
        callbacks: of each callback its type's name and its attributes, packed.
        randomness: the random state (`dike.trial.randomness`).
    """

    epoch: int = 0
    batch: int = 0
    is_trained: bool = False
    step: int = 0
    epochs: int = 0
    stopped: bool = False
    history: dict[str, list[float]] = field(default_factory=dict)
    history_epochs: list[int] = field(default_factory=list)
    metrics: dict[str, list[float]] = field(default_factory=dict)
    logs: dict[str, float] = field(default_factory=dict)
    log_sums: dict[str, float] = field(default_factory=dict)
    samples: int = 0
    data: dict[str, Any] = field(default_factory=dict)
    callbacks: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    randomness: dict[str, Any] = field(default_factory=dict)

    def is_finished(self, epochs: int) -> bool:
        """Whether a script that asks for `epochs` has nothing left to train."""
        return self.epoch >= epochs or (self.stopped and self.epochs == epochs)

    def end_epoch(self) -> None:
        """The next epoch is due."""
        self.epoch += 1
        self.batch, self.is_trained = 0, False
        self.metrics, self.logs, self.log_sums, self.samples = {}, {}, {}, 0

    def last_step(self, per_epoch: int) -> int:
        """The step at which the `fit` ends, if nothing stops it earlier, with so many batches in an epoch."""
        begun = per_epoch if self.is_trained else self.batch
        return self.step - begun + (self.epochs - self.epoch) * per_epoch


@dataclass(frozen=True)
class Saved:
    """A checkpoint.

    Attributes:
        path: its path.
        position: where the `fit` was.
        files: name -> content of what belongs to the position and is not plain text.
    """

    path: str
    position: Position
    files: dict[str, bytes]


class FitCheckpoint:
    """Writes and reads the checkpoints of one `fit` of a script.

    Args:
        task: the chief's task.
        number: which call of `fit` in the script this is, from 0.
        variables: name -> local TensorFlow variable.
    """

    def __init__(self, task: TaskSpec, number: int, variables: Mapping[str, Any]) -> None:
        self._task = task
        self._variables = dict(variables)
        self._saved_s = time.monotonic()
        self._state = tf.Variable("", dtype=tf.string, trainable=False)
        self._files = tf.Variable(tf.constant([], tf.string), shape=[None], trainable=False)
        self._manager = None
        if task.checkpoint_dir:
            fencing.claim(task)
            folder = f"{task.checkpoint_dir.rstrip('/')}/fit-{number}"
            whole = tf.train.Checkpoint(state=self._state, files=self._files, variables=self._variables)
            self._manager = tf.train.CheckpointManager(whole, folder, max_to_keep=_KEPT)

    @property
    def is_kept(self) -> bool:
        """Whether the job keeps checkpoints."""
        return self._manager is not None

    @property
    def is_due(self) -> bool:
        """Whether the last checkpoint is older than the job's interval."""
        return time.monotonic() - self._saved_s >= self._task.checkpoint_interval_s

    def write(self, position: Position, files: Mapping[str, bytes]) -> None:
        """Writes a checkpoint of the local variables."""
        if self._manager is None:
            return
        state = {"position": dataclasses.asdict(position), "shapes": self._shapes(), "files": list(files)}
        self._state.assign(json.dumps(state))
        self._files.assign(tf.constant(list(files.values()), tf.string))
        fencing.check(self._task)
        # A file is never written over: a process that is killed meanwhile would leave none that can be read.
        newest = self._manager.latest_checkpoint
        least = 0 if newest is None else int(newest.rpartition("-")[2]) + 1
        path = self._manager.save(checkpoint_number=max(position.step, least))
        self._saved_s = time.monotonic()
        reporter().checkpoint(path, position.step)

    def read(self) -> Saved | None:
        """The newest checkpoint; None where there is none.

        Raises:
            BadInputError: if the checkpoint is another model's, or cannot be read by this version.
        """
        path = self._manager.latest_checkpoint if self._manager is not None else None
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
                f"Checkpoint '{path}' is of another model: variable '{different[0]}' differs; "
                "name another folder with --checkpoint-dir."
            )
        if "files" not in state:
            raise BadInputError(
                f"Checkpoint '{path}' is of an older Dike, which did not save the order of the data; "
                "name another folder with --checkpoint-dir."
            )
        files = dict(zip(state["files"], (bytes(content) for content in reader.get_tensor(_FILES_KEY)), strict=True))
        return Saved(path, Position(**state["position"]), files)

    def restore(self, saved: Saved) -> None:
        """Gives the local variables the values that they have in a checkpoint."""
        status = tf.train.Checkpoint(variables=self._variables).restore(saved.path)
        status.assert_existing_objects_matched().expect_partial()
        position = saved.position
        log(f"restored '{saved.path}': epoch {position.epoch + 1}, batch {position.batch}.")
        reporter().resumed(position.step)

    def _shapes(self) -> dict[str, list[int]]:
        return {name: variable.shape.as_list() for name, variable in self._variables.items()}


def metric_state(model: Any) -> dict[str, list[float]]:
    """The state of the model's metrics, as `Position.metrics` keeps it."""
    return {name: np.ravel(variable.numpy()).tolist() for name, variable in unique_names(model.metrics_variables)}


def restore_metrics(model: Any, state: Mapping[str, list[float]]) -> None:
    """Gives the metrics the state that `metric_state` read; metrics it does not know begin at zero."""
    for name, variable in unique_names(model.metrics_variables):
        values = state.get(name)
        if values is not None and len(values) == int(np.prod(variable.shape)):
            variable.assign(np.reshape(values, variable.shape))
