"""What a machine stores about its cluster: the description, and on the head the tokens and members."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dike import typed
from dike.exceptions import BadInputError, DikeError
from dike.process import die_with_parent
from framework.embedded.access import PRIVATE_FILE, ClusterAccess
from framework.user_folders import file_lock, machine_dir

TOKEN_BYTES = 16
DEFAULT_EXPIRY_S = 24 * 3600.0
HEAD_INDEX = 1
MAX_MEMBERS = 250
"""Addresses of a cluster end with 1 (the head) to 251."""
STORE, AGENT = 1, 2
"""Ports of the store and of agents, counted from that of the master."""
NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,61}[A-Za-z0-9])?")
HEAD_ROLE, MEMBER_ROLE = "head", "member"


@dataclass(frozen=True)
class KeyFiles:
    """A machine's certificate, its private key and the authority's certificate, as PEM files.

    Attributes:
        folder: accessible to this account only.
    """

    folder: Path

    @property
    def authority(self) -> Path:
        return self.folder / "authority.pem"

    @property
    def authority_key(self) -> Path:
        """Only on the head."""
        return self.folder / "authority-key.pem"

    @property
    def certificate(self) -> Path:
        return self.folder / "certificate.pem"

    @property
    def key(self) -> Path:
        return self.folder / "key.pem"


@dataclass(frozen=True)
class Description:
    """A cluster, as all its machines know it.

    Attributes:
        name: for people.
        network: the first three parts of its virtual addresses, such as `127.83.201`.
        port: of the master; the store and agents have the next ones.
        secret: for requests to the daemons (HTTP basic).
        head: `host:port` of the head's gateway.
    """

    name: str
    network: str
    port: int
    head: str
    secret: str = field(repr=False)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"127\.\d{1,3}\.\d{1,3}", self.network) or not 0 < self.port < 65530:
            raise ValueError("there is no such network or port")

    def address(self, index: int) -> str:
        """Virtual address of a machine; that of the head is also the master's and the store's."""
        return f"{self.network}.{index}"

    @property
    def access(self) -> ClusterAccess:
        return ClusterAccess(self.address(HEAD_INDEX), self.secret)

    @property
    def master(self) -> str:
        return f"{self.address(HEAD_INDEX)}:{self.port}"

    @property
    def store(self) -> str:
        return f"{self.address(HEAD_INDEX)}:{self.port + STORE}"


@dataclass(frozen=True)
class Membership:
    """This machine's part in a cluster, in `membership.json`.

    Attributes:
        role: `head` or `member`.
        name: this machine's name in the cluster; its agent's hostname.
        index: the last part of its virtual address.
        host: address under which the other machines reach its tasks.
        resources, attributes: of its agent, in Mesos' text form; `resources` empty without an agent.
        is_here: whether the head is on the same machine.
        listen: on the head, `host:port` at which its gateway listens.
    """

    role: str
    name: str
    index: int
    host: str
    cluster: Description
    resources: str = ""
    attributes: str = ""
    is_here: bool = False
    listen: str = ""


@dataclass(frozen=True)
class Member:
    """A member, in the head's records.

    Attributes:
        index: the last part of its virtual address.
        host: address under which the other machines reach its tasks.
        key: SHA-256 of its certificate; another certificate of the same name is refused.
        joined_s: Unix time.
        is_here: whether it is on the head's machine.
    """

    index: int
    host: str
    key: str
    joined_s: float
    is_here: bool = False


@dataclass(frozen=True)
class Token:
    """A token, without its secret.

    Attributes:
        secret_hash: SHA-256 of the secret, as hex.
        expires_s: Unix time.
    """

    secret_hash: str
    expires_s: float


class ClusterFolder:
    """A machine's files about one cluster; accessible to this account only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.keys = KeyFiles(path / "keys")

    @property
    def mesos(self) -> Path:
        """Work folder of this machine's daemons."""
        return self.path / "mesos"

    @property
    def store(self) -> Path:
        """On the head: the store's entries."""
        return self.path / "store"

    @property
    def process_file(self) -> Path:
        """Supervisor of the running daemons."""
        return self.path / "process.json"

    def make(self) -> None:
        for folder in (self.path, self.keys.folder, self.store):
            folder.mkdir(0o700, parents=True, exist_ok=True)

    def membership(self) -> Membership | None:
        """This machine's part; None if there is none.

        Raises:
            DikeError: the file is damaged.
        """
        values = self._read("membership.json")
        if values is None:
            return None
        try:
            return typed.read(Membership, values)
        except ValueError as error:
            raise DikeError(
                f"The file {self.path / 'membership.json'} is damaged ({error}): remove {self.path}."
            ) from error

    def write_membership(self, membership: Membership) -> None:
        write_json(self.path / "membership.json", dataclasses.asdict(membership))

    def members(self) -> dict[str, Member]:
        """On the head: name -> member."""
        values = self._read("members.json") or {}
        return {name: typed.read(Member, value) for name, value in values.items()}

    @contextlib.contextmanager
    def changing_members(self) -> Iterator[dict[str, Member]]:
        """Yields the members for a change, which is stored afterwards; one process at a time."""
        with file_lock(self.path / "lock"):
            members = self.members()
            yield members
            write_json(self.path / "members.json", {name: dataclasses.asdict(one) for name, one in members.items()})

    def new_token(self, expires_in_s: float = DEFAULT_EXPIRY_S) -> str:
        """On the head: makes a token `ID.SECRET`; the second part also has the authority's fingerprint."""
        secret, identifier = secrets.token_bytes(TOKEN_BYTES), secrets.token_hex(3)
        with self._changing_tokens() as tokens:
            tokens[identifier] = Token(hashlib.sha256(secret).hexdigest(), time.time() + expires_in_s)
        content = secret + fingerprint(self.keys.authority.read_bytes())
        return f"{identifier}.{base64.urlsafe_b64encode(content).decode().rstrip('=')}"

    def tokens(self) -> dict[str, Token]:
        """On the head: id -> token, without expired ones."""
        values = self._read("tokens.json") or {}
        found = {identifier: typed.read(Token, value) for identifier, value in values.items()}
        return {identifier: token for identifier, token in found.items() if token.expires_s > time.time()}

    def revoke_token(self, identifier: str) -> None:
        """Raises BadInputError if there is no such token."""
        with self._changing_tokens() as tokens:
            if tokens.pop(identifier, None) is None:
                raise BadInputError(f"There is no valid token {identifier}; dike cluster token --list shows them.")

    def is_valid(self, identifier: str, secret: bytes) -> bool:
        """Whether a token may be used to join."""
        token = self.tokens().get(identifier)
        given = hashlib.sha256(secret).hexdigest()
        return token is not None and hmac.compare_digest(token.secret_hash, given)

    @contextlib.contextmanager
    def _changing_tokens(self) -> Iterator[dict[str, Token]]:
        with file_lock(self.path / "lock"):
            tokens = self.tokens()
            yield tokens
            write_json(self.path / "tokens.json", {name: dataclasses.asdict(one) for name, one in tokens.items()})

    def _read(self, name: str) -> Any:
        try:
            return json.loads((self.path / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError) as error:
            raise DikeError(f"The file {self.path / name} is damaged ({error}): restore or remove it.") from error


def fingerprint(authority: bytes) -> bytes:
    """SHA-256 of an authority's certificate, given in PEM.

    Raises:
        ValueError: it is not a certificate.
    """
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(authority.decode("ascii"))).digest()


def parse_token(text: str) -> tuple[str, bytes, bytes]:
    """Id, secret and the authority's fingerprint of a token.

    Raises:
        BadInputError: it is not a token.
    """
    identifier, _, rest = text.strip().partition(".")
    try:
        content = base64.urlsafe_b64decode(rest + "=" * (-len(rest) % 4))
    except ValueError:
        content = b""
    if not re.fullmatch(r"[0-9a-f]{6}", identifier) or len(content) != TOKEN_BYTES + hashlib.sha256().digest_size:
        raise BadInputError(
            "The token is incomplete; copy the whole line that `dike cluster token` prints on the head."
        )
    return identifier, content[:TOKEN_BYTES], content[TOKEN_BYTES:]


def start_service(path: str) -> tuple[ClusterFolder, Membership]:
    """Prepares a process beside the daemons, which ends with their supervisor; returns its cluster.

    Raises:
        SystemExit: the folder is not that of a cluster.
    """
    die_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    folder = ClusterFolder(Path(path))
    own = folder.membership()
    if own is None:
        raise SystemExit(f"{path} is not the folder of a cluster")
    return folder, own


def machine_folder() -> Path:
    """Folder of the clusters that this machine belongs to."""
    return machine_dir() / "clusters"


def folders() -> list[ClusterFolder]:
    """This machine's folders, one for each name under which it has joined a cluster or made one."""
    with contextlib.suppress(FileNotFoundError):
        return [ClusterFolder(path) for path in sorted(machine_folder().iterdir()) if path.is_dir()]
    return []


def folder_of(name: str) -> ClusterFolder:
    return ClusterFolder(machine_folder() / name)


def random_network() -> str:
    """The start of a cluster's virtual addresses; random, so that a web page cannot guess where to send requests."""
    return f"127.{1 + secrets.randbelow(254)}.{secrets.randbelow(255)}"


def parse_duration(text: str) -> float:
    """Seconds in a text such as `30m`, `24h` or `7d`; raises BadInputError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if found is None or float(found[1]) == 0:
        raise BadInputError(f"'{text}' is not a time; write a number and s, m, h or d, such as 24h.")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]


def write_json(path: Path, values: Any) -> None:
    """Writes a file that only this account can read, completely or not at all."""
    write_private(path, json.dumps(values))


def write_private(path: Path, text: str) -> None:
    """Writes a file that only this account can read, completely or not at all."""
    draft = path.with_suffix(".new")
    draft.unlink(missing_ok=True)
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_FILE), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
