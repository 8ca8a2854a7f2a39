"""Policies compared on bins of recorded curves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from dike.exceptions import BadInputError
from framework.policies.interface import Milestone, Policy, PolicySettings
from framework.policies.registry import make_policy
from framework.simulation.bins import Bin, default_target, draw_bin
from framework.simulation.curves import Curve
from framework.simulation.oracle import OraclePolicy
from framework.simulation.world import Outcome, Until, World, WorldSettings

TOP = 4
QUANTUM_SHARE = 0.01
OVERHEAD_S = 1.5
OVERHEAD_SHARE = 0.1
REPORTS_PER_QUANTUM = 4

PolicyFactory = Callable[[Bin, PolicySettings], Policy]
"""Makes the policy for one bin; only the oracle looks at the bin."""


@dataclass(frozen=True)
class SimulationSettings:
    """What is simulated. None stands for a default that depends on the curves: see `resolved`.

    Attributes:
        gpus: how many slots.
        jobs: trials of a bin.
        good: how many of them reach the target.
        target: the loss to reach.
        quantum_s: the policies' quantum, in seconds of the curves.
        overhead_s: seconds that putting a trial into a slot costs.
        report_s: seconds of training between two readings.
        jobs_per_gpu: trials bound to one slot at most.
        milestones: longer quanta for trials that have come far.
        arrival_s: seconds from one trial's arrival to the next.
        until: whether trials leave at the end of their curve or at the target.
    """

    gpus: int = 4
    jobs: int = 16
    good: int = 4
    target: float | None = None
    quantum_s: float | None = None
    overhead_s: float | None = None
    report_s: float | None = None
    jobs_per_gpu: int = 4
    milestones: tuple[Milestone, ...] = ()
    arrival_s: float = 0.0
    until: Until = "end"


@dataclass(frozen=True)
class Scenario:
    """The settings with nothing left open."""

    target: float
    quantum_s: float
    jobs: int
    good: int
    jobs_per_gpu: int
    milestones: tuple[Milestone, ...]
    world: WorldSettings


@dataclass(frozen=True)
class PolicyResult:
    """What a policy has made of all bins, one outcome for each seed; means over the seeds.

    Attributes:
        name: the policy's.
        outcomes: by seed.
    """

    name: str
    outcomes: tuple[Outcome, ...]

    @property
    def mean_time_good_s(self) -> float:
        """Mean time for a good trial to reach the target."""
        return fmean(fmean(outcome.reached_s) for outcome in self.outcomes)

    @property
    def time_first_s(self) -> float:
        """When the first trial has reached it."""
        return fmean(outcome.reached_s[0] for outcome in self.outcomes)

    @property
    def time_top4_s(self) -> float:
        """When four have; all good ones, if there are fewer."""
        return fmean(outcome.reached_s[:TOP][-1] for outcome in self.outcomes)

    @property
    def preemptions(self) -> float:
        """How often a trial had to make place for another."""
        return fmean(outcome.preemptions for outcome in self.outcomes)


def resolve(curves: Sequence[Curve], settings: SimulationSettings) -> Scenario:
    """Puts in what was left open: the default target; a quantum of 1% of the median curve's length; an overhead of
    1.5 s, but at most a tenth of the quantum; four reports in a quantum.

    Raises:
        BadInputError: if it makes no sense.
    """
    if not 1 <= settings.good <= settings.jobs:
        raise BadInputError(
            f"--good {settings.good} of --jobs {settings.jobs} cannot be; of the trials of a bin one at least is good, "
            "and at most all are."
        )
    if settings.jobs > len(curves):
        raise BadInputError(f"--jobs {settings.jobs} are more than the {len(curves)} trials of the file.")
    target = default_target(curves) if settings.target is None else settings.target
    quantum_s = settings.quantum_s or QUANTUM_SHARE * median(curve.length_s for curve in curves)
    overhead_s = min(OVERHEAD_S, OVERHEAD_SHARE * quantum_s) if settings.overhead_s is None else settings.overhead_s
    report_s = settings.report_s or quantum_s / REPORTS_PER_QUANTUM
    world = WorldSettings(settings.gpus, overhead_s, report_s, settings.arrival_s, settings.until)
    return Scenario(target, quantum_s, settings.jobs, settings.good, settings.jobs_per_gpu, settings.milestones, world)


def simulate(
    curves: Sequence[Curve],
    policies: Mapping[str, PolicyFactory],
    scenario: Scenario,
    seeds: Sequence[int],
    progress: Callable[[], None] = lambda: None,
) -> tuple[PolicyResult, ...]:
    """Runs every policy on the same bins, one bin for each seed.

    Args:
        curves: what the bins are drawn from.
        policies: name -> what makes the policy; see `policies_named`.
        scenario: see `resolve`.
        seeds: of the bins and the policies.
        progress: called after each policy on each bin.

    Raises:
        BadInputError: if there are too few good trials, or too few others.
        PolicyViolationError: if a policy breaks a rule.
    """
    outcomes: dict[str, list[Outcome]] = {name: [] for name in policies}
    for seed in seeds:
        trials = draw_bin(curves, scenario.target, scenario.jobs, scenario.good, seed)
        settings = PolicySettings(
            quantum_s=scenario.quantum_s,
            jobs_per_slot=scenario.jobs_per_gpu,
            milestones=scenario.milestones,
            seed=seed,
            switch_s=scenario.world.overhead_s,
        )
        for name, make in policies.items():
            outcomes[name].append(World(trials, make(trials, settings), scenario.world).run())
            progress()
    return tuple(PolicyResult(name, tuple(of_seeds)) for name, of_seeds in outcomes.items())


def policies_named(names: Sequence[str]) -> dict[str, PolicyFactory]:
    """The policies of these names, and the oracle.

    Raises:
        BadInputError: if there is none of a name.
    """
    return {name: OraclePolicy if name == OraclePolicy.name else _factory(name) for name in names}


def _factory(name: str) -> PolicyFactory:
    make_policy(name, PolicySettings())
    return lambda _, settings: make_policy(name, settings)
