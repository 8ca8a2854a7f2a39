"""Trials of TensorFlow 1 scripts: suspended or killed and resumed, they train as if nothing had happened."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.warm import WarmTensorFlow

pytestmark = pytest.mark.tensorflow

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
DIGITS = str(ROOT / "examples" / "digits_v1.py")
KILLED = -9
SUSPENDED = 75


def case(name: str, script: str, *arguments: str, **options: Any) -> dict[str, Any]:
    path = script if script == DIGITS else str(HERE / "scripts" / script)
    return {"name": name, "script": path, "arguments": arguments, **options}


def interrupted(name: str, script: str, *arguments: str, at: list[int]) -> list[dict[str, Any]]:
    return [
        case(name, script, *arguments),
        case(f"{name}-suspended", script, *arguments, suspend_at=at),
        case(f"{name}-paused", script, *arguments, suspend_at=at, paused=True),
        case(f"{name}-killed", script, *arguments, kill_at=at[-1], checkpoint_interval_s=0.0),
    ]


CASES = [
    *interrupted("digits", DIGITS, "--seed", "5", "--steps", "14", at=[10, 11]),
    *interrupted("monitored", "v1_monitored.py", "25", at=[1, 20, 7]),
    *interrupted("plain", "v1_plain.py", "5", at=[6, 13]),
    case("folds", "v1_folds.py"),
    case("folds-suspended", "v1_folds.py", suspend_at=[2, 10]),
    case("unseeded", "v1_plain.py", suspend_at=[9]),
    case("asked", "v1_monitored.py", "25", ask=True),
    case("python-data", "v1_python_data.py", suspend_at=[5]),
    case("random-data", "v1_random_data.py"),
    case("random-data-suspended", "v1_random_data.py", suspend_at=[2]),
    case("queue", "v1_queue.py", suspend_at=[5]),
    case("threads", "v1_threads.py", suspend_at=[2]),
    case("left-open", "v1_other_way.py"),
    case("other-way", "v1_other_way.py", suspend_at=[2]),
    case("other-model", "v1_monitored.py", "25", suspend_at=[4], then_script=str(HERE / "scripts/v1_python_data.py")),
]


@dataclass(frozen=True)
class TrialRecord:
    """How a trial went.

    Attributes:
        codes: exit codes of its runs.
        reports: all that it reported.
        losses: (run, step, loss) of every step taken, the loss in hexadecimal.
        output: what it printed.
    """

    codes: list[int]
    reports: list[dict[str, Any]]
    losses: list[tuple[int, int, str]]
    output: str

    def last_losses(self) -> dict[int, str]:
        """Step -> its loss, as the last run that took it had it."""
        return {step: loss for _, step, loss in self.losses}

    def value(self) -> float:
        """What it is compared with others by in the end."""
        return float(self.told("progress")[-1]["value"])

    def told(self, kind: str) -> list[dict[str, Any]]:
        """The reports of one kind."""
        return [report for report in self.reports if report["type"] == kind]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("graph")


@pytest.fixture(scope="module")
def trials(folder: Path) -> dict[str, TrialRecord]:
    (folder / "cases.json").write_text(json.dumps(CASES))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "-1"}
    command = [sys.executable, HERE / "graph_zygote.py", folder]
    done = warm.run(command, cwd=ROOT, env=environment, timeout=300, process_class=WarmTensorFlow)
    assert done.returncode == 0, done.stderr
    return {each["name"]: read(folder, each["name"]) for each in CASES}


def read(folder: Path, name: str) -> TrialRecord:
    lines = [line.split() for line in (folder / name / "steps.txt").read_text().splitlines()]
    return TrialRecord(
        **json.loads((folder / f"{name}.json").read_text()),
        losses=[(int(run), int(step), loss) for run, step, loss in lines],
        output=(folder / name / "output.txt").read_text(),
    )


@pytest.mark.parametrize("name", ["digits", "monitored", "plain"])
def test_a_suspended_trial_has_the_losses_of_an_uninterrupted_one(trials: dict[str, TrialRecord], name: str) -> None:
    whole, suspended = trials[name], trials[f"{name}-suspended"]
    assert whole.codes == [0]
    assert suspended.codes[:-1] == [SUSPENDED] * (len(suspended.codes) - 1)
    assert len(suspended.codes) > 2
    assert suspended.codes[-1] == 0
    check_same(whole, suspended)


@pytest.mark.parametrize("name", ["digits", "monitored", "plain"])
def test_a_trial_paused_in_memory_has_the_same_losses(trials: dict[str, TrialRecord], name: str) -> None:
    whole, paused = trials[name], trials[f"{name}-paused"]
    assert paused.codes == [0]
    times = len(paused.told("paused"))
    assert times > 1
    assert [each["path"].rpartition("/")[2].split("-step")[0] for each in paused.told("paused")] == [
        f"run-{run}" for run in range(times)
    ]
    assert [report["path"] for report in paused.told("restored")] == [each["path"] for each in paused.told("paused")]
    assert [report["preemptible"] for report in paused.told("training")] == [True] * (times + 1)
    check_same(whole, paused)


def check_same(whole: TrialRecord, suspended: TrialRecord) -> None:
    assert [step for _, step, _ in suspended.losses] == [step for _, step, _ in whole.losses]
    assert suspended.last_losses() == whole.last_losses()
    assert suspended.value() == whole.value()
    assert whole.value() == float.fromhex(whole.losses[-1][2])
    assert (
        len({tuple(each.told("progress")[-1][key] for key in ("best", "best_step")) for each in (whole, suspended)})
        == 1
    )
    assert len(set(whole.last_losses().values())) > len(whole.losses) // 2


@pytest.mark.parametrize("name", ["digits", "monitored", "plain"])
def test_a_killed_trial_resumes_from_its_newest_checkpoint(trials: dict[str, TrialRecord], name: str) -> None:
    whole, killed = trials[name], trials[f"{name}-killed"]
    assert killed.codes == [KILLED, 0]
    done = max(step for run, step, _ in killed.losses if run == 0)
    again = [step for run, step, _ in killed.losses if run == 1]
    assert again == list(range(done, max(whole.last_losses()) + 1))
    assert killed.last_losses() == whole.last_losses()
    assert killed.value() == whole.value()


def test_folds_and_alternating_optimizers_resume(trials: dict[str, TrialRecord]) -> None:
    whole, suspended = trials["folds"], trials["folds-suspended"]
    assert suspended.codes == [SUSPENDED, SUSPENDED, 0]
    assert [loss for _, _, loss in suspended.losses] == [loss for _, _, loss in whole.losses]
    assert len(whole.losses) == 12
    assert suspended.output.splitlines()[-1] == whole.output.splitlines()[-1]


def test_a_script_with_its_own_loop_gets_back_its_lists_and_counters(trials: dict[str, TrialRecord]) -> None:
    for name in ("plain", "plain-suspended", "unseeded"):
        trial = trials[name]
        history = trial.output.splitlines()[-1].removeprefix("history ").split()
        assert history == [loss for _, _, loss in trial.losses]


def test_what_a_trial_tells(trials: dict[str, TrialRecord]) -> None:
    trial = trials["monitored-suspended"]
    assert [(report["path"].rpartition("/")[2], report["step"]) for report in trial.told("suspended")] == [
        ("run-0-step-1", 1),
        ("run-1-step-7", 7),
        ("run-2-step-20", 20),
    ]
    assert [report["path"] for report in trial.told("restored")] == [
        report["path"] for report in trial.told("suspended")
    ]
    assert [report["preemptible"] for report in trial.told("training")] == [True] * 4
    assert sum(report.get("count", 0) for report in trial.told("progress")) == 25
    assert trial.told("checkpoint")[-1]["step"] == 25


def test_a_request_is_obeyed_after_the_step(trials: dict[str, TrialRecord]) -> None:
    trial = trials["asked"]
    assert trial.codes == [SUSPENDED, 0]
    assert trial.last_losses() == trials["monitored"].last_losses()


def test_a_session_left_open_is_saved_at_the_end(trials: dict[str, TrialRecord]) -> None:
    assert [report["step"] for report in trials["left-open"].told("checkpoint")] == [5]


def test_each_run_has_its_own_folder_for_the_scripts_checkpoints(trials: dict[str, TrialRecord]) -> None:
    trial = trials["monitored-suspended"]
    assert "checkpoints for 'model' go to" in trial.output
    assert "kept model.ckpt-" in trial.output
    assert trial.last_losses().keys() == set(range(1, 26))


def test_data_read_by_python_begin_anew_and_the_trial_says_so(trials: dict[str, TrialRecord]) -> None:
    trial = trials["python-data"]
    assert trial.codes == [SUSPENDED, 0]
    assert [step for _, step, _ in trial.losses] == list(range(1, 13))
    assert "a resumed run reads them from the start" in trial.output


def test_the_position_in_data_with_random_ops_is_kept(trials: dict[str, TrialRecord]) -> None:
    whole, suspended = trials["random-data"], trials["random-data-suspended"]
    assert suspended.codes == [SUSPENDED, 0]
    # The loop of this script counts for itself, so it takes all its steps again.
    assert [step for _, step, _ in suspended.losses] == [1, 2, 3, 4, 5]
    assert [loss for _, _, loss in suspended.losses][:3] == [loss for _, _, loss in whole.losses]
    assert "is saved without the state of its random ops" in suspended.output


EXPORTED = """
import sys, tensorflow as tf
from dike.trial.export import find_model, export
for name in ("digits", "plain"):
    kept = find_model(f"{sys.argv[1]}/{name}/checkpoints", None, None)
    export(kept, f"{sys.argv[1]}/{name}-exported")
    reader = tf.train.load_checkpoint(f"{sys.argv[1]}/{name}-exported")
    print(kept.step, len(reader.get_variable_to_shape_map()))
model = tf.saved_model.load(f"{sys.argv[1]}/digits-exported/saved_model").signatures["serving_default"]
print({name: value.shape.as_list() for name, value in model(image=tf.zeros([3, 8, 8, 1])).items()})
"""


def test_a_session_is_exported_as_a_checkpoint_and_where_the_graph_allows_as_a_saved_model(
    trials: dict[str, TrialRecord], folder: Path
) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "-1"}
    command = [sys.executable, "-c", EXPORTED, folder]
    done = warm.run(command, env=environment, timeout=120, process_class=WarmTensorFlow)
    assert done.returncode == 0, done.stderr
    digits, plain, shape = done.stdout.splitlines()
    steps = [max(trials[name].last_losses()) for name in ("digits", "plain")]
    assert [int(line.split()[0]) for line in (digits, plain)] == steps
    assert shape == "{'logits': [3, 10]}"
    assert "no SavedModel beside the checkpoint: its model reads the data itself" in done.stderr
    files = {path.name.partition(".data")[0] for path in (folder / "plain-exported").iterdir()}
    assert files == {"checkpoint", "model.ckpt", "model.ckpt.index", "model.ckpt.meta"}


@pytest.mark.parametrize(("name", "why"), [("queue", "from queues"), ("threads", "in several threads")])
def test_a_trial_that_cannot_be_saved_says_so_and_runs_on(trials: dict[str, TrialRecord], name: str, why: str) -> None:
    trial = trials[name]
    assert trial.codes == [0]
    assert trial.told("training")[-1]["preemptible"] is False
    assert why in trial.output
    assert trial.told("checkpoint") == []
    assert len(trial.told("progress")) > 0


@pytest.mark.parametrize(("name", "why"), [("other-way", "did not run the same ops"), ("other-model", "another model")])
def test_a_changed_script_is_refused(trials: dict[str, TrialRecord], name: str, why: str) -> None:
    trial = trials[name]
    assert trial.codes == [SUSPENDED, 2]
    assert why in trial.output.splitlines()[-1]
