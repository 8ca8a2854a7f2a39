"""Trials of several equal processes, for scripts that distribute themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dike.trial.spec import VARIABLE, TrialSpec

pytestmark = pytest.mark.integration

PROCESSES = 3
SCRIPT = """
import os, pathlib, sys, time
import dike

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
shared = pathlib.Path(sys.argv[1])
pathlib.Path("own").write_text(str(rank))
state = [0]
first = dike.checkpoint(
    lambda folder: pathlib.Path(folder, "state").write_text(str(state[0])),
    lambda folder: state.__setitem__(0, int(pathlib.Path(folder, "state").read_text())),
)
(shared / f"{rank}").write_text(f"{first} {os.environ['CUDA_VISIBLE_DEVICES']}")
while len(list(shared.iterdir())) < size:
    time.sleep(0.01)
print("PRINTED", rank, flush=True)
if "fail" in sys.argv and rank == 2:
    raise OSError("of rank 2")
for step in range(first, first + 3):
    state[0] = step + 1
    dike.report(step + 1, loss=1 / (step + 1))
time.sleep(60 * ("fail" in sys.argv))
"""


def run(folder: Path, *arguments: str, resume_from: str | None = None) -> tuple[int, str, list[dict[str, Any]]]:
    """Exit code, output and reports of a trial."""
    (folder / "train.py").write_text(SCRIPT)
    for name in ("shared", "trial", "work"):
        (folder / name).mkdir(exist_ok=True)
    for left in (folder / "shared").iterdir():
        left.unlink()
    reader, writer = os.pipe()
    spec = TrialSpec(
        "search", 0, 0, {}, str(folder / "trial"), resume_from=resume_from, report_fd=writer, processes=PROCESSES
    )
    done = subprocess.run(
        [sys.executable, "-P", "-m", "dike.trial.launch", str(folder / "train.py"), str(folder / "shared"), *arguments],
        cwd=folder / "work",
        env={**os.environ, VARIABLE: spec.dumps(), "CUDA_VISIBLE_DEVICES": "4,5,6"},
        pass_fds=[writer],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as lines:
        reports = [json.loads(line) for line in lines]
    return done.returncode, done.stdout + done.stderr, reports


def test_only_the_first_process_reports_prints_and_writes(tmp_path: Path) -> None:
    code, output, reports = run(tmp_path)
    assert code == 0, output
    assert [line for line in output.splitlines() if line.startswith("PRINTED")] == ["PRINTED 0"]
    seen = {one.name: one.read_text() for one in (tmp_path / "shared").iterdir()}
    assert seen == {"0": "0 4", "1": "0 5", "2": "0 6"}
    assert (tmp_path / "work" / "own").read_text() == "0"
    [checkpoint] = [one["path"] for one in reports if one["type"] == "checkpoint"]
    assert [one["step"] for one in reports if one["type"] == "progress"][-1] == 3
    # All resume from the checkpoint of the first.
    code, output, reports = run(tmp_path, resume_from=checkpoint)
    assert code == 0, output
    assert {one.read_text().split()[0] for one in (tmp_path / "shared").iterdir()} == {"3"}


def test_a_process_that_fails_ends_the_trial(tmp_path: Path) -> None:
    code, output, reports = run(tmp_path, "fail")
    assert code == 1
    assert "OSError: of rank 2" in output
    assert [one["message"] for one in reports if one["type"] == "failed"] == ["process 2 of 3 ended with exit code 1"]
