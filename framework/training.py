"""A training job from its first offer to its end: a state machine fed with events.

All tasks start or none does. A failure of any task restarts the job from its last checkpoint; a worker of a job whose
workers do not wait for each other rejoins alone (`framework.rejoining`). An elastic job changes its size meanwhile
(`framework.elastic`).
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from dike.exceptions import InfeasibleError
from dike.task import Role
from framework import events
from framework.connection import Connection
from framework.driver import CallRefusedError, MasterUnavailableError
from framework.elastic.demand import Demand
from framework.elastic.resizer import Resizer
from framework.elastic.stragglers import StragglerReporter
from framework.gathering import NO_OFFER_S, describe_offers
from framework.job import JobResult, JobSpec, JobTask, TaskState
from framework.job_plan import AllAgents, check_ever_fits, plan_for
from framework.job_run import JobRun
from framework.launching import DoesNotFitError, cluster_spec, launch_operation, place
from framework.mesos_calls import MesosCalls, try_now
from framework.observer import JobObserver
from framework.offer_desk import OfferDesk
from framework.offers import AgentOffer
from framework.rejoining import Rejoining
from framework.reports import ReportListener, ReportReader, read_outcome
from framework.service.tenant import Need
from solver import Plan

logger = logging.getLogger(__name__)

KILL_AGAIN_S = 5.0
LOGS_S = 3.0
"""How long the end of the output may lag behind the end of the process."""


class Phase(enum.Enum):
    """Where a job stands."""

    WAITING = enum.auto()
    """Collecting offers."""
    RUNNING = enum.auto()
    """All tasks launched."""
    STOPPING = enum.auto()
    """Ending what still runs, to restart or to finish."""
    DONE = enum.auto()


class TrainingJob:
    """One training job.

    Feed it every event with `handle` and call `tick` a few times a second, from one thread, until `done`.

    Args:
        spec: what to run.
        mesos: where to run it.
        observer: who is told.
        all_agents: lists every agent with all its resources, used or not, or None where that is not known; tells a
            job that has to wait from one that can never start.
        clock: seconds, monotonic.
        demand: what the frameworks other than the one of this id hold and want, or None where that is not known.
    """

    def __init__(
        self,
        spec: JobSpec,
        mesos: MesosCalls,
        observer: JobObserver,
        all_agents: AllAgents,
        clock: Callable[[], float] = time.monotonic,
        demand: Callable[[str], Demand | None] = lambda framework_id: None,
    ) -> None:
        self._spec = spec
        self._mesos = mesos
        self._observer = observer
        self._all_agents = all_agents
        self._clock = clock
        self._phase = Phase.WAITING
        self._connection = Connection(observer.note)
        self._desk = OfferDesk(mesos, clock())
        self._offers = self._desk.gathering
        self._framework_id = ""
        self._run = JobRun(plan=spec.plan)
        self._rejoining = Rejoining(spec, self._run, mesos, self._desk, observer)
        self._early_failure = ""
        self._killed_at = 0.0
        self._stopping_since = 0.0
        self._after_stop: Callable[[], None] = self._finish
        self.result = JobResult(checkpoint_dir=spec.checkpoint_dir)
        self._resizer: Resizer | None = None
        listener: ReportListener = StragglerReporter(observer) if spec.stragglers != "ignore" else ReportListener()
        if spec.elastic is not None:
            listener = self._resizer = Resizer(
                spec, self._run, mesos, self._desk, observer, self.result, lambda: demand(self._framework_id), clock
            )
        self._reports = ReportReader(spec, self.result, observer, listener)

    @property
    def done(self) -> bool:
        """Whether nothing of the job runs any more and `result` is complete."""
        return self._phase is Phase.DONE

    @property
    def tasks(self) -> list[JobTask]:
        """The tasks of the current attempt, in the order of the plan."""
        return self._run.members

    @property
    def all_tasks(self) -> dict[str, JobTask]:
        """Id -> task, those too that wait to join the current attempt or have left it."""
        return dict(self._run.tasks)

    @property
    def need(self) -> Need:
        """What it wants offers for at the moment."""
        if self._phase is Phase.WAITING:
            return Need.COME_BACK if self._run.attempt else Need.START
        if self._phase is not Phase.RUNNING:
            return Need.NOTHING
        if self._rejoining.active:
            return Need.COME_BACK
        return Need.GROW if self._wants_offers() else Need.NOTHING

    @property
    def demand_key(self) -> Hashable:
        """Equal for jobs that fit the same offers."""
        spec = self._spec
        if spec.plan is not None or self._phase is not Phase.WAITING:
            return None
        return (spec.profile.dumps(), spec.objective, spec.max_workers, spec.elastic)

    def to_state(self) -> dict[str, Any]:
        """What it needs to go on after a restart of the service."""
        return {}

    # Events.

    def handle(self, event: events.Event) -> None:
        """Takes one event in.

        Raises:
            BadInputError: if the master refuses the framework, or the job can never fit.
            JobFailedError: if the master has thrown the framework out.
        """
        match event:
            case events.Subscribed():
                self._framework_id = event.framework_id
                self._subscribed()
            case events.Disconnected():
                self._disconnected()
            case events.OffersArrived():
                self._offers_arrived(event.offers)
            case events.OfferRescinded():
                self._offers.rescind(event.offer_id)
            case events.StatusUpdate():
                self._status_update(event)
                try_now(self._mesos.acknowledgeStatusUpdate, event.status)
            case events.MessageArrived():
                self._reports.read(event.data, self._run.tasks)
            case events.Refused():
                self._connection.refused(event)
            case events.AgentLost() | events.ExecutorLost():
                # Mesos also sends a status update for each task that went with it.
                logger.info("%s", event)

    def tick(self) -> None:
        """Does what is due by time.

        Raises:
            BadInputError: if the job can never fit any cluster of the agents there are.
        """
        now = self._clock()
        self._desk.give_back()
        if self._connection.must_reconcile(now):
            try_now(self._mesos.reconcile, self._run.live())
        if self._phase is Phase.WAITING:
            if self._offers.settled(now):
                self._try_to_start()
            elif self._offers.is_overdue(now):
                self._no_offer()
        elif self._phase is Phase.RUNNING:
            self._go_on(now)
        elif self._phase is Phase.STOPPING:
            self._continue_stopping(now)

    def cancel(self) -> None:
        """Ends all tasks; `done` follows when they have ended."""
        self.result.failure = self.result.failure or "cancelled"
        self._stop(self._finish)

    # The connection.

    def _subscribed(self) -> None:
        self._connection.subscribed(self._clock())
        if self._phase is Phase.RUNNING and not self._wants_offers():
            try_now(self._mesos.suppressOffers)

    def _disconnected(self) -> None:
        self._desk.forget()
        self._connection.disconnected()

    # Offers.

    def _offers_arrived(self, offers: Sequence[dict[str, Any]]) -> None:
        if self._phase is Phase.WAITING or self._wants_offers():
            self._offers.add(offers, self._clock())
        else:
            self._desk.refuse(offers)

    def _wants_offers(self) -> bool:
        return self._rejoining.active or (self._resizer is not None and self._resizer.wants_offers)

    def _try_to_start(self) -> None:
        agents = [agent for agent in self._offers.agents if agent.pool.ports()]
        try:
            plan = plan_for(self._spec, agents)
            tasks = place(self._spec, plan, agents, self._run.serial, self._run.used_ports)
            operations = self._operations(plan, tasks, agents)
        except (InfeasibleError, DoesNotFitError) as error:
            if self._run.attempt == 0:
                # Later the agents that carried the job may only be away for a while.
                check_ever_fits(self._spec, self._all_agents(), error)
            self._observer.waiting(f"{error} On offer: {describe_offers(self._offers.agents)}.")
            self._desk.decline_rest()
            return
        self.result.plan = self._run.plan = plan
        if self._spec.plan_only:
            self.result.succeeded = True
            self._desk.decline_rest()
            self._phase = Phase.DONE
        else:
            self._launch(plan, tasks, operations)
            if self._resizer is not None and self._phase is Phase.RUNNING:
                self._resizer.launched([agent.node_class() for agent in agents])

    def _operations(
        self, plan: Plan, tasks: Sequence[JobTask], agents: Sequence[AgentOffer]
    ) -> dict[str, dict[str, Any]]:
        """Agent's id -> the operation that launches its part of the job."""
        cluster = cluster_spec(tasks)
        operations = {}
        for agent in agents:
            here = [task for task in tasks if task.agent_id == agent.agent_id]
            if here:
                operations[agent.agent_id] = launch_operation(self._spec, plan, here, cluster, agent, self._run.attempt)
        return operations

    def _no_offer(self) -> None:
        if not self._connection.connected:
            return
        # In case the master never heard that offers are wanted again.
        try_now(self._mesos.reviveOffers)
        nodes = self._all_agents()
        if nodes == []:
            self._observer.waiting("No agent is registered with the Mesos master.")
            return
        if self._run.attempt == 0:
            check_ever_fits(self._spec, nodes)
        self._observer.waiting(
            f"No offer has come for {NO_OFFER_S:g} s: other frameworks hold what the agents have, or none of it is for "
            "this role (--role)."
        )

    def _launch(self, plan: Plan, tasks: list[JobTask], operations: dict[str, dict[str, Any]]) -> None:
        self._observer.planned(plan)
        self._reports.stepped = False
        self._run.tasks = {}
        self._run.add(tasks)
        self._run.cluster = cluster_spec(tasks)
        self._run.used_ports = {task.port for task in tasks}
        self.result.addresses = {task.name: task.address for task in tasks}
        self._phase = Phase.RUNNING
        try:
            for agent_id, operation in operations.items():
                agent = self._offers.agent(agent_id)
                assert agent is not None
                self._desk.accept(agent, operation)
            self._mesos.suppressOffers()
        except MasterUnavailableError as error:
            # What the master did take is found and ended by reconciliation.
            logger.warning("launch interrupted: %s", error)
            self._restart_or_fail("the connection to the Mesos master broke during the launch", counts=False)
            return
        except CallRefusedError as error:
            self._fail(str(error), None)
            return
        self._desk.decline_rest()
        self._observer.launched(tasks)

    # Tasks.

    def _go_on(self, now: float) -> None:
        failure = self._rejoining.tick(now) if self._rejoining.active else ""
        if not failure and self._resizer is not None:
            failure = self._resizer.tick(now, may_begin=not self._rejoining.active)
            self._check_whether_ended()
        if failure and self._phase is Phase.RUNNING:
            self._restart_or_fail(failure, counts=False)

    def _status_update(self, event: events.StatusUpdate) -> None:
        state = TaskState.of(event.state)
        task = self._run.tasks.get(event.task_id)
        if task is None:
            agent_id = event.status.get("agent_id", {}).get("value", "")
            if not state.is_terminal() and agent_id:
                logger.warning("task %s is not ours any more: ending it", event.task_id)
                try_now(self._mesos.kill, event.task_id, agent_id)
            return
        if task.state.is_terminal():
            return
        changed = task.state is not state
        task.state = state
        task.executor_seen = task.executor_seen or event.status.get("source") == "SOURCE_EXECUTOR"
        task.message = event.status.get("message", "")
        task.reason = event.status.get("reason", "")
        task.finished = task.finished or state is TaskState.FINISHED
        if event.status.get("data") and state.is_terminal():
            task.outcome = read_outcome(event.status["data"])
        if changed:
            self._observer.task_changed(task)
        if state.is_terminal() and self._phase is Phase.RUNNING:
            self._task_ended(task)

    def _task_ended(self, task: JobTask) -> None:
        if self._resizer is not None:
            self._resizer.lost(task)
        if not task.member:
            del self._run.tasks[task.task_id]
        elif self._resizer is not None and self._resizer.is_stopping and not self._is_end(task):
            self._restart_or_fail(f"{task.failure}, while the job changed its size", task, counts=not task.finished)
        elif task.finished and self._computes(task):
            self._check_whether_ended()
        elif self._can_rejoin(task):
            self._start_rejoin(task)
        else:
            self._restart_or_fail(task.failure, task)

    def _computes(self, task: JobTask) -> bool:
        """Whether the task runs the user's script, and so may end by itself."""
        return self._spec.is_chief(task.planned) or (
            task.planned.role == Role.WORKER and not self._spec.profile.api.has_separate_chief
        )

    def _is_end(self, task: JobTask) -> bool:
        """Whether the end of this task is the end of the script."""
        return task.finished and self._script_has_ended()

    def _check_whether_ended(self) -> None:
        if self._script_has_ended():
            self.result.succeeded = True
            self._stop(self._finish)

    def _script_has_ended(self) -> bool:
        """Whether all who run the script have ended well."""
        return all(task.finished for task in self._run.members if self._computes(task))

    def _can_rejoin(self, task: JobTask) -> bool:
        return (
            task.planned.role == Role.WORKER
            and not self._spec.is_chief(task.planned)
            and not self._spec.profile.synchronous
            and self._reports.stepped
            and task.reason != "REASON_AGENT_REMOVED"
            and (self._rejoining.active or self.result.restarts < self._spec.max_restarts)
        )

    def _start_rejoin(self, task: JobTask) -> None:
        # Workers that are lost together are one failure.
        if not self._rejoining.active:
            self.result.restarts += 1
        self._observer.restarting(task.failure, self.result.restarts, self._spec.max_restarts)
        self._rejoining.start(task, self._clock())

    # Ends.

    def _restart_or_fail(self, reason: str, task: JobTask | None = None, *, counts: bool = True) -> None:
        stale = task is not None and task.reason == "REASON_INVALID_OFFERS"
        if stale or not counts:
            self._observer.note(f"{reason}; starting again")
        elif self._is_hopeless(task):
            self._fail(f"{reason}; it had failed the same way before without a single step", task)
            return
        elif self.result.restarts >= self._spec.max_restarts:
            self._fail(f"{reason}; it was restarted {self.result.restarts} times (--max-restarts)", task)
            return
        else:
            self.result.restarts += 1
            self._observer.restarting(reason, self.result.restarts, self._spec.max_restarts)
        self._stop(self._wait_again)

    def _is_hopeless(self, task: JobTask | None) -> bool:
        """Whether the job fails before its first step, twice in the same way: no restart will help."""
        failure = "" if task is None or self._reports.stepped else _early_failure(task)
        again = bool(failure) and failure == self._early_failure
        self._early_failure = failure
        return again

    def _fail(self, reason: str, task: JobTask | None) -> None:
        self.result.failure = reason
        if task is not None and task.outcome is not None:
            self.result.failed_tail = task.outcome.tail
        self._stop(self._finish)

    def _stop(self, then: Callable[[], None]) -> None:
        self._phase = Phase.STOPPING
        self._after_stop = then
        self._rejoining.forget()
        if self._resizer is not None:
            self._resizer.stopped()
        self._stopping_since = self._clock()
        self._desk.decline_rest()
        self._kill_live()

    def _kill_live(self) -> None:
        self._killed_at = self._clock()
        for task_id, agent_id in self._run.live().items():
            self._run.tasks[task_id].stop_requested = True
            try_now(self._mesos.kill, task_id, agent_id)

    def _continue_stopping(self, now: float) -> None:
        if self._run.live():
            if now - self._killed_at >= KILL_AGAIN_S:
                self._kill_live()
            return
        chief = next((task for task in self._run.members if self._spec.is_chief(task.planned)), None)
        if chief is not None and not chief.logs_complete and now - self._stopping_since < LOGS_S:
            return
        self._after_stop()

    def _wait_again(self) -> None:
        self._run.attempt += 1
        for task in self._run.members:
            task.member = False
        self._run.tasks = {}
        self._phase = Phase.WAITING
        try_now(self._mesos.reviveOffers)

    def _finish(self) -> None:
        for task in self._run.members:
            if not task.logs_complete and self._spec.is_chief(task.planned) and task.outcome is not None:
                self._observer.note(
                    f"a part of {task.name}'s output was lost on its way; the whole is in {task.outcome.sandbox} on "
                    f"agent {task.node}"
                )
        self._phase = Phase.DONE


def _early_failure(task: JobTask) -> str:
    """What kind of failure this is, if it is the script's or the installation's; empty if it may be chance."""
    if task.outcome is not None:
        return f"{task.name} {task.outcome.exit_code}" if (task.outcome.exit_code or 0) > 0 else ""
    return "no executor" if task.state is TaskState.FAILED and not task.executor_seen else ""
