"""Creates a search's policy with what the database knows: measured migration cost, and earlier trials."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from dike.exceptions import BadInputError
from framework.policies.trials.dike_policy import DikePolicy
from framework.policies.trials.earlier_trials import MIN_EARLIER_TRIALS, EarlierTrial, EarlierTrials
from framework.policies.trials.interface import Policy
from framework.policies.trials.registry import make_policy
from framework.scheduler.journal import StorageUnavailableError
from framework.search.migration_cost import with_measured_migration_cost
from framework.search.objective import Objective
from framework.search.records import SearchSpec, SliceRecord, TrialState
from framework.search.space import check_policy
from framework.search.store import Store

MAX_LOSSES_PER_TRIAL = 200
"""Maximum number of losses per earlier trial, evenly chosen."""


def policy_of(
    spec: SearchSpec,
    store: Store,
    slices: Iterable[SliceRecord],
    *,
    resumed: bool,
    notify: Callable[[str], None],
) -> Policy:
    """Creates the policy of a new or resumed search; `notify` receives what it learns from.

    A resumed search continues without earlier searches from which nothing can be learned any more.

    Raises:
        BadInputError: if the policy is unknown, or cannot learn from the named searches.
    """
    settings = with_measured_migration_cost(spec.settings, slices)
    check_policy(spec)
    if not spec.warm_start_from:
        return make_policy(spec.policy, settings)
    try:
        earlier = earlier_trials(spec, store)
    except StorageUnavailableError:
        raise
    except BadInputError as error:
        if not resumed:
            raise
        notify(f"continues without learning from {_named(spec)}: {error}")
        return make_policy(spec.policy, settings)
    notify(f"learns from {len(earlier)} trials of {_named(spec)}")
    return DikePolicy(settings, earlier=EarlierTrials(earlier))


def earlier_trials(spec: SearchSpec, store: Store) -> Sequence[EarlierTrial]:
    """Returns the finished trials of the searches in `spec.warm_start_from`.


    Raises:
        BadInputError: if a search does not exist, has another objective, or too few trials finished.
    """
    found: list[EarlierTrial] = []
    silent = 0
    objective = Objective(spec.metric, spec.mode, spec.value)
    for name in dict.fromkeys(spec.warm_start_from):
        if not store.has_search(name):
            raise BadInputError(f"There is no search '{name}' to learn from here; {store.hint(name)}")
        other = store.other_search(name)
        if (other.spec.metric, other.spec.mode) != (spec.metric, spec.mode):
            raise BadInputError(
                f"The search '{name}' was for the {other.spec.goal}, and this one is for the {spec.goal}; learn "
                "from one with the same --metric and --mode."
            )
        losses = other.load_losses(limit=MAX_LOSSES_PER_TRIAL)
        for trial in other.load_trials(readings=False):
            if trial.state is not TrialState.FINISHED:
                continue
            readings = objective.readings(losses.get(trial.number, ()))
            if not readings or not readings[-1].step:
                silent += 1
            else:
                steps, values = ([getattr(one, name) for one in readings] for name in ("step", "loss"))
                found.append(EarlierTrial(steps, values, trial.samples_per_step))
    if len(found) < MIN_EARLIER_TRIALS:
        others = f", {silent} more reported no {spec.metric} on the way" if silent else ""
        raise BadInputError(
            f"{len(found)} trials of {_named(spec)} were trained to their end{others}; learning needs at least "
            f"{MIN_EARLIER_TRIALS}."
        )
    return found


def _named(spec: SearchSpec) -> str:
    return " and ".join(dict.fromkeys(spec.warm_start_from))
