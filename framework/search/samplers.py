"""Optuna's samplers: by name, or as an object of the user's."""

from __future__ import annotations

import base64
import difflib
import hmac
import importlib.util
import inspect
import logging
import math
import random
import sys
import warnings
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dike.exceptions import BadInputError
from dike.trial import pickled
from dike.trial.spec import Value
from framework.search.records import Parameter, SearchSpec
from framework.user_folders import signature

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

logger = logging.getLogger(__name__)

EXHAUSTIVE = ("grid", "bruteforce")
"""These try each point of the space once."""
_NEEDED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"cmaes": ("cmaes",), "gp": ("scipy", "torch"), "qmc": ("scipy",)}
)
"""Sampler -> packages that Optuna imports for it when it is first asked."""


def default_sampler(space: Sequence[Parameter], trials: int | None) -> str:
    """`grid` for lists, unless more trials are asked for than it has points; else `tpe`.

    Args:
        space: what is searched; empty where a function gives it.
        trials: number of trials that the user asked for; None if not given.
    """
    is_grid = bool(space) and all(parameter.choices for parameter in space)
    return "grid" if is_grid and (trials is None or trials <= grid_size(space)) else "tpe"


def check_sampler(name: str) -> None:
    """Refuses a sampler that there is not, or that cannot be used here.

    Raises:
        BadInputError: if so; the message names near ones, or the packages that are missing.
    """
    if name == "grid":
        # Known without Optuna, whose import takes a while.
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
            "take another sampler."
        )


def learns(spec: SearchSpec) -> bool:
    """Whether a search's sampler looks at the trials before: then it is asked only for as many as can be trained."""
    from optuna.samplers import BruteForceSampler, GridSampler, QMCSampler, RandomSampler

    if spec.sampler == "grid" and not spec.sampler_object:
        return False
    return not isinstance(sampler_of(spec, 0), BruteForceSampler | GridSampler | QMCSampler | RandomSampler)


def tries_all(sampler: BaseSampler) -> bool:
    """Whether a sampler tries each point of the space once, and then has no more."""
    from optuna.samplers import BruteForceSampler, GridSampler

    return isinstance(sampler, BruteForceSampler | GridSampler)


def describe_sampler(spec: SearchSpec) -> str:
    """A sampler in words, with how many random points it begins with."""
    sampler = None if spec.sampler == "grid" and not spec.sampler_object else sampler_of(spec, 0)
    # Genetic algorithms have a first generation, the others say it in this way.
    count = getattr(sampler, "_n_startup_trials", getattr(sampler, "population_size", 0))
    name = f"sampler {spec.sampler}"
    if not count:
        return name
    if count >= spec.trial_count:
        return f"{name} (all trials are random points: it learns after the first {count})"
    return f"{name} (the first {'trial is a random point' if count == 1 else f'{count} trials are random points'})"


def sampler_of(spec: SearchSpec, number: int) -> BaseSampler:
    """The sampler for one trial: a named one is the same whichever process asks.

    Raises:
        BadInputError: if the user's own cannot be read back.
    """
    import numpy as np
    from optuna.exceptions import ExperimentalWarning
    from optuna.samplers import BaseSampler, PartialFixedSampler, RandomSampler

    if spec.sampler_object:
        own = own_object(spec.sampler_object, "sampler", spec)
        if not isinstance(own, BaseSampler):
            raise BadInputError(f"The sampler is a {type(own).__name__}; give a name or an object of optuna.samplers.")
        return own
    seed = int(np.random.SeedSequence([spec.seed, number]).generate_state(1)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        if spec.sampler != "grid":
            return _named(spec.sampler, seed)
        if number < spec.trial_count:
            return PartialFixedSampler(grid_point(spec, number), RandomSampler(seed=seed))
        return RandomSampler(seed=seed)


def write_object(data: bytes, what: str, folder: str) -> str:
    """A pickled object as a search's record keeps it: with a signature, since others may write to the database.

    Args:
        data: the pickled object.
        what: what it is, for people.
        folder: of the search, for whose modules it is good.

    Raises:
        BadInputError: if this account's key cannot be written or read.
    """
    return f"{signature(_signed(what, folder), data)}:{base64.b85encode(data).decode()}"


def own_object(text: str, what: str, spec: SearchSpec) -> Any:
    """An object of the user's out of a search's record. Reading it runs his code, so a service takes none.

    Args:
        text: what `write_object` returned.
        what: what it is, for people.
        spec: the search; modules of the user's in its folder are looked for last.

    Raises:
        BadInputError: if this account has not written it, or it cannot be read here.
    """
    given, _, packed = text.rpartition(":")
    try:
        data = base64.b85decode(packed)
    except ValueError:
        data = b""  # As if it were signed by nobody.
    if not hmac.compare_digest(given.encode(), signature(_signed(what, spec.folder), data).encode()):
        raise BadInputError(
            f"The {what} of search '{spec.name}' in the database is a Python object that this account has not written "
            "on this machine, so it is not run; begin the search anew, or have the account that began it go on with it."
        )
    if spec.folder not in sys.path:
        sys.path.append(spec.folder)
    return pickled.loads(data, what)


def _signed(what: str, folder: str) -> str:
    return f"{what}\0{folder}"


class _SignedPickles:
    """In the place of `pickle` for Optuna's CMA-ES, which keeps its state in the database, where others may write."""

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
            logger.warning("the state of a sampler in the database is not of this account; the sampler begins anew")
            return None  # As if there were none.
        return pickled.loads(data, cls._WHAT)


def sign_states() -> None:
    """Has Optuna read no pickled state of a sampler that others could have written, whoever made the sampler."""
    import optuna.samplers._cmaes as cmaes

    names = vars(cmaes)
    assert names["pickle"].__name__ in ("pickle", _SignedPickles.__name__), (
        "Optuna keeps the state of CMA-ES in another way"
    )
    names["pickle"] = _SignedPickles


def _named(name: str, seed: int) -> BaseSampler:
    made = _classes()[name]
    known = inspect.signature(made).parameters
    options: dict[str, Any] = {"seed": seed}
    if "constant_liar" in known:
        # Trials that still run count as bad ones, so that those asked for meanwhile do not all go to one place.
        options["constant_liar"] = True
    if "warn_independent_sampling" in known and known["warn_independent_sampling"].default is True:
        options["warn_independent_sampling"] = False
    sampler: BaseSampler = made(**options)
    return sampler


def _classes() -> dict[str, Any]:
    """Those that need nothing to be made, by the name of their class in small letters and without `Sampler`."""
    import optuna.samplers

    found = {}
    for name in optuna.samplers.__all__:
        made = getattr(optuna.samplers, name)
        if name.endswith("Sampler") and not inspect.isabstract(made):
            given = inspect.signature(made).parameters.values()
            if all(each.default is not each.empty or each.kind is each.VAR_KEYWORD for each in given):
                found[name.removesuffix("Sampler").lower()] = made
    return found


def is_finite(space: Sequence[Parameter]) -> bool:
    """Whether a space has a grid of all its points."""
    return bool(space) and all(each.choices or (each.is_integer and not each.log) for each in space)


def grid_size(space: Sequence[Parameter]) -> int:
    """How many points the grid of a space has.

    Raises:
        BadInputError: if there is no grid of it.
    """
    return math.prod(map(len, _axes(space)))


def grid_point(spec: SearchSpec, number: int) -> dict[str, Value]:
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


def untried_point(spec: SearchSpec, tried: Collection[tuple[Value, ...]], number: int) -> dict[str, Value] | None:
    """A point at random that no trial has; None if there is no other.

    Args:
        spec: the search.
        tried: values of the trials so far, in the order of the space.
        number: the trial's number, on which it depends, as on the seed.

    Raises:
        BadInputError: if the space is not finite.
    """
    axes = _axes(spec.space)
    if len(tried) >= math.prod(map(len, axes)):
        return None
    draws = random.Random(f"{spec.seed} {number}")  # noqa: S311
    while (point := tuple(draws.choice(values) for values in axes)) in tried:
        continue
    return dict(zip((parameter.name for parameter in spec.space), point, strict=True))


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
