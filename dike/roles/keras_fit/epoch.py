"""One epoch: batches go to whichever worker is free, a few ahead; results come back in the order they are ready."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import tensorflow as tf

from dike.reporting import reporter
from dike.roles.cluster import Cluster
from dike.roles.keras_fit.batches import Batch, Batches
from dike.roles.keras_fit.remote import ModelVariables
from dike.roles.keras_fit.saver import FitSaver
from dike.roles.keras_fit.step import Step
from dike.roles.process import termination

_AHEAD_PER_WORKER = 3
"""Steps handed out and not yet done, for each worker: enough that none waits, few enough that gradients stay fresh."""

_POLL_INTERVAL_S = 0.5
_RETRY_INTERVAL_S = 0.1


class Epoch:
    """Trains one epoch of a `fit`, or the rest of it.

    Args:
        cluster: the job's cluster.
        model: the Keras model, whose variables are on the ps.
        step: its training step.
        variables: its variables.
        saver: saves the fit; its position is brought forward here.
        callbacks: Keras' callbacks.
    """

    def __init__(
        self,
        cluster: Cluster,
        model: Any,
        step: Step,
        variables: ModelVariables,
        saver: FitSaver,
        callbacks: Any,
    ) -> None:
        self._coordinator = cluster.coordinator
        self._limit = _AHEAD_PER_WORKER * cluster.task.worker_count
        self._model = model
        self._step = step
        self._variables = variables
        self._saver = saver
        self._callbacks = callbacks
        self._position = saver.position
        self._sent: queue.SimpleQueue[tuple[Batch, Any] | None] = queue.SimpleQueue()
        self._done: queue.Queue[tuple[Batch, Any]] = queue.Queue()
        self._over = threading.Event()
        self._under_way = 0
        self._logs: dict[str, Any] = {}
        self._reported_s = time.monotonic()
        self._samples = 0

    def run(self, batches: Batches) -> dict[str, Any]:
        """Trains the batches that are left of the epoch; returns the last logs."""
        termination.can_save()
        position = self._position
        self._logs = dict(position.logs)
        if position.is_trained:
            self._saver.reenter()
            return self._logs
        self._step.begin_epoch(position.log_sums, position.samples)
        # Daemons: one may wait for ever for a worker that is gone, and must not hold up the end of the process.
        for _ in range(self._limit):
            threading.Thread(target=self._fetch_sent, name="dike-fetch", daemon=True).start()
        try:
            self._train(batches)
        finally:
            self._over.set()
            for _ in range(self._limit):
                self._sent.put(None)
        return self._logs

    def _train(self, batches: Batches) -> None:
        for batch in batches.epoch(self):
            self._callbacks.on_train_batch_begin(batch.index)
            remote = self._coordinator.schedule(self._step.function, args=batch.tensors)
            self._under_way += 1
            self._sent.put((batch, remote))
            while self._under_way >= self._limit or not self._done.empty():
                self._take()
            if batch.index + 1 == batches.per_epoch:
                self._drain()  # data that is told of the epoch's end may change what batches refer to
            if self._model.stop_training:
                break
        self._drain()
        self._coordinator.join()
        self._saver.epoch_trained(self._logs)
        if termination.requested:
            self._variables.pull()
            self._saver.save_if_asked()

    def entered(self) -> None:
        """See `Watcher`."""
        self._saver.reenter()

    def between_steps(self, batch: int) -> None:
        """See `Watcher`. Saves here, so that the position is exact."""
        if self._saver.is_due:
            self._drain()
            self._variables.pull()
            self._position.log_sums, self._position.samples = self._step.log_sums, self._step.samples
            self._saver.save_within(batch, self._logs)

    def _fetch_sent(self) -> None:
        """Waits for results, one after the other; runs in a thread."""
        while (sent := self._sent.get()) is not None:
            self._fetch(*sent)

    def _fetch(self, batch: Batch, remote: Any) -> None:
        """Waits for a step's result and hands it on, or the error it ended with."""
        while not self._over.is_set():
            try:
                self._done.put((batch, remote.fetch()))
                return
            except tf.errors.OpError as error:
                if remote._get_error() is not None or isinstance(error, tf.errors.CancelledError):
                    self._done.put((batch, error))
                    return
                # The worker went away before its result was here: the coordinator gives the step to another.
                time.sleep(_RETRY_INTERVAL_S)
            except Exception as error:  # whatever it is, `_take` waits for it and raises it
                self._done.put((batch, error))
                return

    def _take(self) -> None:
        """Waits for the next step that is done and tells the callbacks."""
        while True:
            try:
                batch, result = self._done.get(timeout=_POLL_INTERVAL_S)
                break
            except queue.Empty:
                self._coordinator.done()  # raises what ended the training, such as the loss of a ps
        self._under_way -= 1
        if isinstance(result, BaseException):
            self._coordinator.join()  # raises the first error, of which this one may only be a consequence
            raise result
        self._logs = self._step.add(result, batch.samples)
        # Steps end in any order; callbacks count those that are done.
        index = self._position.batch
        self._position.batch += 1
        self._position.step += 1
        self._callbacks.on_train_batch_end(index, self._logs)
        self._report(batch)

    def _report(self, batch: Batch) -> None:
        self._samples += batch.samples
        now_s = time.monotonic()
        loss = self._logs.get("loss")
        elapsed_s = now_s - self._reported_s
        reporter().progress(
            self._position.step,
            loss=float(loss) if loss is not None else None,
            epoch=self._position.epoch + 1,
            samples_per_s=self._samples / elapsed_s if elapsed_s > 0 else None,
        )
        if elapsed_s > 1.0:
            self._reported_s, self._samples = now_s, 0

    def _drain(self) -> None:
        while self._under_way:
            self._take()
