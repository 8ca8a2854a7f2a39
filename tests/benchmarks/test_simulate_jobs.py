"""`python -m benchmarks simulate-jobs` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from benchmarks.simulation.commands import app
from dike.exceptions import BadInputError
from tests.solver.solver_cases import digits

TABLES = Path(__file__).parents[2] / "benchmarks" / "data" / "pollux"
KEYS = {"mean_completion_s", "p90_completion_s", "makespan_s", "gpu_share", "resizes"}


def simulate_jobs(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["simulate-jobs", "--jobs", "6", "--seeds", "1", "--machines", "2", *arguments])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tables, profiles and traces."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "tables").mkdir()
    (folder / "tables" / "cifar10").symlink_to(TABLES / "cifar10")
    (folder / "profiles").mkdir()
    (folder / "profiles" / "digits.json").write_text(digits().dumps(), encoding="utf-8")
    (folder / "empty").mkdir()
    (folder / "trace.csv").write_text(
        "arrival_s,model,samples,workers\n0,cifar10,1e6,2\n60,digits-sync,,\n", encoding="utf-8"
    )
    (folder / "wrong.csv").write_text("arrival_s,model\n0,cifar100\n", encoding="utf-8")
    (folder / "late.csv").write_text("arrival_s,model\nsoon,cifar10\n", encoding="utf-8")
    (folder / "none.csv").write_text("arrival_s,model\n", encoding="utf-8")
    return folder


@pytest.mark.slow
def test_the_table_says_what_was_simulated(folder: Path) -> None:
    picture = folder / "jobs.svg"
    done = simulate_jobs(
        *("--tables", str(folder / "tables"), "--policies", "optimus,fifo,gain/spread/in-turn"),
        *("--convergence-error", "0", "--speed-error", "0.1", "--plot", str(picture)),
    )
    assert done.exit_code == 0, done.output
    for text in ("6 jobs (6 an hour) on 2 machines of 4 GPUs", "gain/spread/in-turn", "known up to 10%"):
        assert text in done.stdout
    assert "mean completion time, optimus = 1" in picture.read_text(encoding="utf-8")


def test_json_of_a_trace_is_the_same_for_the_same_seed(folder: Path) -> None:
    arguments = (
        *("--tables", str(folder / "tables"), "--profiles", str(folder / "profiles"), "--jobs", "2"),
        *("--trace", str(folder / "trace.csv"), "--format", "json", "--first-seed", "3"),
    )
    done = simulate_jobs(*arguments)
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert list(result["policies"]) == ["dike", "optimus", "drf", "tetris", "fifo"]
    assert all(set(figures) == KEYS for figures in result["policies"].values())
    for figures in result["policies"].values():
        assert 0 < figures["mean_completion_s"] <= figures["p90_completion_s"] <= figures["makespan_s"] + 60
    assert (result["settings"]["seeds"], result["settings"]["jobs_per_hour"]) == ([3], None)
    assert simulate_jobs(*arguments).stdout == done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "There are no models; give measured speeds by --tables"),
        (("--tables", "empty"), "There is no MODEL/placements.csv in"),
        (("--profiles", "empty"), "There is no saved profile (.json) in"),
        (
            ("--tables", "tables", "--trace", "wrong.csv", "--jobs", "1"),
            "of the model 'cifar100'; did you mean cifar10?",
        ),
        (("--tables", "tables", "--trace", "trace.csv", "--jobs", "2"), "of the model 'digits-sync'"),
        (("--tables", "tables", "--trace", "trace.csv"), "--jobs 6 is more than the 2 jobs of the trace"),
        (("--tables", "tables", "--trace", "late.csv"), "'soon' in column 'arrival_s' must be a number above 0"),
        (("--tables", "tables", "--trace", "none.csv"), "has no jobs"),
        (("--tables", "tables", "--trace", "missing.csv"), "cannot be read: No such file"),
        (("--tables", "tables", "--gpus-per-machine", "8"), "has at most 4 GPUs on a machine, not 8"),
        (("--tables", "tables", "--machines", "0"), "not 0 machines with 4 GPUs each"),
        (("--tables", "tables", "--memory-per-machine", "-1"), "more than 0 GiB of memory, not -1"),
        (("--profiles", "profiles", "--memory-per-machine", "1"), "No machine holds a worker of 'digits-"),
        (("--tables", "tables", "--policies", "optimum"), "There is no policy 'optimum'; did you mean optimus?"),
        (("--tables", "tables", "--policies", ","), "--policies is empty"),
        (("--tables", "tables", "--arrivals", "poisson:0"), "an hour, not 'poisson:0'"),
        (("--tables", "tables", "--arrivals", "hourly"), "an hour, not 'hourly'"),
        (("--tables", "tables", "--interval", "0"), "--interval must be more than 0 seconds, not 0"),
        (("--tables", "tables", "--resize-cost", "600"), "less than --interval, not 600"),
        (("--tables", "tables", "--speed-error", "1"), "--speed-error must be at least 0 and below 1, not 1"),
        (("--tables", "tables", "--jobs", "0"), "--jobs must be at least 1, not 0"),
        (("--tables", "tables", "--seeds", "0"), "--seeds must be at least 1, not 0"),
        (("--tables", "tables", "--plot", "jobs.txt"), "'jobs.txt' is not a picture file"),
    ],
)
def test_bad_input_is_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(folder)
    error = simulate_jobs(*arguments).exception
    assert isinstance(error, BadInputError)
    assert said in str(error)
    assert str(error).count("\n") == 0
