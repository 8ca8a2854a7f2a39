"""Runs every script of a folder under `dike.capture`, each in a fork of one process that has imported TensorFlow.

`python capture_zygote.py FOLDER`: NAME.py -> NAME.json (what was captured) and NAME.out (what it printed).
TensorFlow's import is most of the time of a small script; a fork that has run no op yet is safe.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path

import tensorflow as tf
import tf_keras  # noqa: F401 - imported for the forks

from dike.capture import __main__ as capture

_DEADLINE_S = 120


def run(script: Path) -> None:
    signal.alarm(_DEADLINE_S)
    output = os.open(script.with_suffix(".out"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(script.parent)
    arguments = script.with_suffix(".args")
    extra = arguments.read_text().split() if arguments.exists() else []
    sys.argv[1:] = ["--output", str(script.with_suffix(".json")), *extra, script.name, "--flag", "value"]
    capture.main()


def main() -> None:
    assert tf.__version__
    # As in `dike.zygote`: no collection of a fork goes through what has been imported.
    gc.freeze()
    scripts = sorted(Path(sys.argv[1]).glob("*.py"))
    for script in scripts:
        child = os.fork()
        if child == 0:
            try:
                run(script)
            finally:
                os._exit(99)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
