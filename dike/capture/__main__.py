"""`python -m dike.capture`: runs a script up to its first training step and writes the model's profile.

Runs as a child of the `dike` command, which must not import TensorFlow. Writes the profile as JSON, or
`{"error": SENTENCE}`, with exit codes 0 and 2. It also replaces a job's chief that has found another model than the
planned one, and then reports the profile.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from dike.capture import hooks
from dike.capture.sink import DISTRIBUTED, TF_CONFIG, Sink
from dike.exceptions import BadInputError, DikeError
from dike.main_script import ScriptFailedError, ScriptSyntaxError, join_threads, run_as_main
from dike.process import EXIT_CODE_OTHER_MODEL, end_process, set_name
from dike.profile import ModelProfile
from dike.reporting import Reporter

KERAS_PREFIX = "keras:"
_BAD_INPUT = BadInputError.exit_code

# Module prefix in an error about a missing name -> its equivalent below `tf`. The first match counts.
_TF_PREFIXES = {
    "tensorflow._api.v2.": "",
    "tensorflow.": "",
    "dike.": "",
    "tensorflow_estimator": "estimator",
    "keras._tf_keras.keras.__internal__.legacy.layers.": "layers.",
    "keras._tf_keras.keras.__internal__.legacy.rnn_cell.": "nn.rnn_cell.",
}
_KERAS_2 = (
    "is in tf.compat.v1 alone since TensorFlow 2.0, and there only with Keras 2 since TensorFlow 2.16; use "
    "tf.keras.layers, or install tf-keras and set TF_USE_LEGACY_KERAS=1"
)
_REMOVED = {
    "estimator": "was removed in TensorFlow 2.16; use Keras' Model.fit or tf.compat.v1.train.MonitoredTrainingSession",
    "contrib": "was removed in TensorFlow 2.0; use what has taken its place in tf and tf.keras, or a package such as "
    "tf-slim",
    "examples": "was removed in TensorFlow 2.1; tf.keras.datasets has MNIST",
    "layers": _KERAS_2,
    "nn.rnn_cell": _KERAS_2,
    "train.Supervisor": "was removed in TensorFlow 2.0; use tf.compat.v1.train.MonitoredTrainingSession",
}
"""Name below `tf` -> since when it is removed, and the replacement."""


def run(argv: Sequence[str]) -> NoReturn:
    """Called in a fork of a zygote (`dike.zygote`)."""
    set_name("dike profile")
    main(argv)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Ends the process. `argv` is by default the command line's."""
    parser = argparse.ArgumentParser(prog="python -m dike.capture", description="Writes a script's model profile.")
    goal = parser.add_mutually_exclusive_group(required=True)
    goal.add_argument("--output", type=Path, help="file that gets the profile or the error")
    goal.add_argument("--report-fd", type=int, help="file descriptor to which a job's profile is reported")
    parser.add_argument("--batch-size", type=int, help="samples per step, in place of the script's own")
    parser.add_argument("model", help="a script or keras:NAME")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's arguments")
    options = parser.parse_args(argv)

    def deliver(profile: ModelProfile) -> NoReturn:
        if options.output is None:
            reporter = Reporter(options.report_fd)
            reporter.profile(profile)
            reporter.close()
            end_process(EXIT_CODE_OTHER_MODEL)
        options.output.write_text(profile.dumps(), encoding="utf-8")
        end_process(0)

    def refuse(sentence: str) -> NoReturn:
        if options.output is None:
            print(f"dike: {sentence}", file=sys.stderr)
            end_process(_BAD_INPUT)
        options.output.write_text(json.dumps({"error": sentence}), encoding="utf-8")
        end_process(_BAD_INPUT)

    sink = Sink(os.path.basename(options.model), options.batch_size, deliver, refuse)
    if options.model.startswith(KERAS_PREFIX):
        from dike.profiling.keras_application import application_profile

        sink.capture(lambda: application_profile(options.model.removeprefix(KERAS_PREFIX), options.batch_size))
    hooks.install(sink)
    os.environ.setdefault("TF_CONFIG", TF_CONFIG)
    refuse(_run_to_end(options.model, options.arguments))


def _run_to_end(script: str, arguments: list[str]) -> str:
    """Runs the script; returns only if it does not train, with a sentence that says so."""
    name = os.path.basename(script)
    try:
        run_as_main(script, arguments)
        # It may train in a thread.
        join_threads()
    except ScriptSyntaxError as error:
        return f"{name} {error}; see above."
    except ScriptFailedError as error:
        removed = _removed_name(error.__cause__)
        if removed:
            return f"{name} uses {removed}."
        return f"{name} {error} before its training began; see above."
    except DikeError as error:
        return str(error)
    except OSError as error:
        return f"The script {script} cannot be read: {error.strerror}."
    except SystemExit as error:
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
        if error.code:
            return f"{name} ended itself before its training began (exit code {_exit_code(error.code)})."
    return (
        f"{name} ended without a training session or a call of fit, so there is nothing to plan; {DISTRIBUTED}, and "
        "runs any other script as one task if it calls dike.report(step, loss=...) as it trains."
    )


def _removed_name(error: BaseException | None) -> str:
    """The missing name, since when it is removed and its replacement; empty if unknown."""
    path = _missing_name(error)
    if path is None:
        return ""
    parts = [part for part in path.split(".") if part not in ("compat", "v1", "python")]
    for name, advice in _REMOVED.items():
        if parts[: name.count(".") + 1] == name.split("."):
            return f"tf.{name}, which {advice}"
    if _is_in_v1(parts):
        old = ".".join(parts)
        advice = f"use tf.compat.v1.{old} or import tensorflow.compat.v1 as tf"
        return f"tf.{old}, which was removed in TensorFlow 2.0; {advice}"
    return ""


def _missing_name(error: BaseException | None) -> str | None:
    """The name below TensorFlow that an error reports as missing: `compat.v1.estimator`."""
    if isinstance(error, ModuleNotFoundError):
        path = error.name or ""
    elif isinstance(error, ImportError):
        found = re.match(r"cannot import name '(\w+)' from '([\w.]+)'", str(error))
        path = f"{found[2]}.{found[1]}" if found else ""
    elif isinstance(error, AttributeError) and isinstance(error.obj, ModuleType):
        path = f"{error.obj.__name__}.{error.name}"
    else:
        return None
    for prefix, below in _TF_PREFIXES.items():
        if path.startswith(prefix):
            return below + path.removeprefix(prefix)
    return None


def _is_in_v1(parts: list[str]) -> bool:
    """Whether `tf.compat.v1` has the name."""
    import tensorflow as tf

    found: Any = tf.compat.v1
    for part in parts:
        found = getattr(found, part, None)
    return found is not None


def _exit_code(code: object) -> int:
    return code if isinstance(code, int) else 1


if __name__ == "__main__":
    main()
