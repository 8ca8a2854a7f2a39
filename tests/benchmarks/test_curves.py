"""Curves read from files, and what is reported of them."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulation.curves import Curve, read_curves
from dike.exceptions import BadInputError

LONG = """trial,step,seconds,train_loss,accuracy,host
a,10,1.5,4.0,0.1,n1
b,10,2.0,nan,0.2,n1
a,20,2.5,2.0,0.5,n1
b,30,4.0,inf,,n2
"""
WIDE = """lr,acc_0,acc_1,acc_2,loss_0,loss_1
0.1,0.25,0.5,0.75,9,8
0.2,0.5,0.25,,7,6
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_the_long_form(tmp_path: Path) -> None:
    a, b = read_curves(write(tmp_path / "curves.csv", LONG))
    assert (a.name, a.length_s, a.first_loss, a.final_loss) == ("a", 2.5, 4.0, 2.0)
    assert b.length_s == 4.0
    assert math.isnan(b.first_loss)
    assert b.final_loss == math.inf


def test_great_values_of_a_metric_become_small_losses(tmp_path: Path) -> None:
    a, b = read_curves(write(tmp_path / "curves.csv", LONG), "accuracy", "max")
    assert (a.first_loss, a.final_loss) == (-0.1, -0.5)
    assert math.isnan(b.final_loss)


def test_the_wide_form_is_an_accuracy_evaluated_every_second(tmp_path: Path) -> None:
    first, second = read_curves(write(tmp_path / "curves.csv", WIDE))
    assert (first.length_s, first.first_loss, first.final_loss) == (3.0, 0.75, 0.25)
    assert first.time_to(0.5) == 2.0
    assert (second.length_s, second.final_loss) == (2.0, 0.75)
    assert [curve.final_loss for curve in read_curves(tmp_path / "curves.csv", "loss")] == [8, 6]


def test_a_gzipped_file_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "curves.csv.gz"
    path.write_bytes(gzip.compress(LONG.encode()))
    (a, _), (other, _) = read_curves(path), read_curves(write(tmp_path / "curves.csv", LONG))
    assert a.reading(0.5, 2.0) == other.reading(0.5, 2.0)


@pytest.mark.parametrize(
    ("text", "metric", "said"),
    [
        ("trial,step,seconds\na,1,1\n", None, "There is no column 'train_loss'"),
        (LONG, "loss", "There is no column 'loss'"),
        ("", None, "There is no column 'trial'"),
        ("trial,step,seconds,train_loss\n", None, "There is no trial"),
        ("trial,step,seconds,train_loss\na,1,1,low\n", None, "Line 2 of .*'low' in column train_loss is not a number"),
        ("trial,step,seconds,train_loss\na,1,,1\n", None, "Line 2 of .*'' in column seconds is not a number"),
        ("trial,step,seconds,train_loss\na,1\n", None, "Line 2 of .*'' in column seconds is not a number"),
        ("trial,step,seconds,train_loss\na,1,nan,1\n", None, "must be finite and not negative"),
        ("trial,step,seconds,train_loss\na,0,0,1\n", None, "no evaluation after second 0"),
        ("lr,acc_0,acc_1\n0.1,,\n", None, "Line 2 of .* has no evaluation"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, metric: str | None, said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        read_curves(write(tmp_path / "curves.csv", text), metric)


def test_a_missing_file_and_a_broken_one(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="No such file"):
        read_curves(tmp_path / "none.csv")
    (tmp_path / "broken.csv.gz").write_bytes(gzip.compress(LONG.encode())[:30])
    with pytest.raises(BadInputError, match="cannot be read"):
        read_curves(tmp_path / "broken.csv.gz")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInputError, match="it is not CSV text"):
        read_curves(tmp_path / "binary.csv")


@given(
    losses=st.lists(st.floats(-100, 100), min_size=1, max_size=8),
    gaps_s=st.lists(st.floats(0.1, 10), min_size=8, max_size=8),
    ends=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_a_reading_is_what_the_interpolated_losses_give(
    losses: list[float], gaps_s: list[float], ends: tuple[float, float]
) -> None:
    times_s = list(np.cumsum(gaps_s[: len(losses)]))
    curve = Curve("a", times_s, [100 * time_s for time_s in times_s], losses)
    begin_s, end_s = sorted(end * times_s[-1] for end in ends)
    if end_s - begin_s < 1e-3:
        return
    reading = curve.reading(begin_s, end_s)
    at_s = np.array([begin_s, *(time_s for time_s in times_s if begin_s < time_s < end_s), end_s])
    expected = np.interp(at_s, times_s, losses)
    assert reading.train_s == end_s
    assert reading.step == pytest.approx(100 * end_s, abs=1)
    assert reading.count == pytest.approx(max(1, 100 * (end_s - begin_s)), abs=1)
    assert reading.loss == pytest.approx(np.trapezoid(expected, at_s) / (end_s - begin_s), abs=1e-6)
    assert reading.low == pytest.approx(expected.min(), abs=1e-6)
    assert reading.high == pytest.approx(expected.max(), abs=1e-6)
    assert reading.low <= reading.loss <= reading.high


def test_a_loss_that_is_no_number_lasts_until_the_next() -> None:
    curve = Curve("a", [1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [5.0, math.nan, 3.0, math.inf, 1.0])
    before = curve.reading(0.5, 1.9)
    assert (before.loss, before.low, before.high) == (5.0, 5.0, 5.0)
    assert all(math.isnan(value) for value in (curve.reading(1.9, 2.1).loss, curve.reading(2.2, 2.8).low))
    assert curve.reading(3.0, 3.9).loss == 3.0
    infinite = curve.reading(3.9, 4.5)
    assert (infinite.loss, infinite.low, infinite.high) == (math.inf, 3.0, math.inf)
    assert curve.reading(4.9, 5.0).low == 1.0


def test_the_time_to_a_target() -> None:
    curve = Curve("a", [2, 4, 6], [1, 2, 3], [8.0, 4.0, math.nan])
    assert curve.time_to(9.0) == 0.0
    assert curve.time_to(6.0) == 3.0
    assert curve.time_to(4.0) == 4.0
    assert curve.time_to(3.9) == math.inf
