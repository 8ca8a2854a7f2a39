"""Gets the profile of a model: from a saved file, or from a child process that imports TensorFlow in our place."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from dike.exceptions import BadInputError
from dike.profile import ModelProfile
from executor.environment import Setup, ZygoteKind
from executor.messages import LAUNCHER
from executor.process import wait_readable
from executor.zygote import ForkRequest
from executor.zygote_pool import ZygoteServerClient, wait_for_server, warm_soon
from framework.project import tensorflow_noise
from framework.project.entry_point import EntryPoint, find_entry_point, hint, planning_environment
from framework.project.kept_profiles import KnownProfile, content_of, kept_profile, libraries
from framework.project.script_facts import imported_libraries, script_facts
from solver.cli.profiles import load_saved_profile
from solver.text_files import read_text

logger = logging.getLogger(__name__)

CAPTURE = "dike.capture"
"""Runs a script up to its training."""
_KERAS_PREFIX = "keras:"
_STDERR = 2
_OF_KERAS = ("TF_USE_LEGACY_KERAS", "KERAS_BACKEND", "KERAS_HOME")
"""Variables that say which Keras makes a model of `keras.applications`."""
_OF_A_WORLD = ("DIKE_OUTPUT_DIR", "DIKE_CHECKPOINT_DIR")
"""Variables that name a job's own folders."""
PRINTS_DRAIN_S = 2.0
SHOWN_AFTER_S = 10.0
"""When it is shown what a script prints that takes long to come to its training."""
_OF_A_TERMINAL = re.compile(
    r"_|OLDPWD|PWD|SHLVL|COLUMNS|LINES|DISPLAY|WINDOWID|STY|LS_COLORS|PS1|PROMPT_COMMAND|DIKE_LOG|DIKE_CACHE|"
    r"(TERM|TERMINAL|COLORTERM|TMUX|SSH|GPG|DBUS|XDG_SESSION|XDG_RUNTIME|VTE|VSCODE|ITERM|KITTY|WAYLAND)(_.*)?"
)
"""Variables that differ between two terminals, and on which no model depends."""


def _ignore(text: str) -> None:
    """For callers that say nothing."""


def load_profile(
    model: str,
    script_args: Sequence[str] = (),
    batch_size: int | None = None,
    timeout_s: float | None = None,
    *,
    is_module: bool = False,
    again: bool = False,
    tell: Callable[[str], None] = _ignore,
) -> ModelProfile:
    """The profile of `model`, read where we are: a script runs in the working folder, and its output is shown.

    It is read only if none is kept (`framework.project.kept_profiles`).

    Args:
        model: a training script, `keras:NAME` or a saved profile (`.json`).
        script_args: the script's own arguments.
        batch_size: samples per step of one worker; None for the script's own.
        timeout_s: how long a script may take to come to its training; None for as long as it likes.
        is_module: whether `model` is the name of a module, as for `python -m`.
        again: whether it is read even if one is kept.
        tell: is told in one line that a script's kept one is used.

    Raises:
        BadInputError: if there is no profile to be had; the message says why in one sentence.
    """
    _check_batch_size(batch_size)
    if not is_module and model.endswith(".json"):
        if again:
            raise BadInputError(f"{model} is a saved profile, which --refresh-profile cannot read again; leave it out.")
        return load_saved_profile(model, batch_size)
    if not is_module and model.startswith(_KERAS_PREFIX):
        reading = _Reading(model, (), batch_size, _environment(os.environ))
        settings = {name: value for name, value in os.environ.items() if name in _OF_KERAS}
        read = functools.partial(reading.profile, timeout_s)
        return kept_profile(model, [model, batch_size], settings, read, again=again).profile
    if not is_module:
        _check_readable(model)
    entry = find_entry_point(model, is_module=is_module)
    environment = _environment({**os.environ, **entry.environment})
    script = str(entry.script) if is_module else model
    reading = _Reading(script, script_args, batch_size, environment)
    # Late: a saved profile travels nowhere.
    from framework.project import bundle

    known = {name: value for name, value in environment.items() if not _OF_A_TERMINAL.fullmatch(name)}
    try:
        content = content_of(entry.folder, bundle.travelling(entry.folder))
    except BadInputError:
        content = None
    inputs = _inputs(entry, content, ["in", os.getcwd(), script, *script_args], batch_size)
    read = functools.partial(reading.profile, timeout_s)
    found = kept_profile(entry.script.stem, inputs, known, read, again=again)
    if found.is_kept:
        tell(_as_it_was(found, entry))
    return found.profile


def profile_of_job(
    entry: EntryPoint,
    archive: bytes,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    batch_size: int | None = None,
    checkpoint_dir: str | None = None,
    forks: Forks | None = None,
    *,
    again: bool = False,
    serves: Callable[[ModelProfile], bool] = lambda profile: True,
    tell: Callable[[str], None] = _ignore,
) -> KnownProfile:
    """The profile of a script that is about to run as a job: read in the world that its tasks will see.

    It runs in a copy of the folder that travels, with the variables that travel, if no profile is kept of this very
    world. What it prints until its training begins is shown if it fails or takes long: its chief will print it again.

    Args:
        entry: the script.
        archive: what travels (`framework.project.bundle.pack`).
        arguments: the script's own.
        environment: what its tasks get (`framework.project.entry_point.environment_for_tasks`).
        batch_size: samples per step of one worker; None for the script's own.
        checkpoint_dir: an earlier run's folder: what that has written is there again.
        forks: where a process can be had that has imported TensorFlow; None to start one that does so itself.
        again: whether it is read even if one is kept.
        serves: whether a kept one will do.
        tell: is told in one line that it is being read, or that a kept one is used.

    Raises:
        BadInputError: if there is no profile to be had; the message says why in one sentence, and what may help.
    """
    # Late: a saved profile travels nowhere.
    from executor import bundle as archives
    from executor import outputs

    _check_batch_size(batch_size)
    for_tasks = dict(environment or {})
    with tempfile.TemporaryDirectory(prefix="dike-world-") as world:
        folder = Path(world).resolve() / (entry.folder.name or "folder")
        checkpoints = Path(world).resolve() / "checkpoints"
        try:
            folder.mkdir()
            checkpoints.mkdir()
            archives.unpack(io.BytesIO(archive), folder)
            if checkpoint_dir is not None:
                outputs.restore_into(folder, checkpoint_dir)
        except (OSError, archives.BundleError) as error:
            raise BadInputError(f"The script's folder cannot be copied to {world}: {error}.") from error
        own = {
            **planning_environment(for_tasks),
            **dict(zip(_OF_A_WORLD, (str(folder), str(checkpoints)), strict=True)),
        }
        shown_as = (os.fsencode(folder), os.fsencode(entry.folder))
        reading = _Reading(entry.path, arguments, batch_size, _environment(own), folder, shown_as, forks)

        def read() -> ModelProfile:
            tell(f"reading the model of {entry.path}")
            try:
                return reading.profile(None)
            except BadInputError as error:
                said = str(error).replace(str(folder), str(entry.folder))
                raise BadInputError(f"{said} {hint(said, entry, for_tasks)}".rstrip()) from None

        known = {name: value for name, value in reading.environment.items() if name not in (*_OF_A_WORLD, "DIKE_CACHE")}
        content = content_of(folder, folder.rglob("*"))
        inputs = _inputs(entry, content, ["job", folder.name, entry.path, *arguments], batch_size)
        found = kept_profile(entry.script.stem, inputs, known, read, again=again, serves=serves)
        if found.is_kept:
            tell(_as_it_was(found, entry))
        return found


def _inputs(entry: EntryPoint, content: str | None, call: Sequence[str], batch_size: int | None) -> object:
    """What a script's model depends on, as JSON values; None if that is not known.

    Args:
        entry: the script.
        content: a hash of the files that it finds.
        call: where it runs, and its arguments.
        batch_size: samples per step of one worker; None for the script's own.
    """
    if content is None:
        return None
    try:
        return [content, list(call), entry.module, batch_size, libraries(imported_libraries(entry))]
    except BadInputError:
        return None  # it is no Python: who runs it says where


def _as_it_was(found: KnownProfile, entry: EntryPoint) -> str:
    read = time.strftime("%Y-%m-%d %H:%M", time.localtime(found.read_s))
    return f"the model of {entry.path} is as it was on {read} (--refresh-profile reads it again)"


def _check_batch_size(batch_size: int | None) -> None:
    if batch_size is not None and batch_size < 1:
        raise BadInputError(f"The batch size must be at least 1, not {batch_size}.")


def _check_readable(model: str) -> None:
    if not os.path.exists(model):
        raise BadInputError(f"There is no file {model}; give a training script, a saved profile (.json) or keras:NAME.")
    if os.path.isdir(model):
        raise BadInputError(f"{model} is a folder; give the training script in it.")
    read_text(Path(model), "training script")


@dataclass(frozen=True)
class _Reading:
    """A child process that runs a script up to its training.

    Attributes:
        model: a script or `keras:NAME`.
        arguments: the script's own.
        batch_size: samples per step of one worker; None for the script's own.
        environment: the child's.
        folder: its working folder; None for ours.
        shown_as: what its output calls that folder, and what it is shown as; None shows all output as it comes.
        forks: where the child is forked; None starts it anew.
    """

    model: str
    arguments: Sequence[str]
    batch_size: int | None
    environment: Mapping[str, str]
    folder: Path | None = None
    shown_as: tuple[bytes, bytes] | None = None
    forks: Forks | None = None

    def profile(self, timeout_s: float | None) -> ModelProfile:
        """What the child has found.

        Raises:
            BadInputError: if it has found none.
        """
        with tempfile.TemporaryDirectory(prefix="dike-profile-") as folder:
            output = Path(folder) / "profile.json"
            options = ["--output", str(output)]
            if self.batch_size is not None:
                options += ["--batch-size", str(self.batch_size)]
            prints = _Prints(self.shown_as, os.path.basename(self.model))
            code = self._run([*options, self.model, *self.arguments], timeout_s, prints)
            try:
                data = json.loads(output.read_text(encoding="utf-8"))
            except (FileNotFoundError, json.JSONDecodeError):
                how = "" if code is None else f" (exit code {code})"
                name = os.path.basename(self.model)
                data = {"error": f"{name} ended its own process before its training began{how}."}
        if "error" in data:
            prints.show()
            raise BadInputError(data["error"])
        return ModelProfile.from_json(data)

    def _run(self, arguments: Sequence[str], timeout_s: float | None, prints: _Prints) -> int | None:
        """Runs the child; what it prints goes to standard error, for standard output may be wanted for JSON.

        Returns:
            Its exit code; None of a fork, which is another's child.
        """
        code = None
        reader, writer = os.pipe()
        try:
            pid = self._start(arguments, writer)
        finally:
            os.close(writer)
        ended: int | None = None
        with contextlib.suppress(ProcessLookupError):  # a fork that has ended: its parent has seen to it
            ended = os.pidfd_open(pid)
        # A thread, so that the time-out holds for a script that prints nothing.
        printer = threading.Thread(target=prints.follow, args=(os.fdopen(reader, "rb"),), daemon=True)
        printer.start()
        patience = threading.Timer(SHOWN_AFTER_S, prints.show_late)
        patience.daemon = True
        patience.start()
        try:
            if ended is not None and not wait_readable([ended], timeout_s):
                prints.show()
                raise BadInputError(
                    f"{os.path.basename(self.model)} did not come to its training within {timeout_s:.0f} s."
                )
        except KeyboardInterrupt:
            prints.show()
            raise
        finally:
            patience.cancel()
            with contextlib.suppress(ProcessLookupError):  # where all of them have ended
                os.killpg(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):  # of a fork
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if ended is not None:
                os.close(ended)
            # A daemon that the script has started in a session of its own may hold the pipe open for ever.
            printer.join(PRINTS_DRAIN_S)
        return code

    def _start(self, arguments: Sequence[str], output: int) -> int:
        """Starts the child in a session of its own: whatever processes the script starts can then be ended with it."""
        if self.forks is not None:
            pid = self.forks.fork(arguments, self.folder or Path.cwd(), self.environment, output)
            if pid is not None:
                return pid
        with open(os.devnull, "rb") as nothing:
            child = subprocess.Popen(
                # -P: a script's folder may hold files named as our packages or as Python's own.
                [sys.executable, "-P", "-u", "-m", CAPTURE, *arguments],
                cwd=self.folder,
                stdin=nothing,
                stdout=output,
                stderr=output,
                env=dict(self.environment),
                start_new_session=True,
            )
        child.returncode = 0  # its end is ours to wait for
        return child.pid


@dataclass(frozen=True)
class Forks:
    """A zygote server (`executor.zygote_server`), and the kind of zygote that a job's tasks are forked from.

    Attributes:
        path: the server's socket.
        kind: of zygote.
    """

    path: str
    kind: ZygoteKind

    @classmethod
    def of_job(cls, path: str, entry: EntryPoint, for_tasks: Mapping[str, str]) -> Forks | None:
        """Has a zygote for a job's tasks begin to import; None if its script cannot be read.

        Args:
            path: the server's socket.
            entry: the script.
            for_tasks: what its tasks get of our environment.
        """
        try:
            setup = Setup(LAUNCHER, script_facts(entry).preload, for_tasks)
        except BadInputError:
            return None  # whoever runs it says so
        forks = cls(path, setup.kind({}))
        warm_soon(path, forks.kind)
        return forks

    def fork(self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str], output: int) -> int | None:
        """Forks a process that reads a model; returns its id, None if that cannot be."""
        script, *others = arguments
        changes = self.kind.changes(environment)
        request = ForkRequest(Path(script), others, folder, changes, module=f"{CAPTURE}.__main__")
        answers: list[int | str] = []
        wait_for_server(self.path)
        served = ZygoteServerClient(self.path)
        try:
            served.request_fork(self.kind, request, [output, output], answers.append)
            while not answers:
                wait_readable(served.watched_fds, None)
                served.poll()
        finally:
            served.close()
        if isinstance(answers[0], int):
            return answers[0]
        logger.warning("the model is not read in a fork: %s", answers[0])
        return None


class _Prints:
    """What the child prints: shown as it comes, or kept until it is known whether somebody has to see it.

    Args:
        shown_as: see `_Reading`.
        name: the script's.
    """

    def __init__(self, shown_as: tuple[bytes, bytes] | None, name: str) -> None:
        self._shown_as = shown_as
        self._name = name
        self._kept: list[bytes] = []
        self._is_shown = shown_as is None
        self._lock = threading.Lock()

    def follow(self, prints: BinaryIO) -> None:
        """Takes lines in until their source ends."""
        tensorflow_noise.forward(prints, self)

    def write(self, line: bytes) -> None:
        """Takes one line in."""
        if self._shown_as is not None:
            line = line.replace(*self._shown_as)
        with self._lock:
            self._kept.append(line)
            if self._is_shown:
                self._flush()

    def flush(self) -> None:
        """Lines are shown at once, or later on purpose."""

    def show_late(self) -> None:
        """Shows the same, of a script that takes long."""
        with self._lock:
            if not self._is_shown:
                prints = "; it prints" if self._kept else ""
                self._kept.insert(0, f"dike: {self._name} has not come to its training yet{prints}\n".encode())
        self.show()

    def show(self) -> None:
        """Shows what was kept back, and whatever comes."""
        with self._lock:
            self._is_shown = True
            self._flush()

    def _flush(self) -> None:
        with open(_STDERR, "wb", closefd=False) as target:
            target.writelines(self._kept)
        self._kept.clear()


def _environment(values: Mapping[str, str]) -> dict[str, str]:
    """A child's environment, with what it needs besides."""
    environment = {key: value for key, value in values.items() if key not in ("DIKE_MASTER", "DIKE_TASK")}
    environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # Reading a model needs no GPU memory; TensorFlow would take all of it.
    environment.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    return environment
