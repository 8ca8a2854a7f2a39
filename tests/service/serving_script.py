"""A service without clients in its own process; prints its ZooKeeper sessions, which have a long timeout."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from pathlib import Path
from typing import Any

from kazoo.client import KazooClient
from kazoo.protocol.states import KazooState

from dike.exceptions import DikeError
from framework.scheduler.mesos_access import MesosAccess
from framework.service import election
from framework.service.serve import ServeRequest, serve
from tests.service.zookeeper_server import LONGEST_SESSION_S


def note(text: str) -> None:
    print(text, flush=True)


class TellingClient(KazooClient):
    """Prints the session and password that it has with ZooKeeper."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.add_listener(self._tell)

    def _tell(self, state: KazooState) -> None:
        if state == KazooState.CONNECTED:
            session, password = self.client_id
            note(f"session {session} {password.hex()}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("state")
    parser.add_argument("master")
    parser.add_argument("--ha")
    parser.add_argument("--principal")
    parser.add_argument("--secret-file", type=Path)
    parser.add_argument("--log")
    options = parser.parse_args()
    if options.log:
        logging.basicConfig(filename=options.log, level=logging.DEBUG)
    # One that is only slow must not lose the election: the test ends a session when it is to end.
    election.SESSION_TIMEOUT_S = LONGEST_SESSION_S
    election.KazooClient = TellingClient  # type: ignore[attr-defined]
    secret = options.secret_file.read_text().strip() if options.secret_file else None
    mesos = MesosAccess(master=options.master, principal=options.principal, secret=secret)
    try:
        serve(ServeRequest(state=options.state, mesos=mesos, ha=options.ha), lambda *_: contextlib.nullcontext(), note)
    except DikeError as error:
        print(error)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
