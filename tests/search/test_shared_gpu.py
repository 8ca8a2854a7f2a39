"""Several trials on one GPU (`--slots-per-gpu`): their memory, and a search on a real Mesos."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dike.exceptions import BadInputError
from dike.trial.launch import limit_tensorflow, limit_torch
from executor.environment import CONTEXT_BYTES, gpu_memory_variables
from framework.search.limits import MAX_SLOTS_PER_GPU, check_options, parse_slots_per_gpu
from framework.search.records import SearchOptions
from tests.running import run_dike

GIB = 2**30
MEETING = """
import dike, os, pathlib, time
here = pathlib.Path("{folder}")
number = dike.params()["number"]
(here / f"{{number}}-{{os.environ['CUDA_VISIBLE_DEVICES']}}").touch()
while len(list(here.glob("*-0"))) < 2:
    time.sleep(0.05)
for step in range(3):
    dike.report(step + 1, loss=number / (step + 1))
"""


@pytest.mark.mesos
def test_two_trials_are_on_one_gpu_at_the_same_time(tmp_path: Path) -> None:
    met = tmp_path / "met"
    met.mkdir()
    (tmp_path / "train.py").write_text(MEETING.format(folder=met))
    options = ("--resources", "cpus:2;mem:1024;gpus:1", "--slot-mem", "256", "--format", "json")
    done = run_dike("tune", "train.py", "--param", "number=1,2", "--slots-per-gpu", "2", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [trial["state"] for trial in result["trials"]] == ["finished", "finished"]
    assert sorted(path.name for path in met.iterdir()) == ["1-0", "2-0"]


@pytest.mark.parametrize(("text", "expected"), [("1", 1), (" 4 ", 4), ("auto", None)])
def test_a_number_or_auto(text: str, expected: int | None) -> None:
    assert parse_slots_per_gpu(text) == expected


@pytest.mark.parametrize("text", ["", "0", "-1", "0.5", "2x", "automatic", str(MAX_SLOTS_PER_GPU + 1)])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(BadInputError, match=r"--slots-per-gpu is '.*'; write a number from 1 to 16, or auto\."):
        parse_slots_per_gpu(text)


@pytest.mark.integration
def test_slots_with_several_gpus_share_none(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    done = run_dike("tune", "train.py", "--param", "x=1", "--slots-per-gpu=2", "--slot-gpus=2", cwd=tmp_path)
    assert done.returncode == 2
    assert "--slots-per-gpu 2 shares one GPU between slots, and --slot-gpus is 2" in done.stderr


def test_a_budget_of_gpus_needs_a_number() -> None:
    options = SearchOptions(budget="1gpuh", slots_per_gpu="auto")
    with pytest.raises(BadInputError, match="write --slots-per-gpu N instead of auto"):
        check_options(options)
    check_options(dataclasses.replace(options, budget="1cpuh"))
    check_options(dataclasses.replace(options, slots_per_gpu="3"))


@pytest.mark.parametrize("slots", [2, 3, 16])
@pytest.mark.parametrize("total", [4 * GIB, 80 * GIB])
def test_the_shares_of_all_slots_fit_into_the_memory(total: int, slots: int) -> None:
    variables = gpu_memory_variables(total, slots)
    own = int(variables["DIKE_GPU_MEMORY_MIB"]) << 20
    context = min(CONTEXT_BYTES, total // slots // 2)
    assert 0.97 * total <= slots * (own + context) <= total
    assert float(variables["XLA_PYTHON_CLIENT_MEM_FRACTION"]) == pytest.approx(own / total, abs=1e-3)
    assert variables["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == f"0={total // slots >> 20}M"


def test_a_slot_that_shares_nothing_has_no_limit() -> None:
    assert gpu_memory_variables(80 * GIB, 1) == gpu_memory_variables(None, 4) == {}


def test_tensorflow_is_limited_and_scripts_may_ask_for_growth() -> None:
    import tensorflow as tf

    limits = []
    experimental = SimpleNamespace(set_memory_growth=tf.config.experimental.set_memory_growth)
    config = SimpleNamespace(
        list_physical_devices=lambda kind: [f"{kind}:0"],
        LogicalDeviceConfiguration=tf.config.LogicalDeviceConfiguration,
        set_logical_device_configuration=lambda gpu, devices: limits.append((gpu, devices)),
        experimental=experimental,
    )
    limit_tensorflow(3584, SimpleNamespace(config=config))
    [(gpu, [device])] = limits
    assert (gpu, device.memory_limit) == ("GPU:0", 3584)
    experimental.set_memory_growth("GPU:0", enable=True)  # the real one refuses


def test_tensorflow_without_a_gpu_is_left_alone() -> None:
    import tensorflow as tf

    before = tf.config.experimental.set_memory_growth
    config = SimpleNamespace(list_physical_devices=lambda kind: [], experimental=tf.config.experimental)
    limit_tensorflow(3584, SimpleNamespace(config=config))
    assert tf.config.experimental.set_memory_growth is before


def test_pytorch_is_limited_to_a_fraction() -> None:
    limits: list[Any] = []
    cuda = SimpleNamespace(
        device_count=lambda: 1,
        get_device_properties=lambda device: SimpleNamespace(total_memory=16 * GIB),
        set_per_process_memory_fraction=lambda fraction, device: limits.append((fraction, device)),
    )
    limit_torch(4096, SimpleNamespace(cuda=cuda))
    assert limits == [(0.25, 0)]
