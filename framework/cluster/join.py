"""How a machine joins a cluster, and what members ask the head."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import socket
import ssl
from typing import Any

from dike import typed
from dike.exceptions import BadInputError, DikeError
from framework.cluster import gateway
from framework.cluster.admission import JoinAnswer, JoinRequest, machine_id, own_versions
from framework.cluster.authority import client_context, first_context, joining_context, make_request
from framework.cluster.records import ClusterFolder, Description, fingerprint, parse_token
from framework.project import bundle

ANSWER_TIMEOUT_S = 30.0
DEFAULT_PORT = 8690


class NotAMemberError(DikeError):
    """The head does not know this machine, or has removed it."""


def ask_to_join(folder: ClusterFolder, head: str, token: str, name: str) -> JoinAnswer:
    """Joins a cluster: gets this machine's certificate and stores it, with the description of the cluster.

    Args:
        folder: receives the files.
        head: `host:port` of the head's gateway.
        token: from `dike cluster token`.
        name: the requested name.

    Raises:
        BadInputError: the head refuses, is not the one that made the token, or does not answer.
    """
    identifier, secret, expected = parse_token(token)
    host, port = parse_address(head)
    folder.make()
    answer = _ask(host, port, first_context(), {"kind": "authority"}, head)
    try:
        authority = str(answer["authority"])
        found = fingerprint(authority.encode())
    except (KeyError, ValueError) as error:
        raise _not_a_head(head) from error
    if found != expected:
        raise BadInputError(
            f"The server at {head} is not the head that made this token, and was not sent it. Check the address, and "
            "copy the line from `dike cluster token` again."
        )
    request = JoinRequest(
        kind="join",
        token=identifier,
        secret=secret.hex(),
        name=name,
        host=address_towards(host, port),
        machine=machine_id(),
        certificate_request=make_request(folder.keys, name).decode(),
        versions=own_versions(),
    )
    values = _ask(host, port, joining_context(authority), dataclasses.asdict(request), head)
    if "error" in values:
        raise BadInputError(f"The cluster's head at {head} refuses this machine. {values['error']}")
    try:
        joined = typed.read(JoinAnswer, values)
    except ValueError as error:
        raise BadInputError(f"The answer of {head} is from another version of Dike: {error}.") from error
    # Under this address it can be reached from here.
    cluster = dataclasses.replace(joined.membership.cluster, head=f"{host}:{port}")
    joined = dataclasses.replace(joined, membership=dataclasses.replace(joined.membership, cluster=cluster))
    folder.keys.authority.write_text(authority, encoding="ascii")
    folder.keys.certificate.write_text(joined.certificate, encoding="ascii")
    return joined


def ask_head(folder: ClusterFolder, cluster: Description, request: dict[str, Any]) -> dict[str, Any]:
    """Sends a request of a member, or of the head itself, to the head's gateway.

    Raises:
        DikeError: there is no answer, or the head refuses.
    """
    host, port = parse_address(cluster.head)
    try:
        answer = _ask(host, port, client_context(folder.keys), request, cluster.head)
    except BadInputError as error:
        raise DikeError(str(error)) from error
    if "error" in answer:
        raise NotAMemberError(f"{answer['error']} Join it again with a token from `dike cluster token` on the head.")
    return answer


def parse_address(text: str) -> tuple[str, int]:
    """Reads `HOST:PORT` or `HOST`; raises BadInputError."""
    host, _, port = text.rpartition(":") if ":" in text else (text, "", str(DEFAULT_PORT))
    if not re.fullmatch(r"[\w.-]+", host) or not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 2**16:
        raise BadInputError(f"'{text}' is not an address of a cluster; write HOST:PORT.")
    return host, int(port)


def address_towards(host: str, port: int) -> str:
    """This machine's address as seen from `host:port`; that host's name if it cannot be resolved."""
    try:
        return bundle.address_towards(host, port)
    except OSError:
        return host


def _ask(host: str, port: int, context: ssl.SSLContext, request: dict[str, Any], head: str) -> dict[str, Any]:
    async def ask() -> dict[str, Any]:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            reader, writer = await gateway.connect(host, port, context)
            try:
                await gateway.send(writer, request)
                return await gateway.read_line(reader)
            finally:
                writer.transport.abort()

    try:
        return asyncio.run(ask())
    except TimeoutError:
        raise BadInputError(f"The head at {head} does not answer within {ANSWER_TIMEOUT_S:g} s.") from None
    except ssl.SSLError as error:
        raise _not_a_head(head) from error
    except OSError as error:
        is_system_error = bool(error.errno) and not isinstance(error, socket.gaierror)
        reason = os.strerror(error.errno or 0) if is_system_error else error.strerror or str(error)
        raise BadInputError(
            f"Nothing answers at {head} ({reason}): check the address, and that `dike cluster status` "
            "on the head shows the cluster as up."
        ) from error
    except (ValueError, json.JSONDecodeError) as error:
        raise _not_a_head(head) from error


def _not_a_head(head: str) -> BadInputError:
    return BadInputError(f"The server at {head} is not the head of a cluster; check the address.")
