"""How a trial's script is run, and how its end is reported."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dike
from dike.tracebacks import error_lines
from dike.trial.spec import TrialSpec
from tests.trial.slot_stage import SlotStage, trial

pytestmark = pytest.mark.integration

PARSED = """
import argparse
import dike
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.parse_args()
dike.report(1, loss=0.5)
"""
ABSL = """
from absl import app, flags
flags.DEFINE_float("lr", 0.1, "learning rate")
app.run(lambda argv: None)
"""
TYPER = """
import typer
def main(lr: float = 0.1): ...
typer.run(main)
"""
OVERRIDES = """
import sys
sys.exit(f"{sys.argv[1]!r} is no override; write key=value")
"""


@pytest.mark.parametrize(
    ("source", "arguments", "complaint"),
    [
        (PARSED, ["--batch", "3"], "unrecognized arguments: --batch 3"),
        (PARSED, ["--lr", "big"], "argument --lr: invalid float value: 'big'"),
        (ABSL, ["--batch=3"], "Unknown command line flag 'batch'"),
        (TYPER, ["--batch=3"], "No such option: --batch"),
        (OVERRIDES, ["--batch=3"], "'--batch=3' is no override"),
    ],
)
def test_a_flag_that_the_script_does_not_know(
    plain_slot: SlotStage, tmp_path: Path, source: str, arguments: list[str], complaint: str
) -> None:
    run = plain_slot.run(plain_slot.write("flags.py", source), trial(tmp_path), arguments)
    assert run.code == 2, run.output
    assert [report["type"] for report in run.reports] == ["started", "bad_input"]
    message = run.reports[-1]["message"]
    assert message.startswith("The script refuses its arguments: ")
    assert complaint in message
    assert message.endswith("read them with dike.params() and add --param-style none.")
    assert complaint in run.output  # its own usage message


FORKS = """
import os, sys
import dike
if not os.fork():
    BODY
os.wait()
dike.report(1, loss=0.5)
"""


@pytest.mark.parametrize("body", ["sys.exit(2)", "raise ValueError('child')", "os._exit(0)"])
def test_the_end_of_a_process_that_the_script_has_forked_is_not_the_trials(
    plain_slot: SlotStage, tmp_path: Path, body: str
) -> None:
    run = plain_slot.run(plain_slot.write("forks.py", FORKS.replace("BODY", body)), trial(tmp_path))
    assert run.code == 0, run.output
    assert [report["type"] for report in run.reports] == ["started", "training", "progress"]


ENDS: list[tuple[str, dict[str, Any], int, str, str]] = [
    ("dike.report(1, loss=0.5)", {}, 0, "progress", ""),
    ("dike.report(1, loss=0.5); sys.exit()", {}, 0, "progress", ""),
    ("dike.report(1, loss=0.5); sys.exit(3)", {}, 3, "failed", "the script exited with exit code 3"),
    ("dike.report(1, loss=0.5); sys.exit(2)", {}, 2, "failed", "the script exited with exit code 2"),
    ("sys.exit(2)", {}, 2, "bad_input", "The script refuses its arguments, see its own message"),
    ("sys.exit('no data')", {}, 1, "failed", "the script exited: no data"),
    ("dike.report(1, loss=0.5); raise ValueError('bad lr')", {}, 1, "failed", "failed (ValueError: bad lr)"),
    ("1 +", {}, 1, "failed", "the script has a syntax error in line 4"),
    ("pass", {}, 2, "bad_input", "The script has reported no training loss"),
    ("dike.report(1, accuracy=0.5)", {}, 2, "bad_input", "The script has reported no training loss"),
    ("dike.report(1, loss=0.5)", {"metric": "f1"}, 2, "bad_input", "not report a metric 'f1', only loss;"),
    ("dike.report(1, f1=0.5)", {"metric": "f1"}, 0, "progress", ""),
    ("dike.report(1, loss='low')", {}, 2, "bad_input", "dike.report takes numbers, but 'loss' is 'low'."),
    ("dike.report(0.5, loss=1.0)", {}, 2, "bad_input", "dike.report counts steps in whole numbers, not 0.5."),
    ("dike.checkpoint(f, f); dike.checkpoint(f, f)", {}, 2, "bad_input", "calls dike.checkpoint twice"),
    # A resumed run need not report a loss, because an earlier run has done so.
    ("dike.checkpoint(f, f)", {"resume_from": "/gone/run-0-step-3", "run": 1}, 0, "checkpoint", ""),
    ("dike.tune(f, {'lr': [1]})", {}, 2, "bad_input", "run it with 'python', not with 'dike tune'"),
]


@pytest.mark.parametrize(("source", "spec", "code", "last", "message"), ENDS)
def test_how_a_script_ends(
    plain_slot: SlotStage, tmp_path: Path, source: str, spec: dict[str, Any], code: int, last: str, message: str
) -> None:
    script = plain_slot.write("end.py", f"import sys\nimport dike\nf = print\n{source}\n")
    run = plain_slot.run(script, trial(tmp_path, **spec))
    assert run.code == code, run.output
    assert run.reports[-1]["type"] == last
    assert message in run.reports[-1].get("message", "")
    if "ValueError" in message:
        assert "bad lr" in run.output
        assert f"{Path(dike.__file__).parent}/" not in run.output, "a traceback of ours"
        assert f'"{script}", line 4' in run.output


LATE = """
import atexit, threading, time
import dike
dike.report(1, loss=0.5)
atexit.register(lambda: print("at exit"))
print("buffered", end="")
threading.Thread(target=lambda: (time.sleep(0.1), dike.report(2, loss=0.25), print("thread"))).start()
"""


def test_threads_and_what_is_to_be_done_at_exit_are_waited_for(plain_slot: SlotStage, tmp_path: Path) -> None:
    run = plain_slot.run(plain_slot.write("late.py", LATE), trial(tmp_path), environment={"PYTHONUNBUFFERED": None})
    assert run.code == 0
    assert run.output == "bufferedthread\nat exit\n"
    assert run.reports[-1]["step"] == 2


def test_a_crash_of_a_library_shows_the_scripts_line(plain_slot: SlotStage, tmp_path: Path) -> None:
    script = plain_slot.write("crash.py", "import ctypes\n\nctypes.string_at(0)\n")
    run = plain_slot.run(script, trial(tmp_path))
    assert run.code == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in run.output
    assert 'crash.py", line 3' in run.output


def test_a_trial_that_starts_cold_does_the_same(tmp_path: Path) -> None:
    cold = SlotStage(tmp_path, None)
    run = cold.run(cold.write("flags.py", PARSED), trial(tmp_path, parameters={"lr": 0.1}), ["--lr", "0.1"])
    assert run.code == 0, run.output
    assert [report["type"] for report in run.reports] == ["started", "training", "progress"]
    assert run.of("training") == [{"type": "training", "preemptible": False}]
    assert run.of("progress")[0]["loss"] == 0.5


def test_without_a_trial_nothing_is_run(tmp_path: Path) -> None:
    script = tmp_path / "never.py"
    script.write_text("print('ran')")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "dike.trial.launch", str(script)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "start searches with 'dike tune SCRIPT'" in done.stderr
    assert "RuntimeWarning" not in done.stderr


def test_a_traceback_shows_the_users_lines_only(plain_slot: SlotStage, tmp_path: Path) -> None:
    source = """
import dike

def save(folder):
    dike.no_such_name

dike.checkpoint(save, print)
dike.report(1, loss=1.0)
"""
    run = plain_slot.run(plain_slot.write("fails.py", source), trial(tmp_path, checkpoint_interval_s=0.0))
    assert run.code == 1
    frames = re.findall(r'File "(.+)", line (\d+), in (\S+)', run.output)
    script = str(plain_slot.folder / "fails.py")
    assert frames == [(script, "8", "<module>"), (script, "5", "save")]
    assert "AttributeError: module 'dike' has no attribute 'no_such_name'" in run.output


def test_a_traceback_of_a_mistake_of_ours_ends_where_that_is() -> None:
    with pytest.raises(TypeError) as raised:
        call_with_frames_of_ours()
    lines = "".join(error_lines(raised.value))
    assert re.search(r'spec.py", line \d+, in loads\n', lines)
    assert lines.index("call_with_frames_of_ours") < lines.index("spec.py")


def call_with_frames_of_ours() -> None:
    TrialSpec.loads("[]")
