"""Optuna's storage in the database of searches: how it is opened, and what is said if it cannot be used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sqlalchemy.engine import URL

from dike.exceptions import BadInputError
from framework.search.database import engine_arguments, making_tables, open_database, parse_url, storage_errors

if TYPE_CHECKING:
    from optuna.storages import RDBStorage


def load_optuna() -> None:
    """Loads all that is used of Optuna, before there are threads: two that begin to can both meet it half loaded."""
    import optuna.exceptions
    import optuna.samplers
    import optuna.storages._rdb.models  # noqa: F401


def open_storage(url: str) -> RDBStorage:
    """Optuna's storage in a database; `close_storage` closes it.

    Raises:
        BadInputError: if it cannot be used.
    """
    from optuna.storages import RDBStorage

    open_database(url).dispose()
    parsed = parse_url(url)
    with study_errors(parsed):
        try:
            with making_tables(parsed):
                return RDBStorage(parsed.render_as_string(hide_password=False), engine_kwargs=engine_arguments(parsed))
        except RuntimeError as error:
            raise BadInputError(
                "The storage was made by another version of Optuna; run `optuna storage upgrade`, or choose another "
                "--storage."
            ) from error


def close_storage(storage: RDBStorage) -> None:
    """Closes all connections."""
    storage.remove_session()
    storage.engine.dispose()


@contextmanager
def study_errors(url: URL) -> Iterator[None]:
    """`storage_errors`, also for what Optuna makes of an error of the database.

    Raises:
        StorageUnavailableError: if the database cannot be reached, or cannot write.
        BadInputError: for every other error of the database.
    """
    from optuna.exceptions import StorageInternalError

    with storage_errors(url):
        try:
            yield
        except StorageInternalError as error:
            # Its message is the same whatever has happened.
            raise error.__cause__ or error from None
