"""Calls Mesos' C++ functions in the library that `framework.embedded.library` makes.

The library exports the C++ functions that Mesos' own `main` functions call; ctypes calls the same ones in the same
order. No header is needed: objects are opaque zeroed buffers, and only the layouts of `std::string`, `Option<T>` and
`Try<T>` matter (Itanium ABI on x86-64, GCC 5 strings):

    std::string   32 bytes: pointer to the characters, size, 16 bytes for short texts
    Option<T>     int state at 0 (0 SOME, 1 NONE), T at 8
    Try<T>        Option<T>, then Option<Error>, Error being one std::string; returned through a hidden first pointer
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

from framework.embedded.libmesos import names
from framework.embedded.libmesos.peers import accept_own_account

OBJECT_BYTES = 1 << 16
"""Size of the buffer of any object; the largest, mesos::internal::slave::Slave, has 9,376 bytes."""
TRY_POINTER_BYTES = 56
TRY_POINTER_ERROR = 16
"""Size of a `Try<T*>`, and offset of its `Option<Error>`."""
TRY_WARNINGS_BYTES = 72
TRY_WARNINGS_ERROR = 32
"""The same for the `Try<flags::Warnings>` that loading flags returns."""
OWNED_BYTES = 16
NONE_BYTES = 64

FLAGS_BASE_SLOT = 4
PROCESS_BASE_SLOT = 3
"""Position in a vtable, in words before its start, of the offset of that virtual base."""


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
    return ctypes.create_string_buffer(size_bytes)


def none() -> Any:
    """A NONE of any `Option<T>`."""
    option = zeroed(NONE_BYTES)
    option[0] = 1
    return option


def some_duration(seconds: float) -> Any:
    """An `Option<Duration>`, which counts nanoseconds."""
    option = zeroed(NONE_BYTES)
    ctypes.c_int64.from_buffer(option, 8).value = int(seconds * 1e9)
    return option


def state_on(storage: Any) -> Any:
    """A `mesos::state::State`, which has no constructor to call: an unused vtable and a `Storage*`."""
    return (ctypes.c_void_p * 2)(None, ctypes.addressof(storage))


class Mesos:
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
        """Constructs a C++ object that lives as long as the process."""
        made = zeroed()
        self._kept.extend((made, arguments))
        self.call(symbol, made, *arguments)
        return made

    def create(self, symbol: str, *arguments: Any) -> int:
        """Calls a factory that returns `Try<T*>`; returns the address of its object."""
        result = zeroed(TRY_POINTER_BYTES)
        self._kept.append(arguments)
        self.call(symbol, result, *arguments)
        check(result, TRY_POINTER_ERROR)
        return int.from_bytes(result.raw[8:16], "little")

    def load_flags(self, flags: Any) -> None:
        """Fills `flags` from the MESOS_ environment variables."""
        result = zeroed(TRY_WARNINGS_BYTES)
        self.call(names.FLAGS_LOAD, result, virtual_base(flags, FLAGS_BASE_SLOT), String("MESOS_"))
        check(result, TRY_WARNINGS_ERROR)

    def initialize(self, program: str, delegate: str) -> None:
        """Starts logging and libprocess; requests without a process name are sent to `delegate`.

        Pages of libprocess require credentials in the realms `PROGRAM-readwrite` and `PROGRAM-readonly`.
        """
        self._kept.append(accept_own_account(self._library))
        realms = (f"{program}-readwrite", f"{program}-readonly")
        self.call(names.LOGGING_INITIALIZE, String(program), ctypes.c_bool(False), none())
        self.call(names.PROCESS_INITIALIZE, OptionString(delegate), OptionString(realms[0]), OptionString(realms[1]))
        self.spawn(self.construct(names.VERSION_PROCESS))

    def spawn(self, process: Any) -> Any:
        """Starts a libprocess process; returns its UPID."""
        upid = zeroed()
        self.call(names.SPAWN, upid, virtual_base(process, PROCESS_BASE_SLOT), ctypes.c_bool(False))
        return upid

    def wait(self, upid: Any) -> None:
        self.call(names.WAIT, upid, ctypes.c_int64(-(10**9)))

    def execute(self, launch: Any) -> int:
        function = getattr(self._library, names.LAUNCH_EXECUTE)
        function.restype = ctypes.c_int
        return int(function(ctypes.byref(launch)))


def check(result: Any, error_offset: int) -> None:
    """Exits with the message of a `Try` that is an error."""
    if int.from_bytes(result.raw[0:4], "little"):
        message = String.from_buffer(result, error_offset + 8)
        raise SystemExit("mesos: " + ctypes.string_at(message.data, message.size).decode(errors="replace"))


def virtual_base(made: Any, slot: int) -> int:
    vtable = ctypes.c_void_p.from_buffer(made).value
    if vtable is None:
        raise SystemExit("mesos: an object has no vtable")
    return int(ctypes.addressof(made) + ctypes.c_int64.from_address(vtable - 8 * slot).value)
