"""What the API answers with. Times are seconds since the epoch; a number that JSON does not know is null."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict

from framework.scheduler.queue_options import Priority
from framework.scheduler.records import JobKind, JobState, TaskRecord
from framework.search.records import Mode, TrialRecord, TrialState, ValueKind


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


Finite = Annotated[float | None, BeforeValidator(_finite)]


class View(BaseModel):
    """A model that is created from a record by its attributes."""

    model_config = ConfigDict(from_attributes=True, frozen=True, json_schema_serialization_defaults_required=True)


class Problem(View):
    """Every answer of 400 and above: what is wrong and what to do, in one sentence."""

    detail: str


class Me(View):
    """The user of the token.

    Attributes:
        admin: whether you may kill other users' jobs and read their output.
        read_only: whether this is a page that shows stored searches, without a cluster.
    """

    user: str
    admin: bool
    read_only: bool = False


class SignIn(View):
    """How to sign in; `proxy`: whether the proxy has signed you in, otherwise a token is needed."""

    proxy: bool


class ProgressView(View):
    """One report of a training job's chief (`framework.scheduler.records.ProgressPoint`)."""

    step: int
    time_s: float
    loss: Finite = None
    samples_per_s: Finite = None


class JobView(View):
    """A job in the list of jobs (`framework.scheduler.records.JobRecord`).

    Attributes:
        live_tasks: number of its tasks that have not ended.
        progress: the last report of a training job's chief.
        trials: state -> number of a search's trials; None before it has begun.
        best: the best value of a search's trials.
        queue_position: its position among the queued jobs, starting at 1; None if it is not queued, and for about a
            second after submission.
        waiting_s: seconds since it was submitted or last ran; None if it is not queued.
        yours: whether you may kill it and see request, result and output.
    """

    id: str
    kind: JobKind
    user: str
    script: str
    constraints: list[str]
    state: JobState
    submitted_s: float
    started_s: float | None
    ended_s: float | None
    kill_requested: bool
    waiting: str
    failure: str
    live_tasks: int
    progress: ProgressView | None
    trials: dict[TrialState, int] | None
    best: float | None
    yours: bool
    priority: Priority = Priority.NORMAL
    queue_position: int | None = None
    waiting_s: float | None = None


class JobDetails(JobView):
    """One job.

    Attributes:
        request: the request (`framework.service.requests`); None if it is not yours.
        result: its result, as printed by `dike run --format json` or `dike tune --format json`; None before the end,
            and if the job is not yours.
    """

    request: dict[str, Any] | None
    result: dict[str, Any] | None


class Submitted(JobView):
    """A job that was accepted.

    Attributes:
        warnings: warnings for its user, one sentence each; such as that it fits on no agent seen so far.
    """

    warnings: list[str]


class JobList(View):
    """Jobs, in the requested order.

    Attributes:
        jobs: a page of them.
        before: the `before` of the next page; None on the last one.
        counts: state -> number of the user's jobs, or of all users' if none was named, on all pages and regardless of
            the requested states; states without jobs are omitted.
    """

    jobs: list[JobView]
    before: str | None
    counts: dict[JobState, int] = {}


class TaskList(View):
    """Tasks in order of launch."""

    tasks: list[TaskRecord]


class EventView(View):
    """An event of a job (`framework.scheduler.records.JobEvent`)."""

    number: int
    time_s: float
    kind: str
    text: str


class EventList(View):
    """Events, oldest first; `after` is that of the next page."""

    events: list[EventView]
    after: int


class ProgressList(View):
    """Progress by step."""

    points: list[ProgressView]


class PlanView(View):
    """The current or last plan of a training job, as `dike plan --format json` prints it; None if there is none."""

    plan: dict[str, Any] | None


class TrialView(View):
    """A trial of a search (`framework.search.records.TrialRecord`).

    Attributes:
        parameters: name -> value; empty if the job is not yours.
        status: its state in more detail: `starting` before a run's first step, `restarting (try 2)` after a failure.
        slot_s: total time in slots, including the current run.
        loss: the training loss of its last step.
        value: the objective, its last or best report (`TrialList.value`).
        best_value, best_step: the best report ever, and its step.
        checkpoint: the newest; null before the first and if the job is not yours.
        not_finite: fields that are null because JSON has no such number -> `nan`, `inf` or `-inf`.
        error: the end of its output if it failed; empty if the job is not yours.
    """

    number: int
    parameters: dict[str, Any]
    state: TrialState
    status: str
    runs: int
    failures: int
    step: int
    train_s: Finite
    slot_s: Finite
    loss: Finite
    value: Finite
    best_value: Finite
    best_step: int | None
    metrics: dict[str, Finite]
    convergence: Finite
    checkpoint: str | None
    checkpoint_step: int
    agent: str
    slot: int | None
    batch_size: Finite
    error: str
    created_s: float
    ended_s: float | None
    not_finite: dict[str, str] = {}

    def to_record(self) -> TrialRecord:
        """Converts to a record; fields hidden from other users stay empty."""
        values = self.model_dump(exclude={"status", "not_finite"})
        for name, text in self.not_finite.items():
            of_metric = name.removeprefix("metrics.")
            (values if of_metric == name else values["metrics"])[of_metric] = float(text)
        return TrialRecord(**values)


class BestTrialView(View):
    """The best trial of a search (`framework.search.records.best_trial`).

    Attributes:
        in_words: its value, and its best value ever if that differs.
        train_command: the shell command that trains with its parameters; None if trials call a function or the job is
            not yours.
        export_command: the shell command that exports its model; None if the service sees none or the job is not yours.
    """

    number: int
    in_words: str
    train_command: str | None
    export_command: str | None


class TrialList(View):
    """A search's trials by number.

    Attributes:
        ranking: the trials' numbers, best first; failed ones and those without a value last.
        metric, mode: the objective, and whether lower (`min`) or higher (`max`) is better.
        value: whether a trial's value is its last or its best report.
        trial_count: total number of trials of the search; `trials` are those created so far.
    """

    metric: str
    mode: Mode
    value: ValueKind
    trial_count: int
    trials: list[TrialView]
    best: BestTrialView | None = None
    ranking: list[int] = []


class ImportanceView(View):
    """The importance of each parameter of a search for its objective (`framework.search.importance`).

    Attributes:
        trials: number of finished trials; at least `needed` are required.
        importances: name -> share of the total importance, greatest first; empty with too few trials or if the job is
            not yours.
    """

    trials: int
    needed: int
    importances: dict[str, float]


class OutputFileView(View):
    """A file that a job's script has written below its working folder.

    Attributes:
        path: relative to the run's `outputs/`; of a search prefixed with `trial-N/`.
        modified_s: last modification, seconds since the epoch.
    """

    path: str
    size_bytes: int
    modified_s: float


class OutputList(View):
    """The files that a job's script has written.

    Attributes:
        folder: the run's folder, the same path on all agents.
        more: whether there are more than listed.
        left_behind: path -> why it was not brought back.
        unreachable: why the service can send none; empty if it can.
    """

    folder: str
    files: list[OutputFileView]
    more: bool = False
    left_behind: dict[str, str] = {}
    unreachable: str = ""


class SliceView(View):
    """A time slice: a run of a trial in a slot (`framework.search.records.SliceRecord`)."""

    trial: int
    run: int
    slot: int
    agent: str
    kind: str
    start_s: float
    end_s: float | None
    first_step_s: float | None
    reason: str
    convergence: Finite
    from_step: int
    to_step: int
    outcome: str
    suspend_s: Finite
    samples_per_s: Finite
    process: str


class SliceList(View):
    """A search's time slices, in order of their start."""

    slices: list[SliceView]


class LossView(View):
    """A trial's report about a stretch of training: mean, minimum and maximum loss of `count` steps."""

    run: int
    step: int
    train_s: Finite
    loss: Finite = None
    low: Finite = None
    high: Finite = None
    count: int = 0
    value: Finite = None
    best: Finite = None


class LossList(View):
    """Trial number -> its losses, oldest first."""

    losses: dict[int, list[LossView]]
