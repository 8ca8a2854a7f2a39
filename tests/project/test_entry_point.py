"""What travels with a script: a folder, and variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from dike.exceptions import BadInputError
from framework.project import entry_point
from framework.project.entry_point import environment_for_tasks, find_entry_point, hint
from framework.project.failure_summary import error_summary
from framework.scheduler.mesos_access import MesosAccess


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    (folder / "src" / "trainer").mkdir(parents=True)
    for name in ("src/train.py", "src/trainer/task.py", "src/trainer/__main__.py", "other.py"):
        (folder / name).write_text("")
    monkeypatch.chdir(folder)
    return folder


def test_the_working_folder_travels_where_the_script_lies_below_it(project: Path) -> None:
    found = find_entry_point("src/train.py")
    assert (found.folder, found.path, found.environment) == (project, "src/train.py", {})


def test_elsewhere_the_folder_of_the_script_travels(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project / "src" / "trainer")
    found = find_entry_point("../train.py")
    assert (found.folder, found.path) == (project / "src", "train.py")


def test_neither_home_nor_the_root_travels(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(project))
    assert find_entry_point("src/train.py").folder == project / "src"
    assert find_entry_point("other.py").folder == project
    monkeypatch.chdir("/")
    assert find_entry_point(project / "src/train.py").folder == project / "src"


def test_a_link_to_a_script_elsewhere_takes_the_folder_of_the_script(project: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "job.py").write_text("")
    (project / "link.py").symlink_to(tmp_path / "real" / "job.py")
    assert find_entry_point("link.py").folder == tmp_path / "real"


def test_modules_are_found_below_the_working_folder(project: Path) -> None:
    found = find_entry_point("src.trainer.task", is_module=True)
    assert (found.folder, found.path) == (project, "src/trainer/task.py")
    assert found.environment == {"DIKE_MODULE": "src.trainer.task"}
    assert find_entry_point("src.trainer", is_module=True).path == "src/trainer/__main__.py"
    for name in ("trainer.task", "src/train.py", "..other", "src.train.py", ""):
        with pytest.raises(BadInputError, match="There is no module"):
            find_entry_point(name, is_module=True)


def test_a_folder_or_nothing_is_no_script(project: Path) -> None:
    with pytest.raises(BadInputError, match="src is a folder; give the training script in it"):
        find_entry_point("src")
    with pytest.raises(BadInputError, match=r"There is no script gone\.py"):
        find_entry_point("gone.py")


def test_what_libraries_are_set_up_by_travels_and_nothing_private(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"HOME": "/h", "KERAS_HOME": "keras", "TF_DETERMINISTIC_OPS": "1", "TF_CONFIG": "{}", "MY_TOKEN": "s"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    entry = find_entry_point("src/train.py")
    here = environment_for_tasks(entry, on_this_machine=True)
    assert here["HOME"] == "/h"
    assert here["KERAS_HOME"] == str(project / "keras")
    assert not here.keys() & {"MY_TOKEN", "TF_CONFIG"}
    elsewhere = environment_for_tasks(entry, on_this_machine=False)
    assert elsewhere["TF_DETERMINISTIC_OPS"] == "1"
    assert not elsewhere.keys() & {"HOME", "KERAS_HOME"}


def test_folders_of_modules_that_travel_are_the_copies(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("lib", "vendor", ".venv/lib", "us/dike"):
        (project / folder).mkdir(parents=True)
    (project / ".dikeignore").write_text("vendor/\n")
    parts = {
        "lib": "lib",
        str(project / "src"): "src",
        ".": ".",
        "": ".",
        "../beside": str(project.parent / "beside"),
        "/abs": "/abs",
        "vendor": str(project / "vendor"),
        ".venv/lib": str(project / ".venv/lib"),
        "us": str(project / "us"),
    }
    monkeypatch.setenv("PYTHONPATH", ":".join(parts))
    entry = find_entry_point("src/train.py")
    here = environment_for_tasks(entry, on_this_machine=True)
    assert dict(zip(parts, here["PYTHONPATH"].split(":"), strict=True)) == parts
    assert "PYTHONPATH" not in environment_for_tasks(entry, on_this_machine=False)


@pytest.mark.parametrize(
    ("master", "here"),
    [(None, True), ("127.0.0.1:5050", True), ("localhost:5050", True), ("192.0.2.1:5050", False), ("zk://a/m", False)],
)
def test_which_master_is_on_this_machine(master: str | None, here: bool) -> None:
    assert MesosAccess(master=master).runs_here is here
    assert not MesosAccess(master=master, image="python").runs_here


def test_hints_say_why_something_was_not_found(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "secret")
    entry = find_entry_point("src/train.py")
    assert "add --env MY_TOKEN" in hint("KeyError: 'MY_TOKEN'", entry, {})
    assert hint("KeyError: 'MY_TOKEN'", entry, {"MY_TOKEN": "x"}) == ""
    assert hint("KeyError: 'loss'", entry, {}) == ""
    (project / "values.csv").write_text("1")
    missing = "FileNotFoundError: [Errno 2] No such file or directory: 'values.csv'"
    assert ".dikeignore" in hint(missing, entry, {})
    assert hint(missing.replace("values", "others"), entry, {}) == ""
    # The script is elsewhere, so the folder we are in does not travel.
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "job.py").write_text("")
    assert f"{project}, but the script is not" in hint(missing, find_entry_point(tmp_path / "far" / "job.py"), {})


def test_what_travels_everywhere_is_not_machine_dependent() -> None:
    assert not set(entry_point.PORTABLE_VARIABLES) & set(entry_point.LOCAL_VARIABLES)


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("Epoch 1/10\n", ""),
        ("44/44 - 1s - loss: 0.3\n", ""),
        ("Epoch 1/10\nCUDA error: out of memory\n", "CUDA error: out of memory"),
        ("Traceback (most recent call last):\n  File \"train.py\", line 2, in <module>\nValueError: no\n",
         "ValueError: no (train.py, line 2)"),
    ],
)  # fmt: skip
def test_what_a_script_prints_last_is_an_error_only_if_it_looks_like_one(output: str, said: str) -> None:
    assert error_summary(output) == said
