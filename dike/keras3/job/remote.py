"""Moves a model's variables to the ps while an epoch runs."""

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
    """One Keras variable: its local TensorFlow variable on the chief, and the one on the ps.

    `checksum` is that of the value of both; None while they may differ.
    """

    keras: Any
    local: Any
    remote: Any
    checksum: int | None

    def push(self) -> None:
        """Copies the local value to the ps, if it has changed."""
        checksum = _checksum(self.local)
        if checksum != self.checksum:
            self.remote.assign(self.local.read_value())
            self.checksum = checksum


class RemoteVariables:
    """The ps variables of all models of a script, placed by the task's plan."""

    def __init__(self, task: TaskSpec, strategy: Any) -> None:
        self._task = task
        self._strategy = strategy
        self._pairs: dict[int, _VariablePair] = {}

    def place(self, model: Any, optimizers: Sequence[Any]) -> ModelVariables:
        """Returns the variables of a built model and its built optimizers; creates them on their ps if needed."""
        named = []
        for name, variable in named_variables(model):
            named.append((f"model/{name}", self._pair(variable, self._task.ps_of(name))))
        primaries = [(variable, self._task.ps_of(name)) for name, variable in named_variables(model)]
        # Numbered across all optimizers: two may have the same name.
        own = unique_names(variable for optimizer in optimizers for variable in optimizer.variables)
        chosen = [index for optimizer in optimizers for index in _optimizer_ps(optimizer.variables, primaries)]
        for (name, variable), index in zip(own, chosen, strict=True):
            named.append((f"optimizer/{name}", self._pair(variable, index)))
        return ModelVariables(model, optimizers, dict(named))

    def place_metric(self, variable: Any) -> _VariablePair:
        return self._pair(variable, 0)

    def _pair(self, variable: Any, ps: int) -> _VariablePair:
        if id(variable) not in self._pairs:
            local = variable._value
            with self._strategy.scope():
                # The strategy places the next variable on the ps of this index.
                self._strategy.extended._variable_count = ps
                remote = tf.Variable(
                    local.read_value(), trainable=local.trainable, dtype=local.dtype, name=variable.path
                )
            self._pairs[id(variable)] = _VariablePair(variable, local, remote, _checksum(local))
        return self._pairs[id(variable)]


class ModelVariables:
    """The variables of one model and its optimizers, by name."""

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
        """Moves variables of metrics, which are unnamed here, to the ps; call it inside `on_ps`."""
        self._metrics.extend(metrics)
        self._read = None
        for pair in metrics:
            pair.push()
            pair.keras._value = pair.remote

    @property
    def local(self) -> dict[str, Any]:
        return {name: pair.local for name, pair in self._pairs.items()}

    @property
    def devices(self) -> dict[str, str]:
        """Name -> device of the variable on its ps; model variables have the names of the plan."""
        return {name.removeprefix("model/"): pair.remote.device for name, pair in self._pairs.items()}

    @contextlib.contextmanager
    def on_ps(self) -> Iterator[None]:
        """Swaps in the remote variables; on exit, copies their values to the local ones."""
        for pair in self._all:
            pair.push()
        functions = self._model.test_function, self._model.predict_function
        self._swap(remote=True)
        # A function traced inside would capture the remote variables; existing functions have the local ones.
        self._model.test_function = self._model.predict_function = None
        try:
            yield
        finally:
            self._swap(remote=False)
            self._model.test_function, self._model.predict_function = functions
        self.pull()

    def pull(self) -> None:
        if self._read is None:
            # One call for all, so that they are transferred in parallel.
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
    """Updates an optimizer's indices, which use the TensorFlow variables that have just been replaced."""
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
    """Returns the ps of each optimizer variable: that of its model variable for slot variables, else 0."""
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
        # Variables with the same path have slots with the same name, in the same order.
        index = seen.get(slot.name, 0)
        seen[slot.name] = index + 1
        chosen.append(owners[min(index, len(owners) - 1)][1] if owners else 0)
    return chosen


def _checksum(variable: Any) -> int:
    return zlib.crc32(variable.numpy().tobytes())
