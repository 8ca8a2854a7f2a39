"""`DIKE_MASTER=HOST:PORT python train.py`: plain Python does what `dike run --master` does."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

from dike.capture import hooks
from dike.capture.sink import Sink
from dike.exceptions import BadInputError
from dike.main_script import running_program
from dike.process import end_process
from dike.profile import ModelProfile


def hand_over() -> None:
    """Hands the script over to the cluster at its first training session or `fit`, when its model is known."""
    program = running_program()
    if program is None:
        # A notebook, an interactive session, an installed module.
        print("dike: DIKE_MASTER is set, but this is not a script file; it trains here.", file=sys.stderr)
        return
    script, module = program
    # A copy: scripts may edit them.
    arguments = list(sys.argv[1:])

    def deliver(profile: ModelProfile) -> NoReturn:
        # The command that takes over deletes the file once it has read it.
        file, path = tempfile.mkstemp(prefix="dike-profile-", suffix=".json")
        os.close(file)
        Path(path).write_text(profile.dumps(), encoding="utf-8")
        sys.stdout.flush()
        sys.stderr.flush()
        master = os.environ["DIKE_MASTER"]
        command = [sys.executable, "-P", "-m", "framework", "run", "--master", master, "--handed-over", path]
        named = ["-m", module] if module else [script]
        os.execv(sys.executable, [*command, *named, *arguments])  # noqa: S606 - no shell is wanted

    def refuse(sentence: str) -> NoReturn:
        print(f"dike: {sentence}", file=sys.stderr)
        end_process(BadInputError.exit_code)

    hooks.install(Sink(os.path.basename(script), None, deliver, refuse))
