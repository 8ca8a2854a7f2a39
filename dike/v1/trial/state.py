"""A session's state as TensorFlow checkpoints: variables, tables and the positions of `tf.data` iterators."""

from __future__ import annotations

import sys
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import iterator_ops, options

from dike.checkpoints import shown
from dike.exceptions import BadInputError
from dike.graphs import unfinalized

_ITERATORS = {"IteratorV2", "Iterator", "OneShotIterator"}
_PYTHON_OPS = ("PyFunc", "GeneratorDataset")
"""Ops whose state is in Python."""


class SessionState:
    """Saves and restores a session. Adds ops to its graph at the first use."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self._variables: list[Any] = []
        self._uninitialised: Any = None
        self._savers: dict[tuple[str, ...], Any] = {}
        self._iterators: dict[str, list[Any]] = {}
        self._meta_graph: tuple[int, bytes | None] | None = None

    def save(self, session: Any, folder: str) -> dict[str, Any]:
        """Writes the state to `folder`, which may be missing; returns the argument `saved` of `restore`."""
        names = self.save_variables(session, folder)
        iterators = {}
        for number, op in enumerate(self._iterator_ops()):
            choice = self._save_iterator(session, op, f"{folder}/iterator-{number}")
            if choice is not None:
                iterators[op.name] = [number, choice]
        return {"variables": names, "iterators": iterators}

    def save_variables(self, session: Any, folder: str) -> list[str]:
        """Saves the initialised variables and tables; returns their names."""
        names = self._initialised(session)
        if names:
            self._saver(names).save(session, f"{folder}/variables", write_meta_graph=False, write_state=False)
        return names

    def meta_graph(self) -> bytes | None:
        """The serialised graph with its collections; None if it exceeds protobuf's 2 GiB."""
        version = self._graph.version
        if self._meta_graph is None or self._meta_graph[0] != version:
            try:
                content = tf.compat.v1.train.export_meta_graph(graph=self._graph).SerializeToString()
            except ValueError:  # more than 2 GiB
                content = None
            self._meta_graph = version, content
        return self._meta_graph[1]

    def restore(self, session: Any, folder: str, saved: dict[str, Any]) -> None:
        """Raises BadInputError if the graph has other variables."""
        names = saved["variables"]
        if names:
            self._check(f"{folder}/variables", names)
            self._saver(names).restore(session, f"{folder}/variables")
        ops = {op.name: op for op in self._iterator_ops()}
        for name, (number, choice) in saved["iterators"].items():
            if name not in ops:
                raise _other_model(folder, f"iterator '{name}' is no longer in it")
            self._iterator_savers(ops[name])[choice].restore(session, f"{folder}/iterator-{number}")

    def _initialised(self, session: Any) -> list[str]:
        variables = _variables(self._graph)
        if variables != self._variables:
            with unfinalized(self._graph):
                self._uninitialised = tf.compat.v1.report_uninitialized_variables(variables)
            self._variables = variables
        without = {name.decode() for name in session.run(self._uninitialised)} if variables else set()
        names = [variable.op.name for variable in variables if variable.op.name not in without]
        return names + [saveable.name for saveable in _saveables(self._graph)]

    def _saver(self, names: list[str]) -> Any:
        key = tuple(names)
        if key not in self._savers:
            wanted = set(names)
            saved = [variable for variable in _variables(self._graph) if variable.op.name in wanted]
            saved += [saveable for saveable in _saveables(self._graph) if saveable.name in wanted]
            with unfinalized(self._graph):
                self._savers[key] = tf.compat.v1.train.Saver(saved, max_to_keep=0)
        return self._savers[key]

    def _check(self, path: str, names: list[str]) -> None:
        variables = {variable.op.name: variable for variable in _variables(self._graph)}
        missing = set(names) - variables.keys() - {saveable.name for saveable in _saveables(self._graph)}
        if missing:
            raise _other_model(path, f"variable '{min(missing)}' is no longer in it")
        shapes = dict(tf.train.list_variables(path))
        for name in names:
            if name in shapes and name in variables and variables[name].shape.as_list() != shapes[name]:
                raise _other_model(path, f"variable '{name}' has another shape")

    def _iterator_ops(self) -> list[Any]:
        return [op for op in self._graph.get_operations() if op.type in _ITERATORS]

    def _iterator_savers(self, op: Any) -> list[Any]:
        """Savers of one iterator: a strict one, and one that leaves out the state of random ops in the pipeline."""
        if op.name not in self._iterators:
            policies = (options.ExternalStatePolicy.FAIL, options.ExternalStatePolicy.IGNORE)
            with unfinalized(self._graph):
                self._iterators[op.name] = [
                    tf.compat.v1.train.Saver(
                        [iterator_ops._IteratorSaveable(op.outputs[0], op.name, policy)], max_to_keep=0
                    )
                    for policy in policies
                ]
        return self._iterators[op.name]

    def _save_iterator(self, session: Any, op: Any, path: str) -> int | None:
        """Saves one iterator; returns the index of the saver that succeeded, None if the state cannot be saved."""
        for choice, saver in enumerate(self._iterator_savers(op)):
            try:
                saver.save(session, path, write_meta_graph=False, write_state=False)
            except tf.errors.FailedPreconditionError as error:
                if "initialized" in error.message:
                    return None  # a resumed run will not have initialised it either
                in_python = any(kind in error.message for kind in _PYTHON_OPS)
                _log_once(
                    op.name,
                    "cannot be saved, because Python code reads the data: a resumed run reads them from the start"
                    if in_python
                    else "is saved without the state of its random ops",
                )
                if in_python:
                    return None
            else:
                return choice
        return None


_logged: set[str] = set()


def _log_once(iterator: str, message: str) -> None:
    if iterator not in _logged:
        _logged.add(iterator)
        print(f"dike: the position of iterator '{iterator}' {message}.", file=sys.stderr, flush=True)


def _variables(graph: Any) -> list[Any]:
    with graph.as_default():
        found = [*tf.compat.v1.global_variables(), *tf.compat.v1.local_variables()]
    return list({variable.op.name: variable for variable in found}.values())


def _saveables(graph: Any) -> list[Any]:
    return list(graph.get_collection(tf.compat.v1.GraphKeys.SAVEABLE_OBJECTS))


def _other_model(path: str, what: str) -> BadInputError:
    return BadInputError(
        f"Checkpoint '{shown(path)}' is of another model: {what}; undo the change, or begin a search of another name."
    )
