"""Python processes that have made their imports: forks of a process that has what `dike` and its services import.

`Warm` is `subprocess.Popen` for a command `[sys.executable, ...]`. The module, the script or the code (`-c`) runs as in
a Python of its own, but a second of processor time earlier; as `WarmTensorFlow`, three seconds. What is imported when
is the matter of `tests/cli/test_start.py`. All processes that run tests share one of each kind, as long as one of them
is there.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import importlib
import itertools
import json
import os
import re
import runpy
import select
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

MODULES = {
    "dike": (
        *(
            f"framework.cli.{name}"
            for name in ("logs", "plot", "run", "search_view", "serve", "submit", "trials", "tune")
        ),
        "framework.project.profiling",
        "framework.search.importance",
        "framework.search.plots",
        "framework.search.run",
        "framework.service.api.app",
        "framework.service.serve",
        "framework.training.run",
        # What these import when it is needed.
        "httpx",
        "matplotlib.backends.backend_agg",
        "matplotlib.backends.backend_svg",
        "matplotlib.figure",
        "optuna",
        "uvicorn.protocols.http.h11_impl",
    ),
    "tensorflow": ("tensorflow", "keras", "tf_keras", "sklearn.datasets", "sklearn.model_selection"),
}
REQUEST_BYTES = 1 << 17
GC_THRESHOLD = 10_000
"""What commands have; tests have it, too."""
FOLDER_VARIABLE = "DIKE_TESTS_WARM"
"""The environment variable with the folder of the sockets, the same for all processes that run tests."""
LOCK = ".lock"
"""A file beside each socket, which a client locks while it connects."""
_FOR_FORKS = {
    "dike": re.compile(r"(DIKE|PYTEST)_\w+|XDG_CONFIG_HOME"),
    "tensorflow": re.compile(
        r"(DIKE|PYTEST)_\w+|PYTHONPATH|OMP_NUM_THREADS|CUDA_VISIBLE_DEVICES|TF_(CPP|NUM|USE_LEGACY|FORCE)_\w+"
    ),
}
"""Variables that no module reads during import."""
_FOR_SERVERS = {
    "dike": {},
    # Pools of one thread, as those of `dike.zygote`: a fork cannot lose any.
    "tensorflow": {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"},
}
_FOR_IMPORTS = re.compile(r"PYTHON\w+|LD_\w+|TMPDIR|LANG|LC_\w+|TZ|COLUMNS|\w*(COLOR|TERM|TYPER)\w*|(TF|KERAS|XLA)_\w+")
"""Variables that one may read, or Python itself; what others are set meanwhile is for forks alone."""
ENVIRONMENT: dict[str, str] = {}
"""As the tests begin, by `tests/conftest.py`: what they change later is for the processes that they start."""
_asking = threading.Lock()


class Warm(subprocess.Popen[Any]):
    """See the module. With environment variables that may change imports, it starts a separate Python instead."""

    imported: ClassVar[str] = "dike"
    _status: int | None = None

    # Signatures as in CPython 3.11 to 3.14.

    def _execute_child(
        self,
        args: Any,
        executable: Any,
        preexec_fn: Any,
        close_fds: Any,
        pass_fds: Any,
        cwd: Any,
        env: Mapping[str, str] | None,
        startupinfo: Any,
        creationflags: Any,
        shell: Any,
        *others: Any,
    ) -> None:
        environment = dict(os.environ if env is None else env)
        if args[0] != sys.executable or pass_fds or not _imports_alike(self.imported, environment):
            before = (executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell)
            super()._execute_child(args, *before, *others)  # type: ignore[misc]
            return
        sys.audit("subprocess.Popen", args[0], args, cwd, env)
        pipes = others[:6]
        streams = [end if end != -1 else standard for standard, end in enumerate((pipes[0], pipes[3], pipes[5]))]
        arguments = [os.fspath(argument) for argument in args[1:]]
        request = {
            "argv": arguments,
            "folder": os.fspath(cwd or os.getcwd()),
            "environment": environment,
            "new_session": bool(others[11]),
        }
        self._status, theirs = os.pipe()
        with _asking:
            server = _server(self.imported)
            socket.send_fds(server, [json.dumps(request).encode()], [*streams, theirs])
            self.pid = int(server.recv(32))
        os.close(theirs)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._status is None:
            return super()._try_wait(wait_flags)  # type: ignore[misc, no-any-return]
        if wait_flags & os.WNOHANG and not select.select([self._status], [], [], 0)[0]:
            return 0, 0
        return self.pid, int(os.read(self._status, 32))

    def _internal_poll(self, *others: Any, **named: Any) -> Any:
        return super()._internal_poll(*others, _waitpid=lambda _, flags: self._try_wait(flags), **named)  # type: ignore[misc]

    def _handle_exitstatus(self, *others: Any) -> None:
        super()._handle_exitstatus(*others)  # type: ignore[misc]
        if self._status is not None:
            os.close(self._status)
            self._status = None


class WarmTensorFlow(Warm):
    """A fork of a process that has imported TensorFlow, and has run no op."""

    imported = "tensorflow"


def run(
    command: Sequence[str | Path], timeout: float, process_class: type[Warm] = Warm, **options: Any
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` of a command, whose output is captured as text."""
    with process_class(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def in_tensorflow(function: Callable[..., None], *arguments: str, timeout: float = 60.0) -> None:
    """Calls a function of a module in a process that has imported TensorFlow; what it asserts is asserted here."""
    call = f"import sys; from {function.__module__} import {function.__name__} as call; call(*sys.argv[1:])"
    root = Path(__file__).parents[1]
    done = run([sys.executable, "-c", call, *arguments], timeout, WarmTensorFlow, cwd=root)
    assert done.returncode == 0, done.stderr


def _imports_alike(imported: str, environment: Mapping[str, str]) -> bool:
    names = {*ENVIRONMENT, *filter(_FOR_IMPORTS.fullmatch, environment)}
    names = {name for name in names if not _FOR_FORKS[imported].fullmatch(name)}
    return all(environment.get(name) == ENVIRONMENT.get(name) for name in names)


@functools.cache
def _server(imported: str) -> socket.socket:
    """Connected to the process that forks, which answers each request with a process id; starts it if there is none."""
    path = Path(os.environ[FOLDER_VARIABLE], imported)
    with path.with_suffix(LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):  # none yet, or one that was killed
            connection.connect(str(path))
            return connection
        connection.close()
        path.unlink(missing_ok=True)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(path))
            listener.listen()
            kept = {name: value for name, value in ENVIRONMENT.items() if not _FOR_FORKS[imported].fullmatch(name)}
            subprocess.Popen(
                [sys.executable, "-m", "tests.warm", str(listener.fileno()), str(theirs.fileno()), imported],
                cwd=Path(__file__).parents[1],
                env=kept | _FOR_SERVERS[imported],
                stdin=subprocess.DEVNULL,
                pass_fds=[listener.fileno(), theirs.fileno()],
            )
    return ours


def _is_given_up(listener: socket.socket, path: Path) -> bool:
    """Removes the socket, unless a client is about to connect."""
    try:
        lock = path.with_suffix(LOCK).open("w")
    except FileNotFoundError:  # the tests have ended, and their folder is gone
        return True
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if select.select([listener], [], [], 0)[0]:
            return False
        path.unlink(missing_ok=True)
    return True


def _serve(listener: socket.socket, first: socket.socket) -> list[str] | None:
    """Forks until the last client disconnects; in a fork, returns the arguments that a Python would have."""
    clients = {first}
    running: dict[int, tuple[int, int]] = {}
    path = Path(listener.getsockname())
    while clients or not _is_given_up(listener, path):
        readable, _, _ = select.select([listener, *clients, *running], [], [])
        for ended in running.keys() & set(readable):
            pid, status = running.pop(ended)
            os.close(ended)
            with contextlib.suppress(BrokenPipeError):  # the client has disconnected
                os.write(status, str(os.waitpid(pid, 0)[1]).encode())
            os.close(status)
        if listener in readable:
            clients.add(listener.accept()[0])
        for client in clients.intersection(readable):
            data, descriptors, _, _ = socket.recv_fds(client, REQUEST_BYTES, 4)
            if not data:
                clients.remove(client)
                client.close()
                continue
            *streams, status = descriptors
            pid = os.fork()
            if not pid:
                known = (descriptor for _, descriptor in running.values())
                for inherited in (listener.detach(), *(one.detach() for one in clients), status, *running, *known):
                    os.close(inherited)
                for standard, stream in enumerate(streams):
                    os.dup2(stream, standard)
                    os.close(stream)
                request = json.loads(data)
                if request["new_session"]:
                    os.setsid()
                os.environ.clear()
                os.environ.update(request["environment"])
                os.chdir(request["folder"])
                return list(request["argv"])
            client.send(str(pid).encode())
            for stream in streams:
                os.close(stream)
            running[os.pidfd_open(pid)] = pid, status
    return None


def _become(arguments: list[str]) -> None:
    """What Python does with its arguments."""
    own = list(itertools.takewhile(("-P", "-u").__contains__, arguments))
    how, *others = arguments[len(own) :]
    is_safe = "-P" in own
    if "-u" in own:
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    searched = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [os.path.abspath(path) for path in searched if path]
    if how == "-m":
        sys.path[:0] = [] if is_safe else [os.getcwd()]
        sys.argv[1:] = others[1:]
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
    elif how == "-c":
        sys.path[:0] = [] if is_safe else [""]
        sys.argv[:] = ["-c", *others[1:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(others[0], "<string>", "exec"), main.__dict__)
    else:
        sys.path[:0] = [] if is_safe else [os.path.dirname(os.path.abspath(how))]
        sys.argv[:] = [how, *others]
        runpy.run_path(how, run_name="__main__")


def read_migrations_once() -> None:
    """Optuna reads its eleven scripts of migrations three times for each database, which takes 0.2 s."""
    from optuna.storages._rdb.storage import _VersionManager

    read = _VersionManager._create_alembic_script
    known: list[Any] = []

    def read_once(manager: Any) -> Any:
        # They are the same whichever the database.
        if not known:
            known.append(read(manager))
        return known[0]

    _VersionManager._create_alembic_script = read_once  # type: ignore[method-assign]


def _main() -> None:
    listener, first, imported = sys.argv[1:]
    for name in MODULES[imported]:
        importlib.import_module(name)
    if imported == "dike":
        from optuna.storages import RDBStorage

        read_migrations_once()
        RDBStorage("sqlite://").engine.dispose()
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    if arguments := _serve(socket.socket(fileno=int(listener)), socket.socket(fileno=int(first))):
        _become(arguments)


if __name__ == "__main__":
    _main()
