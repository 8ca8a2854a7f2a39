"""FLOPs of a TensorFlow graph, read op by op without running it; functions and loops are followed.

Only what TensorFlow runs is counted. A traced graph holds more: gradients of frozen layers, the step that Keras takes
outside of a recurrent layer's loop to learn a shape. TensorFlow puts functions and loops into one graph and drops what
no result and no side effect needs (`tensorflow/core/common_runtime/lower_while_op.cc`, Grappler's model pruner).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import networkx as nx

from dike.profiling.flops_formulas import UnknownShapeError, formula_of
from dike.profiling.graph_loops import Frames, constant, while_trips
from dike.profiling.op_kinds import moves_data

_CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall", "RemoteCall", "TPUPartitionedCall"})
_BRANCHES = frozenset({"If", "StatelessIf", "Case", "StatelessCase"})
_LOOPS = frozenset({"While", "StatelessWhile"})
_START = "the start before all ops"
_TO_RUN = -1
"""Stands beside the numbers of an op's outputs: something waits until the op has run."""

Asked = dict[Any, set[int]]
"""An op that has to run -> which of its outputs are asked for."""


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
    _graphs: dict[tuple[Any, str], Any] = field(default_factory=dict, init=False, repr=False)
    _bodies: dict[tuple[int, frozenset[int]], tuple[Asked, frozenset[int]]] = field(
        default_factory=dict, init=False, repr=False
    )

    def graph_cost(self, graph: Any) -> Cost:
        """Cost of a traced function: of its results and its side effects."""
        return self._cost(self._body(graph, frozenset(range(len(graph.outputs))))[0])

    def cost(self, fetches: Iterable[Any], control: bool = True, fed: Collection[str] = ()) -> Cost:
        """Cost of computing tensors and running operations of one graph.

        Args:
            fetches: the tensors and operations.
            control: whether what runs ahead of an op by a control dependency counts as well.
            fed: names of ops whose values are given.
        """
        return self._cost(self._asked(fetches, control, fed))

    def _asked(self, fetches: Iterable[Any], control: bool = True, fed: Collection[str] = ()) -> Asked:
        """All that has to run for the fetches."""
        found: Asked = {}
        pending: list[Any] = []

        def ask(operation: Any, output: int) -> None:
            outputs = found.setdefault(operation, set())
            if output not in outputs:
                outputs.add(output)
                pending.append(operation)

        def ask_for(fetch: Any) -> None:
            if getattr(fetch, "op", fetch).name in fed:
                return
            if hasattr(fetch, "value_index"):
                ask(fetch.op, fetch.value_index)
            else:
                ask(fetch, _TO_RUN)

        for fetch in fetches:
            ask_for(fetch)
        while pending:
            operation = pending.pop()
            inputs = list(operation.inputs)
            for index in self._inputs_for(operation, found[operation]):
                ask_for(inputs[index])
            if control:
                for other in operation.control_inputs:
                    ask_for(other)
        return found

    def _inputs_for(self, operation: Any, outputs: set[int]) -> Iterable[int]:
        """Which inputs an op needs for those outputs; as a rule all."""
        kind = operation.type
        if kind in _LOOPS:
            return self._carried(operation, outputs)
        if kind in _BRANCHES:
            needed = {
                index + 1
                for name in _branch_names(operation)
                for index in self._arguments(operation, name, list(operation.inputs)[1:], outputs)
            }
            return needed | {0}
        name = _called(operation)
        if name is not None:
            return self._arguments(operation, name, list(operation.inputs), outputs)
        return range(len(operation.inputs))

    def _carried(self, loop: Any, outputs: set[int]) -> set[int]:
        """Variables of a `While` that have to go round for those of its outputs."""
        inputs = list(loop.inputs)
        if _TO_RUN in outputs:
            return set(range(len(inputs)))
        carried = outputs | set(self._arguments(loop, _function_name(loop, "cond"), inputs, {0}))
        while True:
            needed = set(self._arguments(loop, _function_name(loop, "body"), inputs, carried))
            if needed <= carried:
                return carried
            carried |= needed

    def _arguments(self, operation: Any, name: str, arguments: list[Any], outputs: set[int]) -> Iterable[int]:
        """Which arguments a function needs for those of its results, and for its side effects."""
        graph = self._function_graph(operation, name, arguments)
        if graph is None or len(graph.inputs) != len(arguments):
            return range(len(arguments))
        return self._body(graph, frozenset(outputs - {_TO_RUN}))[1]

    def _body(self, graph: Any, outputs: frozenset[int]) -> tuple[Asked, frozenset[int]]:
        """What has to run of a function for those of its results, and which of its arguments that needs."""
        known = self._bodies.get((id(graph), outputs))
        if known is None:
            results = [graph.outputs[index] for index in sorted(outputs)]
            asked = self._asked([*results, *graph.control_outputs])
            needed = frozenset(index for index, tensor in enumerate(graph.inputs) if tensor.op in asked)
            known = self._bodies[id(graph), outputs] = asked, needed
        return known

    def _cost(self, asked: Asked) -> Cost:
        """Total and longest path of what has to run of one graph (paper 'Dike', section 3.1)."""
        frames = Frames(asked)
        costs = {operation: self._all_rounds(operation, outputs, frames) for operation, outputs in asked.items()}
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

    def _all_rounds(self, operation: Any, outputs: set[int], frames: Frames) -> Cost:
        cost = self._of(operation, outputs)
        trips = frames.trips(operation) if cost.total else 1
        if trips is None:
            self.uncounted["while_loop of unknown length"] += 1
            return cost
        return cost.times(trips)

    def _of(self, operation: Any, outputs: set[int]) -> Cost:
        kind = operation.type
        if kind in _LOOPS:
            return self._loop(operation, outputs)
        if kind in _BRANCHES:
            return self._branches(operation, outputs)
        name = _called(operation)
        if name is not None:
            return self._function(operation, name, list(operation.inputs), outputs)
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

    def _loop(self, operation: Any, outputs: set[int]) -> Cost:
        inputs = list(operation.inputs)
        body = self._function(operation, _function_name(operation, "body"), inputs, self._carried(operation, outputs))
        condition = self._function(operation, _function_name(operation, "cond"), inputs, {0})
        once = Cost(body.total + condition.total, body.longest + condition.longest)
        test = self._function_graph(operation, _function_name(operation, "cond"), inputs)
        trips = while_trips(operation, test) if test is not None else None
        if trips is None:
            if once.total:
                self.uncounted["While of unknown length"] += 1
            return once
        # The condition is looked at once more, to end.
        return Cost(once.total * trips + condition.total, once.longest * trips + condition.longest)

    def _branches(self, operation: Any, outputs: set[int]) -> Cost:
        """The most expensive branch stands for all where it is not known which one runs."""
        arguments = list(operation.inputs)[1:]
        costs = [self._function(operation, name, arguments, outputs) for name in _branch_names(operation)]
        return max(costs, key=lambda cost: cost.total)

    def _function(self, operation: Any, name: str, arguments: list[Any], outputs: set[int]) -> Cost:
        graph = self._function_graph(operation, name, arguments)
        if graph is None:
            self.uncounted[operation.type] += 1
            return Cost()
        return self._cost(self._body(graph, frozenset(outputs - {_TO_RUN}))[0])

    def _function_graph(self, operation: Any, name: str, arguments: list[Any]) -> Any | None:
        if (operation, name) not in self._graphs:
            self._graphs[operation, name] = _function_graph(operation, name, arguments)
        return self._graphs[operation, name]


def _function_name(operation: Any, attribute: str) -> str:
    return str(operation.get_attr(attribute).name)


def _called(operation: Any) -> str | None:
    """The function that a call stands for."""
    if operation.type in _CALLS:
        return _function_name(operation, "f")
    return operation.type if operation.graph._get_function(operation.type) is not None else None


def _branch_names(operation: Any) -> list[str]:
    """Functions of the branches that may run."""
    attributes = operation.node_def.attr
    if "branches" in attributes:
        names = [function.name for function in attributes["branches"].list.func]
    else:
        names = [attributes[branch].func.name for branch in ("else_branch", "then_branch")]
    chosen: Any = constant(operation.inputs[0])
    if chosen is None or chosen.ndim:
        return names
    # An index that names no branch runs the last one.
    return [names[int(chosen)] if 0 <= int(chosen) < len(names) else names[-1]]


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
