"""The `fit`s of a trial: Keras' own loop, observed, saved between two steps and resumed."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from keras.src.callbacks import CallbackList
from keras.src.utils.python_utils import pythonify_logs

from dike import randomness
from dike.keras3.callbacks import append_logs, settle
from dike.keras3.data import Batches, intercept_iterators
from dike.keras3.fit_call import loss_of, scalar_logs, validates
from dike.keras3.model import learning_rates_of, named_variables, restore_values, values_of
from dike.keras3.model_files import ModelFiles, ModelSnapshot
from dike.keras3.trial import checkpoints
from dike.keras3.trial.checkpoints import FitCheckpoint, FitState
from dike.keras3.trial.reports import KerasReports
from dike.plain_values import CallbackStates
from dike.trial import folders
from dike.trial.runtime import TrialRuntime

_LOST_MESSAGE = (
    "the checkpoint does not contain {names}, so it starts with the script's initial value; only numbers, text, arrays "
    "and containers of these are saved."
)


class KerasScript:
    """The script of a trial. `finished`: index of each finished `fit` -> name of the checkpoint at its end."""

    def __init__(self, runtime: TrialRuntime) -> None:
        self.runtime = runtime
        self.reports = KerasReports(runtime)
        self.finished: dict[str, str] = {}
        self._fits = 0

    @functools.cached_property
    def _checkpoint(self) -> FitCheckpoint | None:
        target = checkpoints.find(self.runtime.spec)
        if target is not None:
            self.finished = dict(target.state.finished)
            if target.state.is_finished:
                self.finished[str(target.state.fit)] = target.path.rpartition("/")[2]
        return target

    def next_fit(self, epochs: int) -> tuple[int, FitCheckpoint | None]:
        """Starts the next call of `fit`; returns its index and the checkpoint to resume from, if any.

        Args:
            epochs: requested epochs. A job that runs again may request more for its last `fit` than before.

        Raises:
            BadInputError: if its checkpoint is gone.
        """
        number, self._fits = self._fits, self._fits + 1
        target = self._checkpoint
        if target is None or number > target.state.fit:
            return number, None
        if number == target.state.fit:
            if target.state.can_extend(epochs):
                target.state.is_finished = False
            return number, target
        name = target.state.finished.get(str(number))
        folder = target.path.rpartition("/")[0]
        return number, None if name is None else checkpoints.read(f"{folder}/{name}")

    def save_model(self, model: Any) -> None:
        """Writes the model of a script that has ended. It cannot be resumed from."""
        step = self.reports.step
        path = self.runtime.spec.checkpoint_path(step)
        layout = ModelFiles(model).layout()
        ModelSnapshot(step, self.runtime.train_s, values_of(model), layout).write(path)
        self.runtime.checkpoint_written(path, step)

    def report_restored(self, checkpoint: FitCheckpoint) -> None:
        """Reports that a `fit` has restored a checkpoint, if it is the one that this run resumes from."""
        if checkpoint is self._checkpoint:
            self.runtime.restored(checkpoint.path, checkpoint.state.step, checkpoint.train_s, checkpoint.state.standing)


class Listener(Protocol):
    @property
    def is_skipped(self) -> bool:
        """Whether an earlier run has done all of it, and called the callbacks."""

    @property
    def batches_per_epoch(self) -> int | None:
        """None if not known yet."""

    def begin(self) -> None:
        """Called after `on_train_begin` of all callbacks."""

    def step_done(self, last_batch: int, logs: Any) -> None:
        """Called when the batches up to `last_batch` of the epoch are done."""

    def epoch_logs(self, logs: dict[str, float]) -> dict[str, float]:
        """Returns an epoch's results, given those that Keras knows."""

    def epoch_done(self, epoch: int, logs: dict[str, float]) -> None:
        """Called after `on_epoch_end` of all callbacks."""


class TrialCallbacks(CallbackList):
    """The callbacks of one `fit`; calls the listener after all of them.

    Keras makes its own list once it knows the number of batches per epoch. This list is made earlier, so it passes
    model and parameters to the callbacks only when the training begins. Nothing is called in between.

    `appends`: whether callbacks that write logs append to existing ones.
    """

    def __init__(self, arguments: Mapping[str, Any], model: Any, listener: Listener, *, appends: bool) -> None:
        given, verbose = arguments["callbacks"], arguments["verbose"]
        is_list = isinstance(given, CallbackList)
        super().__init__(
            list(given.callbacks) if is_list else given,
            add_history=not is_list,
            add_progbar=not is_list and verbose != 0,
        )
        self._given_params = given.params if is_list else None
        self._arguments = arguments
        self._trained_model = model
        self._listener = listener
        if appends:
            append_logs(self)

    def on_train_begin(self, logs: Any = None) -> None:
        own = {key: self._arguments[key] for key in ("verbose", "epochs")}
        self.set_model(self._trained_model)
        self.set_params(self._given_params or {**own, "steps": self._listener.batches_per_epoch})
        super().on_train_begin(logs)
        self._listener.begin()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_end(batch, logs)
        self._listener.step_done(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        known = self._listener.epoch_logs(pythonify_logs(logs))
        super().on_epoch_end(epoch, known)
        self._listener.epoch_done(epoch, known)

    def on_train_end(self, logs: Any = None) -> None:
        if self._listener.is_skipped:
            self._on_end()
        else:
            super().on_train_end(logs)


class TrialFit:
    """One call of `fit`."""

    def __init__(self, script: KerasScript, model: Any, arguments: dict[str, Any]) -> None:
        self._script = script
        self._runtime = script.runtime
        self._reports = script.reports
        self._model = model
        self._arguments = arguments
        self._number, self._saved = script.next_fit(arguments["epochs"])
        self._callbacks = TrialCallbacks(arguments, model, self, appends=self._saved is not None)
        self._batches: Batches | None = None
        self._evaluations: list[Batches] = []
        # Another trial's learning rate must not replace the script's own, which may be a parameter of the search.
        is_copy = self._saved is not None and self._saved.is_copy
        self._own_rates = learning_rates_of(model) if is_copy else {}
        self._files = ModelFiles(model)
        self._best: ModelSnapshot | None = None
        self._states = CallbackStates(self._callbacks.callbacks)
        self._steps_before = self._reports.step
        self._epoch = arguments["initial_epoch"]
        self._logs: Any = {}
        self._is_reentering = self._saved is not None and self._saved.state.batch > 0
        self._has_stepped = False

    @property
    def is_skipped(self) -> bool:
        return self._saved is not None and self._saved.state.is_finished

    @property
    def batches_per_epoch(self) -> int | None:
        return None if self._batches is None else self._batches.num_batches

    def run(self, own_fit: Callable[..., Any]) -> Any:
        """Trains, or restores an earlier result; returns Keras' `History`."""
        arguments = {**self._arguments, "callbacks": self._callbacks}
        if self._saved is not None:
            self._epoch = self._saved.state.epoch
            arguments["initial_epoch"] = arguments["epochs"] if self.is_skipped else self._epoch
        try:
            with intercept_iterators(self._receive_iterator):
                history = own_fit(self._model, **arguments)
        finally:
            self._runtime.save_best = None
        if self.is_skipped:
            self._restore()  # again: Keras finalizes averaged weights at the end of a training
        elif self._has_stepped or self._saved is not None:
            path = self._runtime.spec.checkpoint_path(self._reports.step)
            # A later fit cannot be resumed without it.
            self._runtime.write_last(lambda: self._save(0, is_finished=True))
            self._script.finished[str(self._number)] = path.rpartition("/")[2]
            if self._runtime.suspend_requested:
                self._runtime.suspend(path, self._reports.step)
        return history

    def _receive_iterator(self, batches: Batches) -> None:
        """Receives the iterators that Keras makes: the first is over the training data."""
        validation = self._arguments["validation_data"]
        if self._batches is None:
            self._batches = batches
            batches.track(self)
        elif validation is not None and getattr(batches.data_adapter, "_dataset", None) is validation:
            batches.start_counting(0 if self._evaluations else self._evaluations_before)
            self._evaluations.append(batches)

    @property
    def _evaluations_before(self) -> int:
        return 0 if self._saved is None else self._saved.state.evaluations

    def begin(self) -> None:
        assert self._batches is not None
        self._states.begin()
        if self._saved is None:
            self._reports.fit_begins(self._steps_before)
            return
        # Overrides the epoch set by Keras' own BackupAndRestore.
        self._model._initial_epoch = None
        state = self._saved.state
        # A first step creates most variables of models, metrics and optimizers; its effects on them are undone.
        position = copy.deepcopy(state.data)
        arrays, files = self._saved.data_arrays, self._saved.iterator_files
        self._batches.resume(position, arrays, files, state.batch, self._model.train_function)
        self._restore(self._batches.unused_randomness(state.randomness))
        self._logs = state.logs
        self._reports.step = state.step
        self._steps_before = state.step - state.batch
        self._reports.fit_begins(self._steps_before)
        self._script.report_restored(self._saved)
        if state.lost and not self.is_skipped:
            names = ", ".join(state.lost)
            print(f"dike: {_LOST_MESSAGE.format(names=names)}", file=sys.stderr, flush=True)

    def _restore(self, random_state: dict[str, Any] | None = None) -> None:
        assert self._saved is not None
        restore_values(self._model, {**self._saved.values, **self._own_rates}, self._saved.path)
        self._states.restore(self._saved.state.callbacks, self._saved.arrays)
        randomness.restore(random_state or self._saved.state.randomness)

    def before_first_batch(self) -> None:
        assert self._batches is not None
        if self._saved is not None and self._is_reentering:
            # An earlier run has already done what Keras and the callbacks do when an epoch begins.
            self._is_reentering = False
            self._restore(self._batches.unused_randomness(self._saved.state.randomness))
        self._runtime.save_best = self._keep_best
        self._runtime.epoch_begins(self._model, self._reports.step)
        self._reports.training(preemptible=True, batch_size=self._batches.batch_size)

    def step_done(self, last_batch: int, logs: Any) -> None:
        if not self._has_stepped and self._number == 0:
            # The first step creates most variables.
            self._runtime.check_model(lambda: named_variables(self._model))
        self._has_stepped = True
        self._logs = logs
        done = last_batch + 1
        if self.batches_per_epoch is not None:
            done = min(done, self.batches_per_epoch)
        self._reports.step_done(self._steps_before + done, loss_of(logs))
        self._model.stop_training |= self._reports.is_over

    def between_steps(self, batch: int) -> None:
        if self._runtime.suspend_requested or self._runtime.checkpoint_due:
            self._runtime.unless_full(lambda: self._save(batch))

    def epoch_logs(self, logs: dict[str, float]) -> dict[str, float]:
        state = None if self._saved is None or self._has_stepped else self._saved.state
        if state is None:
            return logs
        if state.batch and state.epoch == self._epoch:
            # No batch of the epoch was left, which only asking for one can show.
            return {**scalar_logs(self._logs), **logs}
        # The epoch had no batch at all. Keras then gives the current metrics, if it has run a step before.
        return {**pythonify_logs(self._model.get_metrics_result()), **logs}

    def epoch_done(self, epoch: int, logs: dict[str, float]) -> None:
        has_validated = any(name.startswith("val_") for name in logs)
        self._steps_before = self._reports.step
        self._reports.epoch_done(scalar_logs(logs), is_complete=has_validated or not validates(self._arguments))
        self._model.stop_training |= self._reports.is_over
        self._epoch = epoch + 1
        is_last = self._model.stop_training or self._epoch >= self._arguments["epochs"]
        if not is_last and (self._runtime.suspend_requested or self._runtime.checkpoint_due):
            self._runtime.unless_full(lambda: self._save(0))

    def _keep_best(self) -> None:
        """Copies the model; the next checkpoint writes it, and no later run starts before that."""
        runtime = self._runtime
        values = {name: value.copy() for name, value in values_of(self._model).items()}
        self._best = ModelSnapshot(runtime.step, runtime.train_s, values, self._files.layout(), runtime.standing.best)

    def _write_best(self) -> None:
        if self._best is not None:
            path = self._runtime.spec.best_path(self._best.step)
            self._best.write(path)
            folders.prune_best(path)
            self._best = None

    def _save(self, batch: int, *, is_finished: bool = False) -> None:
        """Writes a checkpoint; suspends the trial after it if requested, unless it is the last."""
        assert self._batches is not None
        if not is_finished:
            settle(self._callbacks)
        self._reports.flush()
        self._write_best()
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
            logs=scalar_logs(pythonify_logs(self._logs)),
            callbacks=self._states.save(arrays),
            randomness=randomness.state(),
            finished=dict(self._script.finished),
            standing=self._runtime.standing.to_json(),
            epochs=self._arguments["epochs"],
            lost=[*self._states.unsaved(), *randomness.unsaved()],
        )
        path = self._runtime.spec.checkpoint_path(state.step)
        checkpoints.write(
            FitCheckpoint(
                path=path,
                train_s=self._runtime.train_s,
                state=state,
                values=values_of(self._model),
                layout=self._files.layout(),
                arrays=arrays,
                data_arrays=data_arrays,
                iterator_files={} if is_finished else self._batches.iterator_files(batch),
            )
        )
        self._runtime.checkpoint_written(path, state.step)
        if self._runtime.suspend_requested and not is_finished:
            self._runtime.suspend(path, state.step)
