"""A service as an operator starts it, and the commands of its users."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from framework.cli import main
from framework.embedded.ports import reserve_blocks
from tests.running import dike_command, dike_environment
from tests.waiting import wait_until
from tests.warm import Warm

DEADLINE_S = 180.0
TOKENS = {"ann": "ann-has-this-token-of-hers", "bob": "bob-has-that-token-of-his", "eve": "eve-looks-after-it-all"}


class ServiceStage:
    """`dike serve` on its own Mesos, for the users ann, bob and eve. eve is an administrator.

    Args:
        folder: where its files are.
        master: the Mesos master.
    """

    def __init__(self, folder: Path, master: str) -> None:
        self.folder = folder
        self.log = folder / "service.log"
        # The block keeps the port reserved while the service is down; outgoing connections use higher ports.
        (self._block,) = reserve_blocks(1)
        self.port = self._block.first
        self.master = master
        self._process: subprocess.Popen[bytes] | None = None
        users = {name: {"token_sha256": hashlib.sha256(token.encode()).hexdigest()} for name, token in TOKENS.items()}
        (folder / "users.yaml").write_text(yaml.safe_dump({**users, "eve": {**users["eve"], "admin": True}}))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Starts it, where it was before, and waits until the master has taken it in."""
        before = self.said().count("subscribed at")
        with self.log.open("a") as log:
            self._process = Warm(
                dike_command(
                    *("serve", "--master", self.master, "--listen", f"127.0.0.1:{self.port}"),
                    *("--state", "sqlite:///service.db", "--users", "users.yaml"),
                ),
                cwd=self.folder,
                env=dike_environment(),
                stdout=log,
                stderr=log,
            )
        wait_until(
            lambda: self.said().count("subscribed at") > before,
            "its subscription",
            said=self.said,
            lost=self._has_ended,
        )

    def end(self, number: int = signal.SIGTERM) -> int:
        """Ends it with a signal; its exit status."""
        assert self._process is not None
        self._process.send_signal(number)
        return self._process.wait(DEADLINE_S)

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def framework_ids(self) -> list[str]:
        """Under which ids it was subscribed, in order."""
        return re.findall(r"subscribed at \S+ as (\S+)", self.said())

    def environment(self, user: str) -> dict[str, str]:
        """That of one of its users."""
        config = {"XDG_CONFIG_HOME": str(self.folder / "no-config")}
        return {**dike_environment(), **config, "DIKE_SERVICE": self.url, "DIKE_TOKEN": TOKENS[user]}

    def dike(
        self, *arguments: str | Path, user: str = "ann", cwd: Path | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs `dike ARGUMENTS...` as a user, in this process: to start one takes longer than what it does."""
        stdout, stderr = io.StringIO(), io.StringIO()
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(stdout),
            contextlib.redirect_stderr(stderr),
        ):
            patch.chdir(cwd or self.folder)
            patch.setattr(sys, "argv", ["dike", *map(str, arguments)])
            for name, value in {**self.environment(user), **environment}.items():
                patch.setenv(name, value)
            for name in os.environ.keys() - self.environment(user).keys() - environment.keys():
                patch.delenv(name)
            try:
                main()
                code: Any = 0
            except SystemExit as end:
                code = end.code or 0
        return subprocess.CompletedProcess(arguments, code, stdout.getvalue(), stderr.getvalue())

    def asked(self, *arguments: str, user: str = "ann") -> Any:
        """What `dike ARGUMENTS... --format json` prints."""
        done = self.dike(*arguments, "--format", "json", user=user)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def _has_ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None
