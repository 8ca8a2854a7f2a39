"""Small graphs with known FLOPs; printed as JSON for the tests, which do not import TensorFlow themselves."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from dike.profiling.graph_flops import FlopsReader

nn = tf.nn


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
    "unknown": (lambda x: tf.linalg.svd(x, compute_uv=False), [spec(4, 4)]),
    "python": (lambda x: tf.py_function(lambda y: y, [x], tf.float32), [spec(4, 4)]),
}


def main() -> None:
    results = {}
    for name, (function, specs) in CASES.items():
        graph = tf.function(lambda *inputs, function=function: function(*inputs)).get_concrete_function(*specs).graph
        reader = FlopsReader(batch_size=10)
        cost = reader.cost(graph.get_operations())
        results[name] = {"total": cost.total, "longest": cost.longest, "uncounted": dict(reader.uncounted)}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
