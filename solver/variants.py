"""Plans for variants of a cluster: what-if questions and sweeps of one value."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dike.exceptions import BadInputError
from solver.changes import FIELDS, apply_change
from solver.plan import Plan
from solver.reasons import guesses_in
from solver.request import PlanRequest

UNCHANGED = "unchanged"
_REQUEST_FIELDS = ("batch_size", "max_workers")


@dataclass(frozen=True)
class Variant:
    """One variant with its result.

    Attributes:
        reason: why nothing fits; empty with a plan.
    """

    label: str
    plan: Plan | None
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"label": self.label, "reason": self.reason, "plan": None if self.plan is None else self.plan.to_json()}


def shared_guesses(variants: Sequence[Variant]) -> tuple[str, ...]:
    """Distinct assumptions of the plans, such as the speed of an unknown GPU."""
    found = (guess for variant in variants if variant.plan is not None for guess in guesses_in(variant.plan.why))
    return tuple(dict.fromkeys(found))


def what_if(request: PlanRequest, changes: Sequence[str]) -> dict[str, PlanRequest]:
    """The original request, and one with each change of its cluster; commas join changes that belong together.

    Raises:
        BadInputError: if a change is invalid.
    """
    variants = {UNCHANGED: request}
    for text in changes:
        cluster = request.cluster
        for change in text.split(","):
            cluster = apply_change(cluster, change)
        variants[text] = dataclasses.replace(request, cluster=cluster)
    return variants


def sweep(request: PlanRequest, text: str) -> dict[str, PlanRequest]:
    """One request for each value of a field of the cluster, `batch_size` or `max_workers`.

    Args:
        request: the base request.
        text: `NAME=VALUE,VALUE,...`, such as `network_gbps=1,10,25` or `k80.count=1,5,20`.

    Raises:
        BadInputError: if it is malformed, or a value is invalid.
    """
    parameter, _, rest = text.partition("=")
    parameter = parameter.strip()
    values = [value.strip() for value in rest.split(",") if value.strip()]
    if not parameter or not values:
        raise BadInputError(f"'{text}' is not a sweep; use NAME=VALUE,VALUE,... such as network_gbps=1,10,25.")
    return {f"{parameter}={value}": _with(request, parameter, value) for value in values}


def _with(request: PlanRequest, parameter: str, value: str) -> PlanRequest:
    if parameter not in _REQUEST_FIELDS:
        if parameter.rpartition(".")[2] not in FIELDS:
            known = ", ".join((*FIELDS, *_REQUEST_FIELDS))
            raise BadInputError(f"'{parameter}' cannot be swept; these can: {known}.")
        return dataclasses.replace(request, cluster=apply_change(request.cluster, f"{parameter}={value}"))
    if not re.fullmatch("[0-9]{1,9}", value) or int(value) < 1:
        raise BadInputError(f"'{parameter}' must be a whole number from 1 to 999999999, not '{value[:40]}'.")
    if parameter == "batch_size":
        return dataclasses.replace(request, profile=request.profile.with_batch_size(int(value)))
    return dataclasses.replace(request, max_workers=int(value))


def plan_variants(requests: Mapping[str, PlanRequest], plan: Callable[[PlanRequest], Plan]) -> tuple[Variant, ...]:
    """Plans each request; one for which nothing fits gets a reason instead of a plan."""
    return tuple(_planned(label, request, plan) for label, request in requests.items())


def _planned(label: str, request: PlanRequest, plan: Callable[[PlanRequest], Plan]) -> Variant:
    try:
        return Variant(label, plan(request))
    except BadInputError as error:
        return Variant(label, None, str(error))
