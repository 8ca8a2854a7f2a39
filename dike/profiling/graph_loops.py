"""Trip counts of loops in a TensorFlow graph, if they can be read without running it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_ENTER = ("Enter", "RefEnter")
_EXIT = ("Exit", "RefExit")
_LOOPS = ("While", "StatelessWhile")


def constant(tensor: Any) -> Any | None:
    """The value of a tensor that depends on constants only, else None."""
    from tensorflow.python.client import pywrap_tf_session
    from tensorflow.python.framework import tensor_util

    value = tensor_util.constant_value(tensor)
    if value is None and tensor.dtype.is_numpy_compatible:
        with tensor.graph._c_graph.get() as c_graph:
            value = pywrap_tf_session.TF_TryEvaluateConstant_wrapper(c_graph, tensor._as_tf_output())
    return value


def while_trips(loop: Any, condition: Any) -> int | None:
    """Maximum number of trips of a `While` op, or None if unknown. `condition` is the graph of its condition."""
    arguments = dict(zip((tensor.name for tensor in condition.inputs), loop.inputs, strict=False))
    found = []
    for comparison in _comparisons(condition.outputs[0].op):
        counter, limit = comparison.inputs
        start = arguments.get(counter.name)
        end = arguments.get(limit.name, limit)
        if start is not None:
            found.append(_trip_count(comparison.type, _loop_result(start), _loop_result(end)))
    return _smallest(found)


def _loop_result(tensor: Any) -> Any | None:
    """The value of a constant, or the trips of another loop: a gradient's loop runs as often as its forward loop."""
    if tensor.op.type in _LOOPS and tensor.value_index == 0:
        condition = tensor.graph._get_function(tensor.op.get_attr("cond").name)
        return while_trips(tensor.op, condition.graph) if hasattr(condition, "graph") else None
    return constant(tensor)


def _comparisons(operation: Any) -> list[Any]:
    """The comparisons that must all hold for a loop to continue."""
    if operation.type in ("Identity", "LogicalAnd", "LoopCond"):
        return [found for tensor in operation.inputs for found in _comparisons(tensor.op)]
    return [operation] if operation.type in ("Less", "LessEqual", "GreaterEqual", "Greater") else []


def _trip_count(kind: str, start: Any | None, end: Any | None) -> int | None:
    if start is None or end is None or getattr(start, "ndim", 0) != 0 or getattr(end, "ndim", 0) != 0:
        return None
    trips = int(end) - int(start) if kind.startswith("Less") else int(start) - int(end)
    trips += int(kind.endswith("Equal"))
    # A loop without `maximum_iterations` carries -1 for it.
    return trips if trips > 0 else None


def _smallest(candidates: Iterable[int | None]) -> int | None:
    return min((trips for trips in candidates if trips is not None), default=None)


class Frames:
    """The loops of a TensorFlow 1 graph, which are not ops but frames of `Enter` ... `Exit` ops."""

    def __init__(self, operations: Iterable[Any]) -> None:
        self._frames_of: dict[Any, tuple[str, ...]] = {}
        self._conditions: dict[str, Any] = {}
        operations = list(operations)
        pending = [operation for operation in operations if operation.type in _ENTER]
        if not pending:
            return
        self._propagate(operations)
        for operation, frames in self._frames_of.items():
            if operation.type == "LoopCond" and frames:
                self._conditions[frames[-1]] = operation

    def trips(self, operation: Any) -> int | None:
        """How often the op runs: 1 outside loops, None inside a loop of unknown length."""
        total = 1
        for frame in self._frames_of.get(operation, ()):
            trips = self._frame_trips(frame)
            if trips is None:
                return None
            total *= trips
        return total

    def _propagate(self, operations: list[Any]) -> None:
        """Propagates frames from inputs to ops until nothing changes."""
        pending = list(operations)
        while pending:
            operation = pending.pop()
            frames = max((self._result_frames(tensor.op) for tensor in operation.inputs), key=len, default=())
            controls = max((self._result_frames(control) for control in operation.control_inputs), key=len, default=())
            frames = max(frames, controls, key=len)
            if operation.type in _ENTER:
                frames = (*frames, operation.get_attr("frame_name").decode())
            if len(frames) > len(self._frames_of.get(operation, ())):
                self._frames_of[operation] = frames
                pending.extend(consumer for output in operation.outputs for consumer in output.consumers())
                pending.extend(operation._control_outputs)

    def _result_frames(self, operation: Any) -> tuple[str, ...]:
        """Frames that the op's results are in."""
        frames = self._frames_of.get(operation, ())
        return frames[:-1] if operation.type in _EXIT else frames

    def _frame_trips(self, frame: str) -> int | None:
        condition = self._conditions.get(frame)
        if condition is None:
            return None
        found = []
        for comparison in _comparisons(condition):
            counter, limit = (self._initial_value(tensor) for tensor in comparison.inputs)
            if counter.op.type in _EXIT:
                # The gradient's loop counts down from the forward loop's trips.
                forward = self._frames_of.get(counter.op, ())
                found.append(self._frame_trips(forward[-1]) if forward and forward[-1] != frame else None)
            else:
                found.append(_trip_count(comparison.type, constant(counter), constant(limit)))
        return _smallest(found)

    @staticmethod
    def _initial_value(tensor: Any) -> Any:
        """The initial value, outside the loop, of a loop variable."""
        if tensor.op.type in ("Merge", "RefMerge"):
            tensor = tensor.op.inputs[0]
        return tensor.op.inputs[0] if tensor.op.type in _ENTER else tensor
