"""A search as an Optuna study: samplers, and a storage that `optuna-dashboard` opens.

Dike's trial numbers are Optuna's. A trial stays RUNNING in Optuna from the moment it is asked for until it has ended,
however often it is suspended in between.
"""

from __future__ import annotations

import math
import random
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

# Not used here. Optuna brings it in with a service's first search: queries of other threads would meet it half loaded.
import sqlalchemy.orm  # noqa: F401
from sqlalchemy import Engine, delete, select
from sqlalchemy.engine import URL

from dike.exceptions import BadInputError
from dike.trial.spec import Value
from framework.scheduler.lease import Heartbeat
from framework.search.database import (
    engine_arguments,
    making_tables,
    open_database,
    parse_url,
    storage_errors,
    wait_for_server,
)
from framework.search.records import Parameter, Sampler, SearchSpec

if TYPE_CHECKING:
    import optuna
    from optuna.samplers import BaseSampler
    from optuna.storages import BaseStorage, RDBStorage

REPORT_GROWTH = 1.15
"""Each intermediate value comes at a step this much later than the one before: about 100 of them in a million steps."""
MARK = "dike"
"""Attribute of studies that Dike has made."""
_TRIALS_AT_A_TIME = 100
"""A trial may have some hundred values, and on SQLite nobody else writes while they are removed."""


def default_sampler(space: Sequence[Parameter], trials: int | None) -> Sampler:
    """`grid` where every point can be tried, else `tpe`.

    Args:
        space: what is searched.
        trials: how many trials the user asked for; None if he did not say.
    """
    return "grid" if trials is None and all(parameter.choices for parameter in space) else "tpe"


def grid_size(space: Sequence[Parameter]) -> int:
    """How many points the grid of a space has.

    Raises:
        BadInputError: if there is no grid of it.
    """
    return math.prod(map(len, _axes(space)))


class Study:
    """The study of one search. Made by `create` and `open`.

    Raises:
        StorageUnavailableError: by every method, if the database cannot be reached or cannot write.
    """

    def __init__(self, study: optuna.Study, spec: SearchSpec, storage: RDBStorage, *, is_shared: bool) -> None:
        self._study = study
        self._database = storage
        self._is_shared = is_shared
        self._spec = spec
        self._url = storage.engine.url
        with study_errors(self._url):
            known = study.get_trials(deepcopy=False)
        self._asked = len(known)
        # Optuna finds a trial by its number by reading all of them.
        self._ids = {trial.number: trial._trial_id for trial in known}
        self._reported: dict[int, int] = {}

    @classmethod
    def create(cls, url: str, spec: SearchSpec, shared: RDBStorage | None = None) -> Study:
        """Makes the study of a new search.

        Args:
            url: where.
            spec: the search.
            shared: that storage, where somebody else closes it; None to open it.

        Raises:
            BadInputError: if the storage cannot be used, or holds a study of that name already.
        """
        study = cls.open(url, spec, shared)
        if study._asked:
            raise BadInputError(f"The storage holds an Optuna study '{spec.name}' already; choose another --name.")
        return study

    @classmethod
    def open(cls, url: str, spec: SearchSpec, shared: RDBStorage | None = None) -> Study:
        """Opens the study of an earlier search, or makes it if that search came to an end before it could.

        Args:
            url: where.
            spec: the search.
            shared: see `create`.

        Raises:
            BadInputError: if the storage cannot be used, or the study of that name is not Dike's.
        """
        storage = shared or open_storage(url)
        return cls(_study(storage, spec), spec, storage, is_shared=shared is not None)

    def close(self) -> None:
        """Closes all connections of its own."""
        if not self._is_shared:
            close_storage(self._database)

    def wait_for_server(self, log: Callable[[str], None]) -> None:
        """See `framework.search.database.wait_for_server`."""
        wait_for_server(self._database.engine, log)

    def delete(self) -> None:
        """Removes the study and its trials."""
        with study_errors(self._url):
            self._storage.delete_study(self._study._study_id)

    @property
    def remaining(self) -> int:
        """How many trials can still be asked for."""
        return max(0, self._spec.trial_count - self._asked)

    def ask(self) -> tuple[int, dict[str, Value]]:
        """A new trial: its number and its parameters.

        Points of a grid come in the order in which the user listed the values, the last parameter changing fastest.
        What is random depends on the seed, the trial's number and the trials told so far, and so is the same after
        `open`.

        Raises:
            ValueError: if none remains.
        """
        if not self.remaining:
            raise ValueError("all trials have been asked for")
        number = self._asked
        self._study.sampler = _sampler(self._spec, number)
        with study_errors(self._url):
            trial = self._study.ask()
            self._asked += 1
            self._ids[trial.number] = trial._trial_id
            return trial.number, _suggest(trial, self._spec.space)

    def asked(self) -> dict[int, dict[str, Value]]:
        """All trials that have been asked for: number -> parameters.

        A process that was killed may have asked for one of which it has left no other trace.
        """
        import optuna

        asked = {}
        with study_errors(self._url):
            for frozen in self._study.get_trials(deepcopy=False):
                parameters: dict[str, Value] = dict(frozen.params)
                if not frozen.state.is_finished() and len(parameters) < len(self._spec.space):
                    # The process was killed between two parameters.
                    self._study.sampler = _sampler(self._spec, frozen.number)
                    trial = optuna.Trial(self._study, frozen._trial_id)
                    parameters = _suggest(trial, self._spec.space)
                asked[frozen.number] = parameters
        return asked

    def report(self, number: int, step: int, value: float) -> None:
        """An intermediate value of a trial that has not ended; only some are kept, ever fewer as steps become many."""
        if number not in self._reported:
            self._reported[number] = max(self._frozen(number).intermediate_values, default=-1)
        last = self._reported[number]
        if step > last and step >= last * REPORT_GROWTH:
            with study_errors(self._url):
                self._storage.set_trial_intermediate_value(self._ids[number], step, value)
            self._reported[number] = step

    def annotate(self, number: int, attributes: Mapping[str, Any]) -> None:
        """Attributes of a trial that has not ended, such as its state and its checkpoint, for people who look at it."""
        with study_errors(self._url):
            for name, value in attributes.items():
                self._storage.set_trial_user_attr(self._ids[number], name, value)

    def tell(
        self, number: int, value: float | None, *, failed: bool, attributes: Mapping[str, Any] | None = None
    ) -> None:
        """A trial has ended. Nothing happens if that has been told before.

        Args:
            number: which.
            value: its objective; NaN makes it a failure, as Optuna has no place for it.
            failed: whether it could not be completed.
            attributes: of it, see `annotate`.
        """
        from optuna.trial import TrialState as State

        if self._frozen(number).state.is_finished():
            return
        shown = dict(attributes or {})
        is_number = value is not None and not math.isnan(value)
        if value is not None and not is_number:
            shown["objective"] = "nan"
        self.annotate(number, shown)
        with study_errors(self._url):
            if failed or value is None or not is_number:
                self._storage.set_trial_state_values(self._ids[number], State.FAIL)
            else:
                self._storage.set_trial_state_values(self._ids[number], State.COMPLETE, [value])

    @property
    def _storage(self) -> BaseStorage:
        return self._study._storage

    def _frozen(self, number: int) -> optuna.trial.FrozenTrial:
        with study_errors(self._url):
            return self._storage.get_trial(self._ids[number])


# What the sampler is asked for.


def _study(storage: RDBStorage, spec: SearchSpec) -> optuna.Study:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with study_errors(storage.engine.url):
        direction: Literal["minimize", "maximize"] = "minimize" if spec.mode == "min" else "maximize"
        study = optuna.create_study(
            storage=storage, study_name=spec.name, direction=direction, load_if_exists=True, sampler=_sampler(spec, 0)
        )
        if MARK not in study.user_attrs:
            if study.get_trials(deepcopy=False):
                raise BadInputError(
                    f"The storage holds an Optuna study '{spec.name}' that is not Dike's; choose another --name."
                )
            study.set_user_attr(MARK, {"script": spec.script, "metric": spec.metric, "policy": spec.policy})
        return study


def _sampler(spec: SearchSpec, number: int) -> BaseSampler:
    """A sampler for one trial; the same whichever process asks."""
    import numpy as np
    from optuna.exceptions import ExperimentalWarning
    from optuna.samplers import PartialFixedSampler, RandomSampler, TPESampler

    seed = int(np.random.SeedSequence([spec.seed, number]).generate_state(1)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        if spec.sampler == "tpe":
            # Trials that still run count as bad ones, so that those asked for meanwhile do not all go to one place.
            return TPESampler(seed=seed, constant_liar=True)
        if spec.sampler == "grid" and number < spec.trial_count:
            return PartialFixedSampler(_grid_point(spec, number), RandomSampler(seed=seed))
        return RandomSampler(seed=seed)


def _suggest(trial: optuna.Trial, space: Sequence[Parameter]) -> dict[str, Value]:
    return {parameter.name: _suggest_one(trial, parameter) for parameter in space}


def _suggest_one(trial: optuna.Trial, parameter: Parameter) -> Value:
    name = parameter.name
    if parameter.choices:
        value = trial.suggest_categorical(name, parameter.choices)
        assert value is not None
        return value
    if parameter.is_integer:
        return trial.suggest_int(name, int(parameter.low), int(parameter.high), log=parameter.log)
    return trial.suggest_float(name, parameter.low, parameter.high, log=parameter.log)


def _grid_point(spec: SearchSpec, number: int) -> dict[str, Value]:
    """The values of a trial; with fewer trials than points these are some points at random, in the grid's order."""
    axes = _axes(spec.space)
    count = math.prod(map(len, axes))
    index = number
    if spec.trial_count < count:
        index = sorted(random.Random(spec.seed).sample(range(count), spec.trial_count))[number]  # noqa: S311
    point: dict[str, Value] = {}
    for parameter, values in zip(reversed(spec.space), reversed(axes), strict=True):
        index, at = divmod(index, len(values))
        point[parameter.name] = values[at]
    return point


def _axes(space: Sequence[Parameter]) -> list[tuple[Value, ...]]:
    """The values of each parameter in a grid: its choices, or the whole numbers of its range."""
    axes: list[tuple[Value, ...]] = []
    for parameter in space:
        if parameter.choices:
            axes.append(parameter.choices)
        elif parameter.is_integer and not parameter.log:
            axes.append(tuple(range(int(parameter.low), int(parameter.high) + 1)))
        else:
            raise BadInputError(
                f"The parameter '{parameter.name}' is a range, of which there is no grid; list its values, or take "
                "--sampler tpe with --trials N."
            )
    return axes


# The storage.


def load_optuna() -> None:
    """Loads all that is used of Optuna, before there are threads: two that begin to can both meet it half loaded."""
    import optuna.exceptions
    import optuna.importance
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


class SharedStudies:
    """Connections to the studies, and the thread that keeps the leases; nothing of it is there before the first search.

    Args:
        url: an SQLAlchemy URL.
        engine: that database, for short writing transactions.

    Attributes:
        heartbeat: keeps the searches' leases alive.
    """

    def __init__(self, url: str, engine: Engine) -> None:
        self._url = url
        self._opening = threading.Lock()
        self._storage: RDBStorage | None = None
        self.heartbeat = Heartbeat(engine)

    def storage(self) -> RDBStorage:
        """Optuna's storage.

        Raises:
            BadInputError: if it cannot be used.
        """
        with self._opening:
            if self._storage is None:
                self._storage = open_storage(self._url)
            return self._storage

    def close(self) -> None:
        """Closes the connections to the studies."""
        if self._storage is not None:
            close_storage(self._storage)
