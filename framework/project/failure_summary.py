"""Summarizes why a script failed, from the end of its output, and whether it would fail again."""

from __future__ import annotations

import re
from dataclasses import dataclass

from framework.project.tensorflow_noise import without_noise

MAX_SUMMARY_CHARS = 300
"""Maximum length of a summary in characters."""
_TRACEBACK = re.compile(r"Traceback \(most.*:\n(?P<frames>(?:[ \t].*\n)*)(?P<error>\S.*)\n?(?P<rest>[\s\S]*)")
_FRAME = re.compile(r'^ +File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)
_OWN_FILE = re.compile(r"(?:/.*?/bundle/)?(?P<path>[^/<].*)")
"""A file of the script's folder, which executors unpack into `bundle` in the sandbox."""
_COLOR = re.compile(r"\x1b\[[\d;]*m")
_TRANSIENT = re.compile(
    r"tensorflow\.\S+|grpc\.\S+|\w*Connection\w*Error|(BrokenPipe|Timeout|Memory)Error|KeyboardInterrupt"
)
"""Exceptions about other processes or the machine, which may be transient."""
_AGENT_SPECIFIC = re.compile(
    r"Exception|[a-z]\w*\.\S+|(IO|OS|EOF|Import|ModuleNotFound|FileNotFound|FileExists|Permission|BlockingIO)Error"
)
"""Exceptions that may be about one agent's files or modules, or about a download, for which Keras raises a bare
`Exception`."""
_ERROR = re.compile(
    r"error|exception|fail|fatal|abort|killed|cannot|can't|could not|unable|invalid|denied|refused|not found|no such|"
    r"no space|out of memory|must |usage:|dike:",
    re.IGNORECASE,
)
"""Text of a line that reports an error of a program other than Python."""
_MACHINE_ERROR = re.compile(r"CUDA|cuDNN|NCCL|GPU|out of memory|No space left", re.IGNORECASE)
_GPU_MEMORY_ERROR = re.compile(
    r"OOM when allocating|ResourceExhausted|RESOURCE_EXHAUSTED|CUDA out of memory|OutOfMemoryError"
)
"""What TensorFlow, JAX and PyTorch print."""


@dataclass(frozen=True)
class ScriptError:
    """An exception in a traceback.

    Attributes:
        kind: its class, such as `ValueError`.
        summary: class and message in one line.
        location: the innermost line in the script's own folder: `train.py, line 12`; empty if there is none.
        is_uncaught: whether only its message follows it in the output, so that it was probably not caught.
    """

    kind: str
    summary: str
    location: str
    is_uncaught: bool


def script_error(output: str) -> ScriptError | None:
    """The exception of the last Python traceback in a script's output; None if there is none."""
    text = _COLOR.sub("", without_noise(output))
    found = _TRACEBACK.match(text, max(0, text.rfind("\nTraceback (most") + 1))
    if found is None:
        return None
    error, rest = found["error"].strip(), found["rest"]
    # A message of several lines continues after an empty line or indented; anything else was printed by a handler.
    continues = rest[:1] in ("\n", " ", "\t")
    more = next((line.strip() for line in rest.splitlines() if line.strip()), "") if continues else ""
    own = [(_OWN_FILE.fullmatch(frame["file"]), frame["line"]) for frame in _FRAME.finditer(found["frames"])]
    locations = [f"{file['path']}, line {line}" for file, line in own if file is not None]
    return ScriptError(
        kind=error.partition(":")[0],
        summary=f"{error} {more}".rstrip(),
        location=locations[-1] if locations else "",
        is_uncaught=continues or not rest.strip(),
    )


def failure_summary(output: str) -> str:
    """The error with which a script failed, and its line: that of the last traceback, else the last line of output."""
    error = script_error(output)
    if error is not None:
        return f"{_shorten(error.summary)} ({error.location})" if error.location else _shorten(error.summary)
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return _shorten(lines[-1] if lines else "")


def error_summary(output: str) -> str:
    """The same as `failure_summary`, but empty if the last line does not look like an error."""
    summary = failure_summary(output)
    return summary if script_error(output) is not None or _ERROR.search(summary) else ""


def failure_signature_of(output: str) -> str:
    """A signature that is equal for equal failures: exception and line, else the summary."""
    error = script_error(output)
    return f"{error.kind} in {error.location}" if error is not None and error.location else failure_summary(output)


def may_be_transient(output: str) -> bool:
    """Whether the failure may be due to other processes or the machine and not the script."""
    summary = failure_summary(output)
    return _TRANSIENT.fullmatch(summary.partition(":")[0]) is not None or _MACHINE_ERROR.search(summary) is not None


def is_out_of_gpu_memory(output: str) -> bool:
    """Whether the script failed because a GPU had too little memory."""
    error = script_error(output)
    return error is not None and _GPU_MEMORY_ERROR.search(error.summary) is not None


def is_deterministic(output: str) -> bool:
    """Whether the script failed with an exception that it raises in every run."""
    error = script_error(output)
    if error is None or not error.is_uncaught or may_be_transient(output):
        return False
    return _AGENT_SPECIFIC.fullmatch(error.kind) is None


def no_restart_reason(output: str, *, has_ever_trained: bool, stepped: bool, again: bool) -> str:
    """Why restarting a failed script cannot help; empty if it may.

    Args:
        output: the end of its output.
        has_ever_trained: whether this run or an earlier one has made a step or a checkpoint.
        stepped: whether this run has made a step.
        again: whether the previous run failed in the same way, without a newer checkpoint since.
    """
    if not has_ever_trained and is_deterministic(output):
        return "it would fail in the same way again"
    if again and not (stepped and may_be_transient(output)):
        return "it failed twice in the same way without a newer checkpoint"
    return ""


def _shorten(summary: str) -> str:
    return summary if len(summary) <= MAX_SUMMARY_CHARS else f"{summary[:MAX_SUMMARY_CHARS]}..."
