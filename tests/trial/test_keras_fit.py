"""Trials that train with Keras: interrupted anywhere, they end as if they never had been."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import pytest

from dike.exceptions import BadInputError
from dike.trial.export import StoredModel, export, find_model
from tests import warm
from tests.warm import WarmTensorFlow

pytestmark = pytest.mark.tensorflow

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
_SCRIPTS = _HERE / "scripts"

_INTERRUPTS: dict[str, list[list[Any]]] = {
    # fit, epoch, batch, how
    "arrays": [[0, 0, 1, "suspend"], [0, 2, 4, "suspend"]],
    "dataset": [[0, 0, 4, "suspend"], [0, 2, 2, "suspend"]],
    "repeated": [[0, 1, 3, "suspend"]],
    "py_dataset": [[0, 0, 3, "suspend"], [0, 1, 1, "suspend"]],
    "generator": [[0, 1, 2, "suspend"]],
    "unknown_length": [[0, 0, 3, "suspend"]],
    "bfloat16": [[0, 2, 0, "kill"]],
    "several": [[0, 1, 1, "suspend"], [1, 1, 0, "suspend"], [2, 0, 1, "kill"]],
}
_DIGITS = ["--epochs", "2", "--batch-size", "128"]


def _cases() -> Iterator[dict[str, Any]]:
    for name, interrupts in _INTERRUPTS.items():
        case = {"script": str(_SCRIPTS / "keras_cases.py"), "arguments": [name]}
        is_killed = interrupts[-1][-1] == "kill"
        yield {**case, "name": f"{name}-plain"}
        yield {
            **case,
            "name": f"{name}-cut",
            "interrupts": interrupts,
            "checkpoint_interval_s": 0.0 if is_killed else 1000.0,
            "loses_checkpoint": name == "generator",
            "scheme": "file://" if is_killed else "",
        }
        if not is_killed:
            yield {**case, "name": f"{name}-paused", "interrupts": interrupts, "paused": True}
    script = {"script": str(_SCRIPTS / "keras_cases.py"), "arguments": ["bfloat16"]}
    changed = {"interrupts": [[0, 1, 0, "suspend"]], "then_arguments": ["other_shape"]}
    yield {**script, "name": "changed", **changed}
    yield {**script, "name": "metric", "metric": "val_loss"}
    unseeded = [[0, 0, 2, "suspend"], [0, 1, 5, "suspend"], [1, 0, 4, "suspend"]]
    yield {**script, "name": "unseeded", "arguments": ["unseeded"], "interrupts": unseeded}
    yield {**script, "name": "unseeded-paused", "arguments": ["unseeded"], "interrupts": unseeded, "paused": True}
    digits = {"script": str(_ROOT / "examples" / "digits_cnn.py"), "arguments": _DIGITS, "metric": "val_accuracy"}
    yield {**digits, "name": "digits-plain"}
    yield {**digits, "name": "digits-cut", "patience": 15}
    yield {"name": "tf_keras", "script": str(_SCRIPTS / "tf_keras_fit.py"), "arguments": []}
    yield {"name": "on_batch", "script": str(_SCRIPTS / "keras_on_batch.py"), "arguments": []}


@dataclass(frozen=True)
class TrialRecord:
    """The record of a trial that has run to its end."""

    folder: Path
    codes: list[int]
    reports: list[dict[str, Any]]

    @property
    def output(self) -> str:
        return (self.folder / "output.txt").read_text()

    def lines(self, name: str, keys: int) -> dict[tuple[str, ...], set[tuple[str, ...]]]:
        """The first `keys` words of each line -> what the lines say about them."""
        found: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
        for line in (self.folder / name).read_text().splitlines():
            words = tuple(line.split())
            found.setdefault(words[:keys], set()).add(words[keys:])
        return found

    def of_type(self, kind: str) -> list[dict[str, Any]]:
        return [report for report in self.reports if report["type"] == kind]


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("keras")
    (folder / "cases.json").write_text(json.dumps(list(_cases())))
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, _HERE / "keras_zygote.py", folder]
    process = warm.run(command, env=environment, timeout=500, process_class=WarmTensorFlow)
    assert process.returncode == 0, process.stderr

    @functools.cache
    def by_name(name: str) -> TrialRecord:
        return TrialRecord(folder / name, **json.loads((folder / f"{name}.json").read_text()))

    return by_name


@pytest.mark.parametrize("name", list(_INTERRUPTS))
def test_an_interrupted_trial_is_the_same_at_every_step(trials: Any, name: str) -> None:
    cut = trials(f"{name}-cut")
    assert cut.codes == [-9 if how == "kill" else 75 for *_, how in _INTERRUPTS[name]] + [0], cut.output
    check_same(trials(f"{name}-plain"), cut)


@pytest.mark.parametrize("name", [name for name, interrupts in _INTERRUPTS.items() if interrupts[-1][-1] == "suspend"])
def test_a_trial_paused_in_memory_is_the_same_at_every_step(trials: Any, name: str) -> None:
    paused = trials(f"{name}-paused")
    assert paused.codes == [0], paused.output
    told = paused.of_type("paused")
    assert len(told) == len(_INTERRUPTS[name])
    assert [Path(each["path"]).name.split("-step")[0] for each in told] == [f"run-{run}" for run in range(len(told))]
    check_same(trials(f"{name}-plain"), paused)
    # The time while it is paused does not count as training.
    trained = [report["train_s"] for report in paused.reports if "train_s" in report]
    assert trained == sorted(trained)


def check_same(plain: Any, cut: Any) -> None:
    assert plain.codes == [0], plain.output
    losses = plain.lines("losses.txt", keys=3)
    assert losses == cut.lines("losses.txt", keys=3)
    assert all(len(values) == 1 for values in losses.values())
    assert plain.lines("steps.txt", keys=1) == cut.lines("steps.txt", keys=1)
    assert json.loads((plain.folder / "result.json").read_text()) == json.loads(
        (cut.folder / "result.json").read_text()
    )
    standings = [each.of_type("progress")[-1] for each in (plain, cut)]
    assert len({tuple(standing[key] for key in ("value", "best", "best_step")) for standing in standings}) == 1
    for epoch in ("best", "last"):
        kept = [find_model(str(each.folder / "checkpoints"), epoch, standings[0]["best_step"]) for each in (plain, cut)]
        assert kept[0].step == kept[1].step
        assert epoch == "last" or kept[0].step == standings[0]["best_step"]
        assert weights_of(kept[0], plain.folder) == weights_of(kept[1], cut.folder)


def weights_of(kept: StoredModel, folder: Path) -> dict[str, bytes]:
    """What is in the exported file."""
    export(kept, str(folder / "model.weights.h5"), force=True)
    found: dict[str, bytes] = {}
    with h5py.File(folder / "model.weights.h5") as file:
        file.visititems(lambda name, item: found.update({name: item[()].tobytes()} if hasattr(item, "dtype") else {}))
    return found


def test_the_example_is_the_same_at_every_step(trials: Any) -> None:
    plain, cut = trials("digits-plain"), trials("digits-cut")

    assert plain.codes == [0], plain.output
    assert cut.codes == [75, 0], cut.output
    steps = plain.lines("steps.txt", keys=1)
    assert len(steps) == 24
    assert steps == cut.lines("steps.txt", keys=1)
    assert plain.output.splitlines()[-1] == cut.output.splitlines()[-1]
    assert plain.output.splitlines()[-1].startswith("test accuracy")


@pytest.mark.parametrize(("name", "codes"), [("unseeded", [75, 75, 75, 0]), ("unseeded-paused", [0])])
def test_an_interrupted_epoch_has_each_sample_once_without_a_seed(trials: Any, name: str, codes: list[int]) -> None:
    unseeded = trials(name)

    assert unseeded.codes == codes, unseeded.output
    epochs: dict[tuple[str, str], list[float]] = {}
    for line in (unseeded.folder / "losses.txt").read_text().splitlines():
        fit, epoch, *_, loss = line.split()
        epochs.setdefault((fit, epoch), []).append(float.fromhex(loss))
    assert len(epochs) == 4
    assert [sorted(losses) for losses in epochs.values()] == [[float(sample) for sample in range(8)]] * 4


def test_nothing_is_lost_and_nothing_done_twice_when_suspended(trials: Any) -> None:
    cut = trials("dataset-cut")

    steps = (cut.folder / "losses.txt").read_text().splitlines()
    assert len(steps) == 15
    suspended, restored = cut.of_type("suspended"), cut.of_type("restored")
    assert [report["step"] for report in suspended] == [5, 13]
    assert [(report["path"], report["step"]) for report in restored] == [
        (report["path"], report["step"]) for report in suspended
    ]


def test_reports_tell_the_whole_course(trials: Any) -> None:
    reports = [report for report in trials("digits-cut").reports if report["type"] != "kept_back"]

    kinds = [report["type"] for report in reports if report["type"] != "progress"]
    assert kinds == ["training", "checkpoint", "suspended", "restored", "training", "checkpoint"]
    told = [(report["preemptible"], report["batch_size"]) for report in reports if report["type"] == "training"]
    assert told == [(True, 128)] * 2
    values = [report["value"] for report in reports if "value" in report]
    assert len(values) == 2
    assert values[-1] == [report for report in reports if "metrics" in report][-1]["metrics"]["val_accuracy"]
    trained = [report["train_s"] for report in reports if "train_s" in report]
    assert trained == sorted(trained)


def test_old_checkpoints_are_removed_but_not_those_of_finished_fits(trials: Any) -> None:
    cut = trials("several-cut")

    names = sorted(path.name for path in (cut.folder / "checkpoints").glob("run-*"))
    last = json.loads((cut.folder / "checkpoints" / names[-1] / "dike-trial.json").read_text())
    ends = {path.name for path in (cut.folder / "checkpoints").iterdir() if path.name.endswith(("-step-4", "-step-8"))}
    assert set(last["needs"]) == ends
    assert len(names) == 3 + len(ends)


def test_a_lost_checkpoint_is_replaced_by_the_newest(trials: Any) -> None:
    cut = trials("generator-cut")

    assert "there is no complete checkpoint in" in cut.output
    assert [report["step"] for report in cut.of_type("restored")] == [6]


def test_a_checkpoint_of_another_model_is_refused(trials: Any) -> None:
    changed = trials("changed")

    assert changed.codes == [75, 2]
    assert (
        "does not fit the model: variable 'sequential/dense/kernel' has shape [6, 5] there and shape [6, 7] here"
        in changed.output
    )


def test_a_metric_that_is_not_there_is_refused_after_the_first_epoch(trials: Any) -> None:
    metric = trials("metric")

    assert metric.codes == [2]
    assert "does not report a metric 'val_loss', only loss" in metric.output
    assert len(metric.lines("losses.txt", keys=3)) == 2


def test_tf_keras_reports_and_is_not_preemptible(trials: Any) -> None:
    tf_keras = trials("tf_keras")

    assert tf_keras.codes == [0], tf_keras.output
    assert [report["preemptible"] for report in tf_keras.of_type("training")] == [False]
    assert [int(step) for (step,) in tf_keras.lines("steps.txt", keys=1)] == list(range(1, 9))
    assert tf_keras.lines("steps.txt", keys=1) == tf_keras.lines("expected.txt", keys=1)


def test_steps_of_train_on_batch_are_reported(trials: Any) -> None:
    on_batch = trials("on_batch")

    assert on_batch.codes == [0], on_batch.output
    assert [report["preemptible"] for report in on_batch.of_type("training")] == [False]
    assert on_batch.lines("steps.txt", keys=1) == on_batch.lines("expected.txt", keys=1)
    (last,) = on_batch.lines("expected.txt", keys=1)[("3",)]
    assert on_batch.of_type("progress")[-1]["value"] == float.fromhex(last[0])
    assert find_model(str(on_batch.folder / "checkpoints"), None, None).step == 3
    with pytest.raises(BadInputError, match="losses of batches"):
        find_model(str(on_batch.folder / "checkpoints"), "best", None)
