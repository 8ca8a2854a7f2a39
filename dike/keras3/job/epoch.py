"""One epoch: any free worker gets the next batch, a few ahead; results are applied in the order of the batches."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dike.keras3.fit_call import loss_of
from dike.keras3.job.batches import Batch, JobBatches
from dike.keras3.job.checkpoints import FitSaver
from dike.keras3.job.remote import ModelVariables
from dike.keras3.job.step import Step
from dike.process import termination
from dike.reporting import EpochLosses, reporter
from dike.roles.cluster import ServerCluster

_MAX_IN_FLIGHT_PER_WORKER = 3
"""Steps in flight per worker: enough that none waits, few enough that gradients stay fresh."""

_GROUP_SIZES = (2, 4, 8)
"""Numbers of steps that a worker may get in one call, if steps are short."""

_SHORT_STEP_S = 0.02
"""If a step ends more often than this, dispatching single steps takes most of the time."""

_MAX_GROUP_S = 0.2
"""Maximum duration of a group of steps, so that the end of an epoch does not wait for a single worker."""

_MEASURED_STEPS = 20
"""Number of steps of an epoch to measure the step time from."""

_POLL_INTERVAL_S = 0.5
_RETRY_INTERVAL_S = 0.1


class Epoch:
    """Trains one epoch of a `fit`, or the rest of it. Advances the saver's position."""

    def __init__(
        self,
        cluster: ServerCluster,
        model: Any,
        step: Step,
        variables: ModelVariables,
        saver: FitSaver,
        callbacks: Any,
        losses: EpochLosses,
    ) -> None:
        self._coordinator = cluster.coordinator
        self._workers = cluster.task.worker_count
        self._max_in_flight = _MAX_IN_FLIGHT_PER_WORKER * self._workers
        self._model = model
        self._step = step
        self._variables = variables
        self._saver = saver
        self._callbacks = callbacks
        self._position = saver.position
        self._sent: queue.SimpleQueue[tuple[list[Batch], Any] | None] = queue.SimpleQueue()
        self._done: queue.Queue[tuple[list[Batch], Any]] = queue.Queue()
        self._pending: list[Batch] = []
        self._out_of_order: dict[int, tuple[Batch, Any]] = {}
        self._next: int | None = None
        self._first_s = 0.0
        self._counted = 0
        self._has_batch_callback = any(_watches_batches(callback) for callback in callbacks.callbacks)
        self._is_over = threading.Event()
        self._in_flight = 0
        self._logs: dict[str, Any] = {}
        self._losses = losses

    def run(self, batches: JobBatches) -> dict[str, Any]:
        """Trains the remaining batches of the epoch; returns the last logs."""
        termination.enable_saving()
        position = self._position
        self._logs = dict(position.logs)
        if position.is_trained:
            self._saver.resume_epoch()
            return self._logs
        # Daemons: one may wait forever for a lost worker, and must not delay the end of the process.
        for _ in range(self._max_in_flight):
            threading.Thread(target=self._fetch_sent, name="dike-fetch", daemon=True).start()
        try:
            self._train(batches)
        finally:
            self._is_over.set()
            for _ in range(self._max_in_flight):
                self._sent.put(None)
        return self._logs

    def _train(self, batches: JobBatches) -> None:
        for batch in batches.epoch(self):
            if self._next is None:
                self._next = batch.index
            self._callbacks.on_train_batch_begin(batch.index)
            self._pending.append(batch)
            if len(self._pending) >= self._step.group_size:
                self._dispatch()
            while self._in_flight >= self._max_in_flight or not self._done.empty():
                self._collect()
            if batch.index + 1 == batches.per_epoch:
                self._drain()  # a dataset's on_epoch_end may change arrays that batches refer to
            if self._model.stop_training:
                break
        self._drain()
        self._losses.epoch_ended()
        self._coordinator.join()
        self._saver.epoch_trained(self._logs)
        if termination.requested:
            self._variables.pull()
            self._saver.save_if_terminating()

    def before_first_batch(self) -> None:
        self._saver.resume_epoch()

    def between_steps(self, batch: int) -> None:
        """Saves if a checkpoint is due, after all steps in flight, so that the position is exact."""
        if self._saver.is_due:
            self._drain()
            self._variables.pull()
            self._saver.save_within(batch, self._logs)

    def _dispatch(self) -> None:
        batches, self._pending = self._pending, []
        if len(batches) > 1 and len(batches) == self._step.group_size:
            tensors = [tensor for batch in batches for tensor in batch.tensors]
            self._schedule(self._step.multi_step(len(batches)), tensors, batches)
        else:  # one batch, or a group cut short by the end of an epoch or by a checkpoint
            for batch in batches:
                self._schedule(self._step.function, batch.tensors, [batch])

    def _schedule(self, function: Any, tensors: Sequence[Any], batches: list[Batch]) -> None:
        remote = self._coordinator.schedule(function, args=tuple(tensors))
        self._in_flight += 1
        self._sent.put((batches, remote))

    def _fetch_sent(self) -> None:
        """Runs in a thread."""
        while (sent := self._sent.get()) is not None:
            self._fetch(*sent)

    def _fetch(self, batches: list[Batch], remote: Any) -> None:
        """Waits for a result and queues it, or the error it ended with."""
        while not self._is_over.is_set():
            try:
                self._done.put((batches, remote.fetch()))
                return
            except tf.errors.OpError as error:
                if remote._get_error() is not None or isinstance(error, tf.errors.CancelledError):
                    self._done.put((batches, error))
                    return
                # The worker was lost before its result arrived: the coordinator gives the step to another worker.
                time.sleep(_RETRY_INTERVAL_S)
            except Exception as error:  # any error, which `_collect` raises
                self._done.put((batches, error))
                return

    def _collect(self) -> None:
        """Waits for the next finished step; applies it, and later ones that waited for it."""
        while True:
            try:
                batches, result = self._done.get(timeout=_POLL_INTERVAL_S)
                break
            except queue.Empty:
                self._coordinator.done()  # raises what ended the training, such as the loss of a ps
        self._in_flight -= 1
        if isinstance(result, BaseException):
            self._coordinator.join()  # raises the first error, which may have caused this one
            raise result
        for batch, own in zip(batches, result if len(batches) > 1 else [result], strict=True):
            self._out_of_order[batch.index] = batch, own
        # Workers finish steps in any order; metrics and callbacks get them in the order of the batches.
        while self._next is not None and self._next in self._out_of_order:
            self._apply(*self._out_of_order.pop(self._next))
            self._next += 1

    def _apply(self, batch: Batch, result: Any) -> None:
        """Updates the metrics by a step, once all earlier ones are done, and calls the callbacks."""
        self._logs = self._step.apply_result(result)
        self._position.batch += 1
        self._position.step += 1
        self._callbacks.on_train_batch_end(batch.index, self._logs)
        self._report(batch)
        self._choose_group_size()

    def _choose_group_size(self) -> None:
        """Measures the step time. Short steps are dispatched in groups, unless a callback acts on single batches."""
        now_s = time.monotonic()
        if not self._counted:
            self._first_s = now_s
        elif self._counted == _MEASURED_STEPS:
            interval_s = (now_s - self._first_s) / self._counted
            is_short = interval_s < _SHORT_STEP_S and self._step.can_repeat and not self._has_batch_callback
            fitting = [count for count in _GROUP_SIZES if count * interval_s * self._workers <= _MAX_GROUP_S]
            self._step.group_size = max(fitting, default=1) if is_short else 1
        self._counted += 1

    def _report(self, batch: Batch) -> None:
        loss = loss_of(self._logs)
        reporter().progress(
            self._position.step,
            batch.samples,
            loss=None if loss is None or np.ndim(loss) else self._losses.smoothed(float(loss), batch.index + 1),
            epoch=self._position.epoch + 1,
        )

    def _drain(self) -> None:
        self._dispatch()
        while self._in_flight:
            self._collect()


def _watches_batches(callback: Any) -> bool:
    """Returns whether a callback may act on single batches. Keras' own only read them, with two exceptions."""
    for name in ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end"):
        method = getattr(callback, name)
        own = getattr(method, "__func__", method)
        if own is not getattr(keras.callbacks.Callback, name) and not own.__module__.startswith("keras.src."):
            return True
    return isinstance(callback, keras.callbacks.TerminateOnNaN) or getattr(callback, "save_freq", "epoch") != "epoch"
