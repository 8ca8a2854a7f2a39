"""One daemon of Apache Mesos 1.11.0, called out of the library that `framework.embedded.library` makes.

    python -SEsP daemon.py LIBRARY PARENT_PID master
    python -SEsP daemon.py LIBRARY PARENT_PID agent MASTER_HOST:PORT
    python -SEsP daemon.py LIBRARY 0 containerizer launch ...      (started by an agent for each container)

A program of its own that needs the standard library only. A master or agent ends with its parent, the supervisor, whose
process id is given. Settings come from the environment, as with the real daemons: MESOS_*, LIBPROCESS_*,
MESOS_CONTAINERIZER_*.

The library exports the C++ functions that Mesos' own `main` functions call; ctypes calls the same ones in the same
order. No header is needed: objects live in opaque zeroed buffers, and only the layouts of `std::string`, `Option<T>`
and `Try<T>` matter (Itanium ABI on x86-64, GCC 5 strings):

    std::string   32 bytes: pointer to the characters, size, 16 bytes for short texts
    Option<T>     int state at 0 (0 SOME, 1 NONE), T at 8
    Try<T>        Option<T>, then Option<Error>, Error being one std::string; returned through a hidden first pointer
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

OBJECT_BYTES = 1 << 16
"""Room for any object made here; the largest, mesos::internal::slave::Slave, takes 9,376 bytes."""
TRY_POINTER_BYTES = 56
TRY_POINTER_ERROR = 16
"""Size of a `Try<T*>`, and where its `Option<Error>` lies."""
TRY_WARNINGS_BYTES = 72
TRY_WARNINGS_ERROR = 32
"""The same for the `Try<flags::Warnings>` that loading flags returns."""
OWNED_BYTES = 16
NONE_BYTES = 64

FLAGS_BASE_SLOT = 4
PROCESS_BASE_SLOT = 3
"""Where in a vtable, in words before its start, the offset of that virtual base stands."""
LAUNCH_FLAGS_OFFSET = 0xE0
LAUNCH_FLAGS_BASE_OFFSET = 0x168
"""Offsets in a MesosContainerizerLaunch of its flags, and of their FlagsBase (what its `getFlags()` returns)."""

PR_SET_PDEATHSIG = 1

# Parts of mangled names.
STRING = "NSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
OPTION_STRING = f"RK6OptionI{STRING}E"
SLAVE = "_ZN5mesos8internal5slave"
CONTAINERIZER_LAUNCH = f"{SLAVE}24MesosContainerizerLaunch"

# Mangled names; the comment says what each is in C++.
# mesos::internal::logging::initialize(const string& argv0, bool, const Option<Flags>&)
LOGGING_INITIALIZE = f"_ZN5mesos8internal7logging10initializeERK{STRING}bRK6OptionINS1_5FlagsEE"
# process::initialize(const Option<string>& delegate, readwriteRealm, readonlyRealm)
PROCESS_INITIALIZE = f"_ZN7process10initializeERK6OptionI{STRING}ES9_S9_"
# mesos::internal::VersionProcess::VersionProcess()
VERSION_PROCESS = "_ZN5mesos8internal14VersionProcessC1Ev"
# process::spawn(ProcessBase*, bool manage)
SPAWN = "_ZN7process5spawnEPNS_11ProcessBaseEb"
# process::wait(const UPID&, const Duration&)
WAIT = "_ZN7process4waitERKNS_4UPIDERK8Duration"
# flags::FlagsBase::load(const string& prefix)
FLAGS_LOAD = f"_ZN5flags9FlagsBase4loadERK{STRING}"
# flags::FlagsBase::load(const Option<string>& prefix, int argc, const char* const* argv, bool, bool)
FLAGS_LOAD_ARGUMENTS = f"_ZN5flags9FlagsBase4loadERK6OptionI{STRING}EiPKPKcbb"
# mesos::internal::local::Flags::Flags()
LOCAL_FLAGS = "_ZN5mesos8internal5local5FlagsC1Ev"
# mesos::internal::local::launch(const Flags&, mesos::allocator::Allocator*)
LOCAL_LAUNCH = "_ZN5mesos8internal5local6launchERKNS1_5FlagsEPNS_9allocator9AllocatorE"
# mesos::internal::slave::Flags::Flags()
SLAVE_FLAGS = f"{SLAVE}5FlagsC1Ev"
# Fetcher::Fetcher(const Flags&)
FETCHER = f"{SLAVE}7FetcherC1ERKNS1_5FlagsE"
# GarbageCollector::GarbageCollector(const string& workDir)
GARBAGE_COLLECTOR = f"{SLAVE}16GarbageCollectorC1ERK{STRING}"
# mesos::SecretResolver::create(const Option<string>& moduleName)
SECRET_RESOLVER = f"_ZN5mesos14SecretResolver6createE{OPTION_STRING}"
# Containerizer::create(const Flags&, bool local, Fetcher*, GarbageCollector*, SecretResolver*, VolumeGidManager*,
#                       PendingFutureTracker*, CSIServer*)
CONTAINERIZER = (
    f"{SLAVE}13Containerizer6createERKNS1_5FlagsEbPNS1_7FetcherEPNS1_16GarbageCollectorE"
    "PNS_14SecretResolverEPNS1_16VolumeGidManagerEPNS0_20PendingFutureTrackerEPNS1_9CSIServerE"
)
# mesos::master::detector::MasterDetector::create(const Option<string>& zk, masterDetectorModule, Option<Duration>)
MASTER_DETECTOR = f"_ZN5mesos6master8detector14MasterDetector6createE{OPTION_STRING}SC_RKS3_I8DurationE"
# mesos::internal::Files::Files(const Option<string>& authenticationRealm, const Option<Authorizer*>&)
FILES = f"_ZN5mesos8internal5FilesC1E{OPTION_STRING}RKS2_IPNS_10AuthorizerEE"
# TaskStatusUpdateManager::TaskStatusUpdateManager(const Flags&)
STATUS_UPDATE_MANAGER = f"{SLAVE}23TaskStatusUpdateManagerC1ERKNS1_5FlagsE"
# mesos::slave::ResourceEstimator::create(const Option<string>& type)
RESOURCE_ESTIMATOR = f"_ZN5mesos5slave17ResourceEstimator6createE{OPTION_STRING}"
# mesos::slave::QoSController::create(const Option<string>& type)
QOS_CONTROLLER = f"_ZN5mesos5slave13QoSController6createE{OPTION_STRING}"
# Slave::Slave(const string& id, const Flags&, MasterDetector*, Containerizer*, Files*, GarbageCollector*,
#              TaskStatusUpdateManager*, ResourceEstimator*, QoSController*, SecretGenerator*, VolumeGidManager*,
#              PendingFutureTracker*, Owned<CSIServer>&&, const Option<unix::Socket>&, const Option<Authorizer*>&)
SLAVE_PROCESS = (
    f"{SLAVE}5SlaveC1ERK{STRING}RKNS1_5FlagsEPNS_6master8detector14MasterDetectorE"
    "PNS1_13ContainerizerEPNS0_5FilesEPNS1_16GarbageCollectorE"
    "PNS1_23TaskStatusUpdateManagerEPNS_5slave17ResourceEstimatorEPNSQ_13QoSControllerE"
    "PNS_15SecretGeneratorEPNS1_16VolumeGidManagerEPNS0_20PendingFutureTrackerE"
    "ON7process5OwnedINS1_9CSIServerEEERK6OptionINS11_7network8internal6SocketI"
    "NS17_4unix7AddressEEEERKS16_IPNS_10AuthorizerEE"
)
# MesosContainerizerLaunch::Flags::Flags() and MesosContainerizerLaunch::execute()
LAUNCH_FLAGS = f"{CONTAINERIZER_LAUNCH}5FlagsC1Ev"
LAUNCH_EXECUTE = f"{CONTAINERIZER_LAUNCH}7executeEv"


class String(ctypes.Structure):
    """A `std::string` that points at bytes owned by Python."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
        ("local", ctypes.c_char * 16),
    ]

    def __init__(self, text: str = "") -> None:
        self.owned = ctypes.create_string_buffer(text.encode())
        super().__init__(ctypes.addressof(self.owned), len(self.owned) - 1)


class OptionString(ctypes.Structure):
    """An `Option<std::string>`; `None` is Mesos' NONE."""

    _fields_ = [("state", ctypes.c_int), ("value", String)]

    def __init__(self, text: str | None = None) -> None:
        self.owned = String(text or "")
        super().__init__(1 if text is None else 0, self.owned)


def zeroed(size_bytes: int = OBJECT_BYTES) -> Any:
    """Memory for a C++ object."""
    return ctypes.create_string_buffer(size_bytes)


def none() -> Any:
    """An `Option<T>` that is NONE, whatever T is."""
    option = zeroed(NONE_BYTES)
    option[0] = 1
    return option


class Mesos:
    """The library, with the calls that both daemons need."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path, mode=os.RTLD_GLOBAL | os.RTLD_LAZY)
        self._kept: list[Any] = []  # C++ holds pointers to these until the process ends.

    def call(self, symbol: str, *arguments: Any) -> None:
        """Calls a C++ function: an int is passed as a pointer, a ctypes number by value, anything else by address."""
        function = getattr(self._library, symbol)
        function.restype = None
        function(*(self._passed(argument) for argument in arguments))

    @staticmethod
    def _passed(argument: Any) -> Any:
        if isinstance(argument, int):
            return ctypes.c_void_p(argument)
        return argument if isinstance(argument, ctypes.c_bool | ctypes.c_int) else ctypes.byref(argument)

    def construct(self, symbol: str, *arguments: Any) -> Any:
        """A C++ object that lives as long as the process."""
        made = zeroed()
        self._kept.extend((made, arguments))
        self.call(symbol, made, *arguments)
        return made

    def create(self, symbol: str, *arguments: Any) -> int:
        """Address of what a factory makes that returns `Try<T*>`."""
        result = zeroed(TRY_POINTER_BYTES)
        self._kept.append(arguments)
        self.call(symbol, result, *arguments)
        check(result, TRY_POINTER_ERROR)
        return int.from_bytes(result.raw[8:16], "little")

    def load_flags(self, flags: Any) -> None:
        """Fills `flags` from the environment's MESOS_ variables."""
        result = zeroed(TRY_WARNINGS_BYTES)
        self.call(FLAGS_LOAD, result, virtual_base(flags, FLAGS_BASE_SLOT), String("MESOS_"))
        check(result, TRY_WARNINGS_ERROR)

    def initialize(self, program: str, delegate: str, realms: Sequence[str | None] = (None, None)) -> None:
        """Starts logging and libprocess; requests without a process' name go to `delegate`."""
        self.call(LOGGING_INITIALIZE, String(program), ctypes.c_bool(False), none())
        self.call(PROCESS_INITIALIZE, OptionString(delegate), OptionString(realms[0]), OptionString(realms[1]))
        self.spawn(self.construct(VERSION_PROCESS))

    def spawn(self, process: Any) -> Any:
        """Starts a libprocess process; returns its UPID."""
        upid = zeroed()
        self.call(SPAWN, upid, virtual_base(process, PROCESS_BASE_SLOT), ctypes.c_bool(False))
        return upid

    def wait(self, upid: Any) -> None:
        """Waits until the libprocess process has ended."""
        self.call(WAIT, upid, ctypes.c_int64(-(10**9)))

    def execute(self, launch: Any) -> int:
        """Runs `mesos-containerizer launch`."""
        function = getattr(self._library, LAUNCH_EXECUTE)
        function.restype = ctypes.c_int
        return int(function(ctypes.byref(launch)))


def check(result: Any, error_offset: int) -> None:
    """Ends the process with the message of a `Try` that is an error."""
    if int.from_bytes(result.raw[0:4], "little"):
        message = String.from_buffer(result, error_offset + 8)
        raise SystemExit("mesos: " + ctypes.string_at(message.data, message.size).decode(errors="replace"))


def virtual_base(made: Any, slot: int) -> int:
    """Address of an object's virtual base."""
    vtable = ctypes.c_void_p.from_buffer(made).value
    if vtable is None:
        raise SystemExit("mesos: an object has no vtable")
    return int(ctypes.addressof(made) + ctypes.c_int64.from_address(vtable - 8 * slot).value)


def run_master(mesos: Mesos) -> int:
    """Runs a master until it ends; Mesos' local mode with no agents in the process."""
    mesos.initialize("mesos-master", "master")
    flags = mesos.construct(LOCAL_FLAGS)
    os.environ["MESOS_NUM_SLAVES"] = "0"
    mesos.load_flags(flags)
    upid = zeroed()
    mesos.call(LOCAL_LAUNCH, upid, flags, 0)
    mesos.wait(upid)
    return 0


def run_agent(mesos: Mesos, master: str) -> int:
    """Runs an agent of `master` until it ends: what src/slave/main.cpp does, less what is optional."""
    mesos.initialize("mesos-agent", "slave(1)", ("mesos-agent-readwrite", "mesos-agent-readonly"))
    flags = mesos.construct(SLAVE_FLAGS)
    mesos.load_flags(flags)
    fetcher = mesos.construct(FETCHER, flags)
    collector = mesos.construct(GARBAGE_COLLECTOR, String(os.environ["MESOS_WORK_DIR"]))
    resolver = mesos.create(SECRET_RESOLVER, none())
    containerizer = mesos.create(CONTAINERIZER, flags, ctypes.c_bool(False), fetcher, collector, resolver, 0, 0, 0)
    detector = mesos.create(MASTER_DETECTOR, OptionString(master), none(), none())
    files = mesos.construct(FILES, OptionString("mesos-agent-readonly"), none())
    updates = mesos.construct(STATUS_UPDATE_MANAGER, flags)
    estimator = mesos.create(RESOURCE_ESTIMATOR, none())
    controller = mesos.create(QOS_CONTROLLER, none())
    parts = (detector, containerizer, files, collector, updates, estimator, controller, 0, 0, 0)
    slave = mesos.construct(SLAVE_PROCESS, String("slave(1)"), flags, *parts, zeroed(OWNED_BYTES), none(), none())
    mesos.wait(mesos.spawn(slave))
    return 0


def run_containerizer(mesos: Mesos, arguments: Sequence[str]) -> int:
    """Runs `mesos-containerizer launch`, which becomes the executor."""
    launch = zeroed()
    start = ctypes.addressof(launch)
    mesos.call(LAUNCH_FLAGS, start + LAUNCH_FLAGS_OFFSET)
    argv = (ctypes.c_char_p * (len(arguments) + 1))(*(os.fsencode(argument) for argument in arguments))
    result = zeroed(TRY_WARNINGS_BYTES)
    no = ctypes.c_bool(False)
    prefix, count = OptionString("MESOS_CONTAINERIZER_"), ctypes.c_int(len(arguments))
    mesos.call(FLAGS_LOAD_ARGUMENTS, result, start + LAUNCH_FLAGS_BASE_OFFSET, prefix, count, argv, no, no)
    check(result, TRY_WARNINGS_ERROR)
    return mesos.execute(launch)


def end_with(parent: int) -> None:
    """Has the system kill this process when `parent`, its parent, ends."""
    prctl: Callable[..., int] = ctypes.CDLL(None).prctl
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # It has ended already.
        os._exit(1)


def main(library: str, parent: str, kind: str, *arguments: str) -> int:
    if kind == "containerizer":
        return run_containerizer(Mesos(library), arguments)
    end_with(int(parent))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's handler would never run inside C++.
    mesos = Mesos(library)
    return run_master(mesos) if kind == "master" else run_agent(mesos, *arguments)


if __name__ == "__main__":
    status = 1
    try:
        status = main(*sys.argv[1:])
    except SystemExit as stop:
        print(stop, file=sys.stderr, flush=True)
    finally:
        os._exit(status)  # C++ destructors would run in the wrong order.
