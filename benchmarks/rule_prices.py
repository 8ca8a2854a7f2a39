"""What each rule that prunes the options costs in speed, by exploring outside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from framework.project.profiling import load_profile
from solver import Cluster, NodeClass, PlanRequest
from solver.choices import RULES
from solver.explore import RulePrice, explore
from solver.units import GIB

TITLE = "What the rules cost"
MODELS = ("ResNet50", "VGG16")
SPEEDS_GBPS = (1.0, 10.0)
LIMIT_S = 20.0


def measure() -> Iterator[str]:
    """Lines of a Markdown table: one row for each case, one column for each rule."""
    yield "Five machines of 8 CPUs, 4 K80 and 32 GiB, batch 32 a GPU. Each figure is the share of the speed that the"
    yield f"rule costs, or would cost where it is off by default, found by `--explore` in {LIMIT_S:.0f} s; *so far*:"
    yield "not proven in that time."
    yield ""
    yield f"| model | training | network | {' | '.join(RULES)} |"
    yield "|---|---|---|" + "---|" * len(RULES)
    for name in MODELS:
        profile = load_profile(f"keras:{name}", batch_size=32)
        for synchronous in (True, False):
            for gbps in SPEEDS_GBPS:
                node = NodeClass(
                    name="k80",
                    count=5,
                    cpus=8,
                    mem_bytes=32 * GIB,
                    gpus=4,
                    gpu_model="K80",
                    disk_bytes=100 * GIB,
                    network_gbps=gbps,
                )
                model = dataclasses.replace(profile, synchronous=synchronous)
                found = explore(PlanRequest(model, Cluster((node,)), time_limit_s=LIMIT_S))
                prices = {price.rule: _shown(price) for price in found.prices}
                how = "synchronous" if synchronous else "asynchronous"
                yield f"| {name} | {how} | {gbps:g} Gb/s | {' | '.join(prices[rule] for rule in RULES)} |"


def _shown(price: RulePrice) -> str:
    if price.cost is None:
        return "-"
    return f"{price.cost:.1%}{'' if price.proven else ' so far'}"
