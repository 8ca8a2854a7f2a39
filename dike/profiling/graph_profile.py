"""Profiles a TensorFlow 1 graph that has an optimizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dike.exceptions import BadInputError
from dike.graphs import ancestors
from dike.profile import Api, ModelProfile
from dike.profiling.graph_batch import batch_size_of, unshaped_placeholders, unshaped_sources, with_batch_size
from dike.profiling.graph_flops import FlopsReader
from dike.profiling.model_profile import Findings
from dike.profiling.op_kinds import is_plumbing
from dike.v1.training import TrainingGraph, planned_variables


def needs_first_run(training: TrainingGraph, batch_size: int | None) -> bool:
    """Whether the first training step is needed to find the update that it runs, or the batch size if none is given."""
    # The update behind a `SyncReplicasOptimizer` is run by a queue runner of the chief.
    is_open = len(training.updates) > 1 and not _is_synchronous(training)
    return is_open or (not batch_size and bool(unshaped_placeholders(ancestors(_fetches(training)))))


def graph_profile(
    name: str,
    graph: Any,
    training: TrainingGraph,
    fed: Mapping[str, tuple[int, ...]],
    batch_size: int | None = None,
    fetched: Sequence[Any] = (),
) -> ModelProfile:
    """Profiles a graph; raises BadInputError if nothing is trainable or the batch size is unknown.

    Args:
        name: the profile's name.
        graph: is not changed.
        training: its losses and updates.
        fed: placeholder's op name -> shape of its feed.
        batch_size: samples per step in place of the graph's own.
        fetched: operations that the first training step runs, if known.
    """
    losses = _losses_of(training, fetched, fed) if fetched else training.losses
    synchronous = _is_synchronous(training)
    optimizers = training.optimizers
    fetched = [*fetched, *training.updates] if synchronous else fetched or _fetches(training)
    forward = ancestors([loss.op for loss in losses], control=False, fed=fed)
    step = ancestors(fetched, fed=fed)
    own_size = batch_size_of(forward, losses[0], fed)
    size = batch_size or own_size
    if size is None:
        raise BadInputError(f"The batch size of {name} cannot be determined from its graph; give it with --batch-size.")
    if own_size and size != own_size:
        fed = {key: (size, *shape[1:]) if shape and shape[0] == own_size else shape for key, shape in fed.items()}
    shaped = _with_known_shapes(graph, step, size, fed)
    # A graph with a fixed batch size is read unchanged.
    read_size = own_size if shaped is graph and own_size else size
    reader = FlopsReader(read_size, reference=graph if shaped is not graph else None)
    by_name = shaped.get_operation_by_name
    cost = reader.cost((shaped.get_tensor_by_name(loss.name) for loss in losses), control=False, fed=fed)
    step_flops = reader.cost((by_name(operation.name) for operation in fetched), fed=fed).total
    findings = Findings(
        name=name,
        api=Api.GRAPH,
        batch_size=read_size,
        forward=cost,
        step_flops=step_flops,
        variables=planned_variables(graph, training),
        trainable=_trainable(graph, training),
        layers=Counter(operation.type for operation in forward if not is_plumbing(operation.type)),
        uncounted=reader.uncounted,
        sample_bytes=_sample_bytes(forward, by_name, read_size),
        optimizer=type(optimizers[0]).__name__.removesuffix("Optimizer") if optimizers else "",
        optimizer_slots=max((len(optimizer.get_slot_names()) for optimizer in optimizers), default=0),
        synchronous=synchronous,
    )
    return findings.profile().with_batch_size(size)


def _fetches(training: TrainingGraph) -> list[Any]:
    """Operations that a step may run, according to the graph alone."""
    return [*training.updates, *(loss.op for loss in training.losses)]


def _losses_of(training: TrainingGraph, fetched: Sequence[Any], fed: Collection[str]) -> list[Any]:
    """The losses whose gradients the fetched operations use."""
    needed = set(ancestors(fetched, fed=fed))
    used = {id(each.loss) for each in training.gradients if not needed.isdisjoint(each.operations)}
    return [loss for loss in training.losses if id(loss) in used] or training.losses


def _is_synchronous(training: TrainingGraph) -> bool:
    return any(update.is_synchronous for update in training.updates.values())


def _with_known_shapes(graph: Any, operations: list[Any], size: int, fed: Mapping[str, tuple[int, ...]]) -> Any:
    """The graph, or a copy with a known batch dimension."""
    if not unshaped_sources(operations) and not fed:
        return graph
    try:
        return with_batch_size(graph, size, fed)
    except ValueError:
        # Some shapes are known only at run time: an unknown first dimension then counts as the batch.
        return graph


def _trainable(graph: Any, training: TrainingGraph) -> list[Any]:
    """The trainable variables; only the updated ones if known (`minimize(loss, var_list)`)."""
    import tensorflow as tf

    trained = {id(variable) for update in training.updates.values() for variable in update.variables}
    variables = graph.get_collection(tf.compat.v1.GraphKeys.TRAINABLE_VARIABLES)
    return [variable for variable in variables if id(variable) in trained] or variables


def _sample_bytes(forward: list[Any], by_name: Any, size: int) -> int:
    total = 0
    for operation in forward:
        if not operation.type.startswith(("Placeholder", "IteratorGetNext", "QueueDequeue")):
            continue
        for output in by_name(operation.name).outputs:
            shape = output.shape
            if shape.is_fully_defined() and shape.rank and shape[0] == size and output.dtype.is_numpy_compatible:
                total += shape.num_elements() * output.dtype.size
    return total // size
