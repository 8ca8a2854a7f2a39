"""The words that a request may hold; a command line offers them without importing what stands behind them."""

from __future__ import annotations

from typing import Literal

Objective = Literal["throughput", "traffic"]
"""What the planner optimises: predicted speed, or Eq. 1 alone as the paper has it."""
Sharding = Literal["optimus", "greedy", "round_robin"]
"""How variables are dealt out to parameter servers."""
Order = Literal["given", "gain"]
"""Of many jobs: `given`: job after job, each its best on what is left; `gain`: all together, by marginal gain."""

RULES = {
    "identical_workers": "all workers are alike; without it each machine gives its workers a shape of its own",
    "cpu_gpu_ratio": "a worker has 1, 2, 4, ... GPUs and the CPUs that those can use; without it, any numbers",
    "task_counts": "one ps on a machine at most, none without effect; without it they share machines",
    "all_gpus_used": "no GPU is idle that a worker could use, as in the paper; costs speed on slow networks",
}
"""Rule that prunes options -> one line, in the order in which they apply."""
MOST_TASK_MEM_MIB = 10**9
"""A task may ask for that much memory at most; no machine has more."""
METHODS = {
    "dike": "the best placement that the rules leave, by default of all there are, with a bound",
    "dike_traffic": "least traffic by the paper's Eq. 1 alone, with no GPU idle",
    "plain": "one task without parameter servers, as python runs the script",
    "sar_basic": "equal slices, one ps for 4 workers, as many as fit, on the machines in turn",
    "first_fit": "as tfmesos: the same slices, each task on the first machine with room",
    "optimus": "equal counts on the fewest machines, with the best counts there are",
}
"""Who can plan -> one line."""
