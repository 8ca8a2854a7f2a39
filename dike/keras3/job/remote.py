"""A model's variables on the ps, in the place of its local ones while an epoch runs."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from dike.keras3.model import named_variables, unique_names
from dike.task import TaskSpec


@dataclass
class _VariablePair:
    """One Keras variable.

    Attributes:
        keras: the Keras variable.
        local: its own TensorFlow variable, on the chief.
        remote: the one on the ps.
        checksum: of the value both have; None while they may differ.
    """

    keras: Any
    local: Any
    remote: Any
    checksum: int | None

    def push(self) -> None:
        """Gives the remote one the local one's value, if that has changed."""
        checksum = _checksum(self.local)
        if checksum != self.checksum:
            self.remote.assign(self.local.read_value())
            self.checksum = checksum


class RemoteVariables:
    """Moves the variables of models to the ps and back.

    Args:
        task: the chief's task, which has the plan.
        strategy: the parameter server strategy.
    """

    def __init__(self, task: TaskSpec, strategy: Any) -> None:
        self._task = task
        self._strategy = strategy
        self._pairs: dict[int, _VariablePair] = {}

    def place(self, model: Any, optimizers: Sequence[Any]) -> ModelVariables:
        """The variables of a built model and its built optimizers; they get their ps at the first call."""
        named = []
        for name, variable in named_variables(model):
            named.append((f"model/{name}", self._pair(variable, self._task.ps_of(name))))
        primaries = [(variable, self._task.ps_of(name)) for name, variable in named_variables(model)]
        # Numbered over all optimizers: two may have the same name.
        own = unique_names(variable for optimizer in optimizers for variable in optimizer.variables)
        chosen = [index for optimizer in optimizers for index in _optimizer_ps(optimizer.variables, primaries)]
        for (name, variable), index in zip(own, chosen, strict=True):
            named.append((f"optimizer/{name}", self._pair(variable, index)))
        return ModelVariables(model, optimizers, dict(named))

    def place_metric(self, variable: Any) -> _VariablePair:
        """A variable of a metric; it gets its ps at the first call."""
        return self._pair(variable, 0)

    def _pair(self, variable: Any, ps: int) -> _VariablePair:
        if id(variable) not in self._pairs:
            local = variable._value
            with self._strategy.scope():
                # The strategy gives the next variable to the ps of this number.
                self._strategy.extended._variable_count = ps
                remote = tf.Variable(
                    local.read_value(), trainable=local.trainable, dtype=local.dtype, name=variable.path
                )
            self._pairs[id(variable)] = _VariablePair(variable, local, remote, _checksum(local))
        return self._pairs[id(variable)]


class ModelVariables:
    """The variables of one model and its optimizers.

    Args:
        model: the Keras model.
        optimizers: its optimizers.
        pairs: name -> local and remote variable.
    """

    def __init__(self, model: Any, optimizers: Sequence[Any], pairs: dict[str, _VariablePair]) -> None:
        self._model = model
        self._optimizers = optimizers
        self._pairs = pairs
        self._metrics: list[_VariablePair] = []
        self._read: Callable[[], list[Any]] | None = None

    @property
    def _all(self) -> list[_VariablePair]:
        return [*self._pairs.values(), *self._metrics]

    def add(self, metrics: Sequence[_VariablePair]) -> None:
        """Puts variables of metrics on the ps too, which have no name here; to be called while the others are there."""
        self._metrics.extend(metrics)
        self._read = None
        for pair in metrics:
            pair.push()
            pair.keras._value = pair.remote

    @property
    def local(self) -> dict[str, Any]:
        """Name -> variable on the chief."""
        return {name: pair.local for name, pair in self._pairs.items()}

    @property
    def devices(self) -> dict[str, str]:
        """Name -> device of the variable on its ps; model variables have the names of the plan."""
        return {name.removeprefix("model/"): pair.remote.device for name, pair in self._pairs.items()}

    @contextlib.contextmanager
    def on_ps(self) -> Iterator[None]:
        """The model's variables are the remote ones inside; afterwards the local ones have their values."""
        for pair in self._all:
            pair.push()
        functions = self._model.test_function, self._model.predict_function
        self._swap(remote=True)
        # A function traced inside would keep the remote variables, and the others have the local ones.
        self._model.test_function = self._model.predict_function = None
        try:
            yield
        finally:
            self._swap(remote=False)
            self._model.test_function, self._model.predict_function = functions
        self.pull()

    def pull(self) -> None:
        """Copies the values on the ps to the local variables."""
        if self._read is None:
            # One call for all, so that they travel at the same time.
            remotes = [pair.remote for pair in self._all]
            read = tf.function(lambda: [tf.identity(remote) for remote in remotes], autograph=False)
            self._read = read.get_concrete_function()
        for pair, value in zip(self._all, self._read(), strict=True):
            pair.local.assign(value)
            pair.checksum = _checksum(pair.local)

    def _swap(self, *, remote: bool) -> None:
        for pair in self._all:
            pair.keras._value = pair.remote if remote else pair.local
        for optimizer in self._optimizers:
            _rebind(optimizer)


def _rebind(optimizer: Any) -> None:
    """An optimizer knows its variables by their TensorFlow variable, which has just been replaced."""
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:
        _rebind(inner)
    old_keys = {index: key for key, index in optimizer._trainable_variables_indices.items()}
    excluded: set[Any] = getattr(optimizer, "_exclude_from_weight_decay", set())
    indices = {}
    new_excluded = set()
    for index, variable in enumerate(optimizer._trainable_variables):
        key = optimizer._var_key(variable)
        indices[key] = index
        if old_keys.get(index) in excluded:
            new_excluded.add(key)
    optimizer._trainable_variables_indices = indices
    if excluded:
        optimizer._exclude_from_weight_decay = new_excluded
    optimizer._exclude_from_weight_decay_cache = {}


def _optimizer_ps(variables: Sequence[Any], primaries: Sequence[tuple[Any, int]]) -> list[int]:
    """Index of the ps of each optimizer variable: a slot's is that of the variable it belongs to, others go to 0."""
    seen: dict[str, int] = {}
    chosen = []
    for slot in variables:
        owners = [
            (primary, ps)
            for primary, ps in primaries
            if slot.name.startswith(primary.path.replace("/", "_") + "_") and tuple(slot.shape) == tuple(primary.shape)
        ]
        longest = max((len(primary.path) for primary, _ in owners), default=0)
        owners = [owner for owner in owners if len(owner[0].path) == longest]
        # Variables of the same path have slots of the same name, in the same order.
        turn = seen.get(slot.name, 0)
        seen[slot.name] = turn + 1
        chosen.append(owners[min(turn, len(owners) - 1)][1] if owners else 0)
    return chosen


def _checksum(variable: Any) -> int:
    return zlib.crc32(variable.numpy().tobytes())
