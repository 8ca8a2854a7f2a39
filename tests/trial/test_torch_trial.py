"""examples/torch_trial.py: PyTorch trials are suspended and resume with identical losses, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trial.slot_stage import Run, SlotStage, slot, trial

pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.integration

EXAMPLE = Path(__file__).parents[2] / "examples" / "torch_trial.py"
STEPS_PER_EPOCH = 23
# It writes down every loss, and asks for the trial's suspension after the steps that it is given.
OBSERVED = """
import runpy, sys
import dike
from dike.trial.runtime import runtime
example, diary, suspend_at = sys.argv[1], sys.argv[2], sys.argv[3].split(",")
original = dike.report

def report(step, **figures):
    with open(diary, "a") as file:
        file.write(f"{step} {figures['loss'].hex()}\\n")
    runtime().suspend_requested = str(step) in suspend_at
    original(step, **figures)

dike.report = report
sys.argv[:] = [example, *sys.argv[4:]]
runpy.run_path(example, run_name="__main__")
"""


@pytest.fixture(scope="module")
def torch_slot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlotStage]:
    with slot(tmp_path_factory.mktemp("torch"), ["torch", "sklearn.datasets"]) as ready:
        yield ready


def play(torch_slot: SlotStage, folder: Path, suspend_at: str) -> tuple[list[str], list[Run]]:
    """Runs the trial to its end; its losses, and its runs."""
    folder.mkdir()
    script = torch_slot.write("observed.py", OBSERVED)
    arguments = [str(EXAMPLE), str(folder / "diary.txt"), suspend_at, "--epochs", "3", "--lr", "0.05"]
    runs: list[Run] = []
    while not runs or runs[-1].code == 75:
        resume = runs[-1].reports[-1]["path"] if runs else None
        runs.append(torch_slot.run(script, trial(folder, run=len(runs), resume_from=resume), arguments))
    assert runs[-1].code == 0, runs[-1].output
    return (folder / "diary.txt").read_text().splitlines(), runs


def test_losses_after_suspensions_are_the_same(torch_slot: SlotStage, tmp_path: Path) -> None:
    alone, _ = play(torch_slot, tmp_path / "alone", "")
    assert len(alone) == 3 * STEPS_PER_EPOCH
    # Within an epoch, at its end, at the beginning of the next one.
    interrupted, runs = play(torch_slot, tmp_path / "interrupted", f"10,{STEPS_PER_EPOCH},{STEPS_PER_EPOCH + 1}")
    assert [run.code for run in runs] == [75, 75, 75, 0]
    assert interrupted == alone
    assert runs[-1].of("progress")[-1]["metrics"]["accuracy"] > 0.5
