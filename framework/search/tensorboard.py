"""Writes a search for TensorBoard: a run for each trial, with losses and metrics by step and hyper-parameters.

Does not need TensorFlow. The HPARAMS page compares trials by `objective`, written at the end of each.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dike.exceptions import BadInputError
from framework.search.records import SearchSpec, TrialRecord, TrialState

if TYPE_CHECKING:
    from tensorboardX.event_file_writer import EventsWriter

logger = logging.getLogger(__name__)

OBJECTIVE = "objective"
_PLUGIN = "hparams"
_END_TAG = "_hparams_/session_end_info"


class TensorBoardLog:
    """The event files of one search. A full disk stops the log, not the search.

    Args:
        logdir: folder of the runs `trial-0`, `trial-1`, ...
        spec: the search.

    Raises:
        BadInputError: if the folder cannot be created.
    """

    def __init__(self, logdir: Path, spec: SearchSpec) -> None:
        try:
            logdir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInputError(f"The folder {logdir} for TensorBoard cannot be created: {error.strerror}.") from error
        # Imported early, as it takes seconds if PyTorch is installed, which tensorboardX imports.
        importlib.import_module("tensorboardX")
        self._logdir = logdir
        self._metric = spec.metric
        self._writers: dict[int, EventsWriter] = {}
        self._files = 0
        self._is_broken = False

    def reported(self, trial: TrialRecord, reports: Sequence[Mapping[str, Any]]) -> None:
        """Writes contents of `progress` reports (`dike.trial.reports`)."""
        if not reports:
            return
        self._write(trial, int(reports[0]["step"]), [(int(report["step"]), scalars(report)) for report in reports])

    def run_ended(self, trial: TrialRecord) -> None:
        """Closes the file of a run, after the objective if the trial has ended."""
        if trial.state.has_ended():
            values = {} if trial.value is None else {OBJECTIVE: trial.value}
            self._write(trial, trial.step, [(trial.step, values)], end=True)
        writer = self._writers.pop(trial.number, None)
        if writer is not None:
            writer.close()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _write(
        self, trial: TrialRecord, step: int, rows: Sequence[tuple[int, Mapping[str, float]]], *, end: bool = False
    ) -> None:
        from tensorboardX import summary

        if self._is_broken:
            return
        try:
            writer = self._writers.get(trial.number) or self._open(trial, step)
            for at_step, values in rows:
                for name, value in values.items():
                    _add(writer, summary.scalar(name, value), at_step)
            if end:
                _add(writer, _end_of_session(trial), trial.step)
            writer.flush()
        except OSError as error:
            self._is_broken = True
            logger.warning("cannot write for TensorBoard any more: %s", error)

    def _open(self, trial: TrialRecord, step: int) -> EventsWriter:
        from tensorboardX import summary
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        folder = self._logdir / f"trial-{trial.number}"
        folder.mkdir(exist_ok=True)
        self._files += 1
        writer = EventsWriter(str(folder / "events"), f".{os.getpid()}.{self._files}")
        self._writers[trial.number] = writer
        # Invalidates later steps in earlier files: a trial that resumes from a checkpoint repeats steps.
        start = Event(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.START))
        writer.write_event(start)
        experiment, session, _ = summary.hparams(trial.parameters, dict.fromkeys((OBJECTIVE, self._metric), 0.0))
        _add(writer, experiment, step)
        _add(writer, session, step)
        return writer


def scalars(report: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a `progress` report by name."""
    values = {str(name): float(value) for name, value in report.get("metrics", {}).items()}
    if "loss" in report:
        values["loss"] = float(report["loss"])
    return values


def _end_of_session(trial: TrialRecord) -> Any:
    from tensorboardX.proto.api_pb2 import Status
    from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData, SessionEndInfo
    from tensorboardX.proto.summary_pb2 import Summary, SummaryMetadata

    status = "STATUS_FAILURE" if trial.state is TrialState.FAILED else "STATUS_SUCCESS"
    end = SessionEndInfo(status=Status.Value(status), end_time_secs=time.time())
    content = HParamsPluginData(session_end_info=end, version=0).SerializeToString()
    plugin = SummaryMetadata.PluginData(plugin_name=_PLUGIN, content=content)
    return Summary(value=[Summary.Value(tag=_END_TAG, metadata=SummaryMetadata(plugin_data=plugin))])


def _add(writer: EventsWriter, content: Any, step: int) -> None:
    from tensorboardX.proto.event_pb2 import Event

    writer.write_event(Event(wall_time=time.time(), step=step, summary=content))
