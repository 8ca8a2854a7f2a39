"""A run's figures, against what the kernel and NVIDIA's management library say."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import psutil
import pynvml
import pytest

from executor.monitor import GPU_RELEASE_THRESHOLD_BYTES, Gpus, RunMonitor
from executor.trial_messages import Usage
from framework.embedded.machine import gpu_models
from tests.waiting import wait_until

pytestmark = pytest.mark.integration

MIB = 1 << 20
ALLOCATE = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
assert cuda.cuInit(0) == 0
assert cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
assert cuda.cuCtxSetCurrent(context) == 0
assert cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(512 << 20)) == 0
print("held", flush=True)
sys.stdin.read()
"""


class FakeGpus(Gpus):
    """Two GPUs, at the edge of the monitor: what the library would say of them."""

    def __init__(self) -> None:
        self.used = 0
        self.processes: dict[int, int] = {}

    def __bool__(self) -> bool:
        return True

    def used_bytes(self) -> int | None:
        return self.used

    def bytes_by_process(self) -> dict[int, int]:
        return self.processes

    def utilisation(self) -> float | None:
        return 0.5


@pytest.fixture
def child() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(program: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


Start = Callable[[str], "subprocess.Popen[str]"]


def cpu_s(processes: Sequence[psutil.Process]) -> float:
    return float(sum(sum(process.cpu_times()[:2]) for process in processes))


def test_memory_and_cpus_are_the_sums_over_the_processes(child: Start) -> None:
    hog = child("b = bytes(1) * (64 << 20); print('up', flush=True)\nwhile True: pass")
    idle = child("import sys; print('up', flush=True); sys.stdin.read()")
    processes = [psutil.Process(hog.pid), psutil.Process(idle.pid)]
    monitor = RunMonitor(Gpus(()))
    # Both before and after each look: it does not know either when it is held up itself.
    times = [(cpu_s(processes), time.monotonic())]
    monitor.sample(processes)
    times.append((cpu_s(processes), time.monotonic()))
    wait_until(lambda: cpu_s(processes) - times[1][0] >= 0.2, "CPU time of theirs")
    times.append((cpu_s(processes), time.monotonic()))
    monitor.sample(processes)
    times.append((cpu_s(processes), time.monotonic()))
    usage = monitor.latest
    assert usage.rss_bytes == pytest.approx(sum(process.memory_info().rss for process in processes), rel=0.05)
    assert usage.rss_bytes is not None
    assert usage.rss_bytes > 64 * MIB
    assert usage.cpu is not None
    (first_s, first), (second_s, second), (third_s, third), (fourth_s, fourth) = times
    assert (third_s - second_s) / (fourth - first) <= usage.cpu <= (fourth_s - first_s) / (third - second)
    assert (usage.gpu_mem_bytes, usage.gpu_utilisation) == (None, None)
    assert monitor.gpus_free()


def test_the_peak_outlives_the_processes(child: Start) -> None:
    process = child("print('up', flush=True); import time; time.sleep(600)")
    monitor = RunMonitor(Gpus(()))
    monitor.sample([psutil.Process(process.pid)])
    seen, most = monitor.latest.rss_bytes, monitor.latest.cpu
    assert seen is not None
    assert most is not None
    handle = psutil.Process(process.pid)
    process.kill()
    process.wait()
    monitor.sample([handle])
    assert monitor.latest.rss_bytes == 0
    assert monitor.peak.rss_bytes == seen
    # It was there before it was watched, so its CPU time may be that of any number of CPUs.
    monitor.record_exit(seen + MIB, most + 1)
    assert (monitor.latest, monitor.peak) == (Usage(), Usage(seen + MIB, most + 1))


def test_gpu_memory_is_that_of_the_processes_that_the_library_knows(child: Start) -> None:
    process = child("print('up', flush=True); import time; time.sleep(600)")
    gpus = FakeGpus()
    gpus.used = 100 * MIB
    monitor = RunMonitor(gpus)
    gpus.used, gpus.processes = 900 * MIB, {process.pid: 500 * MIB, 1: 300 * MIB}
    monitor.sample([psutil.Process(process.pid)])
    assert (monitor.latest.gpu_mem_bytes, monitor.latest.gpu_utilisation) == (500 * MIB, 0.5)
    assert monitor.is_gpu_busy
    assert not monitor.gpus_free()
    # Another's memory does not matter.
    gpus.used, gpus.processes = 5000 * MIB, {1: 4900 * MIB}
    assert monitor.gpus_free()


def test_gpu_memory_is_what_came_since_the_run_began_where_processes_have_other_ids(child: Start) -> None:
    process = child("print('up', flush=True); import time; time.sleep(600)")
    gpus = FakeGpus()
    gpus.used = 100 * MIB
    monitor = RunMonitor(gpus)
    gpus.used = 900 * MIB
    monitor.sample([psutil.Process(process.pid)])
    assert monitor.latest.gpu_mem_bytes == 800 * MIB
    assert not monitor.gpus_free()
    gpus.used = 100 * MIB + GPU_RELEASE_THRESHOLD_BYTES
    assert monitor.gpus_free()


def test_what_others_do_on_a_shared_gpu_does_not_count(child: Start) -> None:
    process = child("print('up', flush=True); import time; time.sleep(600)")
    gpus = FakeGpus()
    monitor = RunMonitor(gpus, shares_gpu=True)
    gpus.used = 900 * MIB
    monitor.sample([psutil.Process(process.pid)])
    assert monitor.latest.gpu_mem_bytes is None
    assert monitor.gpus_free()
    assert not monitor.is_gpu_busy
    assert not monitor.knows_gpu_bytes
    assert RunMonitor(gpus).is_gpu_busy is False  # before the first sample
    gpus.processes = {process.pid: 500 * MIB, 1: 300 * MIB}
    monitor.sample([psutil.Process(process.pid)])
    assert monitor.latest.gpu_mem_bytes == 500 * MIB
    assert monitor.knows_gpu_bytes
    assert not monitor.gpus_free()


@pytest.mark.skipif(bool(gpu_models()), reason="a GPU is there")
def test_without_a_driver_nothing_is_watched() -> None:
    for devices in (None, (), (0,)):
        gpus = Gpus(devices)
        assert not gpus
        assert gpus.utilisation() is None
        assert RunMonitor(gpus).gpus_free()


@pytest.mark.gpu
@pytest.mark.skipif(not gpu_models(), reason="NVIDIA's management library finds no GPU")
def test_the_figures_are_nvmls_own(child: Start) -> None:
    gpus = Gpus((0,))
    monitor = RunMonitor(gpus)
    process = child(ALLOCATE)
    monitor.sample([psutil.Process(process.pid)])
    held = monitor.latest.gpu_mem_bytes
    assert held is not None
    assert 512 * MIB <= held < 2048 * MIB
    used = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used
    assert gpus.used_bytes() == pytest.approx(used, rel=0.05)
    assert held <= used
    assert monitor.latest.gpu_utilisation is not None
    assert 0 <= monitor.latest.gpu_utilisation <= 1
    assert not monitor.gpus_free()
    process.kill()
    process.wait()
    wait_until(monitor.gpus_free, "a free GPU")
    assert monitor.peak.gpu_mem_bytes == held
