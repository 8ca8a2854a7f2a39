"""`dike export`: the best model of a search, or what a training job has trained, as a file that Keras loads."""

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


class Epoch(enum.StrEnum):
    """Which of the models that a trial has kept."""

    BEST = "best"
    LAST = "last"


@dataclass(frozen=True)
class _Wanted:
    """What was asked for.

    Attributes:
        name: search, run or job.
        trial: number of the trial; None for the best.
        epoch: `best`, `last` or None.
        target: where to; None for a name of its own.
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
        str, typer.Argument(metavar="SEARCH|RUN|JOB", help="A search, a run of dike run, or a job of a service.")
    ],
    target: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="*.keras or *.weights.h5; for scripts without Keras a folder."
        ),
    ] = None,
    trial: Annotated[int | None, typer.Option(min=0, help="Of a search: this trial, not the best one.")] = None,
    epoch: Annotated[
        Epoch | None, typer.Option(help="The best epoch by the metric, or the last; the best one that was kept.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite what is there.")] = False,
    storage: StorageOption = None,
    access: ServiceAccess,
) -> None:
    """Writes the best model of a search, or a job's, to a file.

    Keras loads the file. Of a search it is the model of the best trial at its best epoch; of a training job what it has
    trained so far.
    """
    wanted = _Wanted(name, trial, None if epoch is None else epoch.value, target, force)
    if not _of_local_search(wanted, storage) and not _of_run(wanted):
        _of_service(wanted, access)


def _of_local_search(wanted: _Wanted, storage: str | None) -> bool:
    """Exports from a search of `dike tune`; False if there is none of this name."""
    from dike.trial.export import find_model
    from framework.search.database import default_storage
    from framework.search.store import Store

    try:
        store = Store(storage or default_storage(), must_exist=True)
    except BadInputError:
        if storage is not None:
            raise
        return False  # Nothing has been searched from here.
    with contextlib.closing(store):
        if not store.searches(wanted.name):
            if storage is not None:
                store.open_search(wanted.name)  # says what there is
            return False
        spec = store.open_search(wanted.name)
        trials = store.load_trials(readings=False)
    record = _trial(wanted, trials, spec.mode, f"dike trials {wanted.name}")
    _check_has_checkpoints(record, wanted.name)
    kept = find_model(f"{spec.checkpoint_dir.rstrip('/')}/trial-{record.number}", wanted.epoch, record.best_step)
    _write(wanted, kept, spec.metric, record)
    return True


def _trial(wanted: _Wanted, trials: Sequence[TrialRecord], mode: Mode, shows: str) -> TrialRecord:
    """The trial that is wanted.

    Raises:
        BadInputError: if there is none, or it has nothing to export yet.
    """
    from framework.search.records import TrialState, best_trial

    record = best_trial(trials, mode)
    if wanted.trial is not None:
        record = next((one for one in trials if one.number == wanted.trial), None)
        if record is None:
            raise BadInputError(f"The search '{wanted.name}' has no trial {wanted.trial} yet; {shows} lists them.")
    if record is None:
        raise BadInputError(
            f"No trial of the search '{wanted.name}' has reported a value yet, so none is best; {shows} shows how they "
            "stand, and --trial N exports one of them."
        )
    if record.state is TrialState.WAITING and record.checkpoint is None:
        raise BadInputError(
            f"Trial {record.number} of '{wanted.name}' waits and has no checkpoint yet; export it later."
        )
    return record


def _check_has_checkpoints(record: TrialRecord, search: str) -> None:
    """Raises `BadInputError` if a trial has ended without ever having written a checkpoint."""
    from framework.search.records import TrialState

    if record.state is TrialState.FINISHED and record.checkpoint is None:
        raise BadInputError(
            f"Trial {record.number} of '{search}' has trained without checkpoints: Dike writes none for tf_keras, "
            "Keras on JAX or PyTorch, a tf.distribute strategy, and a loop without dike.checkpoint; let the script end "
            f"in model.save('model.keras'), and the file is in trial-{record.number}/outputs."
        )


def _of_run(wanted: _Wanted) -> bool:
    """Exports what `dike run` has trained; False if there is no such folder."""
    from dike.trial.export import find_job_model

    folder = next((path for path in (Path(wanted.name), Path(RUNS_FOLDER, wanted.name)) if path.is_dir()), None)
    if folder is None or any(folder.glob("trial-*")):  # That is a search's, of a service or of another database.
        return False
    _refuse_trial(wanted)
    _write(wanted, find_job_model(str(folder)))
    return True


def _refuse_trial(wanted: _Wanted) -> None:
    if wanted.trial is not None:
        raise BadInputError(f"'{wanted.name}' is a training job and has no trials; leave --trial out.")
    if wanted.epoch == Epoch.BEST:
        raise BadInputError(f"'{wanted.name}' is a training job, of which the last epoch is kept; leave --epoch out.")


def _of_service(wanted: _Wanted, access: ServiceAccess) -> None:
    from dike.trial.export import find_model
    from framework.scheduler.records import JobKind
    from framework.service.api.client_http import ServiceUnavailableError

    try:
        with access.client() as client:
            job = find_job(client, wanted.name)
            record: TrialRecord | None = None
            metric, epoch = "", wanted.epoch
            if job.kind is JobKind.SEARCH:
                found = client.trials(job.id)
                trials = [view.to_record() for view in found.trials]
                record = _trial(wanted, trials, found.mode, f"dike jobs {job.id}")
                metric = found.metric
            else:
                _refuse_trial(wanted)
                epoch = "last"
            with tempfile.TemporaryDirectory(prefix="dike-export-") as folder:
                client.model(job.id, Path(folder), None if record is None else record.number, epoch)
                best_step = None if record is None else record.best_step
                _write(wanted, find_model(folder, epoch, best_step), metric, record)
    except ServiceUnavailableError as error:
        raise BadInputError(
            f"There is no search '{wanted.name}' in the database here, and no run {RUNS_FOLDER}/{wanted.name}. {error}"
        ) from error


def _write(wanted: _Wanted, kept: StoredModel, metric: str = "", record: TrialRecord | None = None) -> None:
    from dike.trial.export import WEIGHTS, export

    stem = Path(wanted.name).name
    default = f"{stem}{kept.suffix}" if record is None else f"{stem}-trial-{record.number}{kept.suffix}"
    target = wanted.target or default
    export(kept, target, force=wanted.force)
    whose = f"step {kept.step}" if record is None else f"trial {record.number} at step {kept.step}"
    value = "" if kept.value is None else f", {metric} {kept.value:.6g}"
    print(f"Exported the model of {whose}{value}, to {target}")
    if kept.suffix:
        load = f"model.load_weights('{target}')" if target.endswith(WEIGHTS) else f"keras.models.load_model('{target}')"
        print(f"Load it with {load}")
    if kept.newer_step is not None:
        print(
            f"A newer checkpoint, of step {kept.newer_step}, holds no model to export: fit keeps one when it ends. Let "
            "the job go on to its end."
        )
    if record is not None and wanted.epoch is None and record.best_step not in (None, kept.step):
        print(f"The best value, {record.best_value:.6g}, was at step {record.best_step}, of which no model was kept.")
