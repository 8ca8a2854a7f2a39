"""FLOPs of a TensorFlow graph, read op by op without running it; functions and loops are followed.

Only what TensorFlow runs is counted. A traced graph contains more: gradients of frozen layers, the step that Keras
takes outside a recurrent layer's loop to infer a shape. TensorFlow inlines functions and loops and prunes what no
result and no side effect needs (`tensorflow/core/common_runtime/lower_while_op.cc`, Grappler's model pruner).
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
_NO_OUTPUT = -1
"""Pseudo output index: the op has to run, but no output is needed."""

NeededOutputs = dict[Any, set[int]]
"""An op that has to run -> indices of its needed outputs."""


@dataclass(frozen=True)
class Cost:
    """Total FLOPs of an op or a function, and FLOPs along its most expensive path of dependent ops."""

    total: float = 0.0
    longest: float = 0.0

    def times(self, count: float) -> Cost:
        return Cost(self.total * count, self.longest * count)


@dataclass
class FlopsReader:
    """Computes costs of ops; records those that it cannot count.

    Attributes:
        batch_size: used for an unknown first dimension.
        reference: another graph with ops of the same names, in which more shapes may be known.
        uncounted: types of ops with unknown FLOPs -> count.
    """

    batch_size: int
    reference: Any | None = None
    uncounted: Counter[str] = field(default_factory=Counter)
    _graphs: dict[tuple[Any, str], Any] = field(default_factory=dict, init=False, repr=False)
    _bodies: dict[tuple[int, frozenset[int]], tuple[NeededOutputs, frozenset[int]]] = field(
        default_factory=dict, init=False, repr=False
    )

    def graph_cost(self, graph: Any) -> Cost:
        """Cost of all results and side effects of a traced function."""
        return self._cost(self._needed_in_function(graph, frozenset(range(len(graph.outputs))))[0])

    def cost(self, fetches: Iterable[Any], control: bool = True, fed: Collection[str] = ()) -> Cost:
        """Cost of computing tensors and running operations of one graph; ops in `fed` have given values."""
        return self._cost(self._needed_ops(fetches, control, fed))

    def _needed_ops(self, fetches: Iterable[Any], control: bool = True, fed: Collection[str] = ()) -> NeededOutputs:
        found: NeededOutputs = {}
        pending: list[Any] = []

        def require_output(operation: Any, output: int) -> None:
            outputs = found.setdefault(operation, set())
            if output not in outputs:
                outputs.add(output)
                pending.append(operation)

        def require(fetch: Any) -> None:
            if getattr(fetch, "op", fetch).name in fed:
                return
            if hasattr(fetch, "value_index"):
                require_output(fetch.op, fetch.value_index)
            else:
                require_output(fetch, _NO_OUTPUT)

        for fetch in fetches:
            require(fetch)
        while pending:
            operation = pending.pop()
            inputs = list(operation.inputs)
            for index in self._inputs_for(operation, found[operation]):
                require(inputs[index])
            if control:
                for other in operation.control_inputs:
                    require(other)
        return found

    def _inputs_for(self, operation: Any, outputs: set[int]) -> Iterable[int]:
        """Indices of the inputs that an op needs for these outputs; usually all."""
        kind = operation.type
        if kind in _LOOPS:
            return self._needed_loop_variables(operation, outputs)
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

    def _needed_loop_variables(self, loop: Any, outputs: set[int]) -> set[int]:
        """Loop variables of a `While` that these outputs need."""
        inputs = list(loop.inputs)
        if _NO_OUTPUT in outputs:
            return set(range(len(inputs)))
        carried = outputs | set(self._arguments(loop, _function_name(loop, "cond"), inputs, {0}))
        while True:
            needed = set(self._arguments(loop, _function_name(loop, "body"), inputs, carried))
            if needed <= carried:
                return carried
            carried |= needed

    def _arguments(self, operation: Any, name: str, arguments: list[Any], outputs: set[int]) -> Iterable[int]:
        """Indices of the arguments that a function needs for these results, and for its side effects."""
        graph = self._function_graph(operation, name, arguments)
        if graph is None or len(graph.inputs) != len(arguments):
            return range(len(arguments))
        return self._needed_in_function(graph, frozenset(outputs - {_NO_OUTPUT}))[1]

    def _needed_in_function(self, graph: Any, outputs: frozenset[int]) -> tuple[NeededOutputs, frozenset[int]]:
        """Ops that have to run in a function for these results, and the arguments that they need."""
        known = self._bodies.get((id(graph), outputs))
        if known is None:
            results = [graph.outputs[index] for index in sorted(outputs)]
            ops = self._needed_ops([*results, *graph.control_outputs])
            arguments = frozenset(index for index, tensor in enumerate(graph.inputs) if tensor.op in ops)
            known = self._bodies[id(graph), outputs] = ops, arguments
        return known

    def _cost(self, needed: NeededOutputs) -> Cost:
        """Total and longest path of the needed ops of one graph (paper 'Dike', section 3.1)."""
        frames = Frames(needed)
        costs = {
            operation: self._cost_of_all_trips(operation, outputs, frames) for operation, outputs in needed.items()
        }
        paths: nx.DiGraph[Any] = nx.DiGraph()
        for operation, cost in costs.items():
            # An op's FLOPs are the weights of its incoming edges.
            paths.add_edge(_START, operation, flops=cost.longest)
            for tensor in operation.inputs:
                # Back edges of loops are left out: costs are multiplied by the number of trips.
                if tensor.op in costs and tensor.op.type not in ("NextIteration", "RefNextIteration"):
                    paths.add_edge(tensor.op, operation, flops=cost.longest)
        longest = nx.dag_longest_path_length(paths, weight="flops") if costs else 0.0
        return Cost(sum(cost.total for cost in costs.values()), float(longest))

    def _cost_of_all_trips(self, operation: Any, outputs: set[int], frames: Frames) -> Cost:
        cost = self._op_cost(operation, outputs)
        trips = frames.trips(operation) if cost.total else 1
        if trips is None:
            self.uncounted["while_loop of unknown length"] += 1
            return cost
        return cost.times(trips)

    def _op_cost(self, operation: Any, outputs: set[int]) -> Cost:
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
        flops = self._op_flops(operation)
        return Cost(flops, flops)

    def _op_flops(self, operation: Any) -> float:
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
            shape = _merged_shape(shape, self.reference.get_tensor_by_name(tensor.name).shape)
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
        body = self._function(
            operation, _function_name(operation, "body"), inputs, self._needed_loop_variables(operation, outputs)
        )
        condition = self._function(operation, _function_name(operation, "cond"), inputs, {0})
        once = Cost(body.total + condition.total, body.longest + condition.longest)
        test = self._function_graph(operation, _function_name(operation, "cond"), inputs)
        trips = while_trips(operation, test) if test is not None else None
        if trips is None:
            if once.total:
                self.uncounted["While of unknown length"] += 1
            return once
        # The condition runs once more, to end the loop.
        return Cost(once.total * trips + condition.total, once.longest * trips + condition.longest)

    def _branches(self, operation: Any, outputs: set[int]) -> Cost:
        """Cost of the most expensive branch that may run."""
        arguments = list(operation.inputs)[1:]
        costs = [self._function(operation, name, arguments, outputs) for name in _branch_names(operation)]
        return max(costs, key=lambda cost: cost.total)

    def _function(self, operation: Any, name: str, arguments: list[Any], outputs: set[int]) -> Cost:
        graph = self._function_graph(operation, name, arguments)
        if graph is None:
            self.uncounted[operation.type] += 1
            return Cost()
        return self._cost(self._needed_in_function(graph, frozenset(outputs - {_NO_OUTPUT}))[0])

    def _function_graph(self, operation: Any, name: str, arguments: list[Any]) -> Any | None:
        if (operation, name) not in self._graphs:
            self._graphs[operation, name] = _function_graph(operation, name, arguments)
        return self._graphs[operation, name]


def _function_name(operation: Any, attribute: str) -> str:
    return str(operation.get_attr(attribute).name)


def _called(operation: Any) -> str | None:
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
    # An index out of range runs the last branch.
    return [names[int(chosen)] if 0 <= int(chosen) < len(names) else names[-1]]


def _merged_shape(shape: Any, other: Any) -> Any:
    """The shape, with its unknown dimensions taken from the other."""
    if shape.rank is None:
        return other
    if other.rank != shape.rank:
        return shape
    return type(shape)([dim if dim is not None else known for dim, known in zip(shape, other, strict=True)])


def _computes_floats(operation: Any) -> bool:
    tensors = (*operation.inputs, *operation.outputs)
    return any(tensor.dtype.is_floating or tensor.dtype.is_complex for tensor in tensors)


def _registered_flops(operation: Any) -> float | None:
    """FLOPs by TensorFlow's own statistics, which users can extend; None if they have none."""
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
