"""`dike.params`, `dike.report` and `dike.checkpoint` in a script: a trial that is interrupted loses nothing."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest

import dike
from dike.exceptions import BadInputError
from dike.trial import folders
from dike.trial.export import export, find_model
from executor.trial_reports import RunReports
from tests.trial.slot_stage import Run, SlotStage, trial
from tests.warm import in_tensorflow

pytestmark = pytest.mark.integration

STEPS = 30
WAIT_S = 1.0
SCRIPT = """
import os, random, signal, sys, time
from pathlib import Path
import numpy as np
from dike import checkpoint, params, report

noise = np.random.default_rng(params()["seed"])
random.seed(3); np.random.seed(4)
state = {"loss": 1.0}
save = lambda folder: Path(folder, "loss").write_text(state["loss"].hex())
restore = lambda folder: state.update(loss=float.fromhex(Path(folder, "loss").read_text()))
first = checkpoint(save, restore) + 1
for step in range(first, STEPS + 1):
    state["loss"] *= 0.9 + 0.01 * (noise.random() + random.random() + np.random.rand())
    with open(params()["diary"], "a") as diary:
        diary.write(f"{step} {state['loss'].hex()}\\n")
    report(step, loss=state["loss"], f1=step / STEPS)
    if step == params().get("kill_at") and first == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if step == params().get("wait_at"):
        while True:  # the request to suspend comes now
            report(step, loss=state["loss"]); time.sleep(0.01)
"""
# It has been asked to suspend itself before its first step.
PLAIN = """
import time
import dike
from dike.trial.runtime import runtime
while not runtime().suspend_requested: time.sleep(0.01)
for step in range(1, 4): dike.report(step, loss=1 / step)
"""


def losses(diary: Path) -> dict[int, str]:
    """Step -> loss; what was done twice has to be the same."""
    found: dict[int, set[str]] = defaultdict(set)
    for line in diary.read_text().splitlines():
        step, loss = line.split()
        found[int(step)].add(loss)
    assert all(len(each) == 1 for each in found.values())
    return {step: each.pop() for step, each in found.items()}


def test_each_value_is_told_where_trials_may_be_stopped(plain_slot: SlotStage, tmp_path: Path) -> None:
    source = "import dike\nfor step in range(1, 2001): dike.report(step, loss=step if step < 2000 else float('nan'))\n"
    script = plain_slot.write("fast.py", source)
    run = plain_slot.run(script, trial(tmp_path, every_value=True))
    told = [pair for report in run.of("progress") for pair in report["values"]]
    assert told[0] == [1, 1, 1.0]
    assert told[-1] == [2000, 2000, "nan"]
    assert all(count == step for count, step, _ in told)
    assert len(told) >= 500
    assert "values" not in plain_slot.run(script, trial(tmp_path)).of("progress")[-1]


def test_nothing_is_lost_where_a_script_leaves_python_at_once(plain_slot: SlotStage, tmp_path: Path) -> None:
    steps = "import os, dike\nfor step in range(1, 21): dike.report(step, loss=1 / step)\n"
    for name, leaves in (("exit.py", "os._exit(0)"), ("child.py", "os.fork() or os._exit(1)\nos.wait()\nos._exit(0)")):
        run = plain_slot.run(plain_slot.write(name, steps + leaves), trial(tmp_path))
        assert run.code == 0
        assert (run.of("progress")[-1]["step"], run.of("progress")[-1]["last"]) == (20, 0.05)
        assert sum(report["count"] for report in run.of("progress")) == 20


def test_what_a_crash_cuts_off_is_known(plain_slot: SlotStage, tmp_path: Path) -> None:
    source = (
        "import os, signal, time, dike\nfor step in range(1, 8): time.sleep(0.06); dike.report(step, loss=1 / step)\n"
    )
    run = plain_slot.run(plain_slot.write("crash.py", source + "os.kill(os.getpid(), signal.SIGSEGV)"), trial(tmp_path))
    reports = RunReports(trial(tmp_path))
    reports.feed(b"".join(json.dumps(report).encode() + b"\n" for report in run.reports))
    assert run.code == -signal.SIGSEGV
    assert reports.step < 7
    reports.finish()
    assert (reports.step, reports.last["last"]) == (7, 1 / 7)
    assert sum(report["count"] for report in reports.losses.take(100)[1]) == 7


def test_steps_are_reported_also_where_the_script_then_hangs(plain_slot: SlotStage, tmp_path: Path) -> None:
    source = (
        "import threading, dike\nfor step in range(1, 6): dike.report(step, loss=1 / step)\nthreading.Event().wait()\n"
    )
    run = plain_slot.start(plain_slot.write("hang.py", source), trial(tmp_path))
    run.read(lambda report: report.get("step") == 5)
    os.kill(run.pid, signal.SIGKILL)
    run.read()
    assert run.code == -signal.SIGKILL


@pytest.fixture
def script(plain_slot: SlotStage) -> Path:
    return plain_slot.write("counting.py", SCRIPT.replace("STEPS", str(STEPS)))


@pytest.fixture
def uninterrupted(plain_slot: SlotStage, script: Path, tmp_path: Path) -> dict[int, str]:
    spec = trial(tmp_path / "alone", parameters={"seed": 1, "diary": str(tmp_path / "alone.txt")})
    run = plain_slot.run(script, spec)
    assert run.code == 0, run.output
    assert run.of("progress")[-1]["metrics"] == {"f1": 1.0}
    assert [report["step"] for report in run.of("checkpoint")] == [STEPS]
    return losses(tmp_path / "alone.txt")


def interrupted(slot: SlotStage, script: Path, folder: Path, number: int, resume: str | None, **parameters: int) -> Run:
    spec = trial(
        folder,
        run=number,
        resume_from=resume,
        checkpoint_interval_s=0.0 if "kill_at" in parameters else 1000.0,
        parameters={"seed": 1, "diary": str(folder / "diary.txt"), **parameters},
    )
    run = slot.start(script, spec)
    if "wait_at" in parameters:
        run.read(until=lambda report: report["type"] == "training")
        run.suspend()
    run.read()
    return run


def test_a_suspended_trial_resumes_without_a_difference(
    plain_slot: SlotStage, script: Path, tmp_path: Path, uninterrupted: dict[int, str]
) -> None:
    resume = None
    for number, wait_at in enumerate((7, 19)):
        run = interrupted(plain_slot, script, tmp_path, number, resume, wait_at=wait_at)
        assert run.code == 75, run.output
        assert run.of("training") == [{"type": "training", "preemptible": True}]
        if resume is not None:
            assert run.of("restored") == [{"type": "restored", "path": resume, "step": run.of("restored")[0]["step"]}]
        written, suspended = run.reports[-2:]
        assert (written["type"], suspended["type"]) == ("checkpoint", "suspended")
        assert suspended["path"] == written["path"] == folders.newest(str(tmp_path))
        assert suspended["step"] == written["step"] <= wait_at
        resume = suspended["path"]
    run = interrupted(plain_slot, script, tmp_path, 2, resume)
    assert run.code == 0
    assert run.of("progress")[-1]["step"] == STEPS
    assert losses(tmp_path / "diary.txt") == uninterrupted
    # The script's best step is kept, also by a run that came before.
    last = run.of("progress")[-1]
    export(find_model(str(tmp_path), "best", last["best_step"]), str(tmp_path / "exported"))
    assert float.fromhex((tmp_path / "exported" / "loss").read_text()) == last["best"]
    assert len(list(tmp_path.glob("best-*"))) == 1


def test_a_killed_trial_resumes_from_its_last_checkpoint(
    plain_slot: SlotStage, script: Path, tmp_path: Path, uninterrupted: dict[int, str]
) -> None:
    run = interrupted(plain_slot, script, tmp_path, 0, None, kill_at=12)
    assert run.code == -signal.SIGKILL
    newest = folders.newest(str(tmp_path))
    assert newest == f"{tmp_path}/run-0-step-12"
    assert len(list(tmp_path.glob("run-*"))) == 3  # no more are kept
    assert json.loads(Path(newest, folders.META).read_text())["kind"] == "script"
    run = interrupted(plain_slot, script, tmp_path, 1, newest)
    assert run.code == 0
    assert run.of("restored")[0]["step"] == 12
    assert losses(tmp_path / "diary.txt") == uninterrupted


def test_an_objective_that_is_reported_by_name(plain_slot: SlotStage, script: Path, tmp_path: Path) -> None:
    spec = trial(tmp_path, metric="f1", parameters={"seed": 1, "diary": str(tmp_path / "diary.txt")})
    run = plain_slot.run(script, spec)
    assert run.of("progress")[-1]["value"] == 1.0


def test_a_script_without_checkpoint_is_not_preemptible(plain_slot: SlotStage, tmp_path: Path) -> None:
    script = plain_slot.write("plain.py", PLAIN)
    run = plain_slot.start(script, trial(tmp_path))
    run.suspend()
    run.read()
    assert run.code == 0
    assert run.of("training") == [{"type": "training", "preemptible": False}]


def test_a_script_without_checkpoint_waits_in_memory(plain_slot: SlotStage, tmp_path: Path) -> None:
    run = plain_slot.start(plain_slot.write("plain.py", PLAIN), trial(tmp_path))
    os.write(run.control, b"pause\n")
    run.read(lambda report: report["type"] == "paused")
    assert run.of("paused") == [{"type": "paused", "path": None, "step": 1}]
    assert [report["step"] for report in run.of("progress")] == [1]
    time.sleep(WAIT_S)
    os.write(run.control, b"continue 1\n")
    run.read()
    assert run.code == 0
    assert run.of("restored") == []
    assert run.of("training") == [{"type": "training", "preemptible": False}] * 2
    assert [report["step"] for report in run.of("progress")] == [1, 2, 3]
    # A pause does not count as training.
    assert run.of("progress")[-1]["train_s"] < WAIT_S


def test_outside_a_search_all_of_it_does_nothing() -> None:
    assert dike.params() == {}
    assert dike.params(lr=0.1, units=3) == {"lr": 0.1, "units": 3}
    assert dike.report(1, loss=0.5) is None
    assert dike.checkpoint(lambda folder: 1 / 0, lambda folder: 1 / 0) == 0


@pytest.mark.tensorflow
def test_a_folder_on_a_file_system_of_tensorflow(tmp_path: Path) -> None:
    in_tensorflow(fill_and_read, str(tmp_path / "remote" / "script"))


def fill_and_read(local: str) -> None:
    path = f"file://{local}"
    with folders.staging_folder(path) as folder:
        Path(folder, "inner").mkdir()
        Path(folder, "inner", "weights").write_bytes(b"\x00\x01")
        Path(folder, "step").write_text("3")
    assert Path(local, "inner", "weights").read_bytes() == b"\x00\x01"
    with folders.local_copy(path) as folder:
        assert not folder.startswith(os.path.dirname(local))
        assert {str(file.relative_to(folder)) for file in Path(folder).rglob("*")} == {"inner", "inner/weights", "step"}


def test_a_remote_folder_without_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(BadInputError, match="name a local folder with --checkpoint-dir"):
        folders.staging_folder("gs://bucket/trial").__enter__()


def test_outside_of_a_search_a_variable_gives_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIKE_PARAMS", '{"lr": 0.1, "name": "-q"}')
    assert dike.params(lr=0.5, depth=3) == {"lr": 0.1, "name": "-q", "depth": 3}
    for text in ("[1", "[1]", '{"lr": [1]}'):
        monkeypatch.setenv("DIKE_PARAMS", text)
        with pytest.raises(BadInputError, match="DIKE_PARAMS"):
            dike.params()
