"""Planning options besides the model and the machines, the same for offline and live plans."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from dike.described import MAX_ITEMS, Text, UserOption, values_of
from dike.exceptions import BadInputError
from dike.profile import Api, ModelProfile
from solver.choices import MAX_TASK_MEM_MIB, RULES, Objective, Sharding, Strategy
from solver.strategies import ALLREDUCE, ONE, PS, allowed_strategies, check_elastic, possible_strategies

if TYPE_CHECKING:
    from solver.calibration import Calibration, Measurement
    from solver.cluster import Cluster, NodeClass
    from solver.network import Network
    from solver.request import PlanRequest

TIME_LIMIT_S = 30.0
"""Default planning time: the agents' offers wait together with the job."""
MAX_LIVE_TIME_LIMIT_S = 60.0
"""Maximum planning time of a job that runs, as its offers are locked meanwhile."""
GPUS_PER_WORKER = 1
"""GPUs that a worker of a running job can use: one device computes a step of a parameter server's worker."""
MAX_CACHED_CALIBRATIONS = 8
"""Number of cached calibrations: a job may be planned repeatedly, on whatever is free."""


_PANEL = "The plan"


@dataclass(frozen=True, kw_only=True)
class WorkerBounds:
    """Limits on the number of workers."""

    min_workers: Annotated[
        int | None,
        Field(ge=1, le=MAX_ITEMS),
        UserOption(_PANEL, "Use at least N workers."),
    ] = None
    max_workers: Annotated[int | None, Field(ge=1, le=MAX_ITEMS), UserOption(_PANEL, "Use at most N workers.")] = None


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """A user's planning options, offline and live."""

    strategy: Annotated[
        Strategy,
        UserOption(
            _PANEL,
            "Train as one task, as equal workers that sum their gradients (allreduce), or with parameter servers (ps). "
            "auto: the fastest that keeps the script's result.",
        ),
    ] = "auto"
    objective: Annotated[
        Objective, UserOption(_PANEL, "Plan for speed, or for little network traffic (Eq. 1 of the paper).")
    ] = "throughput"
    rules: Annotated[
        Text,
        UserOption(
            _PANEL, f"Rules that prune the options: default, all, none, paper, -NAME, or some of {', '.join(RULES)}."
        ),
    ] = "default"
    sharding: Annotated[Sharding, UserOption(_PANEL, "How variables are distributed over the parameter servers.")] = (
        "greedy"
    )
    gpus_per_task: Annotated[
        int,
        Field(ge=1, le=MAX_ITEMS),
        UserOption(_PANEL, "Maximum GPUs of the only task of a script with a training loop of its own."),
    ] = 1
    task_mem_mb: Annotated[
        int,
        Field(ge=0, le=MAX_TASK_MEM_MIB),
        UserOption(_PANEL, "Minimum memory of each task, MiB.", default="what its role needs"),
    ] = 0
    plan_timeout_s: Annotated[
        float | None,
        Field(gt=0, allow_inf_nan=False),
        UserOption(_PANEL, "Maximum planning time, seconds.", default="about 30"),
    ] = None

    def check_rules(self) -> None:
        if self.rules != "default":
            from solver.options import parse_rules

            parse_rules(self.rules, self.objective)

    def check_live(self) -> None:
        """Raises `BadInputError` if planning may take longer than offers can be locked."""
        if self.plan_timeout_s is not None and self.plan_timeout_s > MAX_LIVE_TIME_LIMIT_S:
            raise BadInputError(
                f"--plan-timeout is {self.plan_timeout_s:g} s; {MAX_LIVE_TIME_LIMIT_S:g} s is the maximum for a job "
                "that runs, because the agents' offers are locked meanwhile."
            )


@dataclass(frozen=True, kw_only=True)
class PlanSettings(PlanOptions):
    """Planning options with known properties of the cluster.

    Attributes:
        measurements: measured steps that calibrate the prediction.
        network: links and network speeds besides those of the machines; None for none.
    """

    measurements: tuple[Measurement, ...] = ()
    network: Network | None = None

    @classmethod
    def of(
        cls, options: PlanOptions, measurements: tuple[Measurement, ...] = (), network: Network | None = None
    ) -> PlanSettings:
        return cls(**values_of(PlanOptions, options), measurements=measurements, network=network)

    def check_tasks(
        self,
        profile: ModelProfile,
        min_workers: int | None,
        max_workers: int | None = None,
        *,
        elastic: tuple[int, int] | None = None,
    ) -> None:
        """Raises `BadInputError` if the script cannot train with the requested tasks.

        `elastic` are the minimum and the maximum of a changing number of workers.
        """
        if elastic is None:
            self.strategies(profile, min_workers=min_workers, max_workers=max_workers)
        elif self.strategy == ONE:
            raise BadInputError("--strategy one is a single task; leave out --strategy, or --elastic.")
        else:
            check_elastic(profile, self.strategies(profile, min_workers=elastic[0], elastic=True))

    @property
    def _is_automatic(self) -> bool:
        return self.strategy == "auto" and self.rules == "default" and self.objective == "throughput"

    def fewest_workers(self, min_workers: int | None) -> int:
        """The smallest number of workers that a plan may have."""
        return max(min_workers or 1, 2 if self.strategy == ALLREDUCE else 1)

    def strategies(
        self,
        profile: ModelProfile,
        *,
        min_workers: int | None = None,
        max_workers: int | None = None,
        plain: bool | None = None,
        elastic: bool = False,
    ) -> frozenset[str]:
        """The strategies that these options leave: one or more of `one`, `allreduce` and `ps`.

        Raises:
            BadInputError: if there is none.
        """
        has_rules = self.rules != "default"
        return allowed_strategies(
            profile,
            self.strategy,
            min_workers=min_workers,
            max_workers=max_workers,
            wants_ps="--rules" if has_rules else "--objective traffic" if self.objective == "traffic" else "",
            has_rules=has_rules,
            plain=plain,
            elastic=elastic,
        )

    def cluster(self, machines: Cluster) -> Cluster:
        """The machines with the known links."""
        return machines if self.network is None else self.network.of(machines)

    def request(
        self,
        profile: ModelProfile,
        machines: Cluster,
        *,
        min_workers: int | None = None,
        max_workers: int | None = None,
        gpus_per_worker: int = GPUS_PER_WORKER,
        plain: bool | None = None,
        elastic: bool = False,
        all_machines: Sequence[NodeClass] | None = None,
    ) -> PlanRequest:
        """Builds the plan request; every plan of `dike plan`, `dike run` and `dike submit` starts here.

        Args:
            profile: the model.
            machines: the machines that the plan may use.
            min_workers: minimum workers; None for no minimum.
            max_workers: maximum workers; None for no limit.
            gpus_per_worker: maximum GPUs of one worker; more than one is for plans that are only shown.
            plain: whether existing checkpoints are of a job without parameter servers; only such a job, or only one
                with parameter servers, can continue them. None if there are none.
            elastic: whether the number of workers changes while the job runs.
            all_machines: all machines of the cluster, if `machines` are only the free parts. Measurements of machines
                that are gone are then ignored instead of being an error.

        Raises:
            BadInputError: if a rule is unknown, a measurement is of another machine or model, or the script cannot
                train with the requested tasks.
        """
        from solver.options import parse_rules
        from solver.request import PlanRequest

        calibration = None
        notes: list[str] = []
        among = self.strategies(profile, min_workers=min_workers, max_workers=max_workers, plain=plain, elastic=elastic)
        if gpus_per_worker > GPUS_PER_WORKER and PS in among:
            notes.append(what_if_note(gpus_per_worker))
        elif gpus_per_worker > GPUS_PER_WORKER:
            notes.append("--gpus-per-worker is for workers with parameter servers; give --strategy ps.")
        if profile.counts_own_steps and among == {PS}:
            # No more workers than requested: they would not make it faster.
            max_workers = max_workers or min_workers
            if max_workers != 1:
                count = max_workers if max_workers == min_workers else None
                what = f"{count} workers train {count} times as many" if count else "each worker trains all of them"
                notes.append(
                    f"The loop of {profile.name} counts its own steps, so {what}; StopAtStepHook(last_step=N) would "
                    "share N steps among them."
                )
        if self.gpus_per_task > 1 and (note := _gpus_per_task_note(profile, among)):
            notes.append(note)
        cluster = self.cluster(machines)
        if self.measurements:
            calibration, left_out = self._calibration(profile, cluster, all_machines)
            if left_out:
                notes.append(f"{left_out} of {len(self.measurements)} measurements are of machines not in the cluster.")
        return PlanRequest(
            profile=profile,
            cluster=cluster,
            objective=self.objective,
            max_workers=max_workers,
            time_limit_s=TIME_LIMIT_S,
            max_gpus_per_worker=gpus_per_worker,
            rules=parse_rules(self.rules, self.objective),
            sharding=self.sharding,
            calibration=calibration,
            min_workers=max(min_workers or 1, 2 if among == {ALLREDUCE} else 1),
            strategies=among,
            shown=possible_strategies(profile, plain=plain) - among if self._is_automatic else frozenset(),
            strategy=self.strategy,
            max_gpus_per_task=self.gpus_per_task,
            task_mem_mb=self.task_mem_mb,
            notes=tuple(notes),
        )

    def _calibration(
        self, profile: ModelProfile, cluster: Cluster, all_machines: Sequence[NodeClass] | None
    ) -> tuple[Calibration | None, int]:
        """The calibration by the measurements, and the number of measurements ignored."""
        from solver.calibration import fit

        if all_machines is None:
            return fit(self.measurements, profile, cluster), 0
        # Measurements are of whole machines, whatever is free of them now.
        named = {node.name for node in all_machines}
        rest = [node for node in cluster.nodes if node.name not in named]
        whole = self.cluster(dataclasses.replace(cluster, nodes=(*all_machines, *rest)))
        gpus = {name: node.gpus for node in whole.nodes for name in node.node_names}
        rows = [row for row in self.measurements if row.could_run(gpus)]
        found = _fitted(tuple(rows), profile.dumps(), whole) if rows else None
        return found, len(self.measurements) - len(rows)


def _gpus_per_task_note(profile: ModelProfile, among: frozenset[str]) -> str:
    """Why `--gpus-per-task` has no effect; empty if it has."""
    if not profile.is_measurable:
        return "" if ONE in among else "--gpus-per-task is for one task; each of several workers has one GPU."
    how = "as workers of one GPU each (--strategy allreduce)" if profile.api is Api.KERAS else "as several workers"
    return f"--gpus-per-task is for training loops of the script's own; this script uses several GPUs {how}."


def what_if_note(gpus: int) -> str:
    """The note of a plan in which a worker may have more GPUs than one that runs can use."""
    return f"What if a worker could use {gpus} GPUs? At run time it uses one, and dike run rejects a plan with more."


@functools.lru_cache(MAX_CACHED_CALIBRATIONS)
def _fitted(rows: tuple[Measurement, ...], profile: str, machines: Cluster) -> Calibration:
    from solver.calibration import fit

    # Leave-one-out errors take longer than the fit, and offers wait.
    return fit(rows, ModelProfile.loads(profile), machines, leave_one_out=False)
