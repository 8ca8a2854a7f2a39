"""Interface of a service's metrics; this base class records nothing."""

from __future__ import annotations


class Metrics:
    """Receives what the scheduler's loop does, on the loop's thread; calls must not block."""

    def loop_iteration(self, seconds: float) -> None:
        """One iteration of the loop, and its duration without waiting."""

    def connected(self, is_connected: bool) -> None: ...

    def offers_received(self, count: int) -> None: ...

    def unused_offers(self, count: int) -> None:
        """Number of offers in the pool now."""

    def launched(self, count: int) -> None:
        """Number of tasks launched."""

    def task_failed(self) -> None:
        """A task failed without being asked to stop."""

    def job_waited(self, seconds: float) -> None:
        """Time from a job's submission to its first launch."""

    def placed(self, seconds: float) -> None:
        """Time in which a job matched offers, planned and launched."""
