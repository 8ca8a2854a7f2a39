"""Strategies: with which tasks a script may train, by what it computes, the user's options and its checkpoints."""

from __future__ import annotations

from dike.exceptions import BadInputError
from dike.profile import Api, ModelProfile
from solver.choices import Strategy

ONE, ALLREDUCE, PS = "one", "allreduce", "ps"
WITHOUT_PS = frozenset({ONE, ALLREDUCE})


def why_not(profile: ModelProfile, strategy: str) -> str:
    """Why a script cannot train with a strategy, as a clause; empty if it can."""
    if strategy == PS:
        return profile.why_alone and f"it can only train without parameter servers. {profile.why_alone.rstrip('.')}"
    if profile.synchronous:
        return "it aggregates the gradients of several workers on parameter servers"
    if profile.needs_servers:
        return "it waits for parameter servers that it names itself"
    if profile.api is Api.COORDINATOR:
        return "its ClusterCoordinator needs parameter servers"
    if strategy == ONE or profile.own_distribution or profile.api is Api.LOOP:
        return ""
    if profile.api is Api.GRAPH:
        return "TensorFlow 1 sessions share gradients on parameter servers only"
    if profile.api is Api.TF_KERAS:
        return "tf_keras cannot share a batch among tasks"
    return profile.why_not_split


def possible_strategies(profile: ModelProfile, *, plain: bool | None = None) -> frozenset[str]:
    """The strategies that a script can use, including those that change its result.

    Args:
        profile: the model.
        plain: whether existing checkpoints are of a job without parameter servers; None if there are none.
    """
    found = {one for one in (ONE, ALLREDUCE, PS) if not why_not(profile, one)}
    if profile.api is Api.LOOP and not profile.own_distribution:
        found.discard(ALLREDUCE)
    if plain is not None:
        found &= WITHOUT_PS if plain else {PS}
    return frozenset(found)


def allowed_strategies(
    profile: ModelProfile,
    strategy: Strategy,
    *,
    min_workers: int | None = None,
    max_workers: int | None = None,
    wants_ps: str = "",
    has_rules: bool = False,
    plain: bool | None = None,
    elastic: bool = False,
) -> frozenset[str]:
    """The strategies among which the planner may choose.

    Args:
        profile: the model.
        strategy: the user's choice.
        min_workers: minimum workers; None if none was given.
        max_workers: maximum workers; None for no limit.
        wants_ps: the option that is for parameter servers only, if any: `--rules` or `--objective traffic`.
        has_rules: whether that option contradicts other strategies.
        plain: whether existing checkpoints are of a job without parameter servers; None if there are none.
        elastic: whether the number of workers changes. All sizes of a job read the same checkpoints, and a gang may
            become a single task.

    Raises:
        BadInputError: if the script cannot train that way, or options contradict each other.
    """
    if strategy == "auto":
        found = _automatic(profile, min_workers or 1, wants_ps if plain is None else "", plain, elastic=elastic)
    else:
        if has_rules and strategy != PS:
            raise BadInputError(f"{wants_ps} is for parameter servers; leave it out, or give --strategy ps.")
        _check_chosen(profile, strategy, min_workers or 1, None if elastic else max_workers, plain)
        found = frozenset({strategy})
        if elastic and strategy == ALLREDUCE and (min_workers or 1) == 1:
            found = WITHOUT_PS
    if max_workers == 1 and (fewer := found - {ALLREDUCE}):
        found = fewer
    return found


def check_elastic(profile: ModelProfile, found: frozenset[str]) -> None:
    """Raises `BadInputError` if a job with one of the strategies `found` cannot change its number of workers."""
    if PS in found or (ALLREDUCE in found and profile.api is not Api.LOOP):
        return
    if profile.api is Api.LOOP:
        raise BadInputError(
            f"--elastic is for training loops that Dike saves, and {profile.name} has one of its own; leave it out."
        )
    if profile.why_alone:
        raise BadInputError(f"This script can only be one plain task. {profile.why_alone}")
    raise BadInputError(_why_not_several(profile, 2, plain=False))


def _shares_batches(profile: ModelProfile) -> bool:
    return profile.can_split if profile.api is Api.KERAS else bool(profile.own_distribution)


def _automatic(
    profile: ModelProfile, min_workers: int, wants_ps: str, plain: bool | None, *, elastic: bool
) -> frozenset[str]:
    """The strategies that keep a script's result, and for TensorFlow 1 also parameter servers."""
    several = min_workers > 1
    if wants_ps == "--rules" and profile.why_alone:
        raise BadInputError(f"This script can only be one plain task. {profile.why_alone}")
    if plain is False or why_not(profile, ONE) or (wants_ps and not profile.why_alone):
        if plain:
            raise BadInputError(_other_checkpoints(without_ps=True, instead=f"{profile.name} needs parameter servers"))
        if profile.why_alone:
            raise BadInputError(f"This script can only be one plain task. {profile.why_alone}")
        return frozenset({PS})
    if profile.api is Api.GRAPH:
        return _automatic_sessions(profile, plain=plain, several=several, elastic=elastic)
    shares = _shares_batches(profile)
    if not several:
        return WITHOUT_PS if shares else frozenset({ONE})
    if shares:
        return frozenset({ALLREDUCE})
    raise BadInputError(_why_not_several(profile, min_workers, plain=plain))


def _automatic_sessions(profile: ModelProfile, *, plain: bool | None, several: bool, elastic: bool) -> frozenset[str]:
    if (several or elastic) and profile.why_alone:
        raise BadInputError(f"This script can only be one plain task. {profile.why_alone}")
    if (several or elastic) and plain:
        option = "--elastic" if elastic else "--min-workers"
        raise BadInputError(_other_checkpoints(without_ps=True, instead=f"leave out {option}"))
    if several or elastic:
        return frozenset({PS})
    if plain or profile.why_alone or profile.counts_own_steps:
        return frozenset({ONE})
    return frozenset({ONE, PS})


def _why_not_several(profile: ModelProfile, min_workers: int, *, plain: bool | None) -> str:
    if profile.api is Api.LOOP:
        return (
            f"This script can only be one plain task. {profile.why_alone} If it distributes itself, --strategy "
            f"allreduce starts {min_workers} equal processes."
        )
    if profile.why_alone:
        return f"This script can only be one plain task. {profile.why_alone}"
    why = why_not(profile, ALLREDUCE)
    ps = "" if plain else "; --strategy ps trains with parameter servers, asynchronously"
    return f"{min_workers} workers cannot share the batches of {profile.name}: {why}{ps}."


def _check_chosen(
    profile: ModelProfile, strategy: Strategy, min_workers: int, max_workers: int | None, plain: bool | None
) -> None:
    if why := why_not(profile, strategy):
        raise BadInputError(f"{profile.name} cannot train with --strategy {strategy}: {why}.")
    if strategy == ONE and min_workers > 1:
        raise BadInputError(f"--strategy one is a single task, but --min-workers is {min_workers}; leave one out.")
    if strategy == ALLREDUCE and max_workers == 1:
        raise BadInputError("--strategy allreduce needs at least 2 workers, but --max-workers is 1; leave one out.")
    if plain is not None and plain == (strategy == PS):
        raise BadInputError(_other_checkpoints(without_ps=plain, instead=f"leave out --strategy {strategy}"))


def _other_checkpoints(*, without_ps: bool, instead: str) -> str:
    kind = "without" if without_ps else "with"
    return f"The checkpoints are of a job {kind} parameter servers; {instead}, or name another folder for checkpoints."
