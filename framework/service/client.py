"""`dike.Client`: a service from Python.

The user's process may have files named `solver.py` or `executor.py`, so this module imports neither of those packages.
The `dike` command, in a process of its own, does what reads a script: its bundle, its model's profile, its flags.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dike.exceptions import BadInputError, DikeError
from dike.trial.search_space import to_yaml
from framework.service.access import DEFAULT_SERVICE, SERVICE_VARIABLE, TOKEN_VARIABLE, ServiceAccess
from framework.service.api.client import ServiceClient
from framework.service.api.schemas import JobDetails, Submitted

RESERVED_OPTIONS = frozenset({"detach", "follow", "format", "save", "service", "token_file", "wait"})
"""Options that would change what the commands print."""
_COMMAND = (sys.executable, "-P", "-m", "framework")
_MESSAGE_PREFIX = "dike: "


class Client(ServiceClient):
    """A client of a service; methods return the models of its REST API.

    Args:
        url: the service's address; None for `$DIKE_SERVICE`, else `http://127.0.0.1:8680`.
        token: the token; None for `$DIKE_TOKEN`, else that of this account's own local service.

    Raises:
        BadInputError: from every method, if no service answers or it refuses the request.
        DikeError: from every method, if the service fails.
    """

    def __init__(self, url: str | None = None, token: str | None = None) -> None:
        access = ServiceAccess(url or os.environ.get(SERVICE_VARIABLE) or DEFAULT_SERVICE)
        self._token = token or access.token()
        super().__init__(access.url, self._token)

    def submit(self, script: str | os.PathLike[str], arguments: Sequence[object] = (), **options: object) -> Submitted:
        """Submits a training job; it is durable when this returns.

        Args:
            script: the training script; its folder is sent along.
            arguments: the script's arguments.
            options: options of `dike submit`, spelled with `_`: `name`, `max_workers`, `checkpoint_dir`, ... A
                repeatable option takes a list, one of NAME=VALUE a mapping.
        """
        return self._command("submit", _options(options), script, arguments)

    def tune(
        self,
        script: str | os.PathLike[str],
        space: Mapping[str, Any],
        arguments: Sequence[object] = (),
        **options: object,
    ) -> Submitted:
        """Submits a search, like `submit`.

        Args:
            script: what a trial runs.
            space: as for `dike.tune`: name -> list of values, or range such as `(1e-4, 0.1, "log")`.
            arguments: the script's arguments, the same in every trial.
            options: options of `dike tune`, spelled with `_`: `trials`, `metric`, `mode`, `policy`, ...
        """
        with tempfile.TemporaryDirectory(prefix="dike-client-") as folder:
            file = Path(folder) / "space.yaml"
            file.write_text(to_yaml(space), encoding="utf-8")
            given = ["--detach", "--space", str(file), *_options(options)]
            return self._command("tune", given, script, arguments)

    def wait(
        self, job_id: str, timeout_s: float | None = None, note: Callable[[str], None] | None = None
    ) -> JobDetails:
        """Waits until a job has ended and returns it, also if it failed; retries while the service is away.

        Args:
            job_id: the job.
            timeout_s: maximum waiting time; None for no limit.
            note: called with a message when the service goes away and when it is back.

        Raises:
            DikeError: if the job has not ended by then.
        """
        return self.wait_for_end(job_id, note or (lambda text: None), timeout_s)

    def _command(
        self, name: str, options: Sequence[str], script: str | os.PathLike[str], arguments: Sequence[object]
    ) -> Submitted:
        """Runs `dike NAME` and returns the service's answer."""
        own = ["--format", "json", "--service", self.url, *options, "--", os.fspath(script), *map(str, arguments)]
        environment = {key: value for key, value in os.environ.items() if key != TOKEN_VARIABLE}
        if self._token is not None:
            environment[TOKEN_VARIABLE] = self._token
        done = subprocess.run(
            [*_COMMAND, name, *own], env=environment, capture_output=True, text=True, errors="replace"
        )
        if done.returncode:
            lines = done.stderr.splitlines()
            message = next(
                (line.removeprefix(_MESSAGE_PREFIX) for line in reversed(lines) if line.startswith(_MESSAGE_PREFIX)), ""
            )
            # Other lines may be the script's own traceback.
            sys.stderr.writelines(f"{line}\n" for line in lines if line != f"{_MESSAGE_PREFIX}{message}")
            kind = BadInputError if done.returncode == BadInputError.exit_code else DikeError
            raise kind(message or f"dike {name} ended with exit code {done.returncode}; the reason is above.")
        try:
            return Submitted.model_validate_json(done.stdout)
        except ValidationError as error:
            raise DikeError(f"dike {name} printed an answer that this version cannot parse: {done.stdout!r}") from error


def _options(options: Mapping[str, object]) -> list[str]:
    """Options by name as command-line arguments; None and False omit one."""
    arguments: list[str] = []
    for name, value in options.items():
        if name in RESERVED_OPTIONS:
            raise BadInputError(f"The option '{name}' belongs to the command; see Client.wait and Client.logs instead.")
        option = f"--{name.replace('_', '-')}"
        if value is True:
            arguments.append(option)
        elif isinstance(value, Mapping):
            arguments += [text for key, one in value.items() for text in (option, f"{key}={one}")]
        elif isinstance(value, Iterable) and not isinstance(value, str):
            arguments += [text for one in value for text in (option, str(one))]
        elif value is not None and value is not False:
            arguments += [option, str(value)]
    return arguments
