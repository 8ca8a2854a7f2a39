"""The pruning rules by name, and their application."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from dike.exceptions import BadInputError
from solver.choices import RULES
from solver.hardware import Hardware
from solver.nodes import NodeKind
from solver.options.all_gpus_used import all_gpus_used
from solver.options.cpu_gpu_ratio import cpu_gpu_ratio
from solver.options.identical_workers import identical_workers
from solver.options.space import OptionSpace, Pruning
from solver.options.task_counts import task_counts
from solver.resources import TaskSizes

_DEFAULTS: dict[str, frozenset[str]] = {
    "throughput": frozenset({"cpu_gpu_ratio"}),
    "traffic": frozenset(RULES),
}
PAPER = frozenset({"identical_workers", "cpu_gpu_ratio"})
"""The paper's first two rules; the third, the numbers of tasks, always applies. Its lower bound on the workers is
`all_gpus_used`, in a strict form."""
_SETS = ("all", "none", "default", "paper")


def default_rules(objective: str) -> frozenset[str]:
    """The rules that apply by default.

    Eq. 1 alone is least with one worker, so `traffic` needs the paper's lower bound; `throughput` finds the number, and
    needs only the rule on a worker's own size.
    """
    return _DEFAULTS[objective]


def parse_rules(text: str, objective: str = "throughput") -> frozenset[str]:
    """Parses a list of rules.

    Args:
        text: comma-separated names; `all`, `none`, `default` and `paper` stand for sets; `-name` removes a rule, and at
            the start of the list removes it from the default.
        objective: `throughput` or `traffic`; they have different defaults.

    Raises:
        BadInputError: if there is no such rule.
    """
    items = [item.strip() for item in text.split(",")]
    chosen = default_rules(objective) if items[0].startswith("-") else frozenset()
    for item in items:
        name = item.removeprefix("-")
        if item in _SETS:
            sets = {"all": frozenset(RULES), "none": frozenset(), "default": default_rules(objective), "paper": PAPER}
            chosen |= sets[item]
        else:
            check_rules([name])
            chosen = chosen - {name} if item.startswith("-") else chosen | {name}
    return chosen


def check_rules(names: Sequence[str]) -> None:
    """Raises `BadInputError` if one of them is not a rule."""
    for name in names:
        if name not in RULES:
            raise BadInputError(
                f"'{name}' is not a rule; rules are {', '.join(RULES)}, and {', '.join(_SETS)} stand for sets of them."
            )


def prune(
    space: OptionSpace,
    rules: AbstractSet[str],
    kinds: Sequence[NodeKind],
    hardware: Hardware,
    sizes: TaskSizes,
    useful_ps: int,
) -> tuple[Pruning, ...]:
    """Applies the rules one after the other.

    `rules`: names of the enabled rules. `useful_ps`: number of ps beyond which the largest shard does not shrink.
    """
    prunings: list[Pruning] = []

    def add(pruning: Pruning) -> OptionSpace:
        prunings.append(pruning)
        return pruning.space

    if "identical_workers" in rules:
        space = add(identical_workers(space))
    if "cpu_gpu_ratio" in rules:
        space = add(cpu_gpu_ratio(space, kinds, hardware, sizes))
    space = add(task_counts(space, kinds, sizes, useful_ps))
    if "all_gpus_used" in rules:
        space = add(all_gpus_used(space, kinds, hardware, sizes))
    return tuple(prunings)
