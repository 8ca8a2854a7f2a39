"""`dike logs JOB`: prints the output of a job's tasks, or of a search's trial."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dike.exceptions import BadInputError, InterruptedByUserError, JobFailedError
from framework.cli.job_names import JOB_HELP, find_job
from framework.cli.option_groups import is_given, with_options
from framework.cli.service_options import ServiceAccess, service_access
from framework.cli.trials import StorageOption, print_trials
from framework.project.entry_point import RUNS_FOLDER, SEARCHES_FILE
from framework.scheduler.records import JobKind, OutputChunk
from solver.cli.output import console, say

if TYPE_CHECKING:
    from framework.search.records import TrialRecord
    from framework.search.store import Store
    from framework.service.api.schemas import TrialView

POLL_INTERVAL_S = 0.5
"""Between two reads of a trial's output."""


@with_options(access=service_access)
def logs(
    context: typer.Context,
    *,
    job: Annotated[
        str,
        typer.Argument(
            help=f"{JOB_HELP} Or the name of a search of dike tune.",
            show_default=False,
        ),
    ],
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new output until the job or the trial ends.")
    ] = False,
    trial: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="For a search: show the output of trial N, of all its runs.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="Show only this task's output, such as worker:0.")] = None,
    tail: Annotated[int | None, typer.Option(min=0, help="Show only the last N lines; with -f also new ones.")] = None,
    storage: StorageOption = None,
    access: ServiceAccess,
) -> None:
    """Shows the output of a job, or of a search's trial.

    With -f the exit code is 1 if the job or the trial fails.
    """
    if trial is not None and task is not None:
        raise BadInputError("--trial is for searches and --task for training jobs; leave one of them out.")
    # A database is opened only if there is one: its modules take half a second to import.
    own = Path(RUNS_FOLDER, SEARCHES_FILE)
    url = storage or (f"sqlite:///{own}" if own.is_file() else None)
    is_local = is_given(context, "storage") or not is_given(context, "service")
    store = _open_search(job, url, must_exist=is_given(context, "storage")) if url and is_local else None
    if store is None:
        searched_urls = [_shown(url)] if url and is_local else []
        _logs_of_service(access, job, searched_urls, trial, task, follow=follow, tail=tail)
        return
    with contextlib.closing(store):
        if task is not None:
            raise BadInputError(
                f"{job} is a search, which has trials instead of tasks: use --trial N instead of --task."
            )
        if trial is None:
            _choose(store, follow=follow)
        else:
            _logs_of_trial(store, trial, follow=follow, tail=tail)


def _open_search(name: str, url: str, *, must_exist: bool) -> Store | None:
    """Opens a database that contains this search; returns None if it does not, unless it must."""
    from framework.scheduler.journal import StorageUnavailableError
    from framework.search.store import Store

    with contextlib.ExitStack() as stack:
        try:
            store = stack.enter_context(contextlib.closing(Store(url, must_exist=True)))
            store.open_search(name)
        except StorageUnavailableError:
            raise
        except BadInputError:
            if must_exist:
                raise
            return None
        stack.pop_all()
        return store


def _shown(url: str) -> str:
    from framework.search.database import parse_url, shown

    return shown(parse_url(url))


def _logs_of_service(
    access: ServiceAccess,
    name: str,
    searched_urls: list[str],
    trial: int | None,
    task: str | None,
    *,
    follow: bool,
    tail: int | None,
) -> None:
    """Prints the output of a service's job; `searched_urls`: URLs of databases that contain no search of that name."""
    from framework.cli.following import check_success, print_output

    out = console(stderr=True)
    with access.client() as client:
        try:
            found = find_job(client, name)
        except BadInputError as error:
            more = "".join(f" {url} has no search '{name}' either." for url in searched_urls)
            raise BadInputError(f"{error}{more}") from error
        is_search = found.kind is JobKind.SEARCH
        if trial is not None and not is_search:
            raise BadInputError(f"The job {found.id} is a training job, which has no trials; leave out --trial.")
        streams = {"stdout": sys.stdout, "stderr": sys.stderr}
        print_output(
            client, found, streams, lambda text: say(out, text), task=task, trial=trial, follow=follow, tail=tail
        )
        if trial is not None:
            if follow:
                _check_trial(found.id, [one for one in client.trials(found.id).trials if one.number == trial])
            return
        if is_search:
            say(out, f"dike logs {found.id} --trial N shows the output of trial N")
        if follow:
            check_success(client.wait_for_end(found.id, lambda text: say(out, text)))


def _choose(store: Store, *, follow: bool) -> None:
    """Lists the trials to choose from."""
    name = store.spec.name
    if follow:
        raise BadInputError(
            f"--follow needs a trial of the search {name}; add --trial N. dike trials {name} lists them."
        )
    print_trials(console(), store.load_trials(readings=False), store.spec)
    say(console(stderr=True), f"dike logs {name} --trial N shows the output of trial N")


def _logs_of_trial(store: Store, trial: int, *, follow: bool, tail: int | None) -> None:
    from framework.cli.following import last_lines
    from framework.cli.task_output import TaskOutput
    from framework.project.tensorflow_noise import without_noise

    name, count = store.spec.name, store.spec.trial_count
    if trial >= count:
        raise BadInputError(f"The search {name} has no trial {trial}; its trials are 0 to {count - 1}.")
    output = TaskOutput({"stdout": sys.stdout, "stderr": sys.stderr})
    last = 0
    try:
        if tail is not None:
            chunks = store.load_output(trial)
            last = chunks[-1].number if chunks else 0
            for chunk in last_lines(chunks, tail):
                output.write(chunk.task, chunk.stream, without_noise(chunk.text))
        if tail is None or follow:
            for chunk in _trial_output(store, trial, last, follow=follow):
                output.write(chunk.task, chunk.stream, without_noise(chunk.text))
    except KeyboardInterrupt:
        raise InterruptedByUserError(f"Interrupted; the search {name} continues.") from None
    finally:
        output.finish()
    if follow:
        _check_trial(name, [record for record in store.load_trials(readings=False) if record.number == trial])


def _trial_output(store: Store, trial: int, after: int, *, follow: bool) -> Iterator[OutputChunk]:
    while True:
        # The state is read before the output, so that output printed before the end is not missed.
        state, found = store.trial_state(trial), store.searches(store.spec.name)
        for chunk in store.load_output(trial, after=after):
            yield chunk
            after = chunk.number
        if not follow or (state is not None and state.has_ended()) or not any(one.is_running for one in found):
            return
        time.sleep(POLL_INTERVAL_S)


def _check_trial(search: str, found: Sequence[TrialRecord | TrialView]) -> None:
    """Checks the end of a trial that was followed.

    Args:
        search: the search's name.
        found: the trial; empty if it never started.

    Raises:
        JobFailedError: if it has failed, or has neither ended nor can continue as the search does not run.
    """
    from framework.project.failure_summary import failure_summary
    from framework.search.records import TrialState

    for trial in found:
        if trial.state is TrialState.FAILED:
            raise JobFailedError(
                f"Trial {trial.number} of {search} failed: {failure_summary(trial.error).rstrip('.')}."
            )
        if trial.state.has_ended():
            return
    raise JobFailedError(f"The trial has not ended, and the search {search} does not run.")
