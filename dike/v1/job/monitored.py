"""Monitored sessions: connected to the cluster, initialised by the chief, saved to the job's checkpoint folder."""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.training import monitored_session, session_manager, training

from dike.checkpoints import newest_intact, step_of
from dike.process import termination
from dike.reporting import reporter
from dike.roles import fencing, planned_model
from dike.task import TaskSpec
from dike.v1 import training as trained
from dike.v1.job import checkpoints, cluster, plain
from dike.v1.job.cluster import actual_devices
from dike.v1.job.progress import StepReports, last_step
from dike.v1.job.synchronous import CloseTokens

_RECOVERY_WAIT_S = 0.2
"""Interval at which a worker polls for initialisation by the chief; TensorFlow's 30 s may exceed a short job."""

_RESTORED = "_dike_restored"
"""Attribute of a session creator: the job's checkpoint that its session was restored from."""

_STOP_GRACE_S = 2
"""Short, because the chief's thread that feeds a synchronous job's tokens never ends by itself."""


class ProgressHook(tf.compat.v1.train.SessionRunHook):
    """Reports step and loss of every training run; the chief's also saves.

    It saves when a session begins that was not restored, every interval, at SIGTERM, and when the session ends. The
    scaffold of `creator`, the session's creator, has the saver; `others` are the session's other hooks.
    """

    def __init__(self, task: TaskSpec, creator: Any, others: Sequence[Any]) -> None:
        self._task = task
        self._creator = creator
        self._others = others
        self._reports = StepReports(task.index)
        self._samples: int | None = None
        self._begun_s = 0.0
        self._last: dict[str, Any] | None = None
        self._saver: Any = None
        self._steps = 0
        self._saved_s = 0.0
        self._saved_step = -1

    def after_create_session(self, session: Any, coord: Any) -> None:
        if not _is_job_state(self._task, self._creator):
            return
        restored = getattr(self._creator, _RESTORED, None)
        if restored is not None:
            self._steps = step_of(restored)
            self._saved_step, self._saved_s = self._step(session), time.monotonic()
            reporter().resumed(self._saved_step)
        end = last_step(self._others)
        if end is not None:
            reporter().total(end)
        reporter().placement(actual_devices(tf.compat.v1.global_variables()))
        self._saver = _saver_of(self._creator)
        if self._saver is not None:
            if restored is None:
                self._save(session)
            else:
                checkpoints.track_earlier_checkpoints(self._task, self._saver)
            termination.enable_saving()

    def before_run(self, run_context: Any) -> Any:
        graph = run_context.session.graph
        arguments = run_context.original_args
        extra = trained.of(graph).extra_fetches(graph, arguments.fetches)
        if extra is None:
            return None
        self._samples = trained.samples_in(arguments.feed_dict)
        self._begun_s = time.time()
        return tf.compat.v1.train.SessionRunArgs(extra)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        if run_values.results is not None:
            self._steps += 1
            self._last = {"step": self._steps, **run_values.results}
            self._reports.step(self._last, self._samples, self._begun_s)
        if self._saver is None:
            return
        if termination.requested:
            self._save(run_context.session)
            termination.exit()
        if time.monotonic() - self._saved_s >= self._task.checkpoint_interval_s:
            self._save(run_context.session)

    def end(self, session: Any) -> None:
        """Reports the last step: the step in a run's result may be stale, as all workers still increment it."""
        step = self._step(session)
        if self._last is not None:
            loss = self._last.get("loss")
            reporter().progress(step, loss=float(loss.mean()) if loss is not None else None)
        if self._saver is not None and step != self._saved_step:
            self._save(session, is_last=True)

    def _step(self, session: Any) -> int:
        """The global step; without one, the number of this worker's training runs."""
        step = tf.compat.v1.train.get_global_step(session.graph)
        return int(session.run(step)) if step is not None else self._steps

    def _save(self, session: Any, *, is_last: bool = False) -> None:
        fencing.check(self._task)
        step = self._step(session)
        if checkpoints.write(self._task, self._saver, session, step, is_last=is_last):
            self._saved_step = step
        self._saved_s = time.monotonic()


def _is_job_state(task: TaskSpec, creator: Any) -> bool:
    """Whether the job saves and restores the creator's session, which is not so if it only evaluates."""
    if not task.is_chief or not task.checkpoint_dir:
        return False
    trains = bool(trained.of(tf.compat.v1.get_default_graph()).updates)
    return trains or getattr(creator, "_checkpoint_dir", None) == task.checkpoint_dir


def _saver_of(creator: Any) -> Any:
    """The saver of the creator's scaffold; without a scaffold, the graph's saver if it has one."""
    scaffold = getattr(creator, "_scaffold", None)
    if scaffold is not None:
        return scaffold.saver
    savers = tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.SAVERS)
    return savers[0] if savers else None


def install(task: TaskSpec) -> None:
    _shorten_recovery_wait()
    _connect_creators(task)
    _add_hooks(task)
    make = monitored_session.MonitoredTrainingSession

    signature = inspect.signature(make)

    def make_for_task(*args: Any, **kwargs: Any) -> Any:
        options = signature.bind(*args, **kwargs).arguments
        named = options.get("checkpoint_dir")
        checkpoints.log_checkpoint_folder(task, named)
        if named is None and "summary_dir" not in options:
            # Without a folder, MonitoredTrainingSession writes no summaries.
            options.setdefault("save_summaries_steps", None)
            options.setdefault("save_summaries_secs", None)
            options.setdefault("log_step_count_steps", None)
        # ProgressHook saves instead, as TensorFlow's own hook needs a global step.
        options["save_checkpoint_secs"] = options["save_checkpoint_steps"] = None
        options["stop_grace_period_secs"] = _STOP_GRACE_S
        options["is_chief"] = task.is_chief
        options["checkpoint_dir"] = task.checkpoint_dir or None
        return make(**options)

    for module in (tf.compat.v1.train, monitored_session, training):
        module.MonitoredTrainingSession = make_for_task


def _shorten_recovery_wait() -> None:
    initialise = session_manager.SessionManager.__init__

    def own_initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs["recovery_wait_secs"] = _RECOVERY_WAIT_S
        initialise(self, *args, **kwargs)

    session_manager.SessionManager.__init__ = own_initialise


def _add_saver(scaffold: Any) -> None:
    """Adds a saver that makes the chief write the whole checkpoint; by default each ps writes its part locally."""
    key = tf.compat.v1.GraphKeys.SAVERS
    if scaffold._saver is None and not tf.compat.v1.get_collection(key):
        scaffold._saver = tf.compat.v1.train.Saver(sharded=False, allow_empty=True)
        tf.compat.v1.add_to_collection(key, scaffold._saver)  # for later sessions of the finalised graph


def _connect_creators(task: TaskSpec) -> None:
    chief, worker = monitored_session.ChiefSessionCreator, monitored_session.WorkerSessionCreator
    create_as_chief, create_as_worker = chief.create_session, worker.create_session

    def connected(creator: Any) -> Any:
        creator._master = cluster.server(task).target
        creator._config = cluster.session_config(task, creator._config)
        return creator

    def create(creator: Any) -> Any:
        with plain.untracked():
            scaffold = creator._scaffold
            has_own_saver = scaffold._saver is not None
            _add_saver(scaffold)
            if not task.is_chief:
                return create_as_worker(connected(worker(scaffold=scaffold, config=creator._config)))
            as_chief = connected(chief(scaffold=scaffold, config=creator._config))
            named = getattr(creator, "_checkpoint_filename_with_path", None)
            if _is_job_state(task, creator):
                fencing.take_ownership(task)
                # The script's own saver may leave variables out.
                newest = newest_intact(task.checkpoint_dir) if has_own_saver else checkpoints.check_newest(task)
                setattr(creator, _RESTORED, newest)
                as_chief._checkpoint_dir = None
                named = newest or named
            elif named is None and getattr(creator, "_checkpoint_dir", None):
                as_chief._checkpoint_dir = task.checkpoint_dir or creator._checkpoint_dir
            as_chief._checkpoint_filename_with_path = named
            return create_as_chief(as_chief)

    chief.create_session = create
    worker.create_session = create


def _add_hooks(task: TaskSpec) -> None:
    base = monitored_session._MonitoredSession
    initialise = base.__init__
    saver_hook = tf.compat.v1.train.CheckpointSaverHook

    def own_initialise(
        self: Any, session_creator: Any, hooks: Any, should_recover: bool, stop_grace_period_secs: float = _STOP_GRACE_S
    ) -> None:
        graph = tf.compat.v1.get_default_graph()
        if task.is_chief and trained.of(graph).losses:
            # At the point where capture reads the model: before hooks add variables.
            planned_model.check(task, lambda: trained.planned_variables(graph, trained.of(graph)))
        creator = session_creator or monitored_session.ChiefSessionCreator()
        # All workers' hooks would write the same files.
        given = [hook for hook in hooks or () if task.is_chief or not isinstance(hook, saver_hook)]
        hooks = [*given, CloseTokens(), ProgressHook(task, creator, given)]
        initialise(self, creator, hooks, should_recover, _STOP_GRACE_S)

    base.__init__ = own_initialise
