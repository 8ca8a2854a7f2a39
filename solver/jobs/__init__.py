"""Plans many jobs on one cluster."""

from __future__ import annotations

from solver.jobs.job import PlanJob
from solver.jobs.jobs_file import read_jobs
from solver.jobs.planner import plan_jobs
from solver.jobs.result import JobsPlan, MachineTasks, Method, PlacedJob, UnplacedJob

__all__ = [
    "JobsPlan",
    "MachineTasks",
    "Method",
    "PlacedJob",
    "PlanJob",
    "UnplacedJob",
    "plan_jobs",
    "read_jobs",
]
