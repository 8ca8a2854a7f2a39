"""`dike export`: writes the model of a search or a training job to a file that Keras loads."""

from __future__ import annotations

import contextlib
import enum
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dike.exceptions import BadInputError
from framework.cli.job_names import find_job
from framework.cli.option_groups import with_options
from framework.cli.service_options import ServiceAccess, service_access
from framework.cli.trials import StorageOption
from framework.project.entry_point import RUNS_FOLDER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dike.trial.export import StoredModel
    from framework.search.records import Mode, TrialRecord


class WhichEpoch(enum.StrEnum):
    """Which of a trial's stored models."""

    BEST = "best"
    LAST = "last"


@dataclass(frozen=True)
class _ExportRequest:
    """The command's options.

    Attributes:
        name: search, run or job.
        trial: number of the trial; None for the best.
        epoch: `best`, `last` or None.
        target: file or folder to write; None for one named after the search, run or job.
        force: whether files may be overwritten.
    """

    name: str
    trial: int | None
    epoch: str | None
    target: str | None
    force: bool


@with_options(access=service_access)
def export_model(
    *,
    name: Annotated[
        str,
        typer.Argument(metavar="SEARCH|RUN|JOB", help="Name of a search, of a run of dike run, or of a service's job."),
    ],
    target: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="The file to write, *.keras or *.weights.h5. For scripts without Keras: a folder.",
        ),
    ] = None,
    trial: Annotated[
        int | None, typer.Option(min=0, help="For a search: export this trial instead of the best one.")
    ] = None,
    epoch: Annotated[
        WhichEpoch | None,
        typer.Option(
            help="Which epoch to export: the best by the metric, or the last.",
            show_default="best if its model is stored, else last",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
    storage: StorageOption = None,
    access: ServiceAccess,
) -> None:
    """Writes the model of a search or a job to a file.

    Keras can load the file. For a search, it is the model of the best trial at its best epoch; for a training job, the
    model trained so far.
    """
    request = _ExportRequest(name, trial, None if epoch is None else epoch.value, target, force)
    if not _export_from_search(request, storage) and not _export_from_run(request):
        _export_from_service(request, access)


def _export_from_search(request: _ExportRequest, storage: str | None) -> bool:
    """Exports from a search of `dike tune`; returns False if there is none of this name."""
    from dike.trial.export import find_model
    from framework.search.database import default_storage
    from framework.search.store import Store

    try:
        store = Store(storage or default_storage(), must_exist=True)
    except BadInputError:
        if storage is not None:
            raise
        return False  # This folder has no database of searches.
    with contextlib.closing(store):
        if not store.searches(request.name):
            if storage is not None:
                store.open_search(request.name)  # raises with a list of the searches
            return False
        spec = store.open_search(request.name)
        trials = store.load_trials(readings=False)
    record = _find_trial(request, trials, spec.mode, f"dike trials {request.name}")
    _check_has_checkpoints(record, request.name)
    kept = find_model(f"{spec.checkpoint_dir.rstrip('/')}/trial-{record.number}", request.epoch, record.best_step)
    _write(request, kept, spec.metric, record)
    return True


def _find_trial(request: _ExportRequest, trials: Sequence[TrialRecord], mode: Mode, shows: str) -> TrialRecord:
    """Finds the trial to export.

    `shows` is the command that lists the trials, for messages.

    Raises:
        BadInputError: if there is none, or it has nothing to export yet.
    """
    from framework.search.records import TrialState, best_trial

    record = best_trial(trials, mode)
    if request.trial is not None:
        record = next((one for one in trials if one.number == request.trial), None)
        if record is None:
            raise BadInputError(f"The search '{request.name}' has no trial {request.trial} yet; {shows} lists them.")
    if record is None:
        raise BadInputError(
            f"No trial of the search '{request.name}' has reported a value yet, so none is best. {shows} lists "
            "them, and --trial N exports one of them."
        )
    if record.state is TrialState.WAITING and record.checkpoint is None:
        raise BadInputError(
            f"Trial {record.number} of '{request.name}' has not started yet and has no checkpoint; export it later."
        )
    return record


def _check_has_checkpoints(record: TrialRecord, search: str) -> None:
    """Raises `BadInputError` if a trial has finished without writing a checkpoint."""
    from framework.search.records import TrialState

    if record.state is TrialState.FINISHED and record.checkpoint is None:
        raise BadInputError(
            f"Trial {record.number} of '{search}' has no checkpoints: Dike writes none for tf_keras, "
            "Keras on JAX or PyTorch, a tf.distribute strategy, and a loop without dike.checkpoint. End the script "
            f"with model.save('model.keras'); the file is then in trial-{record.number}/outputs."
        )


def _export_from_run(request: _ExportRequest) -> bool:
    """Exports the model of `dike run`; returns False if there is no such folder."""
    from dike.trial.export import find_job_model

    folder = next((path for path in (Path(request.name), Path(RUNS_FOLDER, request.name)) if path.is_dir()), None)
    if folder is None or any(folder.glob("trial-*")):  # A search of a service or of another database.
        return False
    _refuse_trial(request)
    _write(request, find_job_model(str(folder)))
    return True


def _refuse_trial(request: _ExportRequest) -> None:
    if request.trial is not None:
        raise BadInputError(f"'{request.name}' is a training job and has no trials; leave --trial out.")
    if request.epoch == WhichEpoch.BEST:
        raise BadInputError(f"'{request.name}' is a training job, which stores its last epoch only; leave --epoch out.")


def _export_from_service(request: _ExportRequest, access: ServiceAccess) -> None:
    from dike.trial.export import find_model
    from framework.scheduler.records import JobKind
    from framework.service.api.client_http import ServiceUnavailableError

    try:
        with access.client() as client:
            job = find_job(client, request.name)
            record: TrialRecord | None = None
            metric, epoch = "", request.epoch
            if job.kind is JobKind.SEARCH:
                found = client.trials(job.id)
                trials = [view.to_record() for view in found.trials]
                record = _find_trial(request, trials, found.mode, f"dike jobs {job.id}")
                metric = found.metric
            else:
                _refuse_trial(request)
                epoch = "last"
            with tempfile.TemporaryDirectory(prefix="dike-export-") as folder:
                client.model(job.id, Path(folder), None if record is None else record.number, epoch)
                best_step = None if record is None else record.best_step
                _write(request, find_model(folder, epoch, best_step), metric, record)
    except ServiceUnavailableError as error:
        raise BadInputError(
            f"There is no search '{request.name}' in this folder's database, and no run "
            f"{RUNS_FOLDER}/{request.name}. {error}"
        ) from error


def _write(request: _ExportRequest, kept: StoredModel, metric: str = "", record: TrialRecord | None = None) -> None:
    from dike.trial.export import WEIGHTS, export

    stem = Path(request.name).name
    default = f"{stem}{kept.suffix}" if record is None else f"{stem}-trial-{record.number}{kept.suffix}"
    target = request.target or default
    export(kept, target, force=request.force)
    source = f"step {kept.step}" if record is None else f"trial {record.number} at step {kept.step}"
    value = "" if kept.value is None else f", {metric} {kept.value:.6g}"
    print(f"Exported the model of {source}{value}, to {target}")
    if kept.suffix:
        load = f"model.load_weights('{target}')" if target.endswith(WEIGHTS) else f"keras.models.load_model('{target}')"
        print(f"Load it with {load}")
    if kept.newer_step is not None:
        print(
            f"A newer checkpoint, of step {kept.newer_step}, contains no model to export: fit stores one when it ends. "
            "Run the job to its end to export it."
        )
    if record is not None and request.epoch is None and record.best_step not in (None, kept.step):
        print(f"The best value, {record.best_value:.6g}, was at step {record.best_step}, of which no model is stored.")
