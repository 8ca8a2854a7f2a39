"""Saved profiles of models."""

from __future__ import annotations

from pathlib import Path

from dike.exceptions import BadInputError
from dike.profile import ModelProfile
from solver.text_files import read_text


def load_saved_profile(path: str, batch_size: int | None = None) -> ModelProfile:
    """Reads a profile written by `dike profile -o`.

    Args:
        path: the file, `.json`.
        batch_size: samples per step, instead of the saved value.

    Raises:
        BadInputError: if it is unreadable or not a profile.
    """
    if not path.endswith(".json"):
        raise BadInputError(
            f"'{path}' is not a saved profile (.json); create one with 'dike profile {path} -o FILE.json'."
        )
    text = read_text(Path(path), "saved profile")
    try:
        profile = ModelProfile.loads(text)
    except BadInputError as error:
        raise BadInputError(f"{path}: {error}") from error
    return profile.with_batch_size(batch_size) if batch_size else profile
