"""All `fit`s of a script: which of them a run of the trial skips, and which one it goes on with."""

from __future__ import annotations

import functools

from dike.trial.keras_fit import checkpoints
from dike.trial.keras_fit.checkpoints import FitCheckpoint
from dike.trial.keras_reports import KerasReports
from dike.trial.runtime import TrialRuntime


class KerasScript:
    """The script of a trial.

    Args:
        runtime: the trial.

    Attributes:
        runtime: the one given.
        reports: where its training loops report.
        finished: `fit`s that have returned, and the name of the checkpoint at the end of each.
    """

    def __init__(self, runtime: TrialRuntime) -> None:
        self.runtime = runtime
        self.reports = KerasReports(runtime)
        self.finished: dict[str, str] = {}
        self._fits = 0

    @functools.cached_property
    def _target(self) -> FitCheckpoint | None:
        """The checkpoint that this run goes on from."""
        target = checkpoints.find(self.runtime.spec)
        if target is not None:
            self.finished = dict(target.state.finished)
            if target.state.is_finished:
                self.finished[str(target.state.fit)] = target.path.rpartition("/")[2]
        return target

    def next_fit(self) -> tuple[int, FitCheckpoint | None]:
        """A `fit` is called: its number, and what it goes on from; None to train from its beginning.

        Raises:
            BadInputError: if its checkpoint is gone.
        """
        number, self._fits = self._fits, self._fits + 1
        target = self._target
        if target is None or number > target.state.fit:
            return number, None
        if number == target.state.fit:
            return number, target
        name = target.state.finished.get(str(number))
        folder = target.path.rpartition("/")[0]
        return number, None if name is None else checkpoints.read(f"{folder}/{name}")

    def has_restored(self, checkpoint: FitCheckpoint) -> None:
        """A `fit` is where the checkpoint says."""
        if checkpoint is self._target:
            self.runtime.restored(checkpoint.path, checkpoint.state.step, checkpoint.train_s)
