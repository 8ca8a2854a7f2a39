"""Profiles a training step that a script schedules on its own `ClusterCoordinator`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dike.exceptions import BadInputError
from dike.graphs import ancestors
from dike.keras3.model import unique_names
from dike.profile import Api, ModelProfile
from dike.profiling.graph_batch import first_dim_near
from dike.profiling.graph_flops import Cost, FlopsReader
from dike.profiling.keras_profile import STEP_PER_FORWARD, optimizer_name, slots_per_parameter
from dike.profiling.model_profile import Findings
from dike.profiling.op_kinds import is_plumbing


@dataclass
class StepTrace:
    """A scheduled step and what was recorded while it was traced.

    Attributes:
        function: a `tf.function` or a plain one.
        datasets: the script's per-worker datasets.
        targets: tensors whose gradients were computed.
        sources: variables with respect to which they were computed, by id.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    datasets: Sequence[Any]
    targets: list[Any] = field(default_factory=list)
    sources: dict[int, Any] = field(default_factory=dict)

    def add_gradient(self, target: Any, sources: Any) -> None:
        import tensorflow as tf

        self.targets += [tensor for tensor in tf.nest.flatten(target) if hasattr(tensor, "op")]
        for source in tf.nest.flatten(sources):
            variable = tensorflow_variable(source)
            if variable is not None:
                self.sources[id(variable)] = variable

    def graph(self) -> Any:
        import tensorflow as tf

        function = self.function if hasattr(self.function, "get_concrete_function") else tf.function(self.function)
        graph = function.get_concrete_function(*self.args, **self.kwargs).graph
        # A function that creates variables is traced twice; only the trace that runs counts.
        self.targets = [target for target in self.targets if _is_inside(target.graph, graph)] or self.targets
        return graph


def coordinator_profile(
    name: str, trace: StepTrace, optimizer_of: Callable[[], Any], batch_size: int | None = None
) -> ModelProfile:
    """Traces and profiles a scheduled step; raises BadInputError if nothing is trainable or the batch size is unknown.

    Args:
        name: the profile's name.
        trace: the step.
        optimizer_of: returns the Keras optimizer that the step has used, or None; called after tracing.
        batch_size: samples per step in place of the script's own.
    """
    graph = trace.graph()
    size = batch_size or _batch_size(trace)
    if size is None:
        raise BadInputError(f"The batch size of {name} cannot be determined from its step; give it with --batch-size.")
    reader = FlopsReader(size)
    step = reader.graph_cost(graph)
    losses = _by_graph(trace.targets)
    forward_ops = [ancestors((target.op for target in targets), control=False) for targets in losses]
    if losses:
        costs = [FlopsReader(size).cost(targets, control=False) for targets in losses]
        forward = Cost(sum(cost.total for cost in costs), max(cost.longest for cost in costs))
    else:
        forward = step.times(1 / STEP_PER_FORWARD)
    trainable = list(trace.sources.values())
    optimizer = optimizer_of()
    return Findings(
        name=name,
        api=Api.COORDINATOR,
        batch_size=size,
        forward=forward,
        step_flops=step.total,
        variables=unique_names(_model_variables(graph, trainable, optimizer)),
        trainable=trainable,
        layers=Counter(op.type for operations in forward_ops for op in operations if not is_plumbing(op.type)),
        uncounted=reader.uncounted,
        optimizer=optimizer_name(optimizer) if optimizer is not None else "",
        optimizer_slots=slots_per_parameter(optimizer, trainable),
    ).profile()


def tensorflow_variable(variable: Any) -> Any | None:
    """The `tf.Variable` of a source of gradients: a Keras 3 variable wraps one, a tensor has none."""
    import tensorflow as tf

    if isinstance(variable, tf.Variable):
        return variable
    value = getattr(variable, "value", None)
    return value if isinstance(value, tf.Variable) else None


def _model_variables(graph: Any, trainable: Sequence[Any], optimizer: Any) -> list[Any]:
    """The step's variables without the optimizer's, which are placed with those they belong to."""
    own: list[Any] = []
    if optimizer is not None:
        variables = optimizer.variables
        own = list(variables() if callable(variables) else variables)
    excluded = {id(tensorflow_variable(variable)) for variable in own}
    found = {id(variable): variable for variable in (*trainable, *graph.variables)}
    return [variable for key, variable in found.items() if key not in excluded]


def _is_inside(graph: Any, outer: Any) -> bool:
    while graph is not None and graph is not outer:
        graph = getattr(graph, "outer_graph", None)
    return graph is outer


def _by_graph(targets: Sequence[Any]) -> list[list[Any]]:
    groups: dict[int, list[Any]] = {}
    for target in targets:
        groups.setdefault(id(target.graph), []).append(target)
    return list(groups.values())


def _batch_size(trace: StepTrace) -> int | None:
    """First dimension of the first batch of data, of an argument, or of the tensor that the loss is reduced from."""
    import tensorflow as tf

    first = [next(iter(dataset)) for dataset in trace.datasets[:1]]
    for tensor in tf.nest.flatten([*first, trace.args, dict(trace.kwargs)]):
        shape = getattr(tensor, "shape", None)
        if shape is not None and len(shape) and shape[0] and not isinstance(tensor, tf.Variable):
            return int(shape[0])
    return first_dim_near(trace.targets[0]) if trace.targets else None
