"""`dike.tune` where there is no script: in a notebook with a real kernel, at a prompt, from standard input."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from dike.exceptions import BadInputError
from dike.trial import pickled
from tests.running import dike_environment
from tests.trial.slot_stage import SlotStage, trial

pytestmark = pytest.mark.integration

DEADLINE_S = 300
SLOT = "slots=1, slot_mem=256, slot_cpus=0.5"
CELLS = (
    """
import math
import dike

class Falling:
    def __init__(self, rate):
        self.rate = rate
    def at(self, step):
        return math.exp(-self.rate * step)

steps = int(open("steps.txt").read())
""",
    """
def losses(curve):
    import json
    return json.loads(json.dumps([curve.at(step) for step in range(1, steps + 1)]))

def train(lr):
    print("steps:", open("steps.txt").read())
    for step, loss in enumerate(losses(Falling(lr)), 1):
        dike.report(step, loss=loss)
""",
    f'found = dike.tune(train, {{"lr": [0.1, 0.5]}}, name="first", {SLOT})\nfound.best_params, found.best.step',
    f"""
def space(trial):
    return {{"lr": trial.suggest_float("lr", 1, 2), "power": 2 if trial.number else 3}}
found = dike.tune(lambda lr, power: Falling(lr).at(power), space, trials=2, stop="patience=2", name="second", {SLOT})
found.best_value < 0.2
""",
    f"""
def broken(lr):
    return [][0]
dike.tune(broken, {{"lr": [0.1]}}, name="third", {SLOT})
""",
    'dike.grid_search(train, {"lr": [0.1]}, policy="fiffo")',
    "found.complete",
)


def environment() -> dict[str, str]:
    return {**dike_environment(), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def text_of(cell: Any, stream: str = "stdout") -> str:
    """What a cell has written."""
    return "".join(one.text for one in cell.outputs if one.output_type == "stream" and one.name == stream)


@pytest.mark.mesos
def test_searches_in_a_notebook(tmp_path: Path) -> None:
    (tmp_path / "steps.txt").write_text("4")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell.strip()) for cell in CELLS])
    client = NotebookClient(notebook, timeout=DEADLINE_S, allow_errors=True, resources={"metadata": {"path": tmp_path}})
    client.execute(env=environment())
    _, _, first, second, third, refused, last = notebook.cells
    assert first.outputs[-1].data["text/plain"] == "({'lr': 0.5}, 4)"
    (table,) = [one.data for one in first.outputs if one.output_type == "display_data"]
    assert "2 trials: 2 finished" in table["text/plain"]
    assert "lr=0.5" in table["text/html"]
    assert "search first: 2 trials" in text_of(first)
    assert text_of(first, "stderr") == ""
    assert second.outputs[-1].data["text/plain"] == "True"
    # The trial's traceback, and the notebook's own: the user's lines and no others.
    said = text_of(third)
    assert "return [][0]" in said
    assert f"{os.sep}dike{os.sep}main_script.py" not in said
    *_, error = third.outputs
    assert (error.output_type, error.ename) == ("error", "JobFailedError")
    trace = "\n".join(error.traceback)
    assert 'dike.tune(broken, {"lr"' in trace
    assert trace.count("  File ") == 1
    (error,) = refused.outputs
    assert error.traceback[-1].startswith("dike.exceptions.BadInputError: There is no policy 'fiffo'")
    assert last.outputs[-1].data["text/plain"] == "True"
    resumed = subprocess.run(
        [sys.executable, "-m", "framework", "tune", "--resume", "first"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert (resumed.returncode, "complete" in resumed.stdout) == (0, True), resumed.stderr


TYPED = f"""
import dike
def train(lr):
    return lr * 2

found = dike.tune(train, {{"lr": [0.1, 0.2]}}, mode="max", {SLOT})
print("found", found.best_params, found.best_value)
dike.tune(train, {{"rate": [0.1]}})
"""


@pytest.mark.mesos
@pytest.mark.parametrize("arguments", [("-",), ("-i", "before.py")])
def test_searches_without_a_file(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "before.py").write_text("print('once')\n")
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=tmp_path,
        env=environment(),
        input=TYPED,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert "found {'lr': 0.2} 0.4" in done.stdout
    assert done.stdout.count("once") == ("before.py" in arguments)
    frames = [line for line in done.stderr.splitlines() if line.startswith("  File ")]
    assert frames == [f'  File "<stdin>", line {8 if arguments == ("-",) else 1}, in <module>'], done.stderr
    assert "needs 'lr', which the search space does not have" in done.stderr


def test_a_function_finds_its_source_and_asks_for_no_search(plain_slot: SlotStage, tmp_path: Path) -> None:
    session: dict[str, Any] = {"__name__": "__main__"}
    source = "def train(lr):\n    import sys, __main__\n    print(sys.argv, vars(__main__).get('__file__'))\n    MORE\n"

    def run_of(more: str) -> Any:
        text = source.replace("MORE", more)
        exec(compile(text, "<cell 3>", "exec"), session)
        pickled.linecache.cache["<cell 3>"] = (len(text), None, text.splitlines(keepends=True), "<cell 3>")
        try:
            script = plain_slot.folder / "train.function"
            script.write_bytes(pickled.dump_function(session["train"]))
            assert "lr" in pickled.names_in_function(script.read_bytes())
        finally:
            del pickled.linecache.cache["<cell 3>"]
        return plain_slot.run(script, trial(tmp_path, call=0, parameters={"lr": 0.25}))

    run = run_of("return lr")
    assert (run.code, run.output) == (0, "[''] None\n")
    assert run.reports[-1]["value"] == 0.25
    run = run_of("raise ValueError(lr)")
    assert run.output.splitlines()[1:] == [
        "Traceback (most recent call last):",
        '  File "<cell 3>", line 4, in train',
        "    raise ValueError(lr)",
        "ValueError: 0.25",
    ]
    run = run_of("import dike; dike.tune(print, {})")
    assert "called by the function that it was given" in run.reports[-1]["message"]


def test_what_cannot_be_sent_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = sys.stdout

    def train(lr: float) -> None:
        print(lr, file=opened)

    with pytest.raises(BadInputError, match=r"The function given to dike.tune cannot be sent .* put the call of"):
        pickled.dump_function(train)
    monkeypatch.setattr(pickled, "FUNCTION_LIMIT_BYTES", 2**20)
    data = bytes(2**21)
    with pytest.raises(BadInputError, match=r"takes 2.0 MiB; the maximum is 1 MiB"):
        pickled.dump_function(lambda lr: lr + len(data))
    with pytest.raises(BadInputError, match="cannot be read back"):
        pickled.load_function(b"nothing")
