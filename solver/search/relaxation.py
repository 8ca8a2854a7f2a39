"""Searches every placement that the step-time model can express, by Lagrangian relaxation, with a bound.

Each machine has no parameter server (ps) or one, and its own shape of workers; machines without GPUs may have workers
too. Few constraints couple the machines: the ps of all add up to m and, if their number is limited, the workers to at
most a limit. So for a given m the ps go to the machines that gain most by one, and a price for each worker replaces
the limit (solver.search.optimum).

*Asynchronous.* At X steps/s of all workers every machine's links allow its workers a range of rates
(solver.async_rates), and more workers never slow it down: its value is what its workers and its links allow. The speed
is the X that all machines together just reach. Over a range of X the links allow most at its lower end, and a price per
step, subtracted from its samples, keeps the steps below its upper end: that bounds the range. If cards differ, the time
of the slowest ps machine is divided into ranges, too, and if workers differ much the length of their steps.

*Synchronous.* With n workers, none slower than W, a round has T = samples / speed - W - n (update + dispatch) for the
network; that limits the workers on each machine, whose samples give a new T. From a known speed, T falls to the longest
that a faster plan can have, or below 0 if there is none.

The machines found by the optimistic reading (solver.search.machines) are placed again by the real one, get the real
shards, are rated by `solver.evaluation`, and if they are few improved by moving tasks.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from solver.evaluation import RatedPlan
from solver.placement.naming import Assignment
from solver.placement.problem import slowest_times
from solver.resources import TaskResources
from solver.search.balance import balanced
from solver.search.machines import ANY_CASE, MAX_FEW_MACHINES, Case, MachineArrays, Row
from solver.search.optimum import RelaxedOptimum
from solver.search.placing import assign_machines, trim_machines
from solver.search.relaxed_problems import machines_reaching, rate_optima, windows
from solver.search.space import ROUNDING, Floats, Space, has_similar_workers
from solver.shards import Shards

MAX_HOST_KINDS = 3
"""Maximum number of kinds that are tried for the chief and for a far larger shard ..."""
MAX_KINDS_WITH_SEVERAL_HOSTS = 6
"""... if there are at most this many kinds; ..."""
MIN_HOST_KINDS = 2
"""... else this number."""
MAX_UNEQUAL_SHARDS = 6
"""Maximum number of unequal shards for which the optimistic reading is also placed."""
MAX_SLOWEST_TIMES = 12
"""Maximum ranges of the slowest ps machine's time for one number of ps."""
LARGE_SHARD_RATIO = 1.5
"""Ratio to the mean of the others above which a shard's machine is chosen separately."""
MORE_PS = 0
"""In the place of a number of ps: any number that is not searched. Only bounded, not placed."""
MAX_SHARD_RATIO = 1.1
"""Ratio of the largest to the smallest shard up to which the bound takes the best for each machine."""
MAX_BISECTIONS = 20
MIN_SPEED_GAIN = 0.02
"""Minimum gain of speed, as a share; cases that cannot gain more are not examined."""
MAX_NARROWINGS = 3
WORK_RANGES = 24
"""Initial number of ranges of workers' work."""
MAX_WORKERS_RATIO = 1.3
"""Ratio of maximum to minimum workers above which a case is divided without a bound."""
MAX_TARGET_RATIO = 1.5
"""Maximum ratio of a target speed to the speed reached."""
MIN_BOUND_SHARE = 1e-9
"""Minimum share of a bound that a speed must reach to be of interest."""
MAX_TRIES = 3
"""Maximum cases of a number of ps that are placed after the bound no longer depends on them."""
MIN_RATED_SHARE = 1.0
"""Minimum speed with shards of the mean size, as a share of the fastest, for machines to be rated."""
MIN_IMPROVED_SHARE = 0.7
"""Minimum speed, as a share of the fastest, for placements to be improved."""
MAX_PLACED_WIDTH = 1.03
"""Ratio of steps/s up to which a range is placed as one case ..."""
MIN_BOUNDED_WIDTH = 1.002
"""... and bounded as one."""
RANK_STEP = 0.001
"""Bounds closer than this share have the same rank."""
POINTS_PER_BATCH = 8
"""Relaxed problems of few machines that are solved together."""
MAX_EFFORT = 10_000.0
"""Maximum effort, in relaxed problems of a few machines."""
MAX_SINGLE_MACHINES = 200
"""Maximum kinds of machines x shapes for which plans on a single machine are rated at the start."""
FIRST_PS_COUNTS = (1, 2, 4, 8, 16)
"""Numbers of ps that are placed at the start, ..."""
FIRST_EFFORT_SHARE = 0.25
"""... with up to this share of the maximum effort (asynchronous)."""
FIRST_EFFORT_FACTOR = 5.0
"""The first placement may take this many times the maximum effort."""
WORKERS_PER_EFFORT = 5
"""Number of workers that are placed and rated in the time of one relaxed problem."""
MAX_CACHED_CELLS = 3_000_000
"""Cells of the arrays that are kept, ..."""
MIN_CACHED = 8
"""... but at least this number of arrays."""
MIN_SPEED = 1e-12
"""Minimum samples/s; lower bounds count as infeasible."""


@dataclass(frozen=True)
class RelaxedResult:
    """Result of a search.

    Attributes:
        best: the fastest placement; None if nothing fits, or none is faster than what was known.
        bound: upper bound of any placement's samples/s.
        of_counts: numbers of ps and workers -> the fastest placement that was rated.
        rated: number of placements that were rated.
    """

    best: RatedPlan | None
    bound: float
    of_counts: dict[tuple[int, int], RatedPlan]
    rated: int

    def after(self, first: RelaxedResult) -> RelaxedResult:
        """This result, with the placements of a search in a part of its spaces."""
        of_counts = {**first.of_counts}
        for counts, plan in self.of_counts.items():
            if counts not in of_counts or plan.samples_per_s > of_counts[counts].samples_per_s:
                of_counts[counts] = plan
        return RelaxedResult(self.best or first.best, self.bound, of_counts, self.rated + first.rated)


def fastest(
    spaces: Sequence[Space], known: float, deadline: float, on_better: Callable[[RatedPlan, float], None] | None = None
) -> RelaxedResult:
    """Finds the fastest placement of several spaces, and an upper bound of any speed.

    Args:
        spaces: the placements.
        known: a speed that was reached; slower placements are of no interest.
        deadline: on `time.monotonic`'s clock; the first placement is always finished.
        on_better: called with each placement faster than all before, and the bound at that time.
    """
    best = _Best(known, on_better)
    heap: list[tuple[float, float, int, float, _Search, _SyncCase | _AsyncCase]] = []
    order = itertools.count()

    def push(bound: float, search: _Search, case: _SyncCase | _AsyncCase) -> None:
        heapq.heappush(heap, (*search.rank(bound, case), next(order), bound, search, case))

    first_cases: list[tuple[float, _Search, _AsyncCase]] = []
    for space in spaces:
        search = _Search(space, best)
        search.place_on_single_machines()
        for case in search.cases():
            bound = search.first_bound(case)
            push(bound, search, case)
            if isinstance(case, _AsyncCase) and case.ps in FIRST_PS_COUNTS:
                first_cases.append((bound, search, case))
    # With a good placement from the start, most cases need not be examined.
    for bound, search, case in sorted(first_cases, key=lambda each: -each[0]):
        is_late = best.found is not None and time.monotonic() > deadline
        if bound > best.speed * (1 + MIN_SPEED_GAIN) and best.effort < MAX_EFFORT * FIRST_EFFORT_SHARE and not is_late:
            search.place_first(case, bound)
    highest = 0.0
    while heap:
        _, _, _, above, search, case = heapq.heappop(heap)
        highest = highest or above
        best.open_bound = above
        has_plan = known > 0 or best.found is not None
        limit = 1.0 if has_plan else FIRST_EFFORT_FACTOR
        is_over = best.effort > MAX_EFFORT * limit or (has_plan and time.monotonic() > deadline)
        # If bounds fell this far without any placement, the tasks fit nowhere.
        is_hopeless = not best.speed and above < highest * MIN_BOUND_SHARE
        if is_over or is_hopeless or above <= max(best.speed * (1 + MIN_SPEED_GAIN), MIN_SPEED):
            best.bound = max(best.bound, above, *(bound for _, _, _, bound, _, _ in heap))
            break
        for bound, left in search.examine(case, above):
            push(bound, search, left)
    return RelaxedResult(best.found, float(max(best.speed, best.bound)), best.of_counts, best.rated)


@dataclass(frozen=True)
class _AsyncCase:
    """Asynchronous placements bounded together: a number of ps, and a range of X, the steps/s of all workers.

    Attributes:
        of: the slowest ps machine, and the length of the workers' steps.
        best: X of its relaxed optimum; 0 before that is known.
        is_whole: whether it covers all X of that number of ps and that slowest machine.
        is_divided: whether it covers only one range of the slowest ps machine's time, if there are several.
        is_tried: whether it, or a case that contains it, has been placed.
    """

    ps: int
    low: float
    high: float
    of: Case = ANY_CASE
    best: float = 0.0
    is_whole: bool = False
    is_divided: bool = True
    is_tried: bool = False

    @property
    def width(self) -> float:
        return self.high / self.low

    def parts(self, middle: float) -> Iterator[_AsyncCase]:
        """The ranges of X above and below."""
        for low, high in ((middle, self.high), (self.low, middle)):
            yield _AsyncCase(self.ps, low, high, self.of, is_tried=self.is_tried)


@dataclass(frozen=True)
class _SyncCase:
    """Synchronous placements bounded together: a number of ps, ranges of the slowest worker's work and of workers.

    Attributes:
        works: indices of the works.
        below: a speed that is within reach.
    """

    ps: int
    works: tuple[int, int]
    workers: tuple[int, int]
    below: float = 0.0

    def parts(self) -> Iterator[_SyncCase]:
        """Its two halves, if it is more than one number of workers and one work."""
        (first, last), (fewest, most) = self.works, self.workers
        if first < last:
            middle = (first + last) // 2
            yield replace(self, works=(first, middle))
            yield replace(self, works=(middle + 1, last))
        elif fewest < most:
            middle = math.isqrt(fewest * most)
            yield replace(self, workers=(fewest, middle))
            yield replace(self, workers=(middle + 1, most))

    @property
    def is_coarse(self) -> bool:
        """Whether it is too wide for a useful bound."""
        return self.workers[1] > MAX_WORKERS_RATIO * self.workers[0] + 1


class _Best:
    """The fastest placement so far, and bounds for the others.

    Attributes:
        speed: its speed, or the known one.
        bound: upper bound of the placements of all finished cases.
        open_bound: of all cases that are not finished.
    """

    def __init__(self, known: float, on_better: Callable[[RatedPlan, float], None] | None) -> None:
        self.speed, self.bound, self.open_bound, self.effort = known, 0.0, math.inf, 0.0
        self.found: RatedPlan | None = None
        self.of_counts: dict[tuple[int, int], RatedPlan] = {}
        self.rated = 0
        self._on_better = on_better
        self._arrays: OrderedDict[object, list[MachineArrays]] = OrderedDict()
        self._cells = 0

    def arrays(self, key: object, make: Callable[[], list[MachineArrays]]) -> list[MachineArrays]:
        """The arrays with that key, made again if they were not used for long: all of them would fill the memory."""
        if key not in self._arrays:
            self._arrays[key] = make()
            self._cells += _cells(self._arrays[key])
            while self._cells > MAX_CACHED_CELLS and len(self._arrays) > MIN_CACHED:
                _, oldest = self._arrays.popitem(last=False)
                self._cells -= _cells(oldest)
        self._arrays.move_to_end(key)
        return self._arrays[key]

    def rate(self, space: Space, assignment: Assignment) -> None:
        """Improves and rates the placement, and keeps it if it is the fastest so far."""
        plan = RatedPlan.of(space.scenario, assignment)
        self.rated += 1
        if plan.samples_per_s < self.speed * MIN_IMPROVED_SHARE or not has_similar_workers(space.scenario, assignment):
            return
        better = balanced(plan.scenario, plan.shape, plan.shards, assignment)
        if better is not assignment:
            plan = RatedPlan.of(space.scenario, better)
        counts = len(assignment.ps), len(assignment.workers)
        if counts not in self.of_counts or plan.samples_per_s > self.of_counts[counts].samples_per_s:
            self.of_counts[counts] = plan
        if plan.samples_per_s > self.speed:
            self.speed, self.found = plan.samples_per_s, plan
            if self._on_better is not None:
                self._on_better(plan, float(max(self.bound, self.open_bound, self.speed)))


def _cells(arrays: Sequence[MachineArrays]) -> int:
    return sum(each.room.size for each in arrays)


class _Search:
    """Examines the cases of one space."""

    def __init__(self, space: Space, best: _Best) -> None:
        self._space, self._best = space, best
        self._scenario = space.scenario
        self._loads: dict[int, float] = {}
        self._works: Floats = np.zeros(0)
        self._cards = sum(kind.count * kind.network_bytes_per_s for kind in self._scenario.kinds)
        self._seen: set[object] = set()
        self._max_rates_tried: set[object] = set()
        self._tried: Counter[tuple[int, object]] = Counter()

    def place_on_single_machines(self) -> None:
        """Places workers of each shape beside a ps that holds all variables, on a machine of each kind."""
        space, scenario, sizes = self._space, self._scenario, self._scenario.sizes
        if len(scenario.kinds) * len(space.shapes) > MAX_SINGLE_MACHINES:
            return
        server = sizes.ps(scenario.shards(1).total)
        for index, kind in enumerate(scenario.kinds):
            beside = [server] if sizes.chief is None else [server, sizes.chief]
            for shape in space.shapes:
                room = kind.room_for(sizes.worker(shape), beside) if space.hosts(shape)[index] else 0
                if not shape.gpus and kind.gpus:
                    continue
                for count in {space.min_workers, min(room, space.max_workers)}:
                    if space.min_workers <= count <= room:
                        chief = None if sizes.chief is None else kind.names[0]
                        on = (kind.names[0],) * count
                        self._best.rate(space, Assignment(on[:1], on, chief, (shape,) * count))

    def place_first(self, case: _AsyncCase, bound: float) -> None:
        """Places a case with the shortest and with the longest time of the slowest ps machine."""
        slowest = self._slowest(case.ps)
        for time_s in dict.fromkeys((slowest[0], slowest[-1])):
            self._place_async_case(replace(case, of=replace(case.of, slowest=time_s), best=case.high), bound)

    def rank(self, bound: float, case: _SyncCase | _AsyncCase) -> tuple[float, float]:
        """Order of the cases: of almost equal bounds narrow ones first, or few workers, which give placements."""
        if isinstance(case, _SyncCase) and sum(kind.count for kind in self._scenario.kinds) <= MAX_FEW_MACHINES:
            return -bound, 0.0
        rank = math.floor(math.log(max(bound, MIN_SPEED)) / RANK_STEP)
        return -rank, case.width if isinstance(case, _AsyncCase) else float(case.workers[0])

    def examine(self, case: _SyncCase | _AsyncCase, above: float) -> Iterator[tuple[float, _SyncCase | _AsyncCase]]:
        """Bounds the case, places it or divides it; yields the remaining cases with their bounds.

        `above`: an upper bound of the case.
        """
        if isinstance(case, _AsyncCase):
            yield from self._split_or_place(case, above)
            return
        if case.is_coarse:
            for part in case.parts():
                yield min(above, self.first_bound(part)), part
            return
        goal = self._target_speed(above, case)
        found = self._optimistic_machines(case, goal)
        if found is None:
            yield goal, replace(case, below=0.0)
            return
        parts = list(case.parts())
        if parts:
            found, goal, above = self._narrow_bounds(case, found, max(goal, self._best.speed), above)
        self._place_sync_case(case, found, goal, above)
        for part in parts:
            yield min(above, self.first_bound(part)), part
        if not parts:
            if above <= max(goal, self._best.speed) * (1 + MIN_SPEED_GAIN):
                self._best.bound = max(self._best.bound, above)
            else:
                yield above, replace(case, below=goal)

    def _split_or_place(self, case: _AsyncCase, above: float) -> Iterator[tuple[float, _AsyncCase]]:
        """Bounds the case, places it or divides it; yields the remaining cases with their bounds."""
        if not case.is_divided:
            for slowest in self._slowest(case.ps):
                divided = replace(case, of=replace(case.of, slowest=slowest), is_divided=True)
                yield min(above, self.first_bound(divided)), divided
            return
        samples, key = self._arrays(case.ps, case.of).most_samples, (case.ps, case.of)
        if case.is_whole and case.width > MAX_PLACED_WIDTH and case.high * samples <= above * (1 + ROUNDING):
            # If the ps are the only limit, their maximum steps are best.
            middle = case.high / MAX_PLACED_WIDTH
        elif not case.best:
            bound, best = self._relaxed_bound(case)
            bounded = replace(case, best=best)
            yield min(above, bound), bounded
            return
        elif (
            case.ps != MORE_PS
            and not case.is_tried
            and (case.width <= MAX_PLACED_WIDTH or (above <= self._best.bound and self._tried[key] < MAX_TRIES))
        ):
            self._tried[key] += 1
            self._place_async_case(case, above)
            yield above, replace(case, is_tried=True)
            return
        elif above <= self._best.bound or case.width <= MIN_BOUNDED_WIDTH:
            self._best.bound = max(self._best.bound, above)
            return
        else:
            middle = math.sqrt(case.low * case.high)
        for part in case.parts(middle):
            yield min(above, part.high * samples), part

    def _prices(self, arrays: MachineArrays) -> list[float]:
        """Prices of a step: for steps with more samples, fewer of them may be better."""
        samples = np.unique(arrays.samples).tolist()
        return [0.0] if len(samples) == 1 else [0.0, samples[0] / 2, *samples[:-1]]

    def _relaxed_bound(self, case: _AsyncCase) -> tuple[float, float]:
        """Bounds a case: links allow most at the lower end of its steps, and the price limits the steps to the upper
        end.

        Returns:
            A bound, and the steps of the machines with that bound.
        """
        arrays, bound, best = self._arrays(case.ps, case.of), math.inf, case.low
        prices = self._prices(arrays)
        for price, found in zip(prices, rate_optima(self._space, arrays, [case.low], prices), strict=True):
            self._best.effort += arrays.effort
            if found is None:
                return 0.0, best
            if found.value + price * case.high < bound:
                bound, best = found.value + price * case.high, min(max(case.low, found.steps), case.high)
            if bound <= self._best.speed * (1 + MIN_SPEED_GAIN):
                break
        return bound, best

    def _narrow_bounds(
        self, case: _SyncCase, found: RelaxedOptimum, goal: float, above: float
    ) -> tuple[RelaxedOptimum, float, float]:
        """Raises the speed reached and lowers the bound; the parts of the case start with these."""
        for _ in range(MAX_NARROWINGS):
            if above <= goal * (1 + MIN_SPEED_GAIN):
                break
            middle = math.sqrt(goal * above)
            faster = self._optimistic_machines(case, middle)
            if faster is None:
                above = middle
            else:
                found, goal = faster, middle
        return found, goal, above

    def _target_speed(self, above: float, case: _SyncCase) -> float:
        """A target speed between the one reached and the bound."""
        least = max(self._best.speed * (1 + MIN_SPEED_GAIN / 2), above * MIN_BOUND_SHARE)
        if not case.below:
            # Most of the many cases do not even reach the minimum of interest.
            return least
        below = max(least, case.below)
        return max(least, min(math.sqrt(below * above), below * MAX_TARGET_RATIO))

    def cases(self) -> Iterator[_SyncCase | _AsyncCase]:
        """All placements of the space."""
        if not self._space.most_ps:
            return
        one = self._arrays(1)
        if not one.samples.size or not one.room.any():
            return
        most = min(self._space.max_workers, one.most_workers)
        least = self._space.min_workers
        self._works = np.unique(one.work[np.isfinite(one.work)])
        if most < least or not len(self._works):
            return
        chunks = np.array_split(np.arange(len(self._works)), min(WORK_RANGES, len(self._works)))
        step_ranges = windows(self._space, one)
        # Of equal bounds, more ps come first: their CPUs are the last to limit the speed.
        counts = self._space.ps_counts()
        more = [MORE_PS] if len(counts) < self._space.most_ps else []
        for ps in (*more, *reversed(counts)):
            self._loads[ps] = self._load(ps)
            if self._scenario.profile.synchronous:
                for chunk in chunks:
                    yield _SyncCase(ps, (int(chunk[0]), int(chunk[-1])), (least, most))
                continue
            for window in step_ranges:
                most_rate = self._arrays(1, window).most_rate
                if not most_rate:
                    continue
                max_steps_per_s = min(
                    self._space.model.shared(self._loads[ps]).max_steps_per_s, most_rate / one.samples.min()
                )
                min_steps_per_s = max(self._best.speed / one.most_samples, max_steps_per_s * MIN_BOUND_SHARE)
                if min_steps_per_s >= max_steps_per_s:
                    self._best.bound = max(self._best.bound, max_steps_per_s * one.most_samples)
                    continue
                yield _AsyncCase(ps, min_steps_per_s, max_steps_per_s, window, is_whole=True, is_divided=False)

    def _slowest(self, ps: int) -> list[tuple[float, float]]:
        """Ranges of the time that the slowest ps machine takes to send its shard; one if it does not matter."""
        kinds, shards = self._scenario.kinds, self._shards(ps)
        stored = set(shards.sizes)
        if ps == MORE_PS:
            stored = {math.ceil(shards.total * part / MAX_SLOWEST_TIMES) for part in range(1, MAX_SLOWEST_TIMES + 1)}
        times, are_all = slowest_times(kinds, stored, shards, MAX_SLOWEST_TIMES)
        if not times:
            return [ANY_CASE.slowest]
        # If the times are complete, each range is a single time.
        are_all = are_all and ps != MORE_PS
        return [(high if are_all else low, high) for low, high in itertools.pairwise([0.0, *times])]

    def _shards(self, ps: int) -> Shards:
        if ps != MORE_PS:
            return self._scenario.shards(ps)
        # However many ps there are, one has the largest variable.
        variables = [variable.size_bytes for variable in self._scenario.profile.variables]
        total = self._scenario.shards(1).total
        return Shards((max(variables), total - max(variables)), {})

    def _load(self, ps: int) -> float:
        """Load of the busiest ps; its minimum for `MORE_PS`."""
        shards, load = self._shards(ps), self._space.model.load
        if ps != MORE_PS:
            return load(shards)
        return max(load(Shards((size,), {})) for size in (shards.sizes[0], shards.total // self._space.most_ps))

    def _arrays(self, ps: int, case: Case = ANY_CASE) -> MachineArrays:
        """The machines in the optimistic reading."""
        key = self, "optimistic", ps
        (arrays,) = self._best.arrays(
            (*key, case), lambda: [self._best.arrays(key, lambda: [self._make_optimistic(ps)])[0].limited_to(case)]
        )
        return arrays

    def _make_optimistic(self, ps: int) -> MachineArrays:
        kinds, shards = self._scenario.kinds, self._shards(ps)
        rows = [Row(index, kind.count) for index, kind in enumerate(kinds)]
        if len(kinds) == 1 and self._scenario.sizes.chief is not None:
            # One of the identical machines has the chief.
            others = kinds[0].count - 1
            rows = [Row(0, 1, chief=True), *([Row(0, others)] if others else [])]
        ps_bytes = None
        if ps == MORE_PS:
            ps_bytes = self._space.bytes_of_more_ps
        elif shards.sizes[0] > MAX_SHARD_RATIO * shards.sizes[-1]:
            ps_bytes = float(shards.sizes[-1]), float(shards.sizes[0])
        return MachineArrays(
            self._space, rows, shards, optimistic=True, ps_bytes=ps_bytes, most_ps=ps or self._space.most_ps
        )

    def first_bound(self, case: _SyncCase | _AsyncCase) -> float:
        """Bounds a case with the cards of all machines combined, and the largest shard on the fastest of them.

        Counts only the bytes of workers elsewhere.
        """
        arrays, model = self._arrays(1), self._space.model
        if isinstance(case, _AsyncCase):
            return min(case.high * arrays.most_samples, self._most_rate(case))
        first, last = case.workers
        elsewhere = max(0, first - arrays.most_beside)
        largest = self._shards(case.ps).sizes[0]
        network_s = 2 * elsewhere * max(arrays.total / self._cards, largest / arrays.fastest_card)
        rest_s = network_s + model.update_s(self._loads[case.ps], first) + model.dispatch_s(first)
        work_s = float(self._works[case.works[0]])
        round_s = max(work_s, rest_s) if model.overlap else work_s + rest_s
        return self._most_samples(case.works[1], last) / round_s

    def _most_rate(self, case: _AsyncCase) -> float:
        return self._arrays(1, replace(case.of, slowest=ANY_CASE.slowest)).most_rate

    @functools.cache  # noqa: B019
    def _most_samples(self, work: int, workers: int) -> float:
        """Samples of one step of up to that many workers that are no slower."""
        arrays = self._arrays(1)
        room = np.where(arrays.work <= self._works[work] * (1 + ROUNDING) + ROUNDING, arrays.room, 0)
        of_worker = float(np.where(room > 0, arrays.samples, 0.0).max(initial=0.0))
        return min(workers * of_worker, float(arrays.counts @ (room * arrays.samples).max(axis=(1, 2))))

    def _optimistic_machines(self, case: _SyncCase, goal: float) -> RelaxedOptimum | None:
        """Machines that are that fast in the optimistic reading; None if none are."""
        arrays = self._arrays(case.ps)
        self._best.effort += 2 * arrays.effort
        return machines_reaching(
            self._space,
            arrays,
            self._loads[case.ps],
            goal,
            (float(self._works[case.works[0]]), float(self._works[case.works[1]])),
            case.workers,
        )

    # Real placements.

    def _place_sync_case(self, case: _SyncCase, promise: RelaxedOptimum, goal: float, above: float) -> None:
        if case.ps == MORE_PS:
            return
        arrays = self._arrays(case.ps)
        busy = [state for state in promise.states if state.workers]
        works = [arrays.work[state.row, state.ps, state.choice % len(arrays.samples)] for state in busy]
        key = case.ps, float(max(works)), min(case.workers[1], sum(s.machines * s.workers for s in busy))
        if key in self._seen:
            return
        self._seen.add(key)
        for real in self._real_arrays(case.ps):
            for found in self._real_sync_optima(key, real, goal, above):
                self._assign_and_rate(case.ps, real, found, key[2])
                if self._best.speed * (1 + MIN_SPEED_GAIN) >= above:
                    return

    def _real_sync_optima(
        self, key: tuple[int, float, int], arrays: MachineArrays, goal: float, above: float
    ) -> Iterator[RelaxedOptimum]:
        space = self._space
        ps, work_s, workers = key
        speeds = [goal, self._best.speed or goal * MIN_BOUND_SHARE]
        while speeds:
            speed = speeds.pop(0) * (1 + MIN_SPEED_GAIN / 10)
            self._best.effort += 2 * arrays.effort
            found = machines_reaching(space, arrays, self._loads[ps], speed, (work_s, work_s), (workers, workers))
            if found is not None:
                yield found
                if self._best.speed > speed * (1 + MIN_SPEED_GAIN / 5):
                    speeds = [self._best.speed]
                elif speeds:
                    break
        if arrays.are_few:
            return
        # Shards differ from the mean size, and with many machines local search does not compensate: the optimum
        # by the mean size spreads them most evenly.
        best, low, high = None, max(goal, self._best.speed), above
        for _ in range(MAX_NARROWINGS):
            speed = math.sqrt(low * high)
            self._best.effort += 2 * arrays.effort
            found = machines_reaching(space, arrays, self._loads[ps], speed, (work_s, work_s), (workers, workers))
            best, low, high = (best, low, speed) if found is None else (found, speed, high)
        if best is not None:
            yield best

    def _place_async_case(self, case: _AsyncCase, above: float) -> None:
        candidates: Iterator[tuple[float, MachineArrays, RelaxedOptimum]] = (
            (self._samples(real, found), real, found)
            for real in self._real_arrays(case.ps, case.of)
            for found in self._real_async_optima(case, real)
        )
        if self._arrays(case.ps, case.of).are_few:
            # Rating takes longer than finding, so the best come first.
            candidates = iter(sorted(candidates, key=lambda entry: -entry[0]))
        for samples_per_s, real, machines in candidates:
            if samples_per_s < self._best.speed * MIN_RATED_SHARE:
                continue
            self._assign_and_rate(case.ps, real, machines, self._space.max_workers)
            if self._best.speed * (1 + MIN_SPEED_GAIN) >= above:
                return

    def _samples(self, arrays: MachineArrays, found: RelaxedOptimum) -> float:
        """Samples/s of the optimum if the shards had the mean size."""
        samples = arrays.samples[found.choices % len(arrays.samples)]
        return float(found.numbers[2] @ (samples * found.each(found.made)))

    def _real_async_optima(self, case: _AsyncCase, arrays: MachineArrays) -> Iterator[RelaxedOptimum]:
        prices = self._prices(arrays)
        if len(prices) > 1:
            some = [case.low, math.sqrt(case.low * case.high) if case.width <= MAX_PLACED_WIDTH else case.best]
            for index, found in enumerate(rate_optima(self._space, arrays, some, prices)):
                self._best.effort += arrays.effort
                if found is not None:
                    yield trim_machines(arrays, found, some[index // len(prices)])
        if arrays.key in self._max_rates_tried:
            return
        self._max_rates_tried.add(arrays.key)
        # The maximum steps that the machines keep up with.
        max_steps_per_s = self._space.model.shared(self._loads[case.ps]).max_steps_per_s
        low, high, best = 0.0, min(max_steps_per_s, self._most_rate(case) / float(arrays.samples.min())), None
        many = POINTS_PER_BATCH if arrays.are_few else 1
        points = high * np.arange(1, many + 1) / many
        for _ in range(MAX_BISECTIONS):
            reached = low
            for steps, found in zip(points.tolist(), rate_optima(self._space, arrays, points.tolist()), strict=True):
                self._best.effort += arrays.effort
                if found is not None and found.steps >= steps * (1 - ROUNDING):
                    best, reached = found, steps
            low, high = reached, min((steps for steps in points.tolist() if steps > reached), default=high)
            if high <= low * (1 + 1e-3):
                break
            points = low + (high - low) * np.arange(1, many + 1) / (many + 1)
        if best is not None:
            yield trim_machines(arrays, best, low)

    def _real_arrays(self, ps: int, case: Case = ANY_CASE) -> list[MachineArrays]:
        """Arrays for each choice of the chief's machine and the machine of a far larger shard."""
        key = self, "real", ps

        def make() -> list[MachineArrays]:
            found = []
            for place, base in enumerate(self._best.arrays(key, lambda: list(self._make_real(ps)))):
                arrays = base.limited_to(case)
                arrays.key = ps, case, place
                if arrays.is_optimistic or arrays.fits[:, 0].all():
                    found.append(arrays)
            return found

        return self._best.arrays((*key, case), make)

    @functools.cached_property
    def _holds_workers(self) -> list[bool]:
        """Whether machines of each kind have room for a worker."""
        space, sizes = self._space, self._scenario.sizes
        return [
            any(space.hosts(shape)[index] and kind.room_for(sizes.worker(shape)) > 0 for shape in space.shapes)
            for index, kind in enumerate(self._scenario.kinds)
        ]

    def _hosts_of(self, task: TaskResources) -> list[int]:
        """Kinds of machines that are tried for a task: first those without room for workers, then with few GPUs."""
        kinds, holds_workers = self._scenario.kinds, self._holds_workers
        with_room = [index for index, kind in enumerate(kinds) if kind.room_for(task) > 0]
        with_room.sort(key=lambda index: (holds_workers[index], kinds[index].gpus, -kinds[index].cpu_millis))
        return with_room[: MAX_HOST_KINDS if len(kinds) <= MAX_KINDS_WITH_SEVERAL_HOSTS else MIN_HOST_KINDS]

    def _make_real(self, ps: int) -> Iterator[MachineArrays]:
        scenario, shards = self._scenario, self._scenario.shards(ps)
        kinds, sizes = scenario.kinds, scenario.sizes
        rest = shards.sizes[1:]
        is_far_larger = bool(rest) and shards.sizes[0] > LARGE_SHARD_RATIO * sum(rest) / len(rest)
        # Of few different shards none may be near the mean; then the optimistic reading is tried, too.
        is_unlike = len(shards.sizes) <= MAX_UNEQUAL_SHARDS and shards.sizes[0] > LARGE_SHARD_RATIO * shards.sizes[-1]
        for chief in [None] if sizes.chief is None else self._hosts_of(sizes.chief):
            for largest in self._hosts_of(sizes.ps(shards.sizes[0])) if is_far_larger else [None]:
                rows: list[Row] = []
                for index, kind in enumerate(kinds):
                    special = (
                        [Row(index, 1, True, True)]
                        if chief == largest == index
                        else [
                            *([Row(index, 1, chief=True)] if chief == index else []),
                            *([Row(index, 1, largest=True)] if largest == index else []),
                        ]
                    )
                    if len(special) > kind.count:
                        rows = []
                        break
                    rows += special
                    if kind.count > len(special):
                        rows.append(Row(index, kind.count - len(special)))
                if rows:
                    yield MachineArrays(self._space, rows, shards, optimistic=False)
                    if is_unlike:
                        yield MachineArrays(self._space, rows, shards, optimistic=True)

    def _assign_and_rate(self, ps: int, arrays: MachineArrays, found: RelaxedOptimum, most: int) -> None:
        key = arrays.key, found.states, most
        if key in self._seen:
            return
        self._seen.add(key)
        assigned = assign_machines(self._space, arrays, found, min(most, self._space.max_workers))
        if assigned is None or len(assigned.workers) < self._space.min_workers:
            return
        self._best.effort += 4 * arrays.effort + len(assigned.workers) / WORKERS_PER_EFFORT
        self._best.rate(self._space, assigned)
