"""Several hosts on one machine, each with its own network, host name and folders, for clusters of `dike cluster`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from benchmarks.shaped_hosts import ShapedHosts
from framework.embedded.library import ensure_library

RATE_MBPS = 10_000.0
COMMAND_TIMEOUT_S = 180.0
_ENTER = """
hostname "$1"
for other in $2; do mount -t tmpfs tmpfs "$other"; done
cd "$3" || exit 1
shift 3
exec "$@"
"""


class ClusterHosts:
    """Hosts that see nothing of each other's folders.

    Args:
        folder: gets a folder for each host: `host-N`, with its cache and the project in which commands run.
        count: number of hosts.
        rate_mbps: speed of each host's card.
        shared: whether the hosts see each other's folders.

    Attributes:
        hosts: the network.
    """

    def __init__(self, folder: Path, count: int, rate_mbps: float = RATE_MBPS, *, shared: bool = False) -> None:
        self.hosts = ShapedHosts([rate_mbps] * count)
        self._folders = [folder / f"host-{host}" for host in range(count)]
        self._is_shared = shared

    def __enter__(self) -> ClusterHosts:
        library = ensure_library()
        for folder in self._folders:
            (folder / "project").mkdir(parents=True)
            cache = folder / "cache" / library.parent.name
            cache.mkdir(parents=True)
            os.link(library, cache / library.name) if _same_disk(library, cache) else shutil.copy(library, cache)
        self.hosts.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hosts.__exit__(kind, error, trace)

    def project(self, host: int) -> Path:
        """Folder in which the commands of a host run."""
        return self._folders[host] / "project"

    def cluster_folder(self, host: int) -> Path:
        """Folder of the one cluster that a host is in."""
        machines = self._folders[host] / "cache" / f"private-{os.getuid()}" / "machines"
        [found] = (machines / f"host-{host}" / "clusters").iterdir()
        return found

    def start(self, host: int, *command: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Starts a command on a host; `dike` is that of this environment."""
        words = [sys.executable, "-P", "-m", "framework", *command[1:]] if command[0] == "dike" else list(command)
        others = [] if self._is_shared else [str(folder) for folder in self._folders if folder != self._folders[host]]
        enter = ["unshare", "--mount", "--uts", "sh", "-c", _ENTER, "sh", f"host-{host}", " ".join(others)]
        environment = {**os.environ, **(env or {}), "DIKE_CACHE": str(self._folders[host] / "cache")}
        environment = {
            name: value for name, value in environment.items() if name not in ("DIKE_PRIVATE", "DIKE_MASTER")
        }
        # Its own folders have precedence over this environment's.
        environment["HOME"] = str(self._folders[host])
        environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).resolve().parents[1])])
        environment["TMPDIR"] = str(self._folders[host])
        return self.hosts.start(
            host,
            [*enter, str(self.project(host)), *words],
            env=environment,
            stderr=subprocess.STDOUT,  # type: ignore[arg-type]
        )

    def run(
        self, host: int, *command: str, timeout_s: float = COMMAND_TIMEOUT_S, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on a host to its end; its output has both streams."""
        process = self.start(host, *command, env=env)
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            raise AssertionError(f"{' '.join(command)} did not end:\n{output.decode(errors='replace')}") from None
        return subprocess.CompletedProcess(command, process.returncode, output.decode(errors="replace"))

    def make_cluster(self, resources: Sequence[str]) -> None:
        """Makes a cluster of the first hosts, with these resources each; the first host is the head."""
        started = self.run(0, "dike", "cluster", "start", "--resources", resources[0])
        command = self.join_command(started.stdout)
        for host, amounts in enumerate(resources[1:], 1):
            joined = self.run(host, *command, "--resources", amounts)
            if joined.returncode:
                raise AssertionError(joined.stdout)

    @staticmethod
    def join_command(output: str) -> list[str]:
        """The command for other machines in the output of `dike cluster start` or `token`."""
        return next(line.split() for line in output.splitlines() if line.strip().startswith("dike cluster join"))

    def cut(self, host: int) -> None:
        """Cuts a host's network; `heal` restores it."""
        self._set_link(host, "down")

    def heal(self, host: int) -> None:
        self._set_link(host, "up")

    def _set_link(self, host: int, state: str) -> None:
        name, device = self.hosts.card(host)
        subprocess.run(["ip", "-n", name, "link", "set", device, state], check=True)

    def kill(self, host: int) -> None:
        """Kills all processes of a host, as a power cut does."""
        for pid in self.pids(host):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def pids(self, host: int) -> list[int]:
        name, _ = self.hosts.card(host)
        done = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=True)
        return [int(pid) for pid in done.stdout.split()]


def _same_disk(one: Path, other: Path) -> bool:
    return one.stat().st_dev == other.stat().st_dev
