"""Options of training jobs and searches: name, agents, folders and environment."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from dike.described import Text, UserOption, checked_by
from dike.exceptions import BadInputError
from framework.mesos.containers import parse_volumes
from framework.scheduler.constraints import parse_constraints

MAX_NAME = 200
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._+-]{{0,{MAX_NAME - 1}}}")
MAX_ENVIRONMENT_BYTES = 256 * 1024
"""Of all variables together: Linux starts no process with more than 2 MiB of them and of arguments."""


def _readable_by(parse: Callable[[Iterable[str]], object]) -> Callable[[Iterable[str]], tuple[str, ...]]:
    def read(texts: Iterable[str]) -> tuple[str, ...]:
        texts = tuple(texts)
        parse(texts)
        return texts

    return read


def _check_environment(variables: dict[str, str]) -> dict[str, str]:
    if any(not name or "=" in name or "\0" in name for name in variables):
        raise ValueError("holds something that is not an environment variable")
    size = sum(len(f"{name}={value}".encode(errors="replace")) for name, value in variables.items())
    if size > MAX_ENVIRONMENT_BYTES:
        raise ValueError(f"holds {size} bytes of variables; put what exceeds {MAX_ENVIRONMENT_BYTES} into a file")
    return variables


def read_variables(texts: Iterable[str]) -> dict[str, str]:
    """Reads the values of `--env`.

    Raises:
        BadInputError: if one is no variable.
    """
    return dict(map(_variable, texts))


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name:
        raise BadInputError(f"'{text}' is not a value of --env; write NAME=VALUE, or NAME for its value here.")
    if not equals and name not in os.environ:
        raise BadInputError(f"--env {name} takes the value of {name} here, which is not set; write {name}=VALUE.")
    return name, value if equals else os.environ[name]


def check_name(text: str, kind: str = "job") -> str:
    """Returns the name of a job or a search unchanged.

    Raises:
        BadInputError: if it cannot be one: it is part of Mesos' ids and of paths.
    """
    if not _NAME.fullmatch(text):
        raise BadInputError(
            f"{text!a} is not a name for a {kind}; use up to {MAX_NAME} letters, digits, '.', '_', '+' and '-', "
            "a letter or digit first."
        )
    return text


_read_constraints = _readable_by(parse_constraints)
_read_volumes = _readable_by(parse_volumes)
JobName = Annotated[str, AfterValidator(checked_by(check_name))]
Constraints = Annotated[tuple[Text, ...], Field(max_length=100), AfterValidator(checked_by(_read_constraints))]
Volumes = Annotated[tuple[Text, ...], Field(max_length=100), AfterValidator(checked_by(_read_volumes))]
Environment = Annotated[dict[Text, Text], Field(max_length=1000), AfterValidator(_check_environment)]
"""The variables that a request may hold."""


@dataclass(frozen=True, kw_only=True)
class AgentOptions:
    """Which agents to use."""

    constraints: Annotated[
        Constraints,
        UserOption(
            "Where tasks run",
            "Use only matching agents, such as rack:IN:r1,r2 or hostname:LIKE:gpu-.*. Repeatable.",
            flag="--constraint",
            metavar="FIELD:OPERATOR:VALUE",
            read=_read_constraints,
            reads=list[str],
        ),
    ] = ()


@dataclass(frozen=True, kw_only=True)
class TaskOptions(AgentOptions):
    """The options of all tasks of a job."""

    environment: Annotated[
        dict[str, str],
        UserOption(
            "The script",
            "Set an environment variable for the script; NAME alone passes its value in this shell. Repeatable.",
            flag="--env",
            metavar="NAME[=VALUE]",
            read=read_variables,
            reads=list[str],
        ),
    ] = field(default_factory=dict)
    volumes: Annotated[
        Volumes,
        UserOption(
            "Where tasks run",
            "Mount a folder of the agents into the tasks' containers. A service mounts it at the same path, or below "
            "/mnt or /data. Repeatable.",
            flag="--volume",
            metavar="HOST[:CONTAINER][:ro]",
            read=_read_volumes,
            reads=list[str],
        ),
    ] = ()


def task_values(options: Mapping[str, Any]) -> TaskOptions:
    """The options of a stored search, as JSON values by parameter."""
    return TaskOptions(constraints=tuple(options.get("constraint", ())), volumes=tuple(options.get("volume", ())))
