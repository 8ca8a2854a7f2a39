"""Random faults of whole machines and their network, while a job and a search run: 3 here, more in `make chaos`."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
from pathlib import Path

import pytest

from benchmarks.cluster_hosts import ClusterHosts
from benchmarks.shaped_hosts import unsupported_reason
from tests.cluster.cluster_script import RESOURCES, SCRIPT, final_loss, machines
from tests.waiting import wait_until

NOT_HERE = unsupported_reason()
CHAOS_FAULTS = int(os.environ.get("DIKE_CHAOS_FAULTS", "0"))
FAULTS = max(3, CHAOS_FAULTS // 10)
SEED = int(os.environ.get("DIKE_CHAOS_SEED", "1"))
STEPS_PER_EPOCH = 10
PAUSE_S = 0.1
S_PER_FAULT = 45.0
"""Time for a fault, for its recovery, and for steps in between."""

pytestmark = [
    pytest.mark.mesos,
    pytest.mark.tensorflow,
    pytest.mark.slow,
    pytest.mark.timeout(600 + 120 * FAULTS),
    pytest.mark.skipif(NOT_HERE is not None, reason=NOT_HERE or ""),
]


class ClusterChaos:
    """Faults of the machines of a cluster; each waits until the machine is back."""

    def __init__(self, hosts: ClusterHosts) -> None:
        self._hosts = hosts
        self.kinds = {"network cut": self.cut, "member killed": self.kill_member, "head killed": self.kill_head}

    def cut(self, host: int) -> None:
        self._hosts.cut(host)
        wait_until(lambda: not machines(self._hosts).get(f"host-{host}"), "the loss of the machine")
        self._hosts.heal(host)
        self._wait_back(host)

    def kill_member(self, host: int) -> None:
        self._hosts.kill(host)
        wait_until(lambda: not machines(self._hosts).get(f"host-{host}"), "the loss of the machine")
        assert self._hosts.run(host, "dike", "cluster", "join").returncode == 0
        self._wait_back(host)

    def kill_head(self, _: int) -> None:
        state = json.loads((self._hosts.cluster_folder(0) / "process.json").read_text())
        os.kill(state["supervisor_pid"], signal.SIGKILL)
        start = ("dike", "cluster", "start", "--resources", RESOURCES[0])
        wait_until(lambda: self._hosts.run(0, *start).returncode == 0, "the head's start")
        for host in (0, 1, 2):
            self._wait_back(host)

    def _wait_back(self, host: int) -> None:
        wait_until(lambda: machines(self._hosts).get(f"host-{host}"), f"host-{host} to be back")


def test_whole_machines_fail_and_nothing_is_lost(tmp_path: Path) -> None:
    epochs = int(FAULTS * S_PER_FAULT / (STEPS_PER_EPOCH * PAUSE_S))
    script = ("train.py", "--epochs", str(epochs), "--pause", str(PAUSE_S))
    chance = random.Random(SEED)
    with ClusterHosts(tmp_path, 3) as hosts:
        (hosts.project(0) / "train.py").write_text(SCRIPT)
        alone = final_loss(hosts.run(0, sys.executable, "train.py", "--epochs", str(epochs)).stdout)
        (hosts.project(0) / "model.keras").unlink()
        hosts.make_cluster(RESOURCES)
        options = ("--constraint", "hostname:LIKE:host-[12]", "--checkpoint-interval", "2", "--max-restarts", "1000")
        job = hosts.start(0, "dike", "run", *options, *script)
        try:
            lines = (line.decode(errors="replace") for line in job.stdout or ())
            seen = ""
            while "checkpoint of step" not in seen:
                seen += next(lines)
            chaos = ClusterChaos(hosts)
            kinds = [*chaos.kinds] * FAULTS
            for number, kind in enumerate(kinds[:FAULTS]):
                # Where the job is, if that is known.
                places = re.findall(r"launched worker:0 on host-(\d)", seen)
                host = int(places[-1]) if places and chance.random() < 0.7 else chance.choice((1, 2))
                print(f"{number + 1}: {kind} of host-{host}", flush=True)
                chaos.kinds[kind](host)
            rest, _ = job.communicate(timeout=300 + S_PER_FAULT * FAULTS)
            output = seen + rest.decode(errors="replace")
        finally:
            job.kill()
        assert job.returncode == 0, output
        assert final_loss(output) == alone
