"""Allowed values of a plan request, importable without the planner."""

from __future__ import annotations

from typing import Literal

Objective = Literal["throughput", "traffic"]
"""The planner's objective: predicted speed, or Eq. 1 alone as in the paper."""
Sharding = Literal["optimus", "greedy", "round_robin"]
"""How variables are distributed over parameter servers."""
Strategy = Literal["auto", "one", "allreduce", "ps"]
"""Which tasks train a script; descriptions in `STRATEGIES`."""
Order = Literal["given", "gain"]
"""Order of many jobs: `given`: one after the other, each its best on the rest; `gain`: together, by marginal gain."""

STRATEGIES = {
    "auto": "the fastest that keeps the result of the script",
    "one": "one task, as python runs the script",
    "allreduce": "equal workers that share each batch and sum their gradients; the result stays that of python",
    "ps": "workers and parameter servers; asynchronous, unless the script makes its steps synchronous",
}
"""Strategy -> description."""
RULES = {
    "identical_workers": "all workers are alike; without it each machine gives its workers a shape of its own",
    "cpu_gpu_ratio": "a worker has 1, 2, 4, ... GPUs and the CPUs that those can use; without it, any numbers",
    "all_gpus_used": "no GPU is idle that a worker could use, as in the paper; costs speed on slow networks",
}
"""Pruning rule -> description, in order of application."""
MAX_TASK_MEM_MIB = 10**9
"""Maximum memory that a task may request; no machine has more."""
METHODS = {
    "dike": "the best placement that the rules leave, by default of all there are, with a bound",
    "dike_traffic": "least traffic by the paper's Eq. 1 alone, with no GPU idle",
    "one": "one task without parameter servers, as python runs the script",
    "allreduce": "equal workers that share each batch, on the machines where a step is fastest",
    "sar_basic": "equal slices, one ps for 4 workers, as many as fit, on the machines in turn",
    "first_fit": "as tfmesos: the same slices, each task on the first machine with room",
    "optimus": "equal counts on the fewest machines, with the best counts there are",
}
"""Planning method -> description."""
