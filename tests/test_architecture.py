"""Imports run one way: dike <- solver, executor <- framework."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Collection, Iterator
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
FOR_TYPE_CHECKERS = "dike/__init__.py imports framework.service.client"
"""At run time, `dike.Client` is imported on first access."""
WITHOUT_CIRCLES = ROOMS
NOT_IMPORTED = {
    # `python -m dike.capture` replaces this process: the new one imports it, this one does not.
    "dike/roles/planned_model.py": {"dike.capture"},
    # Plug-ins, imported after the script's library. They use the modules beside `launch`, never `launch` itself, which
    # `test_no_modules_import_each_other_in_a_circle` makes sure of.
    "dike/trial/launch.py": {"dike.v1.trial", "dike.keras3.trial", "dike.tf_keras.trial"},
}
"""File -> strings in it that name a module and do not order the folders."""
SOLVER_MAY_IMPORT_OF_DIKE = {"dike.profile", "dike.exceptions", "dike.described"}


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


@pytest.mark.slow
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
    assert wrong == ([FOR_TYPE_CHECKERS] if room == "dike" else [])


def _modules(path: Path, ignored: Collection[str] = ()) -> Iterator[tuple[str, ...]]:
    """The modules of ours that a file imports, anywhere in it: `from dike.v1 import training` is dike, v1, training.

    A string that equals a module's full name counts as an import, as `importlib.import_module` may get it.

    Args:
        path: the file.
        ignored: strings that do not count.
    """
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_module(node.value):
            names = [node.value] if node.value not in ignored else []
        else:
            continue
        for name in names:
            parts = tuple(name.split("."))
            while parts and not _file(parts).exists():
                parts = parts[:-1]
            if parts:
                yield parts


def _is_module(text: str) -> bool:
    parts = tuple(text.split("."))
    return len(parts) > 1 and parts[0] in ROOMS and all(map(str.isidentifier, parts)) and _file(parts).exists()


def _file(parts: tuple[str, ...]) -> Path:
    file = ROOT.joinpath(*parts).with_suffix(".py")
    return file if file.exists() else ROOT.joinpath(*parts, "__init__.py")


@pytest.mark.slow
@pytest.mark.parametrize("room", WITHOUT_CIRCLES)
def test_neither_files_nor_folders_import_each_other_in_a_circle(room: str) -> None:
    """In each folder the files, and the folders with all that is below them, can be put into one order."""
    imported: dict[Path, dict[str, set[str]]] = {}
    for path in sorted((ROOT / room).rglob("*.py")):
        importer = path.relative_to(ROOT).with_suffix("").parts
        for module in _modules(path, NOT_IMPORTED.get(path.relative_to(ROOT).as_posix(), ())):
            file = _file(module).relative_to(ROOT).with_suffix("").parts
            pairs = zip(importer, file, strict=False)
            common = next((at for at, (one, other) in enumerate(pairs) if one != other), None)
            if common:
                of_folder = imported.setdefault(Path(*importer[:common]), {})
                of_folder.setdefault(importer[common], set()).add(file[common])
    circles = {}
    for folder, of_folder in imported.items():
        try:
            graphlib.TopologicalSorter(of_folder).prepare()
        except graphlib.CycleError as error:
            circles[str(folder)] = " <- ".join(error.args[1])
    assert circles == {}


@pytest.mark.slow
def test_no_modules_import_each_other_in_a_circle() -> None:
    """Of all rooms together, modules named as strings included."""
    imported: dict[str, set[str]] = {}
    for path in sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        own = path.relative_to(ROOT).as_posix()
        imported[own] = {_file(module).relative_to(ROOT).as_posix() for module in _modules(path)} - {own}
    try:
        graphlib.TopologicalSorter(imported).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


@pytest.mark.slow
def test_a_module_named_as_a_string_counts_as_imported(tmp_path: Path) -> None:
    """So did `dike/trial/export.py` once import a module of `dike/v1` that imported it."""
    file = tmp_path / "export.py"
    file.write_text('"""dike.launch"""\nimportlib.import_module("dike.v1.trial")\n"dike", "dike.nothing", "dike v1"\n')
    assert list(_modules(file, ["dike.launch"])) == [("dike", "v1", "trial")]
    assert list(_modules(file, ["dike.launch", "dike.v1.trial"])) == []


@pytest.mark.integration
def test_the_client_imports_nothing_that_a_user_may_have_named_so(tmp_path: Path) -> None:
    """In a folder with files called as our rooms are, `dike.Client` works, and is light."""
    for room in ("solver", "executor"):
        (tmp_path / f"{room}.py").write_text("raise SystemExit('this is the user's own')\n")
    program = "import dike, sys; dike.Client('http://127.0.0.1:1', 'a-token'); print('tensorflow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.slow
def test_the_solver_knows_only_the_profile() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sorted((ROOT / "solver").rglob("*.py"))
        for name in imports(path)
        if name.partition(".")[0] == "dike" and name not in SOLVER_MAY_IMPORT_OF_DIKE
    ]
    assert wrong == []


@pytest.mark.integration
@pytest.mark.parametrize(
    "module", ["framework.cli", "executor.dispatch", "solver", "dike", "dike.profile", "dike.task"]
)
def test_no_room_imports_tensorflow_by_itself(module: str) -> None:
    program = f"import sys, {module}; print([name for name in ('tensorflow', 'keras') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
