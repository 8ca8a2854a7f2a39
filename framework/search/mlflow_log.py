"""Sends a search to an MLflow server or database: an experiment with a run for each trial."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dike.exceptions import BadInputError
from framework.search.records import SearchSpec, TrialRecord, TrialState
from framework.search.tensorboard import scalars

if TYPE_CHECKING:
    from mlflow import MlflowClient

logger = logging.getLogger(__name__)

TRIAL_TAG = "dike.trial"
CLOSE_TIMEOUT_S = 30.0
"""Maximum time for which the end of a search waits for what is not sent yet."""
_MAX_PENDING = 10_000
_STATUS = {TrialState.FINISHED: "FINISHED", TrialState.STOPPED: "KILLED", TrialState.FAILED: "FAILED"}
_MAX_PARAM_CHARS = 6000


class MLflowLog:
    """The runs of one search. Sends in a thread; if MLflow fails, logging ends, and the search continues.

    Args:
        uri: of the tracking server, or of its database.
        spec: the search.

    Raises:
        BadInputError: if MLflow is not installed or cannot be reached.
    """

    def __init__(self, uri: str, spec: SearchSpec) -> None:
        try:
            from mlflow import MlflowClient
            from mlflow.exceptions import MlflowException
        except ImportError:
            raise BadInputError("--mlflow needs mlflow, which is not installed; pip install mlflow-skinny.") from None
        try:
            self._client: MlflowClient = MlflowClient(tracking_uri=uri)
            found = self._client.get_experiment_by_name(spec.name)
            self._experiment: str = self._client.create_experiment(spec.name) if found is None else found.experiment_id
        except MlflowException as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise BadInputError(f"MLflow at {uri} cannot be used: {reason}; check --mlflow.") from error
        self._metric = spec.metric
        self._runs: dict[int, str] = {}
        self._is_broken = False
        self._pending: queue.Queue[Callable[[], object] | None] = queue.Queue(_MAX_PENDING)
        self._sender = threading.Thread(target=self._send, name="dike-mlflow", daemon=True)
        self._sender.start()

    def reported(self, trial: TrialRecord, reports: Sequence[Mapping[str, Any]]) -> None:
        """Sends contents of `progress` reports (`dike.trial.reports`)."""
        now_ms = int(time.time() * 1000)
        rows = [(name, value, int(report["step"])) for report in reports for name, value in scalars(report).items()]
        self._add(lambda: self._log(trial.number, trial.parameters, rows, now_ms))

    def run_ended(self, trial: TrialRecord) -> None:
        """Ends the trial's MLflow run if the trial has ended."""
        status = _STATUS.get(trial.state)
        if status is not None:
            number, parameters, error = trial.number, trial.parameters, trial.error
            rows = [] if trial.value is None else [(f"objective.{self._metric}", trial.value, trial.step)]
            self._add(lambda: self._end(number, parameters, rows, status, error))

    def close(self) -> None:
        """Waits until all is sent, at most `CLOSE_TIMEOUT_S`."""
        if not self._is_broken:
            self._pending.put(None)
            self._sender.join(CLOSE_TIMEOUT_S)

    def _add(self, action: Callable[[], object]) -> None:
        if self._is_broken:
            return
        try:
            self._pending.put_nowait(action)
        except queue.Full:
            self._is_broken = True
            logger.warning("MLflow is too slow; the search is not sent to it any more")

    def _send(self) -> None:
        while (action := self._pending.get()) is not None:
            try:
                action()
            except Exception as error:  # whatever its client raises must not end the search
                self._is_broken = True
                logger.warning("the search is not sent to MLflow any more: %s", error)
                return

    def _run_of(self, number: int, parameters: Mapping[str, Any]) -> str:
        """Returns the id of a trial's run, which an earlier process of the search may have made."""
        from mlflow.entities import Param

        if number not in self._runs:
            found = self._client.search_runs([self._experiment], f"tags.`{TRIAL_TAG}` = '{number}'", max_results=1)
            if found:
                self._runs[number] = found[0].info.run_id
                self._client.set_terminated(self._runs[number], "RUNNING")
            else:
                run = self._client.create_run(
                    self._experiment, run_name=f"trial-{number}", tags={TRIAL_TAG: str(number)}
                )
                self._runs[number] = run.info.run_id
                params = [Param(name, str(value)[:_MAX_PARAM_CHARS]) for name, value in parameters.items()]
                self._client.log_batch(self._runs[number], params=params)
        return self._runs[number]

    def _log(
        self, number: int, parameters: Mapping[str, Any], rows: Sequence[tuple[str, float, int]], now_ms: int
    ) -> None:
        from mlflow.entities import Metric

        run = self._run_of(number, parameters)
        metrics = [Metric(name, value, now_ms, step) for name, value, step in rows]
        if metrics:
            self._client.log_batch(run, metrics=metrics)

    def _end(
        self,
        number: int,
        parameters: Mapping[str, Any],
        rows: Sequence[tuple[str, float, int]],
        status: str,
        error: str,
    ) -> None:
        self._log(number, parameters, rows, int(time.time() * 1000))
        if error:
            self._client.set_tag(self._runs[number], "dike.error", error[-_MAX_PARAM_CHARS:])
        self._client.set_terminated(self._runs[number], status)
