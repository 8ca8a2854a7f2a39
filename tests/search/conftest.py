"""A search on the stage; a database of searches, on SQLite and PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from framework.scheduler.agents import AllAgents
from framework.search.store import Store
from solver import NodeClass
from tests.search.postgresql_server import PostgresqlServer, postgresql_server
from tests.search.search_stage import SearchStage, search_spec
from tests.search.stored_search import SPEC


@pytest.fixture
def storage(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/searches.db"


@pytest.fixture
def begin(tmp_path: Path, storage: str) -> Any:
    def make(nodes: list[NodeClass] | AllAgents | None = None, *, patient: bool = False, **changes: Any) -> SearchStage:
        return SearchStage(search_spec(tmp_path, **changes), storage, nodes, patient=patient)

    return make


@pytest.fixture(scope="session")
def server() -> Iterator[PostgresqlServer]:
    with postgresql_server() as running:
        yield running


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.integration)])
def url(request: pytest.FixtureRequest, storage: str) -> str:
    if request.param == "sqlite":
        return storage
    server: PostgresqlServer = request.getfixturevalue("server")
    return server.emptied()


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with closing(Store(url)) as opened:
        opened.create_search(SPEC)
        yield opened
