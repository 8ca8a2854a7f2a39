"""`dike submit SCRIPT [ARGS]`: hand a training job to a service."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dike import checkpoints
from dike.exceptions import BadInputError
from framework import bundle
from framework.cli.following import check_success, leaving_is_fine, print_output, say, tell
from framework.cli.job_options import JobOptions, with_job_options
from framework.cli.service_options import ServiceAccess, with_service_options
from framework.runner import RunRequest, absolute_folder
from framework.search.script_facts import script_facts
from framework.service.api.schemas import JobDetails
from framework.service.client import ServiceClient
from framework.service.requests import TrainingRequest
from solver.cli.output import Format, console, print_json


@with_service_options
@with_job_options
def submit(
    *,
    job: JobOptions,
    wait: Annotated[bool, typer.Option("--wait", help="Stay until the job has ended.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Stay, and show its output.")] = False,
    save: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Send nothing: write there what the web page takes instead.")
    ] = None,
    access: ServiceAccess,
    output_format: Annotated[Format, typer.Option("--format", help="How to print the result.")] = Format.TABLE,
) -> None:
    """Hands a training job to a service (dike serve), which runs it when its turn has come."""
    as_json = output_format is Format.JSON
    # What a job prints, and with --format json the result, have standard output to themselves.
    out = console(stderr=as_json or follow)
    if save is not None:
        request = job.request()
        _save(save, _training_request(request), bundle.pack(request.script.resolve()))
        return
    with access.client() as client:
        client.me()  # a wrong address or token is told before the script is run for its profile
        request = job.request()
        submitted = client.submit(_training_request(request), bundle.pack(request.script.resolve()))
        tell(submitted, out)
        if not wait and not follow:
            if as_json:
                print_json(submitted.model_dump(mode="json"))
            return
        ended = _stay(client, submitted.id, out, shows_output=follow, as_json=as_json)
    if as_json:
        print_json(ended.model_dump(mode="json"))
    check_success(ended)
    say(out, f"{ended.id} has finished")


def _save(folder: Path, request: TrainingRequest, archive: bytes) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "request.json").write_text(request.model_dump_json(indent=2), encoding="utf-8")
        (folder / "bundle.tar.gz").write_bytes(archive)
    except OSError as error:
        raise BadInputError(f"The request cannot be written to {folder}: {error.strerror}.") from error


def _stay(client: ServiceClient, job_id: str, out: Console, *, shows_output: bool, as_json: bool) -> JobDetails:
    def note(text: str) -> None:
        say(out, text)

    if shows_output:
        streams = {"stdout": sys.stderr if as_json else sys.stdout, "stderr": sys.stderr}
        print_output(client, client.job(job_id), streams, note, task=None, follow=True)
    with leaving_is_fine(job_id):
        return client.wait_for_end(job_id, note)


def _training_request(request: RunRequest) -> TrainingRequest:
    """What was asked for, as a service takes it."""
    folder = request.checkpoint_dir
    if folder is not None:
        folder = absolute_folder(folder)
        checkpoints.check_folder(folder, request.profile)
    script = request.script.resolve()
    return TrainingRequest(
        script=script.name,
        arguments=list(request.arguments),
        profile=request.profile.to_json(),
        checkpoint_dir=folder,
        checkpoint_interval_s=request.checkpoint_interval_s,
        max_restarts=request.max_restarts,
        objective=request.objective,
        max_workers=request.max_workers,
        plan=None if request.plan is None else request.plan.to_json(),
        stream_all_logs=request.stream_all_logs,
        environment=request.environment,
        elastic=None if request.elastic is None else "{}:{}".format(*request.elastic),
        resize_interval_s=request.resize_interval_s,
        stragglers=request.stragglers,
        preload=None if request.elastic is None else list(script_facts(script, ()).preload),
        constraints=list(request.constraints),
    )
