"""Runs one search on slots with shares of a CPU, and reads its results."""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.search.contenders import Space
from benchmarks.search.cpu_limiter import CpuLimiter
from benchmarks.search.slot import slot_environment
from framework.embedded.agents import AgentSpec
from framework.embedded.cluster import EmbeddedCluster
from framework.search.records import SliceRecord, TrialRecord
from framework.search.store import Store

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "scripts" / "readers.py"
NAME = "readers"
CLOSE_FACTOR = 1.01
"""A loss within this factor of the lowest counts as the lowest."""
SMOOTHING_STEPS = 20
"""Losses are averaged over this many steps."""
TIMEOUT_S = 300.0
READY_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class SlowedSearch:
    """A finished search.

    Attributes:
        begin_s, end_s: start and end of its command, seconds since the Unix epoch.
        curves: for each trial the times and losses of its steps.
    """

    begin_s: float
    end_s: float
    trials: list[TrialRecord]
    slices: list[SliceRecord]
    curves: list[list[tuple[float, float]]]

    @property
    def whole_s(self) -> float:
        return self.end_s - self.begin_s

    @property
    def lowest_s(self) -> float:
        """Seconds until a trial came close to the lowest final loss of all."""
        lowest = min(curve[-1][1] for curve in self.curves)
        return (
            min(at_s for curve in self.curves for at_s, loss in curve if loss <= CLOSE_FACTOR * lowest) - self.begin_s
        )

    @property
    def completion_s(self) -> float:
        return statistics.fmean((trial.ended_s or self.end_s) - self.begin_s for trial in self.trials)

    @property
    def suspensions(self) -> int:
        return sum(piece.outcome == "suspended" for piece in self.slices)

    @property
    def moves(self) -> int:
        """How often a trial was resumed in another slot."""
        by_trial = sorted(self.slices, key=lambda piece: (piece.trial, piece.run))
        pairs = itertools.pairwise(by_trial)
        return sum(before.trial == after.trial and before.slot != after.slot for before, after in pairs)


def search(
    policy: str, space: Space, epochs: int, quantum_s: float, seed: int, shares: Mapping[str, float]
) -> SlowedSearch:
    """Runs `dike tune` on an embedded Mesos with a slot for each of `shares`: kind of slot -> share of a CPU.

    Raises:
        RuntimeError: if the search fails.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        logs = folder / "logs"
        logs.mkdir()
        cluster = EmbeddedCluster([AgentSpec("cpus:1;mem:1024", f"slot_kind:{kind}") for kind in shares])
        stack.enter_context(cluster)
        cluster.wait_for_agents(READY_TIMEOUT_S)
        limits = {agent.pid: share for agent, share in zip(cluster.agents, shares.values(), strict=True)}
        stack.enter_context(CpuLimiter(logs, limits))
        storage = f"sqlite:///{folder / 'searches.db'}"
        options = {
            "master": cluster.master,
            "name": NAME,
            "policy": policy,
            "seed": seed,
            "quantum": quantum_s,
            "slot-mem": 512,
            "slot-gpus": 0,
            "storage": storage,
            "format": "json",
        }
        command = [
            *(sys.executable, "-m", "framework", "tune", str(SCRIPT)),
            *(f"--param={name}={','.join(map(str, values))}" for name, values in space.items()),
            *(f"--{name}={value}" for name, value in options.items()),
            *("--", "--epochs", str(epochs), "--logs", str(logs)),
        ]
        begin_s = time.time()
        environment = {**slot_environment(), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        end_s = time.time()
        if done.returncode or not json.loads(done.stdout)["complete"]:
            raise RuntimeError(f"the search under {policy} failed:\n{done.stderr[-4000:]}")
        with contextlib.closing(Store(storage, must_exist=True)) as store:
            store.open_search(NAME)
            trials, slices = store.load_trials(readings=False), store.load_slices()
        return SlowedSearch(begin_s, end_s, trials, slices, [_curve(path) for path in logs.glob("*.jsonl")])


def _curve(epoch_log: Path) -> list[tuple[float, float]]:
    """Times and smoothed losses of a trial's steps; repeated steps count once."""
    lines: dict[int, tuple[float, float]] = {}
    for line in map(json.loads, epoch_log.read_text(encoding="utf-8").splitlines()):
        lines.setdefault(line["step"], (line["time"], line["loss"]))
    steps = [lines[step] for step in sorted(lines)]
    return [
        (at_s, statistics.fmean(loss for _, loss in steps[max(0, end - SMOOTHING_STEPS) : end]))
        for end, (at_s, _) in enumerate(steps, 1)
    ]
