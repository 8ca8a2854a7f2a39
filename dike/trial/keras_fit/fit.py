"""One `fit` of a trial: Keras' own loop, observed, saved between two steps and brought to where it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from keras.src.utils.python_utils import pythonify_logs

from dike.trial import randomness
from dike.trial.keras_fit import checkpoints, variables
from dike.trial.keras_fit.batches import Batches, handing_to
from dike.trial.keras_fit.callbacks import TrialCallbacks, settle
from dike.trial.keras_fit.checkpoints import FitCheckpoint, FitState
from dike.trial.keras_fit.plain_values import Attributes
from dike.trial.keras_fit.script import KerasScript
from dike.trial.keras_reports import figures, loss_of, validates


class Fit:
    """One call of `fit`.

    Args:
        script: the script it is in.
        model: the Keras model.
        arguments: all arguments of `fit`.
    """

    def __init__(self, script: KerasScript, model: Any, arguments: dict[str, Any]) -> None:
        self._script = script
        self._runtime = script.runtime
        self._reports = script.reports
        self._model = model
        self._arguments = arguments
        self._number, self._saved = script.next_fit()
        self._callbacks = TrialCallbacks(arguments, model, self, appends=self._saved is not None)
        self._batches: Batches | None = None
        self._evaluations: list[Batches] = []
        self._attributes: list[Attributes] = []
        self._steps_before = self._reports.step
        self._epoch = arguments["initial_epoch"]
        self._logs: Any = {}
        self._is_reentering = self._saved is not None and self._saved.state.batch > 0
        self._has_stepped = False

    @property
    def is_skipped(self) -> bool:
        """See `Listener`."""
        return self._saved is not None and self._saved.state.is_finished

    @property
    def batches_per_epoch(self) -> int | None:
        """See `Listener`."""
        return None if self._batches is None else self._batches.num_batches

    def run(self, own_fit: Callable[..., Any]) -> Any:
        """Trains, or restores what has been trained; returns Keras' `History`.

        Args:
            own_fit: the method of Keras.
        """
        arguments = {**self._arguments, "callbacks": self._callbacks}
        if self._saved is not None:
            self._epoch = self._saved.state.epoch
            arguments["initial_epoch"] = arguments["epochs"] if self.is_skipped else self._epoch
        with handing_to(self._take):
            history = own_fit(self._model, **arguments)
        if self.is_skipped:
            self._restore()  # once more: Keras ends a training with making the averages of the weights final
        elif self._has_stepped or self._saved is not None:
            path = self._save(0, is_finished=True)
            self._script.finished[str(self._number)] = path.rpartition("/")[2]
            if self._runtime.suspend_requested:
                self._runtime.suspend(path, self._reports.step)
        return history

    def _take(self, batches: Batches) -> None:
        """Keras has made an iterator: the first is over the training data."""
        validation = self._arguments["validation_data"]
        if self._batches is None:
            self._batches = batches
            batches.track(self)
        elif validation is not None and getattr(batches.data_adapter, "_dataset", None) is validation:
            batches.count(0 if self._evaluations else self._evaluations_before)
            self._evaluations.append(batches)

    @property
    def _evaluations_before(self) -> int:
        return 0 if self._saved is None else self._saved.state.evaluations

    def begin(self) -> None:
        """See `Listener`."""
        assert self._batches is not None
        self._attributes = [Attributes(callback) for callback in self._callbacks.callbacks]
        if self._saved is None:
            return
        # Keras' own BackupAndRestore may have had other plans.
        self._model._initial_epoch = None
        state = self._saved.state
        # Most variables of models, metrics and optimizers are made by a first step; what it does to them is undone.
        position = copy.deepcopy(state.data)
        data = self._batches.resume(position, self._saved.data_arrays, self._saved.iterator_files, state.batch)
        self._model.train_function(data)
        del data
        self._restore()
        self._logs = state.logs
        self._reports.step = state.step
        self._steps_before = state.step - state.batch
        self._script.has_restored(self._saved)

    def _restore(self, random_state: dict[str, Any] | None = None) -> None:
        """Puts back what has been saved.

        Args:
            random_state: another random state than that.
        """
        assert self._saved is not None
        variables.restore(self._model, self._saved.values, self._saved.path)
        saved = self._saved.state.callbacks
        for callback, attributes, (kind, values) in zip(
            self._callbacks.callbacks, self._attributes, saved, strict=False
        ):
            if type(callback).__qualname__ == kind:
                attributes.restore(values, self._saved.arrays)
        randomness.restore(random_state or self._saved.state.randomness)

    def entered(self) -> None:
        """See `Watcher`."""
        assert self._batches is not None
        if self._saved is not None and self._is_reentering:
            # What Keras and the callbacks do as an epoch begins has been done before, by an earlier run.
            self._is_reentering = False
            self._restore(self._batches.unused(self._saved.state.randomness))
        self._reports.training(preemptible=True, batch_size=self._batches.batch_size)

    def step_done(self, last_batch: int, logs: Any) -> None:
        """See `Listener`."""
        self._has_stepped = True
        self._logs = logs
        done = last_batch + 1
        if self.batches_per_epoch is not None:
            done = min(done, self.batches_per_epoch)
        self._reports.step_done(self._steps_before + done, loss_of(logs))

    def between_steps(self, batch: int) -> None:
        """See `Watcher`."""
        if self._runtime.suspend_requested or self._runtime.checkpoint_due:
            self._save(batch)

    def epoch_logs(self, logs: dict[str, float]) -> dict[str, float]:
        """See `Listener`."""
        # Nothing was left of the epoch, which nobody could know before it was looked for.
        return logs if self._has_stepped else {**figures(self._logs), **logs}

    def epoch_done(self, epoch: int, logs: dict[str, float]) -> None:
        """See `Listener`."""
        has_validated = any(name.startswith("val_") for name in logs)
        self._steps_before = self._reports.step
        self._reports.epoch_done(figures(logs), is_all=has_validated or not validates(self._arguments))
        self._epoch = epoch + 1
        is_last = self._model.stop_training or self._epoch >= self._arguments["epochs"]
        if not is_last and (self._runtime.suspend_requested or self._runtime.checkpoint_due):
            self._save(0)

    def _save(self, batch: int, *, is_finished: bool = False) -> str:
        """Writes a checkpoint, and ends the process after one that is not the last if it shall be suspended."""
        assert self._batches is not None
        if not is_finished:
            settle(self._callbacks)
        self._reports.flush()
        arrays: list[Any] = []
        data_arrays: list[Any] = []
        state = FitState(
            fit=self._number,
            is_finished=is_finished,
            epoch=self._epoch,
            batch=batch,
            step=self._reports.step,
            data=self._batches.position(batch, data_arrays),
            evaluations=sum(each.made for each in self._evaluations) or self._evaluations_before,
            logs=figures(pythonify_logs(self._logs)),
            callbacks=[
                (type(callback).__qualname__, attributes.save(arrays))
                for callback, attributes in zip(self._callbacks.callbacks, self._attributes, strict=True)
            ],
            randomness=randomness.state(),
            finished=dict(self._script.finished),
        )
        path = self._runtime.spec.checkpoint_path(state.step)
        checkpoints.write(
            FitCheckpoint(
                path=path,
                train_s=self._runtime.train_s,
                state=state,
                values=variables.values_of(self._model),
                arrays=arrays,
                data_arrays=data_arrays,
                iterator_files={} if is_finished else self._batches.iterator_files(batch),
            )
        )
        self._runtime.checkpoint_written(path, state.step)
        if self._runtime.suspend_requested and not is_finished:
            self._runtime.suspend(path, state.step)
        return path
