"""Acting on a module the moment it is imported."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from dike.interception import after_import

LIBRARY = "some_library"


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module that can be imported."""
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / f"{LIBRARY}.py"
    path.write_text("import gc\ncollects = gc.isenabled()\n")
    yield path
    sys.modules.pop(LIBRARY, None)


def test_no_garbage_is_looked_for_during_the_import(library: Path) -> None:
    seen: list[ModuleType] = []
    after_import(LIBRARY, seen.append)
    module = importlib.import_module(LIBRARY)
    assert seen == [module]
    assert not module.collects
    assert gc.isenabled()


def test_it_is_looked_for_again_after_an_import_that_fails(library: Path) -> None:
    library.write_text("import gc\nassert gc.isenabled(), 'not meanwhile'\n")
    seen: list[ModuleType] = []
    after_import(LIBRARY, seen.append)
    with pytest.raises(AssertionError, match="not meanwhile"):
        importlib.import_module(LIBRARY)
    assert gc.isenabled()
    # The script may mend it and try again.
    library.write_text("mended = True\n")
    importlib.invalidate_caches()
    assert importlib.import_module(LIBRARY).mended
    assert len(seen) == 1
