"""Removes the study of a search that nobody needs any more, while others use the database."""

from __future__ import annotations

from sqlalchemy import delete, select

from framework.search.study import MARK
from framework.search.study_storage import close_storage, open_storage, study_errors

_TRIALS_AT_A_TIME = 100
"""A trial may have some hundred values, and on SQLite nobody else writes while they are removed."""


def remove_study(url: str, name: str) -> None:
    """Removes the study of that name with its trials; nothing happens if there is none that Dike has made.

    Raises:
        BadInputError: if the storage cannot be used; some of the trials may be gone then.
    """
    from optuna.storages._rdb.models import BaseModel, TrialModel

    storage = open_storage(url)
    try:
        with study_errors(storage.engine.url):
            study_id = storage.get_study_id_from_name(name)
            if MARK not in storage.get_study_user_attrs(study_id):
                return
            # Optuna would read all of a study in order to remove it, in one go. Trials come after what is theirs.
            tables = [table for table in reversed(BaseModel.metadata.sorted_tables) if "trial_id" in table.c]
            with storage.engine.connect() as connection:
                query = select(TrialModel.trial_id).where(TrialModel.study_id == study_id)
                trials = connection.execute(query).scalars().all()
            for first in range(0, len(trials), _TRIALS_AT_A_TIME):
                some = trials[first : first + _TRIALS_AT_A_TIME]
                with storage.engine.begin() as connection:
                    for table in tables:
                        connection.execute(delete(table).where(table.c.trial_id.in_(some)))
            storage.delete_study(study_id)
    except KeyError:
        return
    finally:
        close_storage(storage)
