"""A training job from its first offer to its end: a state machine fed with events.

All tasks start or none does. A failure of any task restarts the job from its last checkpoint; a worker of a job whose
workers do not wait for each other rejoins alone (`framework.rejoining`). An elastic job changes its size meanwhile
(`framework.elastic`). A service that is started again goes on with the job as it was written down
(`framework.job_state`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

from framework import events
from framework.background import AtOnce, Background
from framework.connection import Connection
from framework.elastic.demand import Demand
from framework.job import JobResult, JobSpec, JobTask, TaskState
from framework.job_plan import AllAgents
from framework.job_run import JobRun, Phase
from framework.job_state import JobMemory, StateWriter, read_state
from framework.mesos_calls import MesosCalls, try_now
from framework.observer import JobObserver
from framework.offer_desk import OfferDesk
from framework.restarts import Restarts
from framework.running import Running, Turn
from framework.service.tenant import CANCELLED, Need, Outcome, Spare
from framework.starting import Start, Starter
from framework.stopping import Stopping

logger = logging.getLogger(__name__)


class TrainingJob:
    """One training job.

    Feed it every event with `handle` and call `tick` a few times a second, from one thread, until `done`.

    Args:
        spec: what to run.
        mesos: where to run it.
        observer: who is told.
        all_agents: lists every agent with all its resources, used or not, or None where that is not known; tells a
            job that has to wait from one that can never start; may be called by any thread.
        clock: seconds, monotonic.
        demand: what the frameworks other than the one of this id hold and want, or None where that is not known.
        state: what `to_state` of a service before this one said; None for a new job.
        launched: ids of its tasks that may still run, the others having ended or never been launched; None: what
            `state` says.
        patient: whether it waits for other agents where it fits none that there are, instead of being an error.
        background: plans; None: at once.

    Raises:
        BadInputError: if `state` cannot be read.
    """

    def __init__(
        self,
        spec: JobSpec,
        mesos: MesosCalls,
        observer: JobObserver,
        all_agents: AllAgents,
        clock: Callable[[], float] = time.monotonic,
        demand: Callable[[str], Demand | None] = lambda framework_id: None,
        *,
        state: Mapping[str, Any] | None = None,
        launched: Collection[str] | None = None,
        patient: bool = False,
        background: Background | None = None,
    ) -> None:
        self._spec = spec
        self._mesos = mesos
        self._observer = observer
        self._clock = clock
        self._framework_id = ""
        if state is None:
            self._memory = JobMemory(JobRun(plan=spec.plan), JobResult(checkpoint_dir=spec.checkpoint_dir))
        else:
            self._memory = read_state(state, spec)
        self.result = self._memory.result
        self._run = self._memory.run
        self._must_take_up = state is not None
        self._writer = StateWriter(spec)
        self._connection = Connection(observer.note, has_tasks=bool(self._run.live()))
        self._desk = OfferDesk(mesos, clock())
        self._offers = self._desk.gathering
        self._starter = Starter(
            spec, self._memory, mesos, self._desk, observer, all_agents, background or AtOnce(), patient=patient
        )
        self._running = Running(
            spec, self._memory, mesos, self._desk, observer, lambda: demand(self._framework_id), clock
        )
        self._restarts = Restarts(spec, self._memory, observer)
        self._stopping = Stopping(spec, self._run, mesos, observer)
        if launched is not None:
            self._run.forget_unlaunched(launched)

    @property
    def done(self) -> bool:
        """Whether nothing of the job runs any more and `result` is complete."""
        return self._memory.phase is Phase.DONE

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
        if self._memory.phase is Phase.WAITING:
            # One that fails again and again must not come before all others each time.
            return Need.COME_BACK if self._run.attempt and self._memory.failures < 2 else Need.START
        if self._memory.phase is not Phase.RUNNING:
            return Need.NOTHING
        if self._running.is_short:
            return Need.COME_BACK
        return Need.GROW if self._running.wants_offers else Need.NOTHING

    @property
    def demand_key(self) -> Hashable:
        """Equal for jobs that fit the same offers."""
        return self._starter.kind if self._memory.phase is Phase.WAITING else None

    @property
    def is_planning(self) -> bool:
        """Whether it plans in the background, on offers that it keeps."""
        return self._starter.is_planning

    def spare(self) -> Spare:
        """What it could give up for others."""
        return self._running.spare() if self._memory.phase is Phase.RUNNING else Spare()

    def give_up(self, task_ids: frozenset[str], reason: str) -> None:
        """Asks it to shrink by these tasks, and not to grow meanwhile; for none: asks no more."""
        self._running.give_up(task_ids, reason)

    def to_state(self) -> dict[str, Any]:
        """What it needs to go on after a restart of the service."""
        if self._memory.phase is Phase.RUNNING:
            self._running.remember()
        return self._writer.write(self._memory)

    def outcome(self) -> Outcome:
        """How it ended; asked once it is `done`."""
        return self._memory.outcome()

    def close(self) -> None:
        """Plans no more."""
        self._starter.abandon()

    # Events.

    def handle(self, event: events.Event) -> None:
        """Takes one event in.

        Raises:
            BadInputError: if the master refuses the framework, or the job can never fit.
            JobFailedError: if the master has thrown the framework out.
        """
        match event:
            case events.Subscribed():
                self._subscribed(event)
            case events.Disconnected():
                self._desk.forget()
                self._connection.disconnected()
            case events.OffersArrived():
                self._offers_arrived(event.offers)
            case events.OfferRescinded():
                self._offers.rescind(event.offer_id)
            case events.StatusUpdate():
                self._status_update(event)
                try_now(self._mesos.acknowledgeStatusUpdate, event.status)
            case events.MessageArrived():
                self._running.read(event.data)
            case events.Refused():
                self._connection.refused(event)
            case events.AgentLost() | events.ExecutorLost():
                event.log(logger)

    def tick(self) -> None:
        """Does what is due by time.

        Raises:
            BadInputError: if the job can never fit any cluster of the agents there are.
        """
        now = self._clock()
        self._desk.give_back()
        self._running.output.tick()
        if self._connection.must_reconcile(now):
            try_now(self._mesos.reconcile, self._run.live())
        match self._memory.phase:
            case Phase.WAITING:
                self._wait(now)
            case Phase.RUNNING:
                self._follow(self._running.tick(now))
            case Phase.STOPPING if self._stopping.is_over(now):
                self._stopped()

    def cancel(self) -> None:
        """Ends all tasks; `done` follows when they have ended."""
        if self.result.succeeded or self.done:
            return
        self._memory.cancelled = True
        self.result.failure = self.result.failure or CANCELLED
        self._stop(comes_back=False)

    # The connection.

    def _subscribed(self, event: events.Subscribed) -> None:
        self._framework_id = event.framework_id
        self._connection.subscribed(self._clock(), event.master_age_s)
        if self._must_take_up:
            self._must_take_up = False
            if self._memory.phase is Phase.RUNNING:
                self._follow(self._running.take_up())
        self._running.output.subscribed()
        if self._memory.phase is Phase.RUNNING and not self._running.wants_offers:
            try_now(self._mesos.suppressOffers)

    # Offers.

    def _offers_arrived(self, offers: Sequence[dict[str, Any]]) -> None:
        if self._memory.phase is Phase.WAITING or self._running.wants_offers:
            self._offers.add(offers, self._clock())
        else:
            self._desk.refuse(offers)

    def _wait(self, now: float) -> None:
        start = self._starter.tick(now, connected=self._connection.connected)
        if start is not None and not self._spec.plan_only:
            self._launch(start)
        elif start is not None:
            self._desk.decline_rest()
            self.result.plan = start.plan
            self.result.succeeded = True
            self._memory.phase = Phase.DONE

    def _launch(self, start: Start) -> None:
        # All of it is noted before the first call: what is launched has been written down by then.
        self._starter.begin(start)
        self._running.begin(start.nodes)
        self._memory.phase = Phase.RUNNING
        self._follow(self._starter.launch(start))
        if self._memory.phase is Phase.RUNNING:
            try_now(self._mesos.suppressOffers)

    # Tasks.

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
        left_behind = task.was_left_behind
        self._running.take_status(task, state, event.status)
        if state.is_terminal() and self._memory.phase is Phase.RUNNING:
            self._follow(self._running.ended(task, counts=not left_behind))

    # Ends.

    def _follow(self, turn: Turn | None) -> None:
        if turn is None:
            return
        self.result.succeeded = not turn.reason
        self._stop(comes_back=bool(turn.reason) and self._restarts.allow(turn, stepped=self._running.stepped))

    def _stop(self, *, comes_back: bool) -> None:
        self._memory.phase = Phase.STOPPING
        self._memory.comes_back = comes_back
        self._running.end()
        self._desk.decline_rest()
        self._stopping.begin(self._clock())

    def _stopped(self) -> None:
        if self._memory.comes_back:
            self._run.clear()
            self._memory.phase = Phase.WAITING
            self._offers.begin(self._clock())
            try_now(self._mesos.reviveOffers)
            return
        self._stopping.tell_lost_output()
        self._memory.phase = Phase.DONE
