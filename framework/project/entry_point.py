"""What is run, and what of the user's world goes with it to the tasks: a folder, and environment variables."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dike.exceptions import BadInputError
from dike.main_script import MODULE_VARIABLE
from dike.trial.pickled import FUNCTION_SUFFIX

RUNS_FOLDER = "dike-runs"
"""Where runs and databases are kept, in the folder that the command is typed in, unless another is named."""
SEARCHES_FILE = "searches.db"
"""The database of searches among them."""
EVERYWHERE = ("KERAS_BACKEND", "PYTHONHASHSEED", "XLA_FLAGS")
"""Variables that mean the same on every machine; those that begin with `TF_` do, too."""
NOT_OURS_TO_SEND = ("TF_CONFIG",)
ON_THIS_MACHINE = (
    *("HOME", "USER", "LOGNAME", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ"),
    *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"),
    *("KERAS_HOME", "TFDS_DATA_DIR", "TFHUB_CACHE_DIR", "KAGGLEHUB_CACHE", "KAGGLE_CONFIG_DIR", "TORCH_HOME"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE"),
    *("NLTK_DATA", "SCIKIT_LEARN_DATA", "MPLCONFIGDIR", "MPLBACKEND", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"),
)
"""Variables that name this machine's folders and files, or how it is set up: where libraries keep data and settings."""
_BASE = (
    *("PATH", "TMPDIR", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ"),
    *("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
)
"""What any process has of its own machine, a task of its agent."""
_PATH_LISTS = ("PYTHONPATH", "LD_LIBRARY_PATH")
_FOLDERS = re.compile(r"HOME|.*_(HOME|DIR|CACHE|DATA|CONFIGDIR|FILE|BUNDLE)|MPLCONFIGDIR")


@dataclass(frozen=True)
class EntryPoint:
    """A script, or a module as `python -m` takes one, and the folder that travels with it.

    Attributes:
        script: its file, an absolute path below `folder`.
        folder: what travels, and is the working folder of the processes that run the script: the folder the command
            was typed in where the script lies below it, else the script's own.
        module: the module's name; empty for a script.
    """

    script: Path
    folder: Path
    module: str = ""

    @property
    def path(self) -> str:
        """The script's path in the folder."""
        return self.script.relative_to(self.folder).as_posix()

    @property
    def root(self) -> Path:
        """Where Python looks for modules first."""
        return self.folder if self.module or self.is_function else self.script.parent

    @property
    def is_function(self) -> bool:
        """Whether the file holds a function of a notebook, pickled, and not a script."""
        return self.script.suffix == FUNCTION_SUFFIX

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which a process knows that it is to run a module."""
        return {MODULE_VARIABLE: self.module} if self.module else {}


def find_entry_point(name: str | Path, *, is_module: bool = False) -> EntryPoint:
    """Looks for what is to be run, from the working folder.

    Args:
        name: path of a script, or a module's name.
        is_module: which of the two.

    Raises:
        BadInputError: if there is none.
    """
    if is_module:
        return _find_module(str(name))
    script = Path(name)
    if not script.is_file():
        raise BadInputError(
            f"{script} is a folder; give the training script in it."
            if script.is_dir()
            else f"There is no script {script}."
        )
    # What a link leads to: Python finds the modules beside the file, not beside the link.
    script = script.resolve()
    return EntryPoint(script, folder_of(script))


def folder_of(script: Path) -> Path:
    """The folder that travels with a script: see `EntryPoint`. `script` is an absolute path without links."""
    here = Path.cwd().resolve()
    # Services and cron jobs are started at the root or at home, which nobody means to send anywhere.
    means_all = here == Path(here.anchor) or here == _home()
    return here if script.is_relative_to(here) and not means_all else script.parent


def _home() -> Path | None:
    try:
        return Path.home().resolve()
    except RuntimeError:
        return None  # an account without one


def _find_module(name: str) -> EntryPoint:
    here = Path.cwd().resolve()
    place = here.joinpath(*name.split("."))
    for file in (place / "__main__.py", place.with_name(f"{place.name}.py")):
        if re.fullmatch(r"\w+(\.\w+)*", name) and file.is_file():
            return EntryPoint(file, here, name)
    raise BadInputError(
        f"There is no module {name} in {here}; -m takes the name of a module below the working folder, such as "
        "package.module."
    )


def environment_for_tasks(entry: EntryPoint, *, on_this_machine: bool) -> dict[str, str]:
    """What of this process' environment the script's processes get: how libraries are set up, and nothing private.

    Args:
        entry: the script.
        on_this_machine: whether they run on this machine, so that its paths mean something to them.
    """
    names = [name for name in os.environ if name in EVERYWHERE or name.startswith("TF_")]
    values = {name: os.environ[name] for name in names if name not in NOT_OURS_TO_SEND}
    if on_this_machine:
        values |= {name: _for_task(entry, name, os.environ[name]) for name in ON_THIS_MACHINE if name in os.environ}
    return values


def planning_environment(for_tasks: Mapping[str, str]) -> dict[str, str]:
    """The environment in which a script is run to read its model: what its tasks will see, on this machine."""
    base = {name: os.environ[name] for name in _BASE if name in os.environ}
    # Where we are ourselves the agents have theirs; the user's own folders in there they have not.
    ours = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part and _is_ours(part)]
    if ours:
        base["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, ours))
    return {**base, **for_tasks}


def hint(error: str, entry: EntryPoint, for_tasks: Mapping[str, str]) -> str:
    """What may help against an error of a script that did not find a variable or a file; empty if nothing is known.

    Args:
        error: the error as Python prints it.
        entry: the script.
        for_tasks: the variables that it was given.
    """
    if found := re.search(r"KeyError: '(\w+)'", error):
        name = found[1]
        if name in os.environ and name not in for_tasks:
            return f"{name} is set here, but does not travel by itself; add --env {name}."
    for missing in (r"No such file or directory: '([^']+)'", r"([^\s'\"]+); No such file or directory"):
        if found := re.search(missing, error):
            return _hint_at_file(Path(found[1]), entry)
    return ""


def _hint_at_file(path: Path, entry: EntryPoint) -> str:
    here = Path.cwd().resolve()
    if path.is_absolute():
        if not path.is_relative_to(entry.folder):
            return ""
        path = path.relative_to(entry.folder)
    place = entry.folder / path
    if place.exists():
        if not place.resolve().is_relative_to(entry.folder):
            return f"{path} does not travel: it is behind a link that leads out of {entry.folder}."
        return (
            f"{path} is in {entry.folder}, but does not travel: a .dikeignore names it, or Dike never sends such files."
        )
    if (here / path).exists():
        return (
            f"{path} is in {here}, but the script is not, so its own folder {entry.folder} travels; start it from "
            "a folder that holds both."
        )
    return ""


def _for_task(entry: EntryPoint, name: str, value: str) -> str:
    """A variable's value for tasks, which work in another folder: with relative paths made absolute."""
    if name == "PYTHONPATH":
        return os.pathsep.join(_module_folder_for_task(entry, part or ".") for part in value.split(os.pathsep))
    if name in _PATH_LISTS:
        return os.pathsep.join(os.path.abspath(part) for part in value.split(os.pathsep))
    return os.path.abspath(value) if value and _FOLDERS.fullmatch(name) else value


def _module_folder_for_task(entry: EntryPoint, part: str) -> str:
    """A folder of modules; one that travels is relative, so that a task's is that in its own copy."""
    # Late: commands that only ask a service pack nothing.
    from framework.project import bundle

    place = Path(part).resolve()
    if _is_ours(part) or not bundle.travels(place, entry.folder):
        return os.path.abspath(part)
    return place.relative_to(entry.folder).as_posix()


def _is_ours(part: str) -> bool:
    """Whether a folder of modules is where we are ourselves."""
    return Path(part, "dike").is_dir()
