"""Workers that share batches compute what one process computes, or say why they cannot."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dike import process
from dike.own_distribution import LOCALHOST, free_ports
from dike.profile import Api
from dike.task import Role
from tests.roles.roles_stage import DEADLINE_S, SCRIPTS, RolesStage
from tests.waiting import wait_until

pytestmark = pytest.mark.tensorflow

SCRIPT, FAILURES = SCRIPTS / "synchronous_cases.py", SCRIPTS / "synchronous_failures.py"
WORKERS = 2
"""Their parts of a batch of 11 differ in size."""
NAMES = re.findall(r"^@case\ndef (\w+)", SCRIPT.read_text(encoding="utf-8"), re.MULTILINE)
TOLERANCE, HALF_TOLERANCE = 1e-5, 2e-3
COLLECTIVES = """
import os, sys
from dike.profile import Api
from dike.roles import gang as module
from dike.task import Role, TaskSpec
module._ON_GPUS = "CPU:0", "ring"
rank = int(sys.argv[1])
gang = module.Gang(TaskSpec("job", Role.WORKER, rank, {Role.WORKER: sys.argv[2:]}, Api.KERAS, gpus=1))
import tensorflow as tf
@tf.function
def twice(value):
    for _ in range(2):
        [value] = gang.sum([value])
    return value
print(float(twice(tf.constant(1.0 + rank))), float(twice(tf.constant(2.0 - rank))))
print(int(gang.sum([tf.constant([3 + rank])])[0][0]), flush=True)
gang.finish()
os._exit(0)
"""


def results(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for line in text.splitlines():
        if line.startswith("RESULT "):
            found |= json.loads(line.removeprefix("RESULT "))
    return found


def of_python(script: Path, *arguments: str) -> dict[str, Any]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, script, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    return results(done.stdout)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """Results of all cases under `python` and on two workers."""
    folder = tmp_path_factory.mktemp("synchronous")
    with RolesStage(Api.KERAS, SCRIPT, folder, 0, WORKERS) as job:
        alone = of_python(SCRIPT)
        codes = [job.processes[f"worker:{index}"].wait() for index in range(WORKERS)]
        assert codes == [0] * WORKERS, job.processes["worker:0"].text[-4000:]
        return alone, results(job.processes["worker:0"].text)


@pytest.mark.parametrize("name", NAMES)
def test_workers_compute_what_python_computes(both: tuple[dict[str, Any], dict[str, Any]], name: str) -> None:
    alone, shared = (each[name] for each in both)
    tolerance = HALF_TOLERANCE if name == "half_precision" else TOLERANCE
    assert shared["history"].keys() == alone["history"].keys()
    for key, values in alone["history"].items():
        np.testing.assert_allclose(shared["history"][key], values, rtol=tolerance, atol=1e-7, err_msg=key)
    # Gradients that are zero but for rounding, such as of a bias before a normalization, are not equal.
    size = max(map(abs, alone["weights"]), default=0.0)
    np.testing.assert_allclose(shared["weights"], alone["weights"], rtol=tolerance, atol=0.01 * tolerance * size + 1e-3)


@pytest.mark.parametrize(
    ("kind", "what"),
    [("dice", "gradient"), ("moving", "variable 'moving/"), ("summed", "gradient"), ("clipping", "gradient")],
)
def test_a_batch_that_cannot_be_split_is_noticed_before_the_first_step(tmp_path: Path, kind: str, what: str) -> None:
    with RolesStage(Api.KERAS, FAILURES, tmp_path, 0, 2, (kind,)) as job:
        chief, other = job.processes["worker:0"], job.processes["worker:1"]
        assert (chief.wait(), other.wait()) == (process.EXIT_CODE_CANNOT_SPLIT,) * 2, chief.text
        [report] = chief.reported("cannot_split")
        assert what in report["why"]
        assert "BATCH" not in chief.text


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("data", "The workers of this job read different batches"),
        ("batches", "The workers of this job do not make the same steps: this one is at sum"),
    ],
)
def test_different_data_end_the_job_with_a_sentence(tmp_path: Path, kind: str, sentence: str) -> None:
    with RolesStage(Api.KERAS, FAILURES, tmp_path, 0, 2, (kind,)) as job:
        workers = [job.processes[f"worker:{index}"] for index in range(2)]
        codes = [worker.wait() for worker in workers]
        # Both notice it in the same step. The one that ends first gives the reason, and may end the other.
        assert 1 in codes
        assert set(codes) <= {1, process.EXIT_CODE_PEER_LOST}
        for worker, code in zip(workers, codes, strict=True):
            assert code != 1 or f"dike: {sentence}" in worker.text
            assert "Traceback" not in worker.text


def test_gangs_on_gpus_sum_by_tensorflows_collectives() -> None:
    """With those of CPUs in place of NCCL."""
    addresses = [f"{LOCALHOST}:{port}" for port in free_ports(2)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", COLLECTIVES, str(rank), *addresses],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        assert [each.communicate(timeout=DEADLINE_S)[0].split() for each in started] == [["6.0", "6.0", "7"]] * 2
        assert [each.returncode for each in started] == [0, 0]
    finally:
        for each in started:
            each.kill()
            each.wait()


@pytest.mark.parametrize(("kind", "code"), [("dies", 9), ("fails", 1)])
def test_all_end_with_a_worker_that_ends(tmp_path: Path, kind: str, code: int) -> None:
    with RolesStage(Api.KERAS, FAILURES, tmp_path, 0, 3, (kind,)) as job:
        codes = [job.processes[f"worker:{index}"].wait() for index in range(3)]
        assert codes == [process.EXIT_CODE_PEER_LOST, code, process.EXIT_CODE_PEER_LOST]
        assert "this worker ends, too" in job.processes["worker:2"].text


def test_a_checkpoint_of_three_workers_is_continued_by_any_number(tmp_path: Path) -> None:
    alone = of_python(FAILURES, "long")
    for attempt, workers in enumerate((3, 1, 2)):
        with RolesStage(
            Api.KERAS,
            FAILURES,
            tmp_path,
            0,
            workers,
            ("long",),
            attempt=attempt,
            environment={"DIKE_SAVE_TIMEOUT_S": "120"},
        ) as job:
            chief = job.processes["worker:0"]
            if workers == 2:
                assert chief.wait() == 0
                assert chief.reported("resumed")
                break
            before = chief.text.count("BATCH")
            wait_until(lambda: chief.text.count("BATCH") >= before + 9, DEADLINE_S)  # noqa: B023
            # As a slot that ends: all get it, and all but the chief wait for its end.
            for index in range(workers):
                job.processes[f"worker:{index}"].process.send_signal(signal.SIGTERM)
            codes = {job.processes[f"worker:{index}"].wait() for index in range(workers)}
            assert codes == {process.EXIT_CODE_TERMINATED}
            assert chief.reported("checkpoint")
    np.testing.assert_allclose(chief.result["loss"], alone["loss"], rtol=TOLERANCE)
    assert job.processes.keys() == {f"{Role.WORKER}:0", f"{Role.WORKER}:1"}
