"""How the supervisor handles processes that end or stop without having been asked to."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from dike.exceptions import DikeError
from framework.embedded import control as supervisor_control
from framework.embedded import settings
from framework.embedded.control import SupervisorControl
from framework.embedded.supervisor import MAX_RESTARTS
from tests.waiting import is_alive, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

SLEEPS = "import time; print('here', flush=True); time.sleep(7105)"


class Daemons:
    """Processes of a supervisor that sleep."""

    def __init__(self, folder: Path) -> None:
        files = settings.ClusterFiles(folder)
        command = settings.supervisor_command(files, [])
        self.folder = folder
        self.control = SupervisorControl(command, folder, files.log("supervisor"), [])

    def start(self, name: str, program: str = SLEEPS) -> psutil.Process:
        pid = self.control.start(name, [sys.executable, "-SEsP", "-c", program], {}, self.folder / f"{name}.log")
        return psutil.Process(pid)

    def successor(self, name: str, of: psutil.Process) -> psutil.Process:
        """The process that has taken another's place."""

        def look() -> psutil.Process | None:
            pid = self.control.running_pid(name)
            return psutil.Process(pid) if pid != of.pid and not self.control.has_ended(name) else None

        return wait_until(look, f"another {name}")


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Daemons]:
    made = Daemons(tmp_path)
    yield made
    made.control.stop()


def test_only_what_is_kept_is_started_again(daemons: Daemons) -> None:
    kept, loose = daemons.start("kept"), daemons.start("loose")
    daemons.control.keep("kept")
    log = daemons.folder / "kept.log"
    wait_until(lambda: log.exists() and "here" in log.read_text(), "its output")
    loose.kill()
    kept.kill()
    assert is_alive(daemons.successor("kept", kept))
    wait_until(lambda: daemons.control.has_ended("loose"), "the end of the other")
    assert daemons.control.given_up() == {}
    wait_until(lambda: log.read_text().count("here") == 2, "the output of both")


def test_what_the_owner_ends_stays_so(daemons: Daemons) -> None:
    kept, other = daemons.start("kept"), daemons.start("other")
    for name in ("kept", "other"):
        daemons.control.keep(name)
    daemons.control.signal("kept", signal.SIGKILL)
    wait_until(lambda: daemons.control.has_ended("kept"), "its end")
    # What comes after it has been looked after, and so would it have been.
    other.kill()
    daemons.successor("other", other)
    assert daemons.control.running_pid("kept") == kept.pid
    assert daemons.control.has_ended("kept")
    assert daemons.control.given_up() == {}


def test_what_ends_again_and_again_is_given_up(daemons: Daemons) -> None:
    daemons.start("steady")
    daemons.control.keep("steady")
    daemons.start("hopeless", "print('here', flush=True); raise SystemExit(3)")
    daemons.control.keep("hopeless")
    assert wait_until(daemons.control.given_up, "a loss") == {"hopeless": 3}
    assert (daemons.folder / "hopeless.log").read_text().count("here") == 1 + MAX_RESTARTS
    # A new start resets the number of restarts.
    again = daemons.start("hopeless")
    daemons.control.keep("hopeless")
    assert daemons.control.given_up() == {}
    again.kill()
    assert is_alive(daemons.successor("hopeless", again))


def test_a_program_that_is_gone_is_given_up(daemons: Daemons, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text(f"#!{sys.executable} -SEsP\n{SLEEPS}\n")
    program.chmod(0o700)
    pid = daemons.control.start("gone", [str(program)], {}, tmp_path / "gone.log")
    daemons.control.keep("gone")
    program.unlink()
    os.kill(pid, signal.SIGKILL)
    assert wait_until(daemons.control.given_up, "a loss") == {"gone": 1}
    lines = (tmp_path / "supervisor.log").read_text().splitlines()
    assert any(line.startswith(f"{program} could not be restarted: ") for line in lines), lines


def test_stopped_daemons_are_replaced_and_continued_ones_are_not(daemons: Daemons) -> None:
    still, paused = daemons.start("still"), daemons.start("paused")
    for name in ("still", "paused"):
        daemons.control.keep(name)
    paused.suspend()
    paused.resume()
    still.suspend()
    assert is_alive(daemons.successor("still", still))
    assert not is_alive(still)
    assert daemons.control.running_pid("paused") == paused.pid
    assert is_alive(paused)


def test_daemons_that_the_owner_stops_stay_stopped_until_continued(daemons: Daemons) -> None:
    paused, still = daemons.start("paused"), daemons.start("still")
    for name in ("paused", "still"):
        daemons.control.keep(name)
    daemons.control.signal("paused", signal.SIGSTOP)
    still.suspend()
    # Stopped later, and replaced already.
    daemons.successor("still", still)
    assert daemons.control.running_pid("paused") == paused.pid
    daemons.control.signal("paused", signal.SIGCONT)
    wait_until(lambda: paused.status() != psutil.STATUS_STOPPED, "it continues")
    paused.kill()
    assert is_alive(daemons.successor("paused", paused))


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_control, "RESUME_TIMEOUT_S", 0.2)


@pytest.mark.usefixtures("hasty")
def test_a_stopped_supervisor_is_continued(daemons: Daemons) -> None:
    process = daemons.start("sleeps")
    psutil.Process(daemons.control.pid).suspend()
    assert not daemons.control.has_ended("sleeps")
    assert daemons.control.running_pid("sleeps") == process.pid


@pytest.mark.parametrize("ending", [lambda process: process.suspend(), lambda process: process.kill()])
def test_a_dead_or_stopped_supervisor_can_be_ended(daemons: Daemons, ending: Callable[[psutil.Process], None]) -> None:
    supervisor = psutil.Process(daemons.control.pid)
    ending(supervisor)
    daemons.control.stop()
    assert not is_alive(supervisor)
    with pytest.raises(DikeError, match="not running any more"):
        daemons.control.given_up()
