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

from dike import checkpoints
from dike.exceptions import BadInputError
from dike.keras_variables import unique_names
from dike.reporting import reporter
from dike.roles.cluster import log
from dike.task import TaskSpec

_STATE_KEY = "state/.ATTRIBUTES/VARIABLE_VALUE"
_KEPT = 3


@dataclass
class Position:
    """Where a `fit` is.

    Attributes:
        epoch: the epoch that runs next or is running.
        batch: batches of that epoch that are done.
        step: batches done in all epochs.
        epochs: the `epochs` that the script asked for.
        stopped: whether a callback ended the training before the last epoch.
        history: what Keras' `History` has recorded: name -> one value for each epoch.
        history_epochs: numbers of those epochs.
        metrics: state of the metrics in the middle of an epoch: variable's name -> values.
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    epochs: int = 0
    stopped: bool = False
    history: dict[str, list[float]] = field(default_factory=dict)
    history_epochs: list[int] = field(default_factory=list)
    metrics: dict[str, list[float]] = field(default_factory=dict)

    def is_finished(self, epochs: int) -> bool:
        """Whether a script that asks for `epochs` has nothing left to train."""
        return self.epoch >= epochs or (self.stopped and self.epochs == epochs)


class FitCheckpoint:
    """Saves and restores one `fit` of a script.

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
        self._checkpoint = tf.train.Checkpoint(state=self._state, variables=dict(variables))
        self._manager = None
        if task.checkpoint_dir:
            checkpoints.claim_folder(task)
            folder = f"{task.checkpoint_dir.rstrip('/')}/fit-{number}"
            self._manager = tf.train.CheckpointManager(self._checkpoint, folder, max_to_keep=_KEPT)

    @property
    def is_due(self) -> bool:
        """Whether the last checkpoint is older than the job's interval."""
        return time.monotonic() - self._saved_s >= self._task.checkpoint_interval_s

    def save(self, position: Position) -> None:
        """Writes a checkpoint of the local variables."""
        if self._manager is None:
            return
        shapes = {name: variable.shape.as_list() for name, variable in self._variables.items()}
        self._state.assign(json.dumps({"position": dataclasses.asdict(position), "shapes": shapes}))
        path = self._manager.save(checkpoint_number=position.step)
        self._saved_s = time.monotonic()
        reporter().checkpoint(path, position.step)

    def restore(self) -> Position | None:
        """Restores the newest checkpoint; None where there is none.

        Raises:
            BadInputError: if the checkpoint is another model's.
        """
        path = self._manager.latest_checkpoint if self._manager is not None else None
        if path is None:
            return None
        state = json.loads(tf.train.load_checkpoint(path).get_tensor(_STATE_KEY))
        shapes = {name: variable.shape.as_list() for name, variable in self._variables.items()}
        if state["shapes"] != shapes:
            different = sorted(
                name for name in {*shapes, *state["shapes"]} if shapes.get(name) != state["shapes"].get(name)
            )
            raise BadInputError(
                f"Checkpoint '{path}' is of another model: variable '{different[0]}' differs; "
                "name another folder with --checkpoint-dir."
            )
        self._checkpoint.restore(path).assert_existing_objects_matched()
        position = Position(**state["position"])
        log(f"restored '{path}': epoch {position.epoch + 1}, batch {position.batch}.")
        return position


def metric_state(model: Any) -> dict[str, list[float]]:
    """The state of the model's metrics, as `Position.metrics` keeps it."""
    return {name: np.ravel(variable.numpy()).tolist() for name, variable in unique_names(model.metrics_variables)}


def restore_metrics(model: Any, state: Mapping[str, list[float]]) -> None:
    """Gives the metrics the state that `metric_state` read; metrics it does not know begin at zero."""
    for name, variable in unique_names(model.metrics_variables):
        values = state.get(name)
        if values is not None and len(values) == int(np.prod(variable.shape)):
            variable.assign(np.reshape(values, variable.shape))
