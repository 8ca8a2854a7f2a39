"""Tables of throughputs: what is read, what is chosen, what is refused."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.simulation.throughputs import draw_jobs, gpu_types_of, read_throughputs
from dike.exceptions import BadInputError

GAVEL = Path(__file__).parents[2] / "benchmarks" / "data" / "throughput" / "gavel_simulation_throughputs.json.gz"
TABLE = {
    "slow": {
        "('Net (batch size 8)', 1)": {"null": 2.0, "('Other', 1)": [1.0, 1.0]},
        "('Net (batch size 8)', 2)": {"null": 3.0},
        "('Net (batch size 16)', 1)": {"null": 1.5},
        "('Big (batch size 4)', 1)": {"null": 0.0},
        "('Game', 1)": {"null": 5.0},
    },
    "fast": {
        "('Net (batch size 8)', 1)": {"null": 10.0},
        "('Net (batch size 16)', 1)": {"null": 8.0},
        "('Big (batch size 4)', 1)": {"null": 1.0},
        "('Game', 1)": {"null": 4.0},
    },
    "fast_unconsolidated": {"('Net (batch size 8)', 1)": {"null": 9.0}},
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(TABLE), encoding="utf-8")
    return path


def test_jobs_alone_on_one_gpu_that_all_types_have(path: Path) -> None:
    table = read_throughputs(path)
    assert table.kinds == ("slow", "fast")
    assert table.reference == "fast"
    jobs = {job.name: job for job in table.jobs(["slow", "fast"])}
    assert list(jobs) == ["Net (batch size 8)", "Net (batch size 16)", "Game"]
    net = jobs["Net (batch size 16)"]
    assert (net.batch_size, net.speeds, net.reference_speed) == (16.0, {"slow": 24.0, "fast": 128.0}, 128.0)
    assert (net.pace("slow"), net.pace("fast")) == (1.5 / 8, 1.0)
    assert net.relative("slow") == pytest.approx(24 / 76)
    assert (jobs["Game"].batch_size, jobs["Game"].pace("slow")) == (1.0, 1.25)


def test_the_seconds_are_those_of_the_reference_even_where_there_is_none(path: Path) -> None:
    (net,) = read_throughputs(path).jobs(["slow"], ["Net (batch size 8)"])
    assert net.pace("slow") == pytest.approx(0.2)
    assert net.relative("slow") == 1.0


def test_models_and_single_jobs_can_be_named(path: Path) -> None:
    table = read_throughputs(path)
    assert [job.batch_size for job in table.jobs(["fast"], ["Net"])] == [8.0, 16.0]
    assert [job.name for job in table.jobs(["fast"], ["Game", "Net (batch size 16)"])] == [
        "Game",
        "Net (batch size 16)",
    ]


def test_gavels_table_gzipped() -> None:
    table = read_throughputs(GAVEL)
    assert (table.kinds, table.reference) == (("k80", "p100", "v100"), "v100")
    jobs = table.jobs(table.kinds)
    assert len(jobs) == 26
    assert sum(job.speeds["v100"] < job.speeds["p100"] for job in jobs) == 8


def test_jobs_are_drawn_alike_likely_and_the_same_for_the_same_seed(path: Path) -> None:
    jobs = read_throughputs(path).jobs(["slow", "fast"])
    counts = Counter(job.name for seed in range(100) for job in draw_jobs(jobs, 9, seed))
    assert len(counts) == 3
    assert min(counts.values()) > 240
    assert draw_jobs(jobs, 9, 4) == draw_jobs(jobs, 9, 4) != draw_jobs(jobs, 9, 5)


def test_types_of_slots() -> None:
    assert gpu_types_of("k80:2, v100:1") == ("k80", "k80", "v100")


@pytest.mark.parametrize(
    "text", ["k80", "k80:", ":2", "k80:0", "k80:-1", "k80:two", "k80:1,,v100:1", "k80:2:3", "k80:1.5"]
)
def test_malformed_types(text: str) -> None:
    with pytest.raises(BadInputError, match="in --gpu-types is not a type and a count"):
        gpu_types_of(text)


def test_unknown_types_and_models(path: Path) -> None:
    table = read_throughputs(path)
    with pytest.raises(BadInputError, match=r"no GPU type 'fest' in .*; did you mean fast\? there are slow, fast\.$"):
        table.jobs(["fest"])
    with pytest.raises(BadInputError, match=r"no model 'Big' in .* measured on slow; there are Game, Net\.$"):
        table.jobs(["slow"], ["Big"])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "cannot be read: it is not JSON"),
        ("[]", "is not a table of throughputs"),
        ('{"k80": 3}', "is not a table of throughputs"),
        ('{"k80": {"Net": {"null": 1}}}', "is not a table of throughputs"),
        ('{"k80": {"(\'Net\', 1)": {"null": "fast"}}}', "is not a table of throughputs"),
        ('{"k80": {"(\'Net\', 1)": {}}}', "is not a table of throughputs"),
        ('{"k80": {"(\'Net\', 2)": {"null": 1}}}', "There is no speed of a job on one GPU"),
        ("{}", "There is no speed of a job on one GPU"),
    ],
)
def test_files_that_are_none(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(BadInputError, match=said):
        read_throughputs(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="cannot be read: No such file"):
        read_throughputs(tmp_path / "none.json")
    broken = tmp_path / "broken.json.gz"
    broken.write_bytes(gzip.compress(b'{"k80": {}}')[:-9])
    with pytest.raises(BadInputError, match="cannot be read"):
        read_throughputs(broken)


def test_types_without_a_job_in_common(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(
        json.dumps({kind: {f"('{model}', 1)": {"null": 1.0}} for kind, model in (("a", "X"), ("b", "Y"))}),
        encoding="utf-8",
    )
    with pytest.raises(BadInputError, match="was measured on all of a, b"):
        read_throughputs(path).jobs(["a", "b"])
