"""Reads YAML files into pydantic models; errors are one sentence with the line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from dike.exceptions import BadInputError
from solver.text_files import read_text

NOT_YAML = (yaml.YAMLError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Exceptions of the parser: its own, and those for values that look like another type, such as 2024-13-45."""


MAX_NODES = 1_000_000
"""Maximum number of values in a file with aliases expanded: a few bytes of aliases can stand for billions."""


class StrictModel(BaseModel):
    """A model without unknown keys and without type conversion."""

    model_config = ConfigDict(extra="forbid", strict=True)


Content = TypeVar("Content", bound=StrictModel)


@dataclass(frozen=True)
class YamlFile(Generic[Content]):
    """A parsed file."""

    path: Path
    content: Content
    _tree: yaml.Node

    def error(self, location: Sequence[int | str], message: str) -> BadInputError:
        """The error for a location in the file, such as `("nodes", 0, "name")`."""
        return BadInputError(f"{self.path}, line {self.line(location)}: {message}")

    def line(self, location: Sequence[int | str]) -> int:
        """Line (from 1) of the deepest part of `location` that is in the file."""
        return _line(self._tree, location)


def read_yaml(path: Path, model: type[Content], what: str, parts: Mapping[str, type[StrictModel]]) -> YamlFile[Content]:
    """Reads a file.

    Args:
        path: the file.
        model: the model of its content; a mapping.
        what: display name of such a file, as in `cluster file`.
        parts: models of the parts by their key in the file, to list their known keys.

    Raises:
        BadInputError: if it is unreadable or invalid.
    """
    tree, data = load_yaml(path, what)
    if tree is None or not isinstance(data, dict):
        first = next(iter(model.model_fields))
        raise BadInputError(f"{path}, line 1: a {what} is a mapping with the key '{first}'.")
    try:
        content = model.model_validate(data)
    except ValidationError as error:
        raise BadInputError(_invalid(path, tree, error, model, parts)) from error
    return YamlFile(path, content, tree)


def load_yaml(path: Path, what: str) -> tuple[yaml.Node | None, Any]:
    """Reads a file without a model: its tree, for the lines, and its data.

    Raises:
        BadInputError: if it is unreadable, not YAML, has a duplicate key, or its aliases stand for too many values.
    """
    text = read_text(path, what)
    try:
        return parse_yaml(path, text)
    except NOT_YAML as error:
        raise BadInputError(_syntax_error(path, error)) from error
    except RecursionError:
        raise BadInputError(f"{path}, line 1: something is nested too deeply, or in itself.") from None


def parse_yaml(path: Path, text: str) -> tuple[yaml.Node | None, Any]:
    """Parses a file's text: its tree and its data.

    Raises:
        BadInputError: if it has a duplicate key, or its aliases stand for too many values.
        yaml.YAMLError and others of `NOT_YAML`, RecursionError: if it is not YAML.
    """
    tree = yaml.compose(text, Loader=yaml.SafeLoader)
    if tree is not None and _expanded(tree, {}) > MAX_NODES:
        raise BadInputError(f"{path}, line 1: its aliases stand for more than {MAX_NODES} values; write them out.")
    data = yaml.safe_load(text)
    if tree is not None:
        _refuse_repeated_keys(path, tree, set())
    return tree, data


def _syntax_error(path: Path, error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None)
    if problem is None:
        details = str(error).splitlines() if isinstance(error, yaml.YAMLError | ValueError) else []
        problem = details[0] if details else "a value does not have the type that it looks like"
    return f"{path}, line {mark.line + 1 if mark else 1}: this is not YAML: {problem}."


def _expanded(node: yaml.Node, known: dict[int, float]) -> float:
    """Number of values of a node with aliases expanded; infinite if it contains itself."""
    if id(node) not in known:
        known[id(node)] = math.inf
        parts: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            parts = node.value
        known[id(node)] = 1 + sum(_expanded(part, known) for part in parts)
    return known[id(node)]


def _refuse_repeated_keys(path: Path, node: yaml.Node, visited: set[int]) -> None:
    if id(node) in visited:
        return
    visited.add(id(node))
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if key.value in seen:
                line = key.start_mark.line + 1
                raise BadInputError(f"{path}, line {line}: duplicate key '{key.value}'.")
            seen.add(key.value)
            _refuse_repeated_keys(path, value, visited)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _refuse_repeated_keys(path, value, visited)


def _invalid(
    path: Path,
    tree: yaml.Node,
    error: ValidationError,
    model: type[StrictModel],
    parts: Mapping[str, type[StrictModel]],
) -> str:
    """One sentence on the first error, by line."""
    errors = error.errors(include_url=False)
    first = min(errors, key=lambda item: _line(tree, item["loc"]))
    place = ".".join(str(part) for part in first["loc"])
    of = next((part for key, part in parts.items() if key in first["loc"][:-1]), model)
    match first["type"]:
        case "extra_forbidden":
            reason = f"the key '{first['loc'][-1]}' is not known; known keys are {', '.join(of.model_fields)}"
        case "missing":
            reason = f"the key '{first['loc'][-1]}' is missing"
        case "too_short" if first["loc"][-1] in parts:
            noun = str(first["loc"][-1]).removesuffix("s")
            reason = f"there is no {noun}; list at least one"
        case _:
            message = first["msg"].removeprefix("Value error, ")
            message = message[:1].lower() + message[1:]
            reason = f"'{place}' is {_shown(first['input'])}: {message}"
    return f"{path}, line {_line(tree, first['loc'])}: {reason}."


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _line(tree: yaml.Node, location: Sequence[int | str]) -> int:
    line = tree.start_mark.line
    node = tree
    for part in location:
        if isinstance(node, yaml.MappingNode):
            found = next(((key, value) for key, value in node.value if key.value == part), None)
            if found is None:
                break
            line, node = found[0].start_mark.line, found[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line
        else:
            break
    return line + 1
