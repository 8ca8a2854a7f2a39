"""Monitored sessions: connected to the cluster, initialised by the chief, saved where the job keeps its checkpoints."""

from __future__ import annotations

import time
from typing import Any

import tensorflow as tf
from tensorflow.python.training import monitored_session, saver, session_manager, training

from dike import checkpoints
from dike.reporting import reporter
from dike.roles.graph import cluster, plain, restoring
from dike.roles.graph import training as trained
from dike.roles.graph.placement import actual_devices
from dike.roles.graph.synchronous import CloseTokens
from dike.roles.process import termination
from dike.task import TaskSpec

_RECOVERY_WAIT_S = 0.2
"""How often a worker asks whether the chief has initialised; TensorFlow's 30 s would often be all of a short job."""

_STOP_GRACE_S = 2
"""The chief's thread that feeds a synchronous job's tokens never ends by itself."""


class ProgressHook(tf.compat.v1.train.SessionRunHook):
    """Reports step and loss of every training run, and saves when the process is told to end.

    Args:
        task: the process' task.
    """

    def __init__(self, task: TaskSpec) -> None:
        self._task = task
        self._samples: int | None = None
        self._last_s: float | None = None
        self._last: dict[str, Any] | None = None
        self._saver: Any = None

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Reports where the variables are."""
        if self._task.is_chief:
            reporter().placement(actual_devices(tf.compat.v1.global_variables()))
            self._saver = saver._get_saver_or_default()
            termination.can_save()

    def before_run(self, run_context: Any) -> Any:
        """Asks for step and loss where the run trains."""
        graph = run_context.session.graph
        arguments = run_context.original_args
        observed = trained.of(graph).observed(graph, arguments.fetches)
        if not observed:
            return None
        self._samples = trained.samples_in(arguments.feed_dict)
        return tf.compat.v1.train.SessionRunArgs(observed)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Reports what came back."""
        if run_values.results and "step" in run_values.results:
            self._last = run_values.results
            plain.report(run_values.results, self._samples, self._last_s)
            self._last_s = time.monotonic()
        if termination.requested and self._saver is not None:
            session = run_context.session
            step = tf.compat.v1.train.get_global_step(session.graph)
            path = self._saver.save(session, plain.checkpoint_prefix(self._task), global_step=step)
            reporter().checkpoint(path, int(session.run(step)))
            termination.leave()

    def end(self, session: Any) -> None:
        """Reports the last step: a run reads the step while other workers, and itself, still count it up."""
        step = tf.compat.v1.train.get_global_step(session.graph)
        if step is not None and self._last is not None:
            reporter().progress(int(session.run(step)), loss=self._last.get("loss"))


class SavedListener(tf.compat.v1.train.CheckpointSaverListener):
    """Reports each checkpoint.

    Args:
        task: the process' task.
    """

    def __init__(self, task: TaskSpec) -> None:
        self._task = task

    def after_save(self, session: Any, global_step_value: int) -> None:
        """Called by TensorFlow after each save."""
        reporter().checkpoint(f"{plain.checkpoint_prefix(self._task)}-{global_step_value}", int(global_step_value))


def install(task: TaskSpec) -> None:
    """Replaces how monitored sessions are made."""
    _find_chief_fast()
    _save_from_chief()
    _connect_creators(task)
    _add_hooks(task)
    make = monitored_session.MonitoredTrainingSession

    def make_for_task(master: str = "", is_chief: bool = True, checkpoint_dir: str | None = None, **kwargs: Any) -> Any:
        plain.say_where_checkpoints_go(task, checkpoint_dir)
        if checkpoint_dir is None and "summary_dir" not in kwargs:
            # Without a folder the script would have written no summaries either.
            kwargs.setdefault("save_summaries_steps", None)
            kwargs.setdefault("save_summaries_secs", None)
            kwargs.setdefault("log_step_count_steps", None)
        kwargs["save_checkpoint_secs"] = task.checkpoint_interval_s
        kwargs["save_checkpoint_steps"] = None
        kwargs["stop_grace_period_secs"] = _STOP_GRACE_S
        return make(master=master, is_chief=task.is_chief, checkpoint_dir=task.checkpoint_dir or None, **kwargs)

    for module in (tf.compat.v1.train, monitored_session, training):
        module.MonitoredTrainingSession = make_for_task


def _find_chief_fast() -> None:
    initialise = session_manager.SessionManager.__init__

    def own_initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs["recovery_wait_secs"] = _RECOVERY_WAIT_S
        initialise(self, *args, **kwargs)

    session_manager.SessionManager.__init__ = own_initialise


def _save_from_chief() -> None:
    """The chief writes and reads the whole checkpoint; by default each ps writes a part of it, on its own machine."""
    get_saver = saver._get_saver_or_default

    def own_saver() -> Any:
        graph = tf.compat.v1.get_default_graph()
        if not graph.get_collection(tf.compat.v1.GraphKeys.SAVERS):
            default = tf.compat.v1.train.Saver(sharded=False, allow_empty=True)
            graph.add_to_collection(tf.compat.v1.GraphKeys.SAVERS, default)
        return get_saver()

    saver._get_saver_or_default = own_saver


def _connect_creators(task: TaskSpec) -> None:
    chief, worker = monitored_session.ChiefSessionCreator, monitored_session.WorkerSessionCreator
    create_as_chief, create_as_worker = chief.create_session, worker.create_session

    def connected(creator: Any) -> Any:
        creator._master = cluster.server(task).target
        creator._config = cluster.session_config(task, creator._config)
        return creator

    def create(creator: Any) -> Any:
        with plain.not_plain():
            if not task.is_chief:
                return create_as_worker(connected(worker(scaffold=creator._scaffold, config=creator._config)))
            as_chief = connected(chief(scaffold=creator._scaffold, config=creator._config))
            if task.checkpoint_dir:
                checkpoints.claim_folder(task)
                if creator._scaffold._saver is None:
                    restoring.check_newest(task)
                as_chief._checkpoint_dir = task.checkpoint_dir
            return create_as_chief(as_chief)

    chief.create_session = create
    worker.create_session = create


def _add_hooks(task: TaskSpec) -> None:
    base = monitored_session._MonitoredSession
    initialise = base.__init__
    saver_hook = tf.compat.v1.train.CheckpointSaverHook
    initialise_saver = saver_hook.__init__

    def own_initialise(
        self: Any, session_creator: Any, hooks: Any, should_recover: bool, stop_grace_period_secs: float = _STOP_GRACE_S
    ) -> None:
        hooks = [*(hooks or ()), CloseTokens(), ProgressHook(task)]
        initialise(self, session_creator, hooks, should_recover, _STOP_GRACE_S)

    def own_initialise_saver(self: Any, *args: Any, **kwargs: Any) -> None:
        initialise_saver(self, *args, **kwargs)
        self._listeners = [*self._listeners, SavedListener(task)]

    base.__init__ = own_initialise
    saver_hook.__init__ = own_initialise_saver
