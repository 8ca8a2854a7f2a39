"""The simplest placement that is fast enough: fewest tasks, then fewest machines, then least CPUs of the ps.

For a number of parameter servers (ps) one integer program (solver.placement.class_counts) finds the fewest workers with
which a speed is reached, and of those placements one on the fewest machines. Asynchronous workers have to make the
steps of that speed with the links evaluated there (solver.async_rates). A synchronous step depends on the number of
workers, so bisection finds that, and each program decides whether the workers, none slower than W, fit on machines
whose network cards take no longer than the rest of the step.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Iterator, Sequence

from solver.evaluation import RatedPlan
from solver.placement.class_counts import NO_LIMITS, CountLimits, Counts, Floor, OutOfTimeError, proven_counts
from solver.placement.class_steps import Reach, Steps
from solver.placement.naming import Assignment, assign
from solver.placement.problem import PlacementProblem, State, placement_problem, slowest_times, with_slowest
from solver.search.space import MAX_STEP_RATIO, ROUNDING, Space
from solver.step_time import StepModel

MAX_PROGRAMS = 24
"""Maximum number of integer programs, ..."""
MAX_ALL_STATES = 5_000
"""... and of states in all of them together."""
MAX_SLOWEST_TIMES = 4
"""Maximum times of the slowest ps machine that are tried (asynchronous)."""
MAX_WORKS = 6
"""Maximum limits on the workers' work that are tried (synchronous)."""
MAX_STATES = 3_000
"""Maximum number of states of a program; larger ones take seconds."""
MAX_COMBINATIONS = 20_000
"""Maximum kinds of machines x sizes of shards x shapes of which the states are listed."""
MAX_PROGRAM_S = 2.0
"""Time limit of one program."""
SLACK = 1e-7
"""Relative; a program that requires this share more has a margin for the solver's rounding."""


class Simplest:
    """Searches the placements of several spaces for the simplest that is at least as fast as a floor."""

    def __init__(self, spaces: Sequence[Space], found: Sequence[RatedPlan], floor: float, deadline: float) -> None:
        """Prepares the search.

        Args:
            spaces: the placements.
            found: placements that are fast enough; not empty.
            floor: minimum samples/s.
            deadline: on `time.monotonic`'s clock.
        """
        self._spaces, self._found, self._floor, self._deadline = spaces, found, floor, deadline
        self._fastest = max(found, key=lambda plan: plan.samples_per_s)
        self._best = min(found, key=simplicity)
        self._programs = self._all_states = 0

    @property
    def _is_over(self) -> bool:
        has_effort = self._programs < MAX_PROGRAMS and self._all_states < MAX_ALL_STATES
        return not has_effort or time.monotonic() > self._deadline

    def find(self) -> RatedPlan:
        for plan in sorted({id(plan): plan for plan in (self._best, self._fastest)}.values(), key=simplicity):
            self._keep(self._without_idle(plan))
        # First with the numbers of ps of plans that are known to be fast enough.
        known = {(len(plan.assignment.ps), plan.scenario.sizes.ps_cpus) for plan in self._found}
        candidates = sorted(self._candidates(), key=lambda each: ((each[2], each[1]) not in known, *each[:3]))
        for tasks, _, ps, space in candidates:
            if self._is_over:
                break
            if tasks > self._best.tasks:
                continue
            for plan in self._plans(space, ps, tasks - ps):
                self._keep(plan)
        return self._best

    def _keep(self, plan: RatedPlan | None) -> None:
        if plan is not None and plan.samples_per_s >= self._floor and simplicity(plan) < simplicity(self._best):
            self._best = plan

    def _without_idle(self, plan: RatedPlan) -> RatedPlan | None:
        """Removes the workers without which the plan is fast enough, the slowest first."""
        scenario, assignment = plan.scenario, plan.assignment
        holders = {*assignment.ps, assignment.chief}
        entries = list(zip(assignment.workers, assignment.shapes, strict=True))
        near = dict[str, int]()
        for name, _ in entries:
            near[name] = near.get(name, 0) + 1

        def order(entry: tuple[str, object]) -> tuple[bool, float, int, str]:
            name, shape = entry
            model = scenario.model(shape)  # type: ignore[arg-type]
            return name not in holders, model.work_s(scenario.kind_of[name]) / model.samples_per_step, -near[name], name

        entries.sort(key=order)
        fewest, enough = self._spaces[0].min_workers, len(entries)
        best = None
        while fewest < enough:
            middle = (fewest + enough) // 2
            kept = entries[:middle]
            thinner = dataclasses.replace(
                assignment,
                workers=tuple(name for name, _ in kept),
                shapes=tuple(shape for _, shape in kept),
            )
            found = RatedPlan.of(scenario, thinner)
            if found.samples_per_s >= self._floor:
                best, enough = found, middle
            else:
                fewest = middle + 1
        return best

    def _candidates(self) -> Iterator[tuple[int, float, int, Space]]:
        """Spaces and numbers of ps: (fewest tasks, CPUs of a ps, ps, space)."""
        for space in self._spaces:
            for ps in space.ps_counts() if self._can_list_states(space) else ():
                fewest = self._fewest_workers(space, ps)
                if fewest is not None and fewest <= space.max_workers:
                    yield fewest + ps, space.scenario.sizes.ps_cpus, ps, space

    def _can_list_states(self, space: Space) -> bool:
        return bool(space.steps) and len(space.scenario.kinds) * len(space.shapes) <= MAX_COMBINATIONS

    def _fewest_workers(self, space: Space, ps: int) -> int | None:
        """Fewest workers that could be fast enough if the network had no limits; None if no number could."""
        each = space.steps
        model, floor = space.model, self._floor
        load = model.load(space.scenario.shards(ps))
        most_samples = max(samples for _, samples in each)
        if not model.profile.synchronous:
            if model.shared(load).max_steps_per_s * most_samples < floor:
                return None
            fewest = floor / max(samples / work for work, samples in each)
        else:
            rest_s = model.update_s(load, 1) + model.dispatch_s(1)
            work_s = min(work for work, _ in each)
            if rest_s * floor >= most_samples:
                return None
            fewest = floor * work_s / (most_samples if model.overlap else most_samples - rest_s * floor)
        return max(space.min_workers, math.ceil(fewest * (1 - ROUNDING)), 1)

    def _plans(self, space: Space, ps: int, fewest: int) -> Iterator[RatedPlan]:
        """Plans with the fewest workers that programs find."""
        scenario = space.scenario
        models = [scenario.model(shape) for shape in space.shapes]
        most = min(space.max_workers, self._best.tasks - ps)
        if most < fewest:
            return
        for step_range in self._step_ranges(space):
            try:
                if scenario.profile.synchronous:
                    yield from self._synchronous(space, models, ps, (fewest, most))
                else:
                    yield from self._asynchronous(space, models, ps, (fewest, most), step_range)
            except OutOfTimeError:
                return

    def _step_ranges(self, space: Space) -> list[tuple[float, float]]:
        """Lengths of steps that go together: those of the fastest plan's workers, and those of the fastest workers."""
        if space.scenario.profile.synchronous:
            return [(0.0, math.inf)]
        kind_of, assignment = self._fastest.scenario.kind_of, self._fastest.assignment
        of_plan = min(
            self._fastest.scenario.model(shape).work_s(kind_of[name])
            for name, shape in set(zip(assignment.workers, assignment.shapes, strict=True))
        )
        quickest = min(work for work, _ in space.steps)
        starts = sorted({of_plan + space.transfer_s, quickest + space.transfer_s})
        return [(start * (1 - ROUNDING), start * MAX_STEP_RATIO * (1 + ROUNDING)) for start in starts]

    def _problem(self, space: Space, models: Sequence[StepModel], ps: int, workers: int) -> PlacementProblem | None:
        scenario, shards = space.scenario, space.scenario.shards(ps)
        if len(scenario.kinds) * len(models) * len(set(shards.sizes)) > MAX_COMBINATIONS:
            return None
        problem = placement_problem(scenario.kinds, models, scenario.sizes, shards, workers)
        # Workers without GPUs are for machines that hold no others.
        holds_gpus = {state.kind for state in problem.states if state.shape.gpus and state.work_s}
        states = [
            state for state in problem.states if state.shape.gpus or not state.work_s or state.kind not in holds_gpus
        ]
        return dataclasses.replace(problem, states=tuple(states)) if len(states) <= MAX_STATES else None

    def _asynchronous(
        self,
        space: Space,
        models: Sequence[StepModel],
        ps: int,
        workers: tuple[int, int],
        step_range: tuple[float, float],
    ) -> Iterator[RatedPlan]:
        whole = self._problem(space, models, ps, workers[1])
        if whole is None:
            return
        within = [
            state
            for state in whole.states
            if not state.work_s or step_range[0] <= state.work_s + space.transfer_s <= step_range[1]
        ]
        whole = dataclasses.replace(whole, states=tuple(within))
        floor = self._floor * (1 + SLACK)
        rates = {floor / state.samples for state in within if state.work_s}
        if len(rates) > 1:
            rates.add(floor / self._fastest.samples_per_s * self._fastest.steps_per_s)
        stored = {state.local_bytes for state in within}
        times, _ = slowest_times(whole.kinds, stored, space.scenario.shards(ps), MAX_SLOWEST_TIMES)
        for problem in [with_slowest(whole, models, time_s) for time_s in times] or [whole]:
            for rate in sorted(rates):
                if rate > problem.shared.max_steps_per_s:
                    continue
                reaches = [
                    Reach(lambda state: state.samples / floor, 1.0),
                    *([Reach(lambda state, rate=rate: 1 / rate, 0.0, 1.0)] if len(rates) > 1 else []),  # type: ignore[misc]
                ]
                counts = self._fewest(problem, NO_LIMITS, workers[0], steps=Steps(rate, reaches=reaches))
                if counts is not None:
                    yield self._rated(space, problem, counts)

    def _synchronous(
        self, space: Space, models: Sequence[StepModel], ps: int, workers: tuple[int, int]
    ) -> Iterator[RatedPlan]:
        fewest, most = workers
        problem = self._problem(space, models, ps, most)
        most = 0 if problem is None else min(most, _room(problem))
        middle = most
        while fewest <= most:
            problem = self._problem(space, models, ps, middle)
            found = None if problem is None else self._fast_enough(problem)
            if found is not None and problem is not None:
                plan = self._rated(space, problem, found)
                if plan.samples_per_s < self._floor:
                    return
                yield plan
                most = middle - 1
            elif middle == most:
                # If the largest number is too slow or does not fit beside the ps, so do others, but perhaps not all.
                most = middle - 1
            else:
                fewest = middle + 1
            middle = (fewest + most) // 2

    def _fast_enough(self, problem: PlacementProblem) -> Counts | None:
        """A synchronous placement of exactly these workers on the fewest machines."""
        model, workers, floor = problem.model, problem.workers, self._floor * (1 + SLACK)
        batches = sorted({state.samples for state in problem.states if state.work_s}, reverse=True)
        for samples in batches:
            round_s = workers * samples / floor
            works = sorted({state.work_s for state in problem.states if 0 < state.work_s <= round_s}, reverse=True)
            floors = [Floor(lambda state, least=samples: state.samples / least, workers)]  # type: ignore[misc]
            for work_s in _spread(works):
                network_s = model.network_limit_s(round_s, work_s, problem.load, workers)
                if network_s < 0:
                    continue
                limits = CountLimits(work_s, network_s)
                counts = self._fewest(problem, limits, workers, floors=floors if len(batches) > 1 else ())
                if counts is not None:
                    return counts
        return None

    def _fewest(
        self,
        problem: PlacementProblem,
        limits: CountLimits,
        fewest: int,
        *,
        floors: Sequence[Floor] = (),
        steps: Steps | None = None,
    ) -> Counts | None:
        """Fewest workers, then fewest machines.

        Raises:
            OutOfTimeError: if the deadline passed, or this is one program too many.
        """
        if self._is_over:
            raise OutOfTimeError
        self._programs += 1
        self._all_states += len(problem.states)
        machines = sum(kind.count for kind in problem.kinds)
        return proven_counts(
            problem,
            _one_less,
            limits,
            deadline=min(self._deadline, time.monotonic() + MAX_PROGRAM_S),
            floors=floors,
            steps=steps,
            fewest_workers=fewest,
            machine_price=1 / (machines + 1),
        )

    def _rated(self, space: Space, problem: PlacementProblem, counts: Counts) -> RatedPlan:
        assignment: Assignment = assign(counts.groups, problem.kinds, problem.shard_types)
        return RatedPlan.of(space.scenario, assignment)


def _room(problem: PlacementProblem) -> int:
    """Number of workers that fit without regard to the ps."""
    room = dict.fromkeys(range(len(problem.kinds)), 0)
    for state in problem.states:
        if state.work_s:
            room[state.kind] = max(room[state.kind], len(state.network_s) - 1)
    return sum(problem.kinds[kind].count * workers for kind, workers in room.items())


def simplicity(plan: RatedPlan) -> tuple[float, ...]:
    """Order of plans: tasks, machines, CPUs of the ps, traffic."""
    assignment = plan.assignment
    machines = len({*assignment.ps, *assignment.workers, *filter(None, [assignment.chief])})
    ps_cpus = len(assignment.ps) * plan.scenario.sizes.ps_cpus
    return plan.tasks, machines, ps_cpus, plan.worth.traffic_bytes, -plan.samples_per_s


def _one_less(_: State) -> float:
    return -1.0


def _spread(values: Sequence[float]) -> Iterable[float]:
    """Up to `MAX_WORKS` of the values, with the first and the last."""
    if len(values) <= MAX_WORKS:
        return values
    return [values[round(index * (len(values) - 1) / (MAX_WORKS - 1))] for index in range(MAX_WORKS)]
