"""Gets the profile of a model: from a saved file, or from a child process that imports TensorFlow in our place."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from dike.exceptions import BadInputError
from dike.profile import ModelProfile
from framework import tensorflow_noise
from solver.cli.profiles import load_saved_profile
from solver.text_files import read_text

_KERAS_PREFIX = "keras:"
_STDERR = 2
PRINTS_DRAIN_S = 2.0


def load_profile(
    model: str, script_args: Sequence[str] = (), batch_size: int | None = None, timeout_s: float | None = None
) -> ModelProfile:
    """The profile of `model`.

    Args:
        model: a training script, `keras:NAME` or a saved profile (`.json`).
        script_args: the script's own arguments.
        batch_size: samples per step of one worker; None for the script's own.
        timeout_s: how long a script may take to come to its training; None for as long as it likes.

    Raises:
        BadInputError: if there is no profile to be had; the message says why in one sentence.
    """
    if batch_size is not None and batch_size < 1:
        raise BadInputError(f"The batch size must be at least 1, not {batch_size}.")
    if model.startswith(_KERAS_PREFIX):
        return _capture(model, (), batch_size, timeout_s)
    if model.endswith(".json"):
        return load_saved_profile(model, batch_size)
    _check_readable(model)
    return _capture(model, script_args, batch_size, timeout_s)


def _check_readable(model: str) -> None:
    if not os.path.exists(model):
        raise BadInputError(f"There is no file {model}; give a training script, a saved profile (.json) or keras:NAME.")
    if os.path.isdir(model):
        raise BadInputError(f"{model} is a folder; give the training script in it.")
    read_text(Path(model), "training script")


def _capture(model: str, script_args: Sequence[str], batch_size: int | None, timeout_s: float | None) -> ModelProfile:
    with tempfile.TemporaryDirectory(prefix="dike-profile-") as folder:
        output = Path(folder) / "profile.json"
        # -P: a script's folder may hold files named as our packages or as Python's own.
        command = [sys.executable, "-P", "-u", "-m", "dike.capture", "--output", str(output)]
        if batch_size is not None:
            command += ["--batch-size", str(batch_size)]
        code = _run([*command, model, *script_args], model, timeout_s)
        try:
            data = json.loads(output.read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):
            raise BadInputError(
                f"{os.path.basename(model)} ended its own process before its training began (exit code {code})."
            ) from None
    if "error" in data:
        raise BadInputError(data["error"])
    return ModelProfile.from_json(data)


def _run(command: list[str], model: str, timeout_s: float | None) -> int:
    """Runs the child; what it prints goes to standard error, for standard output may be wanted for JSON."""
    # A session of its own: whatever processes the script has started can then be ended with it.
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=_environment(),
        start_new_session=True,
    )
    assert child.stdout is not None
    # A thread, so that the time-out holds for a script that prints nothing.
    printer = threading.Thread(target=_show, args=(child.stdout,), daemon=True)
    printer.start()
    try:
        return child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        raise BadInputError(
            f"{os.path.basename(model)} did not come to its training within {timeout_s:.0f} s."
        ) from None
    finally:
        with contextlib.suppress(ProcessLookupError):  # where all of them have ended
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        # A daemon that the script has started in a session of its own may hold the pipe open for ever.
        printer.join(PRINTS_DRAIN_S)


def _show(prints: BinaryIO) -> None:
    with open(_STDERR, "wb", closefd=False) as target:
        tensorflow_noise.forward(prints, target)


def _environment() -> dict[str, str]:
    environment = {key: value for key, value in os.environ.items() if key not in ("DIKE_MASTER", "DIKE_TASK")}
    environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # Reading a model needs no GPU memory; TensorFlow would take all of it.
    environment.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    return environment
