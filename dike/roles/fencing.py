"""A chief that was given up and lives on never writes beside its successor.

Mesos calls a task unreachable whose agent it cannot hear; the job is restarted elsewhere, but the process may go on.
Both share a checkpoint folder: whoever began later has claimed it, and the earlier one ends before its next save.
"""

from __future__ import annotations

import sys
from typing import NoReturn

from dike import checkpoints
from dike.process import EXIT_CODE_FENCED, end_process
from dike.reporting import reporter
from dike.task import TaskSpec


def claim(task: TaskSpec) -> None:
    """Called by a chief before it reads or writes checkpoints: the folder is its own from now on.

    Ends the process if a later attempt has begun.

    Raises:
        BadInputError: if another model's checkpoints are in the folder.
    """
    checkpoints.check_model(task)
    holder = checkpoints.holder(task)
    if holder is not None and holder[0] == task.job_id and holder[1] > task.attempt:
        _leave(task)
    checkpoints.claim_folder(task)


def check(task: TaskSpec) -> None:
    """Called by a chief before each save: ends the process if another attempt, or another job, has the folder now."""
    holder = checkpoints.holder(task)
    if holder == (task.job_id, task.attempt):
        return
    if holder is not None and (holder[0] != task.job_id or holder[1] > task.attempt):
        _leave(task)
    # An earlier attempt that was slow to start has claimed it after us, or somebody has emptied the folder.
    checkpoints.claim_folder(task)


def _leave(task: TaskSpec) -> NoReturn:
    # At once: what the script would write at its end is its successor's to write.
    print(
        f"dike: a later attempt, or another job, has taken over the checkpoint folder '{task.checkpoint_dir}'; attempt "
        f"{task.attempt} of job {task.job_id} ends without saving.",
        file=sys.stderr,
        flush=True,
    )
    reporter().close()
    end_process(EXIT_CODE_FENCED)
