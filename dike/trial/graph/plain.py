"""Lets every session's runs pass through the trial; sessions that no monitored session owns are also settled here."""

from __future__ import annotations

import sys
from typing import Any

from tensorflow.python.client import session as sessions

from dike.trial.graph.sessions import GraphTrial
from dike.trial.graph.tracked import TrackedSession


def install(trial: GraphTrial) -> None:
    """Wraps the methods that all kinds of TensorFlow 1 sessions share."""
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
        self._dike_trial = trial.opened(self)

    def own_run(self: Any, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None) -> Any:
        if not trial.settles(self):
            return run(self, fetches, feed_dict, options, run_metadata)
        trial.leave_if_saved()
        results = run(self, fetches, feed_dict, options, run_metadata)
        trial.settle(self)
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
        # TensorFlow's own callables go around `run`.
        return lambda *values, **options: self.run(
            fetches, dict(zip(feed_list or (), values, strict=True)), **(options if accept_options else {})
        )

    def own_set_up_partial_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        trial.give_up("the script uses Session.partial_run")
        return set_up_partial_run(self, *args, **kwargs)

    def own_close(self: Any) -> None:
        tracked: TrackedSession | None = getattr(self, "_dike_trial", None)
        if tracked is not None:
            if trial.settles(self) and sys.exc_info()[0] is None:
                trial.finish(self)
            self._dike_trial = None
            trial.closed(tracked)
        close(self)

    base.__init__, base.run, base._do_run, base.close = own_initialise, own_run, own_do_run, own_close
    base.make_callable, base.partial_run_setup = own_make_callable, own_set_up_partial_run
