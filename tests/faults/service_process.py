"""A service that takes its jobs from the database: STATE MASTER CHECKPOINT_ROOT LISTEN [TRICK].

LISTEN is where clients reach it, `-` for nowhere. A trick spoils the first launch, after the plan and before the call
that accepts the offers: `decline` gives them back, `PID:NODE` kills the agent of that process and waits until the
master knows.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from typing import Any

from framework.mesos.driver import Driver
from framework.scheduler.mesos_access import MesosAccess
from framework.scheduler.session import sigterm_as_interrupt
from framework.service.api.front import ApiFront
from framework.service.serve import Front, ServeRequest, serve
from framework.service.users import User, Users, digest

TOKENS = {"user": "u" * 20, "flood": "f" * 20}
"""User -> token, of the users whom the service accepts."""


def say(text: str) -> None:
    print(text, flush=True)


def spoil_first_launch(trick: str, master_address: str) -> None:
    """Has the offers of the first launch become void at the last moment."""
    accept = Driver.acceptOffers

    def spoiled(driver: Driver, offer_ids: Any, operations: Any, filters: Any = None) -> None:
        Driver.acceptOffers = accept
        if trick == "decline":
            driver.declineOffer(offer_ids, {"refuse_seconds": 0.0})
        else:
            pid, _, node = trick.partition(":")
            os.kill(int(pid), signal.SIGKILL)
            with MesosAccess(master_address).connect() as master:
                while node in {agent.name for agent in master.agents() or ()}:
                    time.sleep(0.02)
        accept(driver, offer_ids, operations, filters)

    Driver.acceptOffers = spoiled


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    state, master, checkpoint_root, listen, *tricks = sys.argv[1:]
    for trick in tricks:
        spoil_first_launch(trick, master)
    users = Users(lambda: {digest(token): User(name) for name, token in TOKENS.items()})
    front: Front = (lambda *_: contextlib.nullcontext()) if listen == "-" else ApiFront(listen, users)
    with contextlib.suppress(KeyboardInterrupt), sigterm_as_interrupt():
        serve(ServeRequest(state=state, mesos=MesosAccess(master=master), checkpoint_root=checkpoint_root), front, say)
