"""Pilots: Slurm jobs whose machines join a cluster while jobs and trials wait, and leave it when they are idle.

Frameworks publish what waits (`framework.cluster.demand`). The controller submits as many pilots as hold it, judged by
the machines of the pilots that have joined; one until the first has joined. A pilot without tasks is ended after a
timeout. The controller stores nothing: after a restart it finds its pilots in Slurm's queue.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import math
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dike import typed
from dike.exceptions import DikeError
from executor.mirror import StoreClient
from framework.cluster.demand import PILOTS, WAITING, PilotNotice, Waiting, WaitingJob
from framework.cluster.machine import ClusterMachine
from framework.cluster.records import write_private
from framework.cluster.sharing import store_client
from framework.cluster.slurm import COMPLETING, JOB_ATTRIBUTE, PENDING, Slurm, SlurmJob

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 5.0
PATIENCE_S = 4.0
"""A job counts as waiting after this time: it may be about to start on resources that have just become free."""
SETTLE_S = 12.0
"""After a pilot has joined, what waits is judged again after this time, once frameworks have used the pilot."""
JOIN_TIMEOUT_S = 300.0
END_TIMEOUT_S = 180.0
"""A pilot that has not ended by itself after this time is cancelled."""
RETRY_INTERVAL_S = 30.0
MAX_FAILURES = 3
"""Number of consecutive pilots that may end without joining."""
TOKEN_EXPIRY_S = 7 * 24 * 3600.0
TOKEN_RENEWAL_S = TOKEN_EXPIRY_S / 2
LOG_LINES = 5
UNHELPED = (
    "A machine that `dike cluster slurm` got from Slurm ran no task while this job waited, so no further one is "
    "submitted for it."
)
Amounts = Mapping[str, float]


@dataclass(frozen=True)
class PilotOptions:
    """What `dike cluster slurm` was asked to do.

    Attributes:
        min_jobs, max_jobs: number of pilots.
        nodes: of a pilot.
        idle_s: time after which a pilot without tasks is ended.
        drain_s: time before a pilot's time limit at which its tasks are saved.
        arguments: further arguments of sbatch.
    """

    min_jobs: int = 0
    max_jobs: int = 1
    nodes: int = 1
    idle_s: float = 300.0
    drain_s: float = 180.0
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class PilotAgent:
    """An agent on a machine of a pilot.

    Attributes:
        total: its resources.
        tasks: number of tasks that it runs.
        is_leaving: whether it accepts no further tasks.
    """

    name: str
    total: Amounts
    tasks: int = 0
    is_leaving: bool = False


@dataclass
class Pilot:
    """A pilot that has not ended.

    Attributes:
        since_s: when it was first seen in its state (queued, starting or joined).
        unused_since_s: since when it has no tasks or, if it is queued, nothing waits; None if it is used.
        ending_since_s: since when it is being ended; None if it is not.
        is_overdue: whether it is being ended because it has not joined in time.
    """

    job: SlurmJob
    since_s: float
    agents: tuple[PilotAgent, ...] = ()
    has_joined: bool = False
    unused_since_s: float | None = None
    ending_since_s: float | None = None
    is_overdue: bool = False

    @property
    def is_queued(self) -> bool:
        return self.job.is_queued

    @property
    def tasks(self) -> int:
        return sum(agent.tasks for agent in self.agents)

    @property
    def is_ending(self) -> bool:
        is_leaving = bool(self.agents) and all(agent.is_leaving for agent in self.agents)
        return self.ending_since_s is not None or self.job.state == COMPLETING or is_leaving


def pilot_agents(state: Mapping[str, Any]) -> dict[str, list[PilotAgent]]:
    """Slurm job -> its active agents, from the master's state."""
    tasks: dict[str, int] = {}
    for framework in state.get("frameworks", []):
        for task in framework.get("tasks", []):
            tasks[task["slave_id"]] = tasks.get(task["slave_id"], 0) + 1
    found: dict[str, list[PilotAgent]] = {}
    for agent in state.get("slaves", []):
        job_id = agent.get("attributes", {}).get(JOB_ATTRIBUTE)
        if job_id is None or not agent.get("active"):
            continue
        total = {name: float(agent["resources"].get(name, 0)) for name in ("cpus", "mem", "gpus")}
        is_leaving = bool(agent.get("drain_info")) or bool(agent.get("deactivated"))
        one = PilotAgent(str(agent["hostname"]), total, tasks.get(agent["id"], 0), is_leaving)
        # Mesos reads digits as a number.
        found.setdefault(str(int(job_id)), []).append(one)
    return found


def machines_for(jobs: Sequence[WaitingJob], machine: Amounts, limit: int) -> tuple[int, dict[str, str]]:
    """Number of empty machines that hold what waits, at most `limit`, by first fit.

    Returns:
        The number, and for each job with a task that such a machine cannot hold, a sentence about it.
    """
    rooms: list[dict[str, float]] = []
    unfit: dict[str, str] = {}
    for job in jobs:
        for tasks in job.tasks:
            short = [name for name, amount in tasks.amounts.items() if amount > machine.get(name, math.inf)]
            if short:
                name = short[0]
                unfit[job.job_id] = (
                    f"A {tasks.name} needs {tasks.amounts[name]:g} {name}, and a machine that `dike cluster slurm` "
                    f"gets from Slurm has {machine[name]:g}."
                )
                break
            for _ in range(tasks.count):
                room = next((one for one in rooms if _holds(one, tasks.amounts)), None)
                if room is None:
                    if len(rooms) == limit:
                        break
                    room = dict(machine)
                    rooms.append(room)
                for name, amount in tasks.amounts.items():
                    room[name] = room.get(name, math.inf) - amount
    return len(rooms), unfit


def _holds(room: Amounts, amounts: Amounts) -> bool:
    return all(room.get(name, math.inf) >= amount for name, amount in amounts.items())


class PilotController:
    """Submits and ends the pilots of one cluster; runs on its head.

    Args:
        machine: the head.
        options: what was asked for.
        notify: receives a line about each change.
        slurm: the commands.
        store: the cluster's store.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        machine: ClusterMachine,
        options: PilotOptions,
        notify: Callable[[str], None],
        slurm: Slurm | None = None,
        store: StoreClient | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._machine = machine
        self._options = options
        self._notify = notify
        self._slurm = slurm or Slurm()
        self._store = store or store_client(machine)
        self._clock = clock
        self._folder = machine.folder.path / "slurm"
        mark = hashlib.sha256(machine.cluster.secret.encode()).hexdigest()[:8]
        self.name = f"dike-{machine.cluster.name}-{mark}"
        """Of the pilots in Slurm; another cluster of the same name has another one."""
        self.pilots: dict[str, Pilot] = {}
        self._machine_amounts: Amounts | None = None
        self._waits_since_s: dict[str, float] = {}
        self._unhelped: dict[str, WaitingJob] = {}
        self._unfit: dict[str, str] = {}
        self._failures = 0
        self._retry_s = -math.inf
        self._joined_s = -math.inf
        self._token_s: float | None = None
        self._problem = ""

    @property
    def token_file(self) -> Path:
        return self._folder / "token"

    def start(self) -> None:
        """Checks the arguments of sbatch, and finds pilots of an earlier controller.

        Raises:
            BadInputError: Slurm is not installed, or would refuse the pilots.
        """
        self._folder.mkdir(0o700, exist_ok=True)
        self._slurm.check(self._arguments(), self.script())
        self._renew_token()
        for job_id, job in self._slurm.jobs(self.name).items():
            self.pilots[job_id] = Pilot(job, self._clock())
            self._notify(f"Slurm job {job_id} of an earlier `dike cluster slurm` is {job.state.lower()}")

    def step(self) -> None:
        """Looks at Slurm and the cluster once, and acts.

        Raises:
            DikeError: no pilot joins.
        """
        now_s = self._clock()
        self._renew_token()
        state = self._machine.state()
        try:
            jobs = self._slurm.jobs(self.name)
            waiting = self._waiting(now_s)
        except (DikeError, OSError) as error:
            self._report(str(error))
            return
        if state is None:
            self._report("the master of the cluster does not answer")
            return
        self._observe(jobs, pilot_agents(state), waiting, now_s)
        self._end_unused(waiting, now_s)
        self._submit(waiting, now_s)
        self._publish()

    def end(self, *, wait_s: float) -> bool:
        """Ends all pilots, with their tasks saved first; returns whether all have ended in time."""
        with contextlib.suppress(OSError):
            self._store.remove_notice(PILOTS, self.name)
        deadline_s = self._clock() + wait_s
        asked: set[str] = set()
        while jobs := {name: job for name, job in self._slurm.jobs(self.name).items() if job.state != COMPLETING}:
            if self._clock() > deadline_s:
                return False
            for job_id, job in jobs.items():
                if job_id not in asked:
                    asked.add(job_id)
                    self._end(job_id, job)
            time.sleep(POLL_INTERVAL_S / 5)
        for job_id in self.pilots:
            self._forget_members(job_id)
        return True

    def script(self) -> str:
        """The batch script of a pilot.

        The members drain when their standard input closes. A signal to srun or to the job's steps would not do: Slurm
        sends it to every process in them, tasks included.
        """
        command = [sys.executable, "-P", "-m", "framework", "cluster", "join", self._machine.cluster.head]
        command += ["--token-file", str(self.token_file), "--foreground", "--end-with-stdin"]
        return SCRIPT.format(cluster=self._machine.cluster.name, command=shlex.join(command))

    def _arguments(self) -> list[str]:
        return [
            f"--job-name={self.name}",
            f"--output={self._folder}/%j.log",
            f"--nodes={self._options.nodes}",
            "--ntasks-per-node=1",
            f"--signal=B:TERM@{math.ceil(self._options.drain_s)}",
            "--no-requeue",
            *self._options.arguments,
        ]

    def _renew_token(self) -> None:
        # Pilots may be queued for days.
        now_s = self._clock()
        if self._token_s is None or now_s - self._token_s > TOKEN_RENEWAL_S:
            write_private(self.token_file, self._machine.folder.new_token(TOKEN_EXPIRY_S) + "\n")
            self._token_s = now_s

    def _waiting(self, now_s: float) -> list[WaitingJob]:
        """Jobs that have been waiting for a moment."""
        jobs: dict[str, WaitingJob] = {}
        for values in self._store.notices(WAITING).values():
            try:
                jobs.update({job.job_id: job for job in typed.read(Waiting, values).jobs})
            except ValueError as error:
                logger.info("a notice cannot be read: %s", error)
        self._waits_since_s = {job_id: self._waits_since_s.get(job_id, now_s) for job_id in jobs}
        self._unhelped = {job_id: job for job_id, job in self._unhelped.items() if jobs.get(job_id) == job}
        return [job for job_id, job in jobs.items() if now_s - self._waits_since_s[job_id] >= PATIENCE_S]

    # Observations.

    def _observe(
        self,
        jobs: Mapping[str, SlurmJob],
        agents: Mapping[str, Sequence[PilotAgent]],
        waiting: Sequence[WaitingJob],
        now_s: float,
    ) -> None:
        for job_id in self.pilots.keys() - jobs.keys():
            self._ended(job_id, self.pilots.pop(job_id))
        for job_id, job in jobs.items():
            pilot = self.pilots.setdefault(job_id, Pilot(job, now_s))
            if pilot.is_queued and not job.is_queued:
                pilot.since_s, pilot.unused_since_s = now_s, None
                self._notify(f"Slurm job {job_id} runs on {job.nodes}")
            pilot.job, pilot.agents = job, tuple(agents.get(job_id, ()))
            if pilot.agents and not pilot.has_joined:
                self._joined(job_id, pilot, now_s)
            is_used = pilot.tasks > 0 if pilot.has_joined else not pilot.is_queued or bool(waiting)
            if is_used:
                pilot.unused_since_s = None
            elif pilot.unused_since_s is None:
                pilot.unused_since_s = now_s
            is_late = not pilot.has_joined and not pilot.is_queued and now_s - pilot.since_s > JOIN_TIMEOUT_S
            if is_late and not pilot.is_ending:
                pilot.is_overdue, pilot.ending_since_s = True, now_s
                self._notify(f"ending Slurm job {job_id}: it has not joined within {JOIN_TIMEOUT_S:g} s")
                self._try(self._end, job_id, job)

    def _joined(self, job_id: str, pilot: Pilot, now_s: float) -> None:
        pilot.has_joined, pilot.since_s = True, now_s
        self._joined_s, self._failures = now_s, 0
        largest: dict[str, float] = {}
        for agent in pilot.agents:
            largest = {name: max(amount, largest.get(name, 0.0)) for name, amount in agent.total.items()}
        self._machine_amounts = largest
        self._notify(f"Slurm job {job_id} has joined with {', '.join(agent.name for agent in pilot.agents)}")

    def _ended(self, job_id: str, pilot: Pilot) -> None:
        self._forget_members(job_id)
        if pilot.has_joined or pilot.is_queued or (pilot.is_ending and not pilot.is_overdue):
            self._notify(f"Slurm job {job_id} has ended")
            return
        self._failures += 1
        self._retry_s = self._clock() + RETRY_INTERVAL_S
        self._notify(f"Slurm job {job_id} has ended without joining; its log {self._log(job_id)} ends with:")
        with contextlib.suppress(OSError):
            for line in self._log(job_id).read_text(errors="replace").splitlines()[-LOG_LINES:]:
                self._notify(f"    {line}")
        if self._failures >= MAX_FAILURES:
            raise DikeError(
                f"{MAX_FAILURES} Slurm jobs in a row have ended without joining the cluster; see the log of the last, "
                f"{self._log(job_id)}."
            )

    def _forget_members(self, job_id: str) -> None:
        """Removes the machines of a pilot, which may have been killed before they could leave."""
        with self._machine.folder.changing_members() as members:
            for name in [name for name in members if re.search(rf"-{job_id}(-\d+)?$", name)]:
                del members[name]

    def _log(self, job_id: str) -> Path:
        return self._folder / f"{job_id}.log"

    # Actions.

    @property
    def _usable(self) -> dict[str, Pilot]:
        return {job_id: pilot for job_id, pilot in self.pilots.items() if not pilot.is_ending}

    def _end_unused(self, waiting: Sequence[WaitingJob], now_s: float) -> None:
        for job_id, pilot in self.pilots.items():
            if pilot.ending_since_s is not None and now_s - pilot.ending_since_s > END_TIMEOUT_S:
                self._try(self._slurm.cancel, job_id)
                pilot.ending_since_s = now_s
        unused = [
            (pilot.unused_since_s, job_id)
            for job_id, pilot in self._usable.items()
            if pilot.unused_since_s is not None and now_s - pilot.unused_since_s >= self._options.idle_s
        ]
        for unused_since_s, job_id in sorted(unused):
            if len(self._usable) <= self._options.min_jobs:
                return
            pilot = self.pilots[job_id]
            if pilot.has_joined:
                unhelped = [job for job in waiting if self._waits_since_s[job.job_id] <= unused_since_s]
                self._unhelped.update({job.job_id: job for job in unhelped})
            why = "nothing waits any more" if pilot.is_queued else f"no task for {self._options.idle_s:g} s"
            self._notify(f"ending Slurm job {job_id}: {why}")
            pilot.ending_since_s = now_s
            self._try(self._end, job_id, pilot.job)

    def _end(self, job_id: str, job: SlurmJob) -> None:
        if job.is_queued:
            self._slurm.cancel(job_id)
        else:
            self._slurm.end(job_id)

    def _try(self, act: Callable[..., None], *arguments: Any) -> None:
        try:
            act(*arguments)
        except DikeError as error:  # It may have ended meanwhile.
            logger.info("%s", error)

    def _submit(self, waiting: Sequence[WaitingJob], now_s: float) -> None:
        count = len(self._usable)
        wanted = max(self._options.min_jobs - count, self._wanted(waiting, now_s))
        room = self._options.max_jobs - len(self.pilots)
        if now_s < self._retry_s:
            return
        for _ in range(min(wanted, room)):
            try:
                job_id = self._slurm.submit(self._arguments(), self.script())
            except DikeError as error:
                self._retry_s = now_s + RETRY_INTERVAL_S
                self._report(str(error))
                return
            self.pilots[job_id] = Pilot(SlurmJob(PENDING), now_s)
            self._notify(f"submitted Slurm job {job_id}")
        self._problem = ""

    def _wanted(self, waiting: Sequence[WaitingJob], now_s: float) -> int:
        """Number of further pilots for what waits."""
        jobs = [job for job in waiting if self._unhelped.get(job.job_id) != job]
        self._unfit = dict.fromkeys(self._unhelped, UNHELPED)
        if not jobs:
            return 0
        needed = 1
        if self._machine_amounts is not None:
            nodes = self._options.nodes
            machines, unfit = machines_for(jobs, self._machine_amounts, self._options.max_jobs * nodes)
            self._unfit |= unfit
            is_unknown = any(not job.tasks for job in jobs)
            needed = max(math.ceil(machines / nodes), 1 if is_unknown else 0)
            if now_s - self._joined_s < SETTLE_S:
                return 0
        expected = sum(not pilot.tasks for pilot in self._usable.values())
        return max(0, needed - expected)

    def _publish(self) -> None:
        usable = self._usable
        notice = PilotNotice(
            queued={job_id: one.job.reason or one.job.state for job_id, one in usable.items() if one.is_queued},
            starting=tuple(job_id for job_id, one in usable.items() if not one.is_queued and not one.has_joined),
            running=sum(pilot.has_joined for pilot in self.pilots.values()),
            max_jobs=self._options.max_jobs,
            unfit=self._unfit,
            problem=self._problem,
        )
        try:
            self._store.put_notice(PILOTS, self.name, dataclasses.asdict(notice))
        except OSError as error:
            logger.warning("the state of the pilots is not published: %s", error)

    def _report(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            self._notify(f"{problem}; retrying")


SCRIPT = """#!/bin/bash
# Joins the machines of this Slurm job to the Dike cluster '{cluster}'. SIGTERM to this script closes the members'
# standard input: they save their tasks and leave.
pipe=$(mktemp -u "${{TMPDIR:-/tmp}}/dike-XXXXXXXXXX")
mkfifo -m 600 "$pipe" || exit
srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 {command} <"$pipe" &
members=$!
exec 3>"$pipe"
rm "$pipe"
trap 'exec 3>&-' TERM
wait "$members"
code=$?
while kill -0 "$members" 2>/dev/null; do
    wait "$members"
    code=$?
done
exit "$code"
"""


def run(controller: PilotController, wait: Callable[[float], bool]) -> None:
    """Runs a controller until `wait`, which gets a number of seconds, returns true.

    Raises:
        DikeError: no pilot joins.
    """
    while True:
        controller.step()
        if wait(POLL_INTERVAL_S):
            return
