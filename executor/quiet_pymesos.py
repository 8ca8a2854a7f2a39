"""Imports pymesos without its side effects: it takes SIGINT for itself and logs to standard error."""

from __future__ import annotations

import logging
import signal

_sigint = signal.getsignal(signal.SIGINT)
import pymesos  # noqa: E402
import pymesos.detector  # noqa: E402
import pymesos.process  # noqa: E402

# Ctrl-C is ours to handle, and standard error is the user's script's.
signal.signal(signal.SIGINT, _sigint)
logging.getLogger("pymesos").handlers.clear()

__all__ = ["pymesos"]
