"""A service without clients that kills itself at a moment of the test's choice: STATE MASTER [MOMENT] [PYTHON]."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

from framework.mesos.driver import Driver
from framework.scheduler import reconciler
from framework.scheduler.mesos_access import MesosAccess
from framework.service import serve as serving
from framework.service.serve import ServeRequest, serve

BEFORE_ACCEPT = "before-accept"
AFTER_ACCEPT = "after-accept"
BEFORE_LAST_ACKNOWLEDGEMENT = "before-last-acknowledgement"
NEVER = "never"


class DyingDriver(Driver):
    """Ends its process as SIGKILL from outside would."""

    moment = NEVER

    def acceptOffers(self, offer_ids: Any, operations: Any, filters: Any = None) -> None:  # noqa: N802
        self._die_at(BEFORE_ACCEPT)
        super().acceptOffers(offer_ids, operations, filters)
        self._die_at(AFTER_ACCEPT)

    def acknowledgeStatusUpdate(self, status: Any) -> None:  # noqa: N802
        if status["state"] == "TASK_FINISHED":
            self._die_at(BEFORE_LAST_ACKNOWLEDGEMENT)
        super().acknowledgeStatusUpdate(status)

    def _die_at(self, moment: str) -> None:
        if self.moment == moment:
            os.kill(os.getpid(), signal.SIGKILL)


def note(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    state, master, DyingDriver.moment, *python = sys.argv[1:]
    # The agents of a test's cluster are known to its master from the start.
    reconciler.RECONCILE_AFTER_S = 2.0
    serving.Driver = DyingDriver  # type: ignore[misc]
    mesos = MesosAccess(master=master, agent_python=python[0] if python else None)
    serve(
        ServeRequest(state=state, mesos=mesos, checkpoint_root=str(Path(state.removeprefix("sqlite:///")).parent)),
        lambda *_: contextlib.nullcontext(),
        note,
    )


if __name__ == "__main__":
    main()
