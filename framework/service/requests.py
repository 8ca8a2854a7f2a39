"""The requests that clients send to submit a job. They are validated before use."""

from __future__ import annotations

import dataclasses
from dataclasses import field
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
from pydantic.dataclasses import dataclass as pydantic_dataclass

from dike.described import MAX_ITEMS, Text, refusal, values_of
from dike.exceptions import BadInputError
from dike.profile import ModelProfile
from framework.scheduler.queue_options import QueueOptions
from framework.scheduler.records import JobKind, JobRecord
from framework.scheduler.task_options import Constraints, Environment, JobName, Volumes
from framework.search.limits import check_options
from framework.search.records import MAX_PARAMETERS, MAX_TRIALS, Parameter, SearchSpec
from framework.search.samplers import EXHAUSTIVE, check_sampler, grid_size
from framework.search.space import check_policy, check_space
from framework.search.store import SearchSummary
from framework.training.options import TrainingOptions
from framework.training.spec import MAX_VARIABLES, JobSpec, check_can_run
from solver import Plan
from solver.settings import PlanOptions, PlanSettings

if TYPE_CHECKING:
    from solver.calibration import Measurement
    from solver.network import Network

MAX_MEASUREMENTS = 200
"""Fitting more would take longer than offers are kept."""
_STORED = "stored"
"""Validation context for requests from the database, which are not checked again."""
_STRICT = ConfigDict(extra="forbid")


def _check_relative(path: str) -> str:
    if path.startswith("/") or ".." in path.split("/"):
        raise ValueError("is a path inside the bundle, without '..'")
    return path


Script = Annotated[Text, Field(min_length=1), AfterValidator(_check_relative)]
Measured = Annotated[float, Field(ge=1e-7, le=1e9, allow_inf_nan=False)]


def check_search(spec: SearchSpec) -> None:
    """Raises `BadInputError` if the policy is unknown, or the space cannot be searched this way."""
    if spec.sampler_object or spec.space_function:
        raise BadInputError("A service runs no Python objects of its users: name the sampler and list the space.")
    check_sampler(spec.sampler)
    check_options(spec)
    check_space(spec.space)
    for parameter in spec.space:
        # A grid holds every integer of a range.
        longest = MAX_TRIALS if spec.sampler in EXHAUSTIVE else 2**53
        if parameter.is_integer and parameter.high - parameter.low > longest:
            raise BadInputError(f"The range of '{parameter.name}' is too long.")
    check_policy(spec)
    if spec.sampler in EXHAUSTIVE and not spec.trial_count <= grid_size(spec.space) < 2**63:
        raise BadInputError("The grid has fewer points than there are trials, or more than can be counted.")


class MeasuredStep(BaseModel):
    """A measured step time with one placement (`solver.calibration.Measurement`).

    Attributes:
        ps, workers: machine of each.
        gpus, cpus: of each worker.
        seconds: duration of one step of all workers; None where `samples_per_s`, of the whole job, is given.
        batch_size: samples per step of one worker; None for the model's.
        shard_bytes: bytes of variables on each parameter server; None for those that a plan would place there.
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
    ps_cpus: Annotated[float, Field(gt=0, le=1e4, allow_inf_nan=False)] | None = None

    @classmethod
    def of(cls, row: Measurement) -> MeasuredStep:
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
            ps_cpus=row.ps_cpus,
        )

    def to_measurement(self) -> Measurement:
        """Converts to a `Measurement`; raises `BadInputError` if it is empty or contradicts itself."""
        # Imported late: slow to import, and few jobs have measurements.
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
            self.ps_cpus,
        )


class _Request:
    def to_json(self) -> dict[str, Any]:
        values: dict[str, Any] = _REQUEST.dump_python(self, mode="json")  # type: ignore[arg-type]
        return values

    def dumps(self) -> str:
        return _REQUEST.dump_json(self, indent=2).decode()  # type: ignore[arg-type]


@pydantic_dataclass(frozen=True, kw_only=True, config=_STRICT)
class TrainingRequest(TrainingOptions, PlanOptions, QueueOptions, _Request):
    """A training job as submitted: `framework.training.spec.JobSpec` with profile and plan as JSON values.

    The script is a path inside the bundle; without a name the service generates the id.
    """

    kind: Literal["training"] = "training"
    name: JobName | None = None
    environment: Environment = field(default_factory=dict)
    script: Script
    arguments: Annotated[tuple[Text, ...], Field(max_length=MAX_ITEMS)] = ()
    profile: dict[str, Any]
    profile_is_kept: bool = False
    plan: dict[str, Any] | None = None
    stream_all_logs: bool = False
    preload: Annotated[tuple[Text, ...], Field(max_length=1000)] | None = None
    measurements: Annotated[tuple[MeasuredStep, ...], Field(max_length=MAX_MEASUREMENTS)] = ()

    @model_validator(mode="after")
    def _check_consistency(self, info: ValidationInfo) -> TrainingRequest:
        if info.context is _STORED:
            return self
        try:
            self.check(has_plan=self.plan is not None)
            self.check_rules()
            self.check_live()
            spec = self.to_spec(job_id="job", checkpoint_dir="", bundle_url="", python="")
            spec.check_tasks()
            if spec.plan is not None:
                check_can_run(spec.plan)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(str(error)) from error
        if len(spec.profile.variables) > MAX_VARIABLES:
            raise ValueError(f"the model has more than {MAX_VARIABLES} variables, too many to plan for in a service")
        return self

    def to_spec(self, network: Network | None = None, **of_the_service: Any) -> JobSpec:
        """The job spec, with the fields that the service adds: `job_id`, `checkpoint_dir`, `bundle_url`, `python` and
        the like.

        Raises:
            BadInputError: if a measurement contradicts itself.
            ValueError, TypeError, KeyError: if profile, plan or measurements cannot be parsed.
        """
        measurements = tuple(step.to_measurement() for step in self.measurements)
        values: dict[str, Any] = {
            **values_of(TrainingOptions, self),
            "script": self.script,
            "arguments": self.arguments,
            "profile": ModelProfile.from_json(self.profile),
            "profile_is_kept": self.profile_is_kept,
            "planning": PlanSettings.of(self, measurements, network),
            "plan": None if self.plan is None else Plan.from_json(self.plan),
            "stream_all_logs": self.stream_all_logs,
            "preload": self.preload,
        }
        return JobSpec(**{**values, **of_the_service})


@pydantic_dataclass(frozen=True, kw_only=True, config=_STRICT)
class SearchJobRequest(QueueOptions, _Request):
    """A search as submitted: `framework.search.records.SearchSpec` as JSON values, its script a path inside the bundle.

    `preload` are modules for the zygotes, as `framework.project.script_facts` finds them on the client.
    """

    kind: Literal["search"] = "search"
    spec: dict[str, Any]
    preload: Annotated[tuple[Text, ...], Field(max_length=1000)] = ()
    constraints: Constraints = ()
    volumes: Volumes = ()

    @model_validator(mode="after")
    def _check_search(self, info: ValidationInfo) -> SearchJobRequest:
        if info.context is _STORED:
            return self
        try:
            spec = self.to_spec()
        except ValidationError as error:
            raise _rejection(error) from error
        try:
            _check_relative(spec.script)
        except ValueError as error:
            raise ValueError(f"script: {error}") from error
        check_search(spec)
        return self

    def to_spec(self) -> SearchSpec:
        """Parses the spec; raises `ValueError` if it is malformed."""
        return _SEARCH_SPEC.validate_python(self.spec)


class Resumption(BaseModel):
    """How to resume a search that has ended; without constraints it keeps the earlier ones.

    `trials` and `space` are as in `framework.search.space.extended`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    constraints: Constraints | None = None
    trials: Annotated[int, Field(ge=1, le=MAX_TRIALS)] | None = None
    space: Annotated[tuple[Parameter, ...], Field(max_length=MAX_PARAMETERS)] = ()


JobRequest = Annotated[TrainingRequest | SearchJobRequest, Field(discriminator="kind")]
_SEARCH_SPEC = TypeAdapter(SearchSpec)
_REQUEST: TypeAdapter[TrainingRequest | SearchJobRequest] = TypeAdapter(JobRequest)


def read_request(values: Any) -> TrainingRequest | SearchJobRequest:
    """Validates a request from JSON values; raises `BadInputError` that names the first malformed field."""
    try:
        return _REQUEST.validate_python(values)
    except ValidationError as error:
        raise _rejection(error) from error


def stored_request(record: JobRecord) -> TrainingRequest | SearchJobRequest:
    """The stored request of a job, validated on submission; raises `BadInputError` if it cannot be parsed any more."""
    try:
        return _REQUEST.validate_python(record.request, context=_STORED)
    except ValidationError as error:
        raise _rejection(error) from error


def _rejection(error: ValidationError) -> BadInputError:
    return BadInputError(f"{_first_problem(error)}.")


def _first_problem(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part not in tuple(JobKind))
    return refusal(where, first) if where else str(first["msg"]).removeprefix("Value error, ").rstrip(".")


def training_request(**values: Any) -> TrainingRequest:
    """Creates a request; raises `BadInputError` if a service would refuse it."""
    try:
        return TrainingRequest(**values)
    except ValidationError as error:
        raise _rejection(error) from error


def search_request(spec: SearchSpec, script: str, preload: tuple[str, ...], **more: Any) -> SearchJobRequest:
    """Creates a request with `script`, a path inside the bundle; raises `BadInputError` if a service would refuse
    it.
    """
    values = dataclasses.asdict(dataclasses.replace(spec, script=script, folder=""))
    try:
        return SearchJobRequest(spec=values, preload=preload, **more)
    except ValidationError as error:
        raise _rejection(error) from error


def request_of_search(spec: SearchSpec) -> dict[str, Any]:
    """The request of a search that is stored without one, by `dike tune`; not checked, as it has run already."""
    values = {"kind": str(JobKind.SEARCH), "spec": dataclasses.asdict(spec)}
    return _REQUEST.validate_python(values, context=_STORED).to_json()


def is_own_search(record: JobRecord, search: SearchSummary) -> bool:
    """Whether the search with a job's name belongs to the job, and not to a `dike tune` of the same name."""
    if record.state_data is not None:
        return True
    # A service may have been killed after it created the search and before it wrote the job's state.
    request = stored_request(record)
    assert isinstance(request, SearchJobRequest)
    # Without the checkpoint folder: each service may choose another one.
    asked = dataclasses.replace(request.to_spec(), checkpoint_dir=search.spec.checkpoint_dir)
    return search.spec == asked and search.created_s >= record.submitted_s
