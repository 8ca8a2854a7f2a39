"""How long a script with a `StopAtStepHook` trains: its steps count from the job's first start, not from each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from dike import checkpoints
from dike.task import TaskSpec


def last_step(hooks: Iterable[Any]) -> int | None:
    """The global step at which the first of the hooks will end the training; None if none of them says one yet."""
    ends = [hook._last_step for hook in hooks if isinstance(hook, tf.compat.v1.train.StopAtStepHook)]
    return min((int(end) for end in ends if end is not None), default=None)


def install(task: TaskSpec) -> None:
    """A job that is started again trains `num_steps` in all, not as many again."""
    base = tf.compat.v1.train.StopAtStepHook
    after_create_session = base.after_create_session

    def own_after_create_session(self: Any, session: Any, coord: Any) -> None:
        if self._last_step is None and task.checkpoint_dir:
            now = int(session.run(self._global_step_tensor))
            self._last_step = checkpoints.first_step(task, now) + self._num_steps
        after_create_session(self, session, coord)

    base.after_create_session = own_after_create_session
