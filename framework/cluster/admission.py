"""Admits machines to a cluster, on its head."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import platform
import ssl
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dike import typed
from dike._version import __version__
from dike.exceptions import BadInputError
from framework.cluster.authority import Authority
from framework.cluster.records import HEAD_INDEX, MAX_MEMBERS, MEMBER_ROLE, NAME, ClusterFolder, Member, Membership

COMPARED = {"tensorflow": "TensorFlow", "keras": "Keras", "numpy": "NumPy"}
"""Distribution -> name of the packages whose versions the head compares."""
MUST_BE_EQUAL = ("Dike", "Python", "TensorFlow", "Keras")
"""A job's processes exchange data or checkpoints, so the first two numbers of these versions must be equal."""


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
            f"The token {request.token} is not valid: it is mistyped or another cluster's, has expired, or "
            "was revoked. Make one with `dike cluster token` on the head."
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
