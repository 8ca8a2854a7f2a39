"""A real service on an embedded Mesos, and a browser without a screen before its page."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright

from framework.embedded.agents import AgentSpec
from framework.embedded.cluster import EmbeddedCluster
from framework.embedded.ports import reserve_blocks
from framework.service.api.client import ServiceClient
from tests.waiting import wait_until

DEADLINE_S = 90.0
ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

expect.set_options(timeout=DEADLINE_S * 1000)


class ServiceStage:
    """`dike serve` as a process; the port stays the same over restarts.

    Args:
        folder: for its database, log, checkpoints and token.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._cluster = EmbeddedCluster([AgentSpec("cpus:4;mem:4096;disk:4096", "rack:r1")])
        self._process: subprocess.Popen[bytes] | None = None
        # The block keeps the port reserved while the service is down.
        (self._block,) = reserve_blocks(1)
        self._listen = f"127.0.0.1:{self._block.first}"
        self.log = folder / "service.log"

    def __enter__(self) -> ServiceStage:
        self._cluster.start()
        self.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self.end()
        self._cluster.stop()

    def start(self) -> None:
        """Starts it, for the first time or again."""
        arguments = ["--master", self._cluster.master, "--listen", self._listen]
        arguments += [
            "--state",
            f"sqlite:///{self._folder}/service.db",
            "--checkpoint-root",
            str(self._folder / "runs"),
        ]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CONFIG_HOME": str(self._folder)}
        self.log.unlink(missing_ok=True)
        with self.log.open("wb") as log:
            command = [sys.executable, "-m", "framework", "serve", *arguments]
            self._process = subprocess.Popen(command, cwd=self._folder, env=environment, stdout=log, stderr=log)
        listening = re.compile(r"listening at http://(\S+)")
        said = self.log.read_text
        self._listen = wait_until(lambda: listening.search(said()), "a start", said=said, lost=self._has_ended)[1]

    def end(self) -> None:
        """Ends the service, and waits for its exit."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(DEADLINE_S)

    def _has_ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{self._listen}"

    @property
    def token(self) -> str:
        """The token of the account that runs the tests."""
        return (self._folder / "dike" / "service-token").read_text().strip()

    def client(self) -> ServiceClient:
        """A client with that token."""
        return ServiceClient(self.url, self.token)


@contextmanager
def browser() -> Iterator[Browser]:
    """The system's Chromium."""
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        try:
            yield started
        finally:
            started.close()


class WatchedPage:
    """A page, and all that went wrong on it.

    Args:
        browser: makes it.
        url: where it leads first.

    Attributes:
        page: for the test to use.
        troubles: errors of scripts and of the console, and requests to other hosts.
    """

    def __init__(self, browser: Browser, url: str, **context: Any) -> None:
        self.troubles: list[str] = []
        self._url = url
        self.page: Page = browser.new_context(**context).new_page()
        self.page.set_default_timeout(DEADLINE_S * 1000)
        self.page.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.page.on("console", lambda message: self._console(message.type, message.text))
        self.page.on("request", lambda request: self._request(request.url))
        self.page.on("dialog", lambda dialog: self.troubles.append(f"dialog: {dialog.message}"))

    def __enter__(self) -> WatchedPage:
        return self

    def __exit__(self, *failure: object) -> None:
        self.page.context.close()

    def _console(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.troubles.append(text)

    def _request(self, url: str) -> None:
        if not url.startswith(self._url + "/"):
            self.troubles.append(f"request to {url}")

    def barriers(self) -> list[str]:
        """The serious accessibility violations that axe finds on the current page."""
        found = Axe().run(self.page).response["violations"]
        return [
            f"{one['id']}: {node['html']}: {node['failureSummary']}"
            for one in found
            if one["impact"] in ("serious", "critical")
            for node in one["nodes"]
        ]

    def enter(self, token: str) -> Page:
        """Goes to the page, signed in by the address."""
        self.page.goto(f"{self._url}/#token={token}")
        self.page.get_by_role("heading", name="Jobs").wait_for()
        return self.page
