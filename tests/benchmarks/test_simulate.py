"""`python -m benchmarks simulate` as a user runs it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from benchmarks.simulation.commands import app
from benchmarks.simulation.comparison import POLICY_NAMES, TYPED_POLICY_NAMES
from dike.exceptions import BadInputError

KEYS = {"mean_time_good_s", "time_first_s", "time_top4_s", "preemptions"}


@pytest.fixture
def curves(tmp_path: Path) -> Path:
    """Thirty trials of 100 to 129 s, a third of which reach a tenth of their first loss; two diverge."""
    path = tmp_path / "curves.csv"
    rows = ["trial,step,seconds,train_loss,accuracy"]
    for number in range(30):
        speed = 0.06 if number % 3 == 0 else 0.01
        for step in range(100 + number):
            loss = math.nan if number in (4, 5) and step > 30 else math.exp(-speed * step)
            rows.append(f"t{number},{step},{step + 1},{loss},{1 - loss}")
    path.write_text("\n".join(rows), encoding="utf-8")
    return path


@pytest.fixture
def table(curves: Path) -> Path:
    """Two jobs: one that is four times as fast on the second type, one that is as fast on both."""
    path = curves.with_name("table.json")
    speeds = {"old": {"Net": 2.0, "Game": 6.0, "Lost": 1.0}, "new": {"Net": 8.0, "Game": 6.0}}
    rows = {
        kind: {f"('{model} (batch size 4)', 1)": {"null": steps_s} for model, steps_s in jobs.items()}
        for kind, jobs in speeds.items()
    }
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


def simulate_types(curves: Path, table: Path, *arguments: str) -> Result:
    command = ["simulate", "--curves", str(curves), "--jobs", "8", "--good", "3", "--seeds", "3"]
    return CliRunner().invoke(app, [*command, "--gpu-types", "old:1,new:1", "--throughputs", str(table), *arguments])


def simulate(curves: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["simulate", "--curves", str(curves), "--gpus", "2", "--jobs", "8", *arguments])


def test_the_quantum_grows_unless_it_is_told_otherwise(curves: Path) -> None:
    def preemptions(*arguments: str) -> float:
        done = simulate(curves, "--good", "3", "--seeds", "3", "--policies", "hermes", "--format", "json", *arguments)
        assert done.exit_code == 0, done.output
        return float(json.loads(done.stdout)["policies"]["hermes"]["preemptions"])

    fixed = ("--milestones", "none", "--quantum-growth", "0")
    assert preemptions() == preemptions("--milestones", "50%:2x,75%:4x", "--quantum-growth", "0.25")
    assert preemptions() < preemptions(*fixed)
    assert preemptions("--quantum", "2", "--milestones", "50%:4s") == preemptions(
        "--quantum", "2", "--milestones", "50%:2x"
    )


def test_the_table_says_what_was_simulated(curves: Path) -> None:
    done = simulate(curves, "--good", "3", "--seeds", "3", "--policies", "fifo,hermes")
    assert done.exit_code == 0, done.output
    for text in ("2 GPUs, 8 trials, 3 good; mean of 3 bins", "hermes", "10 of the 30 recorded", "x: as a multiple of"):
        assert text in done.stdout


@pytest.mark.slow
def test_json_alone_on_standard_output_the_same_for_the_same_seeds(curves: Path) -> None:
    arguments = ("--good", "3", "--seeds", "4", "--format", "json")
    done = simulate(curves, *arguments)
    result = json.loads(done.stdout)
    assert list(result["policies"]) == list(POLICY_NAMES)
    assert all(set(figures) == KEYS for figures in result["policies"].values())
    oracle = result["policies"]["oracle"]
    for figures in result["policies"].values():
        assert figures["time_first_s"] <= figures["mean_time_good_s"] <= figures["time_top4_s"]
        assert figures["mean_time_good_s"] >= oracle["mean_time_good_s"]
    assert result["target"] == pytest.approx(1 - 0.9 * (1 - math.exp(-0.06 * 126)))
    settings = result["settings"]
    assert (settings["quantum_s"], settings["overhead_s"]) == pytest.approx((1.145, 0.1145))
    assert settings["report_s"] == pytest.approx(settings["quantum_s"] / 4)
    assert simulate(curves, *arguments).stdout == done.stdout


def test_seeds_are_independent_of_each_other(curves: Path) -> None:
    def first_s(*arguments: str) -> float:
        done = simulate(curves, "--good", "3", "--policies", "hermes", "--format", "json", *arguments)
        return float(json.loads(done.stdout)["policies"]["hermes"]["time_first_s"])

    alone = [first_s("--seeds", "1", "--first-seed", str(seed)) for seed in (5, 6)]
    assert first_s("--seeds", "2", "--first-seed", "5") == pytest.approx(sum(alone) / 2)


def test_a_metric_to_be_maximised_gives_what_its_loss_gives(curves: Path) -> None:
    arguments = ("--good", "3", "--seeds", "2", "--policies", "fifo,hermes", "--format", "json")
    by_loss = json.loads(simulate(curves, *arguments, "--target", "0.2").stdout)
    by_accuracy = json.loads(
        simulate(curves, *arguments, "--metric", "accuracy", "--mode", "max", "--target", "0.8").stdout
    )
    assert by_accuracy["target"] == 0.8
    for name, figures in by_loss["policies"].items():
        assert by_accuracy["policies"][name] == pytest.approx(figures, rel=1e-6)


def test_settings_reach_the_simulation(curves: Path) -> None:
    arguments = ("--good", "3", "--seeds", "2", "--policies", "rr", "--format", "json")
    fine = json.loads(simulate(curves, *arguments, "--quantum", "2", "--overhead", "0").stdout)["policies"]["rr"]
    coarse = json.loads(simulate(curves, *arguments, "--quantum", "10", "--overhead", "0").stdout)["policies"]["rr"]
    dear = json.loads(simulate(curves, *arguments, "--quantum", "10", "--overhead", "5").stdout)["policies"]["rr"]
    assert fine["preemptions"] > 3 * coarse["preemptions"]
    assert dear["mean_time_good_s"] > 1.2 * coarse["mean_time_good_s"]
    to_the_end = json.loads(simulate(curves, *arguments, "--until", "end", "--quantum", "10").stdout)
    assert to_the_end["settings"]["until"] == "end"
    assert to_the_end["policies"]["rr"]["mean_time_good_s"] > coarse["mean_time_good_s"]


@pytest.mark.slow
def test_the_picture(curves: Path, tmp_path: Path) -> None:
    picture = tmp_path / "comparison.svg"
    done = simulate(curves, "--good", "3", "--seeds", "2", "--policies", "fifo,oracle", "--plot", str(picture))
    assert done.exit_code == 0, done.output
    drawn = picture.read_text(encoding="utf-8")
    for text in ("mean time to target, oracle = 1", "fifo", "good trials at the target"):
        assert text in drawn


@pytest.mark.slow
def test_types_of_gpus(curves: Path, table: Path) -> None:
    done = simulate_types(curves, table, "--policies", "hermes,hermes2")
    assert done.exit_code == 0, done.output
    for text in (
        "old:1,new:1, 8 trials, 3 good",
        "completion",
        "2 jobs of table.json; recorded seconds are those of a new",
    ):
        assert text in done.stdout
    arguments = ("--format", "json", "--overhead", "0", "--move-overhead", "0.5", "--until", "end")
    result = json.loads(simulate_types(curves, table, *arguments).stdout)
    assert list(result["policies"]) == list(TYPED_POLICY_NAMES)
    assert all(set(figures) == {*KEYS, "mean_completion_s", "speed"} for figures in result["policies"].values())
    assert result["settings"]["gpu_types"] == ["old", "new"]
    assert result["settings"]["table_jobs"] == ["Net (batch size 4)", "Game (batch size 4)"]
    assert (result["settings"]["move_overhead_s"], result["settings"]["gpus"]) == (0.5, 2)
    limit, hermes = result["policies"]["assignment"], result["policies"]["hermes"]
    assert limit["speed"] > hermes["speed"]
    assert limit["mean_completion_s"] < hermes["mean_completion_s"]


def test_trials_of_the_models_that_are_named(curves: Path, table: Path) -> None:
    arguments = ("--policies", "fifo", "--format", "json", "--until", "end", "--overhead", "0")
    even, net = (
        json.loads(simulate_types(curves, table, *arguments, "--models", model).stdout) for model in ("Game", "Net")
    )
    assert even["settings"]["table_jobs"] == ["Game (batch size 4)"]
    assert net["policies"]["fifo"]["mean_completion_s"] > 1.2 * even["policies"]["fifo"]["mean_completion_s"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--gpu-types", "old:1,nww:1"), "There is no GPU type 'nww'"),
        (("--gpu-types", "old"), "'old' in --gpu-types is not a type and a count"),
        (("--gpus", "2"), "leave --gpus out"),
        (("--models", "Nett"), "There is no model 'Nett'"),
        (("--models", "Lost"), "There is no model 'Lost'"),
        (("--policies", "oracle"), "There is no policy 'oracle' with --gpu-types"),
        (("--throughputs", "none.json"), "none.json cannot be read"),
        (("--move-overhead", "-1"), "--move-overhead must be finite and at least 0 seconds, not -1"),
    ],
)
def test_bad_types_are_one_sentence(curves: Path, table: Path, arguments: tuple[str, ...], said: str) -> None:
    error = simulate_types(curves, table, *arguments).exception
    assert isinstance(error, BadInputError)
    assert said in str(error)
    assert str(error).count("\n") == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--curves", "none.csv"), "none.csv cannot be read: No such file"),
        (("--metric", "loss"), "There is no column 'loss'"),
        (("--jobs", "31"), "--jobs 31 is more than the 30 trials"),
        (("--good", "9"), "--jobs, which is 8, not 9"),
        (("--good", "0"), "--jobs, which is 8, not 0"),
        (("--jobs", "12", "--good", "11"), "10 of the 30 trials reach the target"),
        (("--policies", "fifo,herms"), "There is no policy 'herms'; did you mean hermes?"),
        (("--policies", ","), "--policies is empty"),
        (("--quantum", "0"), "--quantum must be more than 0 seconds, not 0"),
        (("--overhead", "-1"), "--overhead must be finite and at least 0 seconds, not -1"),
        (("--overhead", "inf"), "--overhead must be finite and at least 0 seconds, not inf"),
        (("--gpus", "0"), "--gpus must be at least 1, not 0"),
        (("--seeds", "0"), "--seeds must be at least 1, not 0"),
        (("--target", "nan"), "--target must be a finite number, not nan"),
        (("--target-share", "1.5"), "--target-share must be between 0 and 1, not 1.5"),
        (("--milestones", "soon"), "'soon' is not a value of --milestones"),
        (("--milestones", "50%:0x"), "'50%:0x' is not a value of --milestones"),
        (("--quantum-growth", "-0.5"), "--quantum-growth must be finite and at least 0, not -0.5"),
        (("--plot", "picture.txt"), "'picture.txt' is not a picture file"),
        (("--throughputs", "table.json"), "--throughputs is for GPUs that differ"),
        (("--gpu-types", "old:1"), "--gpu-types needs --throughputs"),
        (("--models", "ResNet-18"), "--models is for GPUs that differ"),
        (("--policies", "assignment"), "There is no policy 'assignment' without --gpu-types"),
    ],
)
def test_bad_input_is_one_sentence(curves: Path, arguments: tuple[str, ...], said: str) -> None:
    error = simulate(curves, *arguments).exception
    assert isinstance(error, BadInputError)
    assert said in str(error)
    assert str(error).count("\n") == 0


def test_made_up_curves_need_no_file(curves: Path) -> None:
    command = ["simulate", "--family", "plateau", "--seeds", "1", "--policies", "fifo,oracle", "--format", "json"]
    first, again, other = (
        json.loads(CliRunner().invoke(app, [*command, "--family-seed", seed]).stdout) for seed in ("1", "1", "2")
    )
    assert first == again
    assert first["settings"]["curves"] == "plateau, seed 1"
    assert first["target"] != other["target"]
    for arguments, message in (
        (["--family", "plateau", "--curves", str(curves)], "either recorded curves"),
        ([], "either recorded curves"),
        (["--family", "plato"], "did you mean plateau"),
        (["--family", "plateau", "--mode", "max"], "leave them out with --family"),
        (["--family", "plateau", "--family-seed", "-1"], "--family-seed must be at least 0, not -1"),
    ):
        done = CliRunner().invoke(app, ["simulate", *arguments])
        assert isinstance(done.exception, BadInputError)
        assert message in str(done.exception)
