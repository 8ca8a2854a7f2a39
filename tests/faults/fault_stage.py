"""A service on the real Mesos, each of whose processes can be killed, and jobs that cost next to no CPU."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from framework.embedded.cluster import EmbeddedCluster
from framework.policies.trials.interface import PolicySettings
from framework.project.bundle import pack
from framework.scheduler.records import JobRecord, JobState, TaskRecord
from framework.search.records import Parameter, SearchSpec
from framework.service.requests import TrainingRequest, search_request
from framework.service.store import ServiceStore
from framework.service.submission import Submissions
from tests import task_processes
from tests.training.job_stage import profile
from tests.waiting import DEADLINE_S, Found, wait_until, whole_lines
from tests.warm import Warm

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SCRIPTS = HERE / "scripts"
V1 = SCRIPTS / "v1" / "train.py"
COUNTING = HERE.parent / "search" / "scripts" / "counting.py"


class FaultStage:
    """One cluster, one database, and a service that comes and goes.

    Args:
        cluster: a running Mesos.
        folder: for the database, checkpoints, logs.
        address: `HOST:PORT` at which clients are to reach the service; empty for nowhere.

    Attributes:
        address: the one given.
        store: the service's database.
        trial_script, slot_mem_mib, preload: of searches.
    """

    trial_script = COUNTING
    slot_mem_mib = 256.0
    preload: tuple[str, ...] = ()

    def __init__(self, cluster: EmbeddedCluster, folder: Path, address: str = "") -> None:
        self.cluster = cluster
        self.address = address
        self.folder = folder
        self.url = f"sqlite:///{self.disk('database') / 'service.db'}"
        self.store = ServiceStore(self.url)
        self.log = folder / "service.log"
        self._submissions = Submissions(self.store, queue.SimpleQueue())
        self._rates: tuple[str, ...] = ()
        self._service: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> FaultStage:
        return self

    def __exit__(self, *failure: object) -> None:
        self.kill_service()
        self.store.close()

    def disk(self, name: str) -> Path:
        """Folder of the `database`, or of all `checkpoints`: a disk of its own where a test has mounted one there."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        return folder

    # The service.

    def start_service(self, *trick: str) -> None:
        """Starts it, for the first time or again; a trick is one of `service_process.py`."""
        arguments = [self.url, self.cluster.master, str(self.disk("checkpoints")), self.address or "-", *trick]
        command = [sys.executable, "-m", "tests.faults.service_process", *arguments]
        with self.log.open("ab") as log:
            self._service = Warm(command, cwd=ROOT, stdout=log, stderr=log)

    @property
    def service_pid(self) -> int | None:
        """Its process; None while none runs."""
        return None if self._service is None or self._service.poll() is not None else self._service.pid

    def kill_service(self) -> None:
        """Kills it as a machine that loses its power would."""
        if self._service is not None:
            self._service.kill()
            self._service.wait()
            self._service = None

    # Jobs. The service finds them in the database when it starts.

    def submit_training(self, steps: int, pause_s: float = 0.05, *, workers: int = 2, max_restarts: int = 3) -> str:
        """Adds a counting job; returns its id."""
        request = TrainingRequest(
            script="counting_job.py",
            arguments=[str(steps), str(pause_s), str(self.folder / "diary.txt")],
            profile=profile().to_json(),
            checkpoint_interval_s=1.0,
            max_restarts=max_restarts,
            max_workers=workers,
            # Workers all alike leave room for the others.
            rules="paper",
            environment={"PYTHONPATH": f"{SCRIPTS}{os.pathsep}{ROOT}"},
            # TensorFlow's place is taken by a stand-in, which only servers ask for.
            preload=[],
        )
        return self._submissions.submit(request, pack(SCRIPTS / "counting_job.py"), "user").id

    def submit_tensorflow(self, steps: int, pause_s: float = 0.0, *, workers: int = 2) -> str:
        """Adds a job on real TensorFlow; returns its id."""
        request = TrainingRequest(
            script=V1.name,
            arguments=[str(self.folder / "diary.txt"), str(steps), str(pause_s)],
            profile=profile().to_json(),
            checkpoint_interval_s=1.0,
            max_restarts=1000,
            max_workers=workers,
            # Workers all alike leave room for the others.
            rules="paper",
            environment={"PYTHONPATH": str(ROOT)},
        )
        return self._submissions.submit(request, pack(V1), "user").id

    def submit_search(self, rates: Sequence[str], steps: int, pause_s: float = 0.1, *, slots: int = 2) -> str:
        """Adds a search whose trials are `trial_script`; returns its name."""
        self._rates = tuple(rates)
        diary = self.folder / "trials" / "diary.txt"
        diary.parent.mkdir()
        spec = SearchSpec(
            name="counting",
            script=self.trial_script.name,
            arguments=("--steps", str(steps), "--pause", str(pause_s), "--diary", str(diary)),
            flags={"lr": "--lr"},
            space=(Parameter("lr", choices=tuple(float(rate) for rate in rates)),),
            sampler="grid",
            trial_count=len(rates),
            policy="rr",
            settings=PolicySettings(quantum_s=3.0),
            checkpoint_dir=str(self.disk("checkpoints") / "trials"),
            checkpoint_interval_s=1.0,
            slot_mem_mib=self.slot_mem_mib,
            slot_cpus=0.5,
            max_slots=slots,
            # Failures here are kills, so the agents are not at fault.
            agent_cooldown_s=1.0,
        )
        request = search_request(spec, self.trial_script.name, self.preload)
        return self._submissions.submit(request, pack(self.trial_script), "user").id

    def end_jobs(self) -> None:
        """Has every job's script end with its next step."""
        (self.folder / "end-job").touch()
        for rate in self._rates:
            (self.folder / "trials" / f"end-{rate}").touch()

    def job(self, job_id: str) -> JobRecord:
        record = self.store.job(job_id)
        assert record is not None
        return record

    def wait_until(self, condition: Callable[[], Found | None], what: str, deadline_s: float = DEADLINE_S) -> Found:
        """Looks until the answer is true, and returns it."""
        return wait_until(condition, what, said=self.report, deadline_s=deadline_s)

    def report(self) -> str:
        """How the jobs stand, and the end of the service's log."""
        jobs = [f"{job.id} {job.state} {job.failure}\n{self.events(job.id)[-3000:]}" for job in self.store.jobs()]
        return "\n".join([*jobs, self.log.read_text()[-6000:] if self.log.exists() else ""])

    def wait_for_end(
        self, job_id: str, state: JobState = JobState.FINISHED, deadline_s: float = DEADLINE_S
    ) -> JobRecord:
        """Waits until a job has ended, in the given state."""
        self.wait_until(lambda: self.job(job_id).state.has_ended(), f"the end of {job_id}", deadline_s)
        record = self.job(job_id)
        assert record.state is state, self.report()
        return record

    def wait_for_steps(self, steps: int) -> None:
        """Waits until the training job has trained `steps` more steps."""
        goal = self.last_step() + steps
        self.wait_until(lambda: self.last_step() >= goal, f"step {goal}")

    def live_tasks(self, job_id: str) -> dict[str, TaskRecord]:
        """Name -> task, those that have not ended."""
        return {task.name: task for task in self.store.tasks(job_id=job_id, live_only=True)}

    def events(self, job_id: str) -> str:
        """What happened to a job, a line each."""
        return "\n".join(f"{event.kind}: {event.text}" for event in self.store.history.events(job_id))

    # What the jobs wrote.

    def diary(self) -> list[tuple[int, int, int, str]]:
        """Attempt, process, step and loss of each step of the training job, as written."""
        lines = whole_lines(self.folder / "diary.txt")
        return [(int(attempt), int(pid), int(step), loss) for attempt, pid, step, loss in lines]

    def trial_diary(self) -> list[list[str]]:
        """Rate, process, step and loss of each step of a trial, as written."""
        return whole_lines(self.folder / "trials" / "diary.txt")

    def check_trials(self) -> None:
        """Every trial came to its undisturbed result, whatever it trained twice."""
        seen: defaultdict[str, dict[int, str]] = defaultdict(dict)
        for rate, _, step, found in self.trial_diary():
            assert seen[rate].setdefault(int(step), found) == found, (rate, step)
        for rate, losses in seen.items():
            assert losses == self.undisturbed_trial(rate, max(losses)), rate

    def undisturbed_trial(self, rate: str, steps: int) -> dict[int, str]:
        """Step -> loss of a trial that nothing has happened to."""
        return _falling(1 - float(rate), steps)

    def undisturbed_job(self, steps: int) -> dict[int, str]:
        """The same of the training job."""
        return _falling(0.99, steps)

    def last_step(self) -> int:
        return max((step for _, _, step, _ in self.diary()), default=0)

    def check_trajectory(self, steps: int | None = None) -> None:
        """The training job came to the undisturbed result, and each attempt had one chief; to its last step if None."""
        steps = self.last_step() if steps is None else steps
        expected = self.undisturbed_job(steps)
        seen: dict[int, str] = {}
        for _, _, step, found in self.diary():
            assert found == expected[step], step
            seen[step] = found
        assert seen == expected
        by_attempt: defaultdict[int, set[int]] = defaultdict(set)
        for attempt, pid, _, _ in self.diary():
            by_attempt[attempt].add(pid)
        assert all(len(pids) == 1 for pids in by_attempt.values()), by_attempt

    # Processes.

    def executors(self) -> list[psutil.Process]:
        """The executors' own processes."""
        return task_processes.executors(self.cluster)

    def roles(self) -> dict[str, psutil.Process]:
        """Role, such as `worker:1`, -> the process that plays it."""
        return task_processes.roles(self.cluster)

    def slots(self) -> list[psutil.Process]:
        """The processes that hold tasks."""
        return task_processes.slots(self.cluster)

    def trials(self) -> list[psutil.Process]:
        """The trial processes that the diary lists."""
        pids = {int(line[1]) for line in self.trial_diary()[-200:]}
        return [process for _, process in task_processes.living(self.cluster) if process.pid in pids]

    def zygotes(self) -> list[psutil.Process]:
        """The zygotes of slots."""
        return task_processes.zygotes(self.cluster)

    def wait_until_nothing_runs(self) -> None:
        """No process of a task is left, and no task that the master knows."""
        self.wait_until(lambda: not task_processes.of_tasks(self.cluster), "the end of all tasks' processes")
        self.wait_until(lambda: not self.known_to_master(), "the end of all tasks")

    def known_to_master(self) -> set[str]:
        """Ids of the tasks that run for all the master knows."""
        return {
            task["id"]
            for framework in self.cluster.state()["frameworks"]
            for task in (*framework["tasks"], *framework.get("unreachable_tasks", ()))
        }

    def check_no_unknown_task(self, *others: FaultStage) -> None:
        """Every task that the master has ever heard of is in the database, or in one of other services."""
        # The master first: what it hears of meanwhile has been written down by then.
        frameworks = self.cluster.state()["frameworks"]
        known = {task.task_id for stage in (self, *others) for task in stage.store.tasks()}
        for framework in frameworks:
            for task in (*framework["tasks"], *framework["completed_tasks"], *framework.get("unreachable_tasks", ())):
                assert task["id"] in known, task


def _falling(factor: float, steps: int) -> dict[int, str]:
    loss, losses = 1.0, {}
    for step in range(1, steps + 1):
        loss *= factor
        losses[step] = loss.hex()
    return losses
