"""Where a job's checkpoints are, and a script's own `Saver`s: the variables are shared, so one process saves them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from dike.task import TaskSpec


def checkpoint_prefix(task: TaskSpec) -> str:
    """Path of the job's checkpoints without their step."""
    return f"{task.checkpoint_dir.rstrip('/')}/model.ckpt"


def say_where_checkpoints_go(task: TaskSpec, named: str | None) -> None:
    """Tells the user when the script named a folder that the job does not use."""
    if named and task.is_chief and named.rstrip("/") != task.checkpoint_dir.rstrip("/"):
        print(f"dike: checkpoints go to '{task.checkpoint_dir}', not to '{named}'.", file=sys.stderr)


def share_savers(task: TaskSpec) -> None:
    """Only the chief writes the variables to a file, and reads them; called after sessions are watched."""
    base = tf.compat.v1.train.Saver
    save, restore = base.save, base.restore

    def own_save(self: Any, sess: Any, save_path: Any, *args: Any, **kwargs: Any) -> Any:
        return save(self, sess, save_path, *args, **kwargs) if task.is_chief else save_path

    def own_restore(self: Any, sess: Any, save_path: Any) -> None:
        added = getattr(sess, "_dike", None)
        if added is None or added.is_inside:
            restore(self, sess, save_path)
            return
        with sess.graph.as_default():
            every = tf.compat.v1.global_variables()
        listed = self._var_list.values() if isinstance(self._var_list, Mapping) else self._var_list
        named = None if listed is None else {id(variable) for variable in listed}
        chosen = [variable for variable in every if named is None or id(variable) in named]
        added.restore(lambda: restore(self, sess, save_path), chosen)

    base.save, base.restore = own_save, own_restore
