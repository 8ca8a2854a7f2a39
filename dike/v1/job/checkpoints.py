"""The job's checkpoints, and a script's own `Saver`s: the variables are shared, so one process saves them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from dike import checkpoints
from dike.exceptions import BadInputError
from dike.reporting import reporter
from dike.task import TaskSpec


def write(task: TaskSpec, saver: Any, session: Any, step: int, *, is_last: bool = False) -> bool:
    """Writes the job's checkpoint of a step; called by the chief, once `fencing.check` has let it.

    Returns:
        Whether it was written: a disk may be full.
    """
    prefix = f"{task.checkpoint_dir.rstrip('/')}/model.ckpt"

    def save() -> None:
        tf.io.gfile.makedirs(task.checkpoint_dir)
        checkpoints.unseal(f"{prefix}-{step}")
        path = saver.save(session, prefix, global_step=step)
        if path is not None:
            checkpoints.seal(path)
            reporter().checkpoint(path, step)

    return checkpoints.written(save, is_last=is_last)


def count_earlier(task: TaskSpec, saver: Any) -> None:
    """Has a saver remove in time what earlier attempts have written, too."""
    state = tf.train.get_checkpoint_state(task.checkpoint_dir)
    if state is not None:
        saver.recover_last_checkpoints(state.all_model_checkpoint_paths)


def check_newest(task: TaskSpec) -> str | None:
    """Path of the job's newest whole checkpoint, None where there is none; it has all variables of the default graph.

    Raises:
        BadInputError: if a variable is missing in the checkpoint or has another shape there.
    """
    path = checkpoints.newest_whole(task.checkpoint_dir)
    if path is None:
        return None
    stored = dict(tf.train.list_variables(path))
    for variable in tf.compat.v1.global_variables():
        part = variable._save_slice_info
        name = variable.op.name if part is None else part.full_name
        shape = variable.shape.as_list() if part is None else list(part.full_shape)
        if stored.get(name) != shape:
            raise BadInputError(
                f"Checkpoint '{path}' is of another model: variable '{name}' "
                f"{'differs' if name in stored else 'is missing'}; name another folder with --checkpoint-dir."
            )
    return path


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
