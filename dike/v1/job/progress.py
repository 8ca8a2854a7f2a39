"""Progress reports of a worker that runs the script, and the number of steps that the job trains."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

from dike import checkpoints
from dike.reporting import reporter
from dike.roles.rates import WorkerRates
from dike.task import TaskSpec


class StepReports:
    def __init__(self, worker: int) -> None:
        self._worker = worker
        self._rates = WorkerRates()
        self._last_s: float | None = None

    def step(self, results: Mapping[str, Any], samples: int | None, begun_s: float) -> None:
        """Reports one step.

        Args:
            results: values of `step` and, if available, of `loss` and `arrived` (`TrainingGraph.extra_fetches`).
            samples: number of samples in the step.
            begun_s: start of its run, on the clock of `time.time`, as TensorFlow's own timestamps are.
        """
        now_s = time.time()
        # Counts the script's work between two steps, such as reading its data. In a synchronous step the time after
        # the arrival of its gradients is spent waiting for other workers.
        busy_s = max(results.get("arrived", ()), default=now_s) - (self._last_s or begun_s)
        if busy_s > 0:  # else the clock was set back
            self._rates.done(self._worker, float(busy_s))
        self._last_s = now_s
        loss = results.get("loss")
        reporter().progress(int(results["step"]), samples, loss=float(loss.mean()) if loss is not None else None)


def last_step(hooks: Iterable[Any]) -> int | None:
    """The smallest global step at which a hook ends the training; None if unknown."""
    ends = [hook._last_step for hook in hooks if isinstance(hook, tf.compat.v1.train.StopAtStepHook)]
    return min((int(end) for end in ends if end is not None), default=None)


def count_from_first_start(task: TaskSpec) -> None:
    """Makes a `StopAtStepHook` with `num_steps` count the steps of all attempts of the job."""
    base = tf.compat.v1.train.StopAtStepHook
    after_create_session = base.after_create_session

    def own_after_create_session(self: Any, session: Any, coord: Any) -> None:
        if self._last_step is None and task.checkpoint_dir:
            now = int(session.run(self._global_step_tensor))
            self._last_step = checkpoints.first_step(task, now) + self._num_steps
        after_create_session(self, session, coord)

    base.after_create_session = own_after_create_session
