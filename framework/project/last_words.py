"""What a script has said last, from the end of its output."""

from __future__ import annotations

import re

LAST_WORDS = 300
"""How many characters of a script's own error are told."""
MISTAKES = frozenset(
    {
        *("AssertionError", "AttributeError", "IndentationError", "IndexError", "KeyError", "NameError"),
        *("NotImplementedError", "SyntaxError", "TypeError", "UnboundLocalError", "ZeroDivisionError"),
    }
)
"""Python's exceptions that a program raises each time it comes to the same place, whatever the machine."""
_CHANCE = re.compile(r"tensorflow\.\S+|grpc\.\S+|\w*Connection\w*Error|BrokenPipeError|TimeoutError|MemoryError")


def last_words(output: str) -> str:
    """The error that a script has ended with: that of Python's last traceback, or else the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    raised = re.findall(r"^Traceback .*:\n(?:[ \t].*\n)*(\S.*)", output, re.MULTILINE)
    words: str = raised[-1].strip() if raised else lines[-1] if lines else ""
    return words if len(words) <= LAST_WORDS else f"{words[:LAST_WORDS]}..."


def is_mistake(output: str) -> bool:
    """Whether a script has ended, by the end of its output, with an error that it will run into again."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    # One that was caught and told is followed by other lines.
    return bool(lines) and lines[-1].partition(":")[0] in MISTAKES and "Traceback (most" in output


def may_pass(words: str) -> bool:
    """Whether they may be about other processes, or the machine, rather than the script."""
    return _CHANCE.fullmatch(words.partition(":")[0]) is not None


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
    if again and (not stepped or not may_pass(last_words(output))):
        return "it failed twice in the same way without a newer checkpoint"
    return ""
