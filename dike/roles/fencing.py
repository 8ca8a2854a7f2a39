"""Fencing: a chief that has been replaced but still runs does not write to its successor's checkpoint folder.

Mesos reports a task as unreachable when its agent is disconnected; the job restarts elsewhere, but the process may
still run. Both share a checkpoint folder, which the later attempt owns; the earlier one ends before its next save.
"""

from __future__ import annotations

import sys
from typing import NoReturn

from dike import checkpoints
from dike.process import EXIT_CODE_FENCED, end_process
from dike.reporting import reporter
from dike.task import TaskSpec


def take_ownership(task: TaskSpec) -> None:
    """Makes the task the owner of its checkpoint folder; ends the process if a later attempt owns it.

    Chiefs must call it before they use checkpoints. Raises BadInputError if another model's are in the folder.
    """
    checkpoints.check_model(task)
    owner = checkpoints.checkpoint_owner(task)
    if owner is not None and owner[0] == task.job_id and owner[1] > task.attempt:
        _exit_fenced(task)
    checkpoints.write_owner(task)


def check(task: TaskSpec) -> None:
    """Ends the process if a later attempt or another job owns the folder. Chiefs must call it before each save."""
    owner = checkpoints.checkpoint_owner(task)
    if owner == (task.job_id, task.attempt):
        return
    if owner is not None and (owner[0] != task.job_id or owner[1] > task.attempt):
        _exit_fenced(task)
    # An earlier attempt that was slow to start has overwritten the owner, or the folder was emptied.
    checkpoints.write_owner(task)


def _exit_fenced(task: TaskSpec) -> NoReturn:
    # Without exit handlers, so that the script does not write what its successor will write.
    print(
        "dike: a later attempt, or another job, has taken over the checkpoint folder "
        f"'{checkpoints.shown(task.checkpoint_dir)}'; attempt {task.attempt} of job {task.job_id} ends without saving.",
        file=sys.stderr,
        flush=True,
    )
    reporter().close()
    end_process(EXIT_CODE_FENCED)
