"""Takes the screenshots of the web page: `python -m benchmarks.page_screenshot [FOLDER]`, by default into docs/.

Starts `dike serve` with two embedded agents, submits a training job and a search of examples/, and takes `page.png`
(the search) and `page-job.png` (the training job) once several trials have ended. Needs playwright, and Chromium on the
PATH.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import sync_playwright

from dike.exceptions import DikeError

ROOT = Path(__file__).parents[1]
DEADLINE_S = 300.0
WIDTH = 1280
SEARCH_HEIGHT = 1420
JOB_HEIGHT = 892
"""Cuts off the events, which name folders of this machine."""
SEARCH = "digits-search"
TRAINING = "digits_v1"
TRIALS_ENDED = 5
FEW_POINTS = 30


@contextmanager
def service(folder: Path) -> Iterator[str]:
    """Runs `dike serve` in a folder; yields its URL."""
    log = folder / "log"
    agents = ["--agents", "2", "--resources", "cpus:3;mem:6144;disk:4096", "--attributes", "rack:r1"]
    command = [sys.executable, "-m", "framework", "serve", "--listen", "127.0.0.1:0", *agents]
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=folder, env=_environment(folder), stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not (found := re.search(r"listening at (http\S+)", log.read_text())):
            if process.poll() is not None or time.monotonic() > deadline:
                raise DikeError(f"The service does not start:\n{log.read_text()}")
            time.sleep(0.1)
        yield found[1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(DEADLINE_S)


def run_dike(folder: Path, url: str, *arguments: str) -> None:
    environment = {**_environment(folder), "DIKE_SERVICE": url}
    subprocess.run([sys.executable, "-m", "framework", *arguments], cwd=folder, env=environment, check=True)


def take_screenshots(url: str, token: str, folder: Path) -> None:
    """Waits until the page has content, and takes the screenshots."""
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
        page = browser.new_page(viewport={"width": WIDTH, "height": JOB_HEIGHT})
        page.set_default_timeout(DEADLINE_S * 1000)
        page.goto(f"{url}/#token={token}")
        page.get_by_role("link", name=TRAINING).click()
        page.wait_for_function("few => document.querySelector('.curves')?.dataset.points > few", arg=FEW_POINTS)
        page.screenshot(path=folder / "page-job.png")
        page.set_viewport_size({"width": WIDTH, "height": SEARCH_HEIGHT})
        page.get_by_role("link", name="All jobs").click()
        page.get_by_role("link", name=SEARCH).click()
        has_ended = "ended => document.querySelectorAll('.trials .state-finished').length >= ended"
        page.wait_for_function(has_ended, arg=TRIALS_ENDED)
        page.screenshot(path=folder / "page.png")
        browser.close()


def main(pictures: Path) -> None:
    with tempfile.TemporaryDirectory() as name, service(Path(name)) as url:
        folder = Path(name)
        training = str(ROOT / "examples" / f"{TRAINING}.py")
        run_dike(folder, url, "submit", "--strategy", "ps", "--max-workers", "1", training, "--steps", "1000000")
        space = ["--param", "lr=0.1,0.03,0.01,0.001", "--param", "batch_size=16,32", "--param", "optimizer=sgd,adam"]
        search = ["--name", SEARCH, "--slots", "2", "--metric", "loss", "--detach"]
        run_dike(folder, url, "tune", str(ROOT / "examples/digits_cnn.py"), *space, *search)
        take_screenshots(url, (folder / "dike/service-token").read_text(), pictures)


def _environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CONFIG_HOME": str(folder)}


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "docs"))
