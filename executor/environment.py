"""The environment of the processes that a slot runs."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence

from dike import process


def process_environment(cpus: float, own: Mapping[str, str], gpu_devices: Sequence[int] | None) -> dict[str, str]:
    """This process' environment, with thread pools and visible GPUs as the slot has them.

    Args:
        cpus: the slot's CPUs.
        own: variables that the user has set for the job or the search.
        gpu_devices: the slot's GPUs; None where Mesos isolates GPUs itself.
    """
    threads = str(max(1, math.ceil(cpus)))
    environment = {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        # Not the threads between ops: a server with too few of them waits for itself.
        "TF_NUM_INTRAOP_THREADS": threads,
        "OMP_NUM_THREADS": threads,
        **own,
        process.PARENT_VARIABLE: str(os.getpid()),
    }
    if gpu_devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpu_devices)) or "-1"
        # NVIDIA's management library, by which we look at the same devices, counts them in this order.
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    return environment
