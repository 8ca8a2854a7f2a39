"""The sessions of a trial: counts and reports their training steps, saves and restores their state.

A script that trains in a monitored session is made for restarts (it checks `should_stop`, which uses the global step):
its session is restored when it is created. Any other script has a loop with state of its own: to resume, it is executed
from the top, its session runs return their logged results (`SessionLog`), and its sessions are restored after the last.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from dike.exceptions import BadInputError
from dike.trial.runtime import TrialRuntime
from dike.v1 import training
from dike.v1.trial import checkpoints
from dike.v1.trial.runs import MAX_LOG_BYTES, SessionLog, key_of
from dike.v1.trial.state import SessionState

_LOG_TOO_LARGE = f"it has fetched more than {MAX_LOG_BYTES >> 20} MiB in a plain session; use MonitoredTrainingSession"


@dataclass
class RunInfo:
    """Properties of a session run that a script repeats.

    Attributes:
        key: identifies the ops of the run.
        trains: whether it is a training step.
        extra_fetches: the loss, if the script does not fetch it but it can be fetched.
        loss_index: index of the loss among all results; None if it is not among them.
        advance: increment of the global step; None before the first run.
    """

    key: str
    trains: bool
    extra_fetches: list[Any]
    loss_index: int | None
    advance: int | None = None


@dataclass
class TrackedSession:
    """A session and what is known of it.

    Attributes:
        number: number of sessions that the script created before.
        run_infos: names of what is run -> properties of the run.
        is_monitored: whether a monitored session owns it.
        has_run: whether it may have state.
        increments_global_step: whether a training step of it has incremented the global step.
    """

    number: int
    state: SessionState
    run_infos: dict[tuple[str, ...], RunInfo] = field(default_factory=dict)
    is_monitored: bool = False
    has_run: bool = False
    increments_global_step: bool = False

    def run_info(self, graph: Any, targets: list[Any], fetches: list[Any]) -> RunInfo:
        names = (*[op.name for op in targets], *[tensor.name for tensor in fetches])
        info = self.run_infos.get(names)
        if info is None:
            known = training.of(graph)
            ops = [*targets, *(tensor.op for tensor in fetches)]
            trains = known.trains(ops)
            loss = known.fetchable_loss(ops) if trains else None
            extra = [] if loss is None or loss.name in names else [loss]
            position = None if loss is None else [tensor.name for tensor in (*fetches, *extra)].index(loss.name)
            info = self.run_infos[names] = RunInfo(key_of([str(self.number), *names]), trains, extra, position)
        return info


class GraphTrial:
    """A trial that trains with TensorFlow 1 sessions. Raises BadInputError if its checkpoint cannot be read."""

    def __init__(self, runtime: TrialRuntime) -> None:
        self._runtime = runtime
        self._sessions: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._session_count = 0
        self._lock = threading.RLock()
        self._is_untracked = False
        self._trainee: TrackedSession | None = None
        self._saving_disabled = False
        self._log: SessionLog | None = SessionLog()
        self._step = 0
        self._unsaved = False
        self._saved: tuple[str, int] | None = None
        self._suspending: tuple[str, int] | None = None
        self._resumed = checkpoints.find(runtime.spec)
        self._replay_index: int | None = None
        if self._resumed is not None and "runs" in self._resumed.meta:
            self._log = SessionLog.loads(self._resumed.read(checkpoints.RUNS))
            self._replay_index = 0

    def add_session(self, session: Any) -> TrackedSession:
        tracked = TrackedSession(self._session_count, SessionState(session.graph))
        self._sessions[self._session_count] = session
        self._session_count += 1
        return tracked

    def remove_session(self, tracked: TrackedSession) -> None:
        self._sessions.pop(tracked.number, None)

    def restore_monitored(self, session: Any) -> None:
        """Restores a new monitored session from its checkpoint, if there is one."""
        tracked: TrackedSession = session._dike_trial
        tracked.is_monitored = True
        resumed = self._resumed
        if resumed is not None and "runs" not in resumed.meta and str(tracked.number) in resumed.meta["sessions"]:
            self._restore()

    def ends_step(self, session: Any) -> bool:
        """Whether the end of a call of `session.run` is the end of a step."""
        tracked: TrackedSession | None = session._dike_trial
        return tracked is not None and not tracked.is_monitored and not self._is_untracked and _in_main_thread()

    @property
    def is_over(self) -> bool:
        return self._runtime.is_over(self._step)

    def suspend_if_saved(self) -> None:
        """Suspends the trial if `save_if_due` has saved it for that.

        Called at the script's next call: after the saved step it may have written its own log.
        """
        if self._suspending is not None:
            suspending, self._suspending = self._suspending, None
            self._runtime.suspend(*suspending)

    def save_if_due(self, session: Any) -> None:
        """Saves after a call of `session.run` if suspension is requested or a checkpoint is due."""
        if self._runtime.suspend_requested or self._runtime.checkpoint_due:
            self.save_if_changed(session)
            if self._runtime.suspend_requested and not self._unsaved:
                self._suspending = self._saved

    def save_if_changed(self, session: Any) -> None:
        """Saves if the session has trained since the last save, and the trial can be saved."""
        is_trainee = self._trainee is not None and session._dike_trial is self._trainee
        # A run may train without incrementing the global step; the checkpoint of a step is written once.
        has_advanced = self._saved is None or self._saved[1] != self._step
        if is_trainee and self._unsaved and has_advanced and not self._saving_disabled and _in_main_thread():
            with self._untracked_runs():
                self._runtime.unless_full(self._save)

    def _save_open_session(self) -> None:
        session = None if self._trainee is None else self._sessions.get(self._trainee.number)
        if session is not None:
            self.save_if_changed(session)

    def disable_saving(self, why: str) -> None:
        """Marks the trial as one that cannot be saved; it runs on to its end."""
        if not self._saving_disabled:
            self._saving_disabled = True
            self._runtime.disable_suspension(why)

    def run(self, session: Any, targets: list[Any], fetches: list[Any], run: Callable[[list[Any]], Any]) -> Any:
        """Does a run and returns the values of `fetches`; `run` is TensorFlow's method, given extra fetches.

        Raises BadInputError if a replayed script runs other ops than before.
        """
        tracked: TrackedSession | None = session._dike_trial
        if tracked is None or self._is_untracked:
            return run([])
        if not _in_main_thread():
            return self._run_in_other_thread(tracked, session, targets, fetches, run)
        info = tracked.run_info(session.graph, targets, fetches)
        if info.trains and self.is_over:
            self.save_if_changed(session)
            self._runtime.end_if_over()
        tracked.has_run = True
        if self._replay_index is not None:
            return self._replay(info, bool(fetches), run)
        if info.trains and tracked is not self._trainee:
            self._start_training(session, tracked)
        before = self._global_step(session) if info.trains and info.advance is None else None
        try:
            values = run(info.extra_fetches)
        except tf.errors.OutOfRangeError:
            self._record(info, None)
            raise
        results = values[: len(fetches)] if info.extra_fetches else values
        self._record(info, results)
        if info.trains:
            if info.advance is None:
                after = self._global_step(session)
                info.advance = after - before if after is not None and before is not None else 0
                tracked.increments_global_step = tracked.increments_global_step or info.advance > 0
            self._stepped(info, info.advance if tracked.increments_global_step else 1, values)
        return results

    def _run_in_other_thread(
        self, tracked: TrackedSession, session: Any, targets: Any, fetches: Any, run: Callable[[list[Any]], Any]
    ) -> Any:
        """Does a run in another thread, which cannot be suspended between two steps."""
        info = tracked.run_info(session.graph, targets, fetches)
        if not info.trains:
            return run([])
        values = run(info.extra_fetches)
        with self._lock:
            if self._trainee is None:
                self._start_training(session, tracked)
            self.disable_saving("it trains in several threads")
            self._stepped(info, 1, values)
        return values[: len(fetches)] if info.extra_fetches else values

    def _start_training(self, session: Any, tracked: TrackedSession) -> None:
        first = self._trainee is None
        if first and self._step == 0:
            self._step = self._global_step(session) or 0
        if tracked.is_monitored and first:
            self._log = None
        elif tracked.is_monitored or (self._trainee is not None and self._trainee.is_monitored):
            self.disable_saving("it trains in several sessions, monitored ones among them")
        elif self._log is None:
            self.disable_saving(_LOG_TOO_LARGE)
        if session.graph.get_collection(tf.compat.v1.GraphKeys.QUEUE_RUNNERS):
            self.disable_saving("it reads its data from queues, whose content cannot be saved; use tf.data")
        if first:
            graph = session.graph
            self._runtime.check_model(lambda: training.planned_variables(graph, training.of(graph)))
        self._trainee = tracked
        if first:
            if self._runtime.save_at_end is None:
                self._runtime.save_at_end = self._save_open_session
            self._runtime.save_best = self._keep_best
            self._runtime.training(preemptible=not self._saving_disabled)

    def _keep_best(self) -> None:
        session = None if self._trainee is None else self._sessions.get(self._trainee.number)
        if session is not None and not self._is_untracked and _in_main_thread():
            with self._untracked_runs():
                self._runtime.write_best(lambda: checkpoints.write_best(self._runtime, session))

    def _stepped(self, info: RunInfo, advance: int, values: list[Any]) -> None:
        self._step += advance
        self._unsaved = True
        if info.loss_index is None:
            self._runtime.progress(self._step)
            return
        loss = values[info.loss_index]
        loss = float(loss if loss.ndim == 0 else np.mean(loss))
        value = loss if self._runtime.spec.metric == "loss" else None
        self._runtime.progress(self._step, loss, value=value, is_reported=False)

    def _record(self, info: RunInfo, results: list[Any] | None) -> None:
        if self._log is not None:
            self._log.add(info.key, results)
            if self._log.size_bytes > MAX_LOG_BYTES:
                self._log = None
                if self._trainee is not None:
                    self.disable_saving(_LOG_TOO_LARGE)

    def _replay(self, info: RunInfo, fetches: bool, run: Callable[[list[Any]], Any]) -> Any:
        assert self._log is not None
        assert self._replay_index is not None
        key, results = self._log.get(self._replay_index)
        if key != info.key:
            raise BadInputError(
                f"The script did not run the same ops again as before checkpoint '{self._runtime.spec.resume_from}'; "
                "seed its random decisions, or train in a MonitoredTrainingSession."
            )
        self._replay_index += 1
        if not info.trains and not fetches:
            run([])  # an initialiser, of an iterator or a table for example
        if self._replay_index == len(self._log):
            self._replay_index = None
            self._restore()
        if results is None:
            raise tf.errors.OutOfRangeError(None, None, "End of sequence")
        return results

    def _save(self) -> None:
        assert self._trainee is not None
        if self._log is None:
            numbers = [self._trainee.number]
        else:
            numbers = sorted(number for number, each in self._sessions.items() if each._dike_trial.has_run)
        sessions = {number: self._sessions[number] for number in numbers}
        path = checkpoints.write(self._runtime, self._step, sessions, self._trainee.number, self._log)
        self._unsaved = False
        self._saved = path, self._step
        self._runtime.checkpoint_written(path, self._step)

    def _restore(self) -> None:
        assert self._resumed is not None
        resumed, self._resumed = self._resumed, None
        with self._untracked_runs():
            resumed.restore(self._sessions)
        self._step = resumed.meta["step"]
        self._saved = resumed.path, self._step
        self._runtime.restored(resumed.path, self._step, resumed.meta["train_s"], resumed.meta["standing"])

    def _global_step(self, session: Any) -> int | None:
        """None if there is none, or it has no value yet."""
        step = tf.compat.v1.train.get_global_step(session.graph)
        if step is None:
            return None
        with self._untracked_runs():
            try:
                return int(session.run(step))
            except tf.errors.FailedPreconditionError:
                return None

    @contextlib.contextmanager
    def _untracked_runs(self) -> Iterator[None]:
        """Runs inside are Dike's, not the script's."""
        before, self._is_untracked = self._is_untracked, True
        try:
            yield
        finally:
            self._is_untracked = before


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
