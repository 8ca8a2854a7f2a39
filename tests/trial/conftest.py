"""What the tests of trials share: a slot with a zygote."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.trial.slot_stage import SlotStage, slot


@pytest.fixture(scope="module")
def plain_slot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlotStage]:
    """A slot whose zygote has NumPy, and pyarrow with the thread of its memory allocator."""
    with slot(tmp_path_factory.mktemp("slot"), ["numpy", "pyarrow", "no_such_module"]) as plain:
        yield plain
