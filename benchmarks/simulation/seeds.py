"""Seeds of a simulation."""

from __future__ import annotations

from dike.exceptions import BadInputError


def seed_range(first: int, count: int) -> range:
    """The range of `--first-seed` and `--seeds`.

    Raises:
        BadInputError: if it is empty, or a seed is negative.
    """
    if count < 1 or first < 0:
        raise BadInputError(f"--seeds must be at least 1, not {count}, and --first-seed at least 0, not {first}.")
    return range(first, first + count)
