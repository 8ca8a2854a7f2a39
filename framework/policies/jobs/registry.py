"""The policies for training jobs by name."""

from __future__ import annotations

from framework.policies.jobs.interface import Allocate
from framework.policies.jobs.rules import fair, first_come, marginal_gain, relative_gain, tetris

POLICIES: dict[str, Allocate] = {
    "dike": relative_gain,
    "optimus": marginal_gain,
    "drf": fair,
    "tetris": tetris,
    "fifo": first_come,
}
NEED_ESTIMATES = ("dike", "optimus", "tetris")
"""Policies that need estimates of a job's speed and remaining samples."""
