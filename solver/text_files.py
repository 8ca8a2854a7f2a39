"""Reads text files given by the user."""

from __future__ import annotations

from pathlib import Path

from dike.exceptions import BadInputError


def read_text(path: Path, what: str, encoding: str = "UTF-8") -> str:
    """Reads a whole file.

    Args:
        path: the file.
        what: display name of such a file, as in `cluster file`.
        encoding: of its text, as named in the message.

    Raises:
        BadInputError: if it is unreadable or not in this encoding.
    """
    try:
        return path.read_text(encoding=encoding)
    except OSError as error:
        raise BadInputError(f"The {what} {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise BadInputError(f"The {what} {path} is not {encoding} text.") from error
