"""Reads the profile of a TensorFlow 1 graph that an optimizer has been put on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dike.exceptions import BadInputError
from dike.keras_variables import unique_names
from dike.profile import Api, ModelProfile
from dike.profiling.graph_batch import ancestors, batch_size_of, open_placeholders, open_sources, with_batch_size
from dike.profiling.graph_flops import FlopsReader
from dike.profiling.model_profile import Findings
from dike.profiling.op_kinds import is_plumbing


@dataclass
class Training:
    """What the interception has seen of the training in one graph.

    Attributes:
        losses: tensors whose gradients were asked for.
        train_ops: operations that apply gradients.
        optimizers: v1 optimizers that made them.
        synchronous: whether a `SyncReplicasOptimizer` is among them.
    """

    losses: list[Any] = field(default_factory=list)
    train_ops: list[Any] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    synchronous: bool = False

    def forward(self) -> list[Any]:
        """Operations of the forward pass."""
        return ancestors([loss.op for loss in self.losses], control=False)

    def step(self) -> list[Any]:
        """Operations of a whole training step."""
        return ancestors([*self.train_ops, *(loss.op for loss in self.losses)], control=True)


def needs_feeding(training: Training) -> bool:
    """Whether only the values fed to the first training step tell the graph's shapes."""
    return bool(open_placeholders(training.step()))


def graph_profile(
    name: str,
    graph: Any,
    training: Training,
    fed: Mapping[str, tuple[int, ...]],
    batch_size: int | None = None,
) -> ModelProfile:
    """The profile of a graph.

    Args:
        name: what the profile is called.
        graph: the graph, which is left as it is.
        training: what is known of the training in it.
        fed: placeholder's op name -> shape of what is fed to it.
        batch_size: plans for batches of this size in place of the graph's own.

    Raises:
        BadInputError: if nothing is trainable or the size of a batch is not to be found.
    """
    import tensorflow as tf

    forward, step = training.forward(), training.step()
    own_size = batch_size_of(forward, training.losses[0], fed)
    size = batch_size or own_size
    if size is None:
        raise BadInputError(
            f"The graph of {name} does not tell how many samples a step takes; name it with --batch-size."
        )
    if own_size and size != own_size:
        fed = {key: (size, *shape[1:]) if shape and shape[0] == own_size else shape for key, shape in fed.items()}
    settled = _settled(graph, step, size, fed)
    # A graph with its batch built in is read as it is.
    read_size = own_size if settled is graph and own_size else size
    reader = FlopsReader(read_size, reference=graph if settled is not graph else None)
    by_name = settled.get_operation_by_name
    cost = reader.cost(by_name(operation.name) for operation in forward)
    step_flops = reader.cost(by_name(operation.name) for operation in step).total
    variables = _variables(graph, training)
    findings = Findings(
        name=name,
        api=Api.GRAPH,
        batch_size=read_size,
        forward=cost,
        step_flops=step_flops,
        variables=unique_names(variables),
        trainable=graph.get_collection(tf.compat.v1.GraphKeys.TRAINABLE_VARIABLES),
        layers=Counter(operation.type for operation in forward if not is_plumbing(operation.type)),
        uncounted=reader.uncounted,
        sample_bytes=_sample_bytes(forward, by_name, read_size),
        optimizer=type(training.optimizers[0]).__name__.removesuffix("Optimizer") if training.optimizers else "",
        optimizer_slots=max((len(optimizer.get_slot_names()) for optimizer in training.optimizers), default=0),
        synchronous=training.synchronous,
    )
    return findings.profile().with_batch_size(size)


def _settled(graph: Any, operations: list[Any], size: int, fed: Mapping[str, tuple[int, ...]]) -> Any:
    """The graph, or a copy in which it knows its batch dimension."""
    if not open_sources(operations) and not fed:
        return graph
    try:
        return with_batch_size(graph, size, fed)
    except ValueError:
        # Shapes that depend on each other in ways only a run shows: an open first dimension then counts as the batch.
        return graph


def _variables(graph: Any, training: Training) -> list[Any]:
    """Global variables of the graph without those that follow another one: the optimizers' own, moving averages."""
    import tensorflow as tf

    with graph.as_default():
        slots = {id(variable) for optimizer in training.optimizers for variable in optimizer.variables()}
    return [
        variable
        for variable in graph.get_collection(tf.compat.v1.GraphKeys.GLOBAL_VARIABLES)
        if id(variable) not in slots and not _follows_another(variable)
    ]


def _follows_another(variable: Any) -> bool:
    return any(group != f"loc:@{variable.op.name}".encode() for group in variable.op.colocation_groups())


def _sample_bytes(forward: list[Any], by_name: Any, size: int) -> int:
    """Bytes that one sample brings into the graph."""
    total = 0
    for operation in forward:
        if not operation.type.startswith(("Placeholder", "IteratorGetNext", "QueueDequeue")):
            continue
        for output in by_name(operation.name).outputs:
            shape = output.shape
            if shape.is_fully_defined() and shape.rank and shape[0] == size and output.dtype.is_numpy_compatible:
                total += shape.num_elements() * output.dtype.size
    return total // size
