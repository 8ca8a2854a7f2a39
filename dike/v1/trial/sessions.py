"""The sessions of a trial: their training steps counted and reported, their state saved and restored.

There are two ways to go on where a suspended run stopped. A script that trains in a monitored session is made for
restarts (it asks `should_stop`, which knows the global step), so its session is restored as soon as it is made. Any
other script has state of its own, its loop: it is executed from the top, its session runs return what they returned
before (`RunLog`), and its sessions are restored after the last of these.
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
from dike.v1.trial.runs import LIMIT_BYTES, RunLog, key_of
from dike.v1.trial.state import SessionState

_TOO_MUCH = f"it has fetched more than {LIMIT_BYTES >> 20} MiB in a plain session; use MonitoredTrainingSession"


@dataclass
class Plan:
    """What is known of a run that a script does again and again.

    Attributes:
        key: short name of what is run.
        trains: whether it is a training step.
        more: the loss, where it is not fetched but can be.
        loss: where among all values the loss is; None where it is not.
        advance: by how much it moves the global step; None before its first time.
    """

    key: str
    trains: bool
    more: list[Any]
    loss: int | None
    advance: int | None = None


@dataclass
class TrackedSession:
    """What is known of a session.

    Attributes:
        number: how many sessions the script had made before.
        state: saves and restores it.
        plans: names of what is run -> what is known of it.
        is_monitored: whether a monitored session owns it.
        has_run: whether it may hold anything.
        counts: whether a training step of it has been seen to move the global step.
    """

    number: int
    state: SessionState
    plans: dict[tuple[str, ...], Plan] = field(default_factory=dict)
    is_monitored: bool = False
    has_run: bool = False
    counts: bool = False

    def plan(self, graph: Any, targets: list[Any], fetches: list[Any]) -> Plan:
        """What is known of a run.

        Args:
            graph: the session's graph.
            targets: ops to run.
            fetches: tensors to return.
        """
        names = (*[op.name for op in targets], *[tensor.name for tensor in fetches])
        plan = self.plans.get(names)
        if plan is None:
            known = training.of(graph)
            ops = [*targets, *(tensor.op for tensor in fetches)]
            trains = known.trains(ops)
            loss = known.loss_beside(ops) if trains else None
            more = [] if loss is None or loss.name in names else [loss]
            position = None if loss is None else [tensor.name for tensor in (*fetches, *more)].index(loss.name)
            plan = self.plans[names] = Plan(key_of([str(self.number), *names]), trains, more, position)
        return plan


class GraphTrial:
    """The trial, as far as TensorFlow 1 sessions are concerned.

    Args:
        runtime: the trial of this process.

    Raises:
        BadInputError: if the checkpoint to go on from cannot be read.
    """

    def __init__(self, runtime: TrialRuntime) -> None:
        self._runtime = runtime
        self._sessions: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._made = 0
        self._lock = threading.RLock()
        self._busy = False
        self._trainee: TrackedSession | None = None
        self._given_up = False
        self._log: RunLog | None = RunLog()
        self._step = 0
        self._unsaved = False
        self._saved: tuple[str, int] | None = None
        self._leaving: tuple[str, int] | None = None
        self._resumed = checkpoints.find(runtime.spec)
        self._replayed: int | None = None
        if self._resumed is not None and "runs" in self._resumed.meta:
            self._log = RunLog.loads(self._resumed.read(checkpoints.RUNS))
            self._replayed = 0

    def opened(self, session: Any) -> TrackedSession:
        """A session has been made."""
        tracked = TrackedSession(self._made, SessionState(session.graph))
        self._sessions[self._made] = session
        self._made += 1
        return tracked

    def closed(self, tracked: TrackedSession) -> None:
        """A session will not be used any more."""
        self._sessions.pop(tracked.number, None)

    def monitored(self, session: Any) -> None:
        """A monitored session has been made: it goes on from its checkpoint, if there is one of it."""
        tracked: TrackedSession = session._dike_trial
        tracked.is_monitored = True
        resumed = self._resumed
        if resumed is not None and "runs" not in resumed.meta and str(tracked.number) in resumed.meta["sessions"]:
            self._restore()

    def settles(self, session: Any) -> bool:
        """Whether the end of a call of `session.run` is the end of a step."""
        tracked: TrackedSession | None = session._dike_trial
        return tracked is not None and not tracked.is_monitored and not self._busy and _in_main_thread()

    def leave_if_saved(self) -> None:
        """Suspends the trial if its state has been saved for that.

        Called when the script asks for more: after the step that was saved it may have written its own log.
        """
        if self._leaving is not None:
            leaving, self._leaving = self._leaving, None
            self._runtime.suspend(*leaving)

    def settle(self, session: Any) -> None:
        """A call of `session.run` has ended: saves if the slot is wanted back, or if it is time to."""
        if self._runtime.suspend_requested or self._runtime.checkpoint_due:
            self.finish(session)
            if self._runtime.suspend_requested and not self._unsaved:
                self._leaving = self._saved

    def finish(self, session: Any) -> None:
        """Saves unless nothing has been trained since, or the trial cannot be saved."""
        mine = self._trainee is not None and session._dike_trial is self._trainee
        # A run may train without moving the global step; the checkpoint of a step is written once.
        moved = self._saved is None or self._saved[1] != self._step
        if mine and self._unsaved and moved and not self._given_up and _in_main_thread():
            with self._for_own_runs():
                self._runtime.unless_full(self._save)

    def _finish_open(self) -> None:
        """Saves a session that the script has left open."""
        session = None if self._trainee is None else self._sessions.get(self._trainee.number)
        if session is not None:
            self.finish(session)

    def give_up(self, why: str) -> None:
        """The trial can no longer be saved; it runs on to its end."""
        if not self._given_up:
            self._given_up = True
            self._runtime.disable_suspension(why)

    def run(self, session: Any, targets: list[Any], fetches: list[Any], run: Callable[[list[Any]], Any]) -> Any:
        """Does one run of a session.

        Args:
            session: the session.
            targets: ops to run.
            fetches: tensors to return.
            run: TensorFlow's own method, given tensors to fetch beside `fetches`.

        Returns:
            The values of `fetches`.

        Raises:
            BadInputError: if a script that is brought to where it was does not do what it did.
        """
        tracked: TrackedSession | None = session._dike_trial
        if tracked is None or self._busy:
            return run([])
        if not _in_main_thread():
            return self._run_aside(tracked, session, targets, fetches, run)
        plan = tracked.plan(session.graph, targets, fetches)
        tracked.has_run = True
        if self._replayed is not None:
            return self._replay(plan, bool(fetches), run)
        if plan.trains and tracked is not self._trainee:
            self._begin(session, tracked)
        before = self._global_step(session) if plan.trains and plan.advance is None else None
        try:
            values = run(plan.more)
        except tf.errors.OutOfRangeError:
            self._record(plan, None)
            raise
        results = values[: len(fetches)] if plan.more else values
        self._record(plan, results)
        if plan.trains:
            if plan.advance is None:
                after = self._global_step(session)
                plan.advance = after - before if after is not None and before is not None else 0
                tracked.counts = tracked.counts or plan.advance > 0
            self._stepped(plan, plan.advance if tracked.counts else 1, values)
        return results

    def _run_aside(
        self, tracked: TrackedSession, session: Any, targets: Any, fetches: Any, run: Callable[[list[Any]], Any]
    ) -> Any:
        """A run in another thread; such a thread cannot be stopped between two steps."""
        plan = tracked.plan(session.graph, targets, fetches)
        if not plan.trains:
            return run([])
        values = run(plan.more)
        with self._lock:
            if self._trainee is None:
                self._begin(session, tracked)
            self.give_up("it trains in several threads")
            self._stepped(plan, 1, values)
        return values[: len(fetches)] if plan.more else values

    def _begin(self, session: Any, tracked: TrackedSession) -> None:
        """A session is about to take its first step."""
        first = self._trainee is None
        if first and self._step == 0:
            self._step = self._global_step(session) or 0
        if tracked.is_monitored and first:
            self._log = None
        elif tracked.is_monitored or (self._trainee is not None and self._trainee.is_monitored):
            self.give_up("it trains in several sessions, monitored ones among them")
        elif self._log is None:
            self.give_up(_TOO_MUCH)
        if session.graph.get_collection(tf.compat.v1.GraphKeys.QUEUE_RUNNERS):
            self.give_up("it reads its data from queues, whose content cannot be saved; use tf.data")
        if first:
            graph = session.graph
            self._runtime.check_model(lambda: training.planned_variables(graph, training.of(graph)))
        self._trainee = tracked
        if first:
            if self._runtime.save_at_end is None:
                self._runtime.save_at_end = self._finish_open
            self._runtime.save_best = self._keep_best
            self._runtime.training(preemptible=not self._given_up)

    def _keep_best(self) -> None:
        """Keeps the session that trains, as it is while the script reports."""
        session = None if self._trainee is None else self._sessions.get(self._trainee.number)
        if session is not None and not self._busy and _in_main_thread():
            with self._for_own_runs():
                self._runtime.write_best(lambda: checkpoints.write_best(self._runtime, session))

    def _stepped(self, plan: Plan, advance: int, values: list[Any]) -> None:
        self._step += advance
        self._unsaved = True
        if plan.loss is None:
            self._runtime.progress(self._step)
            return
        loss = values[plan.loss]
        loss = float(loss if loss.ndim == 0 else np.mean(loss))
        value = loss if self._runtime.spec.metric == "loss" else None
        self._runtime.progress(self._step, loss, value=value, is_reported=False)

    def _record(self, plan: Plan, results: list[Any] | None) -> None:
        if self._log is not None:
            self._log.add(plan.key, results)
            if self._log.size_bytes > LIMIT_BYTES:
                self._log = None
                if self._trainee is not None:
                    self.give_up(_TOO_MUCH)

    def _replay(self, plan: Plan, fetches: bool, run: Callable[[list[Any]], Any]) -> Any:
        assert self._log is not None
        assert self._replayed is not None
        key, results = self._log.get(self._replayed)
        if key != plan.key:
            raise BadInputError(
                f"The script did not run the same ops again as before checkpoint '{self._runtime.spec.resume_from}'; "
                "seed what it decides by, or train in a MonitoredTrainingSession."
            )
        self._replayed += 1
        if not plan.trains and not fetches:
            run([])  # an initialiser, of an iterator or a table for example
        if self._replayed == len(self._log):
            self._replayed = None
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
        """Puts back all sessions of the checkpoint, and the random state."""
        assert self._resumed is not None
        resumed, self._resumed = self._resumed, None
        with self._for_own_runs():
            resumed.restore(self._sessions)
        self._step = resumed.meta["step"]
        self._saved = resumed.path, self._step
        self._runtime.restored(resumed.path, self._step, resumed.meta["train_s"], resumed.meta["standing"])

    def _global_step(self, session: Any) -> int | None:
        """The global step; None if there is none, or it has no value yet."""
        step = tf.compat.v1.train.get_global_step(session.graph)
        if step is None:
            return None
        with self._for_own_runs():
            try:
                return int(session.run(step))
            except tf.errors.FailedPreconditionError:
                return None

    @contextlib.contextmanager
    def _for_own_runs(self) -> Iterator[None]:
        """Runs inside are not the script's."""
        before, self._busy = self._busy, True
        try:
            yield
        finally:
            self._busy = before


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
