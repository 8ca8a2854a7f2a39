"""`dike submit SCRIPT [ARGS]`: submits a training job to a service."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dike.exceptions import BadInputError, InterruptedByUserError
from framework.cli.job_options import JOB_PANELS, JobOptions, job_options
from framework.cli.option_groups import with_options
from framework.cli.service_options import SERVICE_PANELS, ServiceAccess, service_access
from framework.scheduler.task_options import check_name
from solver.cli.output import Format, console, say
from solver.cli.planning_options import plan_settings

if TYPE_CHECKING:
    from framework.service.requests import TrainingRequest
    from framework.training.run import RunRequest
    from solver.settings import PlanSettings


PANELS = {
    **JOB_PANELS,
    "The job": ("name", "wait", "follow", "logs", "save", "output_format"),
    **SERVICE_PANELS,
}


@with_options(access=service_access, job=job_options, planning=plan_settings)
def submit(
    *,
    job: JobOptions,
    planning: PlanSettings,
    name: Annotated[
        str | None, typer.Option(help="Name of the job.", show_default="made from the script's name")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the job ends.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Wait until the job ends, and show its output.")] = False,
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Do not submit the job; write the files for the web page's Submit form to this folder.",
        ),
    ] = None,
    access: ServiceAccess,
    output_format: Annotated[Format, typer.Option("--format", help="How to print the result.")] = Format.TABLE,
) -> None:
    """Submits a training job to a service (dike serve).

    The service queues and runs it. You can close this terminal meanwhile.
    """
    from framework.cli.following import FollowMode

    if name is not None:
        check_name(name)
    as_json = output_format is Format.JSON
    follow_mode = FollowMode(wait, follow, as_json)
    if save is not None:
        request, archive = _read(job, planning, name, quiet=as_json, on_this_machine=False)
        for path in _save(save, request, archive):
            say(follow_mode.out, f"wrote {path}")
        return
    with access.client() as client:
        client.me()  # reports a wrong address or token before the script is profiled
        read = _read(job, planning, name, quiet=as_json, on_this_machine=client.runs_here())
        follow_mode.after(client, client.submit_request(*read))


def _read(
    job: JobOptions, planning: PlanSettings, name: str | None, *, quiet: bool, on_this_machine: bool
) -> tuple[TrainingRequest, bytes]:
    """Returns the request and the bundle."""

    def notify(text: str) -> None:
        if not quiet:
            say(console(stderr=True), text)

    try:
        request = job.request(planning, on_this_machine=on_this_machine, notify=notify)
        return _training_request(request, name), request.archive
    except KeyboardInterrupt:
        raise InterruptedByUserError("Interrupted; nothing was submitted.") from None


def _save(folder: Path, request: TrainingRequest, archive: bytes) -> tuple[Path, Path]:
    request_file, bundle_file = folder / "request.json", folder / "bundle.tar.gz"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        request_file.write_text(request.dumps(), encoding="utf-8")
        bundle_file.write_bytes(archive)
    except OSError as error:
        raise BadInputError(f"The request cannot be written to {folder}: {error.strerror}.") from error
    return request_file, bundle_file


def _training_request(request: RunRequest, name: str | None) -> TrainingRequest:
    """Converts a request of `dike run` to one for a service."""
    from dike import checkpoints
    from dike.described import values_of
    from framework.project.run_folders import absolute_folder
    from framework.project.script_facts import script_facts
    from framework.service.requests import MeasuredStep, training_request
    from framework.training.options import TrainingOptions
    from solver.settings import PlanOptions

    folder = request.checkpoint_dir
    if folder is not None:
        folder = absolute_folder(folder)
        checkpoints.check_folder(folder, request.profile)
    return training_request(
        **{**values_of(TrainingOptions, request), **values_of(PlanOptions, request.planning), "checkpoint_dir": folder},
        name=name,
        script=request.entry.path,
        arguments=list(request.arguments),
        profile=request.profile.to_json(),
        profile_is_kept=request.cached_profile is not None,
        measurements=[MeasuredStep.of(row) for row in request.planning.measurements],
        plan=None if request.plan is None else request.plan.to_json(),
        stream_all_logs=request.stream_all_logs,
        preload=list(script_facts(request.entry).preload),
    )
