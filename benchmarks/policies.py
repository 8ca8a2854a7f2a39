"""Compares policies, and methods from the literature, on curves that the policies were not designed on."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import fmean, geometric_mean, median

from threadpoolctl import threadpool_limits

from benchmarks.search.learned import GaussianProcessPolicy, KnownFamilyPolicy, as_earlier_trials
from benchmarks.search.simulated import DATA
from benchmarks.simulation.bins import TARGET_SHARE, Bin, draw_bin
from benchmarks.simulation.comparison import (
    PolicyFactory,
    Scenario,
    SimulationSettings,
    policies_named,
    resolve,
    simulate,
)
from benchmarks.simulation.curves import Curve, read_curves
from benchmarks.simulation.families import FAMILIES, draw_family
from benchmarks.simulation.oracle import OraclePolicy
from benchmarks.simulation.world import World
from dike.exceptions import BadInputError
from framework.policies.trials.dike_policy import RUNGS_SHARE, STALLED_PATIENCE, DikePolicy
from framework.policies.trials.earlier_trials import EarlierTrials
from framework.policies.trials.interface import Decision, Policy, PolicySettings, Reading, SlotView, TrialView

TITLE = "Policies on curves they were not made on"
PROCESSES = 2
SEEDS = range(300, 348)
"""Seeds of bins that no choice was made on."""
CHOICE_SEEDS = range(200, 208)
FEW_SEEDS = range(300, 304)
FAMILY_SEED, CHOICE_FAMILY_SEED, HELD_OUT_SEED, LIBRARY_SEED = 1, 0, 3, 99
LIBRARY_TRIALS = 1000
EARLIER_TRIALS = 32

OTHERS = ("fifo", "asha", "hermes")
GP = "GP, as DyHPO"
WITHOUT_RUNGS = "dike, without rungs"
KNOWN_FAMILY = "told the family"
LEARNED = "dike, --warm-start-from"
DIKES = ("dike", WITHOUT_RUNGS)
FORMER_PATIENCE = 16
"""Patience of the former rule, without rungs."""


@dataclass(frozen=True)
class CurveSet:
    """Curves that bins are drawn from.

    Attributes:
        file: file of recorded curves; empty for a family.
        metric: recorded column; None: the training loss.
        is_held_out: whether the set was not looked at before the policy was chosen.
    """

    name: str
    file: str = ""
    family: str = ""
    seed: int = FAMILY_SEED
    metric: str | None = None
    target_share: float = TARGET_SHARE
    is_held_out: bool = False

    def curves(self, seed: int | None = None) -> tuple[Curve, ...]:
        """All its curves; `seed` draws others of a family."""
        if self.file:
            return _recorded(self.file, self.metric)
        return draw_family(self.family, self.seed if seed is None else seed)


_HELD_OUT = ("double-descent", "instabilities", "stages", "slow-and-close")
"""Families that no choice was made on."""
_TUNED_ON = tuple(name for name in FAMILIES if name not in _HELD_OUT)
SETS = (
    CurveSet("ImageNet, ResNet", "algoperf_imagenet_resnet.csv.gz"),
    CurveSet("OGBG", "algoperf_ogbg.csv.gz", target_share=0.98),
    CurveSet("ImageNet, AlexNet", "nas_alexnet_imagenet.csv.gz"),
    CurveSet("digits", "digits_mlp.csv.gz"),
    CurveSet("photo", "photo_mlp.csv.gz"),
    CurveSet("diabetes", "diabetes_mlp.csv.gz"),
    CurveSet("boosted trees", "boosting_trees.csv.gz", metric="validation_loss"),
    *(CurveSet(name, family=name) for name in _TUNED_ON),
    *(CurveSet(name, family=name, is_held_out=True) for name in _HELD_OUT),
    *(CurveSet(f"{name}, anew", family=name, seed=HELD_OUT_SEED, is_held_out=True) for name in _TUNED_ON),
)

SETTINGS = {
    "2 good": SimulationSettings(good=2),
    "12 good": SimulationSettings(good=12),
    "4 good of 32": SimulationSettings(jobs=32),
    "80% of the way": SimulationSettings(target_share=0.8),
    "to the end": SimulationSettings(until="end"),
}
BUDGETS = (0.05, 0.1, 0.25, 0.5)
"""Shares of the time that training all trials takes."""
PATIENCES, SHARES = (4.0, 6.0, 8.0, 16.0), (0.0, 0.1, 0.15)
"""Candidate values of the patience, and of the share of quanta that rungs decide."""

Times = dict[str, float]


@cache
def _recorded(file: str, metric: str | None) -> tuple[Curve, ...]:
    return read_curves(DATA / file, metric)


class _BestLossRecorder:
    """A policy that records the lowest loss of all trials over time; `policy` decides."""

    def __init__(self, policy: Policy) -> None:
        self.name = policy.name
        self._policy = policy
        self._reports: dict[int, Sequence[Reading]] = {}
        self._seen: dict[int, int] = {}
        self._best = math.inf
        self.bests: list[tuple[float, float]] = []

    def decide(self, now_s: float, trials: Sequence[TrialView], slots: Sequence[SlotView]) -> Decision:
        # The list of readings of a trial still grows after it has left.
        self._reports |= {trial.id: trial.readings for trial in trials}
        for trial, readings in self._reports.items():
            new = readings[self._seen.get(trial, 0) :]
            self._seen[trial] = len(readings)
            self._best = min([self._best, *(reading.loss for reading in new if math.isfinite(reading.loss))])
        self.bests.append((now_s, self._best))
        return self._policy.decide(now_s, trials, slots)

    def best_at(self, time_s: float) -> float:
        """Returns the lowest loss by then; infinity before the first."""
        return next((best for at_s, best in reversed(self.bests) if at_s <= time_s), math.inf)


def measure() -> Iterator[str]:
    with multiprocessing.get_context("fork").Pool(PROCESSES, threadpool_limits, (1,)) as pool:
        yield "Mean time for a good trial to reach the target as a multiple of the oracle's, which knows the curves. 16"
        yield f"trials, 4 of them good, on 4 GPUs, {len(SEEDS)} bins (seeds {SEEDS.start} to {SEEDS.stop - 1}), as in"
        yield f"[search.md](search.md). *{WITHOUT_RUNGS}*: the former rule, with a patience of {FORMER_PATIENCE}."
        yield "*GP, as DyHPO*: by a Gaussian process over the curves of this search. *Told the family*: knows the"
        yield f"target and {LIBRARY_TRIALS:,} other curves of the family, so it is the price of not knowing."
        yield f"*{LEARNED}*: knows {EARLIER_TRIALS} of these, others for each bin, and not the target."
        yield "*By the best*: a time by that of the best of fifo, asha and hermes."
        yield ""
        yield "Families: `benchmarks/simulation/families.py`; choices were made on seeds 0 to 2, here it is seed 1."
        yield f"*Anew*: the same by seed {HELD_OUT_SEED}. Sets: [what they are](../data/learning_curves/README.md)."
        yield ""
        times = pool.map(_main_times, range(len(SETS)), chunksize=1)
        for is_held_out, title in ((False, "Curves that choices were made on"), (True, "Curves kept aside")):
            chosen = [(one, row) for one, row in zip(SETS, times, strict=True) if one.is_held_out is is_held_out]
            yield from _table(title, {one.name: row for one, row in chosen})
        yield "## Other settings"
        yield ""
        yield f"Geometric means over the sets kept aside, {len(FEW_SEEDS)} bins; a set with too few trials of a kind is"
        yield "left out."
        yield ""
        names = (*OTHERS, *DIKES)
        yield f"| setting | {' | '.join(names)} |"
        yield f"|---|{'---|' * len(names)}"
        for setting in SETTINGS:
            found = pool.map(partial(_setting_times, setting), _indices(is_held_out=True), chunksize=1)
            each = [row for row in found if row]
            means = {name: geometric_mean(row[name] for row in each) for name in names}
            yield f"| {setting} ({len(each)} sets) | {_cells(means)} |"
        yield ""
        yield "## Regret over time"
        yield ""
        yield "How far the lowest loss of the search is above the lowest final loss of its trials,"
        yield "relative to the fall from the median first loss; by share of the time that training all of them takes."
        yield "Trials are trained to the end. Means over the sets kept aside,"
        yield f"{len(FEW_SEEDS)} bins each."
        yield ""
        regrets = pool.map(_regrets, _indices(is_held_out=True), chunksize=1)
        yield f"| policy | {' | '.join(f'{budget:.0%}' for budget in BUDGETS)} |"
        yield f"|---|{'---|' * len(BUDGETS)}"
        for name in (*OTHERS, *DIKES):
            cells = " | ".join(f"{fmean(of[name][place] for of in regrets):.3f}" for place in range(len(BUDGETS)))
            yield f"| {name} | {cells} |"
        yield ""
        yield from _leave_one_out(pool.map(_choice_times, _indices(is_held_out=False), chunksize=1))


def _table(title: str, rows: Mapping[str, Times]) -> Iterator[str]:
    names = list(next(iter(rows.values())))
    yield f"## {title}"
    yield ""
    yield f"| curves | {' | '.join(names)} | dike by the best |"
    yield f"|---|{'---|' * (len(names) + 1)}"
    means = {name: geometric_mean(row[name] for row in rows.values()) for name in names}
    for text, row in (*rows.items(), ("geometric mean", means)):
        yield f"| {text} | {_cells(row)} | {row['dike'] / _best(row):.2f} |"
    yield ""


def _leave_one_out(found: Sequence[Mapping[tuple[float, float], float]]) -> Iterator[str]:
    names = [SETS[place].name for place in _indices(is_held_out=False)]
    yield "## Leave one set out"
    yield ""
    yield "Which patience, and which share of the quanta for the rungs, would be chosen on all other sets (geometric"
    yield f"mean of the times, {len(CHOICE_SEEDS)} bins, families by seed {CHOICE_FAMILY_SEED}), and the result"
    yield f"on the one left out. `dike` has {STALLED_PATIENCE:g} and {RUNGS_SHARE:.0%}."
    yield ""
    yield "| left out | chosen on the others: patience, rungs | its time | the best of all |"
    yield "|---|---|---|---|"
    for place, name in enumerate(names):
        others = [row for number, row in enumerate(found) if number != place]
        key = min(found[0], key=lambda key: geometric_mean(row[key] for row in others))
        best = min(found[place].values())
        yield f"| {name} | {key[0]:g}, {key[1]:.0%} | {found[place][key]:.2f} | {best:.2f} |"
    yield ""
    yield f"| patience | {' | '.join(f'rungs {share:.0%}' for share in SHARES)} |"
    yield f"|---|{'---|' * len(SHARES)}"
    for patience in PATIENCES:
        cells = (f"{geometric_mean(row[patience, share] for row in found):.3f}" for share in SHARES)
        yield f"| {patience:g} | {' | '.join(cells)} |"
    yield ""


def _indices(*, is_held_out: bool) -> list[int]:
    return [place for place, one in enumerate(SETS) if one.is_held_out is is_held_out]


def _best(row: Times) -> float:
    return min(row[name] for name in OTHERS)


def _cells(row: Times) -> str:
    return " | ".join(f"{value:.2f}" for value in row.values())


def _fast_policies() -> dict[str, PolicyFactory]:
    """The fast policies without prior knowledge."""
    return {
        **policies_named((*OTHERS, "dike")),
        WITHOUT_RUNGS: lambda _, settings: DikePolicy(settings, FORMER_PATIENCE, rungs_share=0.0),
    }


def _times(
    curves: Sequence[Curve], scenario: Scenario, policies: Mapping[str, PolicyFactory], seeds: Sequence[int]
) -> Times:
    """Policy -> its time as a multiple of the oracle's."""
    results = simulate(curves, {**policies, **policies_named([OraclePolicy.name])}, scenario, seeds)
    times_s = {result.name: result.mean_time_good_s for result in results}
    return {name: times_s[name] / times_s[OraclePolicy.name] for name in policies}


def _main_times(place: int) -> Times:
    one = SETS[place]
    curves = one.curves()
    scenario = resolve(curves, SimulationSettings(target_share=one.target_share))
    policies = _fast_policies()
    if one.is_held_out:
        others = draw_family(one.family, LIBRARY_SEED, LIBRARY_TRIALS)
        policies[GP] = lambda _, settings: GaussianProcessPolicy(settings)
        policies[KNOWN_FAMILY] = lambda _, settings: KnownFamilyPolicy(settings, others, scenario.target)
        policies[LEARNED] = lambda _, settings: DikePolicy(settings, earlier=_earlier(others, settings.seed))
    return _times(curves, scenario, policies, SEEDS)


def _earlier(curves: Sequence[Curve], seed: int) -> EarlierTrials:
    """An earlier search of a few curves of the family, different for each bin."""
    return EarlierTrials(as_earlier_trials(random.Random(seed).sample(curves, EARLIER_TRIALS)))  # noqa: S311


def _setting_times(setting: str, place: int) -> Times | None:
    """None if the set has too few good or bad trials."""
    one = SETS[place]
    curves = one.curves()
    changed = SETTINGS[setting]
    share = changed.target_share if changed.target_share != TARGET_SHARE else one.target_share
    scenario = resolve(curves, replace(changed, target_share=share))
    policies = _fast_policies()
    try:
        draw_bin(curves, scenario.target, scenario.jobs, scenario.good, FEW_SEEDS.start)
    except BadInputError:
        return None
    return _times(curves, scenario, policies, FEW_SEEDS)


def _choice_times(place: int) -> dict[tuple[float, float], float]:
    """(Patience, share of the rungs) -> time."""
    one = SETS[place]
    curves = one.curves(CHOICE_FAMILY_SEED)
    scenario = resolve(curves, SimulationSettings(target_share=one.target_share))
    found = {}
    for patience, share in itertools.product(PATIENCES, SHARES):

        def make(_: Bin, settings: PolicySettings, patience: float = patience, share: float = share) -> Policy:
            return DikePolicy(settings, patience, share)

        found[patience, share] = _times(curves, scenario, {"dike": make}, CHOICE_SEEDS)["dike"]
    return found


def _regrets(place: int) -> dict[str, list[float]]:
    """Policy -> its regret at each budget, mean over the bins."""
    one = SETS[place]
    curves = one.curves()
    scenario = resolve(curves, SimulationSettings(target_share=one.target_share, until="end"))
    policies = _fast_policies()
    found: dict[str, list[list[float]]] = {name: [] for name in policies}
    for seed in FEW_SEEDS:
        trials = draw_bin(curves, scenario.target, scenario.jobs, scenario.good, seed)
        # Trains every trial to its end.
        trials = replace(trials, target_s=tuple(curve.length_s for curve in trials.curves))
        all_s = sum(trials.target_s) / scenario.world.slots
        first = median(curve.first_loss for curve in trials.curves if math.isfinite(curve.first_loss))
        lowest = min(curve.lowest_loss for curve in trials.curves)
        settings = PolicySettings(quantum_s=scenario.quantum_s, switch_s=scenario.world.overhead_s, seed=seed)
        for name, make in policies.items():
            recorder = _BestLossRecorder(make(trials, settings))
            World(trials, recorder, scenario.world).run()
            bests = (min(recorder.best_at(budget * all_s), first) for budget in BUDGETS)
            found[name].append([max(best - lowest, 0.0) / (first - lowest) for best in bests])
    return {name: [fmean(column) for column in zip(*rows, strict=True)] for name, rows in found.items()}
