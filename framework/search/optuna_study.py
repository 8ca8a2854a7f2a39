"""A search as an Optuna study: samplers, and a storage that `optuna-dashboard` opens.

Dike's trial numbers are Optuna's. A trial stays RUNNING in Optuna from the moment it is asked for until it has ended,
however often it is suspended in between.
"""

from __future__ import annotations

import functools
import math
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

# Not used here. Optuna brings it in with a service's first search: queries of other threads would meet it half loaded.
import sqlalchemy.orm  # noqa: F401
from sqlalchemy import Engine, delete, select
from sqlalchemy.engine import URL
from sqlalchemy.exc import SQLAlchemyError

from dike.exceptions import BadInputError, DikeError
from dike.main_script import one_line
from dike.trial.search_space import plain_value
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
from framework.search.pruners import Judge, parse_stop
from framework.search.records import Parameter, SearchSpec
from framework.search.samplers import is_finite, own_object, sampler_of, sign_states, tries_all, untried_point

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution
    from optuna.storages import BaseStorage, RDBStorage
    from optuna.trial import TrialState

REPORT_GROWTH = 1.15
"""Each intermediate value comes at a step this much later than the one before: about 100 of them in a million steps."""
MARK = "dike"
"""Attribute of studies that Dike has made."""
EXHAUSTED = "dike_exhausted"
"""Attribute of studies whose sampler has said that it has no more points."""
_REPEATING = ("random", "tpe")
"""Samplers that draw each parameter by itself, without a note in the database, and may draw a point again."""
_TRIALS_AT_A_TIME = 100
"""A trial may have some hundred values, and on SQLite nobody else writes while they are removed."""


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
            # One that waits was made by `_avoid_a_repeat`, and not asked for yet.
            known = [trial for trial in study.get_trials(deepcopy=False) if trial.state.name != "WAITING"]
        self._asked = len(known)
        # Optuna finds a trial by its number by reading all of them.
        self._ids = {trial.number: trial._trial_id for trial in known}
        self._reported: dict[int, int] = {}
        self._is_exhausted = EXHAUSTED in study.user_attrs
        self._judge = Judge(parse_stop(spec.stop), spec.mode) if spec.stop else None
        self._ask_space = own_object(spec.space_function, "space", spec) if spec.space_function else None
        if spec.sampler_object:
            study.sampler = sampler_of(spec, 0)
            if known:
                # What it drew at random before it would draw again.
                study.sampler.reseed_rng()

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
        return 0 if self._is_exhausted else max(0, self._spec.trial_count - self._asked)

    def ask(self) -> tuple[int, dict[str, Value]]:
        """A new trial: its number and its parameters.

        Points of a grid come in the order in which the user listed the values, the last parameter changing fastest.
        What is random depends on the seed, the trial's number and the trials told so far, and so is the same after
        `open`, unless the sampler is the user's own object.

        Raises:
            ValueError: if none remains.
            BadInputError: if the user's own sampler or space fails.
        """
        if not self.remaining:
            raise ValueError("all trials have been asked for")
        number = self._asked
        if self._spec.sampler in _REPEATING and not self._spec.sampler_object and is_finite(self._spec.space):
            self._avoid_a_repeat(number)
        self._set_sampler(number)
        with study_errors(self._url), _errors_of(f"sampler {self._spec.sampler}"):
            trial = self._study.ask()
            self._asked += 1
            self._ids[trial.number] = trial._trial_id
            parameters = self._suggest(trial)
            if tries_all(self._study.sampler) and not self._is_exhausted:
                self._note_last_point(trial.number)
            return trial.number, parameters

    def asked(self) -> dict[int, dict[str, Value]]:
        """All trials that have been asked for: number -> parameters.

        A process that was killed may have asked for one of which it has left no other trace.
        """
        import optuna

        asked = {}
        with study_errors(self._url):
            for frozen in self._study.get_trials(deepcopy=False):
                if frozen.state.name == "WAITING":
                    continue
                parameters: dict[str, Value] = dict(frozen.params)
                is_partial = self._ask_space is not None or len(parameters) < len(self._spec.space)
                if not frozen.state.is_finished() and is_partial:
                    # The process was killed between two parameters, or a function may make others of them.
                    self._set_sampler(frozen.number)
                    parameters = self._suggest(optuna.Trial(self._study, frozen._trial_id))
                asked[frozen.number] = parameters
        return asked

    def _avoid_a_repeat(self, number: int) -> None:
        """Makes the next trial one of another point, where the sampler would repeat one of a finite space."""
        import optuna

        with study_errors(self._url):
            trials = self._study.get_trials(deepcopy=False)
        names = [parameter.name for parameter in self._spec.space]
        tried = {tuple(one.params.values()) for one in trials if list(one.params) == names}
        point = untried_point(self._spec, tried, number)
        if point is None or any(one.state.name == "WAITING" for one in trials):
            return
        # What it will be asked for is drawn ahead, with a sampler that is the same again then.
        sampler = sampler_of(self._spec, number)
        frozen = optuna.trial.create_trial(state=optuna.trial.TrialState.RUNNING)
        frozen.number = number
        with study_errors(self._url), _errors_of(f"sampler {self._spec.sampler}"):
            draw = functools.partial(sampler.sample_independent, self._study, frozen)
            if tuple(draw(one.name, _distribution(one)) for one in self._spec.space) in tried:
                self._study.enqueue_trial(point)

    def report(self, number: int, step: int, value: float) -> None:
        """An intermediate value of a trial that has not ended; only some are kept, ever fewer as steps become many."""
        if number not in self._reported:
            self._reported[number] = max(self._frozen(number).intermediate_values, default=-1)
        last = self._reported[number]
        if step > last and step >= last * REPORT_GROWTH:
            with study_errors(self._url):
                self._storage.set_trial_intermediate_value(self._ids[number], step, value)
            self._reported[number] = step

    def judge(self, number: int, count: int, value: float) -> bool:
        """Takes a value in that a trial has stated, in a search that stops trials; whether it is to be stopped.

        Args:
            number: which trial; it has not ended.
            count: how many values it has stated, this one included: what stands in the place of steps, so that trials
                with batches of different sizes are compared after as many epochs.
            value: the value.
        """
        assert self._judge is not None
        self.report(number, count, value)
        is_kept = self._reported[number] == count
        stored = functools.partial(self._frozen, number)
        with study_errors(self._url):
            return self._judge.is_hopeless(self._study, number, count, value, stored, is_kept=is_kept)

    def annotate(self, number: int, attributes: Mapping[str, Any]) -> None:
        """Attributes of a trial that has not ended, such as its state and its checkpoint, for people who look at it."""
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
        """A trial has ended. Nothing happens if that has been told before.

        Args:
            number: which.
            value: its objective; NaN makes it a failure, as Optuna has no place for it.
            failed: whether it could not be completed.
            stopped: whether it was ended for good; then it needs no value.
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
        values = [value] if value is not None and is_number else None
        state = State.PRUNED if stopped else State.FAIL if failed or values is None else State.COMPLETE
        with study_errors(self._url):
            try:
                if self._spec.sampler_object:
                    self._tell_sampler(number, state, values)
            finally:
                # Else a sampler that fails now would fail in the same way whenever the search is to go on.
                self._storage.set_trial_state_values(self._ids[number], state, None if state is State.FAIL else values)
        if self._judge is not None:
            self._judge.forget(number)

    def _tell_sampler(self, number: int, state: TrialState, values: list[float] | None) -> None:
        """What Optuna's own loop does for a sampler; named ones need none of it."""
        with _errors_of(f"sampler {self._spec.sampler}"):
            self._after_trial(number, state, values)

    def _after_trial(self, number: int, state: TrialState, values: list[float] | None) -> None:
        self._study._thread_local.in_optimize_loop = True
        self._study.sampler.after_trial(self._study, self._frozen(number), state, values)
        if self._study._stop_flag:
            self._set_exhausted()

    def _set_exhausted(self) -> None:
        self._is_exhausted = True
        self._study.set_user_attr(EXHAUSTED, value=True)

    def _note_last_point(self, number: int) -> None:
        """Finds out, of a sampler that tries each point once, whether the one just asked for was the last.

        Optuna looks at that when a trial has ended; many may have been asked for by then.
        """
        from optuna.samplers import GridSampler
        from optuna.trial import TrialState as State

        if not isinstance(self._study.sampler, GridSampler):
            # It takes trials that still run for done.
            self._after_trial(number, State.FAIL, None)
        elif number + 1 >= math.prod(map(len, self._frozen(number).system_attrs["search_space"].values())):
            self._set_exhausted()

    def _set_sampler(self, number: int) -> None:
        if not self._spec.sampler_object:
            self._study.sampler = sampler_of(self._spec, number)

    def _suggest(self, trial: optuna.Trial) -> dict[str, Value]:
        if self._ask_space is None:
            return {parameter.name: _suggest_one(trial, parameter) for parameter in self._spec.space}
        with _errors_of("function given as the space"):
            return _checked_point(self._ask_space(trial), trial)

    @property
    def _storage(self) -> BaseStorage:
        return self._study._storage

    def _frozen(self, number: int) -> optuna.trial.FrozenTrial:
        with study_errors(self._url):
            return self._storage.get_trial(self._ids[number])


# What the sampler is asked for.


def _study(storage: RDBStorage, spec: SearchSpec) -> optuna.Study:
    import optuna
    from optuna.samplers import RandomSampler

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sign_states()
    with study_errors(storage.engine.url):
        direction: Literal["minimize", "maximize"] = "minimize" if spec.mode == "min" else "maximize"
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


def _checked_point(point: object, trial: optuna.Trial) -> dict[str, Value]:
    """What a function made of a space: its parameters; None for those that it has asked the trial for."""
    if point is None:
        point = trial.params
    if not isinstance(point, Mapping) or not point:
        raise BadInputError(
            f"The function given as the space returned {point!r}; it returns a dictionary, as in "
            "lambda trial: {'lr': trial.suggest_float('lr', 1e-5, 0.1, log=True)}."
        )
    return {str(name): plain_value(str(name), value) for name, value in point.items()}


def _distribution(parameter: Parameter) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if parameter.choices:
        return CategoricalDistribution(parameter.choices)
    if parameter.is_integer:
        return IntDistribution(int(parameter.low), int(parameter.high), log=parameter.log)
    return FloatDistribution(parameter.low, parameter.high, log=parameter.log)


def _suggest_one(trial: optuna.Trial, parameter: Parameter) -> Value:
    name = parameter.name
    if parameter.choices:
        value = trial.suggest_categorical(name, parameter.choices)
        assert value is not None
        return value
    if parameter.is_integer:
        return trial.suggest_int(name, int(parameter.low), int(parameter.high), log=parameter.log)
    return trial.suggest_float(name, parameter.low, parameter.high, log=parameter.log)


# The storage.


def load_optuna() -> None:
    """Loads what a search uses of Optuna, before there are threads: two that begin to can both meet it half loaded."""
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


@contextmanager
def _errors_of(what: str) -> Iterator[None]:
    """For code of the user's own that runs in the process of the search.

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
