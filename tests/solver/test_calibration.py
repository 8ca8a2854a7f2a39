"""Measurements correct the speeds: factors that are there are found, and what cannot be known is said."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dike.exceptions import BadInputError
from dike.profile import Api, ModelProfile
from solver import Cluster, NodeClass, PlanRequest, make_plan
from solver.calibration import Calibration, fit
from solver.calibration.measured_rows import Measurement
from solver.calibration.measurements import read_measurements
from solver.calibration.step_terms import TERMS, step_terms
from solver.evaluation import evaluate
from solver.hardware import known_hardware
from solver.placement.naming import Assignment
from solver.resources import WorkerShape
from solver.scenario import Scenario
from solver.units import GIB
from tests.properties import examples
from tests.solver.solver_cases import MB, digits, k80, profile

MIXED = Cluster(
    (
        *k80(3, network_gbps=2.0).nodes,
        NodeClass(name="v100", count=2, cpus=16, mem_bytes=64 * GIB, gpus=4, gpu_model="V100", network_gbps=5.0),
        NodeClass(name="cpu", count=2, cpus=8, mem_bytes=32 * GIB, network_gbps=1.0),
    ),
    within_node_gbps=20.0,
)
TRUTH = {"compute": 1.4, "input": 2.5, "network": 1.2, "update": 17.0, "latency": 4.0, "dispatch": 6.0}


def _calibration(factors: dict[str, float], *, overlap: bool = False) -> Calibration:
    return Calibration({**dict.fromkeys(TERMS, 1.0), **factors}, (), overlap, 1, 0.0, 0.0, 0.0)


def _measured(
    model: ModelProfile,
    cluster: Cluster,
    placements: Sequence[tuple[WorkerShape, Assignment, int]],
    factors: dict[str, float],
    *,
    overlap: bool = False,
) -> list[Measurement]:
    """What the step-time model says of these placements where the speeds are others: (shape, assignment, batch)."""
    hardware, slower = _calibration(factors, overlap=overlap).apply(known_hardware(), cluster)
    rows = []
    for shape, assignment, batch in placements:
        scenario = Scenario.of(model.with_batch_size(batch), slower, hardware)
        worth = evaluate(scenario, shape, scenario.shards(len(assignment.ps)), assignment)
        rows.append(Measurement(shape, assignment, worth.step_time.total, batch_size=batch))
    return rows


def _placements(cluster: Cluster, shapes: Sequence[WorkerShape], seed: int, count: int, ps: int = 3) -> list:
    """Placements at random, with batches of all sizes."""
    random = np.random.default_rng(seed)
    nodes = {shape: [n for c in cluster.nodes if c.gpus >= shape.gpus for n in c.node_names] for shape in shapes}
    everywhere = list(cluster.node_names())
    placements = []
    for index in range(count):
        shape = shapes[index % len(shapes)]
        workers = random.choice(nodes[shape], random.integers(1, 9))
        stored = random.choice(everywhere, random.integers(1, ps + 1), replace=False)
        batch = int(2 ** random.integers(0, 8))
        placements.append((shape, Assignment(tuple(stored), tuple(workers), None), batch))
    return placements


@examples(60)
@given(
    st.integers(0, 10**6),
    st.booleans(),
    st.booleans(),
    st.sampled_from([api for api in Api if api is not Api.LOOP]),
    st.lists(st.floats(0.1, 10.0), min_size=len(TERMS), max_size=len(TERMS)),
)
def test_the_terms_predict_what_the_planner_does_with_the_speeds_changed(
    seed: int, synchronous: bool, overlap: bool, api: Api, factors: list[float]
) -> None:
    model = profile([40 * MB, 20 * MB, 20 * MB, MB], synchronous=synchronous, api=api, flops=1e8)
    shapes = (WorkerShape(1, 0.5), WorkerShape(2, 4.0), WorkerShape(0, 2.0))
    racked = dataclasses.replace(
        MIXED, nodes=tuple(dataclasses.replace(n, rack=n.name) for n in MIXED.nodes), across_racks_gbps=1.5
    )
    named = dict(zip(TERMS, factors, strict=True))
    for shape, assignment, batch in _placements(racked, shapes, seed, 3):
        scenario = Scenario.of(model.with_batch_size(batch), racked, known_hardware())
        terms = step_terms(scenario, shape, scenario.shards(len(assignment.ps)), assignment)
        expected = _measured(model, racked, [(shape, assignment, batch)], named, overlap=overlap)[0].seconds
        vector = np.array(factors)
        assert terms.gradient(vector, overlap=overlap) @ vector == pytest.approx(expected, rel=1e-9)


def test_the_gradient_of_asynchronous_steps_is_their_derivative() -> None:
    shape = WorkerShape(1, 2.0)
    racked = dataclasses.replace(
        MIXED, nodes=tuple(dataclasses.replace(n, rack=n.name) for n in MIXED.nodes), across_racks_gbps=1.5
    )
    random = np.random.default_rng(3)
    by_links = 0
    for flops in (1e7, 1e9):
        scenario = Scenario.of(profile([40 * MB, 20 * MB, MB], flops=flops, api=Api.KERAS), racked, known_hardware())
        for _, assignment, _ in _placements(racked, [shape], 5, 20):
            terms = step_terms(scenario, shape, scenario.shards(len(assignment.ps)), assignment)
            factors = random.uniform(0.5, 2.0, len(TERMS))
            gradient = terms.gradient(factors, overlap=False)
            by_links += gradient[TERMS.index("network")] * 1.2 > gradient @ factors
            for index in range(len(TERMS)):
                high, low = factors.copy(), factors.copy()
                high[index] *= 1 + 1e-4
                low[index] *= 1 - 1e-4
                change = terms.gradient(high, overlap=False) @ high - terms.gradient(low, overlap=False) @ low
                slope = change / (high[index] - low[index])
                assert gradient[index] == pytest.approx(slope, rel=1e-3, abs=1e-6 * float(gradient @ factors))
    assert 5 < by_links < 35


@pytest.mark.slow
@pytest.mark.parametrize(("synchronous", "overlap"), [(True, False), (True, True), (False, False)])
def test_factors_that_are_there_are_found(synchronous: bool, overlap: bool) -> None:
    model = profile([MB, MB, MB], synchronous=synchronous, flops=2e9, api=Api.KERAS)
    shapes = (WorkerShape(1, 0.25), WorkerShape(1, 4.0), WorkerShape(2, 8.0))
    rows = _measured(model, MIXED, _placements(MIXED, shapes, 1, 40), TRUTH, overlap=overlap)
    found = fit(rows, model, MIXED)
    assert found.overlap == overlap
    assert found.not_identified == ()
    assert found.factors == pytest.approx(TRUTH, rel=1e-6)
    assert found.worst_error < 1e-6
    assert found.left_out_error is not None
    assert found.left_out_error < 0.01
    assert found.error_before > 0.3


@pytest.mark.slow
def test_a_part_of_the_rounds_that_is_never_the_longest_is_not_known() -> None:
    model = profile([MB, MB, MB], flops=2e9, api=Api.KERAS)
    truth = {**TRUTH, "update": 1.5, "dispatch": 0.5}
    rows = _measured(model, MIXED, _placements(MIXED, (WorkerShape(1, 4.0), WorkerShape(2, 8.0)), 1, 20), truth)
    found = fit(rows, model, MIXED)
    assert {"update", "dispatch"} <= set(found.not_identified)
    assert found.worst_error < 1e-6


@pytest.mark.slow
def test_noise_is_averaged_out_and_the_errors_are_what_they_say() -> None:
    model = profile([40 * MB, 20 * MB, 20 * MB], synchronous=True, flops=3e9)
    random = np.random.default_rng(7)
    rows = _measured(model, MIXED, _placements(MIXED, (WorkerShape(1, 2.0),), 2, 40), {"compute": 2.0, "network": 1.5})
    noisy = [dataclasses.replace(row, seconds=(row.seconds or 0) * random.normal(1, 0.05)) for row in rows]
    found = fit(noisy, model, MIXED)
    assert found.factors["compute"] == pytest.approx(2.0, rel=0.1)
    assert found.factors["network"] == pytest.approx(1.5, rel=0.1)
    hardware, slower = found.apply(known_hardware(), MIXED)
    errors = []
    for row in noisy:
        scenario = Scenario.of(model.with_batch_size(row.batch_size or 0), slower, hardware)
        worth = evaluate(scenario, row.shape, scenario.shards(len(row.assignment.ps)), row.assignment)
        errors.append(abs(worth.step_time.total / (row.seconds or 0) - 1))
    assert found.mean_error == pytest.approx(np.mean(errors), rel=1e-6)
    assert found.worst_error == pytest.approx(np.max(errors), rel=1e-6)
    assert found.left_out_error is not None
    assert found.mean_error < found.left_out_error < 0.1


def test_what_the_rows_cannot_tell_keeps_the_table_s_speed() -> None:
    model = profile([40 * MB], synchronous=True, flops=4e9, api=Api.GRAPH)
    # One worker beside its ps: no chief, and computing hides the input.
    place = Assignment(("k80-0",), ("k80-0",), None)
    batches = [(WorkerShape(1, 8.0), place, batch) for batch in (8, 16, 32, 64)]
    found = fit(_measured(model, k80(), batches, {"compute": 3.0}), model, k80())
    assert found.factors["compute"] == pytest.approx(3.0, rel=1e-3)
    assert {"input", "dispatch"} <= set(found.not_identified)
    assert all(found.factors[term] == 1.0 for term in found.not_identified)
    assert "dispatch" in found.sentences()[-1]


def test_one_row_corrects_the_term_that_takes_longest() -> None:
    model = profile([40 * MB], synchronous=True, flops=1e10, api=Api.GRAPH)
    rows = _measured(model, k80(), [(WorkerShape(1, 8.0), Assignment(("k80-0",), ("k80-0",), None), 32)], TRUTH)
    found = fit(rows, model, k80())
    assert set(found.not_identified) == set(TERMS) - {"compute"}
    assert found.worst_error < 1e-9
    assert found.left_out_error is None


def test_samples_per_second_stand_for_the_seconds() -> None:
    model = profile([40 * MB], synchronous=True)
    where = Assignment(("k80-0",), ("k80-0", "k80-1", "k80-1"), None)
    rows = _measured(model, k80(), [(WorkerShape(2, 4.0), where, 16)], {"compute": 2.0})
    speed = 3 * 2 * 16 / (rows[0].seconds or 0)
    other = dataclasses.replace(rows[0], seconds=None, samples_per_s=speed)
    assert fit([other], model, k80()) == fit(rows, model, k80())


def test_it_survives_json() -> None:
    model = profile([40 * MB], synchronous=True, flops=1e9)
    rows = _measured(model, MIXED, _placements(MIXED, (WorkerShape(1, 2.0),), 4, 6, ps=1), TRUTH)
    found = fit(rows, model, MIXED)
    assert Calibration.from_json(json.loads(json.dumps(found.to_json()))) == found
    for change, message in (
        ({"factors": {"compute": 1}}, "key 'input' is missing"),
        ({"rows": 1, "speed": 2}, "speed"),
        ({"factors": dict.fromkeys(TERMS, 0.0)}, "above 0"),
        ({"mean_error": "small"}, "'mean_error' must be a number of at least 0, not 'small'"),
        ({"not_identified": ["gpu"]}, "'gpu' is not a term; terms are compute"),
    ):
        with pytest.raises(BadInputError, match=message):
            Calibration.from_json({**found.to_json(), **change})


def test_a_file_of_placements_and_plans(tmp_path: Path) -> None:
    plan = make_plan(PlanRequest(digits(), k80(2)))
    (tmp_path / "plan.json").write_text(plan.dumps(), encoding="utf-8")
    file = tmp_path / "rows.csv"
    file.write_text(
        "plan,placement,workers,ps,cpus,gpus,batch_size,seconds,samples_per_s\n"
        ",k80-0:p0+4w+chief | k80-1:p1 + 1w,5,2,1.5,1,,0.5,\n"
        "\n"
        "plan.json,,,,,,,,900\n"
        ",k80-1:p0|k80-0:2w,,,2,,16,0.25,\n",
        encoding="utf-8",
    )
    first, second, third = read_measurements(file)
    assert first.assignment == Assignment(("k80-0", "k80-1"), ("k80-0",) * 4 + ("k80-1",), None)
    assert (first.shape, first.seconds, first.batch_size) == (WorkerShape(1, 1.5), 0.5, None)
    assert len(second.assignment.workers) == plan.option.workers
    assert second.shard_bytes == plan.ps_bytes
    assert (second.batch_size, second.samples_per_s) == (64, 900)
    assert (third.shape, third.batch_size) == (WorkerShape(0, 2.0), 16)
    calibrated = fit([first, second, third], digits(), k80(2))
    assert calibrated.rows == 3


HEADER = "placement,cpus,gpus,seconds"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no rows"),
        (HEADER, "no rows"),
        ("placement,speed\na:p0+1w,1", "line 1: 'speed' is not a column; columns are plan, placement"),
        ("seconds,seconds\n1,1", "line 1: a column is named twice"),
        (f"{HEADER}\na:p0+1w,1,0,fast", "line 2: 'seconds' is 'fast'; it must be a number above 0"),
        (f"{HEADER}\na:p0+1w,1,0,0", "'seconds' is '0'"),
        (f"{HEADER}\na:p0+1w,1,0,nan", "'seconds' is 'nan'"),
        (f"{HEADER}\na:p0+1w,1,0,", "give either 'seconds' or 'samples_per_s'"),
        (f"{HEADER}\na:p0+1w,,0,1", "'cpus' is missing"),
        (f"{HEADER}\na:p0+1w,1,-1,1", "'gpus' is '-1'; it must be a whole number of at least 0"),
        (f"{HEADER}\na:p0+1w,1,0,1,7", "line 2: there are more values than columns"),
        (f"{HEADER}\n,1,0,1", "give either a 'placement' or a 'plan'"),
        (f"{HEADER}\na=p0,1,0,1", "'a=p0' is not part of a placement; write it as"),
        (f"{HEADER}\na:p0+w,1,0,1", "'a:p0\\+w' is not part of a placement"),
        (f"{HEADER}\na:p0+1w|b:p0,1,0,1", "ps 0 is placed twice"),
        (f"{HEADER}\na:p1+1w,1,0,1", "without a gap"),
        (f"{HEADER}\na:4w,1,0,1", "at least one ps and one worker"),
        (f"{HEADER}\na:p0+0w,1,0,1", "at least one ps and one worker"),
        (f"{HEADER},workers\na:p0+2w,1,0,1,3", "'workers' is 3, but 2 are placed"),
        ("plan,seconds\nnowhere.json,1", "line 2: the plan .*nowhere.json' cannot be read: No such file"),
        ("plan,seconds\nrows.csv,1", "line 2: .*rows.csv': A plan must be JSON"),
        ('placement,seconds\n"a:p0+1w,1', "cannot be read as CSV"),
    ],
)
def test_a_bad_file_is_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "rows.csv"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(BadInputError, match=message) as caught:
        read_measurements(file)
    assert "\n" not in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"none\.csv' cannot be read as CSV: No such file"):
        read_measurements(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInputError, match="cannot be read as CSV"):
        read_measurements(tmp_path / "binary.csv")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"assignment": Assignment(("k80-9",), ("k80-0",), None)}, "line 7: machine 'k80-9' is not in the cluster; it"),
        ({"shape": WorkerShape(8, 1.0)}, "line 7: a worker with 8 GPUs cannot have run on 'k80-0', which has 4"),
        ({"assignment": Assignment(("k80-0",) * 9, ("k80-0",), None)}, "line 7: 9 parameter servers are too many"),
        ({"shard_bytes": (5 * MB,)}, "line 7: the plan is of another model"),
    ],
)
def test_rows_of_another_cluster_or_model(changes: dict[str, object], message: str) -> None:
    row = Measurement(WorkerShape(1, 1.0), Assignment(("k80-0",), ("k80-0",), None), 1.0, where="rows.csv, line 7")
    with pytest.raises(BadInputError, match=message):
        fit([dataclasses.replace(row, **changes)], profile([MB]), k80())  # type: ignore[arg-type]
    with pytest.raises(BadInputError, match="no measurements"):
        fit([], profile([MB]), k80())
