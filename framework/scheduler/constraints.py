"""Constraints on a job's agents, similar to Marathon's: `rack:IN:r1,r2`, `hostname:LIKE:gpu-.*`.

A constraint is FIELD:OPERATOR:VALUE. FIELD is the name of a Mesos attribute, or `hostname`. An agent without the
attribute is not admitted by IS, IN and LIKE, and is admitted by IS_NOT, NOT_IN and UNLIKE.
"""

from __future__ import annotations

import difflib
import enum
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dike.exceptions import BadInputError

HOSTNAME = "hostname"
MAX_PATTERN_LENGTH = 200
MAX_MATCHED_LENGTH = 128
"""Maximum number of characters of a field that a pattern is matched against."""
REPETITION_COST = 7
"""A repetition can backtrack as often as there are characters: 2 to the power of this."""
MAX_COST = 21
"""Maximum number of steps of a match, as a power of 2."""


class Operator(enum.StrEnum):
    IS = "IS"
    IS_NOT = "IS_NOT"
    IN = "IN"
    """The field is one of a list, separated by commas."""
    NOT_IN = "NOT_IN"
    LIKE = "LIKE"
    """A regular expression matches the whole field."""
    UNLIKE = "UNLIKE"

    @property
    def is_negative(self) -> bool:
        return self in (Operator.IS_NOT, Operator.NOT_IN, Operator.UNLIKE)


@dataclass(frozen=True)
class Constraint:
    """One condition on an agent."""

    field: str
    operator: Operator
    value: str

    def __str__(self) -> str:
        return f"{self.field}:{self.operator}:{self.value}"

    def admits(self, attributes: Mapping[str, str], hostname: str) -> bool:
        """Whether an agent with these attributes and this host name meets it."""
        actual = hostname if self.field == HOSTNAME else attributes.get(self.field)
        return self.operator.is_negative if actual is None else self._compares(actual) != self.operator.is_negative

    def _compares(self, actual: str) -> bool:
        match self.operator:
            case Operator.IS | Operator.IS_NOT:
                return actual == self.value
            case Operator.IN | Operator.NOT_IN:
                return actual in _listed(self.value)
            case Operator.LIKE | Operator.UNLIKE:
                return _matches(self.value, actual)


@dataclass(frozen=True)
class Constraints:
    """All conditions of a job; an agent has to meet each of them."""

    all: tuple[Constraint, ...] = ()

    def admits(self, attributes: Mapping[str, str], hostname: str) -> bool:
        """Whether an agent with these attributes and this host name meets all of them."""
        return not self.unmet(attributes, hostname)

    def unmet(self, attributes: Mapping[str, str], hostname: str) -> list[Constraint]:
        """Constraints that an agent does not meet."""
        return [one for one in self.all if not one.admits(attributes, hostname)]


def parse_constraints(texts: Iterable[str]) -> Constraints:
    """Parses constraints.

    Raises:
        BadInputError: if one is malformed; the message quotes it.
    """
    return Constraints(tuple(_parse(text) for text in texts))


def _parse(text: str) -> Constraint:
    parts = [part.strip() for part in text.split(":", 2)]
    if len(parts) != 3 or not all(parts) or not text.isprintable():
        raise BadInputError(f"{text!r} is not a constraint; write FIELD:OPERATOR:VALUE, such as rack:IN:r1,r2.")
    field, name, value = parts
    operator = name.upper().replace("-", "_")
    if operator not in list(Operator):
        nearest = difflib.get_close_matches(operator, list(Operator), 1)
        meant = f" (did you mean {nearest[0]}?)" if nearest else ""
        raise BadInputError(f"'{name}' in '{text}' is not an operator{meant}; there are {', '.join(Operator)}.")
    constraint = Constraint(field, Operator(operator), value)
    if constraint.operator in (Operator.IN, Operator.NOT_IN) and not _listed(value):
        raise BadInputError(f"'{text}' lists no value; write them with commas, such as rack:IN:r1,r2.")
    if constraint.operator in (Operator.LIKE, Operator.UNLIKE):
        _check_pattern(text, value)
    return constraint


def _listed(value: str) -> Sequence[str]:
    return [part.strip() for part in value.split(",") if part.strip()]


def _check_pattern(text: str, pattern: str) -> None:
    """Refuses patterns whose match may take long, whatever the text."""
    if len(pattern) > MAX_PATTERN_LENGTH:
        raise BadInputError(
            f"The pattern in '{text[:40]}...' is longer than {MAX_PATTERN_LENGTH} characters; shorten it."
        )
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise BadInputError(f"The pattern in '{text}' is not a regular expression: {error}.") from error
    # Replace escaped characters and sets by single characters, so that the checks below do not look into them.
    bare = re.sub(r"\[\^?\]?(?:\\.|[^\]\\])*\]", "x", re.sub(r"\\[^1-9]", "x", pattern))
    if "(?" in bare or "\\" in bare or re.search(r"\)[*+?{]", bare):
        raise BadInputError(
            f"The pattern in '{text}' repeats a group, refers back or looks around, which can take forever to match; "
            "write it without."
        )
    if REPETITION_COST * len(re.findall(r"[*+{]", bare)) + len(re.findall(r"[?|]", bare)) > MAX_COST:
        raise BadInputError(
            f"The pattern in '{text}' has more than {MAX_COST // REPETITION_COST} repetitions, or too many question "
            "marks and alternatives, which can take forever to match; write a simpler one, or IN with a list."
        )


@functools.lru_cache(maxsize=10_000)
def _matches(pattern: str, actual: str) -> bool:
    return re.fullmatch(pattern, actual[:MAX_MATCHED_LENGTH]) is not None
