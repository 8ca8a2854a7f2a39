"""Sets the batch dimension of a TensorFlow 1 graph, which placeholders and datasets leave unknown.

With an unknown batch dimension TensorFlow's own statistics silently leave out most ops.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dike.graphs import ancestors

_PLACEHOLDERS = ("Placeholder", "PlaceholderV2")
_READERS = ("IteratorGetNext", "QueueDequeue")
_BATCHING = {
    "BatchDataset": 1,
    "BatchDatasetV2": 1,
    "ParallelBatchDataset": 1,
    "MapAndBatchDataset": -3,
    "ExperimentalMapAndBatchDataset": -3,
    "PaddedBatchDataset": 1,
    "PaddedBatchDatasetV2": 1,
}


def unshaped_placeholders(operations: Iterable[Any]) -> list[Any]:
    """Placeholders whose shape is not fully known from the graph."""
    return [
        operation
        for operation in operations
        if operation.type in _PLACEHOLDERS and not operation.outputs[0].shape.is_fully_defined()
    ]


def unshaped_sources(operations: Iterable[Any]) -> list[Any]:
    """Placeholders, iterators and queues whose shapes are not fully known from the graph."""
    return [
        operation
        for operation in operations
        if operation.type.startswith((*_PLACEHOLDERS, *_READERS))
        and not all(output.shape.is_fully_defined() for output in operation.outputs)
    ]


def batch_size_of(forward: Iterable[Any], loss: Any, fed: Mapping[str, tuple[int, ...]]) -> int | None:
    """Samples per step of a graph, or None if it cannot be determined.

    Args:
        forward: operations of the forward pass.
        loss: its loss.
        fed: placeholder's op name -> shape of its feed.
    """
    forward = list(forward)
    for operation in forward:
        shape = fed.get(operation.name)
        if shape and operation.type in _PLACEHOLDERS and _first_dim(operation.outputs[0]) is None:
            return shape[0]
    sources = [operation for operation in forward if operation.type.startswith(_READERS)]
    sources += [operation for operation in forward if operation.type in _PLACEHOLDERS]
    for operation in sources:
        for output in operation.outputs:
            size = _first_dim(output)
            if size:
                return size
        if operation.type.startswith("IteratorGetNext"):
            size = _dataset_batch(operation)
            if size:
                return size
    return None if unshaped_placeholders(forward) else first_dim_near(loss)


def _first_dim(tensor: Any) -> int | None:
    """First dimension; 0 for a scalar, None if unknown."""
    shape = tensor.shape
    if shape.rank is None:
        return None
    return shape.as_list()[0] if shape.rank else 0


def first_dim_near(loss: Any) -> int | None:
    """The first dimension of the nearest tensor that the loss is reduced from."""
    pending, seen = [loss], {loss.name}
    while pending:
        tensor = pending.pop(0)
        size = _first_dim(tensor)
        if size and not tensor.op.type.startswith(("Const", "Var", "ReadVariable", "Identity")):
            return size
        for source in tensor.op.inputs:
            if source.name not in seen and source.dtype.is_floating:
                seen.add(source.name)
                pending.append(source)
    return None


def _dataset_batch(get_next: Any) -> int | None:
    """The constant passed to `Dataset.batch` of the dataset behind an iterator."""
    from dike.profiling.graph_loops import constant

    iterator = get_next.inputs[0].op
    if iterator.type == "OneShotIterator":
        name = iterator.get_attr("dataset_factory").name
        return _function_batch(iterator.graph, name)
    datasets = [
        consumer.inputs[0].op
        for output in iterator.outputs
        for consumer in output.consumers()
        if consumer.type == "MakeIterator"
    ]
    for dataset in datasets:
        # The batch nearest to the iterator counts; earlier ones may have been unbatched.
        for operation in ancestors([dataset], control=False):
            if operation.type in _BATCHING:
                size = constant(operation.inputs[_BATCHING[operation.type]])
                if size is not None:
                    return int(size)
    return None


def _function_batch(graph: Any, name: str) -> int | None:
    from tensorflow.python.framework import tensor_util

    function = next((found for found in graph.as_graph_def().library.function if found.signature.name == name), None)
    if function is None:
        return None
    nodes = {node.name: node for node in function.node_def}
    for node in reversed(function.node_def):
        if node.op in _BATCHING:
            data_inputs = [name for name in node.input if not name.startswith("^")]
            source = nodes.get(data_inputs[_BATCHING[node.op]].partition(":")[0])
            if source is not None and source.op == "Const":
                return int(tensor_util.MakeNdarray(source.attr["value"].tensor))
    return None


def with_batch_size(graph: Any, size: int, fed: Mapping[str, tuple[int, ...]]) -> Any:
    """A copy of the graph in which placeholders and iterators have a known batch dimension.

    Raises ValueError if the graph contradicts it or the fed shapes.
    """
    import tensorflow as tf

    graph_def = graph.as_graph_def()
    for node in graph_def.node:
        if node.op in _PLACEHOLDERS:
            shape = node.attr["shape"].shape
            if node.name in fed:
                shape.CopyFrom(tf.TensorShape(fed[node.name]).as_proto())
            elif shape.dim and shape.dim[0].size == -1:
                shape.dim[0].size = size
        elif node.op in ("IteratorGetNext", "IteratorGetNextSync", "IteratorGetNextAsOptional"):
            for shape in node.attr["output_shapes"].list.shape:
                if shape.dim and shape.dim[0].size == -1:
                    shape.dim[0].size = size
    copy = tf.Graph()
    with copy.as_default():
        tf.graph_util.import_graph_def(graph_def, name="")
    return copy
