"""Population based training on a real Mesos, with Keras: copies have the weights of others and rates of their own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.running import run_dike

pytestmark = [pytest.mark.mesos, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parent / "scripts" / "varied.py"
RATES = (1e-6, 1e-5, 1e-4, 0.02)
_LINE = re.compile(r"given (\S+) used (\S+) weight (\S+)")


def test_poor_trials_continue_with_the_weights_of_good_ones_and_rates_of_their_own(tmp_path: Path) -> None:
    def dike(*arguments: str | Path) -> str:
        done = run_dike(*arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    rates = f"lr={','.join(map(str, RATES))}"
    options = ("--policy", "pbt", "--mutate", "lr", "--quantum", "0.6", "--metric", "loss")
    slots = ("--slots", "2", "--slot-mem", "512", "--format", "json")
    result = json.loads(dike("tune", SCRIPT, "--param", rates, "--name", "p", *options, *slots))
    assert result["complete"]
    slices = json.loads(dike("timeline", "p", "--format", "json"))
    slices = slices["slices"] if isinstance(slices, dict) else slices
    copies = [piece for piece in slices if piece["reason"].startswith("copies trial")]
    assert copies
    assert {piece["process"] for piece in copies} <= {"new", ""}
    assert all(piece["from_step"] > 0 for piece in copies)
    first = copies[0]
    assert first["trial"] in (0, 1)
    used = []
    for trial in range(4):
        for given, rate, weight in _LINE.findall(dike("logs", "p", "--trial", str(trial))):
            assert float(rate) == pytest.approx(float(given), rel=1e-3), "the rate in the checkpoint was another's"
            used.append((trial, float(given), float(weight)))
    # With the greatest of the poor rates alone, no weight would have come so far.
    poor = [weight for trial, _, weight in used if trial == first["trial"]]
    assert min(poor) < 1 - 80 * 2 * RATES[1]
    changed = {trial["parameters"]["lr"] for trial in result["trials"]}
    assert changed <= set(RATES), "a list's values"
