"""Whether a training job that has failed starts again."""

from __future__ import annotations

from framework.job import JobSpec
from framework.job_state import JobMemory
from framework.observer import JobObserver
from framework.running import Turn

STALE_OFFERS = "REASON_INVALID_OFFERS"


class Restarts:
    """Counts failures.

    Args:
        spec: the job.
        memory: what is known of it.
        observer: is told of restarts.
    """

    def __init__(self, spec: JobSpec, memory: JobMemory, observer: JobObserver) -> None:
        self._spec = spec
        self._memory = memory
        self._observer = observer

    def allow(self, turn: Turn, *, stepped: bool) -> bool:
        """Takes a failure in; whether the job starts again. Its result says why, if it does not.

        Args:
            turn: the failure.
            stepped: whether the attempt has made a step.
        """
        result = self._memory.result
        refusal = self._refusal(turn, stepped=stepped)
        if refusal:
            result.failure = refusal
            if turn.task is not None and turn.task.outcome is not None:
                result.failed_tail = turn.task.outcome.tail
                result.last_words = turn.task.last_words
        return not refusal

    def _refusal(self, turn: Turn, *, stepped: bool) -> str:
        output = "" if turn.task is None else turn.task.place_of_output
        stale = turn.task is not None and turn.task.reason == STALE_OFFERS
        if stale or not turn.counts:
            self._observer.note(f"{turn.reason}; starting again")
        elif turn.task is not None and turn.task.is_fenced:
            return f"{turn.reason}; another job uses its checkpoint folder {self._spec.checkpoint_dir}{output}"
        elif self._is_hopeless(turn, stepped=stepped):
            return f"{turn.reason}; it failed twice in the same way without a new step{output}"
        elif not self._memory.may_fail(self._spec.max_restarts):
            limit = f"{self._spec.max_restarts} in a row without a newer checkpoint"
            return f"{turn.reason}; no more restarts than {limit} (--max-restarts){output}"
        else:
            self._memory.count_failure()
            self._observer.restarting(f"{turn.reason}{output}", self._memory.failures, self._spec.max_restarts)
        return ""

    def _is_hopeless(self, turn: Turn, *, stepped: bool) -> bool:
        """Whether the job fails before its first step, twice in the same way: no restart will help."""
        failure = "" if turn.task is None or stepped else turn.task.early_failure
        again = bool(failure) and failure == self._memory.early_failure
        self._memory.early_failure = failure
        return again
