"""A search as an Optuna study: samplers, and a storage that `optuna-dashboard` can open.

Trial numbers equal Optuna's. A trial is RUNNING in Optuna from `ask` until its end, suspensions included.
"""

from __future__ import annotations

import functools
import math
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

# Unused here: otherwise Optuna would import it with a service's first search, while other threads run queries.
import sqlalchemy.orm  # noqa: F401
from sqlalchemy import Engine, delete, select, update
from sqlalchemy.engine import URL
from sqlalchemy.exc import SQLAlchemyError

from dike.exceptions import BadInputError, DikeError
from dike.main_script import one_line
from dike.trial.search_space import plain_value
from dike.trial.spec import Value
from framework.scheduler.lease import Heartbeat
from framework.search.database import (
    engine_arguments,
    open_database,
    parse_url,
    storage_errors,
    table_creation_lock,
    wait_for_server,
)
from framework.search.pruners import Pruner, parse_stop
from framework.search.records import Parameter, SearchSpec
from framework.search.samplers import (
    distribution_of,
    grid_points,
    is_exhaustive,
    is_finite,
    load_object,
    point_of,
    sampler_of,
    sign_states,
    untried_point,
)

if TYPE_CHECKING:
    import optuna
    from optuna.storages import BaseStorage, RDBStorage
    from optuna.trial import TrialState

REPORT_GROWTH = 1.15
"""Minimum ratio of the steps of consecutive intermediate values: about 100 values in a million steps."""
MARK = "dike"
"""Attribute of studies created by Dike."""
EXHAUSTED = "dike_exhausted"
"""Attribute of studies whose sampler has no more points."""
_REPEATING = ("random", "tpe")
"""Samplers that draw each parameter independently, without state in the database, and may repeat a point."""
_DELETE_BATCH_TRIALS = 100
"""A trial may have hundreds of values, and SQLite blocks other writers while they are deleted."""


class Study:
    """The study of one search. Created by `create` and `open`.

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
            trials = _numbers_and_states(study, storage)
        # A WAITING trial was enqueued by `_enqueue_if_repeated`, and not asked for yet.
        known = [trial for trial in trials if trial.state.name != "WAITING"]
        self._has_enqueued = len(known) < len(trials)
        self._asked = len(known)
        # Cached, as Optuna reads all trials to find one by number.
        self._ids = {trial.number: trial.trial_id for trial in known}
        self._reported: dict[int, int] = {}
        self._ended = {trial.number for trial in known if trial.state.is_finished()}
        """Trials that had ended before this process."""
        self._open = {trial.number for trial in known} - self._ended
        """Trials whose end this process has not reported yet."""
        # The number of trials when its sampler had no more points: more may have been added since.
        self._is_exhausted = study.user_attrs.get(EXHAUSTED) == spec.trial_count
        self._pruner = Pruner(parse_stop(spec.stop), spec.mode) if spec.stop else None
        self._ask_space = load_object(spec.space_function, "space", spec) if spec.space_function else None
        if spec.sampler_object:
            study.sampler = sampler_of(spec, 0)
            if known:
                # Otherwise it would repeat its random draws.
                study.sampler.reseed_rng()

    @classmethod
    def create(cls, url: str, spec: SearchSpec, shared: RDBStorage | None = None) -> Study:
        """Creates the study of a new search.

        Args:
            url: URL of the database.
            spec: the search.
            shared: its open storage, owned by the caller; None to open it.

        Raises:
            BadInputError: if the storage cannot be used, or has a study of that name already.
        """
        study = cls.open(url, spec, shared)
        if study._asked:
            raise BadInputError(f"The storage holds an Optuna study '{spec.name}' already; choose another --name.")
        return study

    @classmethod
    def open(cls, url: str, spec: SearchSpec, shared: RDBStorage | None = None) -> Study:
        """Opens the study of an earlier search, or creates a missing one. Arguments as for `create`.

        Raises:
            BadInputError: if the storage cannot be used, or the study of that name is not Dike's.
        """
        storage = shared or open_storage(url)
        return cls(_study(storage, spec), spec, storage, is_shared=shared is not None)

    def close(self) -> None:
        if not self._is_shared:
            close_storage(self._database)

    def wait_for_server(self, log: Callable[[str], None]) -> None:
        wait_for_server(self._database.engine, log)

    def delete(self) -> None:
        with study_errors(self._url):
            self._storage.delete_study(self._study._study_id)

    @property
    def remaining(self) -> int:
        """Number of trials that can still be asked for."""
        return 0 if self._is_exhausted else max(0, self._spec.trial_count - self._asked)

    def ask(self) -> tuple[int, dict[str, Value]]:
        """Creates a trial; returns its number and parameters.

        Points of a grid follow the order of the listed values, the last parameter changing fastest. Random points
        depend on the seed, the trial's number and the results so far, and so are the same after `open`, except from a
        user's own sampler.

        Raises:
            ValueError: if none remains.
            BadInputError: if the user's own sampler or space fails.
        """
        if not self.remaining:
            raise ValueError("all trials have been asked for")
        number = self._asked
        if self._spec.sampler in _REPEATING and not self._spec.sampler_object and is_finite(self._spec.space):
            self._enqueue_if_repeated(number)
        self._set_sampler(number)
        with study_errors(self._url), _user_code_errors(f"sampler {self._spec.sampler}"):
            trial = self._new_trial()
            self._asked += 1
            self._ids[trial.number] = trial._trial_id
            self._open.add(trial.number)
            self._reported[trial.number] = -1
            parameters = self._suggest(trial)
            if is_exhaustive(self._study.sampler) and not self._is_exhausted:
                self._detect_exhaustion(trial.number)
            return trial.number, parameters

    def _new_trial(self) -> optuna.Trial:
        """Creates a trial as `optuna.Study.ask`, which reads all open trials to look for enqueued ones."""
        import optuna

        if self._has_enqueued:
            self._has_enqueued = False
            return self._study.ask()
        self._study._thread_local.cached_all_trials = None
        return optuna.Trial(self._study, self._storage.create_new_trial(self._study._study_id))

    def asked(self, known: Collection[int] = ()) -> dict[int, dict[str, Value]]:
        """Returns number -> parameters of all trials asked for, including one that a killed process did not store.

        Trials that are `known` are left out: reading thousands takes seconds.
        """
        import optuna

        asked = {}
        with study_errors(self._url):
            for number in sorted(self._ids.keys() - set(known)):
                frozen = self._frozen(number)
                parameters: dict[str, Value] = dict(frozen.params)
                is_partial = any(one.is_used(parameters) and one.name not in parameters for one in self._spec.space)
                if not frozen.state.is_finished() and (is_partial or self._ask_space is not None):
                    # The process was killed between two parameters, or a function maps them to others.
                    self._set_sampler(frozen.number)
                    parameters = self._suggest(optuna.Trial(self._study, frozen._trial_id))
                asked[frozen.number] = parameters
        return asked

    def _enqueue_if_repeated(self, number: int) -> None:
        """Enqueues another point as the next trial if the sampler would repeat one of a finite space."""
        import optuna

        with study_errors(self._url):
            trials = self._study.get_trials(deepcopy=False)
        tried = {point_of(one.params) for one in trials}
        point = untried_point(self._spec, tried, number)
        if point is None or any(one.state.name == "WAITING" for one in trials):
            return
        # Draws the point ahead, with a sampler equal to the one used later.
        sampler = sampler_of(self._spec, number)
        frozen = optuna.trial.create_trial(state=optuna.trial.TrialState.RUNNING)
        frozen.number = number
        with study_errors(self._url), _user_code_errors(f"sampler {self._spec.sampler}"):
            drawn: dict[str, Value] = {}
            for one in self._spec.space:
                if one.is_used(drawn):
                    drawn[one.name] = sampler.sample_independent(self._study, frozen, one.name, distribution_of(one))
            if point_of(drawn) in tried:
                self._study.enqueue_trial(point)
                self._has_enqueued = True

    def report(self, number: int, step: int, value: float) -> None:
        """Stores an intermediate value of a running trial; only some are kept (`REPORT_GROWTH`)."""
        if number not in self._reported:
            self._reported[number] = max(self._frozen(number).intermediate_values, default=-1)
        last = self._reported[number]
        if step > last and step >= last * REPORT_GROWTH:
            with study_errors(self._url):
                self._storage.set_trial_intermediate_value(self._ids[number], step, value)
            self._reported[number] = step

    def judge(self, number: int, count: int, value: float) -> bool:
        """Applies a value in a search that stops trials, and returns whether to stop the trial.

        Args:
            number: the trial, which has not ended.
            count: number of values reported, used in place of steps, so that trials with different batch sizes are
                compared after equal epochs.
            value: the value.
        """
        assert self._pruner is not None
        self.report(number, count, value)
        is_kept = self._reported[number] == count
        stored = functools.partial(self._frozen, number)
        with study_errors(self._url):
            return self._pruner.prune(self._study, number, count, value, stored, is_kept=is_kept)

    def annotate(self, number: int, attributes: Mapping[str, Any]) -> None:
        """Sets attributes of a running trial, such as its state and checkpoint, for people."""
        with study_errors(self._url):
            for name, value in attributes.items():
                self._storage.set_trial_user_attr(self._ids[number], name, value)

    def tell(
        self,
        number: int,
        value: float | None,
        *,
        failed: bool,
        stopped: bool = False,
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        """Ends a trial; no-op if it has ended already.

        A NaN value makes it a failure, as Optuna cannot store NaN. A stopped trial needs no value.
        """
        from optuna.trial import TrialState as State

        if number in self._ended:
            return
        # An earlier attempt may have failed after the database had it.
        if number not in self._open and self._frozen(number).state.is_finished():
            return
        self._open.discard(number)
        shown = dict(attributes or {})
        is_number = value is not None and not math.isnan(value)
        if value is not None and not is_number:
            shown["objective"] = "nan"
        self.annotate(number, shown)
        values = [value] if value is not None and is_number else None
        state = State.PRUNED if stopped else State.FAIL if failed or values is None else State.COMPLETE
        with study_errors(self._url):
            try:
                if self._spec.sampler_object:
                    self._notify_sampler(number, state, values)
            finally:
                # Otherwise a sampler that fails now would fail again whenever the search is resumed.
                self._storage.set_trial_state_values(self._ids[number], state, None if state is State.FAIL else values)
        if self._pruner is not None:
            self._pruner.forget(number)

    def _notify_sampler(self, number: int, state: TrialState, values: list[float] | None) -> None:
        """Calls the user's sampler as Optuna's own loop does; named ones do not need it."""
        with _user_code_errors(f"sampler {self._spec.sampler}"):
            self._after_trial(number, state, values)

    def _after_trial(self, number: int, state: TrialState, values: list[float] | None) -> None:
        self._study._thread_local.in_optimize_loop = True
        self._study.sampler.after_trial(self._study, self._frozen(number), state, values)
        if self._study._stop_flag:
            self._set_exhausted()

    def _set_exhausted(self) -> None:
        self._is_exhausted = True
        self._study.set_user_attr(EXHAUSTED, self._spec.trial_count)

    def _detect_exhaustion(self, number: int) -> None:
        """Detects whether an exhaustive sampler has just given its last point.

        Optuna checks this when a trial ends, when more may have been asked for.
        """
        from optuna.samplers import GridSampler
        from optuna.trial import TrialState as State

        if not isinstance(self._study.sampler, GridSampler):
            # It counts running trials as done.
            self._after_trial(number, State.FAIL, None)
        elif number + 1 >= math.prod(map(len, self._frozen(number).system_attrs["search_space"].values())):
            self._set_exhausted()

    def _set_sampler(self, number: int) -> None:
        if not self._spec.sampler_object:
            point = next(self._untried_points) if self._spec.sampler == "grid" else None
            self._study.sampler = sampler_of(self._spec, number, point)

    @functools.cached_property
    def _untried_points(self) -> Iterator[dict[str, Value]]:
        """The points of the grid that no earlier process has asked for, in the grid's order."""
        with study_errors(self._url):
            trials = self._study.get_trials(deepcopy=False)
        tried = {point_of(one.params) for one in trials}
        return (point for point in grid_points(self._spec) if point_of(point) not in tried)

    def _suggest(self, trial: optuna.Trial) -> dict[str, Value]:
        if self._ask_space is None:
            point: dict[str, Value] = {}
            for parameter in self._spec.space:
                if parameter.is_used(point):
                    point[parameter.name] = _suggest_one(trial, parameter)
            return point
        with _user_code_errors("function given as the space"):
            return _checked_point(self._ask_space(trial), trial)

    @property
    def _storage(self) -> BaseStorage:
        return self._study._storage

    def _frozen(self, number: int) -> optuna.trial.FrozenTrial:
        with study_errors(self._url):
            return self._storage.get_trial(self._ids[number])


def _numbers_and_states(study: optuna.Study, storage: RDBStorage) -> Sequence[Any]:
    """Returns `number`, `trial_id` and `state` of all trials. Optuna would load their parameters and values, too."""
    from optuna.storages._rdb.models import TrialModel

    query = select(TrialModel.number, TrialModel.trial_id, TrialModel.state).order_by(TrialModel.number)
    with storage.engine.connect() as connection:
        return connection.execute(query.where(TrialModel.study_id == study._study_id)).all()


def _study(storage: RDBStorage, spec: SearchSpec) -> optuna.Study:
    import optuna
    from optuna.samplers import RandomSampler

    load_optuna()
    sign_states()
    with study_errors(storage.engine.url):
        direction: Literal["minimize", "maximize"] = "minimize" if spec.mode == "min" else "maximize"
        _set_choices(storage, spec)
        study = optuna.create_study(
            storage=storage, study_name=spec.name, direction=direction, load_if_exists=True, sampler=RandomSampler()
        )
        if MARK not in study.user_attrs:
            if study.get_trials(deepcopy=False):
                raise BadInputError(
                    f"The storage holds an Optuna study '{spec.name}' that is not Dike's; choose another --name."
                )
            study.set_user_attr(MARK, {"script": spec.script, "metric": spec.metric, "policy": spec.policy})
        return study


def _set_choices(storage: RDBStorage, spec: SearchSpec) -> None:
    """Updates the stored choices of lists that got more values: Optuna stores an index of a trial's value.

    Otherwise it would refuse further trials.
    """
    from optuna.distributions import distribution_to_json
    from optuna.storages._rdb.models import StudyModel, TrialModel, TrialParamModel

    study = select(StudyModel.study_id).where(StudyModel.study_name == spec.name).scalar_subquery()
    trials = select(TrialModel.trial_id).where(TrialModel.study_id == study)
    with storage.engine.begin() as connection:
        for parameter in spec.space:
            if not parameter.choices:
                continue
            wanted = distribution_to_json(distribution_of(parameter))
            connection.execute(
                update(TrialParamModel)
                .where(TrialParamModel.param_name == parameter.name)
                .where(TrialParamModel.trial_id.in_(trials))
                .where(TrialParamModel.distribution_json != wanted)
                .values(distribution_json=wanted)
            )


def _checked_point(point: object, trial: optuna.Trial) -> dict[str, Value]:
    """Validates the result of a space function; None stands for the parameters suggested by the trial."""
    if point is None:
        point = trial.params
    if not isinstance(point, Mapping) or not point:
        raise BadInputError(
            f"The function given as the space returned {point!r}; it returns a dictionary, as in "
            "lambda trial: {'lr': trial.suggest_float('lr', 1e-5, 0.1, log=True)}."
        )
    return {str(name): plain_value(str(name), value) for name, value in point.items()}


def _suggest_one(trial: optuna.Trial, parameter: Parameter) -> Value:
    name = parameter.name
    if parameter.choices:
        value = trial.suggest_categorical(name, parameter.choices)
        assert value is not None
        return value
    if parameter.is_integer:
        low, high, step = int(parameter.low), int(parameter.high), int(parameter.step or 1)
        return trial.suggest_int(name, low, high, log=parameter.log, step=step)
    return trial.suggest_float(name, parameter.low, parameter.high, log=parameter.log, step=parameter.step)


def load_optuna() -> None:
    """Imports Optuna, and silences its messages. Before threads start: concurrent imports can see it half loaded."""
    import optuna.exceptions
    import optuna.samplers
    import optuna.storages._rdb.models

    optuna.logging.set_verbosity(optuna.logging.WARNING)


def open_storage(url: str) -> RDBStorage:
    """Opens Optuna's storage in a database; close it with `close_storage`.

    Raises:
        BadInputError: if it cannot be used.
    """
    from optuna.storages import RDBStorage

    open_database(url).dispose()
    parsed = parse_url(url)
    with study_errors(parsed):
        try:
            with table_creation_lock(parsed):
                return RDBStorage(parsed.render_as_string(hide_password=False), engine_kwargs=engine_arguments(parsed))
        except RuntimeError as error:
            raise BadInputError(
                "The storage was made by another version of Optuna; run `optuna storage upgrade`, or choose another "
                "--storage."
            ) from error


def close_storage(storage: RDBStorage) -> None:
    storage.remove_session()
    storage.engine.dispose()


@contextmanager
def study_errors(url: URL) -> Iterator[None]:
    """`storage_errors`, also for Optuna's wrapper of database errors."""
    from optuna.exceptions import StorageInternalError

    with storage_errors(url):
        try:
            yield
        except StorageInternalError as error:
            # Its own message is generic.
            raise error.__cause__ or error from None


@contextmanager
def _user_code_errors(what: str) -> Iterator[None]:
    """Wraps code of the user's that runs in the process of the search.

    Raises:
        BadInputError: if it fails.
    """
    from optuna.exceptions import StorageInternalError

    try:
        yield
    except (DikeError, StorageInternalError, SQLAlchemyError):
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}"
        raise BadInputError(f"The {what} failed ({where}: {one_line(error)}).") from error


def remove_study(url: str, name: str) -> None:
    """Removes a study of Dike's with its trials; no-op if there is none.

    Raises:
        BadInputError: if the storage cannot be used; some of the trials may be removed.
    """
    from optuna.storages._rdb.models import BaseModel, TrialModel

    storage = open_storage(url)
    try:
        with study_errors(storage.engine.url):
            study_id = storage.get_study_id_from_name(name)
            if MARK not in storage.get_study_user_attrs(study_id):
                return
            # Optuna would load the whole study and delete it in one transaction. Trials come after rows that refer to
            # them.
            tables = [table for table in reversed(BaseModel.metadata.sorted_tables) if "trial_id" in table.c]
            with storage.engine.connect() as connection:
                query = select(TrialModel.trial_id).where(TrialModel.study_id == study_id)
                trials = connection.execute(query).scalars().all()
            for first in range(0, len(trials), _DELETE_BATCH_TRIALS):
                some = trials[first : first + _DELETE_BATCH_TRIALS]
                with storage.engine.begin() as connection:
                    for table in tables:
                        connection.execute(delete(table).where(table.c.trial_id.in_(some)))
            storage.delete_study(study_id)
    except KeyError:
        return
    finally:
        close_storage(storage)


class SharedStudies:
    """Connections to the studies and the heartbeat of their leases, shared by a service's searches; opened on first
    use.
    """

    def __init__(self, url: str, engine: Engine) -> None:
        self._url = url
        self._opening = threading.Lock()
        self._storage: RDBStorage | None = None
        self.heartbeat = Heartbeat(engine)

    def storage(self) -> RDBStorage:
        """Returns Optuna's storage, and opens it on first use.

        Raises:
            BadInputError: if it cannot be used.
        """
        with self._opening:
            if self._storage is None:
                self._storage = open_storage(self._url)
            return self._storage

    def close(self) -> None:
        if self._storage is not None:
            close_storage(self._storage)
