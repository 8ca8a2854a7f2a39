"""`dike plan` as a user runs it."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from framework.cli import main
from solver import Plan
from tests.solver.solver_cases import profile

EXAMPLES = Path(__file__).parents[2] / "examples" / "clusters"
DEADLINE_S = 180.0


def _plan(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The command in this process, without the seconds that a new one takes to load its modules."""
    command = ["dike", "plan", *map(str, arguments)]
    with pytest.MonkeyPatch.context() as patch, io.StringIO() as out, io.StringIO() as err:
        patch.setattr(sys, "argv", command)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
            main()
        return subprocess.CompletedProcess(command, int(ended.value.code or 0), out.getvalue(), err.getvalue())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.json"
    path.write_text(profile().dumps(), encoding="utf-8")
    return path


@pytest.mark.integration
def test_tables(model: Path) -> None:
    command = [sys.executable, "-m", "framework", "plan", str(model), "--cluster", str(EXAMPLES / "five-k80.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    for text in ("Options", "Option chosen", "Placement", "k80-4", "samples/s", "Next best options", "Proven"):
        assert text in done.stdout


def test_three_hundred_machines_do_not_print_three_hundred_rows(model: Path) -> None:
    done = _plan(model, "--cluster", EXAMPLES / "300-nodes.yaml")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) < 100


def test_json_alone_on_standard_output(model: Path) -> None:
    done = _plan(
        model, "--cluster", EXAMPLES / "mixed.yaml", "--format", "json", "--max-workers", "3", "--batch-size", "16"
    )
    assert done.returncode == 0, done.stderr
    plan = Plan.from_json(json.loads(done.stdout))
    assert plan.option.workers <= 3
    assert plan.profile.batch_size == 16


def test_the_objective_is_passed_on(model: Path) -> None:
    done = _plan(model, "--cluster", EXAMPLES / "five-k80.yaml", "--format", "json", "--objective", "traffic")
    assert json.loads(done.stdout)["objective"] == "traffic"


def test_a_picture_is_drawn(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.svg"
    done = _plan(model, "--cluster", EXAMPLES / "laptop.yaml", "--picture", path)
    assert done.returncode == 0, done.stderr
    assert "laptop" in path.read_text(encoding="utf-8")


def test_bad_input_is_one_sentence_and_exit_2(model: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("nodes:\n  - name: a\n    cpus: 0\n    mem: 1GiB\n", encoding="utf-8")
    tiny = tmp_path / "tiny.yaml"
    tiny.write_text("nodes:\n  - name: a\n    cpus: 4\n    mem: 64MiB\n", encoding="utf-8")
    good = EXAMPLES / "laptop.yaml"
    cases: list[tuple[list[str | Path], str]] = [
        ([model, "--cluster", bad], f"{bad}, line 3:"),
        ([model, "--cluster", tmp_path / "none.yaml"], "cannot be read"),
        ([model, "--cluster", tiny], "short"),
        ([model, "--cluster", good, "--picture", "plan.gif"], ".png or .svg"),
        ([tmp_path / "none.json", "--cluster", good], "none.json"),
    ]
    for arguments, says in cases:
        done = _plan(*arguments)
        assert done.returncode == 2, (arguments, done.stderr)
        assert done.stdout == ""
        assert says in done.stderr
        assert "Traceback" not in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
    # What the command line itself cannot read comes with a line on its usage.
    done = _plan(model, "--cluster", good, "--objective", "fame")
    assert done.returncode == 2
    assert "'fame' is not one of 'throughput', 'traffic'" in done.stderr
    assert "Traceback" not in done.stderr
