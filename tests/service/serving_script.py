"""A service without clients, in a process of its own; sessions with ZooKeeper are short."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from dike.exceptions import DikeError
from framework.service import election
from framework.service.serving import ServeRequest, no_front, serve
from framework.session import MesosAccess


def note(text: str) -> None:
    print(text, flush=True)


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
    election.SESSION_S = 2.0
    secret = options.secret_file.read_text().strip() if options.secret_file else None
    mesos = MesosAccess(master=options.master, principal=options.principal, secret=secret)
    try:
        serve(ServeRequest(options.state, mesos, ha=options.ha), no_front, note)
    except DikeError as error:
        print(error)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
