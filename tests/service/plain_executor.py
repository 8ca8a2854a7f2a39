"""The executor, but the worker runs its script as it is, and parameter servers sleep: nothing imports TensorFlow."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from dike.task import Role
from executor import __main__, dispatch
from executor.process import Command
from executor.slot import JobSlot


class PlainSlot(JobSlot):
    """Starts another program than `dike.launch`."""

    def _command(self, folder: Path, report_fd: int) -> Command:
        order = self._order
        program = [sys.executable, str(folder / order.script), *order.arguments]
        arguments = program if order.task.role is Role.WORKER else ["sleep", "600"]
        return Command(arguments, folder, dict(os.environ), (report_fd,))


if __name__ == "__main__":
    dispatch.JobSlot = PlainSlot  # type: ignore[misc]
    __main__.main()
