"""One training step: workers compute what needs no metric state; the chief computes the rest with the true state."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from keras import Variable

from dike.keras3.model import metric_variables, without_function
from dike.roles.rates import set_steps_per_call

_SMALL_ELEMENTS = 1024
"""Maximum size of a tensor that costs as little to send as the results computed from it."""


class _Traced(Variable):
    """A metric's variable while a step is traced. Each read and write becomes one operation that can be found again.

    Between them, its value is a tensor of the step.
    """

    _tensor: Any
    _marks: dict[str, tuple[Any, bool]]
    _is_untracked = False
    """Whether an update is in a graph whose tensors are inaccessible, such as a branch of `tf.cond`."""

    @property
    def value(self) -> Any:
        with self._tensor.graph.as_default():
            return self._maybe_autocast(self._mark(self._tensor, is_write=False))

    def _direct_assign(self, value: Any) -> None:
        value = tf.cast(value, self._tensor.dtype)
        if getattr(value, "graph", self._tensor.graph) is self._tensor.graph:
            self._tensor = self._mark(value, is_write=True)
        else:
            self._is_untracked = True

    def _mark(self, tensor: Any, *, is_write: bool) -> Any:
        marked = tf.raw_ops.Snapshot(input=tensor)
        self._marks[marked.op.name] = self, is_write
        return marked


class _Counter(Variable):
    """A variable to which several workers add. Keras' `assign_add` is a read and a write, which is not atomic."""

    def assign_add(self, value: Any) -> Any:
        return self._value.assign_add(tf.cast(value, self._value.dtype))


@contextlib.contextmanager
def _as(variables: Sequence[Any], kind: type) -> Iterator[None]:
    kinds = [type(variable) for variable in variables]
    for variable in variables:
        variable.__class__ = kind
    try:
        yield
    finally:
        for variable, own in zip(variables, kinds, strict=True):
            variable.__class__ = own


class _ChiefPart:
    """The operations of a step that depend on the metrics' state and run on the chief.

    Most updates add a number to the state: the worker computes the number, only the addition depends on the state.

    Args:
        begins: state at the start of the step, one tensor per variable.
        ends: what the step returns, and the state at its end.
        marks: operation name -> variable that it reads or writes, and whether it writes.

    Attributes:
        inputs: tensors that the worker computes and these operations take.
        impure: indices of states on which a worker-only operation depends, such as an update of the weights.
    """

    def __init__(self, begins: Sequence[Any], ends: Sequence[Any], marks: Mapping[str, tuple[Any, bool]]) -> None:
        self._marks = dict(marks)
        self._graph = tf.compat.v1.get_default_graph()
        # In order of creation: inputs first.
        operations = self._graph.get_operations()
        dependent = _dependents_of(operations, begins)
        constant = _constant_operations(operations)
        known = {tensor.ref() for tensor in begins}
        needed: set[str] = set()
        inputs: dict[Any, Any] = {}
        waiting = list(ends)
        while waiting:
            tensor = waiting.pop()
            name = tensor.op.name
            if tensor.ref() in known or name in needed:
                continue
            if name in dependent or name in constant:
                needed.add(name)
                waiting.extend(tensor.op.inputs)
            else:
                inputs[tensor.ref()] = tensor
            if not waiting:
                # Small inputs that only they use are included: TensorFlow optimises `state + (a + b)` as one.
                small = [key for key, tensor in inputs.items() if _used_only_by(tensor.op, needed)]
                waiting.extend(inputs.pop(key) for key in small)
                dependent |= {tensor.op.name for tensor in waiting}
        self.inputs = list(inputs.values())
        self._operations = [operation for operation in operations if operation.name in needed]
        worker_only = {
            operation.name
            for operation in operations
            if operation.name in dependent
            and (
                any(tensor.dtype in (tf.resource, tf.variant) for tensor in operation.inputs)
                or (operation.name in needed and operation._is_stateful)
            )
        }
        self.impure = [
            number
            for number, tensor in enumerate(begins)
            if worker_only and worker_only & _dependents_of(operations, [tensor])
        ]

    def run(self, inputs: Sequence[Any]) -> dict[Any, Any]:
        """Adds the operations to the graph that is being traced; they read and write the variables there.

        Returns:
            Reference of a tensor of the step -> its value.
        """
        values = {tensor.ref(): value for tensor, value in zip(self.inputs, inputs, strict=True)}
        group: list[Any] = []
        for operation in self._operations:
            mark = self._marks.get(operation.name)
            if mark is None:
                group.append(operation)
                continue
            self._copy(group, values)
            group = []
            variable, is_write = mark
            if is_write:
                variable._value.assign(values[operation.inputs[0].ref()])
            else:
                values[operation.outputs[0].ref()] = variable._value.read_value()
        self._copy(group, values)
        return values

    def _copy(self, operations: Sequence[Any], values: dict[Any, Any]) -> None:
        """Copies operations into the graph that is being traced; adds their results to `values`."""
        definition = tf.compat.v1.GraphDef()
        definition.versions.CopyFrom(self._graph.graph_def_versions)
        own = {operation.name for operation in operations}
        given: dict[str, Any] = {}
        for operation in operations:
            node = definition.node.add()
            node.CopyFrom(operation.node_def)
            node.device = ""
            if "_class" in node.attr:
                del node.attr["_class"]  # colocation constraints
            del node.input[:]  # including control inputs, whose operations have no effects
            for tensor in operation.inputs:
                if tensor.op.name in own:
                    node.input.append(tensor.name)
                else:
                    name = f"dike_input_{len(given)}"
                    definition.node.add(name=name, op="Placeholder").attr["dtype"].type = tensor.dtype.as_datatype_enum
                    given[f"{name}:0"] = values[tensor.ref()]
                    node.input.append(f"{name}:0")
        if any(attr.HasField("func") for node in definition.node for attr in node.attr.values()):
            definition.library.CopyFrom(self._graph.as_graph_def().library)
        results = [tensor for operation in operations for tensor in operation.outputs]
        if results:
            names = [tensor.name for tensor in results]
            copies = tf.graph_util.import_graph_def(definition, input_map=given, return_elements=names, name="metrics")
            values.update({tensor.ref(): copy for tensor, copy in zip(results, copies, strict=True)})


def _used_only_by(operation: Any, users: set[str]) -> bool:
    """Returns whether an operation is small arithmetic whose results only `users` take."""
    sizes = [tensor.shape.num_elements() for tensor in [*operation.outputs, *operation.inputs]]
    return (
        bool(operation.inputs)
        and not operation.control_inputs
        and not operation._is_stateful
        and all(size is not None and size <= _SMALL_ELEMENTS for size in sizes)
        and max(sizes[len(operation.outputs) :]) <= max(sizes[: len(operation.outputs)])
        and all(user.name in users for tensor in operation.outputs for user in tensor.consumers())
    )


def _dependents_of(operations: Iterable[Any], tensors: Iterable[Any]) -> set[str]:
    """Names of the operations whose results depend on `tensors`."""
    reached = {tensor.op.name for tensor in tensors}
    for operation in operations:
        if any(tensor.op.name in reached for tensor in operation.inputs):
            reached.add(operation.name)
    return reached


def _constant_operations(operations: Iterable[Any]) -> set[str]:
    """Names of the operations whose results are the same in every step."""
    constant: set[str] = set()
    for operation in operations:
        is_computed = bool(operation.inputs) and not operation.control_inputs and not operation._is_stateful
        if operation.type == "Const" or (is_computed and all(each.op.name in constant for each in operation.inputs)):
            constant.add(operation.name)
    return constant


class Step:
    """The training step of one model.

    On a ps, the workers' updates of a metric would overwrite each other. So the chief has the metrics' state and runs
    the part of each step that depends on it, one step after the other, with what the worker computed. Every metric, and
    all that `train_step` computes from metrics, then has the same value as without a cluster.

    Args:
        model: a built and compiled Keras model.
        optimizers: its optimizers.
        strategy: the parameter server strategy.
        pack: packs the flat tensors of a batch into the data that `train_step` takes.
        signature: types of those tensors.

    Attributes:
        function: takes the flat tensors of a batch; returns a vector for `apply_result`.
        group_size: number of steps to dispatch at a time; set by `Epoch`.
    """

    def __init__(
        self,
        model: Any,
        optimizers: Sequence[Any],
        strategy: Any,
        pack: Callable[[Sequence[Any]], Any],
        signature: Sequence[Any],
    ) -> None:
        self._model = model
        self._strategy = strategy
        self._pack = pack
        self._counters = [optimizer._iterations for optimizer in optimizers]
        self._variables = metric_variables(model)
        self._shared: list[Any] = []
        self._logs: Any = {}
        self._results: list[Any] = []
        self._chief_part: _ChiefPart | None = None
        self._input_specs: list[Any] = []
        self._signature = list(signature)
        self._add: Any = None
        self._multi_steps: dict[int, Any] = {}
        self.function: Any = None
        self.group_size = 1

    def trace(self, share: Callable[[Sequence[Any]], None]) -> list[str]:
        """Traces `function`, once, while the model's variables are on the ps.

        `share` moves variables of metrics that the chief cannot update to a ps.

        Returns:
            Names of variables that the workers update without coordination: those, and variables that belong to no
                model.
        """
        while True:
            function = tf.function(
                lambda *tensors: self._strategy.run(self._train, args=tensors),
                input_signature=self._signature,
                autograph=False,
            )
            extended = self._strategy.extended
            with self._strategy.scope():
                extended._being_scheduled = True  # set by a coordinator, for nothing else
                try:
                    concrete = function.get_concrete_function()
                finally:
                    extended._being_scheduled = False
            not_on_chief = self._not_on_chief()
            if not not_on_chief:
                break
            share(not_on_chief)
            self._shared.extend(not_on_chief)
            known = {id(variable) for variable in not_on_chief}
            self._variables = [variable for variable in self._variables if id(variable) not in known]
        self.function = concrete
        add = tf.function(self._add_inputs, input_signature=[tf.TensorSpec([None], tf.string)], autograph=False)
        self._add = add.get_concrete_function()
        return [*(variable.path for variable in self._shared), *_updated_on_chief(concrete.graph)]

    @property
    def can_repeat(self) -> bool:
        """Whether `multi_step` is available: all parts of a batch are plain tensors."""
        return all(isinstance(spec, tf.TensorSpec) for spec in self._signature)

    def multi_step(self, count: int) -> Any:
        """Like `function`, for `count` batches in sequence; returns one vector for each."""
        if count not in self._multi_steps:
            steps = tf.function(
                functools.partial(self._loop, count), input_signature=self._signature * count, autograph=False
            )
            with self._strategy.scope():
                self._multi_steps[count] = steps.get_concrete_function()
            set_steps_per_call(self._multi_steps[count], count)
        return self._multi_steps[count]

    def _loop(self, count: int, *tensors: Any) -> Any:
        """Calls `function` in a loop, which a worker compiles as fast as the function itself."""
        batches = []
        for part, spec in enumerate(self._signature):
            array = tf.TensorArray(
                spec.dtype, count, element_shape=spec.shape, infer_shape=False, clear_after_read=True
            )
            for number in range(count):
                array = array.write(number, tensors[number * len(self._signature) + part])
            batches.append(array)

        def step(number: Any, results: Any) -> tuple[Any, Any]:
            return number + 1, results.write(number, self.function(*(array.read(number) for array in batches)))

        results = tf.TensorArray(tf.string, count, element_shape=[len(self._input_specs)])
        _, results = tf.while_loop(lambda number, _: number < count, step, [0, results], parallel_iterations=1)
        return results.stack()

    def _not_on_chief(self) -> list[Any]:
        """Variables of metrics, after a trace, that the chief cannot update."""
        assert self._chief_part is not None
        impure = set(self._chief_part.impure)
        return [
            variable
            for number, variable in enumerate(self._variables)
            if number in impure or variable.__dict__.pop("_is_untracked", False)
        ]

    def _train(self, *tensors: Any) -> Any:
        """Computes one step; returns everything that the chief needs as one vector, sent in one message."""
        variables = self._variables
        begins = []
        marks: dict[str, tuple[Any, bool]] = {}
        for variable in variables:
            shape, dtype = variable.shape, variable._value.dtype
            # Not a constant: code that reads its value during the trace would find the zeros.
            variable._tensor = tf.compat.v1.placeholder_with_default(tf.zeros(shape, dtype), shape)
            variable._marks = marks
            begins.append(variable._tensor)
        with _as(variables, _Traced), _as([*self._counters, *self._shared], _Counter):
            logs = without_function(self._model.train_step)(self._pack(tensors))
            # Flat, with None for missing logs.
            self._logs = logs if isinstance(logs, dict) else {}
            flat = [None if log is None else tf.convert_to_tensor(log) for log in tf.nest.flatten(self._logs)]
        ends = [variable._tensor for variable in variables]
        for variable in variables:
            del variable._tensor, variable._marks
        self._logs = tf.nest.pack_sequence_as(self._logs, [log is not None for log in flat])
        self._results = [log for log in flat if log is not None]
        written = [end for begin, end in zip(begins, ends, strict=True) if end is not begin]
        self._chief_part = _ChiefPart(begins, [*self._results, *written], marks)
        inputs = self._chief_part.inputs
        self._input_specs = [(tensor.dtype, tensor.shape) for tensor in inputs]
        return tf.stack([tf.io.serialize_tensor(tensor) for tensor in inputs]) if inputs else tf.constant([], tf.string)

    def apply_result(self, result: Any) -> Any:
        """Updates the model's metrics by the vector of a step; returns the current logs, as in Keras' `fit`."""
        waiting = iter(self._add(tf.constant(result, tf.string)))
        return tf.nest.map_structure(lambda is_known: next(waiting) if is_known else None, self._logs)

    def _add_inputs(self, result: Any) -> list[Any]:
        assert self._chief_part is not None
        inputs = []
        for number, (dtype, shape) in enumerate(self._input_specs):
            inputs.append(tf.ensure_shape(tf.io.parse_tensor(result[number], dtype), shape))
        values = self._chief_part.run(inputs)
        return [values[log.ref()] for log in self._results]


def _updated_on_chief(graph: Any) -> list[str]:
    """Names of variables on the chief that a step updates, or passes to a function that may."""
    inside = {id(outer): inner for outer, inner in graph.captures}
    only_read = {"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape"}
    return [
        variable.name.partition(":")[0]
        for variable in graph.variables
        if "/job:ps/" not in variable.device
        and id(variable.handle) in inside
        and any(operation.type not in only_read for operation in inside[id(variable.handle)].consumers())
    ]
