"""Limits of a search: its time, the hours of GPUs or CPUs that it uses, and the failures of its trials."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dike.exceptions import BadInputError
from framework.search.pruners import parse_stop
from framework.search.records import MAX_FAILURES, SearchOptions, TrialRecord

_BUDGET = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+) ?([gc]pu)h")
_HOUR_S = 3600.0
MAX_SLOTS_PER_GPU = 16


class TimeLimit:
    """The time limit of a search.

    Args:
        limit_s: maximum duration; None for no limit.
        since_s: start, seconds since the epoch; None: starts with the first slot.

    Attributes:
        since_s: start, seconds since the epoch; None before.
    """

    def __init__(
        self,
        limit_s: float | None,
        since_s: float | None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.since_s = since_s
        self._limit_s = limit_s
        self._clock = clock
        self._wall = wall_clock
        self._begun_s = clock() - (wall_clock() - since_s) if since_s is not None else None

    @property
    def runs(self) -> bool:
        """Whether there is a limit and it has started."""
        return self._limit_s is not None and self._begun_s is not None

    def start_or_check(self, *, has_slots: bool) -> bool:
        """Starts the limit with the first slot, and returns whether it is exceeded."""
        if self._begun_s is None and has_slots:
            self.since_s, self._begun_s = self._wall(), self._clock()
        if self._limit_s is None or self._begun_s is None:
            return False
        return self._clock() - self._begun_s >= self._limit_s


def check_options(options: SearchOptions) -> None:
    """Raises `BadInputError` if `--stop`, `--budget`, `--on-failure` or `--slots-per-gpu` cannot be parsed."""
    FailureRule.parse(options.on_failure)
    if parse_slots_per_gpu(options.slots_per_gpu) != 1 and options.slot_gpus not in (None, 1):
        raise BadInputError(
            f"--slots-per-gpu {options.slots_per_gpu} shares one GPU between slots, and --slot-gpus is "
            f"{options.slot_gpus}; leave one of them out."
        )
    if options.stop:
        parse_stop(options.stop)
    if options.budget and Budget.parse(options.budget).unit == "gpu" and options.slots_per_gpu.strip() == "auto":
        raise BadInputError(
            "--budget in hours of GPUs needs a number of slots per GPU; write --slots-per-gpu N instead of auto."
        )


def parse_slots_per_gpu(text: str) -> int | None:
    """Parses `--slots-per-gpu`; None for `auto`.

    Raises:
        BadInputError: if it is neither a number nor `auto`.
    """
    if text.strip() == "auto":
        return None
    if not re.fullmatch("[0-9]{1,3}", text.strip()) or not 1 <= int(text) <= MAX_SLOTS_PER_GPU:
        raise BadInputError(f"--slots-per-gpu is '{text}'; write a number from 1 to {MAX_SLOTS_PER_GPU}, or auto.")
    return int(text)


@dataclass(frozen=True)
class FailureRule:
    """What happens when trials fail: `--on-failure`.

    Attributes:
        aborts: whether the failure of a trial ends the search.
        retries: times that a trial is retried in a row, without a new checkpoint; None for `MAX_FAILURES` in all, fewer
            if its error would repeat.
        needs_larger_gpu: whether a trial that ran out of GPU memory is retried on a GPU with more.
    """

    aborts: bool = False
    retries: int | None = None
    needs_larger_gpu: bool = False

    @classmethod
    def parse(cls, text: str) -> FailureRule:
        """Parses parts such as `abort` or `retry=2,larger-gpu`.

        Raises:
            BadInputError: if a part is unknown.
        """
        rule = cls()
        for part in map(str.strip, text.split(",")):
            name, _, number = part.partition("=")
            if name == "retry" and re.fullmatch("[0-9]{1,6}", number):
                rule = dataclasses.replace(rule, retries=int(number))
            elif part == "abort":
                rule = dataclasses.replace(rule, aborts=True)
            elif part == "larger-gpu":
                rule = dataclasses.replace(rule, needs_larger_gpu=True)
            elif part != "continue":
                raise BadInputError(
                    f"--on-failure is '{text}'; write continue, abort, retry=N or larger-gpu, separated by commas."
                )
        return rule

    @property
    def max_failures(self) -> int:
        """Failed runs in a row, without a new checkpoint, after which a trial has failed."""
        return MAX_FAILURES if self.retries is None else self.retries + 1


@dataclass(frozen=True)
class Budget:
    """How many hours of GPUs or CPUs the trials of a search may have slots.

    Attributes:
        hours: of one GPU or CPU.
        unit: `gpu` or `cpu`.
    """

    hours: float
    unit: str

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Parses `40gpuh` or `100cpuh`.

        Raises:
            BadInputError: if it is neither.
        """
        match = _BUDGET.fullmatch(text.strip().lower())
        if match is None or not 0 < float(match[1]) <= 1e9:
            raise BadInputError(f"--budget is '{text}'; write hours of GPUs or CPUs, such as 40gpuh or 100cpuh.")
        return cls(float(match[1]), match[2])

    def is_used_up(self, trials: Iterable[TrialRecord], now_s: float, gpus: float, cpus: float) -> bool:
        """Returns whether the trials' time in slots of that many GPUs and CPUs has reached the budget at `now_s`.

        Raises:
            BadInputError: if it counts GPUs, and slots have none.
        """
        if self.unit == "gpu" and not gpus:
            raise BadInputError(
                "The slots of this search have no GPU; give --budget in hours of CPUs, such as 100cpuh."
            )
        held_s = sum(trial.held_s(now_s) for trial in trials)
        return held_s * (gpus if self.unit == "gpu" else cpus) >= self.hours * _HOUR_S
