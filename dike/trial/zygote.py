"""The zygote of a slot: `python -P -m dike.trial.zygote FD [--preload a,b]`. It imports, and forks trials on request.

It runs no TensorFlow op before it forks: a fork after one may deadlock. The process that it forks is the child of a
child that ends at once, so that the executor - a subreaper - adopts it, and a zygote that dies takes no trial along.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from dike.trial import launch

REQUEST_BYTES = 1 << 16
FIRST_FD = 3
"""Where a trial finds what it reports to; it reads requests from the next one."""
ADOPTION_TIMEOUT_S = 10.0
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Imports what is wanted, says so, and forks until the executor closes its end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("fd", type=int)
    parser.add_argument("--preload", default="")
    arguments = parser.parse_args()
    connection = socket.socket(fileno=arguments.fd)
    loaded, skipped = preload([name for name in arguments.preload.split(",") if name])
    # What is there now is shared with every trial, as long as no collection touches it.
    gc.collect()
    gc.freeze()
    connection.send(json.dumps({"ready": True, "preloaded": loaded, "skipped": skipped}).encode())
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, REQUEST_BYTES, 4)
        if not data:
            return
        connection.send(json.dumps(answer(connection, json.loads(data), descriptors)).encode())
        for descriptor in descriptors:
            os.close(descriptor)


def preload(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Imports modules; returns those that could be, and those that could not."""
    loaded, skipped = [], []
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            print(f"dike: {name} is not preloaded: {error}", file=sys.stderr)
            skipped.append(name)
        else:
            loaded.append(name)
    return loaded, skipped


def answer(connection: socket.socket, request: dict[str, Any], descriptors: Sequence[int]) -> dict[str, Any]:
    """Forks the process that is asked for."""
    reader, writer = os.pipe()
    try:
        middle = os.fork()
    except OSError as error:
        os.close(reader)
        os.close(writer)
        return {"error": f"the trial could not be forked: {error.strerror}"}
    if middle == 0:
        try:
            child = os.fork()
            if child:
                os.write(writer, str(child).encode())
                os._exit(0)
            become(connection, request, descriptors)
        finally:
            os._exit(1)
    os.close(writer)
    os.waitpid(middle, 0)
    with os.fdopen(reader) as written:
        pid = written.read()
    return {"pid": int(pid)} if pid else {"error": "the trial could not be forked"}


def become(connection: socket.socket, request: dict[str, Any], descriptors: Sequence[int]) -> NoReturn:
    """Turns this fork into the trial."""
    os.setsid()
    _await_adoption(request["parent"])
    # First out of the way of the numbers they are to have.
    held = [os.dup2(descriptor, 200 + index, inheritable=False) for index, descriptor in enumerate(descriptors)]
    connection.detach()
    os.closerange(FIRST_FD, 200)
    for target, descriptor in zip((1, 2, FIRST_FD, FIRST_FD + 1), held, strict=True):
        os.dup2(descriptor, target, inheritable=target < FIRST_FD)
    os.closerange(200, 200 + len(held))
    for name, value in request["environment"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    os.chdir(request["cwd"])
    launch.run(request["argv"])


def _await_adoption(parent: int) -> None:
    """Waits until the executor is the parent, and makes the kernel kill this process when it dies."""
    deadline = select.poll()
    waited_ms = 0
    while os.getppid() != parent:
        if waited_ms > ADOPTION_TIMEOUT_S * 1000:
            os._exit(1)
        waited_ms += 1
        deadline.poll(1)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    main()
