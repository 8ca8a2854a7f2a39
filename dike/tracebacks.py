"""Tracebacks for users: their own frames, without Dike's that run and wrap them."""

from __future__ import annotations

import os
import traceback

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_NAMESPACE = (f"{_PACKAGE}__init__.py", f"{_PACKAGE}namespace.py")
"""Files that stand for TensorFlow: a missing attribute is the script's mistake."""
_NOTEBOOK = f"{os.sep}IPython{os.sep}"


def error_lines(error: BaseException, *, is_deliberate: bool = False) -> list[str]:
    """Formats an error of a script as Python does, without Dike's frames unless Dike's own code raised it.

    With `is_deliberate`, Dike raised it on purpose with a complete message: then the traceback ends at the user's line.
    """
    report = traceback.TracebackException.from_exception(error)
    if is_deliberate:
        report.__cause__ = report.__context__ = None
        report.stack[:] = [each for each in report.stack if not _is_own(each) and _NOTEBOOK not in each.filename]
    else:
        _drop_own_frames(report, seen=set())
    return list(report.format())


def _drop_own_frames(report: traceback.TracebackException, seen: set[int]) -> None:
    if id(report) in seen:
        return
    seen.add(id(report))
    frames = list(report.stack)
    while frames and frames[-1].filename in _NAMESPACE:
        frames.pop()
    end = len(frames)
    while end and _is_own(frames[end - 1]):
        end -= 1
    report.stack[:] = [*(each for each in frames[:end] if not _is_own(each)), *frames[end:]]
    for other in (report.__cause__, report.__context__, *(report.exceptions or ())):
        if other is not None:
            _drop_own_frames(other, seen)


def _is_own(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(_PACKAGE)
