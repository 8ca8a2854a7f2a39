"""Ends what the tests of the roles share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.roles.roles_stage import stop_servers


@pytest.fixture(scope="session", autouse=True)
def _servers_end() -> Iterator[None]:
    yield
    stop_servers()
