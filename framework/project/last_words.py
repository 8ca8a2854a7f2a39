"""What a script has said last, from the end of its output, and whether it would say the same again."""

from __future__ import annotations

import re
from dataclasses import dataclass

from framework.project.tensorflow_noise import without_noise

LAST_WORDS = 300
"""How many characters of a script's own error are told."""
_TRACEBACK = re.compile(r"Traceback \(most.*:\n(?P<frames>(?:[ \t].*\n)*)(?P<error>\S.*)\n?(?P<rest>[\s\S]*)")
_FRAME = re.compile(r'^ +File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)
_OWN_FILE = re.compile(r"(?:/.*?/bundle/)?(?P<path>[^/<].*)")
"""A file of the script's folder, which executors copy to `bundle` in the sandbox."""
_COLOR = re.compile(r"\x1b\[[\d;]*m")
_CHANCE = re.compile(
    r"tensorflow\.\S+|grpc\.\S+|\w*Connection\w*Error|(BrokenPipe|Timeout|Memory)Error|KeyboardInterrupt"
)
"""Exceptions about other processes or the machine, which may pass."""
_ELSEWHERE = re.compile(
    r"Exception|[a-z]\w*\.\S+|(IO|OS|EOF|Import|ModuleNotFound|FileNotFound|FileExists|Permission|BlockingIO)Error"
)
"""Exceptions that may be about one agent's files or modules, or a download: of a library, or those for which Keras
raises a bare `Exception`."""
_ERROR = re.compile(
    r"error|exception|fail|fatal|abort|killed|cannot|can't|could not|unable|invalid|denied|refused|not found|no such|"
    r"no space|out of memory|must |usage:|dike:",
    re.IGNORECASE,
)
"""What a line says that is an error of a program other than Python."""
_MACHINE = re.compile(r"CUDA|cuDNN|NCCL|GPU|out of memory|No space left", re.IGNORECASE)


@dataclass(frozen=True)
class ScriptError:
    """An exception, as a traceback tells it.

    Attributes:
        kind: its class, such as `ValueError`.
        words: class and message in one line.
        place: the last line of the script's own folder in the traceback: `train.py, line 12`; empty if it names none.
        was_last: whether nothing but its message was written after it, so that nothing seems to have caught it.
    """

    kind: str
    words: str
    place: str
    was_last: bool


def script_error(output: str) -> ScriptError | None:
    """The exception of Python's last traceback in a script's output; None if there is none."""
    text = _COLOR.sub("", without_noise(output))
    found = _TRACEBACK.match(text, max(0, text.rfind("\nTraceback (most") + 1))
    if found is None:
        return None
    error, rest = found["error"].strip(), found["rest"]
    # A message of several lines goes on after an empty line, or indented; who has caught an error says something.
    goes_on = rest[:1] in ("\n", " ", "\t")
    more = next((line.strip() for line in rest.splitlines() if line.strip()), "") if goes_on else ""
    own = [(_OWN_FILE.fullmatch(frame["file"]), frame["line"]) for frame in _FRAME.finditer(found["frames"])]
    places = [f"{file['path']}, line {line}" for file, line in own if file is not None]
    return ScriptError(
        kind=error.partition(":")[0],
        words=f"{error} {more}".rstrip(),
        place=places[-1] if places else "",
        was_last=goes_on or not rest.strip(),
    )


def last_words(output: str) -> str:
    """The error that a script has ended with, and its line: that of Python's last traceback, or else the last line."""
    error = script_error(output)
    if error is not None:
        return f"{_shortened(error.words)} ({error.place})" if error.place else _shortened(error.words)
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return _shortened(lines[-1] if lines else "")


def error_words(output: str) -> str:
    """The error that a script has ended with, as `last_words`; empty if its last line is no error but plain output."""
    words = last_words(output)
    return words if script_error(output) is not None or _ERROR.search(words) else ""


def same_again(output: str) -> str:
    """What two failures of a script have in common if they are the same: exception and line, or else its last words."""
    error = script_error(output)
    return f"{error.kind} in {error.place}" if error is not None and error.place else last_words(output)


def may_pass(output: str) -> bool:
    """Whether what a script has ended with may be about other processes, or the machine, rather than the script."""
    words = last_words(output)
    return _CHANCE.fullmatch(words.partition(":")[0]) is not None or _MACHINE.search(words) is not None


def is_mistake(output: str) -> bool:
    """Whether a script has ended with an exception that it raises again wherever and whenever it is started."""
    error = script_error(output)
    if error is None or not error.was_last or may_pass(output):
        return False
    return _ELSEWHERE.fullmatch(error.kind) is None


def why_hopeless(output: str, *, has_ever_trained: bool, stepped: bool, again: bool) -> str:
    """Why a script that has failed by itself need not be started again: it is wrong itself; empty if it may not be.

    Args:
        output: the end of what it wrote.
        has_ever_trained: whether this run of it, or one before, has made a step or a checkpoint.
        stepped: whether this run has made a step.
        again: whether the run before failed in the same way, and no newer checkpoint was made since.
    """
    if not has_ever_trained and is_mistake(output):
        return "it would fail in the same way again"
    if again and not (stepped and may_pass(output)):
        return "it failed twice in the same way without a newer checkpoint"
    return ""


def _shortened(words: str) -> str:
    return words if len(words) <= LAST_WORDS else f"{words[:LAST_WORDS]}..."
