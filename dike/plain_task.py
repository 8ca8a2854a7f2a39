"""A task of a job without parameter servers: trains as under `python`, and saves and resumes as a trial does.

The interceptions of trials (`dike.trial` and those of each library) do the work. The only task, or the first of several
workers that train synchronously, reports as a chief does, and writes the checkpoints for all.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NoReturn

from dike import process
from dike.checkpoints import has_checkpoints, shown
from dike.interception import after_import
from dike.process import EXIT_CODE_OTHER_LAYOUT, end_process
from dike.profile import Api
from dike.reporting import reporter
from dike.roles import fencing, planned_model
from dike.roles.gang import Gang
from dike.task import TaskSpec
from dike.trial import folders
from dike.trial import runtime as runtimes
from dike.trial.runtime import REPORT_WAIT_S, TrialRuntime
from dike.trial.spec import TrialSpec

INTERCEPTIONS = {"tensorflow": "dike.v1.trial", "keras": "dike.keras3.trial"}
"""Library -> our module whose `install` makes its training loops report and save; it may import the library."""


class JobRuntime(TrialRuntime):
    """A trial's runtime for a job: suspended by SIGTERM, without a metric."""

    smooths_losses = True

    def __init__(self, task: TaskSpec) -> None:
        newest, runs = folders.last_written(task.checkpoint_dir)
        super().__init__(
            TrialSpec(
                search=task.job_id,
                number=0,
                run=runs,
                parameters={},
                folder=task.checkpoint_dir,
                resume_from=newest,
                checkpoint_interval_s=task.checkpoint_interval_s,
            )
        )
        self._task = task
        if not task.is_chief:
            self.follow()
        self._models: set[int] = set()
        if task.is_synchronous and task.api is Api.KERAS:
            self.gang = Gang(task)
        self._batch_size = task.batch_size
        self._reported_step: int | None = None

    @property
    def suspend_requested(self) -> bool:
        # Workers follow the chief, which ends between two steps.
        return self.is_chief and process.termination.requested

    @suspend_requested.setter
    def suspend_requested(self, value: bool) -> None:
        """Does nothing: SIGTERM cannot be withdrawn."""

    def check_model(self, variables: Callable[[], Iterable[tuple[str, Any]]]) -> None:
        """Has the job planned again if the model is not the planned one."""
        planned_model.check(self._task, variables)

    def training(self, *, preemptible: bool, batch_size: int | None = None) -> None:
        super().training(preemptible=preemptible, batch_size=batch_size)
        self._batch_size = batch_size or self._batch_size
        if preemptible:
            process.termination.enable_saving()

    def disable_suspension(self, why: str) -> None:
        print(f"dike: no checkpoints are written: {why}.", file=sys.stderr, flush=True)

    def epoch_begins(self, model: Any, step: int) -> None:
        if self.gang is not None:
            # Imports TensorFlow.
            from dike.keras3 import synchronous

            synchronous.compare_values(self.gang, model, step, is_first=id(model) not in self._models)
            self._models.add(id(model))

    def unless_full(self, write: Callable[[], object]) -> bool:
        fencing.check(self._task)
        return super().unless_full(write)

    def suspend(self, path: str, step: int) -> NoReturn:
        """Ends the process, whose state is in the checkpoint."""
        self.flush_progress()
        process.termination.exit()

    def check_metric(self, reported: Collection[str]) -> None:
        """Accepts any: jobs have no metric."""

    def _take_value(self, step: int, value: float, *, is_reported: bool) -> bool:
        return False

    def _send(self, line: Mapping[str, Any], wait_s: float = REPORT_WAIT_S) -> None:
        if not self.is_chief:
            return
        match line["type"]:
            case "restored":
                print(f"dike: restored '{shown(line['path'])}': step {line['step']}.", file=sys.stderr, flush=True)
                reporter().resumed(line["step"])
            case "checkpoint":
                reporter().checkpoint(line["path"], line["step"])
            case "progress":
                step, before = line["step"], self._reported_step
                self._reported_step = step
                is_known = before is not None and self._batch_size
                samples = (step - before) * self._batch_size if is_known else None
                reporter().progress(step, samples, loss=line.get("last"))
            # Other lines would repeat the script's output and exit code.


def install(task: TaskSpec) -> Callable[[], None]:
    """Makes the script's training loops report and save; must be called before the script runs.

    Returns a function to call when the script has ended well.
    """
    made: list[JobRuntime] = []

    def runtime() -> JobRuntime:
        # Created once the script has imported a library: listing a remote folder takes TensorFlow.
        if not made:
            check_layout(task)
            if task.is_chief:
                fencing.take_ownership(task)
            made.append(JobRuntime(task))
            made[0].start_background_flush()
        return made[0]

    runtimes.job_runtime = runtime

    def intercept(module: str, _: object) -> None:
        importlib.import_module(module).install(runtime())

    for library, module in INTERCEPTIONS.items():
        after_import(library, functools.partial(intercept, module))

    def end() -> None:
        for one in made:
            one.end()
            if one.gang is not None:
                one.gang.finish()

    return end


def check_layout(task: TaskSpec) -> None:
    """Ends the process if its checkpoint folder is of the other kind of job, with or without parameter servers."""
    is_plain = folders.last_written(task.checkpoint_dir)[0] is not None
    is_distributed = not is_plain and has_checkpoints(task.checkpoint_dir)
    if is_distributed if task.is_plain else is_plain:
        end_process(EXIT_CODE_OTHER_LAYOUT)
