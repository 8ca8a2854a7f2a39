"""Texts about offers and agents."""

from __future__ import annotations

from framework.mesos.offers import describe_free
from solver import NodeClass


def test_what_is_free_is_described_for_the_first_agents() -> None:
    free = {"cpus": 0.5, "mem": 256.0, "disk": 0.0, "gpus": 1.0}
    nodes = [
        NodeClass(name=f"n{number}", cpus=4, mem_bytes=2**30, gpus=2 * (number == 0), free=free) for number in range(6)
    ]
    words = describe_free(nodes)
    assert words.startswith(" Free are 0.5 of 4 CPUs and 256.0 MiB of 1.0 GiB, 1 of 2 GPUs on n0; 0.5 of 4 CPUs and")
    assert words.endswith(" on n3, and 2 agents more.")
    assert describe_free([NodeClass(name="a", cpus=1, mem_bytes=1)]) == ""
