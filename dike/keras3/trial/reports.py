"""Reports of the training loops of Keras 3 and tf_keras: the loss of every step, and each epoch's results."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

from dike.keras3.fit_call import arguments_of, loss_of, scalar_logs, validates
from dike.reporting import PROGRESS_INTERVAL_S, EpochLosses
from dike.trial.runtime import TrialRuntime

_MAX_PENDING = 1000


class KerasReports:
    """Reports of all training loops of a script, which share one count of steps.

    Losses are read in bulk: reading one makes the training wait for the device.
    """

    def __init__(self, runtime: TrialRuntime) -> None:
        self._runtime = runtime
        self._pending: list[tuple[int, Any]] = []
        self._read_s = 0.0
        self._announced: tuple[bool, int | None] | None = None
        self._is_metric_checked = False
        self._losses: EpochLosses | None = None
        self._epoch_begin = 0
        self.step = 0

    def fit_begins(self, step: int) -> None:
        """Starts the reports of a `fit`. `step`: batches trained by all loops, without the running epoch."""
        # Trials report raw losses, which are compared with those of other trials at the same step.
        self._losses = EpochLosses() if self._runtime.smooths_losses else None
        self._epoch_begin = step

    def training(self, *, preemptible: bool, batch_size: int | None = None) -> None:
        if (preemptible, batch_size) != self._announced:
            self._announced = (preemptible, batch_size)
            self._runtime.training(preemptible=preemptible, batch_size=batch_size)

    def step_done(self, step: int, loss: Any) -> None:
        """`loss` may be a tensor that is not computed yet."""
        self.step = step
        self._pending.append((step, loss))
        now_s = time.monotonic()
        if now_s - self._read_s >= PROGRESS_INTERVAL_S or len(self._pending) >= _MAX_PENDING:
            self._read_s = now_s
            self.flush()

    def batch_done(self, loss: Any) -> None:
        """Reports a step of the script's own loop, which has no epochs, so its loss is the only result."""
        self.step_done(self.step + 1, loss)
        self.flush()
        if loss is not None and self._runtime.spec.metric == "loss":
            self._runtime.progress(self.step, value=float(loss), is_reported=False)
        self._runtime.end_if_over()

    @property
    def is_over(self) -> bool:
        """Whether no `fit` is to train any more."""
        return self._runtime.is_over(self.step)

    def epoch_done(self, logs: Mapping[str, float], *, is_complete: bool) -> None:
        """Reports an epoch. `is_complete`: whether epochs never have more results, such as those of a validation.

        Raises:
            BadInputError: if the search's metric is not in the results of the first complete epoch.
        """
        self.flush()
        if self._losses is not None:
            self._losses.epoch_ended()
        self._epoch_begin = self.step
        self._runtime.standing.epochs += 1
        metric = self._runtime.spec.metric
        self._runtime.progress(self.step, metrics=logs, value=logs.get(metric))
        if is_complete and not self._is_metric_checked:
            self._is_metric_checked = True
            self._runtime.check_metric(logs)

    def flush(self) -> None:
        pending, self._pending = self._pending, []
        for step, loss in pending:
            value = None if loss is None else float(loss)
            if value is not None and self._losses is not None:
                value = self._losses.smoothed(value, step - self._epoch_begin)
            self._runtime.progress(step, loss=value)


def reporting_fit(fit: Callable[..., Any], reports: KerasReports, callback_class: Any) -> Callable[..., Any]:
    """Returns a `fit` that reports and cannot be suspended."""

    class Report(callback_class):
        _supports_tf_logs = True  # else tf_keras would read all logs of every step
        async_safe = False

        def __init__(self, arguments: Mapping[str, Any]) -> None:
            super().__init__()
            self._validates = validates(arguments)

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self._steps_before = reports.step

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            reports.step_done(self._steps_before + batch + 1, loss_of(logs))
            self.model.stop_training |= reports.is_over

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            has_validated = any(name.startswith("val_") for name in logs or {})
            reports.epoch_done(scalar_logs(logs), is_complete=has_validated or not self._validates)
            self.model.stop_training |= reports.is_over

    @functools.wraps(fit)
    def reporting(self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = arguments_of(fit, self, args, kwargs)
        callbacks = arguments["callbacks"]
        report = Report(arguments)
        if hasattr(callbacks, "callbacks"):  # a CallbackList
            report.set_model(self)
            callbacks.callbacks.append(report)
        else:
            given = [] if callbacks is None else callbacks if isinstance(callbacks, list | tuple) else [callbacks]
            arguments["callbacks"] = [*given, report]
        reports.fit_begins(reports.step)
        reports.training(preemptible=False, batch_size=arguments["batch_size"])
        result = fit(self, **arguments)
        reports.flush()
        return result

    return reporting
