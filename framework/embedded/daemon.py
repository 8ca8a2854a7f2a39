"""One daemon of Apache Mesos 1.11.0, run from the library that `framework.embedded.library` makes.

    python -SEsP daemon.py LIBRARY PARENT_PID master
    python -SEsP daemon.py LIBRARY PARENT_PID master zk://HOST:PORT/PATH
    python -SEsP daemon.py LIBRARY PARENT_PID agent MASTER_HOST:PORT or zk://HOST:PORT/PATH
    python -SEsP daemon.py LIBRARY 0 containerizer launch ...      (started by an agent for each container)

A program of its own that needs only the standard library. A master or agent ends with its parent, the supervisor.
Settings are environment variables, as with the real daemons: MESOS_*, LIBPROCESS_*, MESOS_CONTAINERIZER_*.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

# Started without site packages, where Dike is installed; appended, so that the standard library has precedence.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from framework.embedded.libmesos import names
from framework.embedded.libmesos.calls import (
    OWNED_BYTES,
    TRY_WARNINGS_BYTES,
    TRY_WARNINGS_ERROR,
    Mesos,
    OptionString,
    String,
    check,
    none,
    some_duration,
    state_on,
    zeroed,
)

LAUNCH_FLAGS_OFFSET = 0xE0
LAUNCH_FLAGS_BASE_OFFSET = 0x168
"""Offsets in a MesosContainerizerLaunch of its flags, and of their FlagsBase (what its `getFlags()` returns)."""
PR_SET_PDEATHSIG = 1
ZOOKEEPER_SESSION_S = 2.0
"""Session timeout, or ZooKeeper's minimum, after which an unreachable master loses its leadership."""


def run_master(mesos: Mesos) -> int:
    """Runs a single master until it ends: Mesos' local mode with no agents in the process."""
    mesos.initialize("mesos-master", "master")
    flags = mesos.construct(names.LOCAL_FLAGS)
    os.environ["MESOS_NUM_SLAVES"] = "0"
    mesos.load_flags(flags)
    upid = zeroed()
    mesos.call(names.LOCAL_LAUNCH, upid, flags, 0)
    mesos.wait(upid)
    return 0


def run_candidate(mesos: Mesos, zookeeper: str) -> int:
    """Runs an elected master until it ends, like src/master/main.cpp without optional parts."""
    mesos.initialize("mesos-master", "master")
    flags = mesos.construct(names.MASTER_FLAGS)
    mesos.load_flags(flags)
    allocator = mesos.construct(names.ALLOCATOR)
    realm = OptionString("mesos-master-readonly")
    registrar = mesos.construct(names.REGISTRAR, flags, state_on(mesos.construct(names.IN_MEMORY_STORAGE)), realm)
    files = mesos.construct(names.FILES, realm, none())
    election = (OptionString(zookeeper), none(), some_duration(ZOOKEEPER_SESSION_S))
    contender = mesos.create(names.MASTER_CONTENDER, *election)
    detector = mesos.create(names.MASTER_DETECTOR, *election)
    parts = (allocator, registrar, files, contender, detector)
    mesos.wait(mesos.spawn(mesos.construct(names.MASTER_PROCESS, *parts, none(), none(), flags)))
    return 0


def run_agent(mesos: Mesos, master: str) -> int:
    """Runs an agent of `master` until it ends, like src/slave/main.cpp without optional parts."""
    mesos.initialize("mesos-agent", "slave(1)")
    flags = mesos.construct(names.SLAVE_FLAGS)
    mesos.load_flags(flags)
    fetcher = mesos.construct(names.FETCHER, flags)
    collector = mesos.construct(names.GARBAGE_COLLECTOR, String(os.environ["MESOS_WORK_DIR"]))
    resolver = mesos.create(names.SECRET_RESOLVER, none())
    containerizer = mesos.create(
        names.CONTAINERIZER, flags, ctypes.c_bool(False), fetcher, collector, resolver, 0, 0, 0
    )
    detector = mesos.create(names.MASTER_DETECTOR, OptionString(master), none(), none())
    files = mesos.construct(names.FILES, OptionString("mesos-agent-readonly"), none())
    updates = mesos.construct(names.STATUS_UPDATE_MANAGER, flags)
    estimator = mesos.create(names.RESOURCE_ESTIMATOR, none())
    controller = mesos.create(names.QOS_CONTROLLER, none())
    parts = (detector, containerizer, files, collector, updates, estimator, controller, 0, 0, 0)
    slave = mesos.construct(names.SLAVE_PROCESS, String("slave(1)"), flags, *parts, zeroed(OWNED_BYTES), none(), none())
    mesos.wait(mesos.spawn(slave))
    return 0


def run_containerizer(mesos: Mesos, arguments: Sequence[str]) -> int:
    """Runs `mesos-containerizer launch`, which becomes the executor."""
    launch = zeroed()
    start = ctypes.addressof(launch)
    mesos.call(names.LAUNCH_FLAGS, start + LAUNCH_FLAGS_OFFSET)
    argv = (ctypes.c_char_p * (len(arguments) + 1))(*(os.fsencode(argument) for argument in arguments))
    result = zeroed(TRY_WARNINGS_BYTES)
    no = ctypes.c_bool(False)
    prefix, count = OptionString("MESOS_CONTAINERIZER_"), ctypes.c_int(len(arguments))
    mesos.call(names.FLAGS_LOAD_ARGUMENTS, result, start + LAUNCH_FLAGS_BASE_OFFSET, prefix, count, argv, no, no)
    check(result, TRY_WARNINGS_ERROR)
    return mesos.execute(launch)


def die_with_parent(parent: int) -> None:
    prctl: Callable[..., int] = ctypes.CDLL(None).prctl
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # It ended before the call.
        os._exit(1)


def main(library: str, parent: str, kind: str, *arguments: str) -> int:
    if kind == "containerizer":
        return run_containerizer(Mesos(library), arguments)
    die_with_parent(int(parent))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's handler would never run inside C++.
    mesos = Mesos(library)
    if kind == "agent":
        return run_agent(mesos, *arguments)
    return run_candidate(mesos, *arguments) if arguments else run_master(mesos)


if __name__ == "__main__":
    status = 1
    try:
        status = main(*sys.argv[1:])
    except SystemExit as stop:
        print(stop, file=sys.stderr, flush=True)
    except Exception:  # Shown here, as the process ends below.
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)  # C++ destructors would run in the wrong order.
