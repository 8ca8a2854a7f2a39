"""Imports run one way: dike <- solver, executor <- framework."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("dike", "solver", "executor", "framework")
MAY_IMPORT = {
    "dike": {"dike"},
    "solver": {"solver", "dike"},
    "executor": {"executor", "dike"},
    "framework": {"framework", "executor", "solver", "dike"},
}
SOLVER_MAY_IMPORT_OF_DIKE = {"dike.profile", "dike.exceptions"}


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_it_may(room: str) -> None:
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files
        for name in imports(path)
        if (top := name.partition(".")[0]) in ROOMS and top not in MAY_IMPORT[room]
    ]
    assert wrong == []


def test_the_solver_knows_only_the_profile() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sorted((ROOT / "solver").rglob("*.py"))
        for name in imports(path)
        if name.partition(".")[0] == "dike" and name not in SOLVER_MAY_IMPORT_OF_DIKE
    ]
    assert wrong == []


@pytest.mark.parametrize("module", ["framework.cli", "executor.slot", "solver", "dike", "dike.profile", "dike.task"])
def test_no_room_imports_tensorflow_by_itself(module: str) -> None:
    program = f"import sys, {module}; print([name for name in ('tensorflow', 'keras') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
