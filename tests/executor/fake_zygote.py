"""A zygote that forks immediately and imports nothing: `python fake_zygote.py FD`.

Files beside the executor's sandbox change its ways: `held` (it does nothing as long as that is there), `mute` (it never
says that it is ready), `frail` (it ends at the first request), `refuses` (it answers that it cannot fork).
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
import time
from pathlib import Path
from typing import Any

from dike import process


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    ways = Path.cwd().parent
    while (ways / "held").exists():
        time.sleep(0.01)
    if (ways / "mute").exists():
        sys.exit("no module named nothing")
    connection.send(json.dumps({"ready": True, "preloaded": [], "skipped": []}).encode())
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 4)
        if not data:
            return
        if (ways / "frail").exists():
            (ways / "frail").unlink()
            os._exit(5)
        if (ways / "refuses").exists():
            connection.send(json.dumps({"error": "no memory"}).encode())
        else:
            connection.send(json.dumps({"pid": fork(connection, json.loads(data), descriptors)}).encode())
        for descriptor in descriptors:
            os.close(descriptor)


def fork(connection: socket.socket, request: dict[str, Any], descriptors: list[int]) -> int:
    """Forks twice, so that the executor adopts the process."""
    reader, writer = os.pipe()
    middle = os.fork()
    if middle == 0:
        between = os.getpid()
        child = os.fork()
        if child:
            os.write(writer, str(child).encode())
            os._exit(0)
        try:
            become(connection, request, descriptors, between)
        finally:
            sys.stdout.flush()
            os._exit(1)
    os.waitpid(middle, 0)
    os.close(writer)
    with os.fdopen(reader) as pid:
        return int(pid.read())


def become(connection: socket.socket, request: dict[str, Any], descriptors: list[int], between: int) -> None:
    os.setsid()
    while os.getppid() == between:
        time.sleep(0.001)
    # Not before: the end of the process between would count. It ends this one if the executor is gone already.
    process.die_with_parent(request["parent"])
    process.apply_limits(request.get("groups", ()), request.get("processes"))
    if request.get("supervised"):
        process.supervise()
    held = [os.dup2(descriptor, 100 + index) for index, descriptor in enumerate(descriptors)]
    connection.close()
    for target, descriptor in zip((1, 2, 3, 4), held, strict=False):
        os.dup2(descriptor, target)
    os.closerange(5, 200)
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    sys.argv[:] = request["argv"]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        sys.stdout.flush()
        os._exit(end.code if isinstance(end.code, int) else 1)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
