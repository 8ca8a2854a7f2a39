"""What a client sends to submit a job, and what becomes of it. Everything here is checked before it is believed."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from dike.exceptions import BadInputError, DikeError
from dike.profile import ModelProfile
from framework.mesos.containers import parse_volumes
from framework.policies.trials.registry import check_learning, make_policy
from framework.scheduler.constraints import parse_constraints
from framework.scheduler.records import JobKind, JobRecord
from framework.search.pruners import parse_stop
from framework.search.records import SearchSpec
from framework.search.samplers import EXHAUSTIVE, check_sampler, grid_size
from framework.search.space import check_space
from framework.search.store import SearchSummary
from framework.training.elastic.options import read_bounds, read_stragglers
from framework.training.spec import MAX_VARIABLES, JobSpec, check_can_run
from solver import Plan
from solver.choices import MOST_TASK_MEM_MIB
from solver.settings import LONGEST_LIVE_S, PlanSettings

if TYPE_CHECKING:
    from solver.calibration import Measurement
    from solver.network import Network

MAX_TEXT = 4096
MAX_ITEMS = 10_000
MAX_NAME = 200
MAX_PARAMETERS = 1000
MAX_MEASUREMENTS = 200
"""More would take longer to fit than offers wait."""
MAX_ENVIRONMENT_BYTES = 256 * 1024
"""Of all variables together: Linux starts no process with more than 2 MiB of them and of arguments."""
_STORED = "stored"
"""Context of reading what was checked before."""
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._+-]{{0,{MAX_NAME - 1}}}")
"""A job's name is part of Mesos' ids and of paths."""


def check_name(text: str) -> str:
    """The name of a job, as it is.

    Raises:
        ValueError: if it cannot be one.
    """
    if not _NAME.fullmatch(text):
        raise ValueError(f"is of up to {MAX_NAME} letters, digits, '.', '_', '+' and '-', a letter or digit first")
    return text


def _relative(path: str) -> str:
    if path.startswith("/") or ".." in path.split("/"):
        raise ValueError("is a path inside the bundle, without '..'")
    return path


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("holds a NUL, which no database and no process takes")
    return text


def _environment(variables: dict[str, str], info: ValidationInfo) -> dict[str, str]:
    if any(not name or "=" in name or "\0" in name for name in variables):
        raise ValueError("holds something that is not an environment variable")
    size = sum(len(f"{name}={value}".encode(errors="replace")) for name, value in variables.items())
    if size > MAX_ENVIRONMENT_BYTES and info.context is not _STORED:
        raise ValueError(f"holds {size} bytes of variables; more than {MAX_ENVIRONMENT_BYTES} belong into a file")
    return variables


def _accepted_by(parse: Callable[[list[str]], object]) -> AfterValidator:
    def check(texts: list[str]) -> list[str]:
        try:
            parse(texts)
        except DikeError as error:
            raise ValueError(str(error)) from error
        return texts

    return AfterValidator(check)


Text = Annotated[str, Field(max_length=MAX_TEXT), AfterValidator(_without_nul)]
Seconds = Annotated[float, Field(ge=1, le=1e9, allow_inf_nan=False)]
Name = Annotated[str, AfterValidator(check_name)]
Script = Annotated[Text, Field(min_length=1), AfterValidator(_relative)]
ConstraintTexts = Annotated[list[Text], Field(max_length=100), _accepted_by(parse_constraints)]
VolumeTexts = Annotated[list[Text], Field(max_length=100), _accepted_by(parse_volumes)]
Environment = Annotated[dict[Text, Text], Field(max_length=1000), AfterValidator(_environment)]


MAX_TRIALS = 100 * MAX_ITEMS
MAX_EARLIER = 20
"""Searches that another learns from."""
Positive = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Measured = Annotated[float, Field(ge=1e-7, le=1e9, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=MAX_ITEMS)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Bound = Annotated[float, Field(ge=-1e300, le=1e300, allow_inf_nan=False)]


class _Bounds(BaseModel):
    model_config = ConfigDict(from_attributes=True)


class _Parameter(_Bounds):
    name: Text
    choices: Annotated[tuple[Text | bool | int | float, ...], Field(max_length=MAX_ITEMS)]
    low: Bound
    high: Bound


class _Milestone(_Bounds):
    decrease: Annotated[float, Field(gt=0, le=1)]
    quantum_s: Positive | None
    times: Positive


class _Settings(_Bounds):
    quantum_s: Positive
    jobs_per_slot: Count
    milestones: tuple[_Milestone, ...]
    seed: Seed
    switch_s: NotNegative
    move_s: NotNegative
    quantum_growth: NotNegative


class _Search(_Bounds):
    name: Name
    script: Script
    arguments: Annotated[tuple[Text, ...], Field(max_length=MAX_ITEMS)]
    flags: Annotated[dict[Text, Text], Field(max_length=MAX_PARAMETERS)]
    space: Annotated[tuple[_Parameter, ...], Field(max_length=MAX_PARAMETERS)]
    sampler: Text
    stop: Text
    trial_count: Annotated[int, Field(ge=1, le=MAX_TRIALS)]
    seed: Seed
    settings: _Settings
    metric: Text
    slot_cpus: Positive
    slot_mem_mib: Positive
    slot_gpus: Annotated[int, Field(ge=0, le=MAX_ITEMS)] | None
    max_slots: Count | None
    checkpoint_dir: Text
    checkpoint_interval_s: Positive
    suspend_timeout_s: Positive
    blacklist_s: NotNegative
    timeout_s: Positive | None
    trial_timeout_s: Positive | None
    stall_timeout_s: Positive | None
    learn_from: Annotated[tuple[Name, ...], Field(max_length=MAX_EARLIER)]
    call: Annotated[int, Field(ge=0, lt=2**31)] | None
    environment: Environment


def check_search(spec: SearchSpec) -> None:
    """Refuses a search that could not be run.

    Raises:
        pydantic.ValidationError: if a field is out of its bounds.
        BadInputError: if there is no such policy, or its space cannot be searched in this way.
    """
    _Search.model_validate(spec)
    make_policy(spec.policy, spec.settings)
    check_learning(spec.policy, spec.learn_from)
    if spec.sampler_object or spec.space_function:
        raise BadInputError("A service runs no Python objects of its users: name the sampler and list the space.")
    check_sampler(spec.sampler)
    if spec.stop:
        parse_stop(spec.stop)
    check_space(spec.space)
    for parameter in spec.space:
        # A grid has every whole number of a range.
        longest = MAX_TRIALS if spec.sampler in EXHAUSTIVE else 2**53
        if parameter.is_integer and parameter.high - parameter.low > longest:
            raise BadInputError(f"The range of '{parameter.name}' is too long.")
    if spec.sampler in EXHAUSTIVE and not spec.trial_count <= grid_size(spec.space) < 2**63:
        raise BadInputError("The grid has fewer points than there are trials, or more than can be counted.")


class MeasuredStep(BaseModel):
    """How long a step took with one placement (`solver.calibration.Measurement`).

    Attributes:
        ps: machine of each parameter server.
        workers: machine of each worker.
        gpus, cpus: of each worker.
        seconds: in which every worker made one step; None where `samples_per_s` is given.
        samples_per_s: of the whole job; None where `seconds` is given.
        batch_size: samples per step of one worker; None for the model's.
        shard_bytes: bytes of variables on each parameter server; None for those that a plan would put there.
        where: file and line, for messages.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    ps: Annotated[tuple[Text, ...], Field(min_length=1, max_length=MAX_ITEMS)]
    workers: Annotated[tuple[Text, ...], Field(min_length=1, max_length=MAX_ITEMS)]
    gpus: Annotated[int, Field(ge=0, le=1000)] = 0
    cpus: Annotated[float, Field(gt=0, le=1e4, allow_inf_nan=False)]
    seconds: Measured | None = None
    samples_per_s: Measured | None = None
    batch_size: Annotated[int, Field(ge=1, le=10**9)] | None = None
    shard_bytes: Annotated[tuple[Annotated[int, Field(ge=1, lt=2**62)], ...], Field(max_length=MAX_ITEMS)] | None = None
    where: Text = "A measurement"

    @classmethod
    def of(cls, row: Measurement) -> MeasuredStep:
        """A measurement as a request has it."""
        return cls(
            ps=row.assignment.ps,
            workers=row.assignment.workers,
            gpus=row.shape.gpus,
            cpus=row.shape.cpus,
            seconds=row.seconds,
            samples_per_s=row.samples_per_s,
            batch_size=row.batch_size,
            shard_bytes=row.shard_bytes,
            where=row.where,
        )

    def to_measurement(self) -> Measurement:
        """The measurement.

        Raises:
            BadInputError: if it says nothing, or contradicts itself.
        """
        # Late: few jobs have any, and what reads them takes a while to import.
        from solver.calibration import Measurement
        from solver.placement.naming import Assignment
        from solver.resources import WorkerShape

        return Measurement(
            WorkerShape(self.gpus, self.cpus),
            Assignment(self.ps, self.workers, None),
            self.seconds,
            self.samples_per_s,
            self.batch_size,
            self.shard_bytes,
            self.where,
        )


class TrainingRequest(BaseModel):
    """A training job as it is submitted; most fields mean what they mean in `framework.training.spec.JobSpec`.

    Attributes:
        name: the job's id; None to make one up.
        constraints: see `JobRecord`.
        volumes: folders of the agents for its containers (`framework.mesos.containers.parse_volume`).
        objective, rules, sharding, gpus_per_task, task_mem_mb, time_limit_s, measurements: how it is planned
            (`solver.settings.PlanSettings`).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["training"] = "training"
    name: Name | None = None
    script: Script
    arguments: Annotated[list[Text], Field(max_length=MAX_ITEMS)] = []
    profile: dict[str, Any]
    profile_is_kept: bool = False
    checkpoint_dir: Text | None = None
    checkpoint_interval_s: Seconds = 60.0
    max_restarts: Annotated[int, Field(ge=0, le=1000)] = 3
    objective: Literal["throughput", "traffic"] = "throughput"
    min_workers: Annotated[int, Field(ge=1, le=MAX_ITEMS)] | None = None
    max_workers: Annotated[int, Field(ge=1, le=MAX_ITEMS)] | None = None
    plan: dict[str, Any] | None = None
    stream_all_logs: bool = False
    environment: Environment = {}
    elastic: Text | None = None
    resize_interval_s: Seconds = 60.0
    stragglers: Literal["replace", "report", "ignore"] | None = None
    preload: Annotated[list[Text], Field(max_length=1000)] | None = None
    constraints: ConstraintTexts = []
    volumes: VolumeTexts = []
    isolate_tasks: bool = False
    rules: Text = "default"
    sharding: Literal["optimus", "greedy", "round_robin"] = "greedy"
    gpus_per_task: Annotated[int, Field(ge=1, le=MAX_ITEMS)] = 1
    task_mem_mb: Annotated[int, Field(ge=0, le=MOST_TASK_MEM_MIB)] = 0
    time_limit_s: Annotated[float, Field(gt=0, le=LONGEST_LIVE_S)] | None = None
    measurements: Annotated[list[MeasuredStep], Field(max_length=MAX_MEASUREMENTS)] = []

    @model_validator(mode="after")
    def _is_consistent(self, info: ValidationInfo) -> TrainingRequest:
        if info.context is _STORED:
            return self
        try:
            spec = self.to_spec(job_id="job", checkpoint_dir="", bundle_url="", python="")
            spec.planning.check()
            spec.planning.check_tasks(spec.profile, spec.min_workers if spec.elastic is None else spec.elastic[0])
            if spec.plan is not None:
                check_can_run(spec.plan)
        except (DikeError, ValueError, TypeError, KeyError) as error:
            raise ValueError(str(error)) from error
        if len(spec.profile.variables) > MAX_VARIABLES:
            raise ValueError(f"the model has more than {MAX_VARIABLES} variables, too many to plan for in a service")
        return self

    def to_spec(self, network: Network | None = None, **of_the_service: Any) -> JobSpec:
        """The job, with what the service adds: `job_id`, `checkpoint_dir`, `bundle_url`, `python` and the like.

        Args:
            network: what the service knows of the links.
            of_the_service: further fields of the job.

        Raises:
            BadInputError: if the request contradicts itself.
            ValueError, TypeError, KeyError: if profile, plan or measurements are none.
        """
        bounds = read_bounds(
            self.elastic,
            min_workers=self.min_workers,
            max_workers=self.max_workers,
            has_plan=self.plan is not None,
        )
        values: dict[str, Any] = {
            "script": self.script,
            "arguments": tuple(self.arguments),
            "profile": ModelProfile.from_json(self.profile),
            "profile_is_kept": self.profile_is_kept,
            "checkpoint_interval_s": self.checkpoint_interval_s,
            "max_restarts": self.max_restarts,
            "planning": PlanSettings(
                objective=self.objective,
                rules=self.rules,
                sharding=self.sharding,
                time_limit_s=self.time_limit_s,
                measurements=tuple(step.to_measurement() for step in self.measurements),
                network=network,
                gpus_per_task=self.gpus_per_task,
                task_mem_mb=self.task_mem_mb,
            ),
            "min_workers": self.min_workers,
            "max_workers": self.max_workers,
            "plan": None if self.plan is None else Plan.from_json(self.plan),
            "stream_all_logs": self.stream_all_logs,
            "environment": dict(self.environment),
            "elastic": bounds,
            "resize_interval_s": self.resize_interval_s,
            "stragglers": read_stragglers(self.stragglers, is_elastic=bounds is not None),
            "preload": None if self.preload is None else tuple(self.preload),
            "isolate_tasks": self.isolate_tasks,
        }
        return JobSpec(**{**values, **of_the_service})


class SearchJobRequest(BaseModel):
    """A search as it is submitted.

    Attributes:
        spec: `framework.search.records.SearchSpec` as JSON values, its script being a path inside the bundle.
        preload: modules for the zygotes, as `framework.project.script_facts` finds them on the client.
        constraints: see `JobRecord`.
        volumes: folders of the agents for its containers (`framework.mesos.containers.parse_volume`).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["search"] = "search"
    spec: dict[str, Any]
    preload: Annotated[list[Text], Field(max_length=1000)] = []
    constraints: ConstraintTexts = []
    volumes: VolumeTexts = []

    @model_validator(mode="after")
    def _is_a_search(self, info: ValidationInfo) -> SearchJobRequest:
        if info.context is _STORED:
            return self
        try:
            check_search(self.to_spec())
        except ValidationError as error:
            raise ValueError(_first_of(error)) from error
        except DikeError as error:
            raise ValueError(str(error)) from error
        return self

    def to_spec(self) -> SearchSpec:
        """The search.

        Raises:
            ValueError: if it is none.
        """
        return _SEARCH_SPEC.validate_python(self.spec)


class Resumption(BaseModel):
    """How a search that has ended is gone on with.

    Attributes:
        constraints: see `JobRecord`; None for those that it had before.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    constraints: ConstraintTexts | None = None


JobRequest = Annotated[TrainingRequest | SearchJobRequest, Field(discriminator="kind")]
_SEARCH_SPEC = TypeAdapter(SearchSpec)
_REQUEST: TypeAdapter[TrainingRequest | SearchJobRequest] = TypeAdapter(JobRequest)


def read_request(values: Any) -> TrainingRequest | SearchJobRequest:
    """Checks a request that came as JSON values.

    Raises:
        BadInputError: if it is malformed; the message names the first field that is.
    """
    try:
        return _REQUEST.validate_python(values)
    except ValidationError as error:
        raise _refused(error) from error


def stored_request(record: JobRecord) -> TrainingRequest | SearchJobRequest:
    """What a job in the database was asked for; that was checked when it came, and is not checked again.

    Raises:
        BadInputError: if it cannot be read any more.
    """
    try:
        return _REQUEST.validate_python(record.request, context=_STORED)
    except ValidationError as error:
        raise _refused(error) from error


def planning_fields(planning: PlanSettings) -> dict[str, Any]:
    """The fields of a request that say how a job is planned; what is known of the network is the service's."""
    return {
        "objective": planning.objective,
        "rules": planning.rules,
        "sharding": planning.sharding,
        "gpus_per_task": planning.gpus_per_task,
        "task_mem_mb": planning.task_mem_mb,
        "time_limit_s": planning.time_limit_s,
        "measurements": [MeasuredStep.of(row).model_dump(exclude_none=True) for row in planning.measurements],
    }


def _refused(error: ValidationError) -> BadInputError:
    return BadInputError(f"The job cannot be taken: {_first_of(error)}.")


def _first_of(error: ValidationError) -> str:
    first = error.errors()[0]
    said = first["msg"].removeprefix("Value error, ").rstrip(".")
    where = ".".join(str(part) for part in first["loc"] if part not in tuple(JobKind))
    return f"{where}: {said}" if where else said


def training_request(**values: Any) -> TrainingRequest:
    """A training job to be submitted, of these fields of the request.

    Raises:
        BadInputError: if no service would take it.
    """
    try:
        return TrainingRequest(**values)
    except ValidationError as error:
        raise _refused(error) from error


def search_request(spec: SearchSpec, script: str, preload: tuple[str, ...], **more: Any) -> SearchJobRequest:
    """A search to be submitted, its script at this path inside the bundle; `more` are further fields of the request.

    Raises:
        BadInputError: if no service would take it.
    """
    values = dataclasses.asdict(dataclasses.replace(spec, script=script, folder=""))
    try:
        return SearchJobRequest(spec=values, preload=list(preload), **more)
    except ValidationError as error:
        raise _refused(error) from error


def is_own_search(record: JobRecord, search: SearchSummary) -> bool:
    """Whether a search of a job's name is the job's own, and not one that `dike tune` has made.

    Raises:
        BadInputError: if the job's request cannot be read any more.
    """
    if record.state_data is not None:
        return True
    # A service that was killed may have made it and not come to write down anything of the job.
    request = stored_request(record)
    assert isinstance(request, SearchJobRequest)
    # Where its checkpoints are the service may have chosen, and each service chooses for itself.
    asked = dataclasses.replace(request.to_spec(), checkpoint_dir=search.spec.checkpoint_dir)
    return search.spec == asked and search.created_s >= record.submitted_s
