"""Eq. 1 of the paper 'Dike', repaired: bytes moved between tasks in one step, weighted by distance.

The paper sums Mem_j * Conn_jk * Cost_in + Mem_j * (1 - Conn_jk) * Cost_out over every ps j and worker k. As printed,
nothing ties Conn_jk to the placement; here Conn_jk is 1 exactly when ps j and worker k share a machine.
"""

from __future__ import annotations

COST_WITHIN_NODE = 0.1
COST_BETWEEN_NODES = 1.0


def weighted_traffic(total_bytes: int, workers: int, local_bytes: float) -> float:
    """Eq. 1 in weighted bytes.

    Args:
        total_bytes: size of all shards.
        workers: number of workers; each moves every shard.
        local_bytes: sum over machines of shard bytes times workers there, which need no network.
    """
    return COST_BETWEEN_NODES * total_bytes * workers - (COST_BETWEEN_NODES - COST_WITHIN_NODE) * local_bytes
