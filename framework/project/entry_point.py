"""The script to run, its folder, and the environment variables that its tasks get."""

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
"""Default folder of runs and databases, below the working folder."""
SEARCHES_FILE = "searches.db"
"""Default database of searches in there."""
PORTABLE_VARIABLES = ("KERAS_BACKEND", "PYTHONHASHSEED", "XLA_FLAGS")
"""Variables with the same meaning on every machine, in addition to `TF_*`."""
EXCLUDED_VARIABLES = ("TF_CONFIG",)
LOCAL_VARIABLES = (
    *("HOME", "USER", "LOGNAME", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ"),
    *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"),
    *("KERAS_HOME", "TFDS_DATA_DIR", "TFHUB_CACHE_DIR", "KAGGLEHUB_CACHE", "KAGGLE_CONFIG_DIR", "TORCH_HOME"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE"),
    *("NLTK_DATA", "SCIKIT_LEARN_DATA", "MPLCONFIGDIR", "MPLBACKEND", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"),
)
"""Variables that name this machine's folders or settings, such as where libraries keep data."""
_MACHINE_VARIABLES = (
    *("PATH", "TMPDIR", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ"),
    *("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
)
"""Variables that any process has of its machine, and a task of its agent."""
_PATH_LISTS = ("PYTHONPATH", "LD_LIBRARY_PATH")
_PATH_VARIABLE = re.compile(r"HOME|.*_(HOME|DIR|CACHE|DATA|CONFIGDIR|FILE|BUNDLE)|MPLCONFIGDIR")


@dataclass(frozen=True)
class EntryPoint:
    """A script, or a module as for `python -m`, and the folder that is bundled with it.

    Attributes:
        script: its file, an absolute path below `folder`.
        folder: the bundled folder and working folder of the script's processes: the command's working folder if the
            script is below it, else the script's own.
        module: the module's name; empty for a script.
    """

    script: Path
    folder: Path
    module: str = ""

    @property
    def path(self) -> str:
        return self.script.relative_to(self.folder).as_posix()

    @property
    def root(self) -> Path:
        """Where Python looks for modules first."""
        return self.folder if self.module or self.is_function else self.script.parent

    @property
    def is_function(self) -> bool:
        """Whether the file holds a pickled function of a notebook, not a script."""
        return self.script.suffix == FUNCTION_SUFFIX

    @property
    def environment(self) -> dict[str, str]:
        """Variables that make a process run a module."""
        return {MODULE_VARIABLE: self.module} if self.module else {}


def find_entry_point(name: str | Path, *, is_module: bool = False) -> EntryPoint:
    """Finds a script by its path or a module by its name, from the working folder.

    Raises:
        BadInputError: it does not exist.
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
    # Python looks for modules beside the file, not beside a link to it.
    script = script.resolve()
    return EntryPoint(script, folder_of(script))


def folder_of(script: Path) -> Path:
    """The folder to bundle with a script, see `EntryPoint`. `script` is an absolute path without links."""
    here = Path.cwd().resolve()
    # Services and cron jobs start in the root or home folder, which must not be sent anywhere.
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
    """The variables of this process that tasks get: library settings, nothing private; paths only `on_this_machine`."""
    names = [name for name in os.environ if name in PORTABLE_VARIABLES or name.startswith("TF_")]
    values = {name: os.environ[name] for name in names if name not in EXCLUDED_VARIABLES}
    if on_this_machine:
        values |= {name: _for_task(entry, name, os.environ[name]) for name in LOCAL_VARIABLES if name in os.environ}
    return values


def planning_environment(for_tasks: Mapping[str, str]) -> dict[str, str]:
    """The environment in which a script is profiled: that of its tasks, on this machine."""
    base = {name: os.environ[name] for name in _MACHINE_VARIABLES if name in os.environ}
    # The user's own folders on PYTHONPATH may not exist on agents; Dike's own does.
    ours = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part and _contains_dike(part)]
    if ours:
        base["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, ours))
    return {**base, **for_tasks}


def hint(error: str, entry: EntryPoint, for_tasks: Mapping[str, str]) -> str:
    """A hint for the error of a script that misses a variable or a file; empty if there is none."""
    if found := re.search(r"KeyError: '(\w+)'", error):
        name = found[1]
        if name in os.environ and name not in for_tasks:
            return f"{name} is set here but not passed to tasks; add --env {name}."
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
            return f"{path} is not bundled: it is behind a link that leads out of {entry.folder}."
        return f"{path} is in {entry.folder} but not bundled: a .dikeignore names it, or Dike never sends such files."
    if (here / path).exists():
        return (
            f"{path} is in {here}, but the script is not, so its own folder {entry.folder} is bundled; start the "
            "command in a folder that holds both."
        )
    return ""


def _for_task(entry: EntryPoint, name: str, value: str) -> str:
    """A variable's value for tasks, which have another working folder: relative paths become absolute."""
    if name == "PYTHONPATH":
        return os.pathsep.join(_module_folder_for_task(entry, part or ".") for part in value.split(os.pathsep))
    if name in _PATH_LISTS:
        return os.pathsep.join(os.path.abspath(part) for part in value.split(os.pathsep))
    return os.path.abspath(value) if value and _PATH_VARIABLE.fullmatch(name) else value


def _module_folder_for_task(entry: EntryPoint, part: str) -> str:
    """A folder on PYTHONPATH; a bundled one becomes relative, so that tasks use their own copy."""
    # Imported late: many commands pack nothing.
    from framework.project import bundle

    place = Path(part).resolve()
    if _contains_dike(part) or not bundle.is_bundled(place, entry.folder):
        return os.path.abspath(part)
    return place.relative_to(entry.folder).as_posix()


def _contains_dike(part: str) -> bool:
    return Path(part, "dike").is_dir()
