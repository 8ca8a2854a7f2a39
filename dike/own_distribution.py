"""Scripts that distribute themselves: what their library expects in the environment of each of their processes."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
from collections.abc import Sequence
from typing import Any

from dike.interception import after_import

LOCALHOST = "127.0.0.1"
COLLECTIVE_STRATEGY = "MultiWorkerMirroredStrategy"
"""TensorFlow's strategy of equal workers."""


def install(addresses: Sequence[str], index: int, *, has_gpu: bool) -> None:
    """Sets what the libraries read in process `index` of those at `addresses` (`host:port`), before the script runs."""
    os.environ.update(variables(addresses, index, has_gpu=has_gpu))
    after_import("jax.distributed", functools.partial(_complete_arguments, len(addresses), index))


def free_ports(count: int) -> list[int]:
    """Different ports of loopback that no process uses now."""
    with contextlib.ExitStack() as reserved:
        servers = [reserved.enter_context(socket.create_server((LOCALHOST, 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in servers]


def variables(addresses: Sequence[str], index: int, *, has_gpu: bool) -> dict[str, str]:
    """`TF_CONFIG` for TensorFlow's `MultiWorkerMirroredStrategy`; for PyTorch what torchrun sets; JAX's own variables.

    A process with a GPU sees only that one, so it is alone on its machine for PyTorch.
    """
    host, _, port = addresses[0].rpartition(":")
    hosts = [address.rpartition(":")[0] for address in addresses]
    own = hosts[index]
    local = (0, 1) if has_gpu else (hosts[:index].count(own), hosts.count(own))
    config = {"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": index}}
    return {
        "TF_CONFIG": json.dumps(config),
        "RANK": str(index),
        "WORLD_SIZE": str(len(addresses)),
        "LOCAL_RANK": str(local[0]),
        "LOCAL_WORLD_SIZE": str(local[1]),
        "MASTER_ADDR": host.strip("[]"),
        "MASTER_PORT": port,
        "JAX_COORDINATOR_ADDRESS": addresses[0],
        "JAX_NUM_PROCESSES": str(len(addresses)),
        "JAX_PROCESS_ID": str(index),
    }


def _complete_arguments(size: int, index: int, distributed: Any) -> None:
    """Makes JAX's `initialize()` without arguments find the processes; of the variables it reads only the address."""
    own = distributed.initialize

    @functools.wraps(own)
    def initialize(
        coordinator_address: Any = None, num_processes: Any = None, process_id: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        number = size if num_processes is None else num_processes
        own(coordinator_address, number, index if process_id is None else process_id, *args, **kwargs)

    distributed.initialize = initialize
