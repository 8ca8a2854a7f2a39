"""Who may use an embedded cluster: processes of the account that started it, with a secret that only they can read."""

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
PEOPLE = range(1000, 60000)
"""Ids of accounts that are not the system's own, by Debian's and most others' rule (login.defs)."""


@dataclass(frozen=True)
class ClusterAccess:
    """Where a cluster listens, and what it wants to hear from whoever asks for something.

    Attributes:
        address: of all its daemons; drawn from 127.0.0.0/8, so that a web page cannot guess where to send requests.
        secret: for HTTP basic authentication as `dike`.
    """

    address: str = field(default_factory=lambda: _random_loopback())
    secret: str = field(default_factory=lambda: secrets.token_urlsafe(SECRET_BITS // 8), repr=False)

    @property
    def credentials(self) -> tuple[str, str]:
        """Principal and secret."""
        return PRINCIPAL, self.secret

    @property
    def secret_file(self) -> Path:
        """Where other processes of this account find the secret, while the cluster is up."""
        return _secret_file(self.address)

    @property
    def zygotes_link(self) -> Path:
        """Leads them to the socket of the cluster's zygote server, while the cluster is up."""
        return self.secret_file.with_name(f"{self.address}.zygotes")

    @property
    def zygotes(self) -> str:
        """Where the zygote server is found by that link; empty if there is none."""
        return str(self.zygotes_link) if self.zygotes_link.exists() else ""

    def write(self, mesos_file: Path, zygotes: Path) -> None:
        """Writes the secret for the daemons, in Mesos' form, and for whoever knows the address.

        Args:
            mesos_file: of the daemons.
            zygotes: the zygote server's socket.
        """
        _write(mesos_file, json.dumps({"credentials": [{"principal": PRINCIPAL, "secret": self.secret}]}))
        self.secret_file.parent.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
        _write(self.secret_file, self.secret)
        self.zygotes_link.unlink(missing_ok=True)
        self.zygotes_link.symlink_to(zygotes)

    def remove(self) -> None:
        """Removes what other processes find."""
        self.secret_file.unlink(missing_ok=True)
        self.zygotes_link.unlink(missing_ok=True)


def known_access(address: str) -> ClusterAccess | None:
    """Access to the embedded cluster of this account at an address; None if there is none."""
    if not re.fullmatch(r"127(\.[0-9]{1,3}){3}", address):
        return None
    try:
        return ClusterAccess(address, _secret_file(address).read_text(encoding="ascii"))
    except (OSError, UnicodeDecodeError):
        # Not there, or in a cache that is none of ours: so is the Mesos.
        return None


def exposure() -> str | None:
    """What an embedded cluster cannot close to other accounts of this machine, as a warning; None if it has none."""
    if os.getuid() == ROOT:
        return (
            "The embedded Mesos runs as root, and so does every script on it. What TensorFlow listens at is open to "
            "all accounts of this machine: use an account of your own (docs/security.md)."
        )
    others = {entry.pw_uid for entry in pwd.getpwall() if entry.pw_uid in PEOPLE} - {os.getuid()}
    if others:
        return "What TensorFlow listens at is open to other accounts of this machine (docs/security.md)."
    return None


def _random_loopback() -> str:
    # Not a network's own address, nor the one that everything else listens on.
    parts = (secrets.randbelow(255), secrets.randbelow(255), 2 + secrets.randbelow(253))
    return ".".join(map(str, (127, *parts)))


def _secret_file(address: str) -> Path:
    return private_cache_dir() / "mesos-secrets" / address


def _write(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)  # Of an earlier cluster in a folder that was kept.
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_FILE), "w", encoding="ascii") as file:
        file.write(text)
