"""Data of a search: its specification, trials, time slices and result."""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from dike.described import MAX_ITEMS, Text, UserOption
from dike.main_script import MODULE_VARIABLE
from dike.trial.spec import Value
from framework.policies.trials.interface import PolicySettings, Reading
from framework.policies.trials.registry import POLICIES
from framework.project.entry_point import EntryPoint
from framework.scheduler.task_options import Environment, JobName

Mode = Literal["min", "max"]
ValueKind = Literal["last", "best"]
Suspend = Literal["auto", "memory", "checkpoint"]
MAX_PARAMETERS = 1000
MAX_TRIALS = 100 * MAX_ITEMS
MAX_EARLIER = 20
"""Searches to warm-start from."""
MAX_FAILURES = 3
"""Consecutive failures without a new checkpoint until a trial has failed (as in Hops); fewer for errors of the script.
"""
_BATCH_SIZE_NAMES = ("batch_size", "batchsize", "batch", "bs")


class TrialState(enum.StrEnum):
    WAITING = "waiting"
    """Never ran."""
    RUNNING = "running"
    """Has a slot, also while it starts or is being suspended."""
    SUSPENDED = "suspended"
    """Has no slot; resumes from its last checkpoint or its paused process."""
    FINISHED = "finished"
    STOPPED = "stopped"
    """Ended early by `--stop`; its run may still be leaving the slot."""
    FAILED = "failed"

    def has_ended(self) -> bool:
        return self in (TrialState.FINISHED, TrialState.STOPPED, TrialState.FAILED)


Bound = Annotated[float, Field(ge=-1e300, le=1e300, allow_inf_nan=False)]


Choices = Annotated[tuple[Value, ...], Field(max_length=MAX_ITEMS)]


@dataclass(frozen=True)
class Condition:
    """Another parameter, and those of its values for which a parameter is used."""

    parameter: Text
    values: Choices


@dataclass(frozen=True)
class Parameter:
    """One dimension of a search space.

    Attributes:
        low, high: bounds of a range, inclusive.
        log: whether a range is logarithmic.
        step: distance of a range's values from each other, beginning at `low`; None for all.
        when: conditions on earlier parameters, which all have to hold; otherwise a trial does not have this one.
    """

    name: Text
    choices: Choices = ()
    low: Bound = 0.0
    high: Bound = 0.0
    is_integer: bool = False
    log: bool = False
    step: Bound | None = None
    when: Annotated[tuple[Condition, ...], Field(max_length=MAX_ITEMS)] = ()

    def is_used(self, point: Mapping[str, Value]) -> bool:
        """Returns whether a trial with these values of the earlier parameters has this one."""
        return all(each.parameter in point and point[each.parameter] in each.values for each in self.when)


_SEARCHED = "What to search"
_ORDER = "Order and early stopping of trials"
_FAILURES = "Failures"
_SLOTS = "Slots"
_CHECKPOINTS = "Checkpoints"
Seconds = Annotated[float, Field(ge=1, le=1e9, allow_inf_nan=False)]
Steps = Annotated[int, Field(ge=1, le=2**53)]


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Options of a search besides its script, space and objective, for `dike tune` and the REST API."""

    seed: Annotated[int, Field(ge=0, lt=2**63), UserOption(_SEARCHED, "Random seed of the sampler and the policy.")] = 0
    value: Annotated[
        ValueKind,
        UserOption(_SEARCHED, "Rank trials by the last value of the metric that they report, or by the best."),
    ] = "last"
    policy: Annotated[
        Text,
        UserOption(
            _ORDER,
            f"Policy that chooses which trials run next: {', '.join(sorted(POLICIES))}. All trials are trained to "
            "their end, unless you set --stop.",
        ),
    ] = "dike"
    warm_start_from: Annotated[
        tuple[JobName, ...],
        Field(max_length=MAX_EARLIER),
        UserOption(
            _ORDER,
            "Earlier search of the same model. The policy dike uses its finished trials to estimate which trials are "
            "promising. Repeatable.",
            metavar="NAME",
            read=tuple,
            reads=list[str],
        ),
    ] = ()
    mutate: Annotated[
        tuple[Text, ...],
        Field(max_length=MAX_PARAMETERS),
        UserOption(
            _ORDER,
            "Parameter that may change while a trial trains, such as a learning rate (policy pbt). Repeatable.",
            metavar="NAME",
            read=tuple,
            reads=list[str],
        ),
    ] = ()
    stop: Annotated[
        Text,
        UserOption(
            _ORDER,
            "Stop unpromising trials by this rule: asha, asha=N, median, patience=N or threshold=X, with N in epochs "
            "or reports.",
            default="no trial is stopped",
        ),
    ] = ""
    max_epochs: Annotated[
        Steps | None,
        UserOption(
            _ORDER,
            "Train each trial for at most N epochs of fit, or N reports of the metric; then it has finished.",
            settable_on_resume=True,
        ),
    ] = None
    max_steps: Annotated[
        Steps | None,
        UserOption(
            _ORDER,
            "Train each trial for at most N steps (batches, or steps of dike.report); then it has finished.",
            settable_on_resume=True,
        ),
    ] = None
    timeout_s: Annotated[
        Seconds | None,
        UserOption(
            _ORDER,
            "Maximum time of the search, seconds. Then its trials are suspended, and you can resume it. With --detach, "
            "the time counts from the first slot.",
            settable_on_resume=True,
        ),
    ] = None
    budget: Annotated[
        Text,
        UserOption(
            _ORDER,
            "Maximum hours of GPUs or CPUs for which trials have slots, such as 40gpuh or 100cpuh. Then they are "
            "suspended, and you can resume the search.",
            default="no limit",
            settable_on_resume=True,
        ),
    ] = ""
    on_failure: Annotated[
        Text,
        UserOption(
            _FAILURES,
            "What to do when a trial fails: continue the search, or abort it. retry=N: before that, retry the trial N "
            "times, whatever the error. larger-gpu: if it ran out of GPU memory, retry it on a GPU model with more. "
            "Separate several by commas.",
            settable_on_resume=True,
        ),
    ] = "continue"
    trial_timeout_s: Annotated[
        Seconds | None,
        UserOption(
            _FAILURES,
            "Maximum time that a trial runs, seconds, without suspensions; then it fails.",
            settable_on_resume=True,
        ),
    ] = None
    stall_timeout_s: Annotated[
        Seconds | None,
        UserOption(
            _FAILURES,
            "Maximum time without reports, output and CPU use of a trial, seconds; then it fails.",
            settable_on_resume=True,
        ),
    ] = None
    agent_cooldown_s: Annotated[
        float,
        Field(ge=0, le=1e9, allow_inf_nan=False),
        UserOption(_FAILURES, "Time for which an agent is not used after failures, seconds.", settable_on_resume=True),
    ] = 300.0
    max_slots: Annotated[
        int | None,
        Field(ge=1, le=MAX_ITEMS),
        UserOption(_SLOTS, "Maximum number of slots.", flag="--slots", settable_on_resume=True),
    ] = None
    slot_cpus: Annotated[
        float,
        Field(ge=0.1, le=1e9, allow_inf_nan=False),
        UserOption(_SLOTS, "CPUs per slot; for slots with GPUs, the minimum.", settable_on_resume=True),
    ] = 1.0
    slot_mem_mib: Annotated[
        float,
        Field(ge=64, le=1e9, allow_inf_nan=False),
        UserOption(_SLOTS, "Memory per slot, MiB; for slots with GPUs, the minimum.", settable_on_resume=True),
    ] = 2048.0
    slot_gpus: Annotated[
        int | None,
        Field(ge=0, le=MAX_ITEMS),
        UserOption(_SLOTS, "GPUs per slot.", default="1 where agents have GPUs", settable_on_resume=True),
    ] = None
    slots_per_gpu: Annotated[
        Text,
        UserOption(
            _SLOTS,
            "Slots that share one GPU and its memory, for trials that are too small to use it alone: a number, or auto "
            "to derive it from the GPU memory of the first trials.",
            metavar="N|auto",
            settable_on_resume=True,
        ),
    ] = "1"
    checkpoint_interval_s: Annotated[
        float,
        Field(ge=1, le=1e9, allow_inf_nan=False),
        UserOption(_CHECKPOINTS, "Time between a trial's checkpoints, seconds.", settable_on_resume=True),
    ] = 60.0
    suspend: Annotated[
        Suspend,
        UserOption(
            _CHECKPOINTS,
            "How to suspend a trial: checkpoint saves it and ends its process; memory saves it and pauses its process "
            "in memory, on GPUs if the driver can; auto does the same as memory, but on GPUs chooses whichever is "
            "expected to resume sooner.",
            settable_on_resume=True,
        ),
    ] = "auto"
    suspend_timeout_s: Annotated[
        float,
        Field(ge=0.1, le=1e9, allow_inf_nan=False),
        UserOption(
            _CHECKPOINTS,
            "Maximum time to save a trial that is suspended, seconds; then it is killed.",
            settable_on_resume=True,
        ),
    ] = 30.0


@dataclass(frozen=True)
class SearchSpec(SearchOptions):
    """A stored search, so that `--resume` needs only its name.

    Attributes:
        name: the search's name, unique in its storage.
        script: absolute path of the script on the user's machine; inside its bundle on a service.
        arguments: arguments that every trial gets.
        flags: parameter -> how it is written (`framework.project.script_flags`); a parameter that is missing here
            reaches the script by `dike.params` alone.
        space: what is searched; empty with `space_function`.
        sampler: how points of the space are chosen (`framework.search.samplers`).
        trial_count: number of trials.
        settings: of the policy.
        metric, mode: the objective; `loss` is the training loss.
        checkpoint_dir: folder for the trials' folders; the same path on all agents.
        call: which call of `dike.tune` in the script this is; None for a search over a whole script.
        earlier_results: what the calls before it returned.
        environment: variables for the trials' processes.
        folder: absolute path of the folder that travels with the script, and in which trials work; empty for the
            script's own.
        sampler_object: the sampler, pickled and signed (`framework.search.samplers.load_object`); empty to use
            `sampler`.
        space_function: a function that asks an Optuna trial for its parameters, in the same way; empty for `space`.
        reads_params: whether the script calls `dike.params`, by its source.
        distributes_itself: whether a trial is as many processes as its slot has GPUs, by the script's source.
    """

    name: JobName
    script: Text
    arguments: Annotated[tuple[Text, ...], Field(max_length=MAX_ITEMS)]
    flags: Annotated[dict[Text, Text], Field(max_length=MAX_PARAMETERS)]
    space: Annotated[tuple[Parameter, ...], Field(max_length=MAX_PARAMETERS)]
    sampler: Text
    trial_count: Annotated[int, Field(ge=1, le=MAX_TRIALS)]
    settings: PolicySettings = field(default_factory=PolicySettings)
    metric: Text = "loss"
    mode: Mode = "min"
    checkpoint_dir: Text = ""
    call: Annotated[int | None, Field(ge=0, lt=2**31)] = None
    earlier_results: tuple[dict[str, Any], ...] = ()
    environment: Environment = field(default_factory=dict)
    folder: str = ""
    sampler_object: str = ""
    space_function: str = ""
    reads_params: bool = False
    distributes_itself: bool = False

    @property
    def goal(self) -> str:
        """The objective in words, such as `least training loss`."""
        metric = "training loss" if self.metric == "loss" else self.metric
        return f"{'least' if self.mode == 'min' else 'greatest'} {metric}"

    @property
    def entry(self) -> EntryPoint:
        script = Path(self.script)
        folder = Path(self.folder) if self.folder else script.parent
        return EntryPoint(script, folder, self.environment.get(MODULE_VARIABLE, ""))


def describe_value(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def describe_parameters(parameters: Mapping[str, Value]) -> str:
    """Formats parameters: `lr=0.1, units=64`."""
    return ", ".join(f"{name}={describe_value(value)}" for name, value in parameters.items())


@dataclass
class TrialRecord:
    """One trial.

    Attributes:
        failures: number of consecutive failed runs without a new checkpoint.
        step: training steps, as last reported.
        train_s: training time, as last reported.
        slot_s: time in slots, including start and save.
        loss: training loss of the last step.
        value: last or best objective (`SearchSpec.value`), not negated.
        best_value, best_step: best objective ever reported, and its step.
        convergence: last score from the policy.
        checkpoint, checkpoint_step: its newest checkpoint.
        agent, slot: where it last ran; `slot` is None if it has none now.
        batch_size: samples per step, as reported by its process.
        error: why it failed: the end of its output with the traceback; empty if it did not.
        reports: number of stored reports of its newest run.
        stated, stated_step: number of objective values reported in a search that stops trials, and the step of the
            last.
        readings: readings for the policy (objective to be minimized), until it has ended.
        slices: for each time slice, the number of readings before it.
        created_s, ended_s: seconds since the epoch.
        retries: consecutive failed runs since its last step.
        current: its current time slice; None without a slot.
    """

    number: int
    parameters: dict[str, Value]
    state: TrialState = TrialState.WAITING
    runs: int = 0
    failures: int = 0
    step: int = 0
    train_s: float = 0.0
    slot_s: float = 0.0
    loss: float | None = None
    value: float | None = None
    best_value: float | None = None
    best_step: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    convergence: float | None = None
    checkpoint: str | None = None
    checkpoint_step: int = 0
    agent: str = ""
    slot: int | None = None
    batch_size: float | None = None
    error: str = ""
    reports: int = 0
    stated: int = 0
    stated_step: int = 0
    readings: list[Reading] = field(default_factory=list)
    slices: list[int] = field(default_factory=list)
    created_s: float = 0.0
    ended_s: float | None = None
    retries: int = 0
    current: SliceRecord | None = field(default=None, compare=False)

    @property
    def status(self) -> str:
        """Its state; `starting`, after a failure `restarting (try 2)`, `waiting for slot` until another leaves it."""
        is_training = self.step > 0 and self.current is not None and self.current.first_step_s is not None
        if self.state.has_ended() or is_training:
            return str(self.state)
        if self.retries:
            return f"restarting (try {self.retries + 1})"
        if self.state is TrialState.RUNNING:
            return "waiting for slot" if self.current is None else "starting"
        return str(self.state)

    def held_s(self, now_s: float) -> float:
        """Returns its total time in slots until `now_s`, seconds since the epoch."""
        return self.slot_s + (max(0.0, now_s - self.current.start_s) if self.current is not None else 0.0)

    @property
    def samples_per_step(self) -> float:
        """Its batch size: the parameter of that name, else as reported by its process, else 1."""
        for name, value in self.parameters.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if name.lower().replace("-", "_") in _BATCH_SIZE_NAMES and is_number and float(value) > 0:
                return float(value)
        return self.batch_size or 1.0

    @property
    def samples(self) -> float:
        """Samples trained on; steps if its batch size is unknown."""
        return self.step * self.samples_per_step

    def beats(self, other: TrialRecord | None, mode: Mode) -> bool:
        """Returns whether its value is better; missing, NaN and infinite values never win."""
        if self.value is None or not math.isfinite(self.value):
            return False
        if other is None or other.value is None or not math.isfinite(other.value):
            return True
        return self.value < other.value if mode == "min" else self.value > other.value

    def in_words(self, metric: str) -> str:
        """Formats its value, and its best one if different: `loss 0.3, at best 0.2 at step 40`."""
        reached = self.reached()
        if self.value is None:
            return "no value"
        value = f"{metric} {self.value:.4g}"
        return (
            value
            if reached is None or reached[0] == self.value
            else f"{value}, at best {reached[0]:.4g} at step {reached[1]:,}"
        )

    def reached(self) -> tuple[float, int] | None:
        """Returns its best value and the step of it; None before the first finite one."""
        return None if self.best_value is None else (self.best_value, self.best_step or 0)

    @property
    def not_finite(self) -> dict[str, str]:
        """Numbers that JSON cannot represent: name or `metrics.NAME` -> `nan`, `inf` or `-inf`."""
        figures = {
            **{name: getattr(self, name) for name in ("loss", "value", "best_value", "convergence")},
            **{f"metrics.{name}": value for name, value in self.metrics.items()},
        }
        return {name: str(value) for name, value in figures.items() if value is not None and not math.isfinite(value)}

    def to_json(self) -> dict[str, Any]:
        """Converts to JSON values; non-finite numbers are null and listed in `not_finite`."""
        return {
            "number": self.number,
            "parameters": self.parameters,
            "state": str(self.state),
            "status": self.status,
            "slot": self.slot,
            "batch_size": self.samples_per_step,
            "agent": self.agent,
            "step": self.step,
            "loss": _number(self.loss),
            "value": _number(self.value),
            "best_value": _number(self.best_value),
            "best_step": self.best_step,
            "metrics": {name: _number(value) for name, value in self.metrics.items()},
            "convergence": _number(self.convergence),
            "not_finite": self.not_finite,
            "checkpoint": self.checkpoint,
            "train_s": round(self.train_s, 3),
            "slot_s": round(self.held_s(time.time()), 3),
            "runs": self.runs,
            "created_s": self.created_s,
            "ended_s": self.ended_s,
            "error": self.error,
        }


def ranked(trials: Iterable[TrialRecord], mode: Mode) -> list[TrialRecord]:
    """Sorts trials: finished ones by value, others by value, then failed ones and those without a finite value."""
    sign = 1 if mode == "min" else -1

    def key(trial: TrialRecord) -> tuple[int, float, int]:
        if trial.state is TrialState.FAILED or trial.value is None or not math.isfinite(trial.value):
            return 2, 0.0, trial.number
        return 0 if trial.state is TrialState.FINISHED else 1, sign * trial.value, trial.number

    return sorted(trials, key=key)


def best_trials(trials: Iterable[TrialRecord], mode: Mode) -> list[TrialRecord]:
    """Returns `ranked` without trials that have failed or have no finite value."""
    return [trial for trial in ranked(trials, mode) if trial.state is not TrialState.FAILED and trial.beats(None, mode)]


def best_trial(trials: Iterable[TrialRecord], mode: Mode) -> TrialRecord | None:
    """Returns the best finished trial, as in Optuna; if none has finished, the best that has not failed.

    All tables, messages, the page, the REST API and `dike export` use this definition.
    """
    return next(iter(best_trials(trials, mode)), None)


def _ever_best(trials: Iterable[TrialRecord], mode: Mode) -> TrialRecord | None:
    """Returns the trial with the best value ever (`TrialRecord.reached`), whose checkpoints are kept, too."""
    best: tuple[float, int, TrialRecord] | None = None
    sign = 1 if mode == "min" else -1
    for trial in trials:
        reached = trial.reached()
        if reached is not None and (best is None or (sign * reached[0], trial.number) < best[:2]):
            best = sign * reached[0], trial.number, trial
    return None if best is None else best[2]


@dataclass
class SliceRecord:
    """One time slice: a run of a trial in a slot.

    Attributes:
        trial, run: number of the trial, and of its run.
        kind: kind of the slot (`framework.search.slot_pool.kind_of`); empty if unknown.
        start_s, end_s: from the decision until the slot was free, seconds since the epoch.
        first_step_s: time of its first step; None if it took none.
        reason, convergence: why the policy chose it, and its score.
        from_step, to_step: the trial's steps before and after.
        outcome: see `executor.trial_messages.RunEnd.outcome`; `lost` if its slot ended first; empty while it runs.
        suspend_s: seconds from the request to suspend until the slot was free.
        samples_per_s: its speed; None with too few reports.
        rss_bytes, cpu, gpu_mem_bytes, gpu_utilisation: maximum use; None if unknown.
        process: `new`, or `continued` if a paused process resumed; empty before the first step.
    """

    trial: int
    run: int
    slot: int
    agent: str
    start_s: float
    end_s: float | None = None
    first_step_s: float | None = None
    reason: str = ""
    convergence: float | None = None
    from_step: int = 0
    to_step: int = 0
    outcome: str = ""
    suspend_s: float | None = None
    kind: str = ""
    samples_per_s: float | None = None
    rss_bytes: int | None = None
    cpu: float | None = None
    gpu_mem_bytes: int | None = None
    gpu_utilisation: float | None = None
    process: str = ""


@dataclass
class SearchOutcome:
    """Result of a search.

    Attributes:
        failure: why the search ended early; empty if it did not.
        last_words: the script's own message, if it is not in `failure`, which is public.
    """

    name: str
    complete: bool
    trials: list[TrialRecord]
    mode: Mode
    checkpoint_dir: str
    failure: str = ""
    last_words: str = ""

    @property
    def best(self) -> TrialRecord | None:
        return best_trial(self.trials, self.mode)

    def dispensable(self, *, may_resume: bool = True) -> list[TrialRecord]:
        """Returns trials whose checkpoints can be deleted: all but `leading` ones and those that may run again."""
        spared = [id(trial) for trial in self.leading]
        return [each for each in self.trials if id(each) not in spared and (each.state.has_ended() or not may_resume)]

    @property
    def leading(self) -> list[TrialRecord]:
        """The best trial, and the one with the best value ever; no failed ones."""
        sound = [trial for trial in self.trials if trial.state is not TrialState.FAILED]
        return [trial for trial in (self.best, _ever_best(sound, self.mode)) if trial is not None]

    def to_json(self) -> dict[str, Any]:
        """Converts to the JSON values that `dike tune --format json` prints and a service stores."""
        return {
            "name": self.name,
            "complete": self.complete,
            "failure": self.failure,
            "last_words": self.last_words,
            "checkpoint_dir": self.checkpoint_dir,
            "best": None if self.best is None else self.best.to_json(),
            "trials": [trial.to_json() for trial in self.trials],
        }


def trials_to_resume(
    records: list[TrialRecord], asked: Mapping[int, dict[str, Value]], live_slots: Collection[int] = ()
) -> list[TrialRecord]:
    """Returns the trials of an interrupted search, with running ones suspended at their last checkpoints.

    Args:
        records: the stored trials.
        asked: number -> parameters of every trial from the sampler; the last may have no record.
        live_slots: slots that may still run, and whose runs continue.
    """
    known = {record.number for record in records}
    records = [*records, *(TrialRecord(number, point) for number, point in asked.items() if number not in known)]
    for record in records:
        if record.state is TrialState.RUNNING and record.slot not in live_slots:
            record.state = TrialState.WAITING if record.checkpoint is None else TrialState.SUSPENDED
            record.slot = record.current = None
        elif record.state is TrialState.STOPPED and record.slot not in live_slots:
            record.slot = record.current = None  # its run has gone with it
    return records


def _number(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else None
