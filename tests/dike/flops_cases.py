"""Small graphs with known FLOPs; printed as JSON for the tests, which do not import TensorFlow themselves.

`executed` is what TensorFlow has run: each op of the graphs it made, as often as it ran, by the shapes it then had.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import rewriter_config_pb2

from dike.profiling.flops_formulas import formula_of
from dike.profiling.graph_flops import FlopsReader

BATCH_SIZE = 10
NOT_ON_CPU = ("conv_nchw",)
nn = tf.nn
v1 = tf.compat.v1
layers = tf.keras.layers


def spec(*shape: int | None) -> tf.TensorSpec:
    return tf.TensorSpec(shape, tf.float32)


def gradient_of(function: Callable[..., Any]) -> Callable[..., Any]:
    def gradient(*inputs: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            result = function(*inputs)
        return tape.gradient(result, inputs)

    return gradient


def conv(x: Any, w: Any) -> Any:
    return nn.conv2d(x, w, 2, "VALID")


def depthwise(x: Any, w: Any) -> Any:
    return nn.depthwise_conv2d(x, w, [1, 1, 1, 1], "SAME")


@tf.function
def called(x: Any) -> Any:
    return tf.matmul(x, x)


def loop(rounds: Any) -> Callable[[Any], Any]:
    def body(x: Any) -> Any:
        count = rounds(x) if callable(rounds) else rounds
        return tf.while_loop(lambda i, _: i < count, lambda i, y: (i + 1, tf.matmul(y, y)), [0, x])[1]

    return body


def branches(x: Any) -> Any:
    return tf.cond(x[0, 0] > 0, lambda: tf.matmul(x, x), lambda: tf.identity(x))


def parallel(x: Any) -> Any:
    return tf.matmul(x, x) + tf.matmul(x, x) @ x


def loop_of_two(x: Any, effect: Callable[[Any], Any] = tf.identity) -> list[Any]:
    """Of the two variables of a loop, the first costs more."""
    return tf.while_loop(lambda i, *_: i < 5, lambda i, y, z: (i + 1, tf.matmul(y, y), effect(tf.exp(z))), [0, x, x])


def drawn(x: Any) -> Any:
    """Draws a number, which is an effect."""
    return x + tf.random.uniform([4, 4])


def cond_of_two(x: Any) -> list[Any]:
    return tf.cond(x[0, 0] > 0, lambda: (tf.matmul(x, x), tf.exp(x)), lambda: (x, x))


@tf.function
def called_for_two(x: Any) -> Any:
    return tf.matmul(x, x), tf.exp(x)


def never_used(x: Any) -> Any:
    tf.matmul(x, x)
    return tf.exp(x)


def swapped(x: Any) -> Any:
    """The result of the product comes out one round later under another name."""
    return tf.while_loop(lambda i, *_: i < 5, lambda i, y, z, w: (i + 1, tf.matmul(y, y), y, tf.exp(w)), [0, x, x, x])


CASES: dict[str, tuple[Callable[..., Any], list[tf.TensorSpec]]] = {
    "matmul": (tf.matmul, [spec(3, 4), spec(4, 5)]),
    "matmul_transposed": (lambda a, b: tf.matmul(a, b, transpose_a=True), [spec(4, 3), spec(4, 5)]),
    "batch_matmul": (lambda a, b: tf.matmul(a, b, adjoint_b=True), [spec(7, 3, 4), spec(7, 5, 4)]),
    "open_batch": (tf.matmul, [spec(None, 4), spec(4, 5)]),
    "open_inner": (tf.matmul, [spec(3, None), spec(None, None)]),
    "einsum": (lambda a, b: tf.einsum("bqhd,bkhd->bhqk", a, b), [spec(2, 5, 3, 4), spec(2, 6, 3, 4)]),
    "einsum_ellipsis": (lambda a, b: tf.einsum("...d,de->...e", a, b), [spec(2, 5, 4), spec(4, 3)]),
    "einsum_sum": (lambda a: tf.einsum("ij->i", a), [spec(2, 5)]),
    "einsum_move": (lambda a: tf.einsum("ij->ji", a), [spec(2, 5)]),
    "conv": (conv, [spec(2, 9, 9, 3), spec(3, 3, 3, 8)]),
    "conv_nchw": (lambda x, w: nn.conv2d(x, w, 1, "SAME", data_format="NCHW"), [spec(2, 3, 9, 9), spec(3, 3, 3, 8)]),
    "conv_grouped": (lambda x, w: nn.conv2d(x, w, 1, "SAME"), [spec(2, 9, 9, 4), spec(3, 3, 2, 8)]),
    "conv_gradient": (gradient_of(conv), [spec(2, 9, 9, 3), spec(3, 3, 3, 8)]),
    "conv3d": (lambda x, w: nn.conv3d(x, w, [1] * 5, "SAME"), [spec(1, 4, 4, 4, 2), spec(3, 3, 3, 2, 5)]),
    "depthwise": (depthwise, [spec(2, 9, 9, 3), spec(3, 3, 3, 2)]),
    "depthwise_gradient": (gradient_of(depthwise), [spec(2, 9, 9, 3), spec(3, 3, 3, 2)]),
    "max_pool": (lambda x: nn.max_pool2d(x, 2, 2, "SAME"), [spec(1, 4, 4, 3)]),
    "relu": (nn.relu, [spec(4, 5)]),
    "sigmoid": (nn.sigmoid, [spec(4, 5)]),
    "gelu": (nn.gelu, [spec(4, 5)]),
    "lrn": (lambda x: nn.local_response_normalization(x, depth_radius=2), [spec(1, 2, 2, 10)]),
    "batch_norm": (
        lambda x, c: tf.compat.v1.nn.fused_batch_norm(x, c, c, c, c, is_training=False)[0],
        [spec(2, 4, 4, 3), spec(3)],
    ),
    "moves": (lambda x: tf.pad(tf.concat([tf.transpose(x), tf.gather(x, [0])], 0), [[1, 1], [0, 0]]), [spec(5, 5)]),
    "integers": (lambda x: tf.cast(x, tf.int32) * 3 + 1, [spec(5, 5)]),
    "sum": (tf.reduce_sum, [spec(5, 5)]),
    "called": (called, [spec(4, 4)]),
    "branches": (branches, [spec(4, 4)]),
    "loop": (loop(5), [spec(4, 4)]),
    "loop_of_tensor": (loop(lambda x: tf.shape(x)[0] + 1), [spec(4, 4)]),
    "loop_limited": (
        lambda x: tf.while_loop(lambda y: y[0, 0] > 0, lambda y: [tf.matmul(y, y)], [x], maximum_iterations=7)[0],
        [spec(4, 4)],
    ),
    "loop_gradient": (gradient_of(loop(5)), [spec(4, 4)]),
    "loop_open": (
        lambda x: tf.while_loop(lambda y: y[0, 0] > 0, lambda y: [tf.matmul(y, y)], [x])[0],
        [spec(4, 4)],
    ),
    "parallel": (parallel, [spec(4, 4)]),
    "never_used": (never_used, [spec(4, 4)]),
    "loop_second": (lambda x: loop_of_two(x)[2], [spec(4, 4)]),
    "loop_swapped": (lambda x: swapped(x)[2], [spec(4, 4)]),
    "loop_swapped_third": (lambda x: swapped(x)[3], [spec(4, 4)]),
    "loop_with_effect": (lambda x: loop_of_two(x, drawn)[2], [spec(4, 4)]),
    "branch_second": (lambda x: cond_of_two(x)[1], [spec(4, 4)]),
    "branch_known": (
        lambda x: tf.cond(tf.constant(False), lambda: tf.matmul(x, x), lambda: tf.exp(x)),
        [spec(4, 4)],
    ),
    "case_known": (
        lambda x: tf.switch_case(tf.constant(7), [lambda: tf.matmul(x, x), lambda: tf.exp(x)]),
        [spec(4, 4)],
    ),
    "call_second": (lambda x: called_for_two(x)[1], [spec(4, 4)]),
    "call_gradient": (gradient_of(lambda x: called_for_two(x)[1]), [spec(4, 4)]),
    "unknown": (lambda x: tf.linalg.svd(x, compute_uv=False), [spec(4, 4)]),
    "python": (lambda x: tf.py_function(lambda y: y, [x], tf.float32), [spec(4, 4)]),
}


def frozen_dense() -> Any:
    base = tf.keras.Sequential([layers.Input((32,)), layers.Dense(64, activation="relu"), layers.Dense(48)])
    base.trainable = False
    return tf.keras.Sequential([layers.Input((32,)), base, layers.Dense(1)])


def frozen_convolution() -> Any:
    frozen = [layers.Conv2D(8, 3, padding="same"), layers.BatchNormalization()]
    for layer in frozen:
        layer.trainable = False
    head = [layers.Conv2D(4, 3), layers.BatchNormalization(), layers.ReLU(), layers.Flatten(), layers.Dense(1)]
    return tf.keras.Sequential([layers.Input((8, 8, 3)), layers.Conv2D(4, 3), *frozen, *head])


def recurrent(trainable: bool) -> Callable[[], Any]:
    def model() -> Any:
        recurrent = [layers.Bidirectional(layers.LSTM(6, return_sequences=True)), layers.LSTM(8, dropout=0.2)]
        for layer in recurrent:
            layer.trainable = trainable
        return tf.keras.Sequential([layers.Input((4, 5)), *recurrent, layers.Dropout(0.3), layers.Dense(1)])

    return model


def attention() -> Any:
    inputs = layers.Input((6, 16))
    attended = layers.LayerNormalization()(layers.MultiHeadAttention(2, 8)(inputs, inputs) + inputs)
    return tf.keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(attended)))


MODELS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "frozen_dense": (frozen_dense, (32,)),
    "frozen_convolution": (frozen_convolution, (8, 8, 3)),
    "recurrent": (recurrent(trainable=True), (4, 5)),
    "frozen_recurrent": (recurrent(trainable=False), (4, 5)),
    "attention": (attention, (6, 16)),
}


def session_config() -> Any:
    """TensorFlow prunes unused ops and does no other rewriting: fused ops have no formula."""
    config = v1.ConfigProto(inter_op_parallelism_threads=-1)  # what other threads run is not always recorded
    rewriting = config.graph_options.rewrite_options
    for name in ("remapping", "arithmetic_optimization", "constant_folding", "common_subgraph_elimination"):
        setattr(rewriting, name, rewriter_config_pb2.RewriterConfig.OFF)
    config.graph_options.optimizer_options.opt_level = v1.OptimizerOptions.L0
    return config


def executed(fetches: Any, feeds: dict[Any, Any]) -> float:
    """FLOPs of what a session runs for the fetches."""
    with v1.Session(config=session_config()) as session:
        session.run(v1.global_variables_initializer())
        seen = v1.RunMetadata()
        options = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE, output_partition_graphs=True)
        session.run(fetches, feeds, options, seen)
    shapes: dict[tuple[str, int], tuple[int, ...]] = {}
    runs: Counter[str] = Counter()
    for device in seen.step_stats.dev_stats:
        for node in device.node_stats:
            runs["run" + node.node_name] += 1
            for output in node.output:
                shape = output.tensor_description.shape
                shapes["run" + node.node_name, output.slot] = tuple(dim.size for dim in shape.dim)

    def dims(tensor: Any) -> tuple[int, ...]:
        shape = shapes.get((tensor.op.name, tensor.value_index))
        return tuple(tensor.shape.as_list()) if shape is None else shape

    graphs = [imported(partition) for partition in seen.partition_graphs]
    operations = [operation for graph in graphs for operation in graph.get_operations() if runs[operation.name]]
    return sum(runs[operation.name] * flops(operation, dims) for operation in operations)


def imported(partition: Any) -> Any:
    """The graph, whose own names TensorFlow would not take back."""
    for node in partition.node:
        node.name = "run" + node.name
        node.input[:] = ["^run" + name[1:] if name.startswith("^") else "run" + name for name in node.input]
        node.attr.pop("_class", None)
    graph = tf.Graph()
    with graph.as_default():
        tf.graph_util.import_graph_def(partition, name="")
    return graph


def flops(operation: Any, dims: Callable[[Any], tuple[int, ...]]) -> float:
    formula = formula_of(operation.type)
    if formula is None or not any(tensor.dtype.is_floating for tensor in (*operation.inputs, *operation.outputs)):
        return 0.0
    return formula(operation, dims)


def counted(reader: FlopsReader, cost: Any, **others: float) -> dict[str, Any]:
    return {"total": cost.total, "longest": cost.longest, "uncounted": dict(reader.uncounted), **others}


def function_case(name: str, function: Callable[..., Any], specs: list[tf.TensorSpec]) -> dict[str, Any]:
    graph = tf.function(lambda *inputs: function(*inputs)).get_concrete_function(*specs).graph
    reader = FlopsReader(BATCH_SIZE)
    cost = reader.graph_cost(graph)
    if reader.uncounted or name in NOT_ON_CPU:
        return counted(reader, cost)
    with tf.Graph().as_default():
        inputs = [v1.placeholder(tf.float32, [dim or BATCH_SIZE for dim in spec.shape]) for spec in specs]
        # A call whose own results are fetched would not be opened.
        results = tf.nest.map_structure(tf.identity, tf.function(lambda *inputs: function(*inputs))(*inputs))
        return counted(reader, cost, executed=executed(results, ones(inputs)))


def model_case(make: Callable[[], Any], shape: tuple[int, ...]) -> dict[str, Any]:
    """A training step of a Keras model."""
    with tf.Graph().as_default():
        model = make()
        model.compile("adam", "mse", metrics=["mae"])
        model.optimizer.build(model.trainable_variables)
        inputs = [v1.placeholder(tf.float32, (BATCH_SIZE, *dims)) for dims in (shape, (1,))]
        step = tf.function(lambda x, y: model.train_step((x, y)), autograph=False)
        results = tf.nest.flatten(step(*inputs))
        reader = FlopsReader(BATCH_SIZE)
        return counted(reader, reader.cost(results), executed=executed(results, ones(inputs)))


def ones(inputs: Iterable[Any]) -> dict[Any, Any]:
    return {tensor: np.ones(tensor.shape, np.float32) for tensor in inputs}


def main() -> None:
    results = {name: function_case(name, *case) for name, case in CASES.items()}
    results |= {name: model_case(*case) for name, case in MODELS.items()}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
