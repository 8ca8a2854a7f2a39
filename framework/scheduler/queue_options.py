"""Options of a service's job about when it runs: its priority, time limit, and jobs that it waits for."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from dike.described import Text, UserOption, checked_by
from dike.exceptions import BadInputError

_PANEL = "In the queue"
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?[smhd])+")
_PART = re.compile(r"([0-9.]+)([smhd])")
_CLOCK = re.compile(r"(?:(?P<d>[0-9]+)-)?(?P<h>[0-9]+):(?P<m>[0-5][0-9])(?::(?P<s>[0-5][0-9]))?")
MAX_AFTER = 100
AGING_S = 6 * 3600.0
"""Waiting time after which a job is served as one of the next higher priority."""


class Priority(enum.StrEnum):
    HIGH = "high"
    """First in the queue, and may preempt lower ones."""
    NORMAL = "normal"
    LOW = "low"

    @property
    def rank(self) -> int:
        """0 for the highest."""
        return list(Priority).index(self)

    def aged_rank(self, waited_s: float) -> int:
        """The rank of a job after a waiting time."""
        return max(0, self.rank - int(waited_s // AGING_S))


class Condition(enum.StrEnum):
    """How a job has to end before another one starts."""

    OK = "ok"
    """It has finished."""
    ANY = "any"
    FAILED = "failed"
    """It has failed or was killed."""


@dataclass(frozen=True)
class Dependency:
    job_id: str
    condition: Condition

    @classmethod
    def parse(cls, text: str) -> Dependency:
        """Parses `NAME`, which means `NAME:ok`, `NAME:any` or `NAME:failed`.

        Raises:
            BadInputError: if it is none of these.
        """
        name, _, condition = text.partition(":")
        if not name or (condition and condition not in list(Condition)) or text.endswith(":"):
            raise BadInputError(f"--after is '{text}'; write NAME, NAME:any or NAME:failed.")
        return cls(name, Condition(condition or Condition.OK))

    def __str__(self) -> str:
        return f"{self.job_id}:{self.condition}"


def parse_duration(text: str) -> float:
    """Parses seconds (`90`), units (`1h30m`, `2d`) or a clock (`12:00:00`, `1-12:00`), in seconds.

    Raises:
        BadInputError: if it is none of these.
    """
    text = text.strip().lower()
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text):
        return float(text)
    if _DURATION.fullmatch(text):
        return sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))
    if (clock := _CLOCK.fullmatch(text)) is not None:
        return float(sum(int(number or 0) * _UNITS[unit] for unit, number in clock.groupdict().items()))
    raise BadInputError(f"'{text}' is no duration; write seconds, or such as 90m, 1h30m, 2d or 1-12:00:00.")


def _check_after(texts: tuple[str, ...]) -> tuple[str, ...]:
    for text in texts:
        Dependency.parse(text)
    return texts


def _read_after(texts: Iterable[str]) -> tuple[str, ...]:
    return _check_after(tuple(texts))


@dataclass(frozen=True, kw_only=True)
class QueueOptions:
    """When a job of a service runs."""

    priority: Annotated[
        Priority,
        UserOption(
            _PANEL,
            "high runs before others, and trials and elastic jobs of lower priority make room for it; low runs after "
            "others.",
        ),
    ] = Priority.NORMAL
    time_limit_s: Annotated[
        Annotated[float, Field(ge=1, le=1e9, allow_inf_nan=False)] | None,
        UserOption(
            _PANEL,
            "Maximum time that the job runs, such as 90m, 1h30m or 1-12:00:00; then it ends, with its checkpoints.",
            metavar="DURATION",
            default="no limit",
            read=parse_duration,
        ),
    ] = None
    after: Annotated[
        tuple[Text, ...],
        Field(max_length=MAX_AFTER),
        AfterValidator(checked_by(_check_after)),
        UserOption(
            _PANEL,
            "Start once this job has finished; with :any, once it has ended; with :failed, once it has failed or was "
            "killed. Repeatable.",
            metavar="JOB[:ok|any|failed]",
            read=_read_after,
            reads=list[str],
        ),
    ] = ()
    hold: Annotated[bool, UserOption(_PANEL, "Do not start the job until dike release.")] = False

    @classmethod
    def of(cls, request: Mapping[str, Any]) -> QueueOptions:
        """Reads the options in a stored request."""
        return cls(
            priority=Priority(request["priority"]),
            time_limit_s=request["time_limit_s"],
            after=tuple(request["after"]),
            hold=request["hold"],
        )

    @property
    def dependencies(self) -> tuple[Dependency, ...]:
        return tuple(map(Dependency.parse, self.after))
