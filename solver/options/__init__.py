"""Resource assignment options (a worker's size, numbers of workers and parameter servers) and their pruning.

The paper 'Dike' (section 3.2) reduces their number by three rules; here each rule is a function from a space of options
to a smaller one that reports the number removed, and each can be disabled.
"""

from __future__ import annotations

from solver.options.all_gpus_used import all_gpus_used
from solver.options.cpu_gpu_ratio import cpu_gpu_ratio, cpus_per_gpu
from solver.options.identical_workers import identical_workers
from solver.options.rules import PAPER, check_rules, default_rules, parse_rules, prune
from solver.options.space import COUNT_LIMIT, OptionRange, OptionSpace, Pruning, raw_space
from solver.options.spare_cpus import without_spare_cpus
from solver.options.task_counts import task_counts

__all__ = [
    "COUNT_LIMIT",
    "PAPER",
    "OptionRange",
    "OptionSpace",
    "Pruning",
    "all_gpus_used",
    "check_rules",
    "cpu_gpu_ratio",
    "cpus_per_gpu",
    "default_rules",
    "identical_workers",
    "parse_rules",
    "prune",
    "raw_space",
    "task_counts",
    "without_spare_cpus",
]
