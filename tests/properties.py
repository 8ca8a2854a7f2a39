"""How many examples of a property a run tries: all in `make test-thorough`, a part of them in the other tiers."""

from __future__ import annotations

from typing import Any

from hypothesis import settings


def examples(full: int, **changes: Any) -> settings:
    """Settings of one property.

    Args:
        full: examples of a thorough run; the profile of a run (see `conftest.py`) says how many of a hundred it tries.
        changes: further settings of Hypothesis.
    """
    return settings(max_examples=max(1, full * settings().max_examples // 100), **changes)
