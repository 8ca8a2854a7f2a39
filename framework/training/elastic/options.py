"""Options of an elastic job, and notes for its user."""

from __future__ import annotations

import difflib
import re
from typing import get_args

from dike.exceptions import BadInputError
from dike.profile import Api
from framework.training.spec import JobSpec, Stragglers

MAX_WORKERS = 1024


def read_bounds(
    text: str | None, *, min_workers: int | None, max_workers: int | None, has_plan: bool
) -> tuple[int, int] | None:
    """Parses `MIN:MAX` workers of an elastic job; None without `--elastic`.

    Raises:
        BadInputError: the value is malformed or contradicts another option.
    """
    if min_workers is not None and has_plan:
        raise BadInputError("The plan (--plan) sets the number of workers; leave --min-workers out.")
    if min_workers is not None and max_workers is not None and min_workers > max_workers:
        raise BadInputError(f"--min-workers is {min_workers}, more than --max-workers {max_workers}; change one.")
    if text is None:
        return None
    if has_plan:
        raise BadInputError("A job that follows a plan (--plan) keeps its size; leave --elastic out.")
    for name, count, bound in (("--min-workers", min_workers, "minimum"), ("--max-workers", max_workers, "maximum")):
        if count is not None:
            raise BadInputError(f"--elastic already sets the {bound} number of workers; leave {name} out.")
    parts = re.fullmatch(r"\s*([0-9]{1,9}):([0-9]{1,9})\s*", text)
    if parts is None:
        raise BadInputError(f"'{text}' is not a value of --elastic; give MIN:MAX workers, such as 1:4.")
    least, most = int(parts[1]), int(parts[2])
    if not 1 <= least <= most <= MAX_WORKERS:
        raise BadInputError(
            f"--elastic {text} is out of range; give MIN:MAX workers with 1 <= MIN <= MAX <= {MAX_WORKERS}."
        )
    return least, most


def read_stragglers(text: str | None, *, is_elastic: bool) -> Stragglers:
    """Parses `--stragglers`; without a value, elastic jobs replace stragglers and others report them.

    Raises:
        BadInputError: the value is unknown, or the job cannot replace workers.
    """
    if text is None:
        return "replace" if is_elastic else "report"
    for value in get_args(Stragglers):
        if value == text:
            if value == "replace" and not is_elastic:
                raise BadInputError("Only an elastic job can replace a worker; add --elastic MIN:MAX.")
            return value
    near = difflib.get_close_matches(text, get_args(Stragglers), 1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise BadInputError(f"'{text}' is not a value of --stragglers{hint}; give replace, report or ignore.")


def elastic_notes(spec: JobSpec) -> list[str]:
    """Notes for the user of an elastic job before it starts."""
    assert spec.elastic is not None
    notes = []
    if spec.replicas is not None:
        notes.append(
            f"a step takes {spec.replicas} batches, {spec.replicas * spec.profile.batch_size} samples, whatever the "
            "number of workers (--elastic)"
        )
    if spec.profile.api is Api.COORDINATOR:
        notes.append("the job keeps its size: its script's own loop cannot be stopped and resumed")
    return notes
