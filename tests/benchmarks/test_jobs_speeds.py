"""The real speeds of simulated jobs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.simulation.jobs.machines import Machines
from benchmarks.simulation.jobs.measured import MeasuredModel
from benchmarks.simulation.jobs.step_times import PsModel, StepTimes
from dike.exceptions import BadInputError
from solver.hardware import known_hardware
from tests.solver.solver_cases import MB, profile

ROWS = """placement,local_bsz,step_time,sync_time
1,10,1.0,0.0
1,20,2.0,0.0
2,10,1.2,0.2
2,20,2.2,0.2
11,10,1.5,0.5
11,20,2.5,0.5
"""
LARGE = """num_nodes,num_replicas,local_bsz,step_time,sync_time
4,4,10,2.0,1.0
4,4,20,3.0,1.0
4,8,10,4.0,3.0
4,8,20,5.0,3.0
"""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "placements.csv").write_text(ROWS, encoding="utf-8")
    (folder / "scalability.csv").write_text(LARGE, encoding="utf-8")
    return folder


def test_measured_speeds(table: Path) -> None:
    model = MeasuredModel(table, Machines(count=8, gpus=2))
    assert (model.batch_sizes, model.max_ps, model.max_workers(80)) == ((40, 80, 160), 0, 8)
    assert model.samples_per_s(((1, 0),), 10) == pytest.approx(10 / 1.0)
    assert model.samples_per_s(((2, 0),), 30) == pytest.approx(30 / 1.7)
    assert model.samples_per_s(((1, 0), (1, 0)), 40) == pytest.approx(40 / 2.5)
    # In two parts, of which the last alone waits for the network.
    assert model.samples_per_s(((1, 0), (1, 0)), 80) == pytest.approx(80 / (2.5 + 2.0))
    # Three machines: half-way between two, of which two GPUs were measured, and four, of which four were.
    assert model.samples_per_s(((1, 0),) * 3, 30) == pytest.approx(30 / ((1.5 + 2.0) / 2))
    # Six GPUs on four machines: half-way between four and eight.
    assert model.samples_per_s(((2, 0), (2, 0), (1, 0), (1, 0)), 60) == pytest.approx(60 / 3.0)
    # More machines than were measured.
    assert model.samples_per_s(((1, 0),) * 8, 80) == model.samples_per_s(((2, 0),) * 4, 80) == pytest.approx(80 / 4.0)


def test_a_model_is_expected_to_scale_as_the_others_do(table: Path) -> None:
    models = [MeasuredModel(table, Machines(count=8, gpus=2)) for _ in range(3)]
    assert models[0].expected_samples_per_s(2, 0, 80) == 2
    models[0].warm_start_from(models[1:])
    # In four parts of 20 samples, and in two.
    assert models[1].gain(2) == pytest.approx((4 * 2.0) / (2.2 + 2.0))
    assert models[0].expected_samples_per_s(2, 0, 80) == pytest.approx(models[1].gain(2))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("placements.csv", "placement,local_bsz\n1,10\n", "Line 2 of"),
        ("placements.csv", ROWS.replace("1.2", "fast"), "has no usable number in column 'step_time'"),
        ("placements.csv", ROWS.replace("1.2", "0"), "has no usable number in column 'step_time'"),
        ("placements.csv", "placement,local_bsz,step_time,sync_time\n1.5,10,1,0\n", "number in column 'placement'"),
        ("placements.csv", "placement,local_bsz,step_time,sync_time\n", "is empty"),
        ("scalability.csv", "num_nodes,local_bsz,step_time,sync_time\n4,1,1,1\n", "column 'num_replicas'"),
    ],
)
def test_tables_that_make_no_sense(table: Path, name: str, text: str, said: str) -> None:
    (table / name).write_text(text, encoding="utf-8")
    with pytest.raises(BadInputError) as error:
        MeasuredModel(table, Machines(gpus=2))
    assert said in str(error.value)


def test_a_table_must_know_the_machines(table: Path) -> None:
    with pytest.raises(BadInputError, match="The table of 'model' has at most 2 GPUs on a machine, not 4"):
        MeasuredModel(table, Machines())


@pytest.mark.parametrize("synchronous", [False, True])
def test_speeds_with_parameter_servers(synchronous: bool) -> None:
    own = profile([80 * MB, 30 * MB, 30 * MB, 10 * MB, 10 * MB], batch_size=16, synchronous=synchronous)
    machines = Machines(count=4, network_gbps=1)
    expected = StepTimes(own, machines, known_hardware())
    model = PsModel("resnet", own, machines, expected, np.random.default_rng(1))
    batch = model.batch_sizes[0]
    together, apart = ((2, 1),), ((1, 0), (1, 0), (0, 1))
    assert model.samples_per_s(together, batch) > model.samples_per_s(apart, batch)
    # In turn, one of two ps has 120 of the 160 MB.
    two = ((2, 0), (2, 0), (0, 1), (0, 1))
    assert model.samples_per_s(two, batch) > 1.1 * model.samples_per_s(two, batch, sharding="round_robin")
    # The real hardware is other than what is known of it, and other in every seed.
    again = PsModel("resnet", own, machines, expected, np.random.default_rng(2))
    speeds = {one.samples_per_s(two, batch) for one in (model, again)} | {model.expected_samples_per_s(4, 2, batch)}
    assert len(speeds) == 3
    assert model.expected_samples_per_s(17, 1, batch) > 0, "more machines than there are, as one job may be asked about"
