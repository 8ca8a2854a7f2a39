"""Whether the newest checkpoint fits the script's graph."""

from __future__ import annotations

import tensorflow as tf

from dike.exceptions import BadInputError
from dike.task import TaskSpec


def step_of(path: str) -> int:
    """The step at which the job wrote the checkpoint `path`; 0 if the name of one from elsewhere does not say."""
    step = path.rpartition("-")[2]
    return int(step) if step.isdecimal() else 0


def check_newest(task: TaskSpec) -> str | None:
    """Path of the job's newest checkpoint, None where there is none; it has all variables of the default graph.

    Raises:
        BadInputError: if a variable is missing in the checkpoint or has another shape there.
    """
    path = tf.train.latest_checkpoint(task.checkpoint_dir)
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
    return str(path)
