"""What a service counts while it runs; this base keeps nothing, as suits a private service that ends with its job."""

from __future__ import annotations


class Metrics:
    """Hears of what the loop does. Called on the loop's thread; each call returns at once."""

    def loop_iteration(self, seconds: float) -> None:
        """The loop has gone round once, in so many seconds of work."""

    def connected(self, is_connected: bool) -> None:
        """The subscription with the master has come to stand, or has been lost."""

    def offers_received(self, count: int) -> None:
        """Offers have come."""

    def unused_offers(self, count: int) -> None:
        """So many offers are in hand now."""

    def launched(self, count: int) -> None:
        """Tasks have been launched."""

    def task_failed(self) -> None:
        """A task has ended otherwise than well, without having been asked to."""

    def job_waited(self, seconds: float) -> None:
        """A job has got its first tasks so many seconds after it was submitted."""

    def placed(self, seconds: float) -> None:
        """A job has looked at offers, planned and launched, in so many seconds."""
