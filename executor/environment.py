"""The environment variables of a slot's processes and of their zygote."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dike import process
from dike._version import __version__
from dike.trial.spec import GPU_MEMORY_VARIABLE

ZYGOTES_VARIABLE = "DIKE_ZYGOTES"
"""Optional variable of an executor: socket of this machine's zygote server (`executor.zygote_server`)."""

_SET_IN_FORKS = re.compile(
    r"(MESOS|LIBPROCESS|DIKE)_\w+|(OMP|OPENBLAS|GOTO)_NUM_THREADS|TF_NUM_INTRAOP_THREADS|CUDA_(VISIBLE_DEVICES|DEVICE_ORDER)"
    r"|PATH|TMPDIR|PWD|OLDPWD|SHLVL|_"
)
"""Variables that no library reads on import, or that `dike.zygote` applies in a fork; all others are the same in a
zygote and in its forks.
"""
_IMPORTS_NUMPY = {"tensorflow", "keras", "tf_keras", "scipy", "pandas", "sklearn", "matplotlib", "h5py"}
"""Libraries that import NumPy anyway: scripts that differ only in naming it share a zygote."""
_TENSORFLOW_AND_KERAS = ("tensorflow", "keras")
"""Each imports the other, so scripts that name one or both share a zygote."""
_KERAS_VARIABLES = {"KERAS_BACKEND", "TF_USE_LEGACY_KERAS"}
"""Not if one of these variables is set: it selects another Keras."""


CONTEXT_BYTES = 512 << 20
"""GPU memory of a process that its libraries do not allocate: the CUDA context with its kernels."""


def gpu_memory_variables(total_bytes: int | None, slots: int) -> dict[str, str]:
    """The variables that limit a process to its share of the memory of a GPU.

    JAX reads the second one, NVIDIA's MPS the third one if its daemon runs; `dike.trial.launch` sets the limits of
    TensorFlow and PyTorch.

    Args:
        total_bytes: memory of the GPU; None if unknown, for no limits.
        slots: number of slots that share it; 1 for no limits.
    """
    if total_bytes is None or slots == 1:
        return {}
    share = total_bytes // slots
    own = max(share // 2, share - CONTEXT_BYTES)
    return {
        GPU_MEMORY_VARIABLE: str(own >> 20),
        "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{own / total_bytes:.3f}",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={share >> 20}M",
    }


@dataclass(frozen=True)
class ZygoteKind:
    """Identifies equivalent zygotes: forks of zygotes of one kind are interchangeable.

    Attributes:
        launcher: module that runs in a fork, of a job or of a search (`dike.zygote`).
        preload: modules that the zygote imports.
        environment: its variables, sorted by name.
        python: the interpreter.
        version: Dike's.
    """

    launcher: str
    preload: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    python: str = sys.executable
    version: str = __version__

    def changes(self, environment: Mapping[str, str]) -> dict[str, str | None]:
        """Changes that turn a fork's environment into this one; None unsets a variable."""
        own = dict(self.environment)
        changes: dict[str, str | None] = {name: text for name, text in environment.items() if own.get(name) != text}
        return changes | dict.fromkeys(own.keys() - environment.keys())

    def dumps(self) -> str:
        return json.dumps(dataclasses.astuple(self))

    @classmethod
    def loads(cls, text: str) -> ZygoteKind:
        launcher, preload, environment, python, version = json.loads(text)
        return cls(launcher, tuple(preload), tuple((name, value) for name, value in environment), python, version)


@dataclass(frozen=True)
class Setup:
    """Configuration of a slot's processes. `gpu_devices` is None if Mesos isolates GPUs."""

    launcher: str
    preload: tuple[str, ...]
    environment: Mapping[str, str]
    cpus: float = 1.0
    gpu_devices: Sequence[int] | None = None

    def kind(self, base: Mapping[str, str]) -> ZygoteKind:
        """The kind of zygote to fork from. `base` is the executor's environment."""
        values = {name: value for name, value in base.items() if name != "LC_CTYPE"}  # set by Python itself
        values |= process_environment(self, {})
        kept = {name: value for name, value in values.items() if not _SET_IN_FORKS.fullmatch(name)}
        libraries = {name.partition(".")[0] for name in self.preload}
        shared = () if kept.keys() & _KERAS_VARIABLES else _TENSORFLOW_AND_KERAS
        named = [name for name in self.preload if name != "numpy" or not libraries & _IMPORTS_NUMPY]
        preload = dict.fromkeys(each for name in named for each in (shared if name in shared else (name,)))
        return ZygoteKind(self.launcher, tuple(preload), tuple(sorted(kept.items())))


def process_environment(setup: Setup, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a slot's processes, with its thread pool sizes and visible GPUs."""
    threads = str(max(1, math.ceil(setup.cpus)))
    environment = {
        **base,
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        # Not the inter-op threads: with too few of them a server deadlocks.
        "TF_NUM_INTRAOP_THREADS": threads,
        "OMP_NUM_THREADS": threads,
        **setup.environment,
        process.PARENT_VARIABLE: str(os.getpid()),
    }
    if setup.gpu_devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, setup.gpu_devices)) or "-1"
        # The order of NVML, which the slot uses to watch the same devices.
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    return environment


def zygote_environment(kind: ZygoteKind) -> dict[str, str]:
    """The whole environment of a zygote of a kind.

    Its thread pools have one thread, which a fork cannot lose; forks resize them (`dike.zygote`).
    """
    inherited = {name: os.environ[name] for name in ("PATH",) if name in os.environ}
    return {**inherited, **dict(kind.environment), "OMP_NUM_THREADS": "1"}
