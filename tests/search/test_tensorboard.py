"""What is written for TensorBoard, read back record by record."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.crc32c import crc32c
from tensorboardX.proto.api_pb2 import Status
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

from dike.exceptions import BadInputError
from framework.search.records import Parameter, SearchSpec, TrialRecord, TrialState
from framework.search.tensorboard import TensorBoardLog

SPEC = SearchSpec(
    name="s",
    script="/train.py",
    arguments=(),
    flags={},
    space=(Parameter("lr", (0.1,)),),
    sampler="grid",
    trial_count=2,
    metric="val_loss",
)


def events(folder: Path) -> Iterator[Event]:
    """The events of a run in the order in which TensorBoard reads them; each record's checksum is verified."""
    for path in sorted(folder.glob("*.tfevents.*"), key=lambda path: int(path.name.rpartition(".")[2])):
        content = path.read_bytes()
        at = 0
        while at < len(content):
            length, length_sum = struct.unpack_from("<QI", content, at)
            assert length_sum == masked_crc32c(content[at : at + 8])
            record = content[at + 12 : at + 12 + length]
            (record_sum,) = struct.unpack_from("<I", content, at + 12 + length)
            assert record_sum == masked_crc32c(record)
            yield Event.FromString(record)
            at += 16 + length


def masked_crc32c(data: bytes) -> int:
    checksum = crc32c(data)
    return (((checksum >> 15) | (checksum << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    values = [(event.step, value) for event in events(folder) for value in event.summary.value]
    return [(step, value.simple_value) for step, value in values if value.tag == tag]


def hparams(folder: Path) -> dict[str, HParamsPluginData]:
    values = [value for event in events(folder) for value in event.summary.value if "_hparams_" in value.tag]
    assert all(value.metadata.plugin_data.plugin_name == "hparams" for value in values)
    return {value.tag: HParamsPluginData.FromString(value.metadata.plugin_data.content) for value in values}


def report(step: int, loss: float | None = None, **metrics: float) -> dict[str, Any]:
    return {"step": step, "train_s": 1.0, "metrics": metrics, **({} if loss is None else {"loss": loss})}


def test_a_trial_is_a_run_with_scalars_hyper_parameters_and_an_objective(tmp_path: Path) -> None:
    log = TensorBoardLog(tmp_path / "logs", SPEC)
    parameters = {"lr": 0.1, "units": 3, "optimizer": "adam", "nesterov": True}
    trial = TrialRecord(0, parameters, step=20, value=0.25)
    log.reported(trial, [report(10, 1.0), report(20, 0.5, val_loss=0.25)])
    trial.state = TrialState.FINISHED
    log.run_ended(trial)
    log.reported(TrialRecord(1, {"lr": 0.3}), [report(5, math.nan)])
    log.close()

    folder = tmp_path / "logs" / "trial-0"
    assert scalars(folder, "loss") == [(10, 1.0), (20, 0.5)]
    assert scalars(folder, "val_loss") == [(20, 0.25)]
    assert scalars(folder, "objective") == [(20, 0.25)]
    plugin = hparams(folder)
    experiment = plugin["_hparams_/experiment"].experiment
    assert [info.name for info in experiment.hparam_infos] == list(parameters)
    assert [info.name.tag for info in experiment.metric_infos] == ["objective", "val_loss"]
    start = plugin["_hparams_/session_start_info"].session_start_info.hparams
    assert start["lr"].number_value == 0.1
    assert start["units"].number_value == 3
    assert start["optimizer"].string_value == "adam"
    assert start["nesterov"].bool_value is True
    assert plugin["_hparams_/session_end_info"].session_end_info.status == Status.Value("STATUS_SUCCESS")

    other = tmp_path / "logs" / "trial-1"
    assert math.isnan(scalars(other, "loss")[0][1])
    assert "_hparams_/session_end_info" not in hparams(other)


def test_a_resumed_trial_writes_a_new_file_that_voids_repeated_steps(tmp_path: Path) -> None:
    log = TensorBoardLog(tmp_path, SPEC)
    trial = TrialRecord(0, {"lr": 0.1}, step=20, state=TrialState.SUSPENDED)
    log.reported(trial, [report(10, 1.0), report(20, 0.5)])
    log.run_ended(trial)
    trial.step = 30
    log.reported(trial, [report(20, 0.5), report(30, 0.25)])
    trial.state = TrialState.FAILED
    log.run_ended(trial)
    folder = tmp_path / "trial-0"
    assert len(list(folder.iterdir())) == 2
    starts = [event.step for event in events(folder) if event.session_log.status == SessionLog.START]
    assert starts == [10, 20]
    assert scalars(folder, "loss") == [(10, 1.0), (20, 0.5), (20, 0.5), (30, 0.25)]
    end = hparams(folder)["_hparams_/session_end_info"].session_end_info
    assert end.status == Status.Value("STATUS_FAILURE")


def test_a_disk_that_takes_no_more_ends_the_log_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = TensorBoardLog(tmp_path, SPEC)
    (tmp_path / "trial-0").write_text("in the way")
    log.reported(TrialRecord(0, {"lr": 0.1}), [report(1, 1.0)])
    log.reported(TrialRecord(1, {"lr": 0.1}), [report(1, 1.0)])
    log.close()
    assert "cannot write for TensorBoard any more" in caplog.text
    assert not (tmp_path / "trial-1").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInputError, match="for TensorBoard cannot be created"):
        TensorBoardLog(tmp_path / "file" / "logs", SPEC)


@pytest.mark.integration
def test_tensorflow_is_not_needed(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from tests.search.test_tensorboard import SPEC, TensorBoardLog, TrialRecord, report\n"
        f"TensorBoardLog(Path({str(tmp_path)!r}), SPEC).reported(TrialRecord(0, {{'lr': 0.1}}), [report(1, 1.0)])\n"
        "print('tensorflow' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "False"
