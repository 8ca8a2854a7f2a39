"""Reads cluster files (YAML) and says in one sentence, with the line, what is wrong with one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from dike.exceptions import BadInputError
from solver.cluster import (
    DEFAULT_DISK_BYTES,
    DEFAULT_NETWORK_GBPS,
    DEFAULT_WITHIN_NODE_GBPS,
    Cluster,
    LinkError,
    NodeClass,
    PairCost,
)
from solver.traffic import COST_BETWEEN_NODES, COST_WITHIN_NODE
from solver.units import parse_bytes

MAX_NODES = 100_000

Size = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)]
Speed = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Cost = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Node(_Strict):
    name: Annotated[str, Field(min_length=1)]
    count: Annotated[int, Field(gt=0, le=MAX_NODES)] = 1
    cpus: Speed
    mem: Size
    gpus: Annotated[int, Field(ge=0)] = 0
    gpu_model: str | None = None
    disk: Size = DEFAULT_DISK_BYTES
    network_gbps: Speed = DEFAULT_NETWORK_GBPS
    rack: str | None = None


class _Pair(_Strict):
    between: Annotated[list[str], Field(min_length=2, max_length=2)]
    cost: Cost


class _Links(_Strict):
    within_node_gbps: Speed = DEFAULT_WITHIN_NODE_GBPS
    across_racks_gbps: Speed | None = None
    within_node_cost: Cost = COST_WITHIN_NODE
    within_rack_cost: Cost = COST_BETWEEN_NODES
    across_racks_cost: Cost | None = None
    pairs: list[_Pair] = Field(default_factory=list)


class _File(_Strict):
    nodes: Annotated[list[_Node], Field(min_length=1)]
    links: _Links = Field(default_factory=_Links)


_MODELS: dict[str, type[_Strict]] = {"pairs": _Pair, "links": _Links, "nodes": _Node}
"""What is inside these keys, innermost first."""


def read_cluster(path: Path) -> Cluster:
    """Reads a cluster file.

    Raises:
        BadInputError: if it cannot be read or something in it is wrong.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BadInputError(f"The cluster file {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise BadInputError(f"The cluster file {path} is not UTF-8 text.") from error
    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise BadInputError(_syntax_error(path, error)) from error
    if tree is None or not isinstance(data, dict):
        raise BadInputError(f"{path}, line 1: a cluster file is a mapping with the key 'nodes'.")
    _refuse_repeated_keys(path, tree)
    try:
        file = _File.model_validate(data)
    except ValidationError as error:
        raise BadInputError(_invalid(path, tree, error)) from error
    _refuse_repeated_names(path, tree, file)
    links = file.links
    try:
        return Cluster(
            nodes=tuple(_node_class(node) for node in file.nodes),
            within_node_gbps=links.within_node_gbps,
            across_racks_gbps=links.across_racks_gbps,
            within_node_cost=links.within_node_cost,
            within_rack_cost=links.within_rack_cost,
            across_racks_cost=links.across_racks_cost,
            pairs=tuple(PairCost(pair.between[0], pair.between[1], pair.cost) for pair in links.pairs),
        )
    except LinkError as error:
        raise BadInputError(f"{path}, line {_line(tree, error.key)}: {error.reason}.") from error


def _node_class(node: _Node) -> NodeClass:
    return NodeClass(
        name=node.name,
        count=node.count,
        cpus=node.cpus,
        mem_bytes=node.mem,
        gpus=node.gpus,
        gpu_model=node.gpu_model,
        disk_bytes=node.disk,
        network_gbps=node.network_gbps,
        rack=node.rack,
    )


def _syntax_error(path: Path, error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return f"{path}, line {mark.line + 1 if mark else 1}: this is not YAML: {problem}."


def _refuse_repeated_keys(path: Path, node: yaml.Node) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if key.value in seen:
                line = key.start_mark.line + 1
                raise BadInputError(f"{path}, line {line}: the key '{key.value}' stands here a second time.")
            seen.add(key.value)
            _refuse_repeated_keys(path, value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _refuse_repeated_keys(path, value)


def _refuse_repeated_names(path: Path, tree: yaml.Node, file: _File) -> None:
    owners: dict[str, int] = {}
    for index, node in enumerate(file.nodes):
        for name in _node_class(node).node_names:
            if name in owners:
                line = _line(tree, ("nodes", index, "name"))
                other = _line(tree, ("nodes", owners[name], "name"))
                raise BadInputError(
                    f"{path}, line {line}: the node name '{name}' is taken by line {other}; rename one."
                )
            owners[name] = index


def _invalid(path: Path, tree: yaml.Node, error: ValidationError) -> str:
    """One sentence on the first thing wrong, by line."""
    errors = error.errors(include_url=False)
    first = min(errors, key=lambda item: _line(tree, item["loc"]))
    place = ".".join(str(part) for part in first["loc"])
    model = next((kind for key, kind in _MODELS.items() if key in first["loc"]), _File)
    known = ", ".join(model.model_fields)
    match first["type"]:
        case "extra_forbidden":
            reason = f"the key '{first['loc'][-1]}' is not known; known keys are {known}"
        case "missing":
            reason = f"the key '{first['loc'][-1]}' is missing"
        case "too_short" | "too_long" if first["loc"][-1] == "between":
            reason = "'between' takes two machines, or classes of machines"
        case "too_short":
            reason = "there is no node; list at least one"
        case _:
            message = first["msg"].removeprefix("Value error, ")
            message = message[:1].lower() + message[1:]
            reason = f"'{place}' is {_shown(first['input'])}: {message}"
    return f"{path}, line {_line(tree, first['loc'])}: {reason}."


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _line(tree: yaml.Node, location: Sequence[int | str]) -> int:
    """Line (from 1) of the deepest part of `location` that is in the file."""
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
