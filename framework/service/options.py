"""Options of `dike serve`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from dike.described import UserOption
from dike.exceptions import BadInputError
from framework.mesos.containers import READ_ONLY, Volume, parse_volume
from framework.project.entry_point import RUNS_FOLDER
from framework.service.access import DEFAULT_LISTEN
from solver.units import parse_duration

AllocationName = Literal["dike", "optimus", "drf", "tetris", "fifo"]
"""`framework.policies.jobs.registry.POLICIES`, which takes time to import."""
DAY_S = 24 * 3600.0
STATE_VARIABLE = "DIKE_STATE"
HA_VARIABLE = "DIKE_HA"
USERS_VARIABLE = "DIKE_USERS"
"""Environment variables for values that may contain a password: all accounts can read command lines."""
_CLIENTS = "Clients"
_KEPT = "Storage"
_SERVICES = "High availability"
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
    """Options of a service's addresses and users."""

    listen: Annotated[str, UserOption(_CLIENTS, "Address to listen on for clients.", metavar="HOST:PORT")] = (
        DEFAULT_LISTEN
    )
    advertise: Annotated[
        str | None,
        UserOption(
            _CLIENTS, "Host or URL of the web page for browsers, if --listen is not reachable.", metavar="HOST|URL"
        ),
    ] = None
    users: Annotated[
        Path | None,
        UserOption(
            _CLIENTS,
            "YAML file of users, which dike users edits.",
            metavar="FILE",
            default="only you, with a generated token",
            variable=USERS_VARIABLE,
        ),
    ] = None
    proxy_user_header: Annotated[
        str | None,
        UserOption(
            _CLIENTS,
            "HTTP header in which a proxy that signs users in sends their names. Needs --proxy-address.",
            metavar="NAME",
        ),
    ] = None
    proxy_addresses: Annotated[
        tuple[str, ...],
        UserOption(
            _CLIENTS,
            "Address or network of that proxy. Repeatable.",
            flag="--proxy-address",
            metavar="ADDRESS|NETWORK",
            read=tuple,
            reads=list[str],
        ),
    ] = ()


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """Options of a service's storage, and of how it runs jobs."""

    state: Annotated[
        str,
        UserOption(
            _KEPT, "Database of the service: sqlite:///FILE or postgresql://...", metavar="URL", variable=STATE_VARIABLE
        ),
    ] = f"sqlite:///{RUNS_FOLDER}/service.db"
    checkpoint_root: Annotated[
        str, UserOption(_KEPT, "Folder for the checkpoints of all jobs. It must have the same path on all agents.")
    ] = RUNS_FOLDER
    keep_days: Annotated[
        float,
        Field(ge=0),
        UserOption(
            _KEPT, "Days after which ended jobs are removed; 0 keeps them for ever.", flag="--keep", metavar="DAYS"
        ),
    ] = 30.0
    keep_checkpoints_s: Annotated[
        float | None,
        UserOption(
            _KEPT,
            "Time after the end of a job until its checkpoints are removed, such as 30d or 12h.",
            metavar="TIME",
            default="never removed",
            read=read_age("--keep-checkpoints"),
        ),
    ] = None
    ha: Annotated[
        str | None,
        UserOption(
            _SERVICES,
            "ZooKeeper that elects the active one of several services.",
            metavar="zk://...",
            variable=HA_VARIABLE,
        ),
    ] = None
    standby: Annotated[
        bool, UserOption(_SERVICES, "Wait while another service uses this database, then take over.")
    ] = False
    failover_timeout_s: Annotated[
        float,
        Field(ge=1),
        UserOption(_SERVICES, "Time for which Mesos keeps tasks running without the service, seconds."),
    ] = 7 * DAY_S
    allocation: Annotated[
        AllocationName | None,
        UserOption(
            _ELASTIC,
            "Policy that divides the cluster among elastic jobs.",
            default="each job chooses its own size",
        ),
    ] = None
    allocation_interval_s: Annotated[
        float, Field(ge=1), UserOption(_ELASTIC, "Time between two rounds of --allocation, seconds.")
    ] = 60.0
    sample_runs: Annotated[
        int,
        Field(ge=0, le=4),
        UserOption(_ELASTIC, "Number of smaller sizes at which a long job is measured first. Needs --allocation."),
    ] = 2
    allowed_volumes: Annotated[
        tuple[Volume, ...],
        UserOption(
            "How tasks start on the agents",
            "Folder of the agents that jobs may mount. Needs --image. Repeatable.",
            flag="--allow-volume",
            metavar="FOLDER[:ro]",
            read=read_allowed,
            reads=list[str],
        ),
    ] = ()

    @property
    def keep_s(self) -> float | None:
        """Seconds until ended jobs are removed; None for ever."""
        return self.keep_days * DAY_S or None
