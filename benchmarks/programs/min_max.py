"""Minimises the time of the busiest network card, then Eq. 1, which the paper 'Dike' minimises alone.

Eq. 1 sums bytes over pairs of tasks and ignores cards and balance; parameter servers on a single machine cost it
nothing. A step waits for the busiest card. With S_i shard bytes and a_i of n workers on machine i, M bytes in all,
gradients and variables cross its card in both directions (docs/planner.md, 'Step time'):

    T_i = 2 max(S_i (n - a_i), a_i (M - S_i)) / speed_i         minimise max_i T_i, then Eq. 1

`MinMaxCounts`: T_i depends on machine i's configuration and number of workers only, so max T_i has few possible values.
Under a limit T a configuration allows a range of workers (the first term falls with a_i, the second rises), and
feasibility is the program of `solver.formulations.configurations`. Bisection over the values finds the minimum, at
which Eq. 1 is minimised.

`MinMaxShards`: for too many configurations the program of `solver.formulations.unequal` takes T as a variable. As
S_i a_i = sum_j Mem_j y_ij,

    minimise    T
    subject to  T speed_i / 2 >= n sum_j Mem_j P_ij - sum_j Mem_j y_ij          for every i: sent bytes
                T speed_i / 2 >= M n_i              - sum_j Mem_j y_ij          for every i: received bytes

Exact, since a greater y_ij lowers both. Then T is fixed and Eq. 1 minimised.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from solver.formulations import programs
from solver.formulations.configurations import TOO_MANY, Configurations
from solver.formulations.counted_workers import CountedWorkers
from solver.formulations.instance import Instance, Objective, Solution, UniformCosts, card_s, network_s
from solver.formulations.unequal import UnequalShards, add_local_workers
from solver.placement.fastest import SLACK, OutOfTimeError

from solver.placement.naming import Assignment


@dataclass(frozen=True)
class MinMaxCounts:
    """Bisection over the times of a card, with class counts; one Cost_in and one Cost_out."""

    name: str = "busiest card, class counts"
    objective: Objective = "network"

    def refusal(self, instance: Instance) -> str | None:
        """Why it cannot take the instance, as a clause; None if it can."""
        if not isinstance(instance.costs, UniformCosts):
            return "costs differ by pair of machines"
        return TOO_MANY if Configurations.of(instance, by_card=True) is None else None

    def solve(self, instance: Instance, time_limit_s: float | None = None) -> Solution | None:
        """Raises OutOfTimeError if the time limit passes without a solution."""
        deadline = programs.deadline_after(time_limit_s)
        configurations = Configurations.of(instance, by_card=True)
        assert configurations is not None, TOO_MANY
        cards = [
            [
                card_s(
                    instance,
                    entry.stored_bytes,
                    workers,
                    configurations.classes[entry.machines].network_bytes_per_s,
                )
                for workers in range(entry.most + 1)
            ]
            for entry in configurations.entries
        ]

        def place(limit_s: float, value: float) -> tuple[Assignment | None, bool]:
            limits = [_worker_range(card, limit_s) for card in cards]
            found, result = configurations.solve(lambda entry: value * entry.stored_bytes, limits, deadline)
            return found, result.proven

        times = sorted({time_s for card in cards for time_s in card})
        low, high = 0, len(times) - 1
        best, _ = place(times[high], 0.0)
        if best is None:
            return None
        try:
            while low < (high := bisect_left(times, network_s(instance, best))):
                middle = (low + high) // 2
                found, _ = place(times[middle], 0.0)
                if found is None:
                    low = middle + 1
                else:
                    best = found
            least_traffic, proven = place(times[high], programs.saving(instance) / instance.total_bytes)
        except OutOfTimeError:
            return programs.checked_solution(instance, best, self.objective, proven=False, bound=times[low])
        assert least_traffic is not None, "the limit was feasible in the bisection"
        return programs.checked_solution(instance, least_traffic, self.objective, proven, bound=times[low])


def _worker_range(card: list[float], limit_s: float) -> tuple[int, int] | None:
    """Minimum and maximum number of workers within the limit; None if there is none."""
    fitting = [workers for workers, time_s in enumerate(card) if time_s <= limit_s]
    return (fitting[0], fitting[-1]) if fitting else None


@dataclass(frozen=True)
class MinMaxShards:
    """The time of a card as a variable; any shards, one Cost_in and one larger Cost_out."""

    name: str = "busiest card, unequal shards"
    objective: Objective = "network"

    def refusal(self, instance: Instance) -> str | None:
        """Why it cannot take the instance, as a clause; None if it can."""
        return UnequalShards().refusal(instance)

    def solve(self, instance: Instance, time_limit_s: float | None = None) -> Solution | None:
        """Raises OutOfTimeError if the time limit passes without a solution."""
        deadline = programs.deadline_after(time_limit_s)
        # Unit: time of the fastest card for all M bytes both ways.
        unit_s = 2 * instance.total_bytes / max(kind.network_bytes_per_s for kind in instance.kinds)
        program = CountedWorkers.of(instance)
        local = add_local_workers(program, instance, 0.0)
        slowest = unit_s / (2 * instance.total_bytes) * min(kind.network_bytes_per_s for kind in instance.kinds)
        longest = program.builder.fraction(instance.workers / slowest, -1.0)
        _limit_cards(program, instance, local, unit_s, longest)
        result = programs.run(program.builder.build(), deadline)
        if result.values is None:
            return None
        quickest = program.assignment(result.values)
        bound = -unit_s * result.bound
        if not result.proven:
            return programs.checked_solution(instance, quickest, self.objective, proven=False, bound=bound)
        limit_s = network_s(instance, quickest) * (1 + SLACK)
        program = CountedWorkers.of(instance)
        local = add_local_workers(program, instance, programs.saving(instance))
        _limit_cards(program, instance, local, limit_s)
        try:
            result = programs.run(program.builder.build(), deadline)
        except OutOfTimeError:
            return programs.checked_solution(instance, quickest, self.objective, proven=False, bound=bound)
        # Rounding in the solver may leave no solution within the limit.
        least_traffic = quickest if result.values is None else program.assignment(result.values)
        return programs.checked_solution(instance, least_traffic, self.objective, result.proven, bound)


def _limit_cards(
    program: CountedWorkers, instance: Instance, local: list[dict[str, int]], unit_s: float, factor: int | None = None
) -> None:
    """Adds T_i <= unit_s times the factor (default 1) for every machine i, in units of all M bytes."""
    shares = [shard.size_bytes / instance.total_bytes for shard in program.types]
    for name, kind in programs.nodes(instance):
        moved = unit_s * kind.network_bytes_per_s / (2 * instance.total_bytes)
        leaving = {here[name]: instance.workers * share for here, share in zip(program.ps, shares, strict=True)}
        arriving = {program.workers[name]: 1.0}
        for direction in (leaving, arriving):
            row = direction | {shared[name]: -share for shared, share in zip(local, shares, strict=True)}
            if factor is None:
                program.builder.row(row, upper=moved)
            else:
                program.builder.row(row | {factor: -moved}, upper=0.0)
