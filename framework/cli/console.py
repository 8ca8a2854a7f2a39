"""Shows a running job: one live line per task on a terminal, plain lines elsewhere."""

from __future__ import annotations

import codecs
import itertools
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from dike.profile import ModelProfile
from dike.task import is_chief
from executor.messages import LogChunk
from executor.outputs import FOLDER as OUTPUTS_FOLDER
from executor.outputs import printable, read_record
from framework.cli.task_output import OutputStream, TaskOutput
from framework.training.elastic.layout import Size
from framework.training.observer import JobObserver
from framework.training.spec import JobResult, JobTask, Resize
from solver import Plan
from solver.cli.tables import print_plan, print_profile
from solver.plan import ROLES
from solver.strategies import ALLREDUCE
from solver.units import format_bytes

PROGRESS_INTERVAL_S = 10.0
_SANDBOX_COPY = re.compile(r"/[^\s\"']*/executors/[^/\s]+/runs/[0-9a-f-]{36}/bundle(?=/)")
"""The copy of the script's folder in a task's sandbox."""
SHARED_BATCHES = "training is synchronous: {workers} workers share each batch, so the result is that of one process"
ASYNCHRONOUS = (
    "training is asynchronous: {workers} workers update the weights independently. Gradients may be computed from "
    "weights that are a few steps old, so results differ a little between runs; --max-workers 1 trains synchronously"
)
MAX_NAMED_OUTPUTS = 8
"""Maximum number of output files listed by name."""


class PlainObserver(JobObserver):
    """Prints plain lines, for pipes, logs and CI.

    Args:
        console: for Dike's own lines.
        profile: shown with the first plan.
        chief_output: stream name -> stream for the chief's output.
        verbose: whether tables of profile and plan are shown.
        script_folder: local folder that replaces the path of its copies in tracebacks; None for no replacement.
    """

    def __init__(
        self,
        console: Console,
        profile: ModelProfile,
        chief_output: Mapping[str, OutputStream],
        verbose: bool = True,
        script_folder: Path | None = None,
    ) -> None:
        self._console = console
        self._profile = profile
        self._script_folder = script_folder
        self._output = TaskOutput(chief_output, self.with_local_paths)
        self._verbose = verbose
        self._decoders: dict[tuple[str, str], codecs.IncrementalDecoder] = {}
        self._planned: Plan | None = None
        self._progress_at = time.monotonic()
        self._waiting_for = ""
        self.tasks: dict[str, JobTask] = {}

    def waiting(self, reason: str) -> None:
        if reason != self._waiting_for:
            self._waiting_for = reason
            self.say(f"waiting: {reason}")

    def planned(self, plan: Plan) -> None:
        if plan == self._planned or not self._verbose:
            return
        before, self._planned = self._planned, plan
        if before is None:
            print_profile(self._console, self._profile)
            print_plan(self._console, plan)
            if plan.option.workers > 1 and plan.result == "asynchronous":
                self.say(ASYNCHRONOUS.format(workers=plan.option.workers))
            elif plan.strategy == ALLREDUCE and plan.profile.is_measurable:
                self.say(SHARED_BATCHES.format(workers=plan.option.workers))
        elif before.option == plan.option:
            self.say("planned again: same tasks, new placement")
        else:
            self.say(f"planned again: {Size(plan.option.workers, plan.option.ps)}")

    def launched(self, tasks: Sequence[JobTask]) -> None:
        self.tasks.update({task.task_id: task for task in tasks})
        self.say("launched " + ", ".join(f"{task.name} on {task.node}" for task in tasks))

    def task_changed(self, task: JobTask) -> None:
        text = f"{task.name} {task.shown_state}"
        if task.state.is_terminal() and task.message and not task.stop_requested:
            text += f": {task.message}"
        self.say(text)

    def progress(self, task: JobTask) -> None:
        now = time.monotonic()
        if now - self._progress_at >= PROGRESS_INTERVAL_S:
            self._progress_at = now
            self.say(f"{task.name} {describe_progress(task)}")

    def log(self, task: JobTask, chunk: LogChunk) -> None:
        key = (task.task_id, chunk.stream)
        decoder = self._decoders.setdefault(key, codecs.getincrementaldecoder("utf-8")("replace"))
        label = "" if self._is_chief(task) else f"[{task.name}] "
        self._output.write(task.task_id, chunk.stream, decoder.decode(chunk.data), label)

    def checkpoint(self, path: str, step: int) -> None:
        if self._verbose:
            self.say(f"checkpoint of step {step}: {path}")

    def resizing(self, workers: int, ps: int, reason: str) -> None:
        self.say(f"changing to {Size(workers, ps)}: {reason}")

    def resized(self, resize: Resize) -> None:
        self.say(describe_resize(resize))

    def restarting(self, reason: str, restart: int, limit: int) -> None:
        self.say(f"{reason}; restart {restart} of at most {limit}")

    def notify(self, text: str) -> None:
        self.say(text)

    def finished(self, result: JobResult, seconds: float) -> None:
        """Prints where the checkpoints are, or the output of the failed task."""
        self._output.finish()
        if result.succeeded:
            for resize in result.resizes if self._verbose else ():
                self.say(f"{describe_resize(resize)}; {resize.reason}")
            changes = f", {len(result.resizes)} changes of size" if result.resizes else ""
            self.say(
                f"done in {seconds:.1f} s, {result.restarts} restarts{changes}; checkpoints in {result.checkpoint_dir}"
            )
        elif result.failed_tail and not self._has_shown(result.failure):
            self._console.print("end of the failed task's output:", style="bold")
            self._console.print(self.with_local_paths(result.failed_tail.rstrip()), markup=False, soft_wrap=True)
        for text in describe_outputs(result.checkpoint_dir):
            self.say(text)

    def say(self, text: str) -> None:
        """Prints a line of Dike's own."""
        self._output.end_line()
        self._console.print(f"dike: {text}", markup=False, soft_wrap=True)

    def _has_shown(self, failure: str) -> bool:
        """Returns whether a failure is the chief's, whose output has been printed already."""
        return any(failure.startswith(f"{task.name} ") for task in self.tasks.values() if self._is_chief(task))

    def with_local_paths(self, text: str) -> str:
        """Replaces the paths of the tasks' copies by the user's folder."""
        return text if self._script_folder is None else _SANDBOX_COPY.sub(lambda _: str(self._script_folder), text)

    def _is_chief(self, task: JobTask) -> bool:
        planned = task.planned
        return is_chief(self._profile.api, planned.role, planned.index, is_plain=planned.is_plain)


class LiveObserver(PlainObserver):
    """Shows a live table of the tasks below the output, on a terminal."""

    def __init__(self, console: Console, profile: ModelProfile, script_folder: Path | None = None) -> None:
        # The streams are looked up at each write: rich replaces them while the table is shown.
        streams = {"stdout": _CurrentStream("stdout"), "stderr": _CurrentStream("stderr")}
        super().__init__(console, profile, streams, script_folder=script_folder)
        self._live = Live(console=console, get_renderable=self._table, refresh_per_second=4, transient=True)

    def __enter__(self) -> LiveObserver:
        self._live.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._live.stop()

    def task_changed(self, task: JobTask) -> None:
        if task.state.is_terminal() and task.state != "finished" and not task.stop_requested:
            super().task_changed(task)

    def launched(self, tasks: Sequence[JobTask]) -> None:
        self.tasks.update({task.task_id: task for task in tasks})

    def progress(self, task: JobTask) -> None:
        """The table shows it."""

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for title in ("task", "agent", "state", "step", "samples/s", "loss"):
            table.add_column(title, style="dim")
        for task in self._shown_tasks():
            table.add_row(
                task.name,
                task.node,
                task.shown_state,
                "" if task.step is None else str(task.step),
                "" if task.samples_per_s is None else f"{task.samples_per_s:.0f}",
                "" if task.loss is None else f"{task.loss:.4f}",
            )
        return table

    def _shown_tasks(self) -> list[JobTask]:
        """Returns the attempt's tasks in the order of the plan, then those that wait to join."""
        tasks = [task for task in self.tasks.values() if task.member or not task.state.is_terminal()]
        return sorted(tasks, key=lambda task: (not task.member, ROLES.index(task.planned.role), task.planned.index))


class _CurrentStream:
    """The process' standard stream of this name, looked up at each write."""

    def __init__(self, name: str) -> None:
        self._name = name

    def write(self, text: str) -> int:
        return int(getattr(sys, self._name).write(text))

    def flush(self) -> None:
        getattr(sys, self._name).flush()

    def isatty(self) -> bool:
        return bool(getattr(sys, self._name).isatty())


def describe_outputs(folder: str) -> list[str]:
    """Describes the output files of a run; nothing if its record cannot be read from this machine."""
    record = read_record(folder) if folder else None
    if record is None:
        return []
    texts = []
    if record.kept:
        names = [printable(path) for path in itertools.islice(sorted(record.kept), MAX_NAMED_OUTPUTS)]
        count = len(record.kept)
        more = f" and {count - len(names)} more" if count > len(names) else ""
        files = f"{count} file{'s' if count > 1 else ''}, {format_bytes(record.size_bytes)}"
        texts.append(f"outputs are in {folder}/{OUTPUTS_FOLDER} ({files}): {', '.join(names)}{more}")
    if record.left_behind:
        limit = "" if record.limit_bytes is None else f" (--outputs-limit is {format_bytes(record.limit_bytes)})"
        left = [
            f"{printable(path)}: {why}" for path, why in itertools.islice(record.left_behind.items(), MAX_NAMED_OUTPUTS)
        ]
        more = f"; and {len(record.left_behind) - len(left)} more" if len(record.left_behind) > len(left) else ""
        texts.append(f"outputs left behind{limit}: {'; '.join(left)}{more}")
    return texts


def describe_resize(resize: Resize) -> str:
    if (resize.from_workers, resize.from_ps) == (resize.to_workers, resize.to_ps):
        what = f"replaced a worker at step {resize.step}"
    else:
        ps = f" and {resize.from_ps} to {resize.to_ps} ps" if resize.from_ps != resize.to_ps else ""
        what = f"{resize.from_workers} to {resize.to_workers} workers{ps} at step {resize.step}"
    return f"{what}: {resize.cost_s:.1f} s from stop to next step"


def describe_progress(task: JobTask) -> str:
    """Describes step, loss and speed, if known."""
    parts = [] if task.step is None else [f"step {task.step}"]
    if task.loss is not None:
        parts.append(f"loss {task.loss:.4f}")
    if task.samples_per_s is not None:
        parts.append(f"{task.samples_per_s:.0f} samples/s")
    return ", ".join(parts)
