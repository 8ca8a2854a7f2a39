"""A real Slurm with two nodes on this machine, and a cluster whose head is on it, too."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from framework.embedded.ports import reserve_blocks
from tests.running import Running, dike_environment
from tests.waiting import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel")
CPUS = 2
GPUS = 2
MEM_MIB = 3000
CONFIGURATION = """
ClusterName=dike-tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmctldPort={ports[0]}
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
MpiDefault=none
GresTypes=gpu
MailProg=/bin/true
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
StateSaveLocation={folder}/state
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus} RealMemory={mem} Gres=gpu:{gpus}
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cpus} RealMemory={mem} Gres=gpu:{gpus}
PartitionName=debug Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP DefMemPerCPU=1000
"""


def missing_for_slurm() -> str:
    """What this machine lacks for a Slurm of its own; empty if nothing."""
    if os.geteuid() != 0:
        return "Slurm's daemons have to start jobs as root"
    missing = [program for program in PROGRAMS if _find(program) is None]
    return f"{', '.join(missing)} is not installed (Debian: slurm-wlm, munge)" if missing else ""


def _find(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


class RealSlurm:
    """Slurm's daemons as children of this process, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._private = ""

    def __enter__(self) -> RealSlurm:
        [block] = reserve_blocks(1)
        block.claim.close()
        self.folder.mkdir()
        (self.folder / "state").mkdir()
        for index in range(GPUS):
            os.mknod(self.folder / f"gpu{index}", 0o600 | 0o020000, os.makedev(1, 3))
        values = {"host": socket.gethostname(), "folder": self.folder, "ports": list(block), "cpus": CPUS}
        text = CONFIGURATION.format(**values, mem=MEM_MIB, gpus=GPUS)
        configuration = self.folder / "slurm.conf"
        configuration.write_text(text)
        (self.folder / "gres.conf").write_text(f"NodeName=n[1-2] Name=gpu File={self.folder}/gpu[0-{GPUS - 1}]\n")
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o600)
        os.environ["SLURM_CONF"] = str(configuration)
        self._private = os.environ.pop("DIKE_PRIVATE", "")  # commands use the cluster
        files = [f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "log", "pid", "seed")]
        try:
            self._start("munged", "--foreground", "--force", f"--socket={self.folder}/munge.socket", *files)
            wait_until(lambda: (self.folder / "munge.socket").exists(), "munged", said=self.logs)
            self._start("slurmctld", "-D", "-c", "-f", configuration)
            for node in ("n1", "n2"):
                self._start("slurmd", "-D", "-N", node, "-f", configuration)
            wait_until(
                lambda: "idle*" not in self.nodes() and self.nodes().count("idle") == 2, "2 nodes", said=self.logs
            )
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *failure: object) -> None:
        if len(self._daemons) > 1:
            self.call("scancel", "--user=root", check=False)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        os.environ.pop("SLURM_CONF", None)
        os.environ["DIKE_PRIVATE"] = self._private

    def _start(self, program: str, *arguments: object) -> None:
        with (self.folder / f"{program}-{len(self._daemons)}.log").open("wb") as log:
            command = [_find(program), *map(str, arguments)]
            self._daemons.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log))  # type: ignore[arg-type]

    def call(self, *command: object, check: bool = True, cwd: Path | None = None) -> str:
        done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 or not check, done.stderr
        return done.stdout.strip()

    def nodes(self) -> str:
        return self.call("sinfo", "--noheader", "--Node", "--format=%T", check=False)

    def queue(self) -> list[str]:
        """State of each job in the queue."""
        return self.call("squeue", "--noheader", "--format=%T").split()

    def logs(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.log")))


class SlurmCluster:
    """A cluster of `dike cluster` without an agent on its head; commands run below `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._count = 0
        [block] = reserve_blocks(1)
        block.claim.close()
        self.address = f"127.0.0.1:{block.first}"

    def __enter__(self) -> SlurmCluster:
        more = ("--listen", self.address, "--no-agent", "--foreground")
        self._head = self.start("cluster", "start", "--name", "test", *more)
        wait_until(lambda: "is up" in self.output(self._head), "the head", said=lambda: self._head.log)
        return self

    def __exit__(self, *failure: object) -> None:
        self._head.process.terminate()
        self._head.process.wait(60)

    def start(self, *arguments: str | Path) -> Running:
        self._count += 1
        folder = self.folder / f"command-{self._count}"
        folder.mkdir()
        return Running(folder, *arguments)

    def output(self, running: Running) -> str:
        return (running._output).read_text()

    def command(self, *arguments: str | Path) -> str:
        running = self.start(*arguments)
        assert running.process.wait(120) == 0, running.log
        return self.output(running)

    def machines(self) -> list[dict[str, Any]]:
        import json

        values = json.loads(self.command("cluster", "status", "--format", "json"))
        return [one for one in values["machines"] if one["active"]]

    def token_file(self) -> Path:
        file = self.folder / "token"
        file.write_text(self.command("cluster", "token").split()[-1])
        return file


def plain_command(command: Sequence[object]) -> subprocess.Popen[str]:
    """Starts another program than `dike`."""
    return subprocess.Popen(
        [*map(str, command)],
        env=dike_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
