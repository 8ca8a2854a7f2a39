"""Exceptions that Dike raises on purpose. Each message is one sentence: what is wrong, where, and what to do."""

from __future__ import annotations

import re

from dike.tracebacks import error_lines

_NOT_IN_A_LINE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class DikeError(Exception):
    """Base of all errors that users see; `exit_code` is the exit code of the `dike` command."""

    exit_code = 1

    def _render_traceback_(self) -> list[str]:
        """Called by IPython in place of its own traceback."""
        return "".join(error_lines(self, is_deliberate=True)).splitlines()


class BadInputError(DikeError):
    """The user's input cannot be used; nothing has been started. Control characters in the message are escaped."""

    exit_code = 2

    def __init__(self, message: str = "") -> None:
        super().__init__(_NOT_IN_A_LINE.sub(lambda found: ascii(found[0])[1:-1], message))


class InfeasibleError(BadInputError):
    """No placement fits even the empty cluster; the message says which resource is short."""


class JobFailedError(DikeError):
    """A running job failed; the message names the task, the agent and the reason."""


class InterruptedByUserError(DikeError):
    """The user pressed Ctrl-C; everything that the run had started has ended."""

    exit_code = 130
