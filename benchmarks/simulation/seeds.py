"""The seeds of a simulation."""

from __future__ import annotations

from dike.exceptions import BadInputError


def seed_range(first: int, count: int) -> range:
    """The seeds that `--first-seed` and `--seeds` stand for.

    Raises:
        BadInputError: if there are none, or one is negative.
    """
    if count < 1 or first < 0:
        raise BadInputError(f"--seeds {count} from --first-seed {first} cannot be; give 1 or more, from 0 or more.")
    return range(first, first + count)
