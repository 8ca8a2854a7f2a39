"""Gets the profile of a model from a saved file, or from a child process that imports TensorFlow."""

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

from dike.capture.sink import loop_profile
from dike.exceptions import BadInputError
from dike.profile import ModelProfile
from executor.environment import Setup, ZygoteKind
from executor.messages import LAUNCHER
from executor.process import wait_readable
from executor.zygote import ForkRequest
from executor.zygote_pool import ZygoteServerClient, wait_for_server, warm_soon
from framework.project import tensorflow_noise
from framework.project.entry_point import EntryPoint, find_entry_point, hint, planning_environment
from framework.project.profile_cache import CachedProfile, cached_profile, content_of, libraries
from framework.project.script_facts import imported_libraries, own_distribution, script_facts
from solver.cli.profiles import load_saved_profile
from solver.text_files import read_text

logger = logging.getLogger(__name__)

CAPTURE = "dike.capture"
"""Runs a script up to its training."""
_KERAS_PREFIX = "keras:"
_STDERR = 2
_KERAS_VARIABLES = ("TF_USE_LEGACY_KERAS", "KERAS_BACKEND", "KERAS_HOME")
"""Variables that select the Keras of a model of `keras.applications`."""
_JOB_FOLDER_VARIABLES = ("DIKE_OUTPUT_DIR", "DIKE_CHECKPOINT_DIR")
"""Variables that name a job's own folders."""
OUTPUT_DRAIN_TIMEOUT_S = 2.0
SHOW_OUTPUT_AFTER_S = 10.0
"""Delay before the output of a slow script is shown."""
_TERMINAL_VARIABLES = re.compile(
    r"_|OLDPWD|PWD|SHLVL|COLUMNS|LINES|DISPLAY|WINDOWID|STY|LS_COLORS|PS1|PROMPT_COMMAND|DIKE_LOG|DIKE_CACHE|"
    r"(TERM|TERMINAL|COLORTERM|TMUX|SSH|GPG|DBUS|XDG_SESSION|XDG_RUNTIME|VTE|VSCODE|ITERM|KITTY|WAYLAND)(_.*)?"
)
"""Variables that differ between terminals and on which no model depends."""


def _ignore(text: str) -> None: ...


def load_profile(
    model: str,
    script_args: Sequence[str] = (),
    batch_size: int | None = None,
    timeout_s: float | None = None,
    *,
    is_module: bool = False,
    refresh: bool = False,
    strategy: str = "auto",
    notify: Callable[[str], None] = _ignore,
) -> ModelProfile:
    """Returns the profile of `model`, cached or read in this environment: a script runs in the working folder with its
    output shown.

    Args:
        model: a training script, `keras:NAME` or a saved profile (`.json`).
        script_args: the script's arguments.
        batch_size: samples per step of one worker; None for the script's own.
        timeout_s: maximum time until the script's training begins; None for no limit.
        is_module: whether `model` is the name of a module, as for `python -m`.
        refresh: whether to read it even if one is cached.
        strategy: see `profile_unread`.
        notify: receives one line if a script's cached profile is used.

    Raises:
        BadInputError: there is no profile; the message says why in one sentence.
    """
    _check_batch_size(batch_size)
    if not is_module and model.endswith(".json"):
        if refresh:
            raise BadInputError(f"{model} is a saved profile, which --refresh-profile cannot read again; leave it out.")
        return load_saved_profile(model, batch_size)
    if not is_module and model.startswith(_KERAS_PREFIX):
        reading = _ProfilingProcess(model, (), batch_size, _environment(os.environ))
        settings = {name: value for name, value in os.environ.items() if name in _KERAS_VARIABLES}
        read = functools.partial(reading.profile, timeout_s)
        return cached_profile(model, [model, batch_size], settings, read, refresh=refresh).profile
    if not is_module:
        _check_readable(model)
    entry = find_entry_point(model, is_module=is_module)
    with contextlib.suppress(BadInputError):  # not Python: running it reports where
        if (unread := profile_unread(entry, batch_size, strategy)) is not None:
            return unread
    environment = _environment({**os.environ, **entry.environment})
    script = str(entry.script) if is_module else model
    reading = _ProfilingProcess(script, script_args, batch_size, environment)
    # Imported late: a saved profile needs no bundle.
    from framework.project import bundle

    known = {name: value for name, value in environment.items() if not _TERMINAL_VARIABLES.fullmatch(name)}
    try:
        content = content_of(entry.folder, bundle.bundled_files(entry.folder))
    except BadInputError:
        content = None
    inputs = _inputs(entry, content, ["in", os.getcwd(), script, *script_args], batch_size)
    read = functools.partial(reading.profile, timeout_s)
    found = cached_profile(entry.script.stem, inputs, known, read, refresh=refresh)
    if found.is_cached:
        notify(_cache_note(found, entry))
    return found.profile


def profile_of_job(
    entry: EntryPoint,
    archive: bytes,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    batch_size: int | None = None,
    checkpoint_dir: str | None = None,
    zygotes: JobZygotes | None = None,
    *,
    refresh: bool = False,
    is_acceptable: Callable[[ModelProfile], bool] = lambda profile: True,
    notify: Callable[[str], None] = _ignore,
) -> CachedProfile:
    """Returns the profile of a script about to run as a job, cached or read as its tasks will see it.

    The script runs in a copy of the bundle, with the variables of its tasks. Its output before training is shown only
    if it fails or takes long, as the chief will print it again.

    Args:
        entry: the script.
        archive: the bundle (`framework.project.bundle.pack`).
        arguments: the script's arguments.
        environment: variables of its tasks (`framework.project.entry_point.environment_for_tasks`).
        batch_size: samples per step of one worker; None for the script's own.
        checkpoint_dir: an earlier run's folder, whose outputs are restored first.
        zygotes: forks processes that have imported TensorFlow; None starts one that imports it.
        refresh: whether to read it even if one is cached.
        is_acceptable: whether a cached one is acceptable.
        notify: receives one line if the profile is read, or a cached one is used.

    Raises:
        BadInputError: there is no profile; the message says why in one sentence, with a hint if there is one.
    """
    # Imported late: a saved profile needs no bundle.
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
            **dict(zip(_JOB_FOLDER_VARIABLES, (str(folder), str(checkpoints)), strict=True)),
        }
        shown_as = (os.fsencode(folder), os.fsencode(entry.folder))
        reading = _ProfilingProcess(entry.path, arguments, batch_size, _environment(own), folder, shown_as, zygotes)

        def read() -> ModelProfile:
            notify(f"reading the model of {entry.path}")
            try:
                return reading.profile(None)
            except BadInputError as error:
                said = str(error).replace(str(folder), str(entry.folder))
                raise BadInputError(f"{said} {hint(said, entry, for_tasks)}".rstrip()) from None

        known = {
            name: value
            for name, value in reading.environment.items()
            if name not in (*_JOB_FOLDER_VARIABLES, "DIKE_CACHE")
        }
        content = content_of(folder, folder.rglob("*"))
        inputs = _inputs(entry, content, ["job", folder.name, entry.path, *arguments], batch_size)
        found = cached_profile(entry.script.stem, inputs, known, read, refresh=refresh, is_acceptable=is_acceptable)
        if found.is_cached:
            notify(_cache_note(found, entry))
        return found


def profile_unread(entry: EntryPoint, batch_size: int | None = None, strategy: str = "auto") -> ModelProfile | None:
    """The profile of a script that distributes itself, whose model Dike cannot read; None of any other.

    Args:
        entry: the script.
        batch_size: samples per step; None if unknown.
        strategy: `allreduce` if the user says that it distributes itself; a script with TensorFlow is read even so.
    """
    library = own_distribution(entry)
    if (
        not library
        and strategy == "allreduce"
        and not {"tensorflow", "keras", "tf_keras", "dike"} & set(imported_libraries(entry))
    ):
        library = "means of its own"
    if not library:
        return None
    return loop_profile(entry.script.name, f"with {library}", (), batch_size, library)


def _inputs(entry: EntryPoint, content: str | None, call: Sequence[str], batch_size: int | None) -> object:
    """Inputs of a script's model, as JSON values; None if unknown.

    Args:
        entry: the script.
        content: hash of its files.
        call: where it runs, and its arguments.
        batch_size: as for `load_profile`.
    """
    if content is None:
        return None
    try:
        return [content, list(call), entry.module, batch_size, libraries(imported_libraries(entry))]
    except BadInputError:
        return None  # not Python: running it reports where


def _cache_note(found: CachedProfile, entry: EntryPoint) -> str:
    read = time.strftime("%Y-%m-%d %H:%M", time.localtime(found.read_s))
    return f"using the profile of {entry.path} read on {read} (--refresh-profile reads it again)"


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
class _ProfilingProcess:
    """A child process that runs a script up to its training.

    Attributes:
        model: a script or `keras:NAME`.
        batch_size: samples per step of one worker; None for the script's own.
        folder: its working folder; None for the current one.
        shown_as: that folder in its output, and the replacement shown; None shows all output immediately.
        zygotes: forks the child; None starts a new interpreter.
    """

    model: str
    arguments: Sequence[str]
    batch_size: int | None
    environment: Mapping[str, str]
    folder: Path | None = None
    shown_as: tuple[bytes, bytes] | None = None
    zygotes: JobZygotes | None = None

    def profile(self, timeout_s: float | None) -> ModelProfile:
        """Runs the child and returns its profile.

        Raises:
            BadInputError: there is none.
        """
        with tempfile.TemporaryDirectory(prefix="dike-profile-") as folder:
            output = Path(folder) / "profile.json"
            options = ["--output", str(output)]
            if self.batch_size is not None:
                options += ["--batch-size", str(self.batch_size)]
            output_buffer = _ChildOutput(self.shown_as, os.path.basename(self.model))
            code = self._run([*options, self.model, *self.arguments], timeout_s, output_buffer)
            try:
                data = json.loads(output.read_text(encoding="utf-8"))
            except (FileNotFoundError, json.JSONDecodeError):
                how = "" if code is None else f" (exit code {code})"
                name = os.path.basename(self.model)
                data = {"error": f"{name} ended its own process before its training began{how}."}
        if "error" in data:
            output_buffer.show()
            raise BadInputError(data["error"])
        return ModelProfile.from_json(data)

    def _run(self, arguments: Sequence[str], timeout_s: float | None, output_buffer: _ChildOutput) -> int | None:
        """Runs the child; its output goes to standard error, as standard output may carry JSON.

        Returns:
            Its exit code; None for a fork, which is another process's child.
        """
        code = None
        reader, writer = os.pipe()
        try:
            pid = self._start(arguments, writer)
        finally:
            os.close(writer)
        ended: int | None = None
        with contextlib.suppress(ProcessLookupError):  # a fork that has ended and was reaped by its parent
            ended = os.pidfd_open(pid)
        # A thread, so that the timeout also works for a script that prints nothing.
        printer = threading.Thread(target=output_buffer.follow, args=(os.fdopen(reader, "rb"),), daemon=True)
        printer.start()
        patience = threading.Timer(SHOW_OUTPUT_AFTER_S, output_buffer.show_late)
        patience.daemon = True
        patience.start()
        try:
            if ended is not None and not wait_readable([ended], timeout_s):
                output_buffer.show()
                raise BadInputError(f"{os.path.basename(self.model)} did not begin to train within {timeout_s:.0f} s.")
        except KeyboardInterrupt:
            output_buffer.show()
            raise
        finally:
            patience.cancel()
            with contextlib.suppress(ProcessLookupError):  # all have ended
                os.killpg(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):  # of a fork
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if ended is not None:
                os.close(ended)
            # A daemon in a session of its own may keep the pipe open indefinitely.
            printer.join(OUTPUT_DRAIN_TIMEOUT_S)
        return code

    def _start(self, arguments: Sequence[str], output: int) -> int:
        """Starts the child in a session of its own, so that all processes of the script can be killed with it."""
        if self.zygotes is not None:
            pid = self.zygotes.fork(arguments, self.folder or Path.cwd(), self.environment, output)
            if pid is not None:
                return pid
        with open(os.devnull, "rb") as nothing:
            child = subprocess.Popen(
                # -P: a script's folder may contain modules named like those of Dike or Python.
                [sys.executable, "-P", "-u", "-m", CAPTURE, *arguments],
                cwd=self.folder,
                stdin=nothing,
                stdout=output,
                stderr=output,
                env=dict(self.environment),
                start_new_session=True,
            )
        child.returncode = 0  # reaped in _run
        return child.pid


@dataclass(frozen=True)
class JobZygotes:
    """A zygote server (`executor.zygote_server`) and the kind of zygote of a job's tasks.

    Attributes:
        path: the server's socket.
    """

    path: str
    kind: ZygoteKind

    @classmethod
    def warm_up(cls, path: str, entry: EntryPoint, for_tasks: Mapping[str, str]) -> JobZygotes | None:
        """Starts warming up a zygote for a job's tasks; None if its script cannot be read."""
        try:
            setup = Setup(LAUNCHER, script_facts(entry).preload, for_tasks)
        except BadInputError:
            return None  # reported when the script runs
        zygotes = cls(path, setup.kind({}))
        warm_soon(path, zygotes.kind)
        return zygotes

    def fork(self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str], output: int) -> int | None:
        """Forks a process that reads a model; returns its id, None if that fails."""
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
        logger.warning("the profile cannot be read in a fork: %s", answers[0])
        return None


class _ChildOutput:
    """Output of the child: shown immediately, or buffered until it must be shown.

    Args:
        shown_as: see `_ProfilingProcess`.
    """

    def __init__(self, shown_as: tuple[bytes, bytes] | None, name: str) -> None:
        self._shown_as = shown_as
        self._name = name
        self._kept: list[bytes] = []
        self._is_shown = shown_as is None
        self._lock = threading.Lock()

    def follow(self, source: BinaryIO) -> None:
        tensorflow_noise.forward(source, self)

    def write(self, line: bytes) -> None:
        if self._shown_as is not None:
            line = line.replace(*self._shown_as)
        with self._lock:
            self._kept.append(line)
            if self._is_shown:
                self._flush()

    def flush(self) -> None:
        """No-op: `write` flushes if the output is shown."""

    def show_late(self) -> None:
        """Shows the output of a slow script, with a note."""
        with self._lock:
            if not self._is_shown:
                note = "; it prints" if self._kept else ""
                self._kept.insert(0, f"dike: {self._name} has not begun to train yet{note}\n".encode())
        self.show()

    def show(self) -> None:
        """Shows all buffered and further output."""
        with self._lock:
            self._is_shown = True
            self._flush()

    def _flush(self) -> None:
        with open(_STDERR, "wb", closefd=False) as target:
            target.writelines(self._kept)
        self._kept.clear()


def _environment(values: Mapping[str, str]) -> dict[str, str]:
    environment = {key: value for key, value in values.items() if key not in ("DIKE_MASTER", "DIKE_TASK")}
    environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # Reading a model needs no GPU memory; TensorFlow would take all of it.
    environment.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    return environment
