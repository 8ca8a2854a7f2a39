"""Text files that a user names."""

from __future__ import annotations

from pathlib import Path

from dike.exceptions import BadInputError


def read_text(path: Path, what: str, encoding: str = "UTF-8") -> str:
    """Reads a whole file.

    Args:
        path: the file.
        what: what such a file is called, as in `cluster file`.
        encoding: of its text, as the message names it.

    Raises:
        BadInputError: if it cannot be read or is not such text.
    """
    try:
        return path.read_text(encoding=encoding)
    except OSError as error:
        raise BadInputError(f"The {what} {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise BadInputError(f"The {what} {path} is not {encoding} text.") from error
