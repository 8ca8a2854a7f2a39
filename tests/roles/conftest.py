"""Makes `roles_job` importable, whatever way pytest imports the tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def _servers_end() -> Iterator[None]:
    yield
    from roles_job import stop_servers

    stop_servers()
