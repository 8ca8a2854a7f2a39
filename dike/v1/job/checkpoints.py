"""The job's checkpoints, and a script's own `Saver`s: the variables are shared, so only the chief saves them."""

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
    """Writes the job's checkpoint; returns False on a full disk. The chief must call `fencing.check` before."""
    prefix = f"{task.checkpoint_dir.rstrip('/')}/model.ckpt"

    def save() -> None:
        tf.io.gfile.makedirs(task.checkpoint_dir)
        checkpoints.forget_checksums(f"{prefix}-{step}")
        path = saver.save(session, prefix, global_step=step)
        if path is not None:
            checkpoints.record_checksums(path)
            reporter().checkpoint(path, step)

    return checkpoints.write_checkpoint(save, is_last=is_last)


def track_earlier_checkpoints(task: TaskSpec, saver: Any) -> None:
    """Makes a saver also remove old checkpoints of earlier attempts."""
    state = tf.train.get_checkpoint_state(task.checkpoint_dir)
    if state is not None:
        saver.recover_last_checkpoints(state.all_model_checkpoint_paths)


def check_newest(task: TaskSpec) -> str | None:
    """Path of the job's newest intact checkpoint, None if there is none.

    Raises BadInputError if a variable of the default graph is missing in it or has another shape.
    """
    path = checkpoints.newest_intact(task.checkpoint_dir)
    if path is None:
        return None
    stored = dict(tf.train.list_variables(path))
    for variable in tf.compat.v1.global_variables():
        part = variable._save_slice_info
        name = variable.op.name if part is None else part.full_name
        shape = variable.shape.as_list() if part is None else list(part.full_shape)
        if stored.get(name) != shape:
            raise BadInputError(
                f"Checkpoint '{checkpoints.shown(path)}' is of another model: variable '{name}' "
                f"{'differs' if name in stored else 'is missing'}; name another folder with --checkpoint-dir."
            )
    return path


def log_checkpoint_folder(task: TaskSpec, named: str | None) -> None:
    """Logs the checkpoint folder if the script has named another one."""
    if named and task.is_chief and named.rstrip("/") != task.checkpoint_dir.rstrip("/"):
        print(f"dike: checkpoints go to '{task.checkpoint_dir}', not to '{named}'.", file=sys.stderr)


def restrict_savers_to_chief(task: TaskSpec) -> None:
    """Only the chief writes and reads files of variables. Must be called after sessions are watched."""
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
