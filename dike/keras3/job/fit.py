"""`Model.fit` of Keras 3 on a cluster: Keras' loop, with steps that the workers compute."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf
from keras.src.trainers.data_adapters import array_slicing, data_adapter_utils

from dike.exceptions import JobFailedError
from dike.keras3.callbacks import append_logs
from dike.keras3.data import Batches as KerasBatches
from dike.keras3.fit_call import checked_arguments_of
from dike.keras3.job.batches import JobBatches
from dike.keras3.job.checkpoints import (
    FitCheckpoint,
    FitSaver,
    InterruptibleValidation,
    Position,
    plain,
    restore_metrics,
)
from dike.keras3.job.epoch import Epoch
from dike.keras3.job.remote import ModelVariables, RemoteVariables
from dike.keras3.job.step import Step
from dike.keras3.model import check_distributable, named_variables, optimizers_of
from dike.reporting import EpochLosses, reporter
from dike.roles import planned_model
from dike.roles.cluster import ServerCluster, log


def distributed(cluster: ServerCluster, own_fit: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a `fit` method that trains on `cluster` and takes the arguments of Keras' own."""
    script = ScriptFits()

    @functools.cache
    def remote() -> RemoteVariables:
        return RemoteVariables(cluster.task, cluster.strategy)

    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = checked_arguments_of(own_fit, self, args, kwargs)
        try:
            return JobFit(cluster, remote(), self, arguments, script).run()
        except (tf.errors.UnavailableError, tf.errors.AbortedError) as error:
            # The coordinator handles lost workers, so this is a lost ps.
            raise JobFailedError(
                "A parameter server of this job is gone and the model's variables with it; "
                f"the job has to start again from its last checkpoint ({_first_line(error)})."
            ) from error

    return fit


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__


@dataclass
class ScriptFits:
    """Number of calls of `fit` in a script, and batches trained by those that have returned."""

    count: int = 0
    steps: int = 0


class JobFit:
    """One call of `fit`. `remote` has the ps variables of all models of the script."""

    def __init__(
        self, cluster: ServerCluster, remote: RemoteVariables, model: Any, arguments: dict[str, Any], script: ScriptFits
    ) -> None:
        self._cluster = cluster
        self._remote = remote
        self._model = model
        self._arguments = arguments
        self._script = script
        self._number = script.count
        self._total: int | None = None
        script.count += 1

    def run(self) -> Any:
        model, arguments = self._model, self._arguments
        model._assert_compile_called("fit")
        self._refuse()
        model._eval_epoch_iterator = None
        data, validation = self._split()
        batches = JobBatches(
            **data,
            batch_size=arguments["batch_size"],
            steps_per_epoch=arguments["steps_per_epoch"],
            shuffle=arguments["shuffle"],
            class_weight=arguments["class_weight"],
        )
        optimizers = self._build(batches)
        if self._number == 0:
            planned_model.check(self._cluster.task, lambda: named_variables(model))
        variables = self._remote.place(model, optimizers)
        reporter().placement(variables.devices)
        checkpoint = FitCheckpoint(self._cluster.task, self._number, variables.local)
        epochs = arguments["epochs"]
        saved = checkpoint.read()
        interruptible = InterruptibleValidation()
        callbacks = self._callbacks(batches, interruptible)
        position = Position(arguments["initial_epoch"], step=self._script.steps) if saved is None else saved.position
        saver = FitSaver(model, checkpoint, saved, position, batches, callbacks)
        if position.is_finished(epochs) and saved is not None:
            log("this fit has been trained before; its result is restored.")
            saver.restore_finished()
            _set_history(callbacks, position)
            self._script.steps = position.step
            return model.history
        position.epochs, position.stopped = epochs, False
        if saved is not None:
            append_logs(callbacks)
        step = Step(model, optimizers, self._cluster.strategy, batches.pack, batches.signature)
        model.stop_training = False
        callbacks.on_train_begin()
        _set_history(callbacks, position)
        saver.begin()
        interruptible.saver = saver
        epoch_logs: dict[str, Any] = {}
        losses = EpochLosses()
        for number in range(position.epoch, epochs):
            self._report_total(position, batches)
            model.reset_metrics()
            restore_metrics(model, position.metrics)
            callbacks.on_epoch_begin(number)
            with variables.on_ps():
                if step.function is None:
                    self._trace(step, variables)
                logs = Epoch(self._cluster, model, step, variables, saver, callbacks, losses).run(batches)
            epoch_logs = dict(model._get_metrics_result_or_logs(logs))
            if validation is not None and model._should_eval(number, arguments["validation_freq"]):
                epoch_logs.update(self._validate(validation, callbacks, position))
            callbacks.on_epoch_end(number, epoch_logs)
            self._end_epoch(position)
            if model.stop_training or number + 1 == epochs:
                break
            saver.save()
        for optimizer in optimizers:
            optimizer.finalize_variable_values(model.trainable_weights)
        model._eval_epoch_iterator = None
        callbacks.on_train_end(logs=epoch_logs)
        position.stopped = bool(model.stop_training)
        self._script.steps = position.step
        # Callbacks may have replaced weights, and averaged weights are final only now.
        saver.save(is_last=True)
        checkpoint.write_model(model, position.step)
        return model.history

    def _trace(self, step: Step, variables: ModelVariables) -> None:
        """Traces the step; logs the variables whose updates by several workers cannot be merged."""
        shared = step.trace(lambda states: variables.add([self._remote.place_metric(state) for state in states]))
        if shared and self._cluster.task.worker_count > 1:
            names = ", ".join(f"'{name}'" for name in shared)
            log(
                "variables that train_step updates within tf.cond, a loop or its own tf.function, trains with, or "
                f"stores outside of the model cannot be merged: workers may overwrite each other's updates of {names}."
            )

    def _report_total(self, position: Position, batches: JobBatches) -> None:
        if batches.per_epoch is not None:
            total = position.last_step(batches.per_epoch)
            if total != self._total:
                self._total = total
                reporter().total(total)

    def _refuse(self) -> None:
        model = self._model
        check_distributable(model)
        if model.steps_per_execution != 1:
            log("compile(steps_per_execution=...) is ignored: a worker gets one step at a time.")
            model.steps_per_execution = 1

    def _split(self) -> tuple[dict[str, Any], tuple[Any, Any, Any] | None]:
        arguments = self._arguments
        x, y, weight = arguments["x"], arguments["y"], arguments["sample_weight"]
        validation = arguments["validation_data"]
        if arguments["validation_split"] and validation is None:
            (x, y, weight), validation = array_slicing.train_validation_split(
                (x, y, weight), validation_split=arguments["validation_split"]
            )
        unpacked = data_adapter_utils.unpack_x_y_sample_weight(validation) if validation is not None else None
        return {"x": x, "y": y, "sample_weight": weight}, unpacked

    def _build(self, batches: JobBatches) -> list[Any]:
        """Creates all variables of the model, its metrics and its optimizers; returns the optimizers."""
        model = self._model
        if type(model).train_step is keras.Model.train_step:
            model._symbolic_build(data_batch=batches.first())
        else:
            # Such a model may lack a call(), and only its step knows which variables each optimizer trains.
            tf.function(
                lambda *tensors: model.train_step(batches.pack(tensors)),
                input_signature=list(batches.signature),
                autograph=False,
            ).get_concrete_function()
        # An optimizer that the step does not use, such as compile()'s default, has nothing to train.
        return [optimizer for optimizer in optimizers_of(model) if optimizer.built]

    def _callbacks(self, batches: JobBatches, own: keras.callbacks.Callback) -> Any:
        given = self._arguments["callbacks"]
        if isinstance(given, keras.callbacks.CallbackList):
            return given
        return keras.callbacks.CallbackList(
            [*_as_list(given), own],
            add_history=True,
            add_progbar=self._arguments["verbose"] != 0,
            verbose=self._arguments["verbose"],
            epochs=self._arguments["epochs"],
            steps=batches.per_epoch,
            model=self._model,
        )

    def _validate(self, validation: tuple[Any, Any, Any], callbacks: Any, position: Position) -> dict[str, Any]:
        x, y, weight = validation
        model, arguments = self._model, self._arguments
        data = {
            "x": x,
            "y": y,
            "sample_weight": weight,
            "batch_size": arguments["validation_batch_size"] or arguments["batch_size"],
        }
        if model._eval_epoch_iterator is None:
            # As in Keras: shuffled data have another order in each epoch.
            model._eval_epoch_iterator = KerasBatches(
                **data,
                distribute_strategy=model.distribute_strategy,
                steps_per_execution=model.steps_per_execution,
                steps_per_epoch=arguments["validation_steps"],
                shuffle=False,
            )
            model._eval_epoch_iterator.start_counting(position.evaluations)
        logs = model.evaluate(
            **data,
            steps=arguments["validation_steps"],
            callbacks=callbacks,
            return_dict=True,
            _use_cached_eval_dataset=True,
        )
        position.evaluations = model._eval_epoch_iterator.made
        return {f"val_{name}": value for name, value in logs.items()}

    def _end_epoch(self, position: Position) -> None:
        position.end_epoch()
        position.stopped = bool(self._model.stop_training)
        history = self._model.history
        position.history = {name: plain(values) for name, values in history.history.items()}
        position.history_epochs = list(history.epoch)


def _as_list(callbacks: Any) -> list[Any]:
    return list(keras.tree.flatten(callbacks)) if callbacks else []


def _set_history(callbacks: Any, position: Position) -> None:
    history = callbacks._history
    history.history = {name: list(values) for name, values in position.history.items()}
    history.epoch = list(position.history_epochs)
    callbacks.model.history = history
