"""A search's policy, and what it is told from the database: what a move costs, and the trials of earlier searches."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from dike.exceptions import BadInputError
from framework.policies.trials.dike_policy import DikePolicy
from framework.policies.trials.earlier_trials import FEWEST, EarlierTrial, EarlierTrials
from framework.policies.trials.interface import Policy
from framework.policies.trials.registry import check_learning, make_policy
from framework.search.migration_cost import with_measured_migration_cost
from framework.search.records import SearchSpec, SliceRecord, TrialState
from framework.search.store import Store

logger = logging.getLogger(__name__)


def policy_of(spec: SearchSpec, store: Store, slices: Iterable[SliceRecord], *, resumed: bool) -> Policy:
    """The policy of a search that begins or goes on.

    Args:
        spec: the search.
        store: its database.
        slices: the time slices it has had.
        resumed: whether it goes on; then it does so without the searches it learned from that are gone.

    Raises:
        BadInputError: if there is no such policy, or nothing can be learned from the searches that are named.
    """
    settings = with_measured_migration_cost(spec.settings, slices)
    check_learning(spec.policy, spec.learn_from)
    earlier = earlier_trials(spec, store, missing_ok=resumed) if spec.learn_from else ()
    if not earlier:
        return make_policy(spec.policy, settings)
    return DikePolicy(settings, earlier=EarlierTrials(earlier))


def earlier_trials(spec: SearchSpec, store: Store, *, missing_ok: bool = False) -> Sequence[EarlierTrial]:
    """The trials of the searches in `spec.learn_from` that were trained to their end.

    Args:
        spec: the search that learns from them.
        store: the database they are in.
        missing_ok: whether to do without those that are gone, and without any where few are left.

    Raises:
        BadInputError: if there is no such search, it has another objective, or too few of its trials have ended.
    """
    found: list[EarlierTrial] = []
    known = {search.spec.name for search in store.searches(*spec.learn_from)} if missing_ok else set(spec.learn_from)
    for name in dict.fromkeys(spec.learn_from):
        if name not in known:
            logger.warning("the search %s that %s learns from is gone; it goes on without", name, spec.name)
            continue
        other = store.reading(name)
        if (other.spec.metric, other.spec.mode) != (spec.metric, spec.mode):
            raise BadInputError(
                f"The search '{name}' was for the {_goal(other.spec)}, and this one is for the {_goal(spec)}; learn "
                "from one with the same --metric and --mode."
            )
        for trial in other.load_trials():
            if trial.state is TrialState.FINISHED and trial.readings and trial.readings[-1].step:
                samples = [reading.step * trial.samples_per_step for reading in trial.readings]
                found.append(EarlierTrial(samples, [reading.loss for reading in trial.readings]))
    if len(found) >= FEWEST:
        return found
    if missing_ok:
        return ()
    raise BadInputError(
        f"{len(found)} trials of {' and '.join(spec.learn_from)} were trained to their end; to learn from them takes "
        f"{FEWEST}."
    )


def _goal(spec: SearchSpec) -> str:
    return f"{'least' if spec.mode == 'min' else 'greatest'} {spec.metric}"
