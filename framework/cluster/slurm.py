"""Slurm: what an allocation gives to a machine that joins, and the commands that submit, list and end jobs."""

from __future__ import annotations

import datetime
import logging
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dike.exceptions import BadInputError, DikeError
from framework.embedded.machine import MIB, mem_bytes, without_reserve
from framework.mesos.resources import GPU_DEVICES

JOB_ATTRIBUTE = "slurm_job"
"""Attribute of an agent in an allocation: the id of its Slurm job."""
COMMAND_TIMEOUT_S = 60.0
PROGRAMS = ("sbatch", "squeue", "scancel")
PENDING, CONFIGURING, RUNNING, COMPLETING = "PENDING", "CONFIGURING", "RUNNING", "COMPLETING"
_LIST_FORMAT = "%i|%T|%N|%r"
_MAX_NAME = 63
NO_DEVICES = ("-1", "NoDevFiles")
"""Values of CUDA_VISIBLE_DEVICES without a GPU."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Allocation:
    """What Slurm has allocated to this process on its node.

    Attributes:
        job_id: of the Slurm job.
        environment: Slurm's variables.
    """

    job_id: str
    environment: Mapping[str, str]

    @property
    def name(self) -> str:
        """Node and job, so that two allocations on one node have different names."""
        node = self.environment.get("SLURMD_NODENAME", "node").partition(".")[0].replace("_", "-")
        return f"{node[: _MAX_NAME - len(self.job_id) - 1]}-{self.job_id}"

    @property
    def attributes(self) -> str:
        """Of the agent, in Mesos' text form."""
        return f"{JOB_ATTRIBUTE}:{self.job_id}"

    def resources(self) -> str:
        """CPUs, memory (MiB, less a reserve) and GPUs, in Mesos' text form."""
        cpus = self._number("SLURM_CPUS_ON_NODE") or len(os.sched_getaffinity(0))
        return f"cpus:{cpus};mem:{without_reserve(self._mem_mib(cpus))}{self._gpus()}"

    def end_s(self) -> float | None:
        """Unix time at which Slurm kills the job; None if it has no time limit, or that is unknown."""
        text = _description(self.job_id)
        found = re.search(r"\bEndTime=(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)\b", text)
        return None if found is None else datetime.datetime.fromisoformat(found[1]).timestamp()

    def _mem_mib(self, cpus: int) -> int:
        """Memory on the node; in proportion to the CPUs where Slurm does not allocate memory."""
        on_node = self._number("SLURM_MEM_PER_NODE") or self._number("SLURM_MEM_PER_CPU") * cpus
        if not on_node:
            # srun outside of an allocation sets neither.
            on_node = parse_mem_mib(_description(self.job_id), cpus)
        return on_node or int(mem_bytes() / MIB * min(1.0, cpus / (os.cpu_count() or cpus)))

    def _gpus(self) -> str:
        visible = [device for device in self.environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
        if not visible:
            count = self._number("SLURM_GPUS_ON_NODE")
            return f";gpus:{count}" if count else ""
        if all(device.isdigit() for device in visible):
            ranges = ",".join(f"{device}-{device}" for device in sorted(map(int, visible)))
            return f";gpus:{len(visible)};{GPU_DEVICES}:[{ranges}]"
        if visible[0] in NO_DEVICES:
            return ""
        return f";gpus:{len(visible)}"  # by UUID

    def _number(self, name: str) -> int:
        """The whole number in a variable; 0 without one."""
        text = self.environment.get(name, "")
        return int(text) if text.isdigit() else 0


def allocation(environment: Mapping[str, str] = os.environ) -> Allocation | None:
    """The allocation in which this process runs, from Slurm's variables; None outside of one."""
    job_id = environment.get("SLURM_JOB_ID", "")
    return Allocation(job_id, environment) if job_id.isdigit() else None


def _description(job_id: str) -> str:
    """Output of `scontrol show job`; empty if it fails."""
    try:
        return _call(["scontrol", "--oneliner", "show", "job", job_id])
    except DikeError as error:
        logger.info("the allocation is unknown: %s", error)
        return ""


def parse_mem_mib(text: str, cpus: int) -> int:
    """Reads the memory on a node where a job has this number of CPUs from the output of `scontrol show job`; 0 if it
    has none.
    """
    found = re.search(r"\bMinMemory(CPU|Node)=(\d+(?:\.\d+)?)([MGT]?)\b", text)
    if found is None:
        return 0
    mib = float(found[2]) * {"": 1, "M": 1, "G": 1 << 10, "T": 1 << 20}[found[3]]
    return int(mib * (cpus if found[1] == "CPU" else 1))


@dataclass(frozen=True)
class SlurmJob:
    """A job that Slurm lists.

    Attributes:
        state: Slurm's name: `PENDING`, `CONFIGURING` while its nodes boot, `RUNNING`, `COMPLETING` or another one.
        nodes: its nodes, such as `n[1-2]`; empty if it has none yet.
        reason: why it is pending; empty if unknown.
    """

    state: str
    nodes: str = ""
    reason: str = ""

    @property
    def is_queued(self) -> bool:
        return self.state in (PENDING, CONFIGURING)


class Slurm:
    """Slurm's commands. Each method raises `DikeError` if a command fails."""

    def check(self, arguments: Sequence[str], script: str) -> None:
        """Checks what `submit` would submit.

        Raises:
            BadInputError: Slurm is not installed, or refuses the job.
        """
        missing = [program for program in PROGRAMS if shutil.which(program) is None]
        if missing:
            raise BadInputError(f"{missing[0]} is not installed here: run this on a login node of a Slurm cluster.")
        try:
            _call(["sbatch", "--test-only", *arguments], script)
        except DikeError as error:
            raise BadInputError(f"Slurm would not accept these jobs. {error}") from error

    def submit(self, arguments: Sequence[str], script: str) -> str:
        """Submits a batch script and returns the job's id."""
        return _call(["sbatch", "--parsable", *arguments], script).strip().partition(";")[0]

    def jobs(self, name: str) -> dict[str, SlurmJob]:
        """Id -> this account's jobs of a name that have not ended."""
        text = _call(["squeue", "--me", "--noheader", f"--name={name}", f"--format={_LIST_FORMAT}"])
        return parse_jobs(text)

    def end(self, job_id: str) -> None:
        """Sends SIGTERM to a running job's batch script only, which then ends by itself.

        `scancel` without these options signals every process in the job, tasks included.
        """
        _call(["scancel", "--batch", "--signal=TERM", job_id])

    def cancel(self, job_id: str) -> None:
        """Removes a job from the queue, or kills it."""
        _call(["scancel", job_id])


def parse_jobs(text: str) -> dict[str, SlurmJob]:
    """Reads the output of squeue with the format `id|state|nodes|reason`; ignores other lines."""
    jobs = {}
    for line in text.splitlines():
        parts = line.strip().split("|", 3)
        if len(parts) == 4 and re.fullmatch(r"[0-9]+", parts[0]):
            job_id, state, nodes, reason = parts
            jobs[job_id] = SlurmJob(state, nodes, "" if reason == "None" else reason)
    return jobs


def _call(command: Sequence[str], text: str = "") -> str:
    # Variables such as SQUEUE_FORMAT would change what is read here.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SQUEUE_", "SCANCEL_"))}
    try:
        done = subprocess.run(
            command, input=text, env=environment, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise DikeError(f"{command[0]} does not answer within {COMMAND_TIMEOUT_S:g} s.") from error
    except OSError as error:
        raise DikeError(f"{command[0]} cannot be started: {error.strerror}.") from error
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        reason = lines[-1] if lines else f"exit code {done.returncode}"
        raise DikeError(f"{command[0]} failed: {reason}.".replace("..", "."))
    return done.stdout
