"""Files of many jobs: what they may say, and what each mistake is answered with."""

from __future__ import annotations

from pathlib import Path

import pytest

from dike.exceptions import BadInputError
from dike.profile import ModelProfile
from solver.cluster_file import read_cluster
from solver.jobs import PlanJob, plan_jobs, read_jobs
from tests.solver.solver_cases import profile

EXAMPLES = Path(__file__).parents[2] / "examples"
GOOD = """\
jobs:
  - name: big
    model: keras:ResNet50
    batch_size: 32
    min_workers: 2
    max_workers: 8
    steps: 500
    weight: 2
    gpus_per_worker: 4
  - name: small
    model: saved.json
    count: 3
  - name: other
    model: keras:ResNet50
    batch_size: 32
"""


class FakeProfiler:
    """Replaces the profiler, and records the requests."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int | None]] = []

    def __call__(self, model: str, batch_size: int | None) -> ModelProfile:
        self.asked.append((model, batch_size))
        if "Unknown" in model:
            raise BadInputError(f"There is no model {model}.")
        return profile(batch_size=batch_size or 16)


def _read(tmp_path: Path, text: str, profiles: FakeProfiler | None = None) -> tuple[PlanJob, ...]:
    path = tmp_path / "jobs.yaml"
    path.write_text(text, encoding="utf-8")
    return read_jobs(path, profiles or FakeProfiler())


def test_a_file_is_read(tmp_path: Path) -> None:
    profiles = FakeProfiler()
    jobs = _read(tmp_path, GOOD, profiles)
    assert [job.name for job in jobs] == ["big", "small-0", "small-1", "small-2", "other"]
    big, small, _, _, other = jobs
    assert (big.min_workers, big.max_workers, big.steps, big.weight, big.gpus_per_worker) == (2, 8, 500, 2.0, 4)
    assert (small.min_workers, small.max_workers, small.steps, small.weight) == (1, None, 10_000, 1.0)
    assert small.gpus_per_worker is None
    assert big.profile is other.profile
    assert profiles.asked == [("keras:ResNet50", 32), (str(tmp_path / "saved.json"), None)]


@pytest.mark.parametrize("path", sorted((EXAMPLES / "jobs").glob("*.yaml")), ids=lambda path: path.name)
def test_the_examples_can_be_planned(path: Path) -> None:
    profiles = FakeProfiler()
    jobs = read_jobs(path, profiles)
    plan = plan_jobs(jobs, read_cluster(EXAMPLES / "clusters" / "mixed.yaml"))
    assert {job.name for job in plan.placed} == {job.name for job in jobs}
    assert all(model.startswith("keras:") or Path(model).is_file() for model, _ in profiles.asked)


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ("steps: 500", "steps: 0", 7, "greater than or equal to 1"),
        ("steps: 500", "stepps: 500", 7, "known keys are name, model, count"),
        ("batch_size: 32\n    min", "batch_size: -1\n    min", 4, "batch_size"),
        ("count: 3", "count: 0", 12, "count"),
        ("count: 3", "count: 100001", 12, "100000"),
        ("max_workers: 8", "max_workers: 1", 6, "less than min_workers, 2"),
        ("weight: 2", "weight: .inf", 8, "finite"),
        ("weight: 2", "weight: 0", 8, "greater than 0"),
        ("gpus_per_worker: 4", "gpus_per_worker: -1", 9, "gpus_per_worker"),
        ("name: other", "name: small-1", 13, "taken by line 10"),
        ("model: saved.json", "count: 3", 12, "duplicate key"),
        ("    model: saved.json\n", "", 10, "'model' is missing"),
        ("model: saved.json", "model: keras:Unknown", 11, "There is no model keras:Unknown."),
    ],
)
def test_mistakes(tmp_path: Path, old: str, new: str, line: int, says: str) -> None:
    assert old in GOOD
    with pytest.raises(BadInputError) as caught:
        _read(tmp_path, GOOD.replace(old, new, 1))
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'jobs.yaml'}, line {line}: ")
    assert says in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "mapping with the key 'jobs'"),
        ("[1]", "mapping with the key 'jobs'"),
        ("jobs: []", "there is no job; list at least one"),
        ("jobs: [", "this is not YAML"),
        ("jobs: [1]", "jobs.0"),
        ("nodes: []", "the key 'jobs' is missing"),
    ],
)
def test_what_is_no_file_of_jobs(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(BadInputError, match="line 1: ") as caught:
        _read(tmp_path, text)
    assert says in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="cannot be read"):
        read_jobs(tmp_path / "missing.yaml", FakeProfiler())
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInputError, match="not UTF-8"):
        read_jobs(path, FakeProfiler())


def test_no_more_jobs_than_there_may_be(tmp_path: Path) -> None:
    text = "jobs:\n" + "".join(f"  - {{name: n{i}, model: m, count: 60000}}\n" for i in range(2))
    with pytest.raises(BadInputError, match="line 3: there are more than 100,000 jobs"):
        _read(tmp_path, text)
