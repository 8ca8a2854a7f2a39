"""TensorFlow 1 scripts, written for one machine, as the processes of a job."""

from __future__ import annotations

import contextlib
import io
import signal
from pathlib import Path

import pytest

from dike import checkpoints
from dike.profile import Api
from dike.task import Role
from tests.roles.roles_stage import PATIENT, SCRIPTS, RolesStage, step_of, wait_for
from tests.warm import in_tensorflow

pytestmark = pytest.mark.tensorflow

SCRIPT = SCRIPTS / "graph.py"
PLAN = {"hidden/weights": 1, "hidden/bias": 0, "output/weights": 1, "output/bias": 1, "global_step": 0}


def latest_step(folder: Path) -> int:
    return max(int(path.stem.rpartition("-")[2]) for path in (folder / "checkpoints").glob("model.ckpt-*.index"))


def test_asynchronous_training_places_saves_survives_and_resumes(tmp_path: Path) -> None:
    args: tuple[str, ...] = ("scaffold", "200")
    with RolesStage(Api.GRAPH, SCRIPT, tmp_path / "job", 2, 2, args, PLAN, fingerprint="one") as job:
        assert [job.worker(0).wait(), job.worker(1).wait()] == [0, 0]
        results = [job.worker(index).result for index in (0, 1)]
        steps = sum(result["own_steps"] for result in results)
        assert 200 <= steps <= 204
        # A late worker has not seen the job's first loss.
        first = max(result["losses"][0] for result in results if result["losses"])
        for result in results:
            if result["own_steps"] > 20:
                assert result["losses"][1] < first / 2
        # The metric's counters are each worker's own.
        assert [result["accuracy_devices"] for result in results if result["losses"]] == [
            [f"/job:worker/task:{index}"] for index in (0, 1) if results[index]["losses"]
        ]
        [placement] = job.chief.reported("placement")
        devices = placement["variables"]
        assert {name: devices[name] for name in PLAN} == {
            name: f"/job:ps/task:{ps}/device:CPU:0" for name, ps in PLAN.items()
        }
        # What an optimizer keeps for a variable is beside it.
        assert devices["hidden/weights/Adam"] == devices["hidden/weights"]
        assert all(device.startswith("/job:ps/") for device in devices.values())
        assert not job.worker(1).reported("placement")
        assert "checkpoints go to" in job.chief.text
        assert job.chief.reported("progress")[-1]["step"] >= 200
        assert job.chief.reported("progress")[-1]["loss"] < 1.5
        assert job.chief.reported("checkpoint")[-1]["step"] == latest_step(tmp_path / "job") >= 200
        assert not (SCRIPTS / "elsewhere").exists()
    older = latest_step(tmp_path / "job")

    # Again with more steps and fewer ps: continues at the last step; a worker is killed and comes back.
    with RolesStage(Api.GRAPH, SCRIPT, tmp_path / "job", 1, 2, ("monitored", "1000"), fingerprint="one") as job:
        lost = job.worker(1)
        wait_for(lambda: step_of(lost) > 230, lost)
        job.kill("worker:1")
        back = job.start(Role.WORKER, 1, attempt=1)
        assert [job.worker(0).wait(), back.wait()] == [0, 0]
        assert job.chief.result["first_step"] >= 200
        assert back.result["first_step"] > 230
        assert back.result["own_steps"] > 0
        assert latest_step(tmp_path / "job") >= 1000
        # On a slow machine it has saved before its end, too.
        older = max([older, *(message["step"] for message in job.chief.reported("checkpoint")[:-1])])

    # Its newest checkpoint is damaged: the job resumes from the one before.
    newest = tmp_path / "job" / "checkpoints" / f"model.ckpt-{latest_step(tmp_path / 'job')}.index"
    newest.write_bytes(b"")
    with RolesStage(Api.GRAPH, SCRIPT, tmp_path / "job", 1, 1, ("monitored", "1000"), fingerprint="one") as job:
        assert job.chief.wait() == 0
        assert [message["step"] for message in job.chief.reported("resumed")] == [older]
        assert f"is damaged: {newest.name} is not what was written; resuming from" in job.chief.text

    # Another model finds its folder taken; nothing needs to be up for that.
    with RolesStage(
        Api.GRAPH, SCRIPT, tmp_path / "job", 1, 1, ("monitored", "10"), fingerprint="two", alone=True
    ) as job:
        assert job.chief.wait() == 2
        assert job.chief.text.strip().splitlines()[-1].startswith("dike: Checkpoint folder")
        assert "Traceback" not in job.chief.text
        assert (tmp_path / "job" / "checkpoints" / checkpoints.FINGERPRINT_FILE).exists()

    # So does one that was never planned.
    wider = {"WIDTH": "17"}
    with RolesStage(
        Api.GRAPH, SCRIPT, tmp_path / "job", 1, 1, ("monitored", "10"), environment=wider, alone=True
    ) as job:
        assert job.chief.wait() == 2
        assert "is of another model: variable 'hidden/weights' differs" in job.chief.text


def test_a_damaged_checkpoint_costs_no_more_than_itself(tmp_path: Path) -> None:
    in_tensorflow(save_and_damage, str(tmp_path))


def save_and_damage(folder: str) -> None:
    import tensorflow as tf

    def newest_intact() -> tuple[str | None, str]:
        """The newest intact checkpoint, and the messages about the others."""
        with contextlib.redirect_stderr(io.StringIO()) as said:
            return checkpoints.newest_intact(folder), said.getvalue()

    tmp_path = Path(folder)
    value = tf.Variable(tf.zeros([1000]))
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(value=value), folder, max_to_keep=3)
    paths = [manager.save(checkpoint_number=number) for number in range(5)]
    for path in paths[2:]:
        checkpoints.record_checksums(path)
    assert newest_intact() == (paths[4], "")
    (data,) = tmp_path.glob("ckpt-4.data-*")
    data.write_bytes(data.read_bytes()[:-1] + b"x")
    newest, said = newest_intact()
    assert newest == paths[3]
    assert "ckpt-4' is damaged: ckpt-4.data-00000-of-00001 is not what was written" in said

    # Without Dike's checksums, TensorFlow's own are used. Without TensorFlow's list, the names of the files are used.
    (tmp_path / checkpoints.CHECKSUMS_FILE).write_bytes(b"\xff")
    (tmp_path / "checkpoint").write_bytes(b"\xff")
    (tmp_path / "ckpt-3.index").unlink()
    newest, said = newest_intact()
    assert newest == paths[2]
    assert "ckpt-4' is damaged: " in said
    (tmp_path / "ckpt-2.index").write_bytes(b"")
    newest, said = newest_intact()
    assert newest is None
    assert said.endswith("; starting over.\n")


def test_synchronous_training_ends(tmp_path: Path) -> None:
    with RolesStage(Api.GRAPH, SCRIPT, tmp_path, 1, 2, ("synchronous", "60")) as job:
        assert [job.worker(0).wait(), job.worker(1).wait()] == [0, 0]
        results = [job.worker(index).result for index in (0, 1)]
        assert [result["replicas"] for result in results] == [2, 2]
        assert results[0]["losses"][1] < results[0]["losses"][0]
        # Each global step takes a gradient of both.
        assert sum(result["own_steps"] for result in results) >= 2 * 60 - 4
        assert latest_step(tmp_path) >= 60
        assert not any("Traceback" in job.worker(index).text for index in (0, 1))


def test_a_plain_session_loop_is_initialised_once_saved_and_restored(tmp_path: Path) -> None:
    with RolesStage(Api.GRAPH, SCRIPT, tmp_path, 2, 2, ("plain", "100000"), PLAN, environment=PATIENT) as job:
        chief = job.chief
        wait_for(lambda: min(step_of(chief), step_of(job.worker(1))) > 50, chief)
        # However long the save takes, the checkpoint is of few steps more than its name says.
        job.worker(1).process.suspend()
        assert job.kill("worker:0", signal.SIGTERM) == 143
        saved = chief.reported("checkpoint")[-1]["step"]
        assert saved == latest_step(tmp_path) > 50
        [placement] = chief.reported("placement")
        assert placement["variables"]["hidden/weights"] == "/job:ps/task:1/device:CPU:0"
    with RolesStage(Api.GRAPH, SCRIPT, tmp_path, 2, 2, ("plain", str(saved + 100)), PLAN) as job:
        assert [job.worker(0).wait(), job.worker(1).wait()] == [0, 0]
        results = [job.worker(index).result for index in (0, 1)]
        assert "restored" in job.chief.text
        assert results[0]["first_step"] >= saved
        assert results[0]["own_steps"] + results[1]["own_steps"] <= 104
        assert max(result["accuracy"] or 0.0 for result in results) > 0.5
        assert latest_step(tmp_path) >= saved + 100

    # A script that restores a file itself: the job's checkpoint has priority, and a restarted worker resets nothing.
    pretrained = {"PRETRAINED": str(tmp_path / "checkpoints" / f"model.ckpt-{saved}")}
    with RolesStage(Api.GRAPH, SCRIPT, tmp_path, 2, 2, ("finetune", "100000"), PLAN, environment=pretrained) as job:
        lost = job.worker(1)
        wait_for(lambda: step_of(lost) > saved + 200, lost)
        job.kill("worker:1")
        before = step_of(job.chief)
        back = job.start(Role.WORKER, 1, attempt=1)
        wait_for(lambda: step_of(back) > before, back)
        assert job.chief.reported("progress")[0]["step"] >= saved + 100
        assert back.reported("progress")[0]["step"] >= before
    fresh = tmp_path / "fresh"
    with RolesStage(Api.GRAPH, SCRIPT, fresh, 1, 1, ("finetune", str(saved + 90)), environment=pretrained) as job:
        assert job.chief.wait() == 0
        # A step of the other worker may have been under way while that checkpoint was written.
        assert saved <= job.chief.result["first_step"] < saved + 90
        assert latest_step(fresh) >= saved + 90


def test_a_monitored_session_without_a_global_step_is_saved(tmp_path: Path) -> None:
    with RolesStage(Api.GRAPH, SCRIPT, tmp_path, 1, 1, ("stepless", "30")) as job:
        assert job.chief.wait() == 0
        assert job.chief.reported("progress")[-1]["step"] == 30
        assert job.chief.reported("checkpoint")[-1]["step"] == latest_step(tmp_path) == 30


def test_what_is_not_supported_is_refused_by_name(tmp_path: Path) -> None:
    with RolesStage(Api.GRAPH, SCRIPT, tmp_path, 1, 1, ("supervisor", "1"), alone=True) as job:
        assert job.chief.wait() == 2
        assert job.chief.text.strip().splitlines()[-1] == (
            "dike: tf.compat.v1.train.Supervisor is not supported in a distributed job; "
            "use tf.compat.v1.train.MonitoredTrainingSession."
        )
