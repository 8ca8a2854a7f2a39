"""The way to HiGHS and CBC, and the traps on it."""

from __future__ import annotations

import random
import subprocess
import sys

import pulp
import pytest

from solver import milp
from solver.hardware import known_hardware

KNAPSACK = milp.Milp([5.0, 4.0, 3.0], [1, 1, 3], [milp.LinearRow({0: 4.0, 1: 3.0, 2: 2.0}, upper=6.0)])


# The bundled CBC says at each use that it will leave PuLP one day.
pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:PULP_CBC_CMD is deprecated:DeprecationWarning"),
]


@pytest.fixture(params=[milp.solve_by_highs, milp.solve_by_cbc])
def solver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param is milp.solve_by_cbc and not pulp.PULP_CBC_CMD(msg=False).available():
        pytest.skip("CBC is not there")
    monkeypatch.setattr(milp, "_solver", lambda: request.param)


def test_an_optimum_is_found_and_proven(solver: None) -> None:
    result = milp.solve(KNAPSACK)
    assert result.proven
    assert result.values is not None
    assert sum(c * x for c, x in zip(KNAPSACK.objective, result.values, strict=True)) == 9.0


def test_no_solution_is_not_a_number(solver: None) -> None:
    rows = [milp.LinearRow({0: 1.0, 1: 1.0}, lower=2.0), milp.LinearRow({0: 1.0, 1: -1.0}, lower=1.0)]
    result = milp.solve(milp.Milp([1.0, 1.0], [1, 1], rows))
    assert result == milp.MilpResult(None, proven=True)


def test_a_row_without_variables_decides_by_itself(solver: None) -> None:
    assert milp.solve(milp.Milp([1.0], [1], [milp.LinearRow({}, lower=1.0)])) == milp.MilpResult(None, proven=True)
    assert milp.solve(milp.Milp([1.0], [1], [milp.LinearRow({}, upper=1.0)])).values == (1,)


def test_fractions_count_but_are_not_returned(solver: None) -> None:
    builder = milp.MilpBuilder()
    whole = builder.integer(5, 2.0)
    part = builder.fraction(0.75, 4.0)
    builder.row({whole: 1.0, part: 2.0}, upper=3.0)
    builder.extend([milp.LinearRow({part: 1.0}, upper=0.6)])
    result = milp.solve(builder.build())
    # 2 x 2 + 4 x 0.5 beats 3 x 2.
    assert result.values == (2,) or result.values == (3,)
    assert result.bound == pytest.approx(6.0)
    with pytest.raises(AssertionError, match="fraction's number"):
        builder.integer(1)


@pytest.mark.parametrize("seed", range(3))
def test_a_bound_holds_whenever_the_time_was_over(seed: int) -> None:
    choose = random.Random(seed)
    weights = [[float(choose.randint(1, 60)) for _ in range(40)] for _ in range(8)]
    worth = [choose.randint(10, 30) + choose.random() for _ in range(40)]
    program = milp.Milp(worth, [3] * 40, [milp.LinearRow(dict(enumerate(row)), upper=500.0) for row in weights])
    best = milp.solve(program)
    assert best.proven
    assert best.values is not None
    assert best.bound == pytest.approx(sum(w * x for w, x in zip(worth, best.values, strict=True)))
    cut_off = 0
    for limit_s in (0.0, 0.01, 0.02, 0.05, 0.1, 0.2):
        result = milp.solve(program, limit_s)
        assert result.bound >= best.bound * (1 - 1e-9)
        cut_off += not result.proven
        if result.values is not None:
            reached = sum(w * x for w, x in zip(worth, result.values, strict=True))
            assert reached <= best.bound * (1 + 1e-9)
            assert result.proven == (result.bound == pytest.approx(reached, rel=1e-9))
    assert cut_off


# Programs of counts that HiGHS 1.12 to 1.15.1 gets wrong with its presolve (the aggregator).
LOST_OPTIMUM = milp.Milp(
    [0.0, 0.0, 0.0, 0.0, 45.0, 45.0],
    [15, 2, 1, 13, 2, 1],
    [
        milp.LinearRow({3: 1.0, 0: -1.0}, upper=0.0),
        milp.LinearRow({4: 1.0, 1: -1.0}, upper=0.0),
        milp.LinearRow({0: 1.0, 1: 1.0, 2: 1.0}, upper=15.0),
        milp.LinearRow({3: 1.0, 4: 1.0, 5: 1.0}, lower=13.0, upper=13.0),
        milp.LinearRow({2: 1.0}, lower=1.0, upper=1.0),
    ],
)
LOST_SOLUTION = milp.Milp(
    [0.0] * 12,
    [11, 1, 1, 1, 9, 1, 1, 1, 22, 2, 36, 4],
    [
        *(
            milp.LinearRow({8 + i: 1.0, machines: -most}, upper=0.0)
            for i, (machines, most) in enumerate([(0, 2.0), (2, 2.0), (4, 4.0), (5, 4.0)])
        ),
        *(milp.LinearRow({machines: -1.0}, upper=0.0) for machines in (1, 3, 6, 7)),
        milp.LinearRow(dict.fromkeys((0, 1, 2, 3), 1.0), upper=11.0),
        milp.LinearRow(dict.fromkeys((4, 5, 6, 7), 1.0), upper=9.0),
        milp.LinearRow(dict.fromkeys((2, 3, 6, 7), 1.0), lower=1.0, upper=1.0),
        milp.LinearRow(dict.fromkeys((1, 3, 5, 7), 1.0), lower=1.0, upper=1.0),
        milp.LinearRow(dict.fromkeys((8, 9, 10, 11), 1.0), lower=40.0, upper=40.0),
    ],
)


def test_what_a_presolve_lost_is_found(solver: None) -> None:
    result = milp.solve(LOST_OPTIMUM)
    assert (result.proven, result.bound) == (True, 135.0)
    assert milp.solve(LOST_SOLUTION).values is not None


def test_time_that_is_up_is_not_a_proof(solver: None) -> None:
    # A market split problem: tiny, and far from solved in the time given.
    choose = random.Random(1)
    rows = []
    for _ in range(5):
        weights = [float(choose.randint(0, 99)) for _ in range(40)]
        half = sum(weights) // 2
        rows.append(milp.LinearRow(dict(enumerate(weights)), lower=half, upper=half))
    result = milp.solve(milp.Milp([1.0] * 40, [1] * 40, rows), time_limit_s=0.2)
    assert not result.proven


def test_equal_limits_are_an_equation(solver: None) -> None:
    result = milp.solve(milp.Milp([-1.0, 0.0], [9, 9], [milp.LinearRow({0: 2.0, 1: 1.0}, lower=7.0, upper=7.0)]))
    assert result.values == (0, 7)


def test_highs_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulp, "LpProblem", lambda *_: pytest.fail("CBC is slower"))
    assert milp.solve(milp.Milp([1.0], [3], [])).values == (3,)


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
