"""Commands on a private Mesos, each of whose processes is killed or stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from framework.embedded.supervisor import MAX_RESTARTS
from tests.embedded.embedded_support import DAEMONS, daemons, kill_one_daemon
from tests.running import Running
from tests.waiting import is_alive, wait_until, whole_lines

pytestmark = [pytest.mark.mesos, pytest.mark.timeout(300)]

COUNTING = Path(__file__).parents[1] / "search" / "scripts" / "counting.py"
RATES = ("0.1", "0.2")
STEPS = 5000
GOES_ON = "Every trial is saved up to its last checkpoint; resume with dike tune --resume count."


LOOP = """
import time
import dike

for step in range(5000):
    time.sleep(0.05)
    dike.report(step, loss=1.0 / (step + 1))
"""


def supervisor_of(command: Running) -> psutil.Process:
    """That of a command's Mesos."""
    children = psutil.Process(command.process.pid).children()
    (found,) = [child for child in children if any(part.endswith("supervisor.py") for part in child.cmdline())]
    return found


class SearchStage:
    """A search of two trials at a time. Each trial runs until the test ends it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._diary = folder / "diary.txt"
        options = ("--name", "count", "--param", f"lr={','.join(RATES)}", "--slots", "2", "--policy", "fifo")
        slots = ("--resources", "cpus:2;mem:2048", "--slot-cpus", "0.5", "--slot-mem", "256")
        script = (COUNTING, "--", "--steps", str(STEPS), "--pause", "0.05", "--diary", self._diary)
        self.command = Running(folder, "tune", "--format", "json", *options, *slots, *script)

    def wait_for_steps(self) -> None:
        """Waits until each trial has taken some more steps."""
        before = self._steps()
        self.command.wait_for(
            lambda: all(self._steps()[rate] >= before[rate] + 3 for rate in RATES), "more steps of each trial"
        )

    def end_trials(self) -> None:
        for rate in RATES:
            (self._folder / f"end-{rate}").touch()

    def check(self) -> None:
        """Nothing that a trial has computed was lost or is another's."""
        losses: dict[tuple[str, int], str] = {}
        for rate, _, step, loss in whole_lines(self._diary):
            assert losses.setdefault((rate, int(step)), loss) == loss
        for rate, last in self._steps().items():
            assert {step for of, step in losses if of == rate} == set(range(1, last + 1))

    def _steps(self) -> dict[str, int]:
        taken = dict.fromkeys(RATES, 0)
        for rate, _, step, _ in whole_lines(self._diary):
            taken[rate] = max(taken[rate], int(step))
        return taken


@pytest.fixture
def search(tmp_path: Path) -> Iterator[SearchStage]:
    found = SearchStage(tmp_path)
    found.wait_for_steps()
    yield found
    Running.end_all()


def resumed(search: SearchStage, folder: Path) -> None:
    """Resumes the search from its trials' checkpoints and waits for its end."""
    search.command = Running(folder, "tune", "--format", "json", "--resume", "count")
    search.wait_for_steps()
    search.end_trials()
    search.command.result()
    search.check()


def test_daemons_that_are_killed_are_started_again(search: SearchStage) -> None:
    supervisor = supervisor_of(search.command)
    for kind in DAEMONS:
        kill_one_daemon(supervisor, kind)
        wait_until(lambda kind=kind: daemons(supervisor, kind), f"another {kind}")
        search.wait_for_steps()
    # The last of the kinds is one that can be done without.
    for _ in range(MAX_RESTARTS):
        kill_one_daemon(supervisor, "executor.zygote_server")
    kill_one_daemon(supervisor, "agent")
    search.wait_for_steps()
    assert not daemons(supervisor, "executor.zygote_server")
    search.end_trials()
    search.command.result()
    search.check()


def test_stopped_processes_are_continued_or_replaced(search: SearchStage) -> None:
    supervisor = supervisor_of(search.command)
    # An agent would take its executors along, and it takes a while until trials have other slots.
    kinds = ("master", "executor.zygote_server")
    still = [daemons(supervisor, kind)[0] for kind in kinds]
    for process in (*still, supervisor):
        process.suspend()
    search.command.wait_for(lambda: not any(map(is_alive, still)), "the end of the stopped processes")
    search.command.wait_for(lambda: all(daemons(supervisor, kind) for kind in kinds), "others in their places")
    search.wait_for_steps()
    search.end_trials()
    search.command.result()
    search.check()


def kill_supervisor(supervisor: psutil.Process) -> None:
    supervisor.kill()


def kill_masters(supervisor: psutil.Process) -> None:
    for _ in range(1 + MAX_RESTARTS):
        kill_one_daemon(supervisor, "master")


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (kill_supervisor, "The private Mesos has ended, because its supervisor (process "),
        (kill_masters, "The private Mesos has failed: its master ended by signal 9 (SIGKILL), also after each of"),
    ],
)
def test_a_search_whose_mesos_is_gone_ends_and_can_be_resumed(
    search: SearchStage, tmp_path: Path, fault: Callable[[psutil.Process], None], why: str
) -> None:
    supervisor = supervisor_of(search.command)
    belongings = supervisor.children(recursive=True)
    fault(supervisor)
    search.command.result(exit_code=1)
    last = search.command.log.splitlines()[-1]
    assert last.startswith(f"dike: {why}")
    assert last.endswith(GOES_ON)
    wait_until(lambda: not any(map(is_alive, (supervisor, *belongings))), "the end of all that belonged to it")
    resumed(search, tmp_path)


@pytest.fixture
def end_all() -> Iterator[None]:
    yield
    Running.end_all()


@pytest.mark.usefixtures("end_all")
def test_a_job_outlives_master_and_agent_and_ends_without_its_mesos(tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    command = Running(tmp_path, "run", "--format", "json", "--resources", "cpus:2;mem:2048", script)
    command.wait_for_text("worker:0 running")
    supervisor = supervisor_of(command)
    kill_one_daemon(supervisor, "master")
    command.wait_for_text("connected to the Mesos master again")
    kill_one_daemon(supervisor, "agent")
    command.wait_for_text("worker:0 running", times=2)
    supervisor.kill()
    command.result(exit_code=1)
    last = command.log.splitlines()[-1]
    assert last.startswith("dike: The private Mesos has ended")
    assert "the same command starts again from the beginning" in last


@pytest.mark.usefixtures("end_all")
def test_a_service_outlives_its_master_and_ends_without_its_mesos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    options = ("--listen", "127.0.0.1:0", "--state", "sqlite:///service.db", "--resources", "cpus:1;mem:512")
    command = Running(tmp_path, "serve", *options)
    command.wait_for_text("subscribed at")
    supervisor = supervisor_of(command)
    kill_one_daemon(supervisor, "master")
    command.wait_for_text("connected to the Mesos master again")
    supervisor.kill()
    command.result(exit_code=1)
    last = command.log.splitlines()[-1]
    assert last.startswith("dike: The private Mesos has ended")
    assert last.endswith("Start the service again: its jobs resume from their checkpoints.")
