"""Access to an embedded cluster: only processes of its account, with a secret that only they can read."""

from __future__ import annotations

import json
import os
import pwd
import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from framework.user_folders import private_cache_dir

PRINCIPAL = "dike"
SECRET_BITS = 192
PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
ROOT = 0
USER_IDS = range(1000, 60000)
"""User ids of people, by the default of Debian and most other distributions (login.defs)."""


@dataclass(frozen=True)
class ClusterAccess:
    """Address and secret of a cluster.

    Attributes:
        address: of all its daemons; random in 127.0.0.0/8, so that a web page cannot guess where to send requests.
        secret: for HTTP basic authentication as `dike`.
    """

    address: str = field(default_factory=lambda: _random_loopback())
    secret: str = field(default_factory=lambda: secrets.token_urlsafe(SECRET_BITS // 8), repr=False)

    @property
    def credentials(self) -> tuple[str, str]:
        return PRINCIPAL, self.secret

    @property
    def secret_file(self) -> Path:
        """Where other processes of this account find the secret while the cluster is up."""
        return _secret_file(self.address)

    @property
    def zygotes_link(self) -> Path:
        """Link to the socket of the cluster's zygote server, while the cluster is up."""
        return self.secret_file.with_name(f"{self.address}.zygotes")

    @property
    def zygotes(self) -> str:
        """That link's path; empty if there is none."""
        return str(self.zygotes_link) if self.zygotes_link.exists() else ""

    def write_credentials(self, mesos_file: Path) -> None:
        """Writes the daemons' credentials file."""
        _write(mesos_file, json.dumps({"credentials": [{"principal": PRINCIPAL, "secret": self.secret}]}))

    def publish(self, zygotes: Path) -> None:
        """Publishes the secret and the zygote server's socket for other processes of this account."""
        self.secret_file.parent.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
        _write(self.secret_file, self.secret)
        self.zygotes_link.unlink(missing_ok=True)
        self.zygotes_link.symlink_to(zygotes)

    def remove(self) -> None:
        self.secret_file.unlink(missing_ok=True)
        self.zygotes_link.unlink(missing_ok=True)


def find_access(address: str) -> ClusterAccess | None:
    """Access to this account's embedded cluster at an address; None if there is none."""
    if not re.fullmatch(r"127(\.[0-9]{1,3}){3}", address):
        return None
    try:
        return ClusterAccess(address, _secret_file(address).read_text(encoding="ascii"))
    except (OSError, UnicodeDecodeError):
        # Missing, or in another account's cache: not this account's Mesos.
        return None


def exposure_warning() -> str | None:
    """A warning about what other accounts of this machine can reach; None if there is none."""
    if os.getuid() == ROOT:
        return (
            "The private Mesos runs as root, and so does every script on it. All accounts of this machine can reach "
            "the ports of TensorFlow: use an account of your own (docs/security.md)."
        )
    others = {entry.pw_uid for entry in pwd.getpwall() if entry.pw_uid in USER_IDS} - {os.getuid()}
    if others:
        return "Other accounts of this machine can reach the ports of TensorFlow (docs/security.md)."
    return None


def _random_loopback() -> str:
    # Neither a network's own address nor the usual 127.0.0.1.
    parts = (secrets.randbelow(255), secrets.randbelow(255), 2 + secrets.randbelow(253))
    return ".".join(map(str, (127, *parts)))


def _secret_file(address: str) -> Path:
    return private_cache_dir() / "mesos-secrets" / address


def _write(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)  # Of an earlier cluster in the same folder.
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_FILE), "w", encoding="ascii") as file:
        file.write(text)
