"""`dike.Client`: a service from Python.

Whose process it is may have files called `solver.py` or `executor.py`, so neither of those packages is imported here.
What reads a script - for its bundle, its model's profile, its flags - does the `dike` command, in a process of its own.
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

OPTIONS_OF_OURS = frozenset({"detach", "follow", "format", "save", "service", "token_file", "wait"})
"""Options of the commands that would change what they answer."""
_COMMAND = (sys.executable, "-P", "-m", "framework")
_SAYS = "dike: "


class Client(ServiceClient):
    """A service, asked from Python; what it answers with are the models of its REST API.

    Args:
        url: where it listens; None for `$DIKE_SERVICE`, else `http://127.0.0.1:8680`.
        token: who we are; None for `$DIKE_TOKEN`, else that of your own service here.

    Raises:
        BadInputError: from every method, if no service answers, or it refuses what was asked.
        DikeError: from every method, if it has failed.
    """

    def __init__(self, url: str | None = None, token: str | None = None) -> None:
        access = ServiceAccess(url or os.environ.get(SERVICE_VARIABLE) or DEFAULT_SERVICE)
        self._token = token or access.token()
        super().__init__(access.url, self._token)

    def submit(self, script: str | os.PathLike[str], arguments: Sequence[object] = (), **options: object) -> Submitted:
        """Hands a training job in; it is durable when this returns.

        Args:
            script: the training script, whose folder travels with it.
            arguments: the script's own.
            options: those of `dike submit`, spelled with `_`: `name`, `max_workers`, `checkpoint_dir`, ...; what may
                be given several times as a list, or as a mapping for NAME=VALUE.

        Raises:
            BadInputError: if it cannot be run as asked for.
        """
        return self._command("submit", _options(options), script, arguments)

    def tune(
        self,
        script: str | os.PathLike[str],
        space: Mapping[str, Any],
        arguments: Sequence[object] = (),
        **options: object,
    ) -> Submitted:
        """Hands a search in, like `submit`.

        Args:
            script: what a trial runs.
            space: as for `dike.tune`: name -> list of values, or range such as `(1e-4, 0.1, "log")`.
            arguments: the script's own, in every trial.
            options: those of `dike tune`, spelled with `_`: `trials`, `metric`, `mode`, `policy`, ...
        """
        with tempfile.TemporaryDirectory(prefix="dike-client-") as folder:
            file = Path(folder) / "space.yaml"
            file.write_text(to_yaml(space), encoding="utf-8")
            given = ["--detach", "--space", str(file), *_options(options)]
            return self._command("tune", given, script, arguments)

    def wait(
        self, job_id: str, timeout_s: float | None = None, note: Callable[[str], None] | None = None
    ) -> JobDetails:
        """A job once it has ended, well or not: see its `state` and `failure`. A service that is away is waited for.

        Args:
            job_id: which.
            timeout_s: how long at most; None for as long as it takes.
            note: told when the service is away, and when it is back.

        Raises:
            DikeError: if it has not ended by then.
        """
        return self.wait_for_end(job_id, note or (lambda text: None), timeout_s)

    def _command(
        self, name: str, options: Sequence[str], script: str | os.PathLike[str], arguments: Sequence[object]
    ) -> Submitted:
        """Runs `dike NAME`; the service's answer."""
        own = ["--format", "json", "--service", self.url, *options, "--", os.fspath(script), *map(str, arguments)]
        environment = {key: value for key, value in os.environ.items() if key != TOKEN_VARIABLE}
        if self._token is not None:
            environment[TOKEN_VARIABLE] = self._token
        done = subprocess.run(
            [*_COMMAND, name, *own], env=environment, capture_output=True, text=True, errors="replace"
        )
        if done.returncode:
            said = done.stderr.splitlines()
            message = next((line.removeprefix(_SAYS) for line in reversed(said) if line.startswith(_SAYS)), "")
            # What stands before it is the script's own traceback, say.
            sys.stderr.writelines(f"{line}\n" for line in said if line != f"{_SAYS}{message}")
            kind = BadInputError if done.returncode == BadInputError.exit_code else DikeError
            raise kind(message or f"dike {name} ended with exit code {done.returncode}; the reason is above.")
        try:
            return Submitted.model_validate_json(done.stdout)
        except ValidationError as error:
            raise DikeError(f"dike {name} answered what this version does not understand: {done.stdout!r}") from error


def _options(options: Mapping[str, object]) -> list[str]:
    """Options by name as arguments; None and False leave one out."""
    arguments: list[str] = []
    for name, value in options.items():
        if name in OPTIONS_OF_OURS:
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
