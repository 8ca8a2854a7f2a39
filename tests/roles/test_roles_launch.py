"""How a script runs in its role, apart from TensorFlow."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from dike.profile import Api
from dike.task import VARIABLE, Role, TaskSpec
from tests.roles.roles_stage import DEADLINE_S, SCRIPTS, RolesStage, wait_for

pytestmark = pytest.mark.integration


def one_process(folder: Path, action: str, script: str = "ordinary.py") -> RolesStage:
    return RolesStage(
        Api.GRAPH, SCRIPTS / script, folder, workers=1, alone=True, forked=False, arguments=(action, "--flag")
    )


def test_a_script_finds_itself_as_if_python_ran_it(tmp_path: Path) -> None:
    with one_process(tmp_path, "nothing") as job:
        assert job.chief.wait() == 0
        result = job.chief.result
        assert result["name"] == "__main__"
        assert result["argv"] == [str(SCRIPTS / "ordinary.py"), "nothing", "--flag"]
        assert result["path"] == str(SCRIPTS)
        assert result["data"] == str(SCRIPTS / "data.py")
        assert result["tf_config"] == job.chief.task.tf_config
        # Files called solver.py and executor.py are beside the script and raise when they are imported.
        assert result["modules"] == []
        assert job.chief.text.endswith("at exit\n")


def test_an_exception_is_shown_without_our_frames(tmp_path: Path) -> None:
    with one_process(tmp_path, "fail") as job:
        assert job.chief.wait() == 1
        trace = job.chief.text.partition("Traceback (most recent call last):\n")[2]
        assert trace.splitlines()[0].startswith(f'  File "{SCRIPTS / "ordinary.py"}"')
        assert "dike" not in trace.replace(str(SCRIPTS), "")
        assert "ValueError: the script's own fault" in trace


def test_the_exit_code_is_the_scripts(tmp_path: Path) -> None:
    with one_process(tmp_path / "exit", "exit") as job:
        assert job.chief.wait() == 3
    with one_process(tmp_path / "message", "message") as job:
        assert job.chief.wait() == 1
        assert "that is all" in job.chief.text
    script = tmp_path / "own.py"
    script.write_text("import os, sys\nsys.exit(os.EX_CONFIG)\n")
    with RolesStage(Api.GRAPH, script, tmp_path, workers=1, alone=True, forked=False) as job:
        assert job.chief.wait() == 1
        assert "exit code 78; it counts as 1" in job.chief.text


def test_a_syntax_error_is_the_scripts(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("print('never'\n")
    with RolesStage(Api.GRAPH, script, tmp_path, workers=1, alone=True, forked=False) as job:
        assert job.chief.wait() == 1
        assert "SyntaxError" in job.chief.text


def test_sigterm_ends_a_chief_that_does_not_train(tmp_path: Path) -> None:
    with one_process(tmp_path, "wait") as job:
        wait_for(lambda: "waiting" in job.chief.text, job.chief)
        assert job.kill("worker:0", signal.SIGTERM) == 143


def own_script(folder: Path, text: str) -> RolesStage:
    script = folder / "own.py"
    script.write_text(text)
    return RolesStage(Api.GRAPH, script, folder, workers=1, alone=True, forked=False)


def test_a_crash_of_a_library_shows_the_scripts_line(tmp_path: Path) -> None:
    with own_script(tmp_path, "import ctypes\n\nctypes.string_at(0)\n") as job:
        assert job.chief.wait() == -signal.SIGSEGV
        assert "Fatal Python error: Segmentation fault" in job.chief.text
        assert f'"{tmp_path / "own.py"}", line 3' in job.chief.text


def test_the_scripts_threads_end_before_the_process(tmp_path: Path) -> None:
    text = (
        "import concurrent.futures, sys, threading, time\n"
        "pool = concurrent.futures.ThreadPoolExecutor(1)\n"
        "pool.submit(int)\n"
        "def late():\n    time.sleep(0.2)\n    print('thread ended', flush=True)\n"
        "threading.Thread(target=late).start()\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "sys.exit(3)\n"
    )
    with own_script(tmp_path, text) as job:
        assert job.chief.wait() == 3
        assert "thread ended" in job.chief.text


def test_sigterm_is_the_scripts_when_it_handles_it(tmp_path: Path) -> None:
    text = (
        "import signal, sys, time\n"
        "def end(number, frame):\n    time.sleep(0.2)\n    print('saved', flush=True)\n    sys.exit(4)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "print('waiting', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with own_script(tmp_path, text) as job:
        wait_for(lambda: "waiting" in job.chief.text, job.chief)
        assert job.kill("worker:0", signal.SIGTERM) == 4
        assert "saved" in job.chief.text


def test_a_process_dies_with_its_parent(tmp_path: Path) -> None:
    task = TaskSpec("test", Role.WORKER, 0, {"worker": ["127.0.0.1:1"]}, Api.GRAPH)
    start = (
        "import subprocess, sys; process = subprocess.Popen([sys.executable, '-P', '-m', 'dike.launch', "
        f"{str(SCRIPTS / 'ordinary.py')!r}, 'wait'], stdin=subprocess.PIPE); print(process.pid, flush=True); "
        "process.wait()"
    )
    environment = {**os.environ, VARIABLE: task.dumps()}
    parent = subprocess.Popen([sys.executable, "-c", start], stdout=subprocess.PIPE, env=environment, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    for line in parent.stdout:
        if line == "waiting\n":
            break
    parent.kill()
    parent.wait()
    assert child.wait(DEADLINE_S) in (None, -signal.SIGKILL)
    assert not child.is_running()


def test_without_a_task_nothing_runs() -> None:
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "dike.launch", str(SCRIPTS / "ordinary.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert ended.returncode == 2
    assert "dike run" in ended.stderr
    assert "RESULT" not in ended.stdout
