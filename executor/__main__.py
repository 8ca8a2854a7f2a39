"""Entry point of the Mesos executor: an agent starts `python -m executor` in a sandbox, with Mesos' variables set."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from dike import process
from executor.dispatch import Dispatcher
from executor.driver import ExecutorDriver
from executor.environment import ZYGOTES_VARIABLE
from executor.logs import log_to


def main() -> None:
    """Runs tasks until the last one has ended."""
    if "MESOS_AGENT_ENDPOINT" not in os.environ:
        sys.exit("python -m executor is started by a Mesos agent; run `dike` instead")
    sandbox = Path(os.environ.get("MESOS_SANDBOX") or os.environ["MESOS_DIRECTORY"])
    log_to(sandbox / "executor.log")
    process.adopt_orphans()
    dispatcher = Dispatcher(sandbox, os.environ["MESOS_EXECUTOR_ID"], os.environ.get(ZYGOTES_VARIABLE, ""))
    driver = ExecutorDriver(dispatcher)
    driver.start()
    dispatcher.main(driver)
    # Without this, the driver's idle thread delays the exit by up to two seconds, in a select.
    os._exit(0)


if __name__ == "__main__":
    main()
