"""A zygote: `python -P -m dike.zygote LAUNCHER FD [--also MODULE] [--preload a,b]`. It imports, and forks on request.

LAUNCHER is a module, `dike.trial.launch` for the trials of a search and `dike.launch` for the processes of a training
job: its `run(argv)` turns a fork into one of them, its `COMPANIONS` say what else to import with a library. MODULE is
another one with a `run(argv)`.

Over the connected socket FD (AF_UNIX, SOCK_SEQPACKET) it says `{"ready": true, "preloaded": [...], "skipped": [...]}`,
or `{"unfit": "why"}` if what it has imported must not be forked. Then it is asked: `{"argv": [script, ...],
"cwd": folder, "environment": {name: value or null}, "parent": pid, "module": which of the two, "supervised": whether
`pid` is to be that of a supervisor (`dike.process.supervise`)}` with file descriptors - stdout, stderr, where the fork
reports, and where it reads requests, if it does - and answers `{"pid": n}` or `{"error": "..."}`.

It runs no TensorFlow op: a fork after one may deadlock. The process is forked by a child that ends at once, so that
`parent`, which adopts orphans, becomes its parent; a zygote that dies takes none along. A fork may become a zygote in
its turn (`split`): what has been imported once then serves the processes of several parents.
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
"""More than the executor ever asks with."""
TARGET_FDS = (1, 2, 3, 4)
"""Where a fork finds what comes with a request: its output, where it reports, and where it reads requests."""

_FIRST_OWN_FD = 10
_FORKABLE_THREADS = ("jemalloc_bg_thd",)
"""Threads that a fork can do without. jemalloc, which comes with pyarrow and so with pandas and Keras, locks what its
own hold before a fork and frees memory without them after it (its `background_thread_postfork_child`)."""

Run = Callable[[Sequence[str]], NoReturn]
"""What a fork does: runs the script `argv[0]` with the arguments after it, and ends the process."""


_aside: list[str] = []
"""Modules that were imported for MODULE only: a user's script may have some of the same name."""


def main() -> None:
    """Imports what is wanted, says so, and forks until the other end is closed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("launcher")
    parser.add_argument("fd", type=int)
    parser.add_argument("--also", default="")
    parser.add_argument("--preload", default="")
    arguments = parser.parse_args()
    process.die_with_parent()
    process.set_name("dike zygote")
    # A fork must not hand its script over to a cluster, which this variable asks of plain scripts.
    os.environ.pop("DIKE_MASTER", None)
    # Nothing of what is imported is garbage: to look for some again and again takes a fifth of the time.
    gc.disable()
    with _take_over(arguments.fd) as connection:
        launcher = importlib.import_module(arguments.launcher)
        if arguments.also:
            _import_aside(arguments.also)
        names = [name for name in arguments.preload.split(",") if name]
        loaded, skipped = preload(names, launcher.COMPANIONS)
        if unfit := _why_unfit():
            connection.send(json.dumps({"unfit": unfit}).encode())
            return
        # What is there now is shared with every fork, as long as no collection touches it.
        gc.freeze()
        gc.enable()
        connection.send(json.dumps({"ready": True, "preloaded": loaded, "skipped": skipped}).encode())
        _serve(connection, arguments.launcher)


def split(launcher: str, log: Path, closed: Sequence[int]) -> tuple[socket.socket, int]:
    """Forks a zygote off this process, which is a fork of one itself and has started no thread.

    Args:
        launcher: its LAUNCHER.
        log: gets its output.
        closed: file descriptors of this process that it must not hold.

    Returns:
        The socket by which to talk to it, and its process id.
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
        for name in _aside:
            sys.modules.pop(name, None)
        with _take_over(theirs.detach()) as connection:
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


def _import_aside(module: str) -> None:
    """Imports a module of ours, and what it needs, from where we are: PYTHONPATH is the script's."""
    before = set(sys.modules)
    path = sys.path[:]
    home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    scripts = set(os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [home, *sorted(path, key=lambda part: part in scripts)]
    try:
        importlib.import_module(module)
    finally:
        sys.path[:] = path
    _aside.extend(
        name
        for name in sys.modules.keys() - before
        if name.partition(".")[0] not in (*sys.stdlib_module_names, "dike", "numpy")
    )


def _why_unfit() -> str:
    """Why a fork of this process would not work; empty if it would."""
    threads = set(os.listdir("/proc/self/task")) - {str(os.getpid())}
    names = [Path(f"/proc/self/task/{thread}/comm").read_text(encoding="utf-8").rstrip() for thread in threads]
    if lost := [name for name in names if name not in _FORKABLE_THREADS]:
        return f"threads run after the imports: {', '.join(lost)}"
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except FileNotFoundError:
            continue  # the listing's own
        if target.startswith("/dev/nvidia"):
            return "a GPU is in use after the imports"
    return ""


def preload(names: Sequence[str], companions: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Imports modules and their companions; returns the modules that could be imported, and those that could not."""
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


def _take_over(fd: int) -> socket.socket:
    """The socket, under a number that no fork needs; the numbers that forks need are kept free of all else."""
    own = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_OWN_FD)
    os.close(fd)
    with open(os.devnull, "rb") as null:
        held = fcntl.fcntl(null, fcntl.F_DUPFD_CLOEXEC, _FIRST_OWN_FD)
    for target in TARGET_FDS[2:]:
        os.dup2(held, target, inheritable=False)
    os.close(held)
    return socket.socket(fileno=own)


def _fork(run: Run, connection: socket.socket, request: dict[str, Any], descriptors: Sequence[int]) -> dict[str, Any]:
    """Forks the process; returns the answer."""
    sys.stdout.flush()
    reader, writer = os.pipe()
    try:
        middle = os.fork()
    except OSError as error:
        os.close(reader)
        os.close(writer)
        return {"error": f"no process could be forked: {error.strerror}"}
    if middle == 0:
        os.close(reader)
        _go_between(run, connection, writer, request, descriptors)
    os.close(writer)
    with os.fdopen(reader) as answers:
        pid = answers.read()
    os.waitpid(middle, 0)
    return {"pid": int(pid)} if pid else {"error": "no process could be forked, see the zygote's output"}


def _go_between(
    run: Run, connection: socket.socket, writer: int, request: dict[str, Any], descriptors: Sequence[int]
) -> NoReturn:
    """Forks the process, tells its id, and ends. The fork must never get back into the zygote's loop."""
    try:
        connection.close()
        go_between = os.pidfd_open(os.getpid())
        child = os.fork()
        if child:
            os.write(writer, str(child).encode())
            os._exit(0)
        os.close(writer)
        _become(run, request, descriptors, go_between)
    finally:
        error = sys.exception()
        if error is not None:
            traceback.print_exception(error)
        sys.stderr.flush()
        os._exit(1)


def _become(run: Run, request: dict[str, Any], descriptors: Sequence[int], go_between: int) -> NoReturn:
    """Turns this process into what was asked for."""
    os.setsid()
    for descriptor, target in zip(descriptors, TARGET_FDS, strict=False):
        os.dup2(descriptor, target, inheritable=target <= 2)
        os.close(descriptor)
    # It can be read as soon as that process is dead and its children have another parent.
    select.select([go_between], [], [])
    os.close(go_between)
    process.die_with_parent(int(request["parent"]))
    process.limit(request.get("groups", ()), request.get("processes"))
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
    # Python has made them absolute at its start; they mean the working folder.
    relative = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part and not os.path.isabs(part)]
    moved = {os.path.abspath(os.path.join(own, part)): os.path.abspath(part) for part in relative}
    sys.path[:] = [moved.get(path, path) for path in sys.path]
    run(request["argv"])


def _resize_thread_pools() -> None:
    """Gives the libraries that have been imported with one thread as many as they would have made themselves."""
    openmp = os.environ.get("OMP_NUM_THREADS", "")
    # In OpenBLAS' own order.
    blas = os.environ.get("OPENBLAS_NUM_THREADS") or os.environ.get("GOTO_NUM_THREADS") or openmp
    limits = {pool: int(count) for pool, count in (("openmp", openmp), ("blas", blas)) if count.isdecimal()}
    if set(limits.values()) - {1} and "numpy" in sys.modules:
        import threadpoolctl  # only here: most forks have one thread

        threadpoolctl.threadpool_limits(limits)


if __name__ == "__main__":
    # By its own name: `__main__` would be another copy, of whose state what it imports knows nothing.
    importlib.import_module("dike.zygote").main()
