"""`SyncReplicasOptimizer` with a fixed number of gradients per step for any number of workers."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import tensorflow as tf
from tensorflow.python.training import sync_replicas_optimizer

from dike.graphs import ancestors
from dike.task import TaskSpec
from dike.v1 import training

_optimizers: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


class CloseTokens(tf.compat.v1.train.SessionRunHook):
    """Ends the other workers when this one ends; they would wait forever for a gradient or a token of it.

    Closing the queue of tokens ends their last step with `OutOfRangeError`, which a monitored session treats as the
    end.
    """

    def begin(self) -> None:
        """Builds the ops that close the queues, before the graph is finalised."""
        optimizers = _optimizers.get(tf.compat.v1.get_default_graph(), [])
        self._close = [
            optimizer._sync_token_queue.close(cancel_pending_enqueues=True)
            for optimizer in optimizers
            if optimizer._sync_token_queue is not None
        ]

    def end(self, session: Any) -> None:
        if self._close:
            session.run(self._close)


def _hide_closed_queue_errors() -> None:
    """Hides the error with which the thread that hands out tokens ends when the queue is closed."""
    show = threading.excepthook

    def show_others(arguments: threading.ExceptHookArgs) -> None:
        thread = arguments.thread
        closed = issubclass(arguments.exc_type, tf.errors.CancelledError | tf.errors.OutOfRangeError)
        if not (closed and thread is not None and thread.name.startswith("QueueRunnerThread-sync_token_q")):
            show(arguments)

    threading.excepthook = show_others


def _note_arrival(update: Any) -> None:
    """Records the time when this worker's gradients have all arrived; the rest of the step is waiting."""
    op = update if isinstance(update, tf.Operation) else update.op
    given = [part for part in ancestors([op]) if "AccumulatorApplyGradient" in part.type]
    with tf.control_dependencies(given):
        training.of(op.graph).arrivals[op] = tf.timestamp()


def install(task: TaskSpec) -> None:
    """Sets replicas, workers and chief of the script's optimizers to the job's."""
    _hide_closed_queue_errors()
    base = sync_replicas_optimizer.SyncReplicasOptimizer
    replicas = task.replicas or task.worker_count
    initialise, apply_gradients, make_hook = base.__init__, base.apply_gradients, base.make_session_run_hook

    def own_initialise(self: Any, opt: Any, *_counts: Any, **kwargs: Any) -> None:
        options = {
            key: value for key, value in kwargs.items() if key not in ("replicas_to_aggregate", "total_num_replicas")
        }
        initialise(self, opt, replicas_to_aggregate=replicas, total_num_replicas=task.worker_count, **options)

    def own_apply_gradients(self: Any, *args: Any, **kwargs: Any) -> Any:
        update = apply_gradients(self, *args, **kwargs)
        _note_arrival(update)
        _optimizers.setdefault(tf.compat.v1.get_default_graph(), []).append(self)
        return update

    def own_hook(self: Any, is_chief: bool = task.is_chief, num_tokens: int = -1) -> Any:
        # Each worker sends its first gradient without a token. TensorFlow's default lets each send one more, which
        # arrives too late or enlarges the first step's batch.
        return make_hook(self, is_chief=task.is_chief, num_tokens=max(num_tokens, replicas - task.worker_count, 0))

    base.__init__ = own_initialise
    base.apply_gradients = own_apply_gradients
    base.make_session_run_hook = own_hook
