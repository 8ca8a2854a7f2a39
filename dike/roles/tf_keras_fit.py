"""tf_keras `fit` on the chief: its own loop under a parameter server strategy; Dike makes the strategy and saves."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from dike import checkpoints
from dike.exceptions import BadInputError, JobFailedError
from dike.interception import after_import
from dike.reporting import reporter
from dike.roles import coordinated
from dike.roles.cluster import Cluster, log
from dike.roles.process import termination
from dike.task import TaskSpec

_DEFAULT_BATCH_SIZE = 32
_KEPT = 3
_AHEAD_PER_WORKER = 3
"""Steps handed out and not yet done, for each worker."""

_POLL_INTERVAL_S = 0.2
_scopes = contextlib.ExitStack()
"""Holds the strategy's scope: it ends when nobody refers to it."""


def install(task: TaskSpec) -> None:
    """Makes `fit` of tf_keras models distributed. Called when TensorFlow is imported."""
    coordinated.install(task)
    cluster = Cluster(task)

    def replace(training: Any) -> None:
        training.Model.fit = _distributed_fit(cluster, training.Model.fit)
        training.Model.evaluate = _local_evaluate(cluster, training.Model.evaluate)
        training.Model.predict = _local_predict(cluster, training.Model.predict)

    after_import("tf_keras.src.engine.training", replace)
    # tf_keras creates variables where the strategy in force at that moment says; so it has to be in force from now on.
    _scopes.enter_context(cluster.strategy.scope())


def _distributed_fit(cluster: Cluster, fit: Callable[..., Any]) -> Callable[..., Any]:
    numbers = itertools.count()

    @functools.wraps(fit)
    def distributed(self: Any, *args: Any, **kwargs: Any) -> Any:
        import tensorflow as tf

        arguments = _fit_arguments(fit, self, args, kwargs)
        saver = _SavedFit(cluster, self, next(numbers))
        restored = saver.restore()
        first = arguments["initial_epoch"] if restored is None else restored
        if first >= arguments["epochs"]:
            log("this fit has been trained before; its result is restored.")
        arguments["initial_epoch"] = first
        arguments["callbacks"] = [*(arguments["callbacks"] or ()), _callback(saver)]
        try:
            return saver.with_all_epochs(fit(self, **arguments))
        except (tf.errors.UnavailableError, tf.errors.AbortedError) as error:
            raise JobFailedError(
                "A parameter server of this job is gone and the model's variables with it; "
                "the job has to start again from its last checkpoint."
            ) from error

    return distributed


def _local_evaluate(cluster: Cluster, evaluate: Callable[..., Any]) -> Callable[..., Any]:
    """Evaluates on the chief: on the workers each would begin with the first sample, and count some of them twice."""

    @functools.wraps(evaluate)
    def local(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("_use_cached_eval_dataset", None)  # it was made for the workers
        distributed = self._distribution_strategy, self._cluster_coordinator, self.test_function
        self._distribution_strategy = self._cluster_coordinator = self.test_function = None
        try:
            with _outside_scope(cluster):
                return evaluate(self, *args, **kwargs)
        finally:
            self._distribution_strategy, self._cluster_coordinator, self.test_function = distributed

    return local


def _local_predict(cluster: Cluster, predict: Callable[..., Any]) -> Callable[..., Any]:
    """tf_keras predicts on the chief, but only outside of the strategy's scope."""

    @functools.wraps(predict)
    def local(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _outside_scope(cluster):
            return predict(self, *args, **kwargs)

    return local


@contextlib.contextmanager
def _outside_scope(cluster: Cluster) -> Iterator[None]:
    _scopes.close()
    try:
        yield
    finally:
        _scopes.enter_context(cluster.strategy.scope())


def _fit_arguments(fit: Callable[..., Any], model: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments for tf_keras: data as datasets, with their number of steps, which it needs on a cluster.

    Raises:
        BadInputError: for an argument that cannot be used.
    """
    signature = inspect.signature(fit)
    unknown = [name for name in kwargs if name not in signature.parameters]
    if unknown:
        raise BadInputError(f"Argument '{unknown[0]}' of Model.fit is not supported; remove it.")
    bound = signature.bind(model, *args, **kwargs)
    bound.apply_defaults()
    arguments = {name: value for name, value in bound.arguments.items() if name != "self"}
    for name in ("class_weight", "validation_split"):
        if arguments[name]:
            raise BadInputError(f"Argument '{name}' of Model.fit is not supported for tf_keras in a job; remove it.")
    data, steps = _dataset(arguments, "fit", "steps_per_epoch", training=True)
    arguments.update(x=data, y=None, sample_weight=None, batch_size=None, steps_per_epoch=steps)
    validation = arguments["validation_data"]
    if validation is not None:
        parts = validation if isinstance(validation, tuple | list) else (validation,)
        names = dict(zip(("x", "y", "sample_weight"), parts, strict=False))
        size = arguments["validation_batch_size"] or bound.arguments["batch_size"]
        given = {"y": None, "sample_weight": None, **names, "batch_size": size}
        given["validation_steps"] = arguments["validation_steps"]
        data, steps = _dataset(given, "fit", "validation_steps", training=False)
        arguments.update(validation_data=data, validation_steps=steps, validation_batch_size=None)
    arguments["verbose"] = _verbosity(arguments["verbose"])
    return arguments


def _dataset(arguments: dict[str, Any], method: str, steps_name: str, *, training: bool) -> tuple[Any, int]:
    """The data as a dataset of batches and the number of them that make an epoch."""
    import tensorflow as tf

    data, steps = arguments["x"], arguments[steps_name]
    if isinstance(data, tf.data.Dataset):
        steps = steps if steps is not None else int(data.cardinality())
        if steps < 0:
            raise BadInputError(f"Give '{steps_name}' to Model.{method}: the dataset does not know its length.")
        return (data.repeat() if training else data), steps
    if not hasattr(data, "shape"):
        raise BadInputError(
            f"Argument 'x' of Model.{method} must be an array or a tf.data.Dataset for tf_keras on a cluster, "
            f"not {type(data).__name__}."
        )
    parts = [part for part in (data, arguments["y"], arguments["sample_weight"]) if part is not None]
    size = arguments["batch_size"] or _DEFAULT_BATCH_SIZE
    count = int(data.shape[0])
    dataset = tf.data.Dataset.from_tensor_slices(tuple(parts) if len(parts) > 1 else (parts[0],))
    if training:
        dataset = dataset.shuffle(count) if arguments["shuffle"] else dataset
        dataset = dataset.repeat()
    return dataset.batch(size), steps if steps is not None else math.ceil(count / size)


def _verbosity(verbose: Any) -> Any:
    return 2 if verbose in (1, "auto") else verbose  # tf_keras refuses a progress bar on a cluster


class _SavedFit:
    """Saves and restores one `fit` of a script: after each epoch, and within one by the job's interval or on SIGTERM.

    An epoch that was interrupted is trained again from its first batch, with the weights it had reached.

    Args:
        cluster: the job's cluster.
        model: the tf_keras model.
        number: which call of `fit` in the script this is, from 0.
    """

    def __init__(self, cluster: Cluster, model: Any, number: int) -> None:
        import tensorflow as tf

        task = cluster.task
        self._cluster = cluster
        self._interval_s = task.checkpoint_interval_s
        self._saved_s = time.monotonic()
        self._scheduled: deque[Any] = deque()
        self._limit = _AHEAD_PER_WORKER * task.worker_count
        self._epoch = 0
        self._history: dict[str, list[float]] = {}
        self._history_epochs: list[int] = []
        self._state = tf.Variable("", dtype=tf.string, trainable=False)
        self._checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer, state=self._state)
        # The chief reads and writes; by default each ps would, on its own machine.
        self._options = tf.train.CheckpointOptions(experimental_io_device="/job:chief/replica:0/task:0/device:CPU:0")
        self._manager = None
        self.model = model
        if task.checkpoint_dir:
            checkpoints.claim_folder(task)
            folder = f"{task.checkpoint_dir.rstrip('/')}/fit-{number}"
            self._manager = tf.train.CheckpointManager(self._checkpoint, folder, max_to_keep=_KEPT)

    def restore(self) -> int | None:
        """Restores the newest checkpoint; returns the epoch to go on with, None where there is no checkpoint."""
        path = self._manager.latest_checkpoint if self._manager is not None else None
        if path is None:
            return None
        self._checkpoint.restore(path, options=self._options)
        state = json.loads(self._state.numpy())
        self._epoch, self._history, self._history_epochs = state["epoch"], state["history"], state["history_epochs"]
        log(f"restored '{path}'.")
        return self._epoch

    def with_all_epochs(self, history: Any) -> Any:
        """Gives the `History` of `fit` what was recorded before a restart."""
        history.history = {name: list(values) for name, values in self._history.items()}
        history.epoch = list(self._history_epochs)
        return history

    def epoch_begins(self, epoch: int) -> None:
        """The epoch of that number begins."""
        termination.can_save()
        self._epoch = epoch
        self._scheduled.clear()

    def batch_scheduled(self, result: Any) -> None:
        """Waits until few steps are under way, so that a save is never far off; saves when it is time.

        Args:
            result: the `RemoteValue` of the step just handed out.
        """
        self._scheduled.append(result)
        while len(self._scheduled) > self._limit:
            if self._scheduled[0]._status_available_event.wait(_POLL_INTERVAL_S):
                self._scheduled.popleft()
            else:
                self._cluster.coordinator.done()  # raises what ended the training, such as the loss of a ps
            self._save_if_due()

    def _save_if_due(self) -> None:
        if termination.requested or time.monotonic() - self._saved_s >= self._interval_s:
            self._save(int(self.model.optimizer.iterations.numpy()))

    def _save(self, step: int) -> None:
        if self._manager is not None:
            state = {"epoch": self._epoch, "history": self._history, "history_epochs": self._history_epochs}
            self._state.assign(json.dumps(state))
            path = self._manager.save(checkpoint_number=step, options=self._options)
            self._saved_s = time.monotonic()
            reporter().checkpoint(path, step)
        if termination.requested:
            termination.leave()

    def epoch_ended(self, epoch: int, logs: dict[str, Any] | None) -> None:
        """Saves after the epoch of that number."""
        step = int(self.model.optimizer.iterations.numpy())
        loss = (logs or {}).get("loss")
        reporter().progress(step, loss=None if loss is None else float(loss), epoch=epoch + 1)
        for name, value in (logs or {}).items():
            self._history.setdefault(name, []).append(float(value))
        self._history_epochs.append(epoch)
        self._epoch = epoch + 1
        self._save(step)


def _callback(saver: _SavedFit) -> Any:
    import tf_keras

    class Save(tf_keras.callbacks.Callback):
        """Tells the saver where the training is."""

        def __init__(self) -> None:
            super().__init__()
            self._supports_tf_logs = True  # a step's logs come as they are: not yet computed

        def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
            saver.epoch_begins(epoch)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            saver.batch_scheduled(logs)

        def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
            saver.epoch_ended(epoch, logs)

    return Save()
