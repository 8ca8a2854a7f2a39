"""Saves and restores the `fit` of a tf_keras model, and reports its steps."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dike import checkpoints
from dike.plain_values import LARGE_ARRAY_BYTES, CallbackStates, dump_groups, load_groups
from dike.process import termination
from dike.reporting import reporter
from dike.roles import fencing
from dike.roles.cluster import ServerCluster, log_restored, placed

_MAX_CHECKPOINTS = 3
_MAX_IN_FLIGHT_PER_WORKER = 3
"""Maximum number of scheduled, unfinished steps per worker."""

_POLL_INTERVAL_S = 0.2


class FitSaver:
    """Saves and restores one `fit` of a script: after each epoch, and within one by the job's interval or on SIGTERM.

    Attributes:
        epoch: current or next epoch.
        batch: finished batches of that epoch.
    """

    def __init__(self, cluster: ServerCluster, model: Any, number: int, per_epoch: int) -> None:
        import tensorflow as tf

        task = cluster.task
        self._cluster = cluster
        self._interval_s = task.checkpoint_interval_s
        self._saved_s = time.monotonic()
        self._scheduled: deque[Any] = deque()
        self._limit = _MAX_IN_FLIGHT_PER_WORKER * task.worker_count
        self._per_epoch = per_epoch
        self._history: dict[str, list[float]] = {}
        self._history_epochs: list[int] = []
        self._state = tf.Variable("", dtype=tf.string, trainable=False)
        self._arrays = tf.Variable(b"", dtype=tf.string, trainable=False)
        self._callbacks = CallbackStates(())
        self._callbacks_before: list[tuple[str, dict[str, Any]]] = []
        self._checkpoint = tf.train.Checkpoint(
            model=model, optimizer=model.optimizer, state=self._state, arrays=self._arrays
        )
        # The chief reads and writes; by default, each ps would, on its own machine.
        self._options = tf.train.CheckpointOptions(experimental_io_device="/job:chief/replica:0/task:0/device:CPU:0")
        self._manager = None
        self._model = model
        self._done = 0
        self._placed = False
        self._epochs = 0
        self.epoch = self.batch = 0
        if task.checkpoint_dir:
            fencing.take_ownership(task)
            folder = f"{task.checkpoint_dir.rstrip('/')}/fit-{number}"
            self._manager = tf.train.CheckpointManager(self._checkpoint, folder, max_to_keep=_MAX_CHECKPOINTS)

    @property
    def _step(self) -> int:
        return int(self._model.optimizer.iterations.numpy())

    def restore(self) -> bool:
        """Restores the newest checkpoint; returns whether there is one."""
        path = checkpoints.newest_intact(self._manager.directory) if self._manager is not None else None
        if path is None:
            return False
        self._checkpoint.restore(path, options=self._options)
        state = json.loads(self._state.numpy())
        self.epoch, self.batch = state["epoch"], state["batch"]
        self._history, self._history_epochs = state["history"], state["history_epochs"]
        self._callbacks_before = state["callbacks"]
        log_restored(path, self.epoch, self.batch)
        reporter().resumed(self._step)
        return True

    def report_total(self, first: int, epochs: int) -> None:
        self._epochs = epochs
        reporter().total(self._step + max(0, epochs - first) * self._per_epoch - self.batch)

    def with_all_epochs(self, history: Any) -> Any:
        """Adds the epochs before a restart to the `History` of `fit`."""
        history.history = {name: list(values) for name, values in self._history.items()}
        history.epoch = list(self._history_epochs)
        return history

    def begin_training(self, callbacks: Sequence[Any]) -> None:
        """Restores the state of the callbacks. Called after `on_train_begin` of all of them."""
        self._callbacks = CallbackStates(callbacks)
        self._callbacks.begin()
        self._restore_callbacks()

    def _restore_callbacks(self) -> None:
        arrays = load_groups(self._arrays.numpy())["arrays"] if self._callbacks_before else []
        self._callbacks.restore(self._callbacks_before, arrays)

    def begin_epoch(self, epoch: int) -> None:
        if not self._placed:
            self._placed = True
            if self.batch:
                # `on_epoch_begin` was called twice for this epoch.
                self._restore_callbacks()
            reporter().placement(placed)
        termination.enable_saving()
        self.epoch = epoch
        self._done = self._step
        self._scheduled.clear()

    def before_batch(self, batch: int) -> None:
        """Waits for all other steps before the last one of an epoch.

        `fit` reports the last step's logs: the metrics, whose state the workers sum up on the ps, are complete only
        then.
        """
        per_execution = self._model._steps_per_execution
        if batch + (1 if per_execution is None else int(per_execution.numpy())) >= self._per_epoch:
            self._wait(0)

    def after_scheduling(self, batch: int, result: Any) -> None:
        """Limits the steps in flight, so that a save never waits long; saves if a checkpoint is due."""
        self._scheduled.append(result)
        self._wait(self._limit)
        is_due = time.monotonic() - self._saved_s >= self._interval_s and batch + 1 < self._per_epoch
        if termination.requested or is_due:
            self._wait(0)
            # tf_keras cannot begin with an epoch that has no batch left.
            self.batch = min(batch + 1, self._per_epoch - 1)
            self._save()

    def _wait(self, limit: int) -> None:
        """Waits until at most `limit` steps are in flight."""
        while len(self._scheduled) > limit:
            if self._scheduled[0]._status_available_event.wait(_POLL_INTERVAL_S):
                logs = self._scheduled.popleft().get()
                self._done += 1
                loss = logs.get("loss") if isinstance(logs, Mapping) else None
                mean = None if loss is None else float(np.mean(loss))
                reporter().progress(self._done, loss=mean, epoch=self.epoch + 1)
            else:
                self._cluster.coordinator.done()  # raises what ended the training, such as the loss of a ps

    def _save(self, *, is_last: bool = False) -> None:
        step = self._step
        if self._manager is not None:
            position = {"epoch": self.epoch, "batch": self.batch}
            arrays: list[Any] = []
            kept = self._callbacks.save(arrays, LARGE_ARRAY_BYTES)  # sent through a ps, as text
            history = {"history": self._history, "history_epochs": self._history_epochs}
            self._state.assign(json.dumps({**position, **history, "callbacks": kept}))
            self._arrays.assign(dump_groups({"arrays": arrays}))
            fencing.check(self._cluster.task)
            self._saved_s = time.monotonic()
            checkpoints.write_checkpoint(lambda: self._write(step), is_last=is_last)
        if termination.requested:
            termination.exit()

    def _write(self, step: int) -> None:
        assert self._manager is not None
        checkpoints.forget_checksums(f"{self._manager.directory}/ckpt-{step}")
        path = self._manager.save(checkpoint_number=step, options=self._options)
        checkpoints.record_checksums(path)
        self._saved_s = time.monotonic()
        reporter().checkpoint(path, step)

    def end_epoch(self, epoch: int, logs: dict[str, Any] | None) -> None:
        loss = (logs or {}).get("loss")
        reporter().progress(self._step, loss=None if loss is None else float(loss), epoch=epoch + 1)
        for name, value in (logs or {}).items():
            self._history.setdefault(name, []).append(float(value))
        self._history_epochs.append(epoch)
        self.epoch, self.batch = epoch + 1, 0
        self._save(is_last=self.epoch >= self._epochs)

    def callback(self, others: Sequence[Any]) -> Any:
        """Returns a callback that drives this object. It must be called after all others, the script's."""
        import tf_keras

        if self._history_epochs or self.batch:
            for other in others:
                if isinstance(other, tf_keras.callbacks.CSVLogger):
                    other.append = True

        saver = self

        class Save(tf_keras.callbacks.Callback):
            def __init__(self) -> None:
                super().__init__()
                self._supports_tf_logs = True  # passes a step's logs as tensors, not yet computed

            def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
                # TensorBoard's trace does not survive the process.
                board = tf_keras.callbacks.TensorBoard
                saver.begin_training([other for other in others if not isinstance(other, board)])

            def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
                saver.begin_epoch(epoch)

            def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
                saver.before_batch(batch)

            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                saver.after_scheduling(batch, logs)

            def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
                saver.end_epoch(epoch, logs)

        return Save()
