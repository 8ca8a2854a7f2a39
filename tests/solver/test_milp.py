"""The way to HiGHS and CBC, and the traps on it (solver FACTS 6)."""

from __future__ import annotations

import random
import subprocess
import sys

import pulp
import pytest

from solver import milp
from solver.hardware import known_hardware

KNAPSACK = milp.Milp([5.0, 4.0, 3.0], [1, 1, 3], [milp.Row({0: 4.0, 1: 3.0, 2: 2.0}, upper=6.0)])


# The bundled CBC says at each use that it will leave PuLP one day.
pytestmark = pytest.mark.filterwarnings("ignore:PULP_CBC_CMD is deprecated:DeprecationWarning")


@pytest.fixture(params=["HiGHS", "PULP_CBC_CMD"])
def solver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    wanted = getattr(pulp, request.param)
    if not wanted(msg=False).available():
        pytest.skip(f"{request.param} is not there")
    monkeypatch.setattr(milp, "_solver_class", lambda: wanted)
    return str(request.param)


def test_an_optimum_is_found_and_proven(solver: str) -> None:
    result = milp.solve(KNAPSACK)
    assert result.proven
    assert result.values is not None
    assert sum(c * x for c, x in zip(KNAPSACK.objective, result.values, strict=True)) == 9.0


def test_no_solution_is_not_a_number(solver: str) -> None:
    rows = [milp.Row({0: 1.0, 1: 1.0}, lower=2.0), milp.Row({0: 1.0, 1: -1.0}, lower=1.0)]
    result = milp.solve(milp.Milp([1.0, 1.0], [1, 1], rows))
    assert result == milp.MilpResult(None, proven=True)


def test_time_that_is_up_is_not_a_proof(solver: str) -> None:
    # A market split problem: tiny, and far from solved in the time given.
    choose = random.Random(1)
    rows = []
    for _ in range(5):
        weights = [float(choose.randint(0, 99)) for _ in range(40)]
        half = sum(weights) // 2
        rows.append(milp.Row(dict(enumerate(weights)), lower=half, upper=half))
    result = milp.solve(milp.Milp([1.0] * 40, [1] * 40, rows), time_limit_s=0.2)
    assert not result.proven


def test_equal_limits_are_an_equation(solver: str) -> None:
    result = milp.solve(milp.Milp([-1.0, 0.0], [9, 9], [milp.Row({0: 2.0, 1: 1.0}, lower=7.0, upper=7.0)]))
    assert result.values == (0, 7)


def test_highs_is_preferred() -> None:
    assert milp._solver_class() is pulp.HiGHS


def test_every_speed_has_a_source() -> None:
    hardware = known_hardware()
    assert {"k80", "v100", "a100", "h200"} <= hardware.gpus.keys()
    for gpu in (*hardware.gpus.values(), hardware.unknown_gpu):
        assert gpu.source
        assert gpu.training_flops_per_s > 1e12
        assert gpu.memory_bytes > 2**33


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("K80", "K80"),
        ("Tesla K80", "K80"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA H200", "H200"),
        (None, "unknown"),
    ],
)
def test_gpu_names_as_people_and_nvml_write_them(name: str | None, model: str) -> None:
    assert known_hardware().gpu(name).model == model


def test_planning_loads_neither_tensorflow_nor_matplotlib() -> None:
    code = "import sys, solver; print([m for m in ('tensorflow', 'matplotlib', 'pymesos') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
