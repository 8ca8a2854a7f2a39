"""What the report lines of a trial's run add up to."""

from __future__ import annotations

import json
import logging
from typing import Any

from dike.trial.spec import EXIT_BAD_INPUT, EXIT_SUSPENDED, TrialSpec, step_of_checkpoint
from executor.process import describe_exit

logger = logging.getLogger(__name__)


class RunReports:
    """Takes the lines of one run in (see `dike.trial.reports`); what is no report is logged and otherwise ignored.

    Args:
        trial: the run's trial.

    Attributes:
        training: whether its first step has been taken.
        preemptible: whether it can be suspended.
        was_preemptible: whether it ever could.
        step: its last step.
        checkpoint: the newest checkpoint that the trial has; None if there is none.
        checkpoint_step: steps done at that checkpoint.
        batch_size: samples of a step; None if the run has not said.
        last: content of the last `progress` report, with what a `result` said in place of its `value` and `metrics`.
        losses: contents of `progress` reports that nobody has taken away yet.
    """

    def __init__(self, trial: TrialSpec) -> None:
        self.training = False
        self.preemptible = False
        self.batch_size: float | None = None
        self.was_preemptible = False
        self.checkpoint = trial.resume_from
        self.checkpoint_step = step_of_checkpoint(trial.resume_from) if trial.resume_from else 0
        self.step = self.checkpoint_step
        self.last: dict[str, Any] = {}
        self.losses: list[dict[str, Any]] = []
        self._suspended = False
        self._refusal = ""
        self._failure = ""
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Takes bytes in as they come; a line may come in pieces."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            try:
                self._take(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                logger.warning("not a report: %r (%s)", line[:200], error)

    def take_losses(self) -> tuple[dict[str, Any], ...]:
        """The `progress` reports since the last call, oldest first."""
        taken, self.losses = tuple(self.losses), []
        return taken

    def outcome(self, exit_code: int | None, stopped: str) -> tuple[str, str]:
        """How the run ended.

        Args:
            exit_code: minus the signal's number if one ended it; None if it was never started or nobody knows.
            stopped: why we have ended it; empty if we have not.

        Returns:
            `RunEnd.outcome` and `RunEnd.message`.
        """
        if exit_code == EXIT_SUSPENDED and self._suspended:
            return "suspended", ""
        if exit_code == 0:
            return "finished", ""
        if exit_code == EXIT_BAD_INPUT and self._refusal:
            return "bad_input", self._refusal
        if stopped:
            return "stopped", stopped
        return "failed", self._failure or describe_exit(exit_code)

    def _take(self, content: dict[str, Any]) -> None:
        match content["type"]:
            case "restored":
                self._checkpoint(content)
                self.step = self.checkpoint_step
            case "training":
                self.training = True
                self.preemptible = bool(content["preemptible"])
                self.was_preemptible = self.was_preemptible or self.preemptible
                if content.get("batch_size") is not None:
                    self.batch_size = float(content["batch_size"])
            case "progress":
                self.step = int(content["step"])
                self.last = content
                self.losses.append(content)
            case "checkpoint":
                self._checkpoint(content)
            case "suspended":
                self._checkpoint(content)
                self._suspended = True
            case "result":
                metrics = {**self.last.get("metrics", {}), **content.get("values", {})}
                self.last = {**self.last, "value": content["value"], "metrics": metrics}
            case "bad_input":
                self._refusal = str(content["message"])
            case "failed":
                self._failure = str(content["message"])
            case "started":
                pass
            case other:
                logger.warning("unknown report %r", other)

    def _checkpoint(self, content: dict[str, Any]) -> None:
        step = int(content["step"])
        self.checkpoint, self.checkpoint_step = str(content["path"]), step
