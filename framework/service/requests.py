"""What a client sends to submit a job, and what becomes of it. Everything here is checked before it is believed."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    ValidationError,
    model_serializer,
    model_validator,
)

from dike.exceptions import BadInputError, DikeError
from dike.profile import ModelProfile
from framework.elastic.options import read_bounds, read_stragglers
from framework.job import JobSpec
from framework.search.records import SearchSpec
from framework.service.records import JobKind
from framework.service.request_fields import (
    MAX_ITEMS,
    ConstraintTexts,
    Environment,
    Name,
    Script,
    Seconds,
    Text,
    VolumeTexts,
)
from framework.service.search_bounds import check_search
from solver import Plan

MAX_VARIABLES = 20_000
"""Of a model: planning more takes longer than a service can wait for it."""


class TrainingRequest(BaseModel):
    """A training job as it is submitted; most fields mean what they mean in `framework.job.JobSpec`.

    Attributes:
        name: the job's id; None to make one up.
        constraints: see `JobRecord`.
        volumes: folders of the agents for its containers (`framework.containers.parse_volume`).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["training"] = "training"
    name: Name | None = None
    script: Script
    arguments: Annotated[list[Text], Field(max_length=MAX_ITEMS)] = []
    profile: dict[str, Any]
    checkpoint_dir: Text | None = None
    checkpoint_interval_s: Seconds = 60.0
    max_restarts: Annotated[int, Field(ge=0, le=1000)] = 3
    objective: Literal["throughput", "traffic"] = "throughput"
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

    @model_serializer(mode="wrap")
    def _known_before(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return _without_news(write(self))

    @model_validator(mode="after")
    def _is_consistent(self) -> TrainingRequest:
        try:
            spec = self.to_spec(job_id="job", checkpoint_dir="", bundle_url="", python="")
        except (DikeError, ValueError, TypeError, KeyError) as error:
            raise ValueError(str(error)) from error
        if len(spec.profile.variables) > MAX_VARIABLES:
            raise ValueError(f"the model has more than {MAX_VARIABLES} variables, too many to plan for in a service")
        return self

    def to_spec(self, **of_the_service: Any) -> JobSpec:
        """The job, with what the service adds: `job_id`, `checkpoint_dir`, `bundle_url`, `python` and the like.

        Raises:
            BadInputError: if the request contradicts itself.
            ValueError, TypeError, KeyError: if profile or plan are none.
        """
        bounds = read_bounds(self.elastic, max_workers=self.max_workers, has_plan=self.plan is not None)
        values: dict[str, Any] = {
            "script": self.script,
            "arguments": tuple(self.arguments),
            "profile": ModelProfile.from_json(self.profile),
            "checkpoint_interval_s": self.checkpoint_interval_s,
            "max_restarts": self.max_restarts,
            "objective": self.objective,
            "max_workers": self.max_workers,
            "plan": None if self.plan is None else Plan.from_json(self.plan),
            "stream_all_logs": self.stream_all_logs,
            "environment": dict(self.environment),
            "elastic": bounds,
            "resize_interval_s": self.resize_interval_s,
            "stragglers": read_stragglers(self.stragglers, is_elastic=bounds is not None),
            "preload": None if self.preload is None else tuple(self.preload),
        }
        return JobSpec(**{**values, **of_the_service})


class SearchJobRequest(BaseModel):
    """A search as it is submitted.

    Attributes:
        spec: `framework.search.records.SearchSpec` as JSON values, its script being a path inside the bundle.
        preload: modules for the zygotes, as `framework.search.script_facts` finds them on the client.
        constraints: see `JobRecord`.
        volumes: folders of the agents for its containers (`framework.containers.parse_volume`).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["search"] = "search"
    spec: dict[str, Any]
    preload: Annotated[list[Text], Field(max_length=1000)] = []
    constraints: ConstraintTexts = []
    volumes: VolumeTexts = []

    @model_serializer(mode="wrap")
    def _known_before(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return _without_news(write(self))

    @model_validator(mode="after")
    def _is_a_search(self) -> SearchJobRequest:
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


def _without_news(values: dict[str, Any]) -> dict[str, Any]:
    """A request without the fields that services of earlier versions do not know, where they say nothing."""
    return {field: value for field, value in values.items() if value or field not in ("name", "volumes")}


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
    values = dataclasses.asdict(dataclasses.replace(spec, script=script))
    try:
        return SearchJobRequest(spec=values, preload=list(preload), **more)
    except ValidationError as error:
        raise _refused(error) from error
