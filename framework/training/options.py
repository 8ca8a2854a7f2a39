"""Options of a training job, from which `dike run`, `dike submit` and the REST API are derived."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from dike.described import Text, UserOption, checked_by
from dike.exceptions import BadInputError
from framework.scheduler.task_options import TaskOptions
from solver.settings import WorkerBounds

Stragglers = Literal["replace", "report", "ignore"]
MAX_ELASTIC_WORKERS = 1024


def read_bounds(value: Any) -> tuple[int, int] | None:
    """Reads the minimum and maximum number of workers of an elastic job: the text `MIN:MAX`, or a pair.

    Raises:
        BadInputError: if it is neither.
    """
    if value is None:
        return None
    text = ":".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    parts = re.fullmatch(r"\s*([0-9]{1,9}):([0-9]{1,9})\s*", text)
    if parts is None:
        raise BadInputError(f"'{text}' is not a value of --elastic; give MIN:MAX workers, such as 1:4.")
    least, most = int(parts[1]), int(parts[2])
    if not 1 <= least <= most <= MAX_ELASTIC_WORKERS:
        raise BadInputError(
            f"--elastic {text} is out of range; give MIN:MAX workers with 1 <= MIN <= MAX <= {MAX_ELASTIC_WORKERS}."
        )
    return least, most


_SIZE = "Elastic training"
_CHECKPOINTS = "Checkpoints and restarts"


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(WorkerBounds, TaskOptions):
    """Options of a training job besides its script and its plan."""

    isolate_tasks: Annotated[
        bool, UserOption("Where tasks run", "Start each task in its own container, even if several share an agent.")
    ] = False
    elastic: Annotated[
        tuple[int, int] | None,
        BeforeValidator(checked_by(read_bounds)),
        UserOption(
            _SIZE,
            "Change the number of workers during training, from MIN to MAX.",
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
            "What to do with workers slower than half the median speed. replace needs --elastic.",
            default="replace with --elastic, else report",
        ),
    ] = None
    checkpoint_dir: Annotated[
        Text | None,
        UserOption(
            _CHECKPOINTS,
            "Folder to store checkpoints in, and to resume from. It must have the same path on all agents.",
            default="a new one for each job",
        ),
    ] = None
    checkpoint_interval_s: Annotated[
        float, Field(ge=1, le=1e9, allow_inf_nan=False), UserOption(_CHECKPOINTS, "Time between checkpoints, seconds.")
    ] = 60.0
    max_restarts: Annotated[
        int,
        Field(ge=0, le=1000),
        UserOption(_CHECKPOINTS, "Maximum number of restarts after failures. Each new checkpoint resets the count."),
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
        """`stragglers`, with its default resolved."""
        return self.stragglers or ("report" if self.elastic is None else "replace")
