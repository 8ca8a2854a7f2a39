"""Plain `Session` loops: the chief initialises, restores and saves; the other workers wait for its initialisation."""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.python.client import session as sessions

from dike.checkpoints import shown, step_of
from dike.exceptions import JobFailedError
from dike.graphs import unfinalized
from dike.main_script import ScriptFailedError
from dike.process import teardown, termination
from dike.reporting import reporter
from dike.roles import fencing, planned_model
from dike.task import TaskSpec
from dike.v1 import training
from dike.v1.job import checkpoints, cluster
from dike.v1.job.cluster import actual_devices
from dike.v1.job.progress import StepReports

INITIALISED_TIMEOUT_S = 600.0
_POLL_INTERVAL_S = 0.2
_END_OF_DATA_ERRORS = (tf.errors.OutOfRangeError, StopIteration)
_local = threading.local()


@contextlib.contextmanager
def untracked() -> Iterator[None]:
    """Sessions made inside are not tracked by `PlainSession`: monitored sessions have hooks instead."""
    before = getattr(_local, "inside", False)
    _local.inside = True
    try:
        yield
    finally:
        _local.inside = before


@dataclass(frozen=True)
class _Split:
    """A run's fetches, split into initialisers and others.

    Attributes:
        variables: global variables whose initialisers are fetched, alone or in a group.
        others: ops grouped with them, such as initialisers of local variables and tables.
        fetches: all fetches.
        rest: fetches unrelated to initialisation.
        is_rest: for each of the flattened fetches, whether it is in `rest`.
    """

    variables: tuple[Any, ...]
    others: tuple[Any, ...]
    fetches: Any
    rest: tuple[Any, ...]
    is_rest: tuple[bool, ...]

    def run_rest(self, run: Callable[[list[Any]], list[Any]]) -> Any:
        """Runs `rest` and returns results in the structure of `fetches`; an op's result is None."""
        results = iter(run(list(self.rest)) if self.rest else [])
        flat = [next(results) if is_rest else None for is_rest in self.is_rest]
        return tf.nest.pack_sequence_as(self.fetches, flat) if tf.nest.is_nested(self.fetches) else flat[0]


def _split(graph: Any, fetches: Any) -> _Split | None:
    """Splits `fetches`; None if they contain no initialiser of a global variable."""
    with graph.as_default():
        initialisers = {variable.initializer: variable for variable in tf.compat.v1.global_variables()}
    variables: dict[Any, None] = {}
    others: dict[Any, None] = {}
    rest = []
    is_rest = []
    for fetch in tf.nest.flatten(fetches):
        leaves = _leaves(_operation(graph, fetch))
        own_variables = [initialisers[leaf] for leaf in leaves if leaf in initialisers]
        is_rest.append(not own_variables)
        if own_variables:
            variables.update(dict.fromkeys(own_variables))
            others.update(dict.fromkeys(leaf for leaf in leaves if leaf not in initialisers))
        else:
            rest.append(fetch)
    if not variables:
        return None
    return _Split(tuple(variables), tuple(others), fetches, tuple(rest), tuple(is_rest))


def _operation(graph: Any, fetch: Any) -> Any:
    """The fetched op; None for a tensor or anything else."""
    if isinstance(fetch, tf.Operation):
        return fetch
    if isinstance(fetch, str) and ":" not in fetch:
        return graph.get_operation_by_name(fetch)
    return None


def _leaves(op: Any) -> list[Any]:
    if op is None:
        return []
    if op.type != "NoOp":
        return [op]
    found = []
    waiting = list(op.control_inputs)
    seen = set()
    while waiting:
        part = waiting.pop()
        if part in seen:
            continue
        seen.add(part)
        if part.type == "NoOp":
            waiting.extend(part.control_inputs)
        else:
            found.append(part)
    return found


class PlainSession:
    def __init__(self, task: TaskSpec, session: Any) -> None:
        self._task = task
        self._session = session
        self._inside = threading.local()  # by thread: one that feeds a queue is often inside a run
        self._stepping = threading.RLock()
        self._failed = False
        self._placed = False
        self._restore_tried = False
        self._restored = False
        self._restored_variables: set[Any] = set()
        self._trained = False
        self._steps = 0
        self._reports = StepReports(task.index)
        self._saved_s = time.monotonic()
        self._saver: Any = None
        self._saved_variables: list[Any] = []

    def run(self, run: Any, fetches: Any, feed_dict: Any, options: Any, run_metadata: Any) -> Any:
        """Runs the script's fetches, or initialises for the job; `run` is TensorFlow's own method."""
        if self.is_inside:
            return run(self._session, fetches, feed_dict, options, run_metadata)
        with self._inside_method():
            graph = self._session.graph
            split = _split(graph, fetches)
            if split is not None:
                self._initialise(split)
                return split.run_rest(lambda rest: run(self._session, rest, feed_dict, options, run_metadata))
            extra = training.of(graph).extra_fetches(graph, fetches)
            begun_s = time.time()
            try:
                if extra is None:
                    return run(self._session, fetches, feed_dict, options, run_metadata)
                result, values = run(self._session, (fetches, extra), feed_dict, options, run_metadata)
            except Exception as error:
                self.note_failure(type(error))
                raise
            with self._stepping:
                self._stepped(values, training.samples_in(feed_dict), begun_s)
            return result

    def restore(self, restore: Callable[[], None], variables: Sequence[Any]) -> None:
        """Calls the script's `restore` of `variables`, on the chief only and if the job has no checkpoint yet."""
        with self._inside_method():
            if not self._task.is_chief:
                self._wait_until_initialised(variables)
            elif self._trained or not self._restore():
                restore()

    def close(self) -> None:
        """Saves for the last time, unless a run or the script has failed."""
        self.note_failure(sys.exc_info()[0])
        if self._trained and not self._failed and not self.is_inside:
            with self._inside_method():
                self._save(is_last=True)

    def note_failure(self, kind: type[BaseException] | None) -> None:
        """Records an exception, after which the variables may be invalid. The end of the data is not a failure."""
        if kind is not None and issubclass(kind, Exception) and not issubclass(kind, _END_OF_DATA_ERRORS):
            self._failed = True

    @property
    def is_inside(self) -> bool:
        return getattr(self._inside, "value", False)

    @contextlib.contextmanager
    def _inside_method(self) -> Iterator[None]:
        self._inside.value = True
        try:
            yield
        finally:
            self._inside.value = False

    def _initialise(self, split: _Split) -> None:
        if self._task.is_chief:
            self._restore()
            missing = [variable for variable in split.variables if variable not in self._restored_variables]
            # Skips only the first initialiser: a script may start over on purpose.
            self._restored_variables.difference_update(split.variables)
            self._session.run([variable.initializer for variable in missing])
        else:
            self._wait_until_initialised(split.variables)
        # Local variables and tables belong to each worker.
        self._session.run(list(split.others))

    def _wait_until_initialised(self, variables: Sequence[Any]) -> None:
        with unfinalized(self._session.graph):
            missing = tf.compat.v1.report_uninitialized_variables(list(variables))
        deadline_s = time.monotonic() + INITIALISED_TIMEOUT_S
        while len(self._session.run(missing)):
            if time.monotonic() > deadline_s:
                raise JobFailedError(
                    f"{self._task.name} waited {INITIALISED_TIMEOUT_S:.0f} s for the chief to initialise the "
                    "variables; let worker 0 run the initialiser too."
                )
            time.sleep(_POLL_INTERVAL_S)

    def _restore(self) -> bool:
        """Restores the job's newest checkpoint at the first call; returns whether there is one."""
        graph = self._session.graph
        if self._restore_tried or not self._task.checkpoint_dir or not training.of(graph).updates:
            return self._restored
        self._restore_tried = True
        planned_model.check(self._task, lambda: training.planned_variables(graph, training.of(graph)))
        fencing.take_ownership(self._task)
        with graph.as_default():
            path = checkpoints.check_newest(self._task)
            variables = tf.compat.v1.global_variables()
        if path is None:
            return False
        with unfinalized(graph):
            saver = tf.compat.v1.train.Saver(variables)
        saver.restore(self._session, path)
        print(f"dike: restored '{shown(path)}'.", flush=True)
        self._steps = step_of(path)
        reporter().resumed(self._steps)
        self._restored = True
        self._restored_variables = set(variables)
        return True

    def _stepped(self, values: Mapping[str, Any], samples: int | None, begun_s: float) -> None:
        self._steps += 1
        self._trained = True
        self._failed = False
        step = int(values.get("step", self._steps))
        self._reports.step({**values, "step": step}, samples, begun_s)
        if not self._task.is_chief:
            return
        if not self._placed:
            self._placed = True
            termination.enable_saving()
            with self._session.graph.as_default():
                reporter().placement(actual_devices(tf.compat.v1.global_variables()))
        if termination.requested:
            self._save()
            termination.exit()
        if time.monotonic() - self._saved_s >= self._task.checkpoint_interval_s:
            self._save()

    def _save(self, *, is_last: bool = False) -> None:
        if not self._task.is_chief or not self._task.checkpoint_dir:
            return
        fencing.check(self._task)
        graph = self._session.graph
        with graph.as_default():
            variables = tf.compat.v1.global_variables()
        if self._saver is None or variables != self._saved_variables:
            with unfinalized(graph):
                self._saver = tf.compat.v1.train.Saver(variables)
            self._saved_variables = variables
        global_step = tf.compat.v1.train.get_global_step(graph)
        step = int(self._session.run(global_step)) if global_step is not None else self._steps
        checkpoints.write(self._task, self._saver, self._session, step, is_last=is_last)
        self._saved_s = time.monotonic()


def install(task: TaskSpec) -> None:
    open_sessions: weakref.WeakSet[Any] = weakref.WeakSet()
    base = sessions.BaseSession
    initialise, run, close = base.__init__, base.run, base.close
    leave = sessions.Session.__exit__

    def own_initialise(self: Any, _target: Any = "", graph: Any = None, config: Any = None, **_kwargs: Any) -> None:
        self._dike = None
        initialise(self, cluster.server(task).target, graph, cluster.session_config(task, config))
        if not getattr(_local, "inside", False):
            self._dike = PlainSession(task, self)
            open_sessions.add(self)

    def own_run(self: Any, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None) -> Any:
        if self._dike is None:
            return run(self, fetches, feed_dict, options, run_metadata)
        return self._dike.run(run, fetches, feed_dict, options, run_metadata)

    def own_close(self: Any) -> None:
        tracked, self._dike = getattr(self, "_dike", None), None
        if tracked is not None:
            tracked.close()
        close(self)

    def close_open() -> None:
        for session in list(open_sessions):
            if session._dike is not None and teardown.exit_code != 0:
                session._dike.note_failure(ScriptFailedError)
            session.close()

    def own_exit(self: Any, kind: Any, error: Any, trace: Any) -> Any:
        if self._dike is not None:
            self._dike.note_failure(kind)  # here, as TensorFlow then closes the session in another thread
        return leave(self, kind, error, trace)

    checkpoints.restrict_savers_to_chief(task)
    atexit.register(close_open)  # an InteractiveSession is often left open
    base.__init__, base.run, base.close = own_initialise, own_run, own_close
    sessions.Session.__exit__ = own_exit
