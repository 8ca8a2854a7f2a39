"""A search on a real GPU: one trial at a time, and its memory is free, as NVML reports it, before the next one starts.

Its trials have the same losses however they are suspended, and whatever is killed leaves nothing on the GPU.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import defaultdict
from pathlib import Path

import psutil
import pynvml
import pytest

from executor.cuda_checkpoint import unavailable_reason
from executor.monitor import GPU_RELEASE_THRESHOLD_BYTES
from framework.embedded.machine import gpu_models
from tests.running import Running, run_dike
from tests.task_processes import SLOT
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.mesos,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not gpu_models(), reason="NVIDIA's management library finds no GPU"),
]

MIB = 1 << 20
SCRIPT = Path(__file__).parent / "scripts" / "gpu.py"
TORCH_TRIAL = Path(__file__).parents[2] / "examples" / "torch_trial.py"
HELD_MIB = (256, 512, 1024, 2048)
SLOT_MIB = {"checkpoint": 512, "memory": 8192}
"""With room on the host for what all trials hold on the GPU."""
STEPS = 80
"""Four seconds: every trial is suspended at least once, and each of its runs is looked at."""


def dike(folder: Path, *arguments: str | Path) -> str:
    done = run_dike(*arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def used_bytes() -> int:
    pynvml.nvmlInit()
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)
    finally:
        pynvml.nvmlShutdown()


in_memory = pytest.mark.skipif(bool(unavailable_reason()), reason=unavailable_reason() or "the driver can do it")


@pytest.mark.parametrize("suspend", ["checkpoint", pytest.param("memory", marks=in_memory)])
def test_trials_share_a_gpu_one_after_the_other(tmp_path: Path, suspend: str) -> None:
    at_first = used_bytes()
    diary = tmp_path / "diary.jsonl"
    result = json.loads(
        dike(
            tmp_path,
            *("tune", SCRIPT, "--param", f"mib={','.join(map(str, HELD_MIB))}", "--name", "gpu", "--format", "json"),
            *("--policy", "rr", "--quantum", "2", "--resources", f"cpus:2;mem:{SLOT_MIB[suspend]};gpus:1"),
            *("--slot-mem", str(SLOT_MIB[suspend]), "--suspend", suspend),
            *("--", "--steps", str(STEPS), "--diary", diary),
        )
    )
    assert result["complete"]
    assert [trial["step"] for trial in result["trials"]] == [STEPS] * len(HELD_MIB)
    slices = json.loads(dike(tmp_path, "timeline", "gpu", "--format", "json"))["slices"]
    assert len(slices) > len(HELD_MIB)
    assert all(later["start_s"] >= earlier["end_s"] for earlier, later in itertools.pairwise(slices))

    runs = [json.loads(line) for line in diary.read_text().splitlines()]
    if suspend == "memory":
        # The script runs once for each trial; what the trial before held was on the host by then.
        assert len(runs) == len(HELD_MIB)
        assert any(one["process"] == "continued" for one in slices)
    else:
        assert len(runs) > len(HELD_MIB)
    assert all(run["before"] <= at_first + GPU_RELEASE_THRESHOLD_BYTES for run in runs)
    assert used_bytes() <= at_first + GPU_RELEASE_THRESHOLD_BYTES

    held = defaultdict(list)
    for run in runs:
        held[run["mib"]].append(run["held"])
    for trial in result["trials"]:
        mib = trial["parameters"]["mib"]
        peak = max(one["gpu_mem_bytes"] or 0 for one in slices if one["trial"] == trial["number"])
        assert peak >= mib * MIB
        assert peak == pytest.approx(max(held[mib]), rel=0.05)
    utilisations = [one["gpu_utilisation"] for one in slices if one["gpu_utilisation"] is not None]
    assert utilisations
    assert all(0 <= utilisation <= 1 for utilisation in utilisations)


@in_memory
def test_pytorch_trials_train_the_same_however_they_are_suspended(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    losses = {}
    for name, policy, suspend in (
        ("alone", "fifo", "checkpoint"),
        ("anew", "rr", "checkpoint"),
        ("memory", "rr", "memory"),
        ("sooner", "rr", "auto"),
    ):
        text = dike(
            tmp_path,
            *("tune", TORCH_TRIAL, "--param", "lr=0.05,0.02", "--name", name, "--policy", policy, "--quantum", "2"),
            *("--slots", "1", "--suspend", suspend, "--format", "json", "--", "--epochs", "200"),
        )
        figures = ("step", "value", "best_value", "best_step")
        losses[name] = [[trial[figure] for figure in figures] for trial in json.loads(text)["trials"]]
        slices = json.loads(dike(tmp_path, "timeline", name, "--format", "json"))["slices"]
        assert (len(slices) > 2) == (policy == "rr")
        if name == "memory":
            assert {one["process"] for one in slices} == {"new", "continued"}
    assert all(each == losses["alone"] for each in losses.values())


def standing(ancestor: int) -> list[psutil.Process]:
    """Paused processes of trials."""
    found = []
    for process in psutil.Process(ancestor).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name().startswith("dike trial") and process.status() == psutil.STATUS_STOPPED:
                found.append(process)
    return found


@in_memory
@pytest.mark.parametrize("what", ["trial", "slot"])
def test_kills_while_trials_are_paused_leave_nothing_on_the_gpu(tmp_path: Path, what: str) -> None:
    at_first = used_bytes()
    running = Running(
        tmp_path,
        *("tune", SCRIPT, "--param", "mib=256,512,1024", "--name", "gpu", "--format", "json", "--slots", "1"),
        *("--policy", "rr", "--quantum", "2", "--suspend", "memory"),
        *("--", "--steps", str(STEPS), "--diary", tmp_path / "diary.jsonl"),
    )

    stopped = running.wait_for(
        lambda: found if len(found := standing(running.process.pid)) >= 2 else None, "two paused trials"
    )
    supervisor = stopped[0].parent()
    assert supervisor is not None
    slot = supervisor.parent()
    assert slot is not None
    assert slot.name() == SLOT
    (stopped[0] if what == "trial" else slot).kill()
    result = running.result()
    assert result["complete"]
    assert [trial["step"] for trial in result["trials"]] == [STEPS] * 3
    assert not any(one.is_running() for one in stopped)
    wait_until(lambda: used_bytes() <= at_first + GPU_RELEASE_THRESHOLD_BYTES, "the GPU to be free")
