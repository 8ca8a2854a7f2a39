"""The zygote gives every trial a process of its own, a child of the executor, with nothing of the last one in it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from executor.zygote import ForkRequest
from tests.trial.slot_stage import SlotStage, slot, trial
from tests.waiting import is_alive, wait_until

pytestmark = pytest.mark.integration

LOOK = """
import json, os, random, sys
import numpy
import dike
descriptors = {fd: os.readlink(f"/proc/self/fd/{fd}").partition(":")[0] for fd in sorted(os.listdir("/proc/self/fd"))
               if os.path.lexists(f"/proc/self/fd/{fd}")}
seen = {
    "pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0), "cwd": os.getcwd(), "argv": sys.argv,
    "name": __name__, "file": __file__, "path": sys.path[0], "params": dike.params(),
    "set": os.environ.get("A_VARIABLE"), "unset": os.environ.get("PYTHONUNBUFFERED"),
    "descriptors": descriptors, "marked": getattr(numpy, "marked", False),
    "random": [random.random(), numpy.random.rand()], "tensorflow": "tensorflow" in sys.modules,
}
numpy.marked = True
print("to stderr", file=sys.stderr)
print(json.dumps(seen))
dike.report(1, loss=0.5)
"""

ARROW = """
import dike, pyarrow
dike.report(1, loss=float(sum(pyarrow.array(range(100_000)).to_pylist())))
"""
THREADED = """
import ctypes, threading
begun = threading.Event()
def work():
    ctypes.CDLL(None).prctl(15, b"worker", 0, 0, 0)  # PR_SET_NAME
    begun.set()
    threading.Event().wait()
threading.Thread(target=work, daemon=True).start()
begun.wait()
"""


def test_what_a_trial_finds(plain_slot: SlotStage, tmp_path: Path) -> None:
    script = plain_slot.write("look.py", LOOK)
    spec = trial(tmp_path, parameters={"lr": 0.1})
    environment = {"A_VARIABLE": "set", "PYTHONUNBUFFERED": None}
    runs = [plain_slot.run(script, spec, ["--flag", "a b"], environment=environment, folder=tmp_path) for _ in "12"]
    assert [run.code for run in runs] == [0, 0], runs[0].output
    seen, again = (json.loads(run.output.splitlines()[-1]) for run in runs)
    assert "to stderr" in runs[0].output
    assert seen["parent"] == os.getpid()
    assert seen["session"] == seen["pid"] == runs[0].pid
    assert seen["cwd"] == str(tmp_path)
    assert seen["argv"] == [str(script), "--flag", "a b"]
    assert (seen["name"], seen["file"], seen["path"]) == ("__main__", str(script), str(script.parent))
    assert seen["params"] == {"lr": 0.1}
    assert (seen["set"], seen["unset"]) == ("set", None)
    kinds = seen["descriptors"]
    assert {kinds["3"], kinds["4"]} == {"pipe"}
    # Neither the zygote's socket nor a second copy of anything is left.
    assert sorted(kinds.values()).count("socket") == 0
    assert [fd for fd, kind in kinds.items() if kind == "pipe"] == ["3", "4"]
    assert not seen["marked"]
    assert not again["marked"]
    assert not seen["tensorflow"]
    # What a script does not seed itself is seeded by its trial: runs of one draw alike.
    assert seen["random"] == again["random"]
    assert runs[0].reports[0] == {"type": "started"}


def test_the_thread_of_a_memory_allocator_is_no_hindrance(plain_slot: SlotStage, tmp_path: Path) -> None:
    """pyarrow's jemalloc starts a thread on import, which pandas triggers, and so does Keras."""
    assert plain_slot.zygote is not None
    assert psutil.Process(plain_slot.zygote.pid).num_threads() == 2
    script = plain_slot.write("arrow.py", ARROW)
    run = plain_slot.run(script, trial(tmp_path))
    assert run.code == 0, run.output
    assert run.reports[-1]["loss"] == 4_999_950_000


def test_a_fork_has_the_threads_that_it_asks_for(plain_slot: SlotStage, tmp_path: Path) -> None:
    script = plain_slot.write(
        "pools.py",
        "import dike, numpy, threadpoolctl\n"
        "[pool] = [pool for pool in threadpoolctl.threadpool_info() if pool['user_api'] == 'blas']\n"
        "dike.report(1, loss=pool['num_threads'])\n",
    )
    for environment, threads in (
        ({}, 1),
        ({"OMP_NUM_THREADS": "2"}, 2),
        ({"OMP_NUM_THREADS": "3", "OPENBLAS_NUM_THREADS": "2"}, 2),
        ({"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "1"}, 1),
    ):
        run = plain_slot.run(script, trial(tmp_path), environment=environment)
        assert run.code == 0, run.output
        assert run.reports[-1]["loss"] == threads, environment


def test_with_any_other_thread_it_is_not_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "threaded.py").write_text(THREADED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with slot(tmp_path, ["threaded"]) as own:
        script = own.write("look.py", "import sys, dike; dike.report(1, loss=float('threaded' in sys.modules))")
        assert own.run(script, trial(tmp_path)).reports[-1]["loss"] == 0.0
    assert "threaded, so every process imports them itself: threads run after the imports: worker" in caplog.messages


def test_it_says_what_it_could_not_import(plain_slot: SlotStage) -> None:
    assert "no_such_module is not preloaded" in (plain_slot.folder / "zygote.out").read_text()


def test_a_folder_that_is_gone_fails_the_trial_alone(plain_slot: SlotStage, tmp_path: Path) -> None:
    script = plain_slot.write("ok.py", "import dike; dike.report(1, loss=0.5)")
    run = plain_slot.run(script, trial(tmp_path), folder=tmp_path / "gone")
    assert run.code == 1
    assert "FileNotFoundError" in run.output
    assert plain_slot.run(script, trial(tmp_path)).code == 0


def test_a_zygote_that_dies_takes_no_trial_along(plain_slot: SlotStage, tmp_path: Path) -> None:
    script = plain_slot.write(
        "wait.py", "import dike, os, time\ndike.report(1, loss=0.5)\nwhile not os.path.exists('go'): time.sleep(0.01)\n"
    )
    run = plain_slot.start(script, trial(tmp_path), folder=tmp_path)
    run.read(until=lambda report: report["type"] == "progress")
    zygote = plain_slot.zygote
    assert zygote is not None
    pid = zygote.pid
    zygote.kill()
    wait_until(lambda: zygote.poll() or zygote.pid != pid, "another zygote")
    assert is_alive(run.pid)
    (tmp_path / "go").touch()
    run.read()
    assert run.code == 0
    wait_until(lambda: zygote.poll() or zygote.ready, "the next zygote")


EXECUTOR = """
import sys
from pathlib import Path
from tests.trial.slot_stage import slot, trial
folder = Path(sys.argv[1])
with slot(folder) as own:
    script = own.write("sleep.py", "import dike, time; dike.report(1, loss=0.5); time.sleep(600)")
    run = own.start(script, trial(folder))
    run.read(until=lambda report: report["type"] == "progress")
    print(own.zygote.pid, run.pid, flush=True)
    run.read()
"""


def test_zygote_and_trial_die_with_the_executor(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", EXECUTOR, str(tmp_path)], cwd=root, stdout=subprocess.PIPE, text=True
    ) as executor:
        assert executor.stdout is not None
        pids = [int(pid) for pid in executor.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(is_alive, pids))
        executor.send_signal(signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, pids)), "the end of zygote and trial")


def test_requests_travel_as_the_zygote_reads_them() -> None:
    request = json.loads(ForkRequest(Path("/a.py"), ["--x"], Path("/"), {"A": "1"}).encode())
    assert request == {"argv": ["/a.py", "--x"], "cwd": "/", "environment": {"A": "1"}, "parent": os.getpid()}
