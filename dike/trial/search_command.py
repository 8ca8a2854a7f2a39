"""Runs a search for `dike.tune`: the `dike tune` command in its own process, with this script or a pickled function."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dike.exceptions import BadInputError, DikeError, InterruptedByUserError, JobFailedError
from dike.main_script import running_program
from dike.trial import pickled

SpaceFunction = Callable[[Any], Mapping[str, Any] | None]
"""Asks an Optuna trial for parameters; returns them by name, or None if these are exactly what it asked for."""

COMMAND = (sys.executable, "-P", "-m", "framework", "tune")
REPEATED = ("constraint", "env", "mutate", "warm_start_from", "volume")
"""Options that may be repeated: a list, or a mapping for NAME=VALUE."""
FLAGS = ("page", "private")
"""Options without a value: True or False."""
OPTIONS = frozenset(
    {
        *REPEATED,
        *FLAGS,
        *("advertise_address", "agent_python", "agents", "attributes", "agent_cooldown", "bundle_port"),
        *("checkpoint_dir", "checkpoint_interval", "quantum_growth"),
        *("connect_timeout", "image", "trials_per_slot", "logdir", "master", "metric", "milestones", "mode", "name"),
        *(
            "on_failure",
            "policy",
            "principal",
            "quantum",
            "resources",
            "resume",
            "role",
            "sampler",
            "secret_file",
        ),
        *("budget", "max_epochs", "max_steps", "mlflow", "on_end"),
        *("seed", "slot_cpus", "slot_gpus", "slot_mem", "slots", "slots_per_gpu", "stop", "storage", "suspend"),
        *("stall_timeout", "suspend_timeout", "timeout", "trial_timeout", "trials", "value"),
    }
)
"""Long options of `dike tune` that `dike.tune` accepts, with '_' for '-'."""

_PREFIX = "dike: "
_OPTION_PREFIX = "Error: "
"""Precedes the command's message about an invalid option value."""
FRAME_PREFIX = "dike-frame: "
"""Precedes a frame that replaces the last one in a notebook: MIME type -> text, as JSON."""
_DEFAULTS = {"metric": "loss", "mode": "min"}
"""Options that `dike.tune` passes even if the user does not."""


def search(
    function: Callable[..., Any],
    space: str | SpaceFunction,
    options: Mapping[str, object],
    earlier_outcomes: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """Runs a search to its end. The command's messages go to this process's standard error.

    Args:
        function: what a trial calls; pickled if there is no script to run.
        space: the space as YAML, or a function.
        options: names in `OPTIONS` -> values; None omits an option.
        earlier_outcomes: outcomes of the earlier calls of `dike.tune` in this script.

    Returns:
        The command's JSON output.

    Raises:
        BadInputError: if the command rejects its input, or something cannot be pickled.
        JobFailedError: if the search ends early, or no trial succeeds.
        KeyboardInterrupt: after Ctrl-C, once all trials are suspended.
    """
    with tempfile.TemporaryDirectory(prefix="dike-tune-") as folder:
        arguments = _arguments(Path(folder), function, space, options, earlier_outcomes)
        output = Path(folder) / "result.json"
        code, message = _run([*COMMAND, *arguments], output)
        if code == BadInputError.exit_code:
            raise BadInputError(message or "The search was rejected; the reason is above.")
        if code in (-signal.SIGINT, InterruptedByUserError.exit_code):
            raise KeyboardInterrupt
        if code < 0:
            raise JobFailedError(
                f"The search's process was killed (signal {-code}); every trial is saved up to its last checkpoint. "
                "Resume with: dike tune --resume NAME."
            )
        if code:
            raise JobFailedError(message or f"The search ended with exit code {code}; the reason is above.")
        document: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
        return document


def check_options(options: Mapping[str, object]) -> None:
    """Raises BadInputError for an unknown option, with the nearest known one."""
    for name in options:
        if name not in OPTIONS:
            near = difflib.get_close_matches(name, OPTIONS, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"the options are {', '.join(sorted(OPTIONS))}."
            raise BadInputError(f"dike.tune has no option '{name}'; {hint}")


def _arguments(
    folder: Path,
    function: Callable[..., Any],
    space: str | SpaceFunction,
    options: Mapping[str, object],
    earlier_outcomes: Sequence[dict[str, Any]],
) -> list[str]:
    given = {name: value for name, value in options.items() if value is not None}
    arguments = ["--format", "json", *(["--for-notebook"] if _notebook_display() is not None else [])]
    sampler = given.get("sampler")
    if "resume" in given:
        # A resumed search has stored everything else; its lists may get more values.
        given = {name: value for name, value in given.items() if value != _DEFAULTS.get(name) and value is not sampler}
    elif sampler is not None and not isinstance(sampler, str):
        given["sampler"] = type(sampler).__name__
        arguments += ["--sampler-object", _pickled(folder / "sampler.pickle", sampler, "sampler")]
    for name in FLAGS:
        if given.pop(name, False):
            arguments.append(f"--{name}")
    for name, value in given.items():
        for one in _values(value) if name in REPEATED else [value]:
            arguments += [f"--{name.replace('_', '-')}", str(one)]
    if not callable(space):
        (folder / "space.yaml").write_text(space, encoding="utf-8")
        arguments += ["--space", str(folder / "space.yaml")]
    if "resume" in given:
        return arguments
    if callable(space):
        arguments += ["--space-function", _pickled(folder / "space.pickle", space, "function given as the space")]
    program = running_program()
    if program is None:
        # The file name becomes the name of a search without one.
        name = getattr(function, "__name__", "")
        path = folder / (name if name.isidentifier() else "notebook")
        path.write_bytes(pickled.dump_function(function))
        return [*arguments, "--function-call", "0", "--function", str(path)]
    (folder / "earlier.json").write_text(json.dumps(list(earlier_outcomes)), encoding="utf-8")
    arguments += ["--function-call", str(len(earlier_outcomes))]
    arguments += ["--earlier-results", str(folder / "earlier.json")]
    script, module = program
    return [*arguments, *(["-m", module] if module else [script]), "--", *sys.argv[1:]]


def _pickled(path: Path, value: object, what: str) -> str:
    path.write_bytes(pickled.dumps(value, what, pickled.OBJECT_LIMIT_BYTES))
    return str(path)


def _values(value: object) -> list[object]:
    if isinstance(value, Mapping):
        return [f"{name}={text}" for name, text in value.items()]
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]


def _run(command: Sequence[str], output: Path) -> tuple[int, str]:
    """Runs the command; returns its exit code and its last message."""
    screen = _Screen()
    with (
        output.open("wb") as result,
        # A session of its own, so that only we forward Ctrl-C: a second SIGINT makes the command give up waiting.
        subprocess.Popen(
            command, stdout=result, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
        ) as process,
    ):
        assert process.stderr is not None
        while True:
            try:
                for line in process.stderr:
                    screen.take(line)
                code = process.wait()
                return code, screen.end(failed=code != 0)
            except KeyboardInterrupt:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGINT)


class _Screen:
    """Shows the command's messages: on standard error, or in the output of a notebook's cell."""

    def __init__(self) -> None:
        self._notebook_display = _notebook_display()
        self._table: Any = None
        self._last_line = ""
        self._message = ""

    def take(self, line: str) -> None:
        if line.startswith(FRAME_PREFIX):
            self._show(json.loads(line.removeprefix(FRAME_PREFIX)))
            return
        for prefix in (_PREFIX, _OPTION_PREFIX):
            if line.startswith(prefix):
                self._message = line.removeprefix(prefix).strip()
        if self._notebook_display is None:
            sys.stderr.write(line)
            return
        # If the command fails, its last message becomes the exception's message, which the notebook shows itself.
        sys.stdout.write(self._last_line)
        self._last_line = line

    def end(self, *, failed: bool) -> str:
        """Flushes the last line; returns the command's last message."""
        if not (failed and self._last_line.startswith(_PREFIX)):
            sys.stdout.write(self._last_line)
        self._last_line = ""
        return self._message

    def _show(self, data: Mapping[str, str]) -> None:
        sys.stdout.write(self._last_line)
        self._last_line = ""
        if self._table is None:
            self._table = self._notebook_display.display(data, raw=True, display_id=True)
        else:
            self._table.update(data, raw=True)


def _notebook_display() -> Any:
    """Returns IPython's display module if this process is a notebook's kernel; else None."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return importlib.import_module("IPython.display") if hasattr(shell, "kernel") else None


def outcome_of(error: DikeError | KeyboardInterrupt) -> dict[str, Any]:
    return {"error": str(error), "exit_code": getattr(error, "exit_code", InterruptedByUserError.exit_code)}


def reraise(outcome: Mapping[str, Any]) -> None:
    """Raises the exception of a failed call, if it is one."""
    if outcome.get("exit_code") == InterruptedByUserError.exit_code:
        raise KeyboardInterrupt
    if "error" in outcome:
        raise (BadInputError if outcome["exit_code"] == BadInputError.exit_code else JobFailedError)(outcome["error"])
