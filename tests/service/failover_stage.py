"""A cluster, a database, and a service that is killed and started again."""

from __future__ import annotations

import contextlib
import queue
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from framework.embedded.agents import AgentSpec
from framework.embedded.cluster import EmbeddedCluster
from framework.mesos.events import Event
from framework.project import bundle
from framework.scheduler.records import JobRecord, TaskRecord
from framework.service.requests import TrainingRequest
from framework.service.store import ServiceStore
from framework.service.submission import Submissions
from tests.profiles import made_up_profile
from tests.service.dying_service import NEVER
from tests.waiting import wait_until
from tests.warm import Warm

HERE = Path(__file__).parent
ROOT = Path(__file__).parents[2]
PROFILE = made_up_profile({"w": (4, 1)}, name="failover_script.py", flops=1e6)


class FailoverStage:
    """A cluster, a database, and a service that comes and goes."""

    def __init__(self, folder: Path, cluster: EmbeddedCluster) -> None:
        self.folder = folder
        self.cluster = cluster
        self.url = f"sqlite:///{folder}/service.db"
        self.store = ServiceStore(self.url)
        self.processes: list[subprocess.Popen[bytes]] = []

    def serve(self, moment: str = NEVER, *python: Path) -> subprocess.Popen[bytes]:
        """Starts a service that kills itself at this moment."""
        log = self.folder / f"service-{len(self.processes)}.log"
        with log.open("wb") as output:
            command = [sys.executable, "-m", "tests.service.dying_service", self.url, self.cluster.master, moment]
            process = Warm([*command, *map(str, python)], cwd=ROOT, stdout=output, stderr=output)
        self.processes.append(process)
        return process

    def submit(self, arguments: list[str], script: str = "failover_script.py") -> JobRecord:
        """Submits a job of one worker and one parameter server."""
        project = self.folder / "project"
        project.mkdir(exist_ok=True)
        shutil.copy(HERE / script, project)
        request = TrainingRequest(
            script=script,
            arguments=arguments,
            profile=PROFILE.to_json(),
            strategy="ps",
            max_workers=1,
            max_restarts=0,
            checkpoint_dir=str(self.folder / "checkpoints"),
        )
        inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        return Submissions(self.store, inbox).submit(request, bundle.pack(project / request.script), "ann")

    def job(self, job_id: str) -> JobRecord:
        record = self.store.job(job_id)
        assert record is not None
        return record

    def running(self, job_id: str) -> list[TaskRecord]:
        return [task for task in self.store.tasks(job_id=job_id, live_only=True) if task.state == "running"]

    def last_step(self, job_id: str) -> int:
        last = self.store.history.last_progress(job_id)
        return 0 if last is None else last.step

    def known_to_mesos(self) -> list[dict[str, Any]]:
        """All tasks that the master has ever launched for us."""
        state = self.cluster.state()
        frameworks = state["frameworks"] + state["completed_frameworks"]
        return [task for one in frameworks for kind in ("tasks", "completed_tasks") for task in one[kind]]

    def wait_until(self, condition: Callable[[], Any], what: str) -> None:
        def has_failed() -> bool:
            return self.processes[-1].poll() not in (None, -signal.SIGKILL)

        wait_until(condition, what, said=lambda: self.logs, lost=has_failed)

    @property
    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("service-*.log")))

    def wait_for_death(self, process: subprocess.Popen[bytes]) -> None:
        self.wait_until(lambda: process.poll() is not None, "the service's death")
        assert process.returncode == -signal.SIGKILL, self.logs

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.store.close()


@contextlib.contextmanager
def staged(folder: Path) -> Iterator[FailoverStage]:
    """A stage on an agent of its own."""
    spec = AgentSpec(resources="cpus:4;mem:8192;disk:10000")
    with EmbeddedCluster([spec]) as cluster, contextlib.closing(FailoverStage(folder, cluster)) as made:
        yield made
