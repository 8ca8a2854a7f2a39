"""SIGTERM of a process, and of those that it forks."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.integration

POOLS = """
import concurrent.futures
import multiprocessing
import os
import signal
import sys
import threading
import time

from dike import process


def square(number):
    return number * number




if __name__ == "__main__":
    process.termination.install()
    BODY
    watcher = next(thread for thread in threading.enumerate() if thread.name == "dike-sigterm")
    watcher.join(0.3)  # ends this process if it has taken SIGTERM for its own
    print("done", process.termination.requested)
"""
POOL = """
    with multiprocessing.get_context('KIND').Pool(1) as pool:
        print(pool.map(square, [2, 3]))
        pool.apply_async(time.sleep, [60])  # which SIGTERM ends"""
PROCESS = """
    child = multiprocessing.get_context('KIND').Process(target=time.sleep, args=[60])
    child.start()
    child.terminate()
    child.join()
    print([4, 9] if child.exitcode == -signal.SIGTERM else child.exitcode)"""
KINDS = {
    **{f"{kind} process": PROCESS.replace("KIND", kind) for kind in ("fork", "spawn", "forkserver")},
    "fork": POOL.replace("KIND", "fork"),
    "spawn": POOL.replace("KIND", "spawn"),
    "forkserver": POOL.replace("KIND", "forkserver"),
    "futures": "with concurrent.futures.ProcessPoolExecutor(2) as pool: print(list(pool.map(square, [2, 3])))",
    "joblib": "import joblib; print(joblib.Parallel(2, 'multiprocessing')(map(joblib.delayed(square), [2, 3])))",
    "loky": "import joblib; print(joblib.Parallel(1)(map(joblib.delayed(square), [2, 3])))",
    "torch": """
    from torch.utils.data import DataLoader
    print([square(int(number)) for number in DataLoader([2, 3], num_workers=2, timeout=50)])""",
    "preexec": "import subprocess; print(subprocess.run(['true'], preexec_fn=lambda: None).returncode or [4, 9])",
    "at once": """
    for _ in range(200):
        child = os.fork()
        if not child:
            os._exit(0)
        os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)
    print([4, 9])""",
    "from a thread": """
    def fork():
        child = os.fork()
        if not child:
            signal.pause()
        os.kill(child, signal.SIGTERM)
        print([4, 9] if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM else "other end")
    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()""",
    "own handler": """
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *of: before(*of))
    child = os.fork()
    if not child:
        while True:
            signal.pause()
    os.kill(child, signal.SIGTERM)
    print([4, 9] if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM else "other end")""",
}


@pytest.mark.parametrize("kind", KINDS)
def test_sigterm_of_a_child_does_not_end_its_parent(tmp_path_factory: pytest.TempPathFactory, kind: str) -> None:
    if kind in ("joblib", "loky", "torch"):
        pytest.importorskip(kind.replace("loky", "joblib"))
    script = tmp_path_factory.mktemp("pool") / "pool.py"
    script.write_text(POOLS.replace("BODY", textwrap.dedent(KINDS[kind]).strip().replace("\n", "\n    ")))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "[4, 9]\ndone False\n"), done.stderr


def test_its_own_sigterm_still_ends_the_parent(tmp_path_factory: pytest.TempPathFactory) -> None:
    script = tmp_path_factory.mktemp("pool") / "pool.py"
    body = f"{KINDS['fork']}\n    os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)"
    script.write_text(POOLS.replace("BODY", body))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr


def test_threads_that_run_are_told_from_those_that_wait() -> None:
    """In a process of its own, where nothing else has threads."""
    program = """
import threading
import time

from dike.process import has_busy_threads

over = threading.Event()


def spin():
    while not over.is_set():
        pass


threading.Thread(target=over.wait).start()
while has_busy_threads():  # those that start and end do
    time.sleep(0.01)
spinning = threading.Thread(target=spin)
spinning.start()
time.sleep(0.2)
print(has_busy_threads())
over.set()
while has_busy_threads():
    time.sleep(0.01)
print("none")
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)

    assert result.stdout.split() == ["True", "none"]
