"""Runs a command; measures its start and end, and the CPU time of it and all its descendants.

    python timed.py RESULT LIMIT_S COMMAND...

Writes `{"begun_s", "ended_s", "gone_s", "cpu_s", "exit_code"}` into the file RESULT; times are those of
`time.monotonic`, which all processes of a machine share. It is a subreaper (PR_SET_CHILD_SUBREAPER), so that it can
wait for daemonised descendants too (`gone_s`). It sends SIGTERM after LIMIT_S seconds, and fails if a process is left a
minute after the command's end.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

PR_SET_CHILD_SUBREAPER = 36
EXIT_TIMEOUT_S = 60


def main() -> None:
    result, limit_s, *command = sys.argv[1:]
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError("this system does not support PR_SET_CHILD_SUBREAPER")
    begun_s = time.monotonic()
    process = subprocess.Popen(command)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(process.pid, signal.SIGTERM))
    signal.alarm(int(limit_s))
    exit_code, ended_s = 0, begun_s
    while True:
        try:
            pid, status = os.wait()
        except ChildProcessError:
            break
        if pid == process.pid:
            ended_s, exit_code = time.monotonic(), os.waitstatus_to_exitcode(status)
            signal.signal(signal.SIGALRM, _give_up)
            signal.alarm(EXIT_TIMEOUT_S)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    figures = {
        "begun_s": begun_s,
        "ended_s": ended_s,
        "gone_s": time.monotonic(),
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "exit_code": exit_code,
    }
    Path(result).write_text(json.dumps(figures), encoding="utf-8")


def _give_up(number: int, frame: object) -> NoReturn:
    raise TimeoutError(f"processes of the command still run {EXIT_TIMEOUT_S} s after its end")


if __name__ == "__main__":
    main()
