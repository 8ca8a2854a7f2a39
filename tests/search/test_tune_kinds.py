"""A search on slots of two kinds of a real Mesos, one of them really slower, under the policies for that."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from contextlib import closing
from pathlib import Path

import pytest

from framework.embedded.agents import AgentSpec
from framework.embedded.cluster import EmbeddedCluster
from framework.search.speeds import SpeedTracker
from framework.search.store import Store
from tests.running import run_dike

pytestmark = [pytest.mark.mesos, pytest.mark.timeout(300)]

COUNTING = Path(__file__).parent / "scripts" / "counting.py"
LEARNING_RATES = (0.1, 0.2, 0.05, 0.02)
STEPS = 60


def dike(folder: Path, *arguments: str | Path) -> str:
    done = run_dike(*arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("policy", ["hermes2", "dike"])
def test_trials_are_measured_on_both_kinds_of_slots(tmp_path: Path, policy: str) -> None:
    kinds = ("fast", "slow")
    with EmbeddedCluster([AgentSpec("cpus:1;mem:1024", f"slot_kind:{kind}") for kind in kinds]) as cluster:
        cluster.wait_for_agents(60)
        slow = cluster.agents[1].name
        result = json.loads(
            dike(
                tmp_path,
                *("tune", COUNTING, "--param", f"lr={','.join(map(str, LEARNING_RATES))}", "--name", "kinds"),
                *("--master", cluster.master, "--policy", policy, "--quantum", "0.6", "--format", "json"),
                *("--slot-mem", "256", "--slot-cpus", "1", "--slots", "2"),
                *("--", "--steps", str(STEPS), "--pause", "0.02"),
                *("--slow-agent", slow, "--diary", tmp_path / "diary.txt"),
            )
        )
    assert result["complete"]
    assert [trial["step"] for trial in result["trials"]] == [STEPS] * len(LEARNING_RATES)
    assert result["best"]["parameters"] == {"lr": 0.2}

    with closing(Store(f"sqlite:///{tmp_path}/dike-runs/searches.db", must_exist=True)) as store:
        store.open_search("kinds")
        slices, trials = store.load_slices(), store.load_trials(readings=False)
    assert {piece.kind for piece in slices} == set(kinds)
    speeds: dict[str, list[float]] = defaultdict(list)
    for piece in slices:
        if piece.samples_per_s is not None:
            speeds[piece.kind].append(piece.samples_per_s)
    # A step takes 0.02 s or 0.1 s, and what the machine adds.
    assert max(speeds["slow"]) <= 1 / 0.1
    assert max(speeds["fast"]) <= 1 / 0.02
    assert statistics.median(speeds["fast"]) > 2 * statistics.median(speeds["slow"])
    measured = SpeedTracker(slices, {trial.number: trial for trial in trials})
    by_trial = [measured.of(trial) for trial in trials]
    assert all(by_trial)
    # A trial that the machine kept from its steps for a moment may have been slow on both.
    assert all(known.get("slow", 0.0) <= 1 / 0.1 for known in by_trial)
    assert max(known.get("fast", 0.0) for known in by_trial) > 1 / 0.1
