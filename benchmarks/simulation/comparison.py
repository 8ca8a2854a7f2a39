"""Compares policies on bins of recorded curves."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from benchmarks.simulation.assignment import AssignmentPolicy
from benchmarks.simulation.bins import TARGET_SHARE, Bin, count_good, default_target, draw_bin
from benchmarks.simulation.curves import Curve
from benchmarks.simulation.oracle import OraclePolicy
from benchmarks.simulation.throughputs import Job, draw_jobs
from benchmarks.simulation.world import Outcome, Until, World, WorldSettings
from dike.exceptions import BadInputError
from framework.policies.trials.interface import MILESTONES, QUANTUM_GROWTH, Milestone, Policy, PolicySettings
from framework.policies.trials.pbt import PbtPolicy
from framework.policies.trials.registry import POLICIES, make_policy

TOP = 4
QUANTUM_SHARE = 0.01
OVERHEAD_S = 1.5
OVERHEAD_SHARE = 0.1
REPORTS_PER_QUANTUM = 4

_PLAYED = tuple(name for name in POLICIES if name != PbtPolicy.name)
"""A recorded curve does not show what a copy of a trial would do."""
POLICY_NAMES = (*_PLAYED, OraclePolicy.name)
TYPED_POLICY_NAMES = (*_PLAYED, AssignmentPolicy.name)
"""Policies that can run on GPUs of different types."""

PolicyFactory = Callable[[Bin, PolicySettings], Policy]
"""Makes the policy for one bin; only the limits use the bin."""


@dataclass(frozen=True)
class SimulationSettings:
    """A simulation. None stands for a default that depends on the curves: see `resolve`.

    Attributes:
        gpus: number of slots.
        jobs: trials of a bin.
        good: trials of a bin that reach the target.
        target_share: position of the default target; see `default_target`.
        quantum_s: the policies' quantum, in seconds of the curves.
        overhead_s: seconds to put a trial into a slot.
        report_s: seconds of training between two readings.
        milestones: longer quanta for trials with much progress.
        quantum_growth: relative growth of a trial's quantum with each preemption.
        until: whether trials leave at the end of their curve or at the target.
        gpu_types: the type of each slot, instead of `gpus`; empty: slots are alike.
        table_jobs: speeds by type; each trial is one of these jobs.
        move_s: additional seconds if a trial ran in another slot before.
    """

    gpus: int = 4
    jobs: int = 16
    good: int = 4
    target: float | None = None
    target_share: float = TARGET_SHARE
    quantum_s: float | None = None
    overhead_s: float | None = None
    report_s: float | None = None
    trials_per_slot: int = 4
    milestones: tuple[Milestone, ...] = MILESTONES
    quantum_growth: float = QUANTUM_GROWTH
    arrival_s: float = 0.0
    until: Until = "target"
    gpu_types: tuple[str, ...] = ()
    table_jobs: tuple[Job, ...] = ()
    move_s: float = 0.0


@dataclass(frozen=True)
class Scenario:
    """Settings with all defaults resolved.

    Attributes:
        recorded: number of recorded trials.
        recorded_good: number of these that reach the target.
        quantum_s, jobs, good, trials_per_slot, milestones, quantum_growth, table_jobs: as in `SimulationSettings`.
    """

    target: float
    recorded: int
    recorded_good: int
    quantum_s: float
    jobs: int
    good: int
    trials_per_slot: int
    milestones: tuple[Milestone, ...]
    quantum_growth: float
    world: WorldSettings
    table_jobs: tuple[Job, ...] = ()


@dataclass(frozen=True)
class PolicyResult:
    """Outcomes of a policy, one for each seed; properties are means over the seeds."""

    name: str
    outcomes: tuple[Outcome, ...]

    @property
    def mean_time_good_s(self) -> float:
        """Mean time for a good trial to reach the target."""
        return fmean(fmean(outcome.reached_s) for outcome in self.outcomes)

    @property
    def time_first_s(self) -> float:
        """Time until the first trial reaches the target."""
        return fmean(outcome.reached_s[0] for outcome in self.outcomes)

    @property
    def time_top4_s(self) -> float:
        """Time until four trials reach it, or all good ones if there are fewer."""
        return fmean(outcome.reached_s[:TOP][-1] for outcome in self.outcomes)

    @property
    def preemptions(self) -> float:
        return fmean(outcome.preemptions for outcome in self.outcomes)

    @property
    def mean_completion_s(self) -> float:
        """Mean time from a trial's arrival until it leaves; with GPU types only."""
        return fmean(fmean(outcome.completion_s) for outcome in self.outcomes)

    @property
    def speed(self) -> float:
        """See `Outcome.speed`; with GPU types only."""
        return fmean(outcome.speed for outcome in self.outcomes)


def resolve(curves: Sequence[Curve], settings: SimulationSettings) -> Scenario:
    """Resolves the defaults: target (`default_target`), quantum, overhead and reports.

    The quantum is 1% of the median curve's length; the overhead 1.5 s, but at most a tenth of the quantum; a quantum
    has four reports.

    Raises:
        BadInputError: if a setting is invalid.
    """
    _check(settings)
    if settings.jobs > len(curves):
        raise BadInputError(f"--jobs {settings.jobs} is more than the {len(curves)} trials of the file; ask for fewer.")
    target = default_target(curves, settings.target_share) if settings.target is None else settings.target
    quantum_s = settings.quantum_s or QUANTUM_SHARE * median(curve.length_s for curve in curves)
    overhead_s = min(OVERHEAD_S, OVERHEAD_SHARE * quantum_s) if settings.overhead_s is None else settings.overhead_s
    report_s = settings.report_s or quantum_s / REPORTS_PER_QUANTUM
    world = WorldSettings(
        slots=len(settings.gpu_types) or settings.gpus,
        overhead_s=overhead_s,
        report_s=report_s,
        arrival_s=settings.arrival_s,
        until=settings.until,
        kinds=settings.gpu_types,
        move_s=settings.move_s,
    )
    return Scenario(
        target=target,
        recorded=len(curves),
        recorded_good=count_good(curves, target),
        quantum_s=quantum_s,
        jobs=settings.jobs,
        good=settings.good,
        trials_per_slot=settings.trials_per_slot,
        milestones=settings.milestones,
        quantum_growth=settings.quantum_growth,
        world=world,
        table_jobs=settings.table_jobs,
    )


def _check(settings: SimulationSettings) -> None:
    if not 1 <= settings.good <= settings.jobs:
        raise BadInputError(
            f"--good must be at least 1 and at most --jobs, which is {settings.jobs}, not {settings.good}."
        )
    for option, count in (("--gpus", settings.gpus), ("--trials-per-slot", settings.trials_per_slot)):
        if count < 1:
            raise BadInputError(f"{option} must be at least 1, not {count}.")
    for option, seconds in (("--quantum", settings.quantum_s), ("--report-every", settings.report_s)):
        if seconds is not None and not 0 < seconds < math.inf:
            raise BadInputError(f"{option} must be more than 0 seconds, not {seconds:g}.")
    for option, seconds in (
        ("--overhead", settings.overhead_s),
        ("--move-overhead", settings.move_s),
        ("--arrival-every", settings.arrival_s),
    ):
        if seconds is not None and not 0 <= seconds < math.inf:
            raise BadInputError(f"{option} must be finite and at least 0 seconds, not {seconds:g}.")
    if not 0 <= settings.quantum_growth < math.inf:
        raise BadInputError(f"--quantum-growth must be finite and at least 0, not {settings.quantum_growth:g}.")
    if settings.target is not None and not math.isfinite(settings.target):
        raise BadInputError(f"--target must be a finite number, not {settings.target:g}.")
    if not 0 < settings.target_share < 1:
        raise BadInputError(f"--target-share must be between 0 and 1, not {settings.target_share:g}.")


def simulate(
    curves: Sequence[Curve],
    policies: Mapping[str, PolicyFactory],
    scenario: Scenario,
    seeds: Sequence[int],
    progress: Callable[[], None] = lambda: None,
) -> tuple[PolicyResult, ...]:
    """Runs every policy on the same bins, one for each seed; calls `progress` after each policy on each bin.

    Raises:
        BadInputError: if there are too few good or other trials.
        PolicyViolationError: if a policy breaks a rule.
    """
    outcomes: dict[str, list[Outcome]] = {name: [] for name in policies}
    for seed in seeds:
        trials = draw_bin(curves, scenario.target, scenario.jobs, scenario.good, seed)
        if scenario.table_jobs:
            trials = replace(trials, jobs=draw_jobs(scenario.table_jobs, scenario.jobs, seed))
        settings = PolicySettings(
            quantum_s=scenario.quantum_s,
            trials_per_slot=scenario.trials_per_slot,
            milestones=scenario.milestones,
            quantum_growth=scenario.quantum_growth,
            seed=seed,
            switch_s=scenario.world.overhead_s,
            move_s=scenario.world.move_s,
        )
        for name, make in policies.items():
            outcomes[name].append(World(trials, make(trials, settings), scenario.world).run())
            progress()
    return tuple(PolicyResult(name, tuple(of_seeds)) for name, of_seeds in outcomes.items())


def reference(results: Sequence[PolicyResult]) -> PolicyResult:
    """The result to normalise by: the limit's, or else that with the lowest mean time."""
    for result in results:
        if result.name in (OraclePolicy.name, AssignmentPolicy.name):
            return result
    return min(results, key=lambda result: result.mean_time_good_s)


def policies_named(names: Sequence[str], *, typed: bool = False) -> dict[str, PolicyFactory]:
    """The policies of these names. The limit is `assignment` if GPUs differ (`typed`), otherwise `oracle`.

    Raises:
        BadInputError: if a name is unknown.
    """
    known = TYPED_POLICY_NAMES if typed else POLICY_NAMES
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name.lower(), known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            where = (" with --gpu-types" if typed else " without --gpu-types") if name in _LIMITS else ""
            raise BadInputError(f"There is no policy '{name}'{where}; {hint}choose one of {', '.join(known)}.")
    return {name: _LIMITS.get(name) or _registered(name) for name in names}


def _registered(name: str) -> PolicyFactory:
    return lambda _, settings: make_policy(name, settings)


_LIMITS: dict[str, PolicyFactory] = {limit.name: limit for limit in (OraclePolicy, AssignmentPolicy)}
