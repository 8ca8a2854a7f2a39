"""Keras 3 scripts, written for one machine, on the chief of a job."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from dike.profile import Api
from dike.task import Role
from tests import warm
from tests.roles.roles_stage import DEADLINE_S, PATIENT, SCRIPTS, Process, RolesStage, step_of, wait_for
from tests.warm import WarmTensorFlow

pytestmark = pytest.mark.tensorflow

PLAN = {
    "sequential/dense/kernel": 1,
    "sequential/dense/bias": 1,
    "sequential/batch_normalization/gamma": 0,
    "sequential/dense_1/kernel": 0,
}


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Process]:
    """What several `fit`s in one script did."""
    folder = tmp_path_factory.mktemp("many")
    environment = {"FOLDER": str(folder)}
    script = SCRIPTS / "keras_many.py"
    with RolesStage(Api.KERAS, script, folder, 2, 2, (), PLAN, environment=environment) as job:
        assert job.chief.wait() == 0
        return job.chief.result, job.chief


def test_fit_learns_and_leaves_an_ordinary_model(many: tuple[dict[str, Any], Process]) -> None:
    result = many[0]["arrays"]
    history = result["history"]
    assert result["epochs"] == [0, 1, 2, 3]
    assert history["loss"][-1] < history["loss"][0] / 2
    assert history["accuracy"][-1] > 0.9
    assert history["val_accuracy"][-1] > 0.8
    assert result["evaluated"]["accuracy"] == pytest.approx(result["predicted"], abs=1e-6)
    assert result["evaluated"] == pytest.approx(result["loaded"], rel=1e-4)
    # EarlyStopping may have brought the best epoch back.
    assert result["evaluated"]["loss"] == pytest.approx(min(history["val_loss"]), rel=1e-4)
    assert result["moving_mean_moved"] > 0.01


def test_every_sample_is_trained_once_in_each_epoch(many: tuple[dict[str, Any], Process]) -> None:
    result = many[0]["arrays"]
    assert result["history"]["samples"] == [1000.0] * 4
    # 20 batches of 48 and one of 40.
    assert result["iterations"] == 4 * 21
    assert result["begun"] == list(range(21)) * 4
    assert result["ended"] == list(range(21)) * 4
    for epoch in range(4):
        seen = result["samples"][21 * epoch : 21 * (epoch + 1)]
        assert seen == sorted(seen)
        assert seen[-1] == 1000.0


def test_callbacks_change_the_model_between_epochs(many: tuple[dict[str, Any], Process]) -> None:
    rates = many[0]["arrays"]["rates"]
    assert rates == pytest.approx([0.01, 0.005, 0.01 / 3, 0.0025], rel=1e-5)


def test_variables_and_their_slots_are_where_the_plan_says(many: tuple[dict[str, Any], Process]) -> None:
    placements = many[1].reported("placement")
    devices = placements[0]["variables"]
    ps = {0: "/job:ps/replica:0/task:0/device:CPU:0", 1: "/job:ps/replica:0/task:1/device:CPU:0"}
    assert {name: devices[name] for name in PLAN} == {name: ps[index] for name, index in PLAN.items()}
    assert devices["optimizer/adam/sequential_dense_kernel_momentum"] == ps[1]
    assert devices["optimizer/adam/sequential_dense_kernel_velocity"] == ps[1]
    assert devices["optimizer/adam/sequential_dense_1_kernel_velocity"] == ps[0]
    assert devices["optimizer/adam/iteration"] == ps[0]


def test_other_data_and_models(many: tuple[dict[str, Any], Process]) -> None:
    result = many[0]
    # The second fit continues with the trained model.
    assert result["again"]["accuracy"][0] > 0.85
    own = result["subclassed"]["history"]
    assert own["loss"][-1] < own["loss"][0]
    assert own["own"] == [1000.0] * 3
    assert result["subclassed"]["seen"] == 1000.0
    generator = result["generator"]
    assert generator["samples"] == [1000.0] * 3
    assert generator["loss"][-1] < generator["loss"][0]
    assert len(generator["val_loss"]) == 1
    assert result["split"]["samples"] == [800.0]
    assert len(result["split"]["val_loss"]) == 1


def test_a_model_that_has_only_a_train_step_and_two_optimizers(many: tuple[dict[str, Any], Process]) -> None:
    pair = many[0]["pair"]
    assert pair["history"]["both"][1] < pair["history"]["both"][0]
    assert pair["iterations"] == [40, 40]
    assert min(pair["velocities"]) > 0.0
    devices = many[1].reported("placement")[-1]["variables"]
    assert {"optimizer/same/iteration", "optimizer/same/iteration#1"} <= set(devices)


def local_result(script: Path, *arguments: str) -> dict[str, Any]:
    """What a script prints that Python runs alone."""
    run = warm.run(
        [sys.executable, script, *arguments],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3", "TF_NUM_INTRAOP_THREADS": "1"},
        timeout=DEADLINE_S,
        process_class=WarmTensorFlow,
    )
    assert run.returncode == 0, run.stderr
    return dict(json.loads(run.stdout.splitlines()[-1].removeprefix("RESULT ")))


@pytest.fixture(scope="module")
def local() -> dict[str, Any]:
    """What `keras_metrics.py` reports without a cluster."""
    return local_result(SCRIPTS / "keras_metrics.py")


def test_one_worker_reports_what_is_reported_without_a_cluster(tmp_path: Path, local: dict[str, Any]) -> None:
    with RolesStage(Api.KERAS, SCRIPTS / "keras_metrics.py", tmp_path, 1, 1, ("0.01",)) as job:
        assert job.chief.wait() == 0
        result, text = job.chief.result, job.chief.text
    for name, found in local["rate 0.01"].items():
        reported = result["rate 0.01"][name]
        if name == "Branches":  # TensorFlow optimises a step that branches as a whole: last digits differ
            assert reported["history"]["n_seen"] == found["history"]["n_seen"]
            assert reported["history"]["loss"] == pytest.approx(found["history"]["loss"], rel=1e-6)
        else:
            assert reported == found, name
    assert "cannot be merged" not in text
    # The last batch of 48 is smaller than the others; where a callback looks at each batch, they are handed out alone.
    [said] = [line.removeprefix("SEVERAL ") for line in text.splitlines() if line.startswith("SEVERAL ")]
    looked_at, several = json.loads(said)
    assert looked_at == 0
    assert set(several) == {8}
    # Of what is compared: a mean over two updates a step, a sum, a maximum, the last batch's figure.
    history = local["rate 0.01"]["Follows"]["history"]
    assert history["n_seen"] == [330.0] * 3
    assert history["kept"] == [11.0, 22.0, 33.0]
    assert history["loss"][-1] < history["loss"][0]
    assert len(history["columns"][0]) == 32


def test_two_workers_report_the_same_of_the_same_predictions(tmp_path: Path, local: dict[str, Any]) -> None:
    with RolesStage(Api.KERAS, SCRIPTS / "keras_metrics.py", tmp_path, 2, 2, ("0.0", "0.01-")) as job:
        assert job.chief.wait() == 0
        result, text = job.chief.result, job.chief.text
    # At a learning rate of 0 every worker predicts the same, in whatever order.
    for name, found in local["rate 0.0"].items():
        if name != "Branches":
            assert result["rate 0.0"][name] == found, name
    said = [line for line in text.splitlines() if "cannot be merged" in line]
    assert len(said) == 2
    assert all(line.endswith("updates of 'seen/total'.") for line in said)
    for name in ("Follows", "weighted"):
        one, two = (found["rate 0.01"][name]["history"] for found in (local, result))
        assert two["loss"] == pytest.approx(one["loss"], rel=0.2)


def test_what_is_not_supported_is_refused_by_name(many: tuple[dict[str, Any], Process]) -> None:
    refused = many[0]["refused"]
    assert refused["argument"] == (
        "BadInputError: Argument 'use_multiprocessing' of Model.fit is not supported; remove it."
    )
    assert "run_eagerly=True" in refused["run_eagerly"]
    assert "ema_overwrite_frequency" in refused["averages"]
    assert "gradient_accumulation_steps" in refused["accumulation"]
    assert all(text.startswith("BadInputError: ") for text in refused.values())


def latest(folder: Path) -> int:
    return max(int(path.stem.rpartition("-")[2]) for path in (folder / "checkpoints" / "fit-0").glob("ckpt-*.index"))


def test_a_fit_survives_and_resumes(tmp_path: Path) -> None:
    script = SCRIPTS / "keras_long.py"
    # More epochs than any machine trains while this looks on.
    batches, endless = 200, 5000
    with RolesStage(
        Api.KERAS, script, tmp_path, 1, 2, (str(endless),), checkpoint_interval_s=1.0, environment=PATIENT
    ) as job:
        chief = job.chief
        wait_for(lambda: step_of(chief) > 100, chief)
        job.kill("worker:1")
        reached = step_of(chief)
        wait_for(lambda: step_of(chief) > reached + 50, chief)
        job.start(Role.WORKER, 1, attempt=1)
        reached = step_of(chief)
        wait_for(lambda: step_of(chief) > reached + 100, chief)
        wait_for(lambda: len(chief.reported("checkpoint")) > 1, chief)
        assert job.kill("chief:0", signal.SIGTERM) == 143
        saved = chief.reported("checkpoint")[-1]["step"]
        assert saved == latest(tmp_path)
        assert not chief.reported("resumed")
        assert [message["steps"] for message in chief.reported("total")] == [endless * batches]
        older = chief.reported("checkpoint")[-2]["step"]

    (newest,) = (tmp_path / "checkpoints" / "fit-0").glob(f"ckpt-{saved}.data-*")
    os.truncate(newest, newest.stat().st_size // 2)
    # The next one dies of its ps, with one line that says so.
    with RolesStage(
        Api.KERAS, script, tmp_path, 1, 2, (str(endless),), checkpoint_interval_s=1.0, environment=PATIENT
    ) as job:
        chief = job.chief
        wait_for(lambda: step_of(chief) > saved + 20, chief)
        assert min(message["step"] for message in chief.reported("progress")) > older
        assert [message["step"] for message in chief.reported("resumed")] == [older]
        assert f"is damaged: {newest.name} is not what was written; resuming from" in chief.text
        wait_for(lambda: bool(chief.reported("checkpoint")), chief)
        wait_for(lambda: any(len(message["workers"]) == 2 for message in chief.reported("rates")), chief)
        job.kill("ps:0")
        assert chief.wait() == 1
        # TensorFlow's own threads may still say something after it.
        said = [line for line in chief.text.splitlines() if line.startswith("dike: ")]
        assert said[-1].startswith("dike: A parameter server of this job is gone")
        saved = latest(tmp_path)

    # The third is asked for no more epochs than are begun, and a chief killed without a word loses nothing saved.
    epochs = saved // batches + 1
    with RolesStage(Api.KERAS, script, tmp_path, 1, 1, (str(epochs),)) as job:
        assert job.chief.wait() == 0
        result = job.chief.result
        assert result["epochs"] == list(range(epochs))
        assert len(result["history"]["loss"]) == epochs
        # The group of the killed worker, up to eight steps, was repeated.
        assert epochs * batches <= result["iterations"] <= epochs * batches + 8
        assert result["history"]["loss"][-1] < 1.0
        assert result["evaluated"]["accuracy"] > 0.8
        assert job.chief.reported("progress")[-1]["step"] == epochs * batches

    # Once more: there is nothing left to train, and no epoch is named that the script does not have.
    with RolesStage(Api.KERAS, script, tmp_path, 1, 1, (str(epochs),)) as job:
        assert job.chief.wait() == 0
        assert job.chief.result["history"] == result["history"]
        assert f": after epoch {epochs}.\n" in job.chief.text
        assert f"epoch {epochs + 1}" not in job.chief.text


def test_tf_keras_fits_evaluates_and_predicts(tmp_path: Path) -> None:
    plan = {"dense/kernel": 1, "dense/bias": 0, "dense_1/kernel": 1}
    with RolesStage(Api.TF_KERAS, SCRIPTS / "keras_legacy.py", tmp_path, 2, 2, ("4",), plan, forked=False) as job:
        assert job.chief.wait() == 0
        result = job.chief.result
        assert "tf_keras" in result["keras"]
        assert len(result["history"]["val_accuracy"]) == 4
        assert result["history"]["loss"][-1] < result["history"]["loss"][0] / 2
        assert result["evaluated"] == pytest.approx(result["predicted"], abs=1e-6)
        assert result["evaluated"] == pytest.approx(result["history"]["val_accuracy"][-1], abs=1e-6)
        devices = {name: f"/job:ps/replica:0/task:{ps}/device:CPU:0" for name, ps in plan.items()}
        assert {name: result["devices"][name] for name in plan} == devices
        assert job.chief.reported("placement")[0]["variables"]["dense/kernel"] == devices["dense/kernel"]
        assert len(list((tmp_path / "checkpoints" / "fit-0").glob("ckpt-*.index"))) == 3

    # It resumes, saves within an epoch and when it is asked to end, and has its whole history afterwards.
    script = SCRIPTS / "keras_legacy.py"
    per_epoch = 32
    patient: dict[str, Any] = {"checkpoint_interval_s": 0.01, "environment": PATIENT}
    with RolesStage(Api.TF_KERAS, script, tmp_path, 1, 1, ("5000",), **patient) as job:
        chief = job.chief
        wait_for(lambda: any(message.get("epoch", 0) >= 6 for message in chief.reported("progress")), chief)
        before = latest(tmp_path)
        assert job.kill("chief:0", signal.SIGTERM) == 143
        steps = {message["step"] for message in chief.reported("checkpoint")}
        assert latest(tmp_path) in steps
        assert latest(tmp_path) >= before
        assert any(step % per_epoch for step in steps)
        assert chief.reported("total")[0]["steps"] == 5000 * per_epoch
    epochs = latest(tmp_path) // per_epoch + 1
    with RolesStage(Api.TF_KERAS, script, tmp_path, 1, 1, (str(epochs),)) as job:
        assert job.chief.wait() == 0
        again = job.chief.result["history"]
        assert len(again["loss"]) == epochs
        assert again["loss"][:4] == result["history"]["loss"]
        assert job.chief.result["epochs"] == list(range(epochs))
        assert job.chief.result["counted"] == [epochs, again["loss"]]
        # An interrupted epoch resumes at its batch.
        assert job.chief.reported("resumed") == [{"type": "resumed", "step": max(steps)}]
        assert job.chief.reported("total")[0]["steps"] == epochs * per_epoch
        assert job.chief.reported("progress")[-1]["step"] in (epochs * per_epoch, epochs * per_epoch + 1)


def test_one_worker_of_tf_keras_reports_what_is_reported_without_a_cluster(tmp_path: Path) -> None:
    script = SCRIPTS / "keras_legacy_metrics.py"
    with RolesStage(Api.TF_KERAS, script, tmp_path, 1, 1) as job:
        assert job.chief.wait() == 0
        result, text = job.chief.result, job.chief.text
    assert result == local_result(script)
    assert result["odd"]["n_seen"] == [330.0] * 3
    assert "Could not get Model metric results" not in text


def test_workers_of_tf_keras_report_the_metrics_of_all_of_them(tmp_path: Path) -> None:
    with RolesStage(Api.TF_KERAS, SCRIPTS / "keras_legacy_metrics.py", tmp_path, 1, 2) as job:
        assert job.chief.wait() == 0
        result = job.chief.result
    # Ten batches of 32, regardless of the worker and of its end.
    assert result["even"]["n_seen"] == [320.0] * 3
    assert result["even"]["loss"][-1] < result["even"]["loss"][0]


def test_a_script_with_its_own_coordinator_runs_unchanged(tmp_path: Path) -> None:
    with RolesStage(Api.COORDINATOR, SCRIPTS / "coordinator.py", tmp_path, 2, 1, (), {"total": 1, "vector": 1}) as job:
        assert job.chief.wait() == 0
        device = "/job:ps/replica:0/task:1/device:CPU:0"
        assert job.chief.result == {
            "total": 190.0,
            "count": 20.0,
            "devices": {"total": device, "vector": device},
        }
        assert job.chief.reported("progress")[-1]["step"] == 20
        assert json.loads(json.dumps(job.chief.reported("placement")[0]["variables"]))["total"] == device
