"""tf_keras `fit` on the chief: its own loop under a parameter server strategy, which Dike creates; Dike also saves."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

from dike.exceptions import BadInputError, JobFailedError
from dike.interception import after_import
from dike.keras3.fit_call import checked_arguments_of
from dike.roles import cluster as clusters
from dike.roles.cluster import ServerCluster, log
from dike.task import TaskSpec
from dike.tf_keras.saver import FitSaver

_DEFAULT_BATCH_SIZE = 32
_scopes = contextlib.ExitStack()
"""Keeps a reference to the strategy's scope, which would end without one."""


def install(task: TaskSpec) -> None:
    """Makes `fit` of tf_keras models distributed. Called when TensorFlow is imported."""
    clusters.install(task, reports_steps=False)
    cluster = ServerCluster(task)

    def replace(training: Any) -> None:
        training.Model.fit = _distributed_fit(cluster, training.Model.fit)
        training.Model.evaluate = _local_evaluate(cluster, training.Model.evaluate)
        training.Model.predict = _local_predict(cluster, training.Model.predict)
        own_result = training.Model._validate_and_get_metrics_result
        training.Model._validate_and_get_metrics_result = _result_of_the_last_step(own_result)

    after_import("tf_keras.src.engine.training", replace)
    # tf_keras places variables by the strategy that is active when they are created, so it is active from now on.
    _scopes.enter_context(cluster.strategy.scope())


def _distributed_fit(cluster: ServerCluster, fit: Callable[..., Any]) -> Callable[..., Any]:
    numbers = itertools.count()

    @functools.wraps(fit)
    def distributed(self: Any, *args: Any, **kwargs: Any) -> Any:
        import tensorflow as tf

        arguments = _fit_arguments(fit, self, args, kwargs)
        saver = FitSaver(cluster, self, next(numbers), arguments["steps_per_epoch"])
        if saver.restore():
            arguments["initial_epoch"] = saver.epoch
        saver.report_total(arguments["initial_epoch"], arguments["epochs"])
        if arguments["initial_epoch"] >= arguments["epochs"]:
            log("this fit has been trained before; its result is restored.")
        # tf_keras calls this for its own BackupAndRestore, to get the initial epoch and batch.
        self._maybe_load_initial_counters_from_ckpt = lambda _steps, first: (first, saver.batch)
        own = tf.nest.flatten(arguments["callbacks"] or [])
        arguments["callbacks"] = [*own, saver.callback(own)]
        try:
            return saver.with_all_epochs(fit(self, **arguments))
        except (tf.errors.UnavailableError, tf.errors.AbortedError) as error:
            raise JobFailedError(
                "A parameter server of this job is gone and the model's variables with it; "
                "the job has to start again from its last checkpoint."
            ) from error
        finally:
            del self._maybe_load_initial_counters_from_ckpt

    return distributed


def _local_evaluate(cluster: ServerCluster, evaluate: Callable[..., Any]) -> Callable[..., Any]:
    """Evaluates on the chief: every worker would start with the first sample, and some samples would count twice."""

    @functools.wraps(evaluate)
    def local(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("_use_cached_eval_dataset", None)  # was made for the workers
        distributed = self._distribution_strategy, self._cluster_coordinator, self.test_function
        self._distribution_strategy = self._cluster_coordinator = self.test_function = None
        try:
            with _outside_scope(cluster):
                return evaluate(self, *args, **kwargs)
        finally:
            self._distribution_strategy, self._cluster_coordinator, self.test_function = distributed

    return local


def _local_predict(cluster: ServerCluster, predict: Callable[..., Any]) -> Callable[..., Any]:
    """Predicts outside of the strategy's scope: tf_keras then predicts on the chief."""

    @functools.wraps(predict)
    def local(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _outside_scope(cluster):
            return predict(self, *args, **kwargs)

    return local


def _result_of_the_last_step(own: Callable[..., Any]) -> Callable[..., Any]:
    """Suppresses the warning that the last step's logs may be wrong on a cluster: here it runs after all others."""

    @functools.wraps(own)
    def result(self: Any, logs: Any) -> Any:
        coordinator, self._cluster_coordinator = self._cluster_coordinator, None
        try:
            return own(self, logs)
        finally:
            self._cluster_coordinator = coordinator

    return result


@contextlib.contextmanager
def _outside_scope(cluster: ServerCluster) -> Iterator[None]:
    _scopes.close()
    try:
        yield
    finally:
        _scopes.enter_context(cluster.strategy.scope())


def _fit_arguments(fit: Callable[..., Any], model: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Converts the arguments for tf_keras: data as datasets, with their number of steps, which it needs on a cluster.

    Raises:
        BadInputError: for an argument that is not supported.
    """
    arguments = checked_arguments_of(fit, model, args, kwargs)
    batch_size = arguments["batch_size"]
    for name in ("class_weight", "validation_split"):
        if arguments[name]:
            raise BadInputError(f"Argument '{name}' of Model.fit is not supported for tf_keras in a job; remove it.")
    data, steps = _dataset(arguments, "fit", "steps_per_epoch", training=True)
    arguments.update(x=data, y=None, sample_weight=None, batch_size=None, steps_per_epoch=steps)
    validation = arguments["validation_data"]
    if validation is not None:
        parts = validation if isinstance(validation, tuple | list) else (validation,)
        names = dict(zip(("x", "y", "sample_weight"), parts, strict=False))
        size = arguments["validation_batch_size"] or batch_size
        given = {"y": None, "sample_weight": None, **names, "batch_size": size}
        given["validation_steps"] = arguments["validation_steps"]
        data, steps = _dataset(given, "fit", "validation_steps", training=False)
        arguments.update(validation_data=data, validation_steps=steps, validation_batch_size=None)
    arguments["verbose"] = _verbosity(arguments["verbose"])
    return arguments


def _dataset(arguments: dict[str, Any], method: str, steps_name: str, *, training: bool) -> tuple[Any, int]:
    """Returns the data as a dataset of batches, and the number of batches per epoch."""
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
    if training and arguments["shuffle"]:
        dataset = dataset.shuffle(count)
    dataset = dataset.batch(size)
    # Repeated after batching, so that each epoch ends with its own smaller batch.
    return dataset.repeat() if training else dataset, steps if steps is not None else math.ceil(count / size)


def _verbosity(verbose: Any) -> Any:
    return 2 if verbose in (1, "auto") else verbose  # tf_keras rejects a progress bar on a cluster
