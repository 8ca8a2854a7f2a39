"""What an operator says of a service: `dike serve`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from dike.exceptions import BadInputError
from framework.mesos.containers import READ_ONLY, Volume, parse_volume
from framework.project.entry_point import RUNS_FOLDER
from framework.service.access import DEFAULT_LISTEN
from solver.described import UserOption
from solver.units import parse_duration

AllocationName = Literal["dike", "optimus", "drf", "tetris", "fifo"]
"""`framework.policies.jobs.registry.POLICIES`, which takes time to import."""
DAY_S = 24 * 3600.0
STATE_VARIABLE = "DIKE_STATE"
HA_VARIABLE = "DIKE_HA"
USERS_VARIABLE = "DIKE_USERS"
"""Variables may hold a password, which everybody can read in a command line."""
_CLIENTS = "Clients"
_KEPT = "What is kept"
_SERVICES = "Several services"
_ELASTIC = "Elastic jobs"


def read_age(option: str) -> Callable[[str], float]:
    """Reads values such as `30d` or `12h` of an option, in seconds; raises `BadInputError` for others."""

    def read(text: str) -> float:
        try:
            return parse_duration(text)
        except ValueError as error:
            raise BadInputError(f"'{text}' is not a value of {option}: {error}.") from None

    return read


def read_allowed(texts: Sequence[str]) -> tuple[Volume, ...]:
    """Reads folders that jobs may mount: `FOLDER` or `FOLDER:ro`.

    Raises:
        BadInputError: if one is malformed.
    """
    volumes = []
    for text in texts:
        folder = text.removesuffix(f":{READ_ONLY}")
        if ":" in folder:
            raise BadInputError(f"'{text}' is not a value of --allow-volume; write FOLDER or FOLDER:ro.")
        volumes.append(parse_volume(text))
    return tuple(volumes)


@dataclass(frozen=True, kw_only=True)
class ClientOptions:
    """How clients reach a service, and who they are."""

    listen: Annotated[str, UserOption(_CLIENTS, "Address at which clients reach the service.", metavar="HOST:PORT")] = (
        DEFAULT_LISTEN
    )
    advertise: Annotated[
        str | None,
        UserOption(_CLIENTS, "Address of the web page for browsers, if not --listen.", metavar="HOST|URL"),
    ] = None
    users: Annotated[
        Path | None,
        UserOption(
            _CLIENTS,
            "YAML file of users (dike users); without it, only you, by a token that is made for you.",
            metavar="FILE",
            variable=USERS_VARIABLE,
        ),
    ] = None
    proxy_user_header: Annotated[
        str | None,
        UserOption(
            _CLIENTS,
            "Header in which a proxy that signs users in gives their name, with --proxy-address.",
            metavar="NAME",
        ),
    ] = None
    proxy_addresses: Annotated[
        tuple[str, ...],
        UserOption(
            _CLIENTS,
            "Address from which that proxy's requests come; repeatable.",
            flag="--proxy-address",
            metavar="ADDRESS|NETWORK",
            read=tuple,
            reads=list[str],
        ),
    ] = ()


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """What a service keeps, and how it runs jobs."""

    state: Annotated[
        str,
        UserOption(_KEPT, "Database: sqlite:///FILE or postgresql://...", metavar="URL", variable=STATE_VARIABLE),
    ] = f"sqlite:///{RUNS_FOLDER}/service.db"
    checkpoint_root: Annotated[
        str, UserOption(_KEPT, "Folder for the checkpoints of all jobs; the same path on all agents.")
    ] = RUNS_FOLDER
    keep_days: Annotated[
        float,
        Field(ge=0),
        UserOption(_KEPT, "Forget jobs this many days after their end; 0 means never.", flag="--keep", metavar="DAYS"),
    ] = 30.0
    keep_checkpoints_s: Annotated[
        float | None,
        UserOption(
            _KEPT,
            "Remove checkpoints this long after the end of their job: 30d, 12h.",
            metavar="TIME",
            read=read_age("--keep-checkpoints"),
        ),
    ] = None
    ha: Annotated[
        str | None,
        UserOption(
            _SERVICES,
            "ZooKeeper that elects one of several services; the others stand by.",
            metavar="zk://...",
            variable=HA_VARIABLE,
        ),
    ] = None
    standby: Annotated[bool, UserOption(_SERVICES, "Stand by while another service runs on this database.")] = False
    failover_timeout_s: Annotated[
        float,
        Field(ge=1),
        UserOption(_SERVICES, "Seconds for which Mesos keeps tasks running while the service is away."),
    ] = 7 * DAY_S
    allocation: Annotated[
        AllocationName | None,
        UserOption(_ELASTIC, "Policy that divides the cluster among elastic jobs; without it each job sizes itself."),
    ] = None
    allocation_interval_s: Annotated[
        float, Field(ge=1), UserOption(_ELASTIC, "Seconds between two rounds of --allocation.")
    ] = 60.0
    sample_runs: Annotated[
        int,
        Field(ge=0, le=4),
        UserOption(_ELASTIC, "Smaller sizes at which a long job is measured first, with --allocation."),
    ] = 2
    allowed_volumes: Annotated[
        tuple[Volume, ...],
        UserOption(
            "How tasks start on the agents",
            "A folder of the agents that jobs may mount, with --image; repeatable.",
            flag="--allow-volume",
            metavar="FOLDER[:ro]",
            read=read_allowed,
            reads=list[str],
        ),
    ] = ()

    @property
    def keep_s(self) -> float | None:
        """How long jobs that have ended are kept, in seconds; None for ever."""
        return self.keep_days * DAY_S or None
