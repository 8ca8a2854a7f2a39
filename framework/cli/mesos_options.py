"""The options that say which Mesos to use, for every command that launches something."""

from __future__ import annotations

import inspect
import re
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dike.exceptions import BadInputError
from solver.text_files import read_text

if TYPE_CHECKING:
    from framework.scheduler.mesos_access import MesosAccess


def mesos_access(
    *,
    master: Annotated[
        str | None,
        typer.Option(
            envvar="DIKE_MASTER",
            help="Mesos master: HOST:PORT or zk://HOST:PORT/PATH.",
            show_default="a private Mesos on this machine",
        ),
    ] = None,
    role: Annotated[str, typer.Option(help="Mesos role.")] = "*",
    principal: Annotated[str | None, typer.Option(help="Mesos principal.")] = None,
    secret_file: Annotated[Path | None, typer.Option(help="File that holds the principal's secret.")] = None,
    image: Annotated[str | None, typer.Option(help="Container image for the tasks.")] = None,
    agent_python: Annotated[
        str | None,
        typer.Option(help="Python on the agents that has Dike installed.", show_default="this one, or python3"),
    ] = None,
    bundle_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port at which agents fetch scripts from here; 0 takes a free one.")
    ] = 0,
    advertise_address: Annotated[
        str | None,
        typer.Option(metavar="HOST", help="Address at which agents reach this machine; for NAT and containers."),
    ] = None,
    connect_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for the master.")] = 10.0,
    agents: Annotated[int, typer.Option(min=1, help="Number of agents.")] = 1,
    resources: Annotated[
        str,
        typer.Option(help="Resources of each agent, as in 'cpus:4;mem:4096;gpus:1'.", show_default="this machine's"),
    ] = "",
    attributes: Annotated[str, typer.Option(help="Attributes of each agent, as in 'rack:r1'.")] = "",
) -> MesosAccess:
    """Checks the options and puts them together.

    Raises:
        BadInputError: if they contradict each other or cannot be used.
    """
    from framework.embedded.agents import private_agents
    from framework.scheduler.mesos_access import MesosAccess

    if image is not None and master is None:
        raise BadInputError("--image needs --master: the private Mesos runs tasks in this machine's own file system.")
    if advertise_address is not None:
        if master is None:
            raise BadInputError("--advertise-address needs --master: the private Mesos is on this machine.")
        if not re.fullmatch(r"[\w.-]+", advertise_address, re.ASCII):
            raise BadInputError(
                f"'{advertise_address}' is not a value of --advertise-address; write a host name or an IPv4 address."
            )
    private = {"--agents": agents != 1, "--resources": resources, "--attributes": attributes}
    if master is not None and any(private.values()):
        given = ", ".join(option for option, value in private.items() if value)
        raise BadInputError(f"{given} is for a private Mesos, but --master or $DIKE_MASTER names one; leave that out.")
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
        advertise_address=advertise_address,
        bundle_port=bundle_port,
        warn=warn,
    )


def remembered_access(options: Mapping[str, Any]) -> MesosAccess:
    """`mesos_access` of these options, which may be JSON values and may be others', too.

    Raises:
        BadInputError: as `mesos_access`.
    """
    defaults = {name: one.default for name, one in inspect.signature(mesos_access).parameters.items()}
    values = {name: options.get(name, default) for name, default in defaults.items()}
    secret_file = values["secret_file"]
    return mesos_access(**{**values, "secret_file": None if secret_file is None else Path(secret_file)})


def warn(text: str) -> None:
    """Says what the user should know and need not act on."""
    print(f"dike: {text}", file=sys.stderr)


MESOS_OPTIONS = frozenset(inspect.signature(mesos_access).parameters)
"""Their names."""
MESOS_PANELS = {
    "Which Mesos": ("master", "role", "principal", "secret_file", "connect_timeout"),
    "Private Mesos, without --master": ("agents", "resources", "attributes"),
    "How tasks start on the agents": ("image", "agent_python", "bundle_port", "advertise_address"),
}
"""How `--help` shows them."""
PRIVATE_MESOS_OPTIONS = frozenset({"agents", "resources", "attributes"})
"""Those of a private Mesos; the others are for one that is there already, or for both."""
MASTER_OPTIONS = frozenset({"master", "role", "principal", "secret_file", "image", "agent_python", "advertise_address"})
"""Those that say which one is there already, and how it is to be used."""


def _read_secret(path: Path | None, principal: str | None) -> str | None:
    if path is None:
        if principal is not None:
            raise BadInputError("--principal needs --secret-file, the file that holds its secret.")
        return None
    if principal is None:
        raise BadInputError("--secret-file needs --principal, the name the secret belongs to.")
    # HTTP authentication knows nothing else.
    secret = read_text(path, "secret file", "ASCII").strip()
    if path.stat().st_mode & stat.S_IRWXO:
        raise BadInputError(f"Everybody on this machine may read the secret file {path}; chmod 600 it.")
    return secret
