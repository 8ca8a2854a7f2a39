"""tf_keras `fit` on the chief: its own loop under a parameter server strategy; Dike makes the strategy and saves."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

from dike.exceptions import BadInputError, JobFailedError
from dike.interception import after_import
from dike.roles import coordinated
from dike.roles.cluster import Cluster, log
from dike.roles.tf_keras_saver import SavedFit
from dike.task import TaskSpec

_DEFAULT_BATCH_SIZE = 32
_scopes = contextlib.ExitStack()
"""Holds the strategy's scope: it ends when nobody refers to it."""


def install(task: TaskSpec) -> None:
    """Makes `fit` of tf_keras models distributed. Called when TensorFlow is imported."""
    coordinated.install(task, reports_steps=False)
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
        saver = SavedFit(cluster, self, next(numbers), arguments["steps_per_epoch"])
        if saver.restore():
            arguments["initial_epoch"] = saver.epoch
        saver.report_total(arguments["initial_epoch"], arguments["epochs"])
        if arguments["initial_epoch"] >= arguments["epochs"]:
            log("this fit has been trained before; its result is restored.")
        # What tf_keras asks when it begins, for its own BackupAndRestore: where to begin.
        self._maybe_load_initial_counters_from_ckpt = lambda _steps, first: (first, saver.batch)
        arguments["callbacks"] = [*(arguments["callbacks"] or ()), saver.callback()]
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
