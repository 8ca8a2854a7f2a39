"""The options that say which Mesos to use, for every command that launches something."""

from __future__ import annotations

import re
from pathlib import Path

from dike.exceptions import BadInputError
from framework.embedded import private_agents
from framework.session import MesosAccess


def mesos_access(
    *,
    master: str | None,
    agents: int,
    resources: str,
    attributes: str,
    connect_timeout: float,
    role: str,
    principal: str | None,
    secret_file: Path | None,
    image: str | None,
    agent_python: str | None,
) -> MesosAccess:
    """Checks the options and puts them together.

    Raises:
        BadInputError: if they contradict each other or cannot be used.
    """
    if image is not None and master is None:
        raise BadInputError("--image needs --master: the private Mesos runs tasks in this machine's own file system.")
    if not re.fullmatch(r"\*|[^\s/*.-][^\s*]*", role):
        raise BadInputError(f"'{role}' is not a Mesos role; a role is one word without '*', or '*' alone.")
    return MesosAccess(
        master=master,
        agents=private_agents(agents, resources, attributes),
        connect_timeout_s=connect_timeout,
        role=role,
        principal=principal,
        secret=_read_secret(secret_file, principal),
        image=image,
        agent_python=agent_python,
    )


def _read_secret(path: Path | None, principal: str | None) -> str | None:
    if path is None:
        if principal is not None:
            raise BadInputError("--principal needs --secret-file, the file that holds its secret.")
        return None
    if principal is None:
        raise BadInputError("--secret-file needs --principal, the name the secret belongs to.")
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise BadInputError(f"The secret file {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise BadInputError(f"The secret in {path} has to be ASCII text, as HTTP authentication wants it.") from error
