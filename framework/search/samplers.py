"""Optuna's samplers: by name, or as an object of the user's."""

from __future__ import annotations

import base64
import difflib
import hmac
import importlib.util
import inspect
import itertools
import logging
import math
import random
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dike.exceptions import BadInputError
from dike.trial import pickled
from dike.trial.spec import Value
from framework.policies.trials.pbt import PbtPolicy
from framework.search.records import Parameter, SearchSpec
from framework.user_folders import signature

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler

logger = logging.getLogger(__name__)

EXHAUSTIVE = ("grid", "bruteforce")
"""Samplers that try each point of the space once."""
MAX_CONDITIONAL_POINTS = 1_000_000
"""Maximum number of points of a grid with conditions: they are counted one by one."""
RESAMPLE_PROBABILITY = 0.25
PERTURBATION_FACTORS = (0.8, 1.2)
"""Of population based training; Ray Tune's defaults."""
_NEEDED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"cmaes": ("cmaes",), "gp": ("scipy", "torch"), "qmc": ("scipy",)}
)
"""Sampler -> packages that Optuna imports on first use."""


def default_sampler(space: Sequence[Parameter], trials: int | None, policy: str) -> str:
    """Returns `grid` if all parameters are lists, with at least as many points as requested trials.

    Else `tpe`, or `random` for population based training, whose trials all start together.
    """
    if space and all(parameter.choices for parameter in space) and (trials is None or trials <= grid_size(space)):
        return "grid"
    return "random" if policy == PbtPolicy.name else "tpe"


def check_sampler(name: str) -> None:
    """Checks that a sampler exists and its packages are installed.

    Raises:
        BadInputError: if not.
    """
    if name == "grid":
        # Avoids the slow import of Optuna.
        return
    names = ["grid", *_classes()]
    if name not in names:
        near = difflib.get_close_matches(name.lower().removesuffix("sampler"), names, n=2)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(sorted(names))}."
        raise BadInputError(f"There is no sampler '{name}'; {hint}")
    missing = [package for package in _NEEDED.get(name, ()) if importlib.util.find_spec(package) is None]
    if missing:
        raise BadInputError(
            f"--sampler {name} needs {' and '.join(missing)}, not installed here; pip install {' '.join(missing)}, or "
            "choose another sampler."
        )


def learns(spec: SearchSpec) -> bool:
    """Returns whether a search's sampler uses earlier results, and so is asked for trials as late as possible."""
    from optuna.samplers import BruteForceSampler, GridSampler, QMCSampler, RandomSampler

    if spec.sampler == "grid" and not spec.sampler_object:
        return False
    return not isinstance(sampler_of(spec, 0), BruteForceSampler | GridSampler | QMCSampler | RandomSampler)


def is_exhaustive(sampler: BaseSampler) -> bool:
    """Returns whether a sampler tries each point of the space once and then has no more."""
    from optuna.samplers import BruteForceSampler, GridSampler

    return isinstance(sampler, BruteForceSampler | GridSampler)


def describe_sampler(spec: SearchSpec) -> str:
    """Describes a sampler in words, with its number of random startup trials."""
    sampler = None if spec.sampler == "grid" and not spec.sampler_object else sampler_of(spec, 0)
    # Genetic algorithms have a first generation instead.
    count = getattr(sampler, "_n_startup_trials", getattr(sampler, "population_size", 0))
    name = f"sampler {spec.sampler}"
    if not count:
        return name
    if count >= spec.trial_count:
        return f"{name} (all trials are random points: it learns after the first {count})"
    return f"{name} (the first {'trial is a random point' if count == 1 else f'{count} trials are random points'})"


def sampler_of(spec: SearchSpec, number: int, point: Mapping[str, Value] | None = None) -> BaseSampler:
    """Creates the sampler for one trial; a named one is the same in any process. That of a grid gives `point`.

    Raises:
        BadInputError: if the user's own cannot be loaded.
    """
    import numpy as np
    from optuna.exceptions import ExperimentalWarning
    from optuna.samplers import BaseSampler, PartialFixedSampler, RandomSampler

    if spec.sampler_object:
        own = load_object(spec.sampler_object, "sampler", spec)
        if not isinstance(own, BaseSampler):
            raise BadInputError(f"The sampler is a {type(own).__name__}; give a name or an object of optuna.samplers.")
        return own
    seed = int(np.random.SeedSequence([spec.seed, number]).generate_state(1)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        if spec.sampler != "grid":
            return _named(spec.sampler, seed)
        return PartialFixedSampler(dict(point or {}), RandomSampler(seed=seed))


def write_object(data: bytes, what: str, folder: str) -> str:
    """Encodes a pickled object for a search's record, signed, as others may write to the database.

    Raises:
        BadInputError: if this account's key cannot be read or created.
    """
    return f"{signature(_signed(what, folder), data)}:{base64.b85encode(data).decode()}"


def load_object(text: str, what: str, spec: SearchSpec) -> Any:
    """Decodes a user's object from a search's record. This runs the user's code, so services never call it.

    The folder of the search is searched last for the user's modules.

    Raises:
        BadInputError: if this account did not sign it, or it cannot be loaded.
    """
    given, _, packed = text.rpartition(":")
    try:
        data = base64.b85decode(packed)
    except ValueError:
        data = b""  # fails the check of the signature
    if not hmac.compare_digest(given.encode(), signature(_signed(what, spec.folder), data).encode()):
        raise BadInputError(
            f"The {what} of search '{spec.name}' in the database is a Python object that this account has not written "
            "on this machine, so Dike does not load it; "
            "start a new search, or resume it with the account that "
            "started it."
        )
    if spec.folder not in sys.path:
        sys.path.append(spec.folder)
    return pickled.loads(data, what)


def _signed(what: str, folder: str) -> str:
    return f"{what}\0{folder}"


class _SignedPickles:
    """Replaces `pickle` in Optuna's CMA-ES, which stores its state in the database, where others may write."""

    _WHAT = "state of a sampler"
    _LENGTH = 64

    @classmethod
    def dumps(cls, value: object) -> bytes:
        data = pickled.dumps(value, cls._WHAT, pickled.OBJECT_LIMIT_BYTES)
        return signature(cls._WHAT, data).encode() + data

    @classmethod
    def loads(cls, content: bytes) -> Any:
        given, data = content[: cls._LENGTH], content[cls._LENGTH :]
        if not hmac.compare_digest(given, signature(cls._WHAT, data).encode()):
            logger.warning("another account wrote the sampler's state in the database; the sampler starts anew")
            return None  # no state
        return pickled.loads(data, cls._WHAT)


def sign_states() -> None:
    """Makes Optuna load pickled sampler states only if this account signed them."""
    import optuna.samplers._cmaes as cmaes

    names = vars(cmaes)
    assert names["pickle"].__name__ in ("pickle", _SignedPickles.__name__), (
        "this version of Optuna stores the state of CMA-ES differently"
    )
    names["pickle"] = _SignedPickles


def _named(name: str, seed: int) -> BaseSampler:
    made = _classes()[name]
    known = inspect.signature(made).parameters
    options: dict[str, Any] = {"seed": seed}
    if "constant_liar" in known:
        # Running trials count as bad ones, so that concurrent trials spread out.
        options["constant_liar"] = True
    if "warn_independent_sampling" in known and known["warn_independent_sampling"].default is True:
        options["warn_independent_sampling"] = False
    sampler: BaseSampler = made(**options)
    return sampler


def _classes() -> dict[str, Any]:
    """Returns the samplers that need no arguments, by lower-case class name without `Sampler`."""
    import optuna.samplers

    found = {}
    for name in optuna.samplers.__all__:
        made = getattr(optuna.samplers, name)
        if name.endswith("Sampler") and not inspect.isabstract(made):
            given = inspect.signature(made).parameters.values()
            if all(each.default is not each.empty or each.kind is each.VAR_KEYWORD for each in given):
                found[name.removesuffix("Sampler").lower()] = made
    return found


def distribution_of(parameter: Parameter) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if parameter.choices:
        return CategoricalDistribution(parameter.choices)
    if parameter.is_integer:
        low, high, step = int(parameter.low), int(parameter.high), int(parameter.step or 1)
        return IntDistribution(low, high, log=parameter.log, step=step)
    return FloatDistribution(parameter.low, parameter.high, log=parameter.log, step=parameter.step)


def is_finite(space: Sequence[Parameter]) -> bool:
    """Returns whether a grid of all points exists."""
    return bool(space) and all(
        each.choices or (each.is_integer and not each.log) or each.step is not None for each in space
    )


def grid_size(space: Sequence[Parameter]) -> int:
    """Returns the number of points of a space's grid.

    Raises:
        BadInputError: if a range has no grid.
    """
    axes = _axes(space)
    if not _has_conditions(space):
        return math.prod(map(len, axes))
    count = sum(1 for _ in itertools.islice(_points(space, axes), MAX_CONDITIONAL_POINTS + 1))
    if count > MAX_CONDITIONAL_POINTS:
        raise BadInputError(f"The grid has more than {MAX_CONDITIONAL_POINTS:,} points; list fewer values.")
    return count


def grid_points(spec: SearchSpec) -> Iterator[dict[str, Value]]:
    """Yields the values of a search's trials: all points of the grid, or as many random ones, in the grid's order."""
    axes = _axes(spec.space)
    count = grid_size(spec.space)
    if spec.trial_count >= count:
        yield from _points(spec.space, axes)
        return
    chosen = sorted(random.Random(spec.seed).sample(range(count), spec.trial_count))  # noqa: S311
    if not _has_conditions(spec.space):
        yield from (_point_at(spec.space, axes, index) for index in chosen)
        return
    wanted = frozenset(chosen)
    yield from (point for index, point in enumerate(_points(spec.space, axes)) if index in wanted)


def untried_point(spec: SearchSpec, tried: Collection[Point], number: int) -> dict[str, Value] | None:
    """Returns a random point that no trial has; None if all were tried. The trial's number is part of the seed.

    Raises:
        BadInputError: if the space is not finite.
    """
    axes = _axes(spec.space)
    if len(tried) >= grid_size(spec.space):
        return None
    draws = random.Random(f"{spec.seed} {number}")  # noqa: S311
    while True:
        values = [draws.choice(axis) for axis in axes]
        point = _used(spec.space, values)
        if point_of(point) not in tried:
            return point


def vary(spec: SearchSpec, parameters: Mapping[str, Value], seed: str) -> dict[str, Value]:
    """Returns a trial's parameters with those varied that may change while it trains (`SearchSpec.mutate`).

    As in Ray Tune, a parameter gets a random value of its range or list with probability 1/4. Otherwise a number of a
    range is multiplied by 0.8 or 1.2, and a value of a list is replaced by one beside it.
    """
    draws = random.Random(f"{spec.seed} {seed}")  # noqa: S311
    varied = dict(parameters)
    for parameter in spec.space:
        if parameter.name not in spec.mutate or parameter.name not in parameters:
            continue
        value = parameters[parameter.name]
        is_new = draws.random() < RESAMPLE_PROBABILITY
        if parameter.choices:
            at = draws.choice((-1, 1)) + parameter.choices.index(value)
            beside = parameter.choices[min(max(at, 0), len(parameter.choices) - 1)]
            varied[parameter.name] = draws.choice(parameter.choices) if is_new else beside
            continue
        bounds = parameter.low, parameter.high
        if not is_new:
            drawn = float(value) * draws.choice(PERTURBATION_FACTORS)
        elif parameter.log:
            drawn = math.exp(draws.uniform(*map(math.log, bounds)))
        else:
            drawn = draws.uniform(*bounds)
        varied[parameter.name] = _in_range(parameter, drawn)
    return varied


def _in_range(parameter: Parameter, value: float) -> Value:
    """Returns the nearest value of a range."""
    value = min(max(value, parameter.low), parameter.high) - parameter.low
    step = parameter.step or (1.0 if parameter.is_integer else None)
    if step is not None:
        value = step * min(round(value / step), _step_count(parameter, step))
    return round(parameter.low + value) if parameter.is_integer else float(f"{parameter.low + value:.12g}")


def _step_count(parameter: Parameter, step: float) -> int:
    """Returns how many steps fit into a range."""
    return math.floor((parameter.high - parameter.low) / step + 1e-9)


Point = frozenset[tuple[str, Value]]
"""A trial's parameters, comparable."""


def point_of(parameters: Mapping[str, Value]) -> Point:
    return frozenset(parameters.items())


def _has_conditions(space: Sequence[Parameter]) -> bool:
    return any(each.when for each in space)


def _points(space: Sequence[Parameter], axes: Sequence[Sequence[Value]]) -> Iterator[dict[str, Value]]:
    """Yields all points, the last parameter changing fastest, each once."""
    yield from _continued(space, axes, {})


def _continued(
    space: Sequence[Parameter], axes: Sequence[Sequence[Value]], before: Mapping[str, Value]
) -> Iterator[dict[str, Value]]:
    """Yields the points that begin with the given values."""
    at = next((place for place, each in enumerate(space) if each.is_used(before)), None)
    if at is None:
        yield dict(before)
        return
    for value in axes[at]:
        yield from _continued(space[at + 1 :], axes[at + 1 :], {**before, space[at].name: value})


def _point_at(space: Sequence[Parameter], axes: Sequence[Sequence[Value]], index: int) -> dict[str, Value]:
    """Returns a point of a grid without conditions."""
    point: dict[str, Value] = {}
    for parameter, values in zip(reversed(space), reversed(axes), strict=True):
        index, at = divmod(index, len(values))
        point[parameter.name] = values[at]
    return point


def _used(space: Sequence[Parameter], values: Sequence[Value]) -> dict[str, Value]:
    """Returns the values of those parameters whose conditions hold."""
    point: dict[str, Value] = {}
    for parameter, value in zip(space, values, strict=True):
        if parameter.is_used(point):
            point[parameter.name] = value
    return point


def _axes(space: Sequence[Parameter]) -> list[Sequence[Value]]:
    """Returns the values of each parameter in a grid: its choices, or the numbers of its range."""
    axes: list[Sequence[Value]] = []
    for parameter in space:
        if parameter.choices:
            axes.append(parameter.choices)
        elif parameter.is_integer and not parameter.log:
            axes.append(range(int(parameter.low), int(parameter.high) + 1, int(parameter.step or 1)))
        elif parameter.step is not None:
            places = range(_step_count(parameter, parameter.step) + 1)
            # Rounded, so that 0.1, 0.2, 0.3 have no further digits.
            axes.append(tuple(float(f"{parameter.low + place * parameter.step:.12g}") for place in places))
        else:
            raise BadInputError(
                f"The parameter '{parameter.name}' is a range, for which there is no grid; list its values, or use "
                "--sampler tpe with --trials N."
            )
    return axes
