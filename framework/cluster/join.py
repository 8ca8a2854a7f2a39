"""How a machine joins a cluster: what it sends, and how the head admits it."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import os
import platform
import re
import ssl
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dike import typed
from dike._version import __version__
from dike.exceptions import BadInputError, DikeError
from framework.cluster import gateway
from framework.cluster.authority import Authority, fingerprint, first_context, joining_context, make_request
from framework.cluster.records import (
    HEAD_INDEX,
    MAX_MEMBERS,
    MEMBER_ROLE,
    NAME,
    ClusterFolder,
    Description,
    Member,
    Membership,
    parse_token,
)

COMPARED = {"tensorflow": "TensorFlow", "keras": "Keras", "numpy": "NumPy"}
"""Distribution -> name of the packages whose versions the head compares."""
MUST_BE_EQUAL = ("Dike", "Python", "TensorFlow", "Keras")
"""A job's processes exchange data or checkpoints, so the first two numbers of these versions must be equal."""
ANSWER_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class JoinRequest:
    """What a machine sends to join.

    Attributes:
        kind: `join`.
        token, secret: the token's id and secret, the latter as hex.
        name: the requested name; the head may add a number to it.
        host: the machine's address, as it sees it on the way to the head.
        machine: id of the machine and its network (`machine_id`).
        certificate_request: in PEM.
        versions: name -> version of Dike, Python and the packages in `COMPARED`.
    """

    kind: str
    token: str
    secret: str = field(repr=False)
    name: str
    host: str
    machine: str
    certificate_request: str
    versions: dict[str, str]


@dataclass(frozen=True)
class JoinAnswer:
    """The head's answer to a machine that it has admitted.

    Attributes:
        membership: the machine's part in the cluster, without its resources.
        certificate: in PEM.
        warnings: sentences for the user.
    """

    membership: Membership
    certificate: str
    warnings: tuple[str, ...] = ()


def own_versions() -> dict[str, str]:
    """Name -> version of what the machines of a cluster compare; without packages that are not installed."""
    found = {"Dike": __version__, "Python": platform.python_version()}
    for distribution, name in COMPARED.items():
        try:
            found[name] = version(distribution)
        except PackageNotFoundError:
            continue
    return found


def compare_versions(head: Mapping[str, str], other: Mapping[str, str]) -> tuple[str, ...]:
    """Compares the versions of a machine with the head's; returns warnings.

    Raises:
        BadInputError: a difference that matters.
    """
    warnings = []
    for name in {**head, **other}:
        here, there = head.get(name, "none"), other.get(name, "none")
        if here == there:
            continue
        if name in MUST_BE_EQUAL and _release(here) != _release(there):
            raise BadInputError(
                f"The head has {name} {here} and this machine {there}: install the same version on both."
            )
        warnings.append(f"the head has {name} {here} and this machine {there}")
    return tuple(warnings)


def _release(text: str) -> tuple[str, ...]:
    return tuple(text.split(".")[:2])


def machine_id() -> str:
    """Identifies this machine since its last start, and its network: processes with one id share loopback."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"


def admit(
    folder: ClusterFolder, own: Membership, values: Mapping[str, Any], alive: Collection[str]
) -> tuple[dict[str, Any], str, Member]:
    """Admits a machine, on the head; returns the answer, its name and its record.

    A machine gets the name and the address of a member of the same name that is not `alive`.

    Raises:
        BadInputError: the token is not valid, the versions do not match, or the cluster is full.
    """
    try:
        request = typed.read(JoinRequest, dict(values))
        secret = bytes.fromhex(request.secret)
    except ValueError as error:
        raise BadInputError(f"The request to join is from another version of Dike: {error}.") from error
    if not folder.is_valid(request.token, secret):
        raise BadInputError(
            f"The token {request.token} is not valid: it has expired, was revoked, or is another cluster's. Make one "
            "with `dike cluster token` on the head."
        )
    warnings = compare_versions(own_versions(), request.versions)
    if not NAME.fullmatch(request.name):
        raise BadInputError(f"'{request.name}' is not a name of a machine: use letters, digits, '.' and '-' (--name).")
    with folder.changing_members() as members:
        name = _free_name(request.name, {own.name, *alive})
        known = members.get(name)
        index = _free_index({member.index for member in members.values()}) if known is None else known.index
        is_here = request.machine == machine_id()
        certificate = Authority(folder.keys).sign(request.certificate_request.encode(), name)
        der = ssl.PEM_cert_to_DER_cert(certificate.decode())
        member = Member(index, request.host, hashlib.sha256(der).hexdigest(), time.time(), is_here)
        members[name] = member
    membership = Membership(MEMBER_ROLE, name, index, request.host, own.cluster, is_here=is_here)
    answer = JoinAnswer(membership, certificate.decode(), warnings)
    return dataclasses.asdict(answer), name, member


def _free_name(wanted: str, taken: set[str]) -> str:
    names = (wanted if number == 1 else f"{wanted}-{number}" for number in range(1, MAX_MEMBERS + 2))
    return next(name for name in names if name not in taken)


def _free_index(taken: set[int]) -> int:
    for index in range(HEAD_INDEX + 1, HEAD_INDEX + 1 + MAX_MEMBERS):
        if index not in taken:
            return index
    raise BadInputError(f"The cluster has {MAX_MEMBERS} members already; make some leave first.")


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
    from framework.cluster.authority import client_context

    host, port = parse_address(cluster.head)
    try:
        answer = _ask(host, port, client_context(folder.keys), request, cluster.head)
    except BadInputError as error:
        raise DikeError(str(error)) from error
    if "error" in answer:
        raise DikeError(str(answer["error"]))
    return answer


def parse_address(text: str) -> tuple[str, int]:
    """Raises BadInputError if it is not `HOST:PORT`."""
    host, _, port = text.rpartition(":")
    if not re.fullmatch(r"[\w.-]+", host) or not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 2**16:
        raise BadInputError(f"'{text}' is not an address of a cluster; write HOST:PORT.")
    return host, int(port)


def address_towards(host: str, port: int) -> str:
    """This machine's address as seen from `host:port`; that host's name if it cannot be resolved."""
    from framework.project.bundle import address_towards

    try:
        return address_towards(host, port)
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
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise BadInputError(
            f"Nothing answers at {head} ({reason}): check the address, and that `dike cluster status` "
            "on the head shows the cluster as up."
        ) from error
    except (ValueError, json.JSONDecodeError) as error:
        raise _not_a_head(head) from error


def _not_a_head(head: str) -> BadInputError:
    return BadInputError(f"The server at {head} is not the head of a cluster; check the address.")
