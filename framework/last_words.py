"""What a script has said last, from the end of its output."""

from __future__ import annotations

import re

LAST_WORDS = 300
"""How many characters of a script's own error are told."""


def last_words(output: str) -> str:
    """The error that a script has ended with: that of Python's last traceback, or else the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    raised = re.findall(r"^Traceback .*:\n(?:[ \t].*\n)*(\S.*)", output, re.MULTILINE)
    words: str = raised[-1].strip() if raised else lines[-1] if lines else ""
    return words if len(words) <= LAST_WORDS else f"{words[:LAST_WORDS]}..."
