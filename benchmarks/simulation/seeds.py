"""Seeds of a simulation."""

from __future__ import annotations

from dike.exceptions import BadInputError


def seed_range(first: int, count: int) -> range:
    """The range of `--first-seed` and `--seeds`.

    Raises:
        BadInputError: if it is empty, or a seed is negative.
    """
    if count < 1 or first < 0:
        raise BadInputError(f"--seeds {count} from --first-seed {first} cannot be; give 1 or more, from 0 or more.")
    return range(first, first + count)
