"""Shows a download on the terminal."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn


class _Bar:
    """The progress tracker that pypi-simple drives."""

    def __init__(self, total_bytes: int | None) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self._progress = Progress(
            *columns, console=Console(stderr=True, highlight=False, soft_wrap=True), transient=True
        )
        self._task = self._progress.add_task("fetching Apache Mesos 1.11.0", total=total_bytes)

    def __enter__(self) -> _Bar:
        if not self._progress.console.is_terminal:
            self._progress.console.print("dike: fetching Apache Mesos 1.11.0 from the package index (27 MB, once)")
        else:
            self._progress.start()
        return self

    def update(self, increment: int) -> None:
        self._progress.advance(self._task, increment)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()


def download_progress(total_bytes: int | None) -> _Bar:
    """A progress bar on standard error; one line of text if that is not a terminal."""
    return _Bar(total_bytes)
