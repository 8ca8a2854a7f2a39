"""What a user says of a training job: `dike run`, `dike submit` and the REST API derive from these fields."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from dike.exceptions import BadInputError
from framework.scheduler.task_options import TaskOptions
from solver.described import Text, UserOption
from solver.settings import WorkerBounds

Stragglers = Literal["replace", "report", "ignore"]
MAX_ELASTIC_WORKERS = 1024


def read_bounds(value: Any) -> tuple[int, int] | None:
    """Minimum and maximum number of workers of an elastic job, from the text `MIN:MAX` or a pair.

    Raises:
        BadInputError: if it is neither.
    """
    if value is None:
        return None
    text = value if isinstance(value, str) else ":".join(map(str, value))
    parts = re.fullmatch(r"\s*([0-9]{1,9}):([0-9]{1,9})\s*", text)
    if parts is None:
        raise BadInputError(f"'{text}' is not a value of --elastic; give MIN:MAX workers, such as 1:4.")
    least, most = int(parts[1]), int(parts[2])
    if not 1 <= least <= most <= MAX_ELASTIC_WORKERS:
        raise BadInputError(
            f"--elastic {text} is out of range; give MIN:MAX workers with 1 <= MIN <= MAX <= {MAX_ELASTIC_WORKERS}."
        )
    return least, most


_SIZE = "Change the size while it trains"
_CHECKPOINTS = "Checkpoints and restarts"


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(WorkerBounds, TaskOptions):
    """What a user says of a training job besides its script and its plan: `dike run`, `dike submit`, the REST API."""

    isolate_tasks: Annotated[
        bool, UserOption("Where tasks run", "Give each task a container of its own, even on one agent.")
    ] = False
    elastic: Annotated[
        tuple[int, int] | None,
        BeforeValidator(read_bounds),
        UserOption(
            _SIZE,
            "Change the number of workers between MIN and MAX while it trains.",
            metavar="MIN:MAX",
            read=read_bounds,
        ),
    ] = None
    resize_interval_s: Annotated[
        float,
        Field(ge=1, le=1e9, allow_inf_nan=False),
        UserOption(_SIZE, "Minimum time between two changes of size, seconds."),
    ] = 60.0
    stragglers: Annotated[
        Stragglers | None,
        UserOption(
            _SIZE,
            "What to do about workers of half the usual speed; replace needs --elastic.",
            default="replace with --elastic, else report",
        ),
    ] = None
    checkpoint_dir: Annotated[
        Text | None,
        UserOption(_CHECKPOINTS, "Folder for checkpoints, and to resume from; the same path on all agents."),
    ] = None
    checkpoint_interval_s: Annotated[
        float, Field(ge=1, le=1e9, allow_inf_nan=False), UserOption(_CHECKPOINTS, "Seconds between checkpoints.")
    ] = 60.0
    max_restarts: Annotated[
        int,
        Field(ge=0, le=1000),
        UserOption(_CHECKPOINTS, "Restarts after failures; each new checkpoint resets the count."),
    ] = 3

    def check(self, *, has_plan: bool) -> None:
        """Refuses options that contradict each other.

        Args:
            has_plan: whether the job follows a given plan.

        Raises:
            BadInputError: names the options and what to change.
        """
        least, most = self.min_workers, self.max_workers
        if least is not None and has_plan:
            raise BadInputError("The plan (--plan) sets the number of workers; leave --min-workers out.")
        if least is not None and most is not None and least > most:
            raise BadInputError(f"--min-workers is {least}, more than --max-workers {most}; change one.")
        if self.stragglers == "replace" and self.elastic is None:
            raise BadInputError("Only an elastic job can replace a worker; add --elastic MIN:MAX.")
        if self.elastic is None:
            return
        if has_plan:
            raise BadInputError("A job that follows a plan (--plan) keeps its size; leave --elastic out.")
        for name, count, bound in (("--min-workers", least, "minimum"), ("--max-workers", most, "maximum")):
            if count is not None:
                raise BadInputError(f"--elastic already sets the {bound} number of workers; leave {name} out.")

    @property
    def on_straggler(self) -> Stragglers:
        """What is done about stragglers."""
        return self.stragglers or ("report" if self.elastic is None else "replace")
