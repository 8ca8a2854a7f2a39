"""`dike serve`: a long-running service that runs many users' jobs as one Mesos framework."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args
from urllib.parse import quote

import typer

from dike.described import values_of
from dike.exceptions import BadInputError
from framework.cli.mesos_options import MESOS_PANELS, mesos_access
from framework.cli.option_groups import is_given, with_options
from framework.service.options import AllocationName, ClientOptions, ServiceOptions
from framework.user_folders import own_token_file
from solver.cli.option_groups import merged_panels, options_of, panels_of
from solver.cli.planning_options import network_option, read_network_option

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
NOISY_LOGGERS = ("httpx", "httpcore", "kazoo", "uvicorn", "pymesos")
"""Libraries whose INFO lines, such as the address of each request, are of no use to an operator."""

if TYPE_CHECKING:
    from framework.mesos.master import LeadingMaster
    from framework.scheduler.mesos_access import MesosAccess
    from framework.service.api.backend import Proxy
    from framework.service.api.front import ApiFront
    from framework.service.serve import Front
    from framework.service.service import Service
    from framework.service.submission import Submissions

logger = logging.getLogger("dike.serve")


PANELS = merged_panels(
    panels_of(ClientOptions, ServiceOptions),
    {"Planning": ("network",)},
    MESOS_PANELS,
)


@with_options(clients=options_of(ClientOptions), options=options_of(ServiceOptions), mesos=mesos_access)
def serve_command(
    *,
    context: typer.Context,
    clients: ClientOptions,
    options: ServiceOptions,
    network: Annotated[Path | None, network_option()] = None,
    mesos: MesosAccess,
) -> None:
    """Runs a service for the jobs of many users.

    The service is one Mesos framework that runs all submitted jobs. It runs until you stop it. docs/service.md shows
    how to install, upgrade and debug it.
    """
    from framework.scheduler.session import sigterm_as_interrupt
    from framework.service.api.front import ApiFront
    from framework.service.serve import ServeRequest, serve
    from framework.service.users import Users

    _check(context, options, mesos)
    proxy = _proxy(clients)
    known = Users.of_this_account() if clients.users is None else Users.of_file(clients.users)
    api = functools.partial(ApiFront, users=known, advertised=clients.advertise, proxy=proxy)
    listen = clients.listen
    with contextlib.ExitStack() as stack:
        stack.enter_context(_logging_to_stderr())
        early: ApiFront | None = None
        if options.ha is None and not options.standby:
            # A standby listens only while it leads: otherwise clients are refused and try the next service.
            early = stack.enter_context(contextlib.closing(api(listen)))
            listen = f"{listen.rpartition(':')[0]}:{early.url.rpartition(':')[2]}"
        elif listen.endswith(":0"):
            raise BadInputError("--listen needs a fixed port with --ha and --standby; give one instead of 0.")
        url = f"http://{listen}" if early is None else early.url
        request = ServeRequest(
            **values_of(ServiceOptions, options),
            mesos=mesos,
            webui_url=_page_url(listen, url, clients.advertise),
            weight=known.weight,
            limits=known.limits,
            network=read_network_option(network),
        )
        logger.info("users: %s", clients.users or f"only this account, with the token in {own_token_file()}")
        if mesos.master is None:
            logger.info("using a private Mesos on this machine: it and all tasks end with this service")
        try:
            with known.auto_reload(), sigterm_as_interrupt():
                front = _front(early, lambda: api(listen), request.webui_url, has_own_token=clients.users is None)
                serve(request, front, logger.info)
        except KeyboardInterrupt:
            logger.info("service ended")


def _check(context: typer.Context, options: ServiceOptions, mesos: MesosAccess) -> None:
    """Raises `BadInputError` if options contradict each other."""
    from framework.service.election import Ensemble

    if options.ha is not None:
        Ensemble.parse(options.ha)
        if mesos.master is None:
            raise BadInputError("--ha needs --master: a private Mesos ends with the service that started it.")
    if options.allowed_volumes and mesos.image is None:
        raise BadInputError(
            "--allow-volume needs --image: without a container, jobs can use all folders of their agents anyway."
        )
    if options.allocation is None:
        for name in ("allocation_interval", "sample_runs"):
            if is_given(context, name):
                raise BadInputError(
                    f"--{name.replace('_', '-')} has no effect without --allocation; name a policy: "
                    f"{', '.join(get_args(AllocationName))}."
                )
    if options.keep_checkpoints_s == 0:
        raise BadInputError(
            "--keep-checkpoints 0 would delete checkpoints that jobs resume from; give a time, such as 30d."
        )


def _proxy(clients: ClientOptions) -> Proxy | None:
    """Returns the proxy that signs users in; None if there is none.

    Raises:
        BadInputError: if its options contradict each other.
    """
    from framework.service.api.backend import Proxy

    header, addresses = clients.proxy_user_header, clients.proxy_addresses
    if header is None and not addresses:
        return None
    if header is None or not addresses:
        raise BadInputError("--proxy-user-header and --proxy-address need each other; give both.")
    if clients.users is None:
        raise BadInputError(
            "--proxy-user-header needs --users: the proxy names the user, and the file says which users exist."
        )
    return Proxy.of(header, addresses)


def _front(
    early: ApiFront | None, listening: Callable[[], ApiFront], page: str | None, *, has_own_token: bool
) -> Front:
    """Returns a context manager that answers clients while the service leads.

    Args:
        early: server that listens already, for the first time; None to listen only then.
        listening: makes a server.
        page: address of the web page.
        has_own_token: whether this account is the only user, so that the sign-in link may be printed.
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
                # Not logged: others may read the log.
                print(f"dike: sign in at {_sign_in_link(page)}", file=sys.stderr)
            yield

    return front


def _sign_in_link(page: str) -> str:
    """Returns the page's address with the own token after '#', a part that browsers do not send."""
    from framework.service.users import own_token

    return f"{page.rstrip('/')}/#token={quote(own_token(), safe='')}"


def _page_url(listen: str, url: str, advertise: str | None) -> str:
    """Returns the address of the web page for browsers.

    Args:
        listen: value of `--listen`.
        url: address of the running server.
        advertise: value of `--advertise`.
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
    """Logs to standard error, for the init system's journal; `$DIKE_LOG` gets the same lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(logging.INFO)
    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
