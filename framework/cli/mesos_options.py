"""The options that select a Mesos cluster, for every command that launches tasks."""

from __future__ import annotations

import inspect
import os
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
    from framework.cluster.machine import ClusterMachine
    from framework.scheduler.mesos_access import MesosAccess


def mesos_access(
    *,
    master: Annotated[
        str | None,
        typer.Option(
            envvar="DIKE_MASTER",
            help="Address of the Mesos master: HOST:PORT or zk://HOST:PORT/PATH.",
            show_default="the cluster of this machine (dike cluster), or a private Mesos",
        ),
    ] = None,
    private: Annotated[
        bool,
        typer.Option(
            "--private", help="Use a private Mesos even if this machine is in a cluster; as DIKE_PRIVATE=1 does."
        ),
    ] = False,
    role: Annotated[str, typer.Option(help="Mesos role to register with.")] = "*",
    principal: Annotated[str | None, typer.Option(help="Mesos principal to authenticate as.")] = None,
    secret_file: Annotated[Path | None, typer.Option(help="File with the principal's secret.")] = None,
    image: Annotated[str | None, typer.Option(help="Container image for the tasks.")] = None,
    agent_python: Annotated[
        str | None,
        typer.Option(
            help="Path on the agents of a Python in which Dike is installed.", show_default="this one, or python3"
        ),
    ] = None,
    bundle_port: Annotated[
        int,
        typer.Option(
            min=0, max=65535, help="Port of this machine from which agents fetch scripts; 0 for any free port."
        ),
    ] = 0,
    advertise_address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST", help="Address under which agents reach this machine, if it is behind NAT or in a container."
        ),
    ] = None,
    connect_timeout: Annotated[
        float, typer.Option(min=0.1, help="Maximum time to wait for the master, seconds.")
    ] = 10.0,
    agents: Annotated[int, typer.Option(min=1, help="Number of agents.")] = 1,
    resources: Annotated[
        str,
        typer.Option(
            help="Resources of each agent, such as 'cpus:4;mem:4096;gpus:1' (mem in MiB).",
            show_default="this machine's",
        ),
    ] = "",
    attributes: Annotated[str, typer.Option(help="Attributes of each agent, such as 'rack:r1'.")] = "",
) -> MesosAccess:
    """Checks the options and reads the secret.

    Raises:
        BadInputError: if they contradict each other or cannot be used.
    """
    from framework.embedded.agents import private_agents
    from framework.scheduler.mesos_access import MesosAccess

    if private and master is not None:
        raise BadInputError("--private and --master (or $DIKE_MASTER) name two kinds of Mesos: leave one of them out.")
    own = {"--agents": agents != 1, "--resources": resources, "--attributes": attributes}
    is_private = private or any(own.values()) or bool(os.environ.get("DIKE_PRIVATE"))
    machine = _own_cluster(master, is_private=is_private)
    if machine is not None:
        master = machine.cluster.master
    if image is not None and master is None:
        raise BadInputError("--image needs --master: the private Mesos runs tasks in this machine's own file system.")
    if advertise_address is not None:
        if master is None:
            raise BadInputError("--advertise-address needs --master: the private Mesos is on this machine.")
        if not re.fullmatch(r"[\w.-]+", advertise_address, re.ASCII):
            raise BadInputError(
                f"'{advertise_address}' is not a value of --advertise-address; write a host name or an IPv4 address."
            )
    if master is not None and any(own.values()):
        given = ", ".join(option for option, value in own.items() if value)
        raise BadInputError(
            f"{given} is for a private Mesos, but --master or $DIKE_MASTER names another one; leave one of them out."
        )
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
        machine=machine,
    )


def _own_cluster(master: str | None, *, is_private: bool) -> ClusterMachine | None:
    """This machine's part of the cluster to use: its own by default, or the one whose master is named."""
    from framework.cluster.records import folders

    if (master is None and is_private) or (master is not None and not master.startswith("127.")) or not folders():
        return None
    # Imported late: it needs cryptography.
    from framework.cluster.machine import machine_at, running_machine

    if master is not None:
        return machine_at(master.partition(":")[0])
    machine = running_machine()
    if machine is not None:
        warn(f"using the cluster '{machine.cluster.name}' (--private uses this machine alone)")
    else:
        warn("the cluster of this machine is not up (dike cluster start, or join): using this machine alone")
    return machine


def access_from_options(options: Mapping[str, Any]) -> MesosAccess:
    """Calls `mesos_access` with stored options.

    Args:
        options: parameter -> JSON value; other parameters are ignored.

    Raises:
        BadInputError: as `mesos_access`.
    """
    defaults = {name: one.default for name, one in inspect.signature(mesos_access).parameters.items()}
    values = {name: options.get(name, default) for name, default in defaults.items()}
    secret_file = values["secret_file"]
    return mesos_access(**{**values, "secret_file": None if secret_file is None else Path(secret_file)})


def warn(text: str) -> None:
    """Prints a note to standard error."""
    print(f"dike: {text}", file=sys.stderr)


MESOS_OPTIONS = frozenset(inspect.signature(mesos_access).parameters)
MESOS_PANELS = {
    "Which Mesos": ("master", "private", "role", "principal", "secret_file", "connect_timeout"),
    "Private Mesos, without --master": ("agents", "resources", "attributes"),
    "How tasks start on the agents": ("image", "agent_python", "bundle_port", "advertise_address"),
}
PRIVATE_MESOS_OPTIONS = frozenset({"private", "agents", "resources", "attributes"})
"""Options of a private Mesos."""
MASTER_OPTIONS = frozenset({"master", "role", "principal", "secret_file", "image", "agent_python", "advertise_address"})
"""Options of an existing Mesos."""


def _read_secret(path: Path | None, principal: str | None) -> str | None:
    if path is None:
        if principal is not None:
            raise BadInputError("--principal needs --secret-file, the file that holds its secret.")
        return None
    if principal is None:
        raise BadInputError("--secret-file needs --principal, the name the secret belongs to.")
    # HTTP basic authentication is ASCII.
    secret = read_text(path, "secret file", "ASCII").strip()
    if path.stat().st_mode & stat.S_IRWXO:
        raise BadInputError(f"All accounts of this machine can access the secret file {path}; run chmod 600 {path}.")
    return secret
