"""FLOPs of an op from the shapes of its inputs and outputs.

A multiply-add counts as two FLOPs, an elementary function (exp, log, tanh) as one, a comparison as one. Moving data and
integer arithmetic count as none. These formulas agree with TensorFlow's own statistics, but support more data formats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

Dims = Callable[[Any], tuple[int, ...]]
"""Tensor -> its dimensions; raises `UnknownShapeError`."""
Formula = Callable[[Any, Dims], float]


class UnknownShapeError(Exception):
    """An op's shape is unknown until the graph runs."""


def formula_of(op_type: str) -> Formula | None:
    return _FORMULAS.get(op_type)


def _all(op_types: str, formula: Formula) -> dict[str, Formula]:
    return dict.fromkeys(op_types.split(), formula)


def _elements(tensor: Any, dims: Dims) -> int:
    return math.prod(dims(tensor))


def _per_output_element(flops: float) -> Formula:
    return lambda op, dims: flops * _elements(op.outputs[0], dims)


def _per_input_element(flops: float, index: int = 0) -> Formula:
    return lambda op, dims: flops * _elements(op.inputs[index], dims)


def _per_element_of(flops: float, *argument_names: str) -> Formula:
    """For update ops, whose work depends on the gradient's size, not the variable's."""

    def formula(op: Any, dims: Dims) -> float:
        arguments = [argument.name for argument in op.op_def.input_arg]
        index = next(arguments.index(name) for name in argument_names if name in arguments)
        try:
            return flops * _elements(op.inputs[index], dims)
        except UnknownShapeError:
            # A gradient from an accumulator has no static shape, but the variable's shape.
            return flops * math.prod(_variable_dims(op.inputs[0], dims))

    return formula


def _variable_dims(variable: Any, dims: Dims) -> tuple[int, ...]:
    """Dimensions of the variable behind a handle or a reference."""
    from tensorflow.python.ops import handle_data_util

    data = handle_data_util.get_resource_handle_data(variable) if variable.dtype.is_resource else None
    if data is None:
        return dims(variable)
    if not data.is_set:
        raise UnknownShapeError(variable.name)
    return tuple(dim.size for dim in data.shape_and_type[0].shape.dim)


def _add_n(op: Any, dims: Dims) -> float:
    return (len(op.inputs) - 1) * _elements(op.outputs[0], dims)


def _l2_loss(op: Any, dims: Dims) -> float:
    return 3 * _elements(op.inputs[0], dims) - 1


def _reduction(op: Any, dims: Dims) -> float:
    return _elements(op.inputs[0], dims) - _elements(op.outputs[0], dims)


def _mean(op: Any, dims: Dims) -> float:
    return _elements(op.inputs[0], dims)


def _convolution(output: Callable[[Any], Any], kernel: Callable[[Any], Any], kernel_dims: slice) -> Formula:
    """A convolution or one of its two gradients: one multiply-add per forward output element and kernel element."""
    return lambda op, dims: 2 * _elements(output(op), dims) * math.prod(dims(kernel(op))[kernel_dims])


def _matrix_product(op: Any, dims: Dims) -> float:
    transposed = any(_flag(op, name) for name in ("transpose_a", "adj_x"))
    inner = dims(op.inputs[0])[-2 if transposed else -1]
    return 2 * inner * _elements(op.outputs[0], dims)


def _flag(op: Any, name: str) -> bool:
    return name in op.node_def.attr and bool(op.node_def.attr[name].b)


def _einsum(op: Any, dims: Dims) -> float:
    """One multiply-add for each combination of all labels; with one operand, only sums or moves data."""
    left, _, right = op.get_attr("equation").decode().replace(" ", "").partition("->")
    sizes: dict[str, int] = {}
    broadcast: tuple[int, ...] = ()
    for term, operand in zip(left.split(","), op.inputs, strict=True):
        shape = dims(operand)
        head, ellipsis, tail = term.partition("...")
        middle = len(shape) - len(head) - len(tail)
        if ellipsis and math.prod(shape[len(head) : len(head) + middle]) > math.prod(broadcast):
            broadcast = shape[len(head) : len(head) + middle]
        sizes.update(zip(head, shape, strict=False))
        sizes.update(zip(tail, shape[len(shape) - len(tail) :], strict=True))
    combinations = math.prod(sizes.values()) * math.prod(broadcast)
    summed = set(sizes) - set(right)
    if len(op.inputs) == 1:
        return combinations if summed else 0
    return (2 if summed else 1) * combinations * (len(op.inputs) - 1)


def _pooling(op: Any, dims: Dims) -> float:
    return math.prod(op.get_attr("ksize")) * _elements(op.outputs[0], dims)


def _max_pooling_gradient(op: Any, dims: Dims) -> float:
    """Finds the maximum again, then adds the gradient at its place."""
    return (math.prod(op.get_attr("ksize")) + 1) * _elements(op.inputs[1], dims)


def _average_pooling_gradient(op: Any, dims: Dims) -> float:
    return 2 * math.prod(op.get_attr("ksize")) * _elements(op.inputs[1], dims)


def _batch_norm(op: Any, dims: Dims) -> float:
    """Scale and shift; in training also mean and variance."""
    return (6 if _flag(op, "is_training") else 2) * _elements(op.inputs[0], dims)


def _batch_norm_gradient(op: Any, dims: Dims) -> float:
    return (10 if _flag(op, "is_training") else 4) * _elements(op.inputs[0], dims)


def _local_response_norm(op: Any, dims: Dims) -> float:
    """A window of squares, a power, a product."""
    window = 2 * op.get_attr("depth_radius") + 1
    return (window + 4) * _elements(op.inputs[0], dims)


def _local_response_norm_gradient(op: Any, dims: Dims) -> float:
    return (4 * (2 * op.get_attr("depth_radius") + 1) + 4) * _elements(op.inputs[0], dims)


def _cudnn_rnn(passes: int) -> Formula:
    """One multiply-add per parameter, time step and sample; `input` is (time, batch, features), `params` is flat."""

    def formula(op: Any, dims: Dims) -> float:
        time, batch = dims(op.inputs[0])[:2]
        return passes * 2 * time * batch * _elements(op.inputs[3], dims)

    return formula


def _output(op: Any) -> Any:
    return op.outputs[0]


def _input(index: int) -> Callable[[Any], Any]:
    return lambda op: op.inputs[index]


_PER_OUTPUT_ELEMENT: Mapping[float, str] = {
    1: "Abs Add AddV2 Sub Mul MulNoNan Div DivNoNan RealDiv FloorDiv FloorMod Mod TruncateMod Xdivy Xlogy Xlog1py Neg "
    "Sign Square Sqrt Reciprocal Inv Exp Expm1 Log Log1p Sin Cos Tan Asin Acos Atan Atan2 Sinh Cosh Tanh Asinh Acosh "
    "Atanh Erf Erfc Erfinv Ndtri Lgamma Digamma Floor Ceil Round Rint Pow Maximum Minimum Greater GreaterEqual Less "
    "LessEqual Equal NotEqual ApproximateEqual IsFinite IsInf IsNan Relu LeakyRelu ReluGrad LeakyReluGrad BiasAdd "
    "BiasAddV1 Cumsum Cumprod Betainc NextAfter",
    2: "Rsqrt SquaredDifference Relu6 Relu6Grad Elu EluGrad Selu SeluGrad Softplus Softsign SqrtGrad ClipByValue "
    "InvGrad ReciprocalGrad SoftsignGrad",
    3: "SigmoidGrad TanhGrad SoftplusGrad",
    4: "Sigmoid RsqrtGrad",
    5: "Softmax LogSoftmax",
    7: "ResizeBilinear",
    28: "ResizeBicubic",
}
_PER_UPDATED_ELEMENT: Mapping[float, str] = {
    1: "AssignAdd AssignSub AssignAddVariableOp AssignSubVariableOp ScatterAdd ScatterSub ResourceScatterAdd "
    "ResourceScatterSub ResourceScatterMul ResourceScatterDiv ResourceScatterMin ResourceScatterMax ScatterNdAdd "
    "ScatterNdSub ResourceScatterNdAdd ResourceScatterNdSub TensorScatterAdd TensorScatterSub TensorScatterUpdate "
    "AccumulatorApplyGradient ResourceAccumulatorApplyGradient SparseAccumulatorApplyGradient ScatterNd",
    2: "GradientDescent ProximalGradientDescent",
    4: "Momentum KerasMomentum",
    6: "Adagrad AdagradV2 ProximalAdagrad AdagradDA",
    10: "RMSProp AddSign PowerSign",
    12: "Adam AdaMax CenteredRMSProp Adadelta Ftrl FtrlV2",
}
_FORMULAS: dict[str, Formula] = {
    "AddN": _add_n,
    "AccumulateNV2": _add_n,
    "L2Loss": _l2_loss,
    "Mean": _mean,
    **_all("Sum Prod Max Min ArgMax ArgMin BiasAddGrad EuclideanNorm", _reduction),
    **_all("SegmentSum SegmentMean SegmentMax UnsortedSegmentSum", _per_input_element(1)),
    **_all("UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd", _per_input_element(1)),
    "Conv": _convolution(_output, _input(1), slice(0, -1)),
    "Conv2D": _convolution(_output, _input(1), slice(0, -1)),
    "Conv3D": _convolution(_output, _input(1), slice(0, -1)),
    "Conv2DBackpropInput": _convolution(_input(2), _input(1), slice(0, -1)),
    "Conv3DBackpropInputV2": _convolution(_input(2), _input(1), slice(0, -1)),
    "Conv2DBackpropFilter": _convolution(_input(2), _output, slice(0, -1)),
    "Conv3DBackpropFilterV2": _convolution(_input(2), _output, slice(0, -1)),
    "DepthwiseConv2dNative": _convolution(_output, _input(1), slice(0, 2)),
    "DepthwiseConv2dNativeBackpropInput": _convolution(_input(2), _input(1), slice(0, 2)),
    "DepthwiseConv2dNativeBackpropFilter": _convolution(_input(2), _output, slice(0, 2)),
    "Dilation2D": _convolution(_output, _input(1), slice(0, 2)),
    **_all("MatMul SparseMatMul BatchMatMul BatchMatMulV2 BatchMatMulV3", _matrix_product),
    "Einsum": _einsum,
    **_all("MaxPool MaxPoolWithArgmax AvgPool MaxPool3D AvgPool3D", _pooling),
    "MaxPoolGrad": _max_pooling_gradient,
    "MaxPool3DGrad": _max_pooling_gradient,
    "AvgPoolGrad": _average_pooling_gradient,
    "AvgPool3DGrad": _average_pooling_gradient,
    **_all("FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3", _batch_norm),
    **_all("FusedBatchNormGrad FusedBatchNormGradV2 FusedBatchNormGradV3", _batch_norm_gradient),
    "LRN": _local_response_norm,
    "LRNGrad": _local_response_norm_gradient,
    "SoftmaxCrossEntropyWithLogits": _per_input_element(8),
    "SparseSoftmaxCrossEntropyWithLogits": _per_input_element(8),
    "ResizeBilinearGrad": _per_input_element(7),
    "ResizeNearestNeighborGrad": _per_input_element(1),
    "CudnnRNN": _cudnn_rnn(1),
    "CudnnRNNV2": _cudnn_rnn(1),
    "CudnnRNNV3": _cudnn_rnn(1),
    "CudnnRNNBackprop": _cudnn_rnn(2),
    "CudnnRNNBackpropV2": _cudnn_rnn(2),
    "CudnnRNNBackpropV3": _cudnn_rnn(2),
}
for _flops, _types in _PER_OUTPUT_ELEMENT.items():
    _FORMULAS.update(_all(_types, _per_output_element(_flops)))
for _flops, _types in _PER_UPDATED_ELEMENT.items():
    _formula = _per_element_of(_flops, "grad", "delta", "updates", "value", "gradient", "gradient_values")
    for _type in _types.split():
        prefixes = ("Apply", "ResourceApply", "SparseApply", "ResourceSparseApply") if _flops > 1 else ("",)
        _FORMULAS.update(dict.fromkeys((prefix + _type for prefix in prefixes), _formula))
