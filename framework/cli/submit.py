"""`dike submit SCRIPT [ARGS]`: submits a training job to a service."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dike.exceptions import BadInputError, InterruptedByUserError
from framework.cli.job_names import with_job_ids
from framework.cli.job_options import JOB_PANELS, JobOptions, job_options
from framework.cli.option_groups import with_options
from framework.cli.service_options import SERVICE_PANELS, ServiceAccess, service_access
from framework.scheduler.queue_options import QueueOptions
from framework.scheduler.task_options import check_name
from solver.cli.option_groups import options_of, panels_of
from solver.cli.output import Format, console, say
from solver.cli.planning_options import plan_settings

if TYPE_CHECKING:
    from framework.service.requests import TrainingRequest
    from framework.training.run import RunRequest
    from solver.settings import PlanSettings


PANELS = {
    **JOB_PANELS,
    "The job": ("name", "array", "wait", "follow", "logs", "save", "output_format"),
    **panels_of(QueueOptions),
    **SERVICE_PANELS,
}
MAX_ARRAY = 1000
ARRAY_INDEX = "DIKE_ARRAY_INDEX"
"""Variable of each job of an array."""
_RANGE = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6})(?::([0-9]{1,6}))?)?")


@with_options(access=service_access, job=job_options, planning=plan_settings, queue=options_of(QueueOptions))
def submit(
    *,
    job: JobOptions,
    planning: PlanSettings,
    name: Annotated[
        str | None, typer.Option(help="Name of the job.", show_default="made from the script's name")
    ] = None,
    array: Annotated[
        str | None,
        typer.Option(
            help=f"Submit a job NAME-N for each of these numbers, such as 0-9 or 1,3,5-7, with the variable "
            f"{ARRAY_INDEX}=N.",
            metavar="NUMBERS",
        ),
    ] = None,
    queue: QueueOptions,
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
    numbers = None if array is None else _numbers(array)
    if numbers is not None and (wait or follow or save is not None):
        raise BadInputError("--array submits several jobs; leave out --wait, --follow and --save.")
    if save is not None:
        request, archive = _read(job, planning, queue, name, quiet=as_json, on_this_machine=False)
        for path in _save(save, request, archive):
            say(follow_mode.out, f"wrote {path}")
        return
    with access.client() as client:
        client.me()  # reports a wrong address or token before the script is profiled
        queue = with_job_ids(queue, client)
        request, archive = _read(job, planning, queue, name, quiet=as_json, on_this_machine=client.runs_here())
        for one in [request] if numbers is None else _array(request, numbers):
            follow_mode.after(client, client.submit_request(one, archive))


def _numbers(text: str) -> list[int]:
    """Reads `--array`.

    Raises:
        BadInputError: if it is malformed, or has too many numbers.
    """
    found: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise BadInputError(f"--array is '{text}'; write numbers and ranges, such as 0-9, 0-90:10 or 1,3,5-7.")
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if last < first or step < 1:
            raise BadInputError(
                f"--array is '{text}'; a range begins with its smallest number, and its step is above 0."
            )
        found.extend(range(first, last + 1, step)[: MAX_ARRAY + 1])
    if len(set(found)) > MAX_ARRAY:
        raise BadInputError(f"--array has more than {MAX_ARRAY} numbers.")
    return sorted(set(found))


def _array(request: TrainingRequest, numbers: Sequence[int]) -> list[TrainingRequest]:
    from framework.project.run_folders import new_job_id

    name = request.name or new_job_id(Path(request.script))
    return [
        dataclasses.replace(
            request, name=f"{name}-{number}", environment={**request.environment, ARRAY_INDEX: str(number)}
        )
        for number in numbers
    ]


def _read(
    job: JobOptions,
    planning: PlanSettings,
    queue: QueueOptions,
    name: str | None,
    *,
    quiet: bool,
    on_this_machine: bool,
) -> tuple[TrainingRequest, bytes]:
    """Returns the request and the bundle."""

    def notify(text: str) -> None:
        if not quiet:
            say(console(stderr=True), text)

    try:
        request = job.request(planning, on_this_machine=on_this_machine, notify=notify)
        return _training_request(request, queue, name), request.archive
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


def _training_request(request: RunRequest, queue: QueueOptions, name: str | None) -> TrainingRequest:
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
        **values_of(QueueOptions, queue),
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
