"""Numbers that the product's code has: constants, default values of fields and arguments, bounds of fields.

A name says what its number is: of `..._s` seconds, of `..._mib` MiB; one without a unit may be a number of bytes.
"""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROOMS = ("dike", "executor", "framework", "solver")

_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.LShift: lambda value, bits: int(value) << int(bits),
}
_UNITS = {
    "s": ("s", 1.0),
    "ms": ("s", 1e-3),
    "minutes": ("s", 60.0),
    "hours": ("s", 3600.0),
    "days": ("s", 86400.0),
    "bytes": ("B", 1.0),
    "kib": ("B", 2.0**10),
    "mib": ("B", 2.0**20),
    "gib": ("B", 2.0**30),
    "gbps": ("Gb/s", 1.0),
}
"""The end of a name -> dimension, and how much one is."""

Value = tuple[str, float]
"""Dimension and number."""


@functools.cache
def code_values() -> frozenset[Value]:
    """All numbers of the product."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    found = {(name, node) for tree in trees for name, node in _named(tree)}
    named: dict[str, float] = {}
    # A constant may be computed of others, of other modules too.
    for _ in range(3):
        named |= {name: value for name, node in found if (value := _number(node, named)) is not None}
    values = {_of(name, value) for name, node in found if (value := _number(node, named)) is not None}
    return frozenset(values)


def _of(name: str, value: float) -> Value:
    dimension, factor = _UNITS.get(name.lower().rpartition("_")[2], ("", 1.0))
    return dimension, round(value * factor, 9)


def _named(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.walk(tree):
        match node:
            case ast.Module(body=body) | ast.ClassDef(body=body):
                for statement in body:
                    yield from _assigned(statement)
            case ast.arguments():
                of_positions = [*node.posonlyargs, *node.args]
                with_default = of_positions[len(of_positions) - len(node.defaults) :]
                for argument, default in zip(with_default, node.defaults, strict=True):
                    yield argument.arg, default
                for argument, own in zip(node.kwonlyargs, node.kw_defaults, strict=True):
                    if own is not None:
                        yield argument.arg, own


def _assigned(statement: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            yield from _parts(name, value)
        case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=default):
            # A field's bounds are in its annotation or in its default: `Field(10, le=60)`.
            for part in (annotation, default):
                if part is not None:
                    yield from _parts(name, part)


def _parts(name: str, node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    yield name, node
    for call in ast.walk(node):
        if isinstance(call, ast.Call):
            for argument in [*call.args, *(keyword.value for keyword in call.keywords)]:
                yield name, argument
        elif isinstance(call, ast.Tuple | ast.List):
            for element in call.elts:
                yield name, element


def _number(node: ast.expr, named: dict[str, float]) -> float | None:
    match node:
        case ast.Constant(value=bool()):
            return None
        case ast.Constant(value=int() | float() as value):
            return float(value) if abs(value) < 1e15 else None
        case ast.Name(id=name):
            return named.get(name)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            parts = _number(left, named), _number(right, named)
            if parts[0] is None or parts[1] is None or (isinstance(op, ast.Div) and not parts[1]):
                return None
            return float(_OPERATORS[type(op)](parts[0], parts[1]))
    return None
