"""Injects one fault after the other while a search and a training job run: killed or stopped processes, full disks.

Service, master and agents are restarted immediately, as an init system would do; Dike itself handles the rest.
A daemon that ends unexpectedly counts among the rest.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import httpx
import psutil

from framework.embedded.agents import AgentSpec
from framework.embedded.ports import reserve_blocks
from framework.scheduler.records import JobState
from tests.embedded.embedded_support import DAEMONS, daemons
from tests.faults.fault_stage import FaultStage
from tests.faults.service_process import TOKENS
from tests.waiting import DEADLINE_S

WATCH_S = 1.5
"""How long is watched at least: a job may train on for a moment after one of its processes was killed."""
LOOK_S = 0.05
STEADY_S = 0.5
"""Jobs of which each has trained a step within this time run again."""
RECOVERY_DEADLINE_S = 180.0
SECOND_BLOW = 0.25
"""How often the next process is killed before the jobs have recovered from the last one."""
PATIENCE_S = 2.0
PAUSE_S, SHORT_PAUSE_S = 10.0, 4.0
"""How long a process is stopped; Mesos removes an agent after three seconds."""
FULL_S = 5.0
"""How long a disk is full: several of the jobs' checkpoint intervals."""
DISK_MIB = 64
FLOOD = 300
"""Number of simultaneous connections of strangers; more than the service accepts."""
ENDLESS = 1_000_000
AGENTS = (AgentSpec(resources="cpus:4;mem:4096;disk:4096"),) * 2


@contextlib.contextmanager
def small_disks(folder: Path) -> Iterator[bool]:
    """Has the stage in a folder keep database and checkpoints on disks that can be filled; whether that can be done."""
    disks = [folder / name for name in ("database", "checkpoints")]
    with contextlib.ExitStack() as mounted:
        for disk in disks:
            disk.mkdir()
            mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(disk)]
            if os.getuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
                yield False
                return
            mounted.callback(subprocess.run, ["umount", "--lazy", str(disk)], check=True)
        yield True


@contextlib.contextmanager
def free_address() -> Iterator[str]:
    """A loopback address that stays reserved meanwhile."""
    [block] = reserve_blocks(1)
    with block.claim:
        yield f"127.0.0.1:{next(iter(block))}"


def begin(stage: FaultStage) -> tuple[str, str]:
    """Submits a training job and a search, starts the service and waits for the first steps; returns their ids."""
    training = stage.submit_training(ENDLESS, 0.1, max_restarts=10)
    search = stage.submit_search(("0.01", "0.02", "0.005", "0.001"), ENDLESS)
    stage.start_service()
    stage.wait_until(lambda: stage.diary() and stage.trial_diary(), "the first steps")
    return training, search


class Standstill:
    """How long the slowest of several jobs makes no step, from now on.

    Args:
        progress: steps of each job.
    """

    def __init__(self, progress: Sequence[int]) -> None:
        self._since_s = time.monotonic()
        self._seen = list(progress)
        self._moved_s = [self._since_s] * len(progress)
        self._moved = [False] * len(progress)
        self.longest_s = 0.0

    def is_over(self, progress: Sequence[int]) -> bool:
        """Takes in what each has done by now; whether all run again."""
        now_s = time.monotonic()
        for index, done in enumerate(progress):
            if done != self._seen[index]:
                self.longest_s = max(self.longest_s, now_s - self._moved_s[index])
                self._seen[index], self._moved_s[index], self._moved[index] = done, now_s, True
        is_steady = all(self._moved) and now_s - min(self._moved_s) <= STEADY_S
        return is_steady and now_s - self._since_s >= WATCH_S


class Chaos:
    """One run of it.

    Args:
        stage: with a running service.
        training: id of its training job.
        search: name of its search; None for a job on TensorFlow alone, whose losses no two runs have in common.
        seed: of all choices.
        say: called with a description of each fault.
        has_disks: whether its disks may be filled (`small_disks`).
        pause_s: how long a process is stopped.

    Attributes:
        standstills: kind of fault -> how long one of the jobs stood still, of those faults that were waited for.
        faults: kind of fault -> how many.
    """

    def __init__(
        self,
        stage: FaultStage,
        training: str,
        search: str | None,
        seed: int,
        say: Callable[[str], None],
        *,
        has_disks: bool = False,
        pause_s: float = PAUSE_S,
    ) -> None:
        self._stage = stage
        self._training = training
        self._search = search
        self._random = random.Random(seed)
        self._pause_s = pause_s
        self._gap = Standstill(self._progress())
        self._say = say
        self.faults: defaultdict[str, int] = defaultdict(int)
        self.standstills: defaultdict[str, list[float]] = defaultdict(list)
        self._kinds: dict[str, Callable[[], str]] = {
            "service killed": self._kill_service,
            "master killed": self._kill_master,
            "agent killed": self._kill_agent,
            "executor killed": lambda: self._kill_one(stage.executors()),
            "holder of a task killed": lambda: self._kill_one(stage.slots()),
            "task of the job killed": lambda: self._kill_one(stage.roles().values()),
            "daemon of the private Mesos killed": self._kill_daemon,
            "service stands still": self._stop_service,
            "master stands still": self._stop_master,
            "agent stands still": self._stop_agent,
            "sandbox deleted": self._delete_sandbox,
        }
        if stage.address:
            self._kinds["service under a flood"] = self._flood_service
        if search is not None:
            self._kinds |= {
                "zygote killed": lambda: self._kill_one(stage.zygotes()),
                "trial killed": lambda: self._kill_one(stage.trials()),
                "newest checkpoint cut short, a trial killed": self._truncate_checkpoint,
            }
        if has_disks:
            self._kinds |= {
                "disk of the checkpoints full": lambda: self._fill("checkpoints"),
                "disk of the database full": lambda: self._fill("database"),
            }

    def run(self, count: int) -> None:
        """Injects `count` faults; returns when the jobs have recovered from the last."""
        # Every kind gets its turn, in an order of chance.
        order: list[str] = []
        while len(order) < count:
            kinds = list(self._kinds)
            self._random.shuffle(kinds)
            order += kinds
        for number, kind in enumerate(order[:count]):
            gap = self._gap = Standstill(self._progress())
            victim = self._kinds[kind]()
            self._say(f"{number + 1}: {kind} {victim}")
            self.faults[kind] += 1
            if number + 1 < count and self._random.random() < SECOND_BLOW:
                time.sleep(self._random.uniform(0.0, PATIENCE_S))
                continue
            self._stage.wait_until(lambda seen=gap: self._has_recovered(seen), kind, RECOVERY_DEADLINE_S)
            self.standstills[kind].append(gap.longest_s)

    def _has_recovered(self, gap: Standstill) -> bool:
        if self._stage.service_pid is None:
            # It ends where its disk is full; an init system would start it again.
            self._stage.start_service()
        return gap.is_over(self._progress())

    def table(self) -> str:
        """Kind, how many, and seconds without progress, as a table in Markdown."""
        lines = ["| fault | times | standstill, median s | longest s |", "|---|---|---|---|"]
        for kind, count in sorted(self.faults.items()):
            seconds = self.standstills[kind]
            figures = f"{statistics.median(seconds):.1f} | {max(seconds):.1f}" if seconds else "- | -"
            lines.append(f"| {kind} | {count} | {figures} |")
        lines.append(f"| all | {sum(self.faults.values())} | | |")
        return "\n".join(lines)

    @property
    def restarts(self) -> int:
        """How often the training job was started again; once it has ended."""
        result = self._stage.job(self._training).result
        assert result is not None
        return int(result["restarts"])

    def end(self) -> None:
        """Waits for the jobs' ends, and checks that nothing was lost, duplicated or left behind."""
        stage = self._stage
        stage.end_jobs()
        for job in filter(None, (self._training, self._search)):
            stage.wait_for_end(job, JobState.FINISHED)
        if self._search is not None:
            stage.check_trajectory()
            stage.check_trials()
        stage.wait_until_nothing_runs()
        stage.check_no_unknown_task()
        # The service hears a little later than the master of the end of a task that no job wants any more.
        stage.wait_until(lambda: not stage.store.tasks(live_only=True), "the end of all tasks in the database")

    # Faults.

    def _kill_service(self) -> str:
        pid = self._stage.service_pid
        self._stage.kill_service()
        self._stage.start_service()
        return str(pid)

    def _kill_master(self) -> str:
        cluster = self._stage.cluster
        pid = cluster.master_pid
        cluster.kill_master()
        cluster.restart_master()
        return str(pid)

    def _kill_agent(self) -> str:
        cluster = self._stage.cluster
        index = self._random.randrange(len(cluster.agents))
        agent = cluster.agents[index]
        cluster.kill_agent(index)
        cluster.restart_agent(index)
        return f"{agent.name} {agent.pid}"

    def _kill_daemon(self) -> str:
        """One that the cluster itself has to start again."""
        supervisor = psutil.Process(self._stage.cluster.supervisor_pid)
        return self._kill_one([process for kind in DAEMONS for process in daemons(supervisor, kind)])

    def _kill_one(self, processes: Collection[psutil.Process]) -> str:
        """Kills one of the processes; none if an earlier fault has left none."""
        alive = sorted(processes, key=lambda process: process.pid)
        if not alive:
            return "(none there)"
        victim = self._random.choice(alive)
        try:
            victim.kill()
        except psutil.NoSuchProcess:
            return f"{victim.pid} (gone already)"
        return str(victim.pid)

    def _stop_service(self) -> str:
        pid = self._stage.service_pid
        if pid is None:
            return "(none there)"
        # It may be on its way out.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            self._look_on(self._pause_s)
            os.kill(pid, signal.SIGCONT)
        return str(pid)

    def _stop_master(self) -> str:
        cluster = self._stage.cluster
        cluster.kill_master(signal.SIGSTOP)
        self._look_on(self._pause_s)
        cluster.kill_master(signal.SIGCONT)
        return str(cluster.master_pid)

    def _stop_agent(self) -> str:
        cluster = self._stage.cluster
        index = self._random.randrange(len(cluster.agents))
        cluster.kill_agent(index, signal.SIGSTOP)
        self._look_on(self._pause_s)
        cluster.kill_agent(index, signal.SIGCONT)
        # The master has given it up and has it start anew under another id, as an init system would.
        return cluster.agents[index].name

    def _delete_sandbox(self) -> str:
        executors = sorted(self._stage.executors(), key=lambda process: process.pid)
        if not executors:
            return "(none there)"
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
            sandbox = Path(self._random.choice(executors).environ()["MESOS_SANDBOX"])
            # The folder itself stays: without it an agent that is started again ends by a check of Mesos' own.
            for path in sandbox.iterdir():
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
            return sandbox.name
        return "(gone already)"

    def _truncate_checkpoint(self) -> str:
        newest = None
        with contextlib.suppress(FileNotFoundError):  # Trials remove what they need no more.
            files = (self._stage.disk("checkpoints") / "trials").glob("**/run-*/**/*.json")
            newest = max(files, key=lambda path: path.stat().st_mtime, default=None)
            if newest is not None:
                os.truncate(newest, newest.stat().st_size // 2)
        return f"{newest} {self._kill_one(self._stage.trials())}"

    def _fill(self, name: str) -> str:
        file = self._stage.disk(name) / "filler"
        with file.open("wb", buffering=0) as filler, contextlib.suppress(OSError):
            while True:
                filler.write(bytes(1 << 16))
        self._look_on(FULL_S)
        file.unlink()
        return ""

    def _flood_service(self) -> str:
        """Floods the service from strangers and one user; checks that a modest client is answered meanwhile."""
        stage = self._stage
        with httpx.Client(base_url=f"http://{stage.address}", timeout=DEADLINE_S, trust_env=False) as client:
            user = {"Authorization": f"Bearer {TOKENS['user']}"}
            stage.wait_until(lambda: _answers(client, "/api/v1/me", user), "the service's answer", RECOVERY_DEADLINE_S)
            over = threading.Event()
            with concurrent.futures.ThreadPoolExecutor() as pool:
                floods = [pool.submit(flood, stage.address, over) for flood in (_idle_strangers, *[_busy_user] * 4)]
                try:
                    self._look_on(FULL_S)
                    assert _answers(client, "/healthz", {}), "no answer to a stranger"
                    assert _answers(client, "/api/v1/me", user), "no answer to a user"
                finally:
                    over.set()
            return f"{sum(flood.result() for flood in floods)} connections and requests"

    def _look_on(self, seconds: float) -> None:
        """Waits, and tracks the jobs' progress meanwhile."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._gap.is_over(self._progress())
            time.sleep(LOOK_S)

    # Progress.

    def _progress(self) -> list[int]:
        """Lines of each job's diary."""
        training = len(self._stage.diary())
        return [training] if self._search is None else [training, len(self._stage.trial_diary())]


def _answers(client: httpx.Client, path: str, headers: dict[str, str]) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return client.get(path, headers=headers).status_code == 200
    return False


def _idle_strangers(address: str, over: threading.Event) -> int:
    """Opens connections, asks for nothing, and opens others for those that are closed; returns how many."""
    host, port = address.split(":")
    count = 0
    with contextlib.ExitStack() as held:
        while not over.is_set():
            with contextlib.suppress(OSError):  # all places are taken
                held.enter_context(socket.create_connection((host, int(port)), timeout=LOOK_S))
                count += 1
            if count % FLOOD == 0:
                held.pop_all().close()
    return count


def _busy_user(address: str, over: threading.Event) -> int:
    """Asks for a job by a long name that no job has, again and again; returns how often."""
    count = 0
    headers = {"Authorization": f"Bearer {TOKENS['flood']}"}
    while not over.is_set():
        with (
            contextlib.suppress(httpx.TransportError),
            httpx.Client(base_url=f"http://{address}", timeout=DEADLINE_S, trust_env=False, headers=headers) as client,
        ):
            while not over.is_set():
                client.get(f"/api/v1/jobs/{'n' * 200}")
                count += 1
    return count
