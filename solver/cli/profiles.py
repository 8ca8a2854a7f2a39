"""Saved profiles of models."""

from __future__ import annotations

from pathlib import Path

from dike.exceptions import BadInputError
from dike.profile import ModelProfile


def load_saved_profile(path: str, batch_size: int | None = None) -> ModelProfile:
    """Reads a profile that `dike profile -o` wrote.

    Args:
        path: the file, `.json`.
        batch_size: samples per worker and step, in place of the saved ones.

    Raises:
        BadInputError: if it cannot be read or is no profile.
    """
    if not path.endswith(".json"):
        raise BadInputError(f"'{path}' is no saved profile (.json); make one with 'dike profile {path} -o FILE.json'.")
    try:
        profile = ModelProfile.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInputError(f"There is no file {path}; give a saved profile (.json).") from None
    except OSError as error:
        raise BadInputError(f"The file {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError:
        raise BadInputError(f"The file {path} is not text; give a saved profile.") from None
    except BadInputError as error:
        raise BadInputError(f"{path}: {error}") from error
    return profile.with_batch_size(batch_size) if batch_size else profile
