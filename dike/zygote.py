"""A zygote: `python -P -m dike.zygote LAUNCHER FD [--also MODULE] [--preload a,b]`. Imports, and forks on request.

LAUNCHER is a module, `dike.trial.launch` for trials or `dike.launch` for processes of training jobs: its `run(argv)`
turns a fork into one of them, its `COMPANIONS` maps a library to our module to import with it. MODULE is another
module with a `run(argv)`.

Over the connected socket FD (AF_UNIX, SOCK_SEQPACKET) it sends `{"ready": true, "preloaded": [...], "skipped": [...]}`,
or `{"unfit": "why"}` if it must not be forked after its imports. It receives requests `{"argv": [script, ...],
"cwd": folder, "environment": {name: value or null}, "parent": pid, "module": LAUNCHER or MODULE, "supervised": whether
the answer's pid is a supervisor's (`dike.process.supervise`)}` with file descriptors - stdout, stderr, for reports, and
optionally for requests - and answers `{"pid": n}` or `{"error": "..."}`.

It runs no TensorFlow op: a fork after one may deadlock. It forks twice, so that `parent`, which adopts orphans, becomes
the parent, and the process survives the zygote. A fork may become a zygote (`fork_zygote`), so that one import serves
processes of several parents.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import importlib
import json
import os
import select
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from dike import process

REQUEST_BYTES = 1 << 18
"""Maximum size of a request."""
TARGET_FDS = (1, 2, 3, 4)
"""A fork's descriptors for those that come with a request: stdout, stderr, reports, requests."""

_FIRST_OWN_FD = 10
_FORKABLE_THREADS = ("jemalloc_bg_thd",)
"""Threads that a fork does not need. jemalloc, which comes with pyarrow and so with pandas and Keras, holds its locks
during a fork and works without its background thread afterwards (`background_thread_postfork_child`).
"""

Run = Callable[[Sequence[str]], NoReturn]


_isolated: list[str] = []
"""Modules imported for MODULE only: a user's script may have others of the same names."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("launcher")
    parser.add_argument("fd", type=int)
    parser.add_argument("--also", default="")
    parser.add_argument("--preload", default="")
    arguments = parser.parse_args()
    process.die_with_parent()
    process.set_name("dike zygote")
    # With this variable, scripts hand themselves over to a cluster.
    os.environ.pop("DIKE_MASTER", None)
    # Imports leave no garbage, and collections take a fifth of their time.
    gc.disable()
    with _reserve_descriptors(arguments.fd) as connection:
        launcher = importlib.import_module(arguments.launcher)
        if arguments.also:
            _import_isolated(arguments.also)
        names = [name for name in arguments.preload.split(",") if name]
        loaded, skipped = preload(names, launcher.COMPANIONS)
        if unfit := _why_unfit():
            connection.send(json.dumps({"unfit": unfit}).encode())
            return
        # Memory stays shared with the forks as long as no collection touches it.
        gc.freeze()
        gc.enable()
        connection.send(json.dumps({"ready": True, "preloaded": loaded, "skipped": skipped}).encode())
        _serve(connection, arguments.launcher)


def fork_zygote(launcher: str, log: Path, closed: Sequence[int]) -> tuple[socket.socket, int]:
    """Forks a zygote off this process, a zygote's fork without threads; returns the socket to it and its pid.

    Args:
        launcher: its LAUNCHER.
        log: receives its output.
        closed: file descriptors that it closes.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    child = os.fork()
    if child:
        theirs.close()
        return ours, child
    try:
        os.setsid()
        process.die_with_parent(parent)
        process.set_name("dike zygote")
        ours.close()
        for descriptor in closed:
            os.close(descriptor)
        with log.open("ab") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        for name in _isolated:
            sys.modules.pop(name, None)
        with _reserve_descriptors(theirs.detach()) as connection:
            connection.send(json.dumps({"ready": True}).encode())
            _serve(connection, launcher)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _serve(connection: socket.socket, launcher: str) -> None:
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, REQUEST_BYTES, len(TARGET_FDS))
        if not data:
            return
        request = json.loads(data)
        run = importlib.import_module(request.get("module") or launcher).run
        connection.send(json.dumps(_fork(run, connection, request, descriptors)).encode())
        for descriptor in descriptors:
            os.close(descriptor)


def _import_isolated(module: str) -> None:
    """Imports a module of ours with its dependencies from our own path, as PYTHONPATH belongs to the script."""
    before = set(sys.modules)
    path = sys.path[:]
    home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    scripts = set(os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [home, *sorted(path, key=lambda part: part in scripts)]
    try:
        importlib.import_module(module)
    finally:
        sys.path[:] = path
    _isolated.extend(
        name
        for name in sys.modules.keys() - before
        if name.partition(".")[0] not in (*sys.stdlib_module_names, "dike", "numpy")
    )


def _why_unfit() -> str:
    """Why this process must not be forked; empty if it may be."""
    threads = set(os.listdir("/proc/self/task")) - {str(os.getpid())}
    names = [Path(f"/proc/self/task/{thread}/comm").read_text(encoding="utf-8").rstrip() for thread in threads]
    if running := [name for name in names if name not in _FORKABLE_THREADS]:
        return f"threads run after the imports: {', '.join(running)}"
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except FileNotFoundError:
            continue  # the descriptor of listdir itself
        if target.startswith("/dev/nvidia"):
            return "a GPU is in use after the imports"
    return ""


def preload(names: Sequence[str], companions: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Returns the modules imported, and those that could not be."""
    loaded, skipped = [], []
    for name in names:
        try:
            importlib.import_module(name)
            if name in companions:
                importlib.import_module(companions[name])
        except ImportError as error:
            print(f"dike: {name} is not preloaded: {error}", file=sys.stderr)
            skipped.append(name)
        else:
            loaded.append(name)
    return loaded, skipped


def _reserve_descriptors(fd: int) -> socket.socket:
    """Moves the socket to a descriptor above those of forks, and reserves theirs."""
    own = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_OWN_FD)
    os.close(fd)
    with open(os.devnull, "rb") as null:
        placeholder = fcntl.fcntl(null, fcntl.F_DUPFD_CLOEXEC, _FIRST_OWN_FD)
    for target in TARGET_FDS[2:]:
        os.dup2(placeholder, target, inheritable=False)
    os.close(placeholder)
    return socket.socket(fileno=own)


def _fork(run: Run, connection: socket.socket, request: dict[str, Any], descriptors: Sequence[int]) -> dict[str, Any]:
    sys.stdout.flush()
    reader, writer = os.pipe()
    try:
        intermediate = os.fork()
    except OSError as error:
        os.close(reader)
        os.close(writer)
        return {"error": f"no process could be forked: {error.strerror}"}
    if intermediate == 0:
        os.close(reader)
        _fork_and_report(run, connection, writer, request, descriptors)
    os.close(writer)
    with os.fdopen(reader) as answers:
        pid = answers.read()
    os.waitpid(intermediate, 0)
    return {"pid": int(pid)} if pid else {"error": "no process could be forked, see the zygote's output"}


def _fork_and_report(
    run: Run, connection: socket.socket, writer: int, request: dict[str, Any], descriptors: Sequence[int]
) -> NoReturn:
    """Forks the process, writes its pid, and ends. The fork must never return into the zygote's loop."""
    try:
        connection.close()
        intermediate = os.pidfd_open(os.getpid())
        child = os.fork()
        if child:
            os.write(writer, str(child).encode())
            os._exit(0)
        os.close(writer)
        _run_request(run, request, descriptors, intermediate)
    finally:
        error = sys.exception()
        if error is not None:
            traceback.print_exception(error)
        sys.stderr.flush()
        os._exit(1)


def _run_request(run: Run, request: dict[str, Any], descriptors: Sequence[int], intermediate: int) -> NoReturn:
    os.setsid()
    for descriptor, target in zip(descriptors, TARGET_FDS, strict=False):
        os.dup2(descriptor, target, inheritable=target <= 2)
        os.close(descriptor)
    # Readable once that process has ended and its child has been adopted.
    select.select([intermediate], [], [])
    os.close(intermediate)
    process.die_with_parent(int(request["parent"]))
    process.apply_limits(request.get("groups", ()), request.get("processes"))
    if request.get("supervised"):
        process.supervise()
    for name, value in request["environment"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _resize_thread_pools()
    own = os.getcwd()
    os.chdir(request["cwd"])
    # Python has made relative entries absolute at its start; they are relative to the working folder.
    relative = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part and not os.path.isabs(part)]
    moved = {os.path.abspath(os.path.join(own, part)): os.path.abspath(part) for part in relative}
    sys.path[:] = [moved.get(path, path) for path in sys.path]
    run(request["argv"])


def _resize_thread_pools() -> None:
    """Resizes the thread pools of libraries that the zygote has imported with one thread."""
    openmp = os.environ.get("OMP_NUM_THREADS", "")
    # In OpenBLAS' own order.
    blas = os.environ.get("OPENBLAS_NUM_THREADS") or os.environ.get("GOTO_NUM_THREADS") or openmp
    limits = {pool: int(count) for pool, count in (("openmp", openmp), ("blas", blas)) if count.isdecimal()}
    if set(limits.values()) - {1} and "numpy" in sys.modules:
        import threadpoolctl  # not at the top: most forks have one thread

        threadpoolctl.threadpool_limits(limits)


if __name__ == "__main__":
    # By its own name: `__main__` would be a second copy with state of its own.
    importlib.import_module("dike.zygote").main()
