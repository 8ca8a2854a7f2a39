"""FLOPs of a TensorFlow graph, read op by op without running it; functions and loops are followed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import networkx as nx

from dike.profiling.flops_formulas import UnknownShapeError, formula_of
from dike.profiling.graph_loops import Frames, while_trips
from dike.profiling.op_kinds import moves_data

_CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall", "RemoteCall", "TPUPartitionedCall"})
_BRANCHES = frozenset({"If", "StatelessIf", "Case", "StatelessCase"})
_LOOPS = frozenset({"While", "StatelessWhile"})
_START = "the start before all ops"


@dataclass(frozen=True)
class Cost:
    """FLOPs of an op, or of a whole function behind it.

    Attributes:
        total: of all of it.
        longest: of its most expensive path of ops that need each other's result.
    """

    total: float = 0.0
    longest: float = 0.0

    def times(self, count: float) -> Cost:
        return Cost(self.total * count, self.longest * count)


@dataclass
class FlopsReader:
    """Reads costs of ops; remembers what it could not count.

    Attributes:
        batch_size: stands in for a first dimension that is not known.
        reference: another graph with ops of the same names, which may know shapes that are not known in this one.
        uncounted: types of ops with no known FLOPs -> count.
    """

    batch_size: int
    reference: Any | None = None
    uncounted: Counter[str] = field(default_factory=Counter)

    def cost(self, operations: Iterable[Any]) -> Cost:
        """Total and longest path of operations that all belong to one graph (paper 'Dike', section 3.1)."""
        operations = list(operations)
        frames = Frames(operations)
        costs = {operation: self._all_rounds(operation, frames) for operation in operations}
        paths: nx.DiGraph[Any] = nx.DiGraph()
        for operation, cost in costs.items():
            # An op's FLOPs are put on the edges that lead to it.
            paths.add_edge(_START, operation, flops=cost.longest)
            for tensor in operation.inputs:
                # A loop's way back is left out: what goes round counts by its number of rounds.
                if tensor.op in costs and tensor.op.type not in ("NextIteration", "RefNextIteration"):
                    paths.add_edge(tensor.op, operation, flops=cost.longest)
        longest = nx.dag_longest_path_length(paths, weight="flops") if costs else 0.0
        return Cost(sum(cost.total for cost in costs.values()), float(longest))

    def _all_rounds(self, operation: Any, frames: Frames) -> Cost:
        cost = self._of(operation)
        trips = frames.trips(operation) if cost.total else 1
        if trips is None:
            self.uncounted["while_loop of unknown length"] += 1
            return cost
        return cost.times(trips)

    def _of(self, operation: Any) -> Cost:
        kind = operation.type
        if kind in _LOOPS:
            return self._loop(operation)
        if kind in _BRANCHES:
            return self._branches(operation)
        if kind in _CALLS or operation.graph._get_function(kind) is not None:
            name = operation.get_attr("f").name if kind in _CALLS else kind
            return self._function(operation, name, list(operation.inputs))
        if not _computes_floats(operation):
            return Cost()
        flops = self._simple(operation)
        return Cost(flops, flops)

    def _simple(self, operation: Any) -> float:
        formula = formula_of(operation.type)
        try:
            if formula is not None:
                return float(formula(operation, self._dims))
            if moves_data(operation.type):
                return 0.0
            registered = _registered_flops(operation)
            if registered is not None:
                return registered
        except UnknownShapeError:
            pass
        self.uncounted[operation.type] += 1
        return 0.0

    def _dims(self, tensor: Any) -> tuple[int, ...]:
        shape = tensor.shape
        if self.reference is not None and not shape.is_fully_defined():
            shape = _filled(shape, self.reference.get_tensor_by_name(tensor.name).shape)
        if shape.rank is None:
            raise UnknownShapeError(tensor.name)
        dims = shape.as_list()
        if dims and dims[0] is None:
            dims[0] = self.batch_size
        if None in dims:
            raise UnknownShapeError(tensor.name)
        return tuple(dims)

    def _loop(self, operation: Any) -> Cost:
        body = self._function(operation, operation.get_attr("body").name, list(operation.inputs))
        condition = self._function(operation, operation.get_attr("cond").name, list(operation.inputs))
        once = Cost(body.total + condition.total, body.longest + condition.longest)
        test = _function_graph(operation, operation.get_attr("cond").name, list(operation.inputs))
        trips = while_trips(operation, test) if test is not None else None
        if trips is None:
            if once.total:
                self.uncounted["While of unknown length"] += 1
            return once
        return once.times(trips)

    def _branches(self, operation: Any) -> Cost:
        """The most expensive branch stands for all: which one runs is not known."""
        attributes = operation.node_def.attr
        if "branches" in attributes:
            names = [function.name for function in attributes["branches"].list.func]
        else:
            names = [attributes[branch].func.name for branch in ("then_branch", "else_branch")]
        costs = [self._function(operation, name, list(operation.inputs)[1:]) for name in names]
        return max(costs, key=lambda cost: cost.total)

    def _function(self, operation: Any, name: str, arguments: list[Any]) -> Cost:
        graph = _function_graph(operation, name, arguments)
        if graph is None:
            self.uncounted[operation.type] += 1
            return Cost()
        return self.cost(graph.get_operations())


def _filled(shape: Any, other: Any) -> Any:
    """The shape, with what only the other knows filled in."""
    if shape.rank is None:
        return other
    if other.rank != shape.rank:
        return shape
    return type(shape)([mine if mine is not None else theirs for mine, theirs in zip(shape, other, strict=True)])


def _computes_floats(operation: Any) -> bool:
    tensors = (*operation.inputs, *operation.outputs)
    return any(tensor.dtype.is_floating or tensor.dtype.is_complex for tensor in tensors)


def _registered_flops(operation: Any) -> float | None:
    """What TensorFlow's own statistics say, which users can add to; None where they say nothing."""
    from tensorflow.python.framework import ops

    try:
        flops = ops.get_stats_for_node_def(operation.graph, operation.node_def, "flops").value
    except ValueError as error:
        raise UnknownShapeError(operation.name) from error
    return None if flops is None else float(flops)


def _function_graph(operation: Any, name: str, arguments: list[Any]) -> Any | None:
    """The graph of a function that `operation` calls."""
    graph = operation.graph
    while graph is not None:
        function = graph._get_function(name)
        if function is not None:
            break
        graph = getattr(graph, "outer_graph", None)
    else:
        return None
    traced = getattr(function, "graph", None)
    if traced is not None:
        return traced
    from tensorflow.python.framework import function_def_to_graph

    shapes = [argument.shape for argument in arguments]
    with operation.graph.as_default():
        return function_def_to_graph.function_def_to_graph(function.cached_definition, input_shapes=shapes)
