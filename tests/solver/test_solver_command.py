"""`python -m solver` as a user runs it: the questions that `dike plan` answers, from saved profiles."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest

from dike.profile import Api
from solver import Plan, deadline
from solver.__main__ import main
from solver.choices import METHODS, RULES
from solver.comparison import Row
from solver.planner import PlanProgress
from tests.solver.solver_cases import profile

CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"
FIVE = CLUSTERS / "five-k80.yaml"
EXAMPLE_JOBS = CLUSTERS.parent / "jobs" / "team.yaml"
DEADLINE_S = 180.0


@dataclass(frozen=True)
class Done:
    code: object
    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str | Path) -> Done:
        monkeypatch.setattr(sys, "argv", ["solver", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return Done(ended.value.code, out, err)

    return call


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.json"
    path.write_text(profile(api=Api.GRAPH).dumps(), encoding="utf-8")
    return path


@pytest.mark.integration
def test_it_is_a_program_of_its_own(model: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "solver",
        str(model),
        "--cluster",
        str(CLUSTERS / "laptop.yaml"),
        "--format",
        "json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert Plan.loads(done.stdout).option.workers >= 1
    assert done.stderr == ""


def test_every_method_stands_in_the_comparison(model: Path, run: Run) -> None:
    done = run(model, "--cluster", CLUSTERS / "laptop.yaml", "--compare", "--format", "json")
    assert done.code == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {row["method"] for row in rows} == set(METHODS)
    assert max(rows, key=lambda row: row["samples_per_s"])["share"] == 1.0
    table = run(model, "--cluster", CLUSTERS / "laptop.yaml", "--compare")
    assert all(method in table.stdout for method in METHODS)


def test_another_method_plans(model: Path, run: Run) -> None:
    done = run(model, "--cluster", FIVE, "--method", "sar_basic", "--format", "json")
    plan = Plan.loads(done.stdout)
    assert plan.method == "sar_basic"
    assert 0 < plan.gap < 0.1


@pytest.mark.slow
def test_rules_can_be_chosen(model: Path, run: Run) -> None:
    plans = {
        rules: Plan.loads(run(model, "--cluster", FIVE, "--rules", rules, "--format", "json").stdout)
        for rules in ("default", "all", "-cpu_gpu_ratio")
    }
    assert set(plans["all"].options.pruned) == {*RULES, "task_counts"}
    assert "cpu_gpu_ratio" not in plans["-cpu_gpu_ratio"].options.pruned
    assert plans["all"].options.considered < 20 < plans["default"].options.considered


def test_a_sweep_is_printed_and_drawn(model: Path, run: Run, tmp_path: Path) -> None:
    picture = tmp_path / "sweep.svg"
    done = run(model, "--cluster", FIVE, "--sweep", "network_gbps=1,10", "--picture", picture)
    assert done.code == 0, done.stderr
    assert "network_gbps=10" in done.stdout
    assert "predicted samples/s" in picture.read_text(encoding="utf-8")


@pytest.mark.parametrize("question", [("--sweep", "network_gbps=1,10"), ("--what-if", "add 1 x gpu")])
def test_variants_say_once_which_gpus_speed_is_a_guess(
    model: Path, run: Run, tmp_path: Path, question: tuple[str, str]
) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(FIVE.read_text(encoding="utf-8").replace("K80", "Z9"), encoding="utf-8")
    done = run(model, "--cluster", cluster, *question)
    assert done.code == 0, done.stderr
    assert done.stdout.count("The speed of GPU model 'Z9' is not known") == 1


def test_what_if_stands_beside_what_is(model: Path, run: Run) -> None:
    done = run(model, "--cluster", FIVE, "--what-if", "add 2 x gpu", "--what-if", "network_gbps=1", "--format", "json")
    as_it_is, more, slower = json.loads(done.stdout)
    assert as_it_is["label"] == "unchanged"
    assert more["plan"]["samples_per_s"] >= as_it_is["plan"]["samples_per_s"] > slower["plan"]["samples_per_s"]


@pytest.mark.integration
def test_a_time_limit_still_gives_a_plan(model: Path, run: Run) -> None:
    done = run(model, "--cluster", FIVE, "--plan-timeout", "60", "--format", "json")
    assert done.code == 0, done.stderr
    assert Plan.loads(done.stdout).optimal


def test_many_jobs_are_planned_together(model: Path, run: Run, tmp_path: Path) -> None:
    jobs = tmp_path / "jobs.yaml"
    jobs.write_text("jobs:\n  - name: a\n    model: model.json\n    count: 3\n", encoding="utf-8")
    names = {}
    for order in ("gain", "given"):
        done = run("--jobs", jobs, "--cluster", FIVE, "--order", order, "--format", "json")
        assert done.code == 0, done.stderr
        names[order] = [job["name"] for job in json.loads(done.stdout)["placed"]]
    # One after the other, the first takes all that makes it faster.
    assert names == {"gain": ["a-0", "a-1", "a-2"], "given": ["a-0"]}
    assert "3 jobs placed" in run("--jobs", jobs, "--cluster", FIVE).stdout


def test_measurements_change_the_prediction_and_are_reported(model: Path, run: Run, tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text(
        "placement,cpus,gpus,seconds\nk80-0:p0+1w,1.5,1,2.0\nk80-0:p0+4w|k80-1:4w,1.5,1,2.5\n", encoding="utf-8"
    )
    plain = Plan.loads(run(model, "--cluster", FIVE, "--format", "json").stdout)
    done = run(model, "--cluster", FIVE, "--measurements", rows, "--format", "json")
    assert done.code == 0, done.stderr
    assert Plan.loads(done.stdout).samples_per_s < plain.samples_per_s
    assert "Calibrated with 2 measurements" in run(model, "--cluster", FIVE, "--measurements", rows).stdout


def test_bad_input_is_one_sentence_and_exit_2(model: Path, run: Run, tmp_path: Path) -> None:
    two = ["--cluster", FIVE]
    cases: list[tuple[list[str | Path], str]] = [
        ([model], "--cluster is missing"),
        ([*two], "The model is missing"),
        (["keras:ResNet50", *two], "dike profile"),
        ([model, *two, "--rules", "beauty"], "'beauty' is not a rule"),
        ([model, *two, "--method", "magic"], "There is no method 'magic'"),
        ([model, *two, "--compare", "--sweep", "batch_size=1"], "cannot be combined"),
        ([model, *two, "--plan-timeout", "0"], "more than 0"),
        ([model, *two, "--sweep", "taste=1"], "cannot be swept"),
        ([model, *two, "--what-if", "add 2 x moon"], "no machines 'moon'"),
        ([model, *two, "--measurements", tmp_path / "none.csv"], "none.csv"),
        (["--jobs", tmp_path / "none.yaml", *two], "none.yaml"),
        ([model, "--jobs", tmp_path / "none.yaml", *two], "remove"),
        ([model, *two, "--compare", "--picture", tmp_path / "a.png"], "--picture draws"),
        ([model, *two, "--compare", "--method", "optimus"], "--method cannot be used with --compare"),
        ([model, *two, "--order", "given"], "--order cannot be used with a single job"),
        (["--jobs", EXAMPLE_JOBS, *two, "--rules", "all"], "--rules cannot be used with --jobs"),
        ([model, *two, "--sweep", "batch_size=" + "9" * 400], "batch_size"),
    ]
    for arguments, says in cases:
        done = run(*arguments)
        assert done.code == 2, (arguments, done)
        assert says in done.stderr
        assert done.stdout == ""
        assert len(done.stderr.strip().splitlines()) == 1


def _over_when(enough: Callable[[object], bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Time limits are over as soon as enough is known, which takes each machine another time."""
    clock = SimpleNamespace(now_s=0.0)
    watch = deadline._watch

    def watch_until(ours: Connection, limit_s: float, on_progress: Callable[[object], None]) -> object:
        def told(progress: object) -> None:
            on_progress(progress)
            if enough(progress):
                clock.now_s += limit_s + 1

        return watch(ours, limit_s, told)

    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    monkeypatch.setattr(deadline, "_watch", watch_until)


@pytest.mark.integration
def test_a_time_limit_that_is_over_keeps_what_there_is(model: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without rules, the search cannot prove its plan in time; the plans found early are there anyway."""
    slow = [model, "--cluster", CLUSTERS / "mixed.yaml", "--rules", "none", "--format", "json", "--plan-timeout", "300"]
    with monkeypatch.context() as patch:
        _over_when(lambda progress: isinstance(progress, PlanProgress), patch)
        plan = Plan.loads(run(*slow).stdout)
        baseline = Plan.loads(run(*slow, "--method", "sar_basic").stdout)
    assert not plan.optimal
    assert 0 < plan.gap <= 1
    assert baseline.method == "sar_basic"
    with monkeypatch.context() as patch:
        _over_when(lambda row: isinstance(row, Row) and row.method == "optimus", patch)
        rows = {row["method"]: row for row in json.loads(run(*slow, "--compare").stdout)}
    assert rows["optimus"]["samples_per_s"] > 0
    assert set(rows) == set(METHODS)
    assert "no result within 300 s" in rows["dike"]["reason"]
