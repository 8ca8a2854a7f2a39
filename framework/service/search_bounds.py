"""What a search that somebody submits may ask for, beyond the types of its fields."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from dike.exceptions import BadInputError
from framework.policies.registry import make_policy
from framework.search.records import SearchSpec
from framework.search.space import check_space
from framework.search.study import grid_size
from framework.service.request_fields import MAX_ITEMS, Environment, Name, Script, Text

MAX_TRIALS = 100 * MAX_ITEMS
Positive = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=MAX_ITEMS)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Bound = Annotated[float, Field(ge=-1e300, le=1e300, allow_inf_nan=False)]


class _Bounds(BaseModel):
    model_config = ConfigDict(from_attributes=True)


class _Parameter(_Bounds):
    name: Text
    choices: tuple[Text | bool | int | float, ...]
    low: Bound
    high: Bound


class _Milestone(_Bounds):
    decrease: Annotated[float, Field(gt=0, le=1)]
    quantum_s: Positive


class _Settings(_Bounds):
    quantum_s: Positive
    jobs_per_slot: Count
    milestones: tuple[_Milestone, ...]
    seed: Seed
    switch_s: NotNegative
    move_s: NotNegative


class _Search(_Bounds):
    name: Name
    script: Script
    arguments: Annotated[tuple[Text, ...], Field(max_length=MAX_ITEMS)]
    flags: dict[Text, Text]
    space: tuple[_Parameter, ...]
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
    check_space(spec.space)
    for parameter in spec.space:
        # A grid has every whole number of a range.
        longest = MAX_TRIALS if spec.sampler == "grid" else 2**53
        if parameter.is_integer and parameter.high - parameter.low > longest:
            raise BadInputError(f"The range of '{parameter.name}' is too long.")
    if spec.sampler == "grid" and not spec.trial_count <= grid_size(spec.space) < 2**63:
        raise BadInputError("The grid has fewer points than there are trials, or more than can be counted.")
