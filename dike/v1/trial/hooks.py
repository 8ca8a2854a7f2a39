"""Routes all runs of sessions through the trial: plain sessions, and monitored ones with their hooks."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

import tensorflow as tf
from tensorflow.python.checkpoint import checkpoint_management
from tensorflow.python.client import session as sessions
from tensorflow.python.training import monitored_session
from tensorflow.python.training import training as exported

from dike.trial.spec import TrialSpec
from dike.v1 import training
from dike.v1.trial.sessions import GraphTrial, TrackedSession


def install(trial: GraphTrial, spec: TrialSpec) -> None:
    _watch_sessions(trial)
    _watch_monitored_sessions(trial)
    _move_checkpoints(spec)


def _watch_sessions(trial: GraphTrial) -> None:
    base = sessions.BaseSession
    initialise, run, do_run, close, set_up_partial_run = (
        base.__init__,
        base.run,
        base._do_run,
        base.close,
        base.partial_run_setup,
    )

    def own_initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        self._dike_trial = None
        initialise(self, *args, **kwargs)
        self._dike_trial = trial.add_session(self)

    def own_run(self: Any, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None) -> Any:
        if not trial.ends_step(self):
            return run(self, fetches, feed_dict, options, run_metadata)
        trial.suspend_if_saved()
        results = run(self, fetches, feed_dict, options, run_metadata)
        trial.save_if_due(self)
        return results

    def own_do_run(
        self: Any, handle: Any, targets: list[Any], fetches: list[Any], feeds: Any, options: Any, metadata: Any
    ) -> Any:
        if handle is not None:
            return do_run(self, handle, targets, fetches, feeds, options, metadata)
        return trial.run(
            self, targets, fetches, lambda more: do_run(self, None, targets, fetches + more, feeds, options, metadata)
        )

    def own_make_callable(self: Any, fetches: Any, feed_list: Any = None, accept_options: bool = False) -> Any:
        # TensorFlow's own callables bypass `run`.
        return lambda *values, **options: self.run(
            fetches, dict(zip(feed_list or (), values, strict=True)), **(options if accept_options else {})
        )

    def own_set_up_partial_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        trial.disable_saving("the script uses Session.partial_run")
        return set_up_partial_run(self, *args, **kwargs)

    def own_close(self: Any) -> None:
        tracked: TrackedSession | None = getattr(self, "_dike_trial", None)
        if tracked is not None:
            if trial.ends_step(self) and sys.exc_info()[0] is None:
                trial.save_if_changed(self)
            self._dike_trial = None
            trial.remove_session(tracked)
        close(self)

    base.__init__, base.run, base._do_run, base.close = own_initialise, own_run, own_do_run, own_close
    base.make_callable, base.partial_run_setup = own_make_callable, own_set_up_partial_run


class RestoreHook(tf.compat.v1.train.SessionRunHook):
    """Restores the session; the first hook, so that other hooks see the restored session."""

    def __init__(self, trial: GraphTrial) -> None:
        self._trial = trial

    def after_create_session(self, session: Any, coord: Any) -> None:
        self._trial.restore_monitored(session)


class SaveHook(tf.compat.v1.train.SessionRunHook):
    """Saves the session; the last hook, after the other hooks have processed the step."""

    def __init__(self, trial: GraphTrial) -> None:
        self._trial = trial

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self._trial.save_if_due(run_context.session)
        if self._trial.is_over:
            run_context.request_stop()

    def end(self, session: Any) -> None:
        self._trial.save_if_changed(session)


def _watch_monitored_sessions(trial: GraphTrial) -> None:
    base = monitored_session._MonitoredSession
    initialise, run, run_step_fn = base.__init__, base.run, base.run_step_fn

    def own_initialise(self: Any, session_creator: Any, hooks: Any, *args: Any, **kwargs: Any) -> None:
        if training.of(tf.compat.v1.get_default_graph()).updates:
            hooks = [RestoreHook(trial), *(hooks or ()), SaveHook(trial)]
        initialise(self, session_creator, hooks, *args, **kwargs)

    def own_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        trial.suspend_if_saved()
        return run(self, *args, **kwargs)

    def own_run_step_fn(self: Any, step_fn: Any) -> Any:
        trial.suspend_if_saved()
        result = run_step_fn(self, step_fn)
        trial.save_if_due(self._tf_sess())  # step_fn may train without hooks
        return result

    base.__init__, base.run, base.run_step_fn = own_initialise, own_run, own_run_step_fn


def _move_checkpoints(spec: TrialSpec) -> None:
    """Redirects checkpoints of `MonitoredTrainingSession` to a folder of the run.

    Trials of one script use the same folder, and would resume from each other's checkpoints.
    """
    make = monitored_session.MonitoredTrainingSession
    get_state = checkpoint_management.get_checkpoint_state
    signature = inspect.signature(make)
    moved: dict[str, str] = {}

    @functools.wraps(make)
    def own_make(*args: Any, **kwargs: Any) -> Any:
        options = signature.bind(*args, **kwargs).arguments
        named = options.get("checkpoint_dir")
        intervals = ("save_checkpoint_secs", "save_checkpoint_steps")
        only_restores = all(name in options and options[name] is None for name in intervals)
        if named and not only_restores:
            if named not in moved:
                moved[named] = f"{spec.folder.rstrip('/')}/run-{spec.run}-script-{len(moved)}"
                print(f"dike: checkpoints for '{named}' go to '{moved[named]}'.", file=sys.stderr, flush=True)
            options["checkpoint_dir"] = moved[named]
        return make(**options)

    @functools.wraps(get_state)
    def own_get_state(checkpoint_dir: Any, latest_filename: Any = None) -> Any:
        return get_state(moved.get(checkpoint_dir, checkpoint_dir), latest_filename)

    for module in (tf.compat.v1.train, monitored_session, exported):
        module.MonitoredTrainingSession = own_make
    for module in (tf.compat.v1.train, tf.train, checkpoint_management, exported):
        module.get_checkpoint_state = own_get_state
