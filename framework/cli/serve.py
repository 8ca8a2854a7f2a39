"""`dike serve`: one framework for many users' jobs, left running."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args
from urllib.parse import quote

import typer

from dike.exceptions import BadInputError
from framework.cli.mesos_options import MESOS_PANELS, mesos_access
from framework.cli.option_groups import read_age, with_options
from framework.cli.service_options import USERS_VARIABLE
from framework.project.entry_point import RUNS_FOLDER
from framework.service.access import DEFAULT_LISTEN
from framework.user_folders import own_token_file
from solver.cli.planning_options import network_option, read_network_option

AllocationName = Literal["dike", "optimus", "drf", "tetris", "fifo"]
"""`framework.policies.jobs.registry.POLICIES`, which takes time to import."""
ALLOCATION_INTERVAL_S = 60.0
SAMPLE_RUNS = 2
DAY_S = 24 * 3600.0
STATE_VARIABLE = "DIKE_STATE"
HA_VARIABLE = "DIKE_HA"
"""May hold a password, which everybody can read in a command line."""
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
TALKATIVE = ("httpx", "httpcore", "kazoo", "uvicorn", "pymesos")
"""Libraries that log what is of no use to an operator, requests' addresses among it."""

if TYPE_CHECKING:
    from framework.mesos.master import LeadingMaster
    from framework.scheduler.mesos_access import MesosAccess
    from framework.service.api.backend import Proxy
    from framework.service.api.front import ApiFront
    from framework.service.serve import Front
    from framework.service.service import Service
    from framework.service.submission import Submissions

logger = logging.getLogger("dike.serve")


PANELS = {
    "Clients": ("listen", "advertise", "users", "proxy_user_header", "proxy_address"),
    "What is kept": ("state", "checkpoint_root", "keep", "keep_checkpoints"),
    "Several services": ("ha", "standby", "failover_timeout"),
    "Planning": ("network",),
    "Elastic jobs": ("allocation", "allocation_interval", "sample_runs"),
    **MESOS_PANELS,
    "How tasks start on the agents": (*MESOS_PANELS["How tasks start on the agents"], "allow_volume"),
}


@with_options(mesos=mesos_access)
def serve_command(
    *,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address at which clients reach the service.")
    ] = DEFAULT_LISTEN,
    state: Annotated[
        str, typer.Option(envvar=STATE_VARIABLE, metavar="URL", help="Database: sqlite:///FILE or postgresql://...")
    ] = f"sqlite:///{RUNS_FOLDER}/service.db",
    users: Annotated[
        Path | None,
        typer.Option(
            envvar=USERS_VARIABLE,
            metavar="FILE",
            help="YAML file of users (dike users); without it, only you, by a token that is made for you.",
        ),
    ] = None,
    proxy_user_header: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Header in which a proxy that signs users in says who they are, with --proxy-address."
        ),
    ] = None,
    proxy_address: Annotated[
        list[str] | None,
        typer.Option(metavar="ADDRESS|NETWORK", help="Address from which that proxy's requests come; repeatable."),
    ] = None,
    checkpoint_root: Annotated[
        str, typer.Option(help="Folder for the checkpoints of all jobs; the same path on all agents.")
    ] = RUNS_FOLDER,
    failover_timeout: Annotated[
        float, typer.Option(min=1, help="Seconds for which Mesos keeps tasks running while the service is away.")
    ] = 7 * DAY_S,
    ha: Annotated[
        str | None,
        typer.Option(
            envvar=HA_VARIABLE,
            metavar="zk://...",
            help="ZooKeeper that elects one of several services; the others stand by.",
        ),
    ] = None,
    standby: Annotated[
        bool, typer.Option("--standby", help="Stand by while another service runs on this database.")
    ] = False,
    advertise: Annotated[
        str | None, typer.Option(metavar="HOST|URL", help="Address of the web page for browsers, if not --listen.")
    ] = None,
    allow_volume: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FOLDER[:ro]",
            help="A folder of the agents that jobs may mount, with --image; repeatable.",
        ),
    ] = None,
    network: Annotated[Path | None, network_option()] = None,
    allocation: Annotated[
        AllocationName | None,
        typer.Option(help="Policy that shares the cluster out among elastic jobs; else each sizes itself."),
    ] = None,
    allocation_interval: Annotated[
        float | None, typer.Option(min=1, help="Seconds between two rounds of --allocation, 60 by default.")
    ] = None,
    sample_runs: Annotated[
        int | None,
        typer.Option(
            min=0, max=4, help="Smaller sizes at which a long job is measured first, with --allocation; 2 by default."
        ),
    ] = None,
    keep: Annotated[
        float, typer.Option(min=0, metavar="DAYS", help="Forget jobs this many days after their end; 0 means never.")
    ] = 30.0,
    keep_checkpoints: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Remove checkpoints this long after the end of their job: 30d, 12h."),
    ] = None,
    mesos: MesosAccess,
) -> None:
    """Runs the jobs of many users.

    Keeps one Mesos framework registered, and runs on it what is submitted. How to install, upgrade and debug a service
    is in docs/service.md.
    """
    from framework.scheduler.session import sigterm_as_interrupt
    from framework.service.api.front import ApiFront
    from framework.service.election import Ensemble
    from framework.service.mounts import read_allowed
    from framework.service.serve import ServeRequest, serve
    from framework.service.users import Users

    if ha is not None:
        Ensemble.parse(ha)
        if mesos.master is None:
            raise BadInputError("--ha needs --master: a private Mesos ends with the service that has started it.")
    allowed = read_allowed(allow_volume or ())
    if allowed and mesos.image is None:
        raise BadInputError("--allow-volume needs --image: without one, jobs see the folders of their agents anyway.")
    if allocation is None and (allocation_interval is not None or sample_runs is not None):
        given = "--sample-runs" if allocation_interval is None else "--allocation-interval"
        raise BadInputError(
            f"{given} is of no use without --allocation; name a policy: {', '.join(get_args(AllocationName))}."
        )
    proxy = _proxy(proxy_user_header, proxy_address or (), users)
    kept_checkpoints_s = None if keep_checkpoints is None else read_age("--keep-checkpoints", keep_checkpoints)
    if kept_checkpoints_s == 0:
        raise BadInputError("--keep-checkpoints 0 would leave a job nothing to go on from; give a time, such as 30d.")
    known = Users.of_this_account() if users is None else Users.of_file(users)
    api = functools.partial(ApiFront, users=known, advertised=advertise, proxy=proxy)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_logging_to_stderr())
        early: ApiFront | None = None
        if ha is None and not standby:
            # Whoever stands by listens only when it leads: clients are refused at once, and try another.
            early = stack.enter_context(contextlib.closing(api(listen)))
            listen = f"{listen.rpartition(':')[0]}:{early.url.rpartition(':')[2]}"
        elif listen.endswith(":0"):
            raise BadInputError("--listen needs a port with --ha and --standby.")
        url = f"http://{listen}" if early is None else early.url
        request = ServeRequest(
            state=state,
            mesos=mesos,
            checkpoint_root=checkpoint_root,
            failover_timeout_s=failover_timeout,
            webui_url=_page_url(listen, url, advertise),
            ha=ha,
            standby=standby,
            weight=known.weight,
            limits=known.limits,
            allowed_volumes=allowed,
            network=read_network_option(network),
            allocation=allocation,
            allocation_interval_s=ALLOCATION_INTERVAL_S if allocation_interval is None else allocation_interval,
            sample_runs=SAMPLE_RUNS if sample_runs is None else sample_runs,
            keep_s=keep * DAY_S or None,
            keep_checkpoints_s=kept_checkpoints_s,
        )
        logger.info("users: %s", users or f"only you, by the token in {own_token_file()}")
        if mesos.master is None:
            logger.info("a private Mesos on this machine: it ends with this service, and all tasks with it")
        try:
            with known.kept_current(), sigterm_as_interrupt():
                front = _front(early, lambda: api(listen), request.webui_url, has_own_token=users is None)
                serve(request, front, logger.info)
        except KeyboardInterrupt:
            logger.info("ended")


def _proxy(header: str | None, addresses: Sequence[str], users: Path | None) -> Proxy | None:
    """Who may sign users in, as the options say; None for nobody.

    Raises:
        BadInputError: if they make no sense.
    """
    from framework.service.api.backend import Proxy

    if header is None and not addresses:
        return None
    if header is None or not addresses:
        raise BadInputError("--proxy-user-header and --proxy-address need each other; give both.")
    if users is None:
        raise BadInputError(
            "--proxy-user-header needs --users: the proxy says who somebody is, the file who may come in."
        )
    return Proxy.of(header, addresses)


def _front(
    early: ApiFront | None, listening: Callable[[], ApiFront], page: str | None, *, has_own_token: bool
) -> Front:
    """Answers clients each time that the service begins to run.

    Args:
        early: listens already, for the first time; None to begin only then.
        listening: begins to listen.
        page: where browsers find the web page.
        has_own_token: whether the only user is whoever runs this, who can be shown the token.
    """
    waiting = [] if early is None else [early]

    @contextlib.contextmanager
    def front(submissions: Submissions, service: Service, master: LeadingMaster) -> Iterator[None]:
        with (
            contextlib.closing(waiting.pop() if waiting else listening()) as api,
            api(submissions, service, master),
        ):
            logger.info("listening at %s", api.url)
            logger.info("web page at %s", page)
            if has_own_token and page is not None and sys.stderr.isatty():
                # Not to the log: that is kept, and may be read by others.
                print(f"dike: sign in at {_sign_in_link(page)}", file=sys.stderr)
            yield

    return front


def _sign_in_link(page: str) -> str:
    """The page's address with the own token behind a '#', which browsers send to nobody."""
    from framework.service.users import own_token

    return f"{page.rstrip('/')}/#token={quote(own_token(), safe='')}"


def _page_url(listen: str, url: str, advertise: str | None) -> str:
    """Where browsers find the web page.

    Args:
        listen: the address that was asked for.
        url: the one that is listened on.
        advertise: what the operator says; None for nothing.
    """
    port = url.rpartition(":")[2]
    if advertise is None:
        is_everywhere = listen.startswith(("0.0.0.0:", "[::]:"))
        return f"http://{socket.getfqdn()}:{port}" if is_everywhere else url
    if re.fullmatch(r"https?://[^\s/@]+(/\S*)?", advertise):
        return advertise
    if re.fullmatch(r"[\w.-]+|\[[0-9a-fA-F:]+\]", advertise):
        return f"http://{advertise}:{port}"
    raise BadInputError(f"'{advertise}' is not a value of --advertise; write a host name or an http(s):// address.")


@contextlib.contextmanager
def _logging_to_stderr() -> Iterator[None]:
    """What an operator reads, in the journal of the init system; `$DIKE_LOG` gets it besides."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(logging.INFO)
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
