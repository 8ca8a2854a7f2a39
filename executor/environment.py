"""The environment of the processes that a slot runs, and of the zygote that they are forked from."""

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

ZYGOTES_VARIABLE = "DIKE_ZYGOTES"
"""Optional environment variable of an executor: socket of this machine's zygote server (`executor.zygote_server`)."""

_SET_IN_FORKS = re.compile(
    r"(MESOS|LIBPROCESS|DIKE)_\w+|(OMP|OPENBLAS|GOTO)_NUM_THREADS|TF_NUM_INTRAOP_THREADS|CUDA_(VISIBLE_DEVICES|DEVICE_ORDER)"
    r"|PATH|TMPDIR|PWD|OLDPWD|SHLVL|_"
)
"""Variables that no library reads as it is imported, or whose effect a fork gets from `dike.zygote`; the others are the
same in a zygote and in its forks."""
_NEED_NUMPY = {"tensorflow", "keras", "tf_keras", "scipy", "pandas", "sklearn", "matplotlib", "h5py"}
"""What imports it in any case: whether a script names it besides is no reason for another zygote."""
_TENSORFLOW_AND_KERAS = ("tensorflow", "keras")
"""Either imports the other, so a script that names one shares the zygote of one that names both."""
_OTHER_KERAS = {"KERAS_BACKEND", "TF_USE_LEGACY_KERAS"}
"""Unless one of these variables is set."""


@dataclass(frozen=True)
class ZygoteKind:
    """What a zygote has in memory. Forks of zygotes of the same kind are alike.

    Attributes:
        launcher: module that turns a fork into a process of a job or of a search (`dike.zygote`).
        preload: modules that it imports.
        environment: its variables, in the order of their names.
        python: the interpreter.
        version: Dike's.
    """

    launcher: str
    preload: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    python: str = sys.executable
    version: str = __version__

    def changes(self, environment: Mapping[str, str]) -> dict[str, str | None]:
        """What a fork has to change to get this environment; None unsets a variable."""
        own = dict(self.environment)
        changes: dict[str, str | None] = {name: text for name, text in environment.items() if own.get(name) != text}
        return changes | dict.fromkeys(own.keys() - environment.keys())

    def dumps(self) -> str:
        """The kind as JSON text."""
        return json.dumps(dataclasses.astuple(self))

    @classmethod
    def loads(cls, text: str) -> ZygoteKind:
        """Reads what `dumps` wrote."""
        launcher, preload, environment, python, version = json.loads(text)
        return cls(launcher, tuple(preload), tuple((name, value) for name, value in environment), python, version)


@dataclass(frozen=True)
class Setup:
    """How a slot's processes are set up.

    Attributes:
        launcher, preload: of their zygote.
        environment: variables that the user has set for the job or the search, and ours.
        cpus: the slot's CPUs.
        gpu_devices: the slot's GPUs; None where Mesos isolates GPUs itself.
    """

    launcher: str
    preload: tuple[str, ...]
    environment: Mapping[str, str]
    cpus: float = 1.0
    gpu_devices: Sequence[int] | None = None

    def kind(self, base: Mapping[str, str]) -> ZygoteKind:
        """The zygote to fork them from.

        Args:
            base: the executor's environment.
        """
        values = {name: value for name, value in base.items() if name != "LC_CTYPE"}  # Python's own doing
        values |= process_environment(self, {})
        kept = {name: value for name, value in values.items() if not _SET_IN_FORKS.fullmatch(name)}
        libraries = {name.partition(".")[0] for name in self.preload}
        shared = () if kept.keys() & _OTHER_KERAS else _TENSORFLOW_AND_KERAS
        named = [name for name in self.preload if name != "numpy" or not libraries & _NEED_NUMPY]
        preload = dict.fromkeys(each for name in named for each in (shared if name in shared else (name,)))
        return ZygoteKind(self.launcher, tuple(preload), tuple(sorted(kept.items())))


def process_environment(setup: Setup, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a slot's processes, with thread pools and visible GPUs as the slot has them.

    Args:
        setup: the slot's.
        base: the executor's environment.
    """
    threads = str(max(1, math.ceil(setup.cpus)))
    environment = {
        **base,
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        # Not the threads between ops: a server with too few of them waits for itself.
        "TF_NUM_INTRAOP_THREADS": threads,
        "OMP_NUM_THREADS": threads,
        **setup.environment,
        process.PARENT_VARIABLE: str(os.getpid()),
    }
    if setup.gpu_devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, setup.gpu_devices)) or "-1"
        # NVIDIA's management library, by which we look at the same devices, counts them in this order.
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    return environment


def zygote_environment(kind: ZygoteKind) -> dict[str, str]:
    """The whole environment of a zygote of a kind.

    Its thread pools have one thread, which a fork cannot lose; forks give them more (`dike.zygote`).
    """
    inherited = {name: os.environ[name] for name in ("PATH",) if name in os.environ}
    return {**inherited, **dict(kind.environment), "OMP_NUM_THREADS": "1"}
