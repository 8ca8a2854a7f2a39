"""An unchanged script is not read again; only inputs that the script can see count as changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dike.exceptions import BadInputError
from dike.profile import ModelProfile
from framework import cli
from framework.project import bundle, profiling
from framework.project.entry_point import find_entry_point
from framework.project.profile_cache import CachedProfile
from framework.project.profiling import load_profile, profile_of_job
from tests.profiles import made_up_profile

READ = profiling._ProfilingProcess.profile


class ProjectStage:
    """A project whose script is never run; counts how often it would be."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.times = 0
        self.told: list[str] = []
        folder.mkdir()
        for name, text in {"train.py": "import model\n", "model.py": "WIDTH = 1\n", "rows.csv": "1,2\n"}.items():
            (folder / name).write_text(text)

    def read(self, *_: object) -> ModelProfile:
        """Stands for the child process."""
        self.times += 1
        return made_up_profile({"w": (2, self.times)}, flops=1e6)

    def here(self, *arguments: str, **more: Any) -> ModelProfile:
        return load_profile("train.py", arguments, notify=self.told.append, **more)

    def job(self, *arguments: str, **more: Any) -> CachedProfile:
        entry = find_entry_point("train.py")
        archive = bundle.pack(entry.script, entry.folder)
        return profile_of_job(entry, archive, arguments, notify=self.told.append, **more)


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProjectStage:
    made = ProjectStage(tmp_path / "project")
    monkeypatch.setattr(profiling._ProfilingProcess, "profile", made.read)
    monkeypatch.setenv("DIKE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(made.folder)
    return made


CHANGES: dict[str, Callable[[ProjectStage], object]] = {
    "the script": lambda scripts: (scripts.folder / "train.py").write_text("import model  # changed\n"),
    "a module": lambda scripts: (scripts.folder / "model.py").write_text("WIDTH = 2\n"),
    "its data": lambda scripts: (scripts.folder / "rows.csv").write_text("1,3\n"),
    "a new file": lambda scripts: (scripts.folder / "more.csv").write_text(""),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_travels_counts(what: str, scripts: ProjectStage) -> None:
    for take in (scripts.here, scripts.job):
        scripts.times = 0
        take()
        take()
        assert scripts.times == 1
    for path in scripts.folder.iterdir():
        os.utime(path, (1, 1))
    scripts.here()
    scripts.job()
    assert scripts.times == 1
    CHANGES[what](scripts)
    scripts.here()
    scripts.job()
    assert scripts.times == 3


def test_arguments_batch_and_variables_count(scripts: ProjectStage, monkeypatch: pytest.MonkeyPatch) -> None:
    scripts.here()
    scripts.job()
    scripts.here("--width", "2")
    scripts.job("--width", "2")
    scripts.here(batch_size=4)
    scripts.job(batch_size=4)
    scripts.job(environment={"WIDTH": "2"})
    assert scripts.times == 7
    # A job gets of our variables what it is given; a script that runs here gets them all.
    monkeypatch.setenv("WIDTH", "2")
    scripts.job()
    assert scripts.times == 7
    scripts.here()
    assert scripts.times == 8
    monkeypatch.setenv("SSH_TTY", "/dev/pts/7")
    scripts.here()
    assert scripts.times == 8


def test_it_is_said_when_it_was_read_and_read_again_for_who_asks(scripts: ProjectStage) -> None:
    assert scripts.here() == scripts.here()
    assert not scripts.job().is_cached
    assert scripts.job().is_cached
    kept = "using the profile of train.py read on "
    assert [text.partition("20")[0] for text in scripts.told] == [kept, "reading the model of train.py", kept]
    assert scripts.told[0].endswith(" (--refresh-profile reads it again)")
    scripts.here(refresh=True)
    assert not scripts.job(refresh=True).is_cached
    assert scripts.times == 4


def test_what_an_earlier_run_has_written_counts(scripts: ProjectStage, monkeypatch: pytest.MonkeyPatch) -> None:
    from executor import outputs

    written = "first"
    monkeypatch.setattr(outputs, "restore_into", lambda folder, _: (folder / "vocabulary").write_text(written))
    scripts.job(checkpoint_dir="/checkpoints")
    scripts.job(checkpoint_dir="/checkpoints")
    assert scripts.times == 1
    written = "second"
    scripts.job(checkpoint_dir="/checkpoints")
    assert scripts.times == 2


def test_a_script_that_is_no_python_is_run_each_time(scripts: ProjectStage) -> None:
    (scripts.folder / "model.py").write_text("def\n")
    scripts.here()
    scripts.here()
    assert scripts.times == 2


def test_the_second_dike_plan_starts_no_process(
    scripts: ProjectStage, examples: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["dike", "plan", "train.py", "--cluster", str(examples / "clusters" / "laptop.yaml"), "--format", "json"]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(cli, "end_process", sys.exit)

    def plan() -> tuple[Any, str]:
        with pytest.raises(SystemExit) as end:
            cli.main()
        said = capfd.readouterr()
        assert end.value.code == 0, said.err
        return json.loads(said.out)["profile"], said.err

    first, _ = plan()
    # The real one: a test without a mark is stopped where a process would start.
    monkeypatch.setattr(profiling._ProfilingProcess, "profile", READ)
    again, said = plan()
    assert again == first
    assert "using the profile" in said


def test_a_saved_profile_cannot_be_read_again(scripts: ProjectStage) -> None:
    saved = scripts.folder / "saved.json"
    saved.write_text(made_up_profile({"w": (2, 2)}, flops=1e6).dumps())
    assert load_profile("saved.json").parameters == 4
    with pytest.raises(BadInputError, match="--refresh-profile"):
        load_profile("saved.json", refresh=True)


class FakeForks:
    """Forks that end and are reaped before the caller receives their ids."""

    def fork(self, arguments: Sequence[str], *_: object) -> int:
        """See `JobZygotes.fork`."""
        refuses = "import json, sys; json.dump({'error': 'It has no model.'}, open(sys.argv[2], 'w'))"
        with subprocess.Popen([sys.executable, "-c", refuses, *arguments], start_new_session=True) as child:
            assert child.wait() == 0
        return child.pid


@pytest.mark.integration
def test_a_fork_may_have_ended_before_it_is_watched() -> None:
    forks: Any = FakeForks()
    reading = profiling._ProfilingProcess("train.py", (), None, os.environ, zygotes=forks)
    with pytest.raises(BadInputError, match=r"^It has no model\.$"):
        READ(reading, 60.0)
