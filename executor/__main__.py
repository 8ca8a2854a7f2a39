"""What an agent starts: `python -m executor`, in a sandbox, with Mesos' variables in the environment."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from executor.dispatch import Dispatcher
from executor.driver import ExecutorDriver


def main() -> None:
    """Runs one slot until its task has ended."""
    if "MESOS_AGENT_ENDPOINT" not in os.environ:
        sys.exit("python -m executor is started by a Mesos agent; it has nothing to do by itself")
    sandbox = Path(os.environ.get("MESOS_SANDBOX") or os.environ["MESOS_DIRECTORY"])
    log_to(sandbox / "executor.log")
    dispatcher = Dispatcher(sandbox)
    driver = ExecutorDriver(dispatcher)
    driver.start()
    dispatcher.main(driver)
    # The driver's thread waits in a select for up to two seconds; nothing is left for it to do.
    os._exit(0)


def log_to(path: Path) -> None:
    """Sends all logging to a file: the sandbox's `stdout` and `stderr` belong to the user's process."""
    logging.getLogger("pymesos").handlers.clear()
    logging.basicConfig(
        filename=path, level=logging.INFO, format="%(asctime)s %(levelname)s [%(threadName)s] %(name)s: %(message)s"
    )
    # It would tell whoever reads the sandbox where the bundle is, token included.
    logging.getLogger("httpx").setLevel(logging.WARNING)


if __name__ == "__main__":
    main()
