"""Types of what a client sends: their bounds are those of a database and of a process' arguments and variables."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from dike.exceptions import DikeError
from framework.containers import parse_volumes
from framework.service.constraints import parse_constraints

MAX_TEXT = 4096
MAX_ITEMS = 10_000
MAX_NAME = 200
NEWEST = "last"
"""What commands call a user's newest job."""
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


def _environment(variables: dict[str, str]) -> dict[str, str]:
    if any(not name or "=" in name or "\0" in name for name in variables):
        raise ValueError("holds something that is not an environment variable")
    return variables


def _constraints(texts: list[str]) -> list[str]:
    try:
        parse_constraints(texts)
    except DikeError as error:
        raise ValueError(str(error)) from error
    return texts


def _volumes(texts: list[str]) -> list[str]:
    try:
        parse_volumes(texts)
    except DikeError as error:
        raise ValueError(str(error)) from error
    return texts


Text = Annotated[str, Field(max_length=MAX_TEXT), AfterValidator(_without_nul)]
Seconds = Annotated[float, Field(ge=1, le=1e9, allow_inf_nan=False)]
Name = Annotated[str, AfterValidator(check_name)]
Script = Annotated[Text, Field(min_length=1), AfterValidator(_relative)]
ConstraintTexts = Annotated[list[Text], Field(max_length=100), AfterValidator(_constraints)]
VolumeTexts = Annotated[list[Text], Field(max_length=100), AfterValidator(_volumes)]
Environment = Annotated[dict[Text, Text], Field(max_length=1000), AfterValidator(_environment)]
