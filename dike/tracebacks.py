"""Errors as the user reads them: his own lines, without those of Dike that run them and wrap their calls."""

from __future__ import annotations

import os
import traceback

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_NAMESPACE = (f"{_PACKAGE}__init__.py", f"{_PACKAGE}namespace.py")
"""What stands for TensorFlow: a name that it does not have is the script's mistake."""
_NOTEBOOK = f"{os.sep}IPython{os.sep}"


def error_lines(error: BaseException, *, is_deliberate: bool = False) -> list[str]:
    """An error of a script as Python would print it, as lines with their ends.

    Args:
        error: the error. If it comes from Dike's own code, that is shown.
        is_deliberate: whether its message says all, and Dike raised it on purpose: then its traceback ends with the
            user's line.
    """
    report = traceback.TracebackException.from_exception(error)
    if is_deliberate:
        report.__cause__ = report.__context__ = None
        report.stack[:] = [each for each in report.stack if not _is_ours(each) and _NOTEBOOK not in each.filename]
    else:
        _leave_out_ours(report, seen=set())
    return list(report.format())


def _leave_out_ours(report: traceback.TracebackException, seen: set[int]) -> None:
    if id(report) in seen:
        return
    seen.add(id(report))
    frames = list(report.stack)
    while frames and frames[-1].filename in _NAMESPACE:
        frames.pop()
    end = len(frames)
    while end and _is_ours(frames[end - 1]):
        end -= 1
    report.stack[:] = [*(each for each in frames[:end] if not _is_ours(each)), *frames[end:]]
    for other in (report.__cause__, report.__context__, *(report.exceptions or ())):
        if other is not None:
            _leave_out_ours(other, seen)


def _is_ours(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(_PACKAGE)
