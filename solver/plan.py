"""The planner's result, as data that converts to JSON and back."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dike.exceptions import BadInputError
from dike.profile import ModelProfile
from solver.resources import TaskResources
from solver.step_time import StepTime

ROLES = ("ps", "worker", "chief")

Part = TypeVar("Part")

SAME_RESULT = "same as python"
"""`Plan.result` of jobs without parameter servers."""


@dataclass(frozen=True)
class PlannedTask:
    """One task.

    Attributes:
        cpus, mem_mb, disk_mb, gpus: its resources, memory and disk in MiB.
        is_plain: whether it trains without parameter servers, as `python` runs the script: the only task of a job, or
            a worker of a gang.
    """

    role: str
    index: int
    node: str
    cpus: float
    mem_mb: int
    disk_mb: int
    gpus: int
    is_plain: bool = False

    @property
    def name(self) -> str:
        return f"{self.role}:{self.index}"


@dataclass(frozen=True)
class Option:
    """The chosen resource assignment option.

    Attributes:
        ps: number of parameter servers; 0 for one task, and for a gang of workers.
        ps_task: resources of the largest ps; zeros if there is no ps.
    """

    workers: int
    ps: int
    worker: TaskResources
    ps_task: TaskResources
    chief: TaskResources | None = None


@dataclass(frozen=True)
class OptionCounts:
    """Numbers of options.

    Attributes:
        generated: before pruning; capped at 10^300.
        pruned: rule -> number removed.
        solved: number of placements that were rated; bounds excluded the others.
    """

    generated: int
    pruned: dict[str, int]
    considered: int
    solved: int = 0


@dataclass(frozen=True)
class Alternative:
    """An option that was not chosen.

    Attributes:
        relative: speed as a share of the chosen plan's.
    """

    workers: int
    ps: int
    worker: TaskResources
    samples_per_s: float
    traffic_bytes: float
    relative: float


@dataclass(frozen=True)
class StrategyResult:
    """The best plan found with one strategy.

    Attributes:
        strategy: `one`, `allreduce` or `ps`.
        result: what the job computes, as `Plan.result`.
    """

    strategy: str
    workers: int
    ps: int
    samples_per_s: float
    result: str


@dataclass(frozen=True)
class Plan:
    """A placement of one training job, with reasons.

    Attributes:
        tasks: every task with its machine, parameter servers first.
        variables: variable -> index of its ps.
        step_time_s: predicted seconds in which every worker makes one step, with the terms.
        traffic_bytes: Eq. 1, weighted bytes per step of every worker.
        optimal: whether it is proven that no option and no placement is better in `objective`, speeds within 5% being
            equal (`SIMPLE_TIE_SHARE`); then, and only then, the gap is 0.
        gap: maximum improvement by a better plan, as a share of the best possible.
        formulation: how the plan was found.
        method: the planning method: `dike`, or one of the baselines.
        byte_imbalance: bytes of variables on the fullest ps over the mean.
        request_imbalance: variables on the ps with most of them over the mean.
        strategies: the best plan of each strategy that the script could use and that was planned.
    """

    profile: ModelProfile
    option: Option
    tasks: tuple[PlannedTask, ...]
    variables: dict[str, int]
    step_time_s: StepTime
    samples_per_s: float
    traffic_bytes: float
    objective: str
    optimal: bool
    gap: float
    solve_time_s: float
    options: OptionCounts
    alternatives: tuple[Alternative, ...] = ()
    why: tuple[str, ...] = field(default_factory=tuple)
    formulation: str = ""
    method: str = "dike"
    byte_imbalance: float = 1.0
    request_imbalance: float = 1.0
    strategies: tuple[StrategyResult, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether the job trains without parameter servers: as one task, or as a gang of workers."""
        return self.option.ps == 0

    @property
    def strategy(self) -> str:
        """`one`, `allreduce` or `ps` (`solver.choices.STRATEGIES`)."""
        if self.option.ps:
            return "ps"
        return "one" if self.option.workers == 1 else "allreduce"

    @property
    def result(self) -> str:
        """What the job computes, compared with `python`."""
        if self.is_plain:
            return SAME_RESULT
        return "synchronous" if self.profile.synchronous else "asynchronous"

    @property
    def worker_kinds(self) -> list[tuple[TaskResources, int]]:
        """Distinct resources of workers, with the number of workers; most GPUs first."""
        workers = Counter(
            TaskResources(task.cpus, task.mem_mb, task.disk_mb, task.gpus)
            for task in self.tasks
            if task.role == "worker"
        )
        return sorted(workers.items(), key=lambda entry: (-entry[0].gpus, -entry[0].cpus))

    @property
    def ps_bytes(self) -> tuple[int, ...]:
        held = [0] * self.option.ps
        for variable in self.profile.variables:
            if variable.name in self.variables:
                held[self.variables[variable.name]] += variable.size_bytes
        return tuple(held) if self.variables else (self.profile.parameter_bytes,)

    def to_json(self) -> dict[str, Any]:
        return {**_values(self), "profile": self.profile.to_json()}

    def dumps(self) -> str:
        return json.dumps(self.to_json(), indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, data: Any) -> Plan:
        """Reads the output of `to_json`.

        Raises:
            BadInputError: if a key is missing or unknown, or a value has the wrong type.
        """
        try:
            values = dict(data)
            values["profile"] = ModelProfile.from_json(values["profile"])
            values["option"] = _option(values["option"])
            values["tasks"] = tuple(_part(PlannedTask, task) for task in values["tasks"])
            values["step_time_s"] = _part(StepTime, values["step_time_s"])
            values["options"] = _part(OptionCounts, values["options"])
            values["alternatives"] = tuple(_alternative(entry) for entry in values.get("alternatives", ()))
            values["strategies"] = tuple(_part(StrategyResult, entry) for entry in values.get("strategies", ()))
            values["why"] = tuple(values.get("why", ()))
            values["variables"] = dict(values["variables"])
            plan = cls(**values)
            _check(plan)
        except KeyError as error:
            raise BadInputError(f"This is not a plan of Dike: key {error} is missing.") from error
        except (AttributeError, OverflowError, TypeError, ValueError) as error:
            raise BadInputError(f"This is not a plan of Dike: {str(error).replace('.__init__()', '')}.") from error
        return plan

    @classmethod
    def loads(cls, text: str) -> Plan:
        """Reads a plan from JSON text.

        Raises:
            BadInputError: if the text is not the JSON of a plan.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BadInputError(f"A plan must be JSON: {error}.") from error
        return cls.from_json(data)


def _values(value: Any) -> Any:
    """Converts nested dataclasses to dictionaries and tuples to lists, as in JSON."""
    if isinstance(value, ModelProfile):
        return None
    if dataclasses.is_dataclass(value):
        return {entry.name: _values(getattr(value, entry.name)) for entry in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [_values(item) for item in value]
    return dict(value) if isinstance(value, dict) else value


def _part(kind: Callable[..., Part], values: Any) -> Part:
    part = kind(**values)
    for entry in dataclasses.fields(part):  # type: ignore[arg-type]
        _check_type(entry.name, str(entry.type), getattr(part, entry.name))
    return part


def _check_type(name: str, declared: str, value: Any) -> None:
    if declared == "int" and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise ValueError(f"'{name}' must be a whole number of at least 0, not {value!r}")
    if declared == "float" and (
        not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < 0
    ):
        raise ValueError(f"'{name}' must be a number of at least 0, not {value!r}")
    if declared == "str" and not isinstance(value, str):
        raise ValueError(f"'{name}' must be text, not {value!r}")
    if declared == "bool" and not isinstance(value, bool):
        raise ValueError(f"'{name}' must be true or false, not {value!r}")


def _option(values: dict[str, Any]) -> Option:
    parts = {
        name: None if values.get(name) is None else _part(TaskResources, values[name])
        for name in ("worker", "ps_task", "chief")
    }
    for name in ("worker", "ps_task"):
        if parts[name] is None:
            raise KeyError(name)
    return _part(Option, {**values, **parts})


def _alternative(values: dict[str, Any]) -> Alternative:
    return _part(Alternative, {**values, "worker": _part(TaskResources, values["worker"])})


def _check(plan: Plan) -> None:
    for entry in dataclasses.fields(plan):
        _check_type(entry.name, str(entry.type), getattr(plan, entry.name))
    expected = {"ps": plan.option.ps, "worker": plan.option.workers, "chief": 1 if plan.option.chief else 0}
    for role, count in expected.items():
        indices = sorted(task.index for task in plan.tasks if task.role == role)
        if indices != list(range(count)):
            raise ValueError(f"the option has {count} {role} tasks and 'tasks' lists numbers {indices}")
    if plan.is_plain and plan.option.chief is not None:
        raise ValueError("without parameter servers there is no chief task; worker 0 is the chief")
    if plan.is_plain and not plan.option.workers:
        raise ValueError("a job needs at least one worker")
    if any(task.is_plain != plan.is_plain for task in plan.tasks):
        raise ValueError("'is_plain' is for the tasks of a job without parameter servers")
    unknown = {task.role for task in plan.tasks} - set(ROLES)
    if unknown:
        raise ValueError(f"'{unknown.pop()}' is not a role; roles are {', '.join(ROLES)}")
    for name, index in plan.variables.items():
        if not isinstance(index, int) or not 0 <= index < plan.option.ps:
            raise ValueError(f"variable '{name}' is on ps {index!r}, which does not exist")
