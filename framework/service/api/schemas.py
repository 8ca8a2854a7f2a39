"""What the API answers with. Times are seconds since the epoch; a number that JSON does not know is null."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict

from framework.scheduler.records import JobKind, JobState, TaskRecord
from framework.search.records import Mode, TrialRecord, TrialState, ValueKind


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


Finite = Annotated[float | None, BeforeValidator(_finite)]


class View(BaseModel):
    """Made from a record by its attributes."""

    model_config = ConfigDict(from_attributes=True, frozen=True, json_schema_serialization_defaults_required=True)


class Problem(View):
    """Every answer of 400 and above.

    Attributes:
        detail: what is wrong and what to do, in one sentence.
    """

    detail: str


class Me(View):
    """Who the token belongs to.

    Attributes:
        user: name.
        admin: whether jobs of others may be ended and their output read.
    """

    user: str
    admin: bool


class SignIn(View):
    """How the asker signs in.

    Attributes:
        proxy: whether the proxy through which this was asked says who the asker is; otherwise by a token.
    """

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
        live_tasks: how many of its tasks have not ended.
        progress: the last report of a training job's chief; None before the first, and for a search.
        trials: state -> number of a search's trials in it; None for a training job, and before a search has begun.
        best: the best value of a search's trials; None for a training job, and before there is one.
        queue_position: its place among the jobs that wait to run, 1 being served first; None if it does not wait, and
            for about a second after it was submitted.
        waiting_s: for how many seconds it has waited to run, since it was submitted or since it last ran; None if it
            does not wait.
        yours: whether you may end it and see request, result and output.
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
    queue_position: int | None = None
    waiting_s: float | None = None


class JobDetails(JobView):
    """One job.

    Attributes:
        request: what was asked for (`framework.service.requests`); None if it is not yours.
        result: how it ended, as `dike run --format json` or `dike tune --format json` prints it; None before the end,
            and if the job is not yours.
    """

    request: dict[str, Any] | None
    result: dict[str, Any] | None


class Submitted(JobView):
    """A job that was taken in.

    Attributes:
        warnings: what its user should know, one sentence each; such as that it fits on no agent seen so far.
    """

    warnings: list[str]


class JobList(View):
    """Jobs, in the order that was asked for.

    Attributes:
        jobs: a page of them.
        before: what to give as `before` for the next page; None if this is the last one.
        counts: state -> number of the user's jobs in it, of everybody's if no user was named, on all pages and whatever
            states were asked for; states without jobs are left out.
    """

    jobs: list[JobView]
    before: str | None
    counts: dict[JobState, int] = {}


class TaskList(View):
    """Tasks in the order of their launch."""

    tasks: list[TaskRecord]


class EventView(View):
    """Something that happened in a job (`framework.scheduler.records.JobEvent`)."""

    number: int
    time_s: float
    kind: str
    text: str


class EventList(View):
    """Events, oldest first.

    Attributes:
        events: a page of them.
        after: what to give as `after` for what comes next.
    """

    events: list[EventView]
    after: int


class ProgressList(View):
    """Progress in the order of the steps."""

    points: list[ProgressView]


class PlanView(View):
    """The plan that a training job follows, or followed last, as `dike plan --format json` prints it; None if none."""

    plan: dict[str, Any] | None


class TrialView(View):
    """A trial of a search (`framework.search.records.TrialRecord`).

    Attributes:
        parameters: name -> value; empty if the job is not yours.
        status: its state in more words: `starting` before the first step of a run, `restarting 2/3` after a failure.
        slot_s: for how long it has held slots; counts while it does.
        loss: the training loss of its last step.
        value: the objective, as it was reported last or the best of it (`TrialList.value`).
        best_value, best_step: the best that was ever reported, and after how many steps.
        checkpoint: its newest; null before the first and if the job is not yours.
        not_finite: figures that JSON cannot hold, and that are null here -> `nan`, `inf` or `-inf`.
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
        """The trial, as far as it is told."""
        values = self.model_dump(exclude={"status", "not_finite"})
        for name, text in self.not_finite.items():
            of_metric = name.removeprefix("metrics.")
            (values if of_metric == name else values["metrics"])[of_metric] = float(text)
        return TrialRecord(**values)


class BestTrialView(View):
    """The best trial of a search (`framework.search.records.best_trial`).

    Attributes:
        number: its number.
        in_words: its value, and the best that it ever had where that is another.
        train_command: the shell command that trains with its parameters; None where trials call a function, and if the
            job is not yours.
        export_command: the shell command that exports its model; None where the service sees none, and if the job is
            not yours.
    """

    number: int
    in_words: str
    train_command: str | None
    export_command: str | None


class TrialList(View):
    """A search's trials by number.

    Attributes:
        best: the best trial; None before there is one.
        ranking: the trials' numbers, the best first; those without a value and failed ones last.
        metric, mode: the objective, and whether its least (`min`) or greatest (`max`) value is best.
        value: whether a trial's value is the last one that it reported, or the best.
        trial_count: how many there are to be.
        trials: those that there are.
    """

    metric: str
    mode: Mode
    value: ValueKind
    trial_count: int
    trials: list[TrialView]
    best: BestTrialView | None = None
    ranking: list[int] = []


class ImportanceView(View):
    """How much each parameter of a search matters for its objective (`framework.search.importance`).

    Attributes:
        trials: how many finished trials were compared.
        needed: how many it takes.
        importances: name -> share of the importance of all, the greatest first; empty with too few trials, and if the
            job is not yours.
    """

    trials: int
    needed: int
    importances: dict[str, float]


class OutputFileView(View):
    """A file that a job's script has written below its working folder.

    Attributes:
        path: in the run's `outputs/`; of a search `trial-N/` before it.
        size_bytes: its size.
        modified_s: when it was written last, seconds since the epoch.
    """

    path: str
    size_bytes: int
    modified_s: float


class OutputList(View):
    """What a job's script has written.

    Attributes:
        folder: the run's folder, the same path on all agents.
        files: those that the service can hand out, by path.
        more: whether there are more of them than are listed.
        left_behind: path -> why it was not brought back.
        unreachable: why the service can hand none out; empty if it can.
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
    """A search's time slices, in the order in which they began."""

    slices: list[SliceView]


class LossView(View):
    """What a trial reported of a stretch of training: mean, least and greatest loss of `count` steps."""

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
    """Trial's number -> its losses, oldest first."""

    losses: dict[int, list[LossView]]
