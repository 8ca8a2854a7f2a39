"""`python -m dike.capture`: runs a script up to its first training step and writes the model's profile.

Runs as a child of the `dike` command, which must not import TensorFlow. The file gets the profile's JSON, or
`{"error": SENTENCE}`, with exit codes 0 and 2.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import NoReturn

from dike.capture import hooks
from dike.capture.sink import Sink
from dike.exceptions import BadInputError, DikeError
from dike.main_script import ScriptFailedError, ScriptSyntaxError, join_threads, run_as_main
from dike.process_end import end_process
from dike.profile import ModelProfile

KERAS_PREFIX = "keras:"
_BAD_INPUT = BadInputError.exit_code
# Scripts with a coordinator of their own ask it who they are; nothing connects to these addresses.
_TF_CONFIG = {
    "cluster": {"chief": ["localhost:1"], "ps": ["localhost:2"], "worker": ["localhost:3"]},
    "task": {"type": "chief", "index": 0},
}


def main() -> NoReturn:
    """Entry point; ends the process."""
    parser = argparse.ArgumentParser(prog="python -m dike.capture", description="Writes a script's model profile.")
    parser.add_argument("--output", required=True, type=Path, help="file that gets the profile or the error")
    parser.add_argument("--batch-size", type=int, help="samples per step, in place of the script's own")
    parser.add_argument("model", help="a script or keras:NAME")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's arguments")
    options = parser.parse_args()

    def deliver(profile: ModelProfile) -> NoReturn:
        options.output.write_text(profile.dumps(), encoding="utf-8")
        end_process(0)

    def refuse(sentence: str) -> NoReturn:
        options.output.write_text(json.dumps({"error": sentence}), encoding="utf-8")
        end_process(_BAD_INPUT)

    sink = Sink(os.path.basename(options.model), options.batch_size, deliver, refuse)
    if options.model.startswith(KERAS_PREFIX):
        from dike.profiling.keras_application import application_profile

        sink.capture(lambda: application_profile(options.model.removeprefix(KERAS_PREFIX), options.batch_size))
    hooks.install(sink)
    os.environ.setdefault("TF_CONFIG", json.dumps(_TF_CONFIG))
    refuse(_run_to_end(options.model, options.arguments))


def _run_to_end(script: str, arguments: list[str]) -> str:
    """Runs the script; it comes back only from one that does not train, with a sentence that says so."""
    name = os.path.basename(script)
    try:
        run_as_main(script, arguments)
        # It may train in a thread, which Python would wait for.
        join_threads()
    except ScriptSyntaxError as error:
        return f"{name} {error}; see above."
    except ScriptFailedError as error:
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
        f"{name} ended without a training session or a call of fit, so there is nothing to plan; "
        "Dike distributes tf.compat.v1 sessions, Keras' Model.fit and ClusterCoordinator loops."
    )


def _exit_code(code: object) -> int:
    return code if isinstance(code, int) else 1


if __name__ == "__main__":
    main()
