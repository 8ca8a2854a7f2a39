"""Runs a search from request to result: records, Mesos, bundle, driver, events."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import posixpath
import shlex
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dike.checkpoints import make_private
from dike.exceptions import BadInputError, InterruptedByUserError, JobFailedError
from dike.trial.spec import EARLIER_RESULTS
from executor.outputs import RECORD
from framework.mesos.connection import FrameworkRemovedError, MesosLostError
from framework.mesos.containers import task_container
from framework.mesos.master import LeadingMaster
from framework.project import bundle
from framework.project.script_facts import script_facts
from framework.scheduler.agents import admitted_agents
from framework.scheduler.journal import StorageUnavailableError
from framework.scheduler.mesos_access import MesosAccess
from framework.scheduler.session import sigterm_as_interrupt
from framework.scheduler.standalone import StandaloneJob, run_standalone
from framework.search.controller import SearchController
from framework.search.database import database_files, default_storage, open_database, wait_for_server
from framework.search.mlflow_log import MLflowLog
from framework.search.observer import SearchObserver
from framework.search.optuna_study import Study
from framework.search.policy import policy_of
from framework.search.records import SearchOutcome, SearchSpec
from framework.search.recovery import close_open_slices, load_trials_to_resume
from framework.search.samplers import describe_sampler
from framework.search.slot_pool import SearchSizing, SlotLaunch
from framework.search.space import MORE_TRIALS
from framework.search.store import Store
from framework.search.tensorboard import TensorBoardLog
from framework.search.trials import TrialLog, TrialTracker

logger = logging.getLogger(__name__)

CANCEL_MARGIN_S = 15.0
_CHECKPOINT_GLOB = "*run-*-step-*"
"""Checkpoints and best models in a trial's folder."""


@dataclass(frozen=True)
class SearchRequest:
    """A request of `dike tune`.

    Attributes:
        resume: whether the search is in the database already.
        logdir: folder for TensorBoard; None for none.
        mlflow: URI of an MLflow server or database; empty for none.
        constraints: which agents it may use (`framework.scheduler.constraints`).
        volumes: folders of the agents for its containers (`framework.mesos.containers.parse_volume`).
        options: the user's options outside `spec`, stored for `--resume`.
    """

    spec: SearchSpec
    storage: str
    resume: bool = False
    mesos: MesosAccess = field(default_factory=MesosAccess)
    logdir: Path | None = None
    mlflow: str = ""
    constraints: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


def run_search(request: SearchRequest, observer: SearchObserver) -> SearchOutcome:
    """Runs a search to its end.

    Raises:
        BadInputError: if the input is invalid, or the script rejects it.
        JobFailedError: if the master ended the framework, a private Mesos failed, or the database was unavailable too
            long.
        InterruptedByUserError: after Ctrl-C or SIGTERM, once every trial is suspended.
    """
    spec = request.spec
    engine = open_database(request.storage)
    with sigterm_as_interrupt(), contextlib.closing(Store(request.storage, engine=engine)) as store:
        if request.resume:
            store.open_search(spec.name)
        else:
            store.create_search(spec, request.options)
            try:
                _check_folder_unused(spec.checkpoint_dir)
            except BadInputError:
                store.delete_search()
                raise
        wait_for_server(engine, observer.notify)
        try:
            return _run_locked(request, store, observer)
        except (StorageUnavailableError, MesosLostError, FrameworkRemovedError) as error:
            raise JobFailedError(
                f"{error} Every trial is saved up to its last checkpoint; resume with dike tune --resume {spec.name}."
            ) from error


def _run_locked(request: SearchRequest, store: Store, observer: SearchObserver) -> SearchOutcome:
    spec = request.spec
    last_sign_s = store.last_heartbeat_s(spec.name)
    with store.lock(spec.name):
        study: Study | None = None
        try:
            study = (Study.open if request.resume else Study.create)(request.storage, spec)
            study.wait_for_server(observer.notify)
            if request.resume:
                close_open_slices(store, last_sign_s)
            return _run(request, store, study, observer)
        except StorageUnavailableError:
            raise
        except BadInputError:
            trials = [] if request.resume else store.load_trials()
            if not request.resume and not any(one.readings or one.value is not None for one in trials):
                # Frees the name for the next attempt.
                if study is not None:
                    study.delete()
                store.delete_search()
                for one in trials:
                    _clear_trial_folder(Path(spec.checkpoint_dir, f"trial-{one.number}"))
            raise
        except KeyboardInterrupt:
            raise InterruptedByUserError(
                f"Interrupted; every trial is saved up to its last checkpoint; resume with "
                f"dike tune --resume {spec.name}."
            ) from None


def _run(request: SearchRequest, store: Store, study: Study, observer: SearchObserver) -> SearchOutcome:
    spec = request.spec
    records = load_trials_to_resume(store, study) if request.resume else []
    with contextlib.ExitStack() as stack:
        logs: list[TrialLog] = []
        if request.logdir is not None:
            logs.append(stack.enter_context(contextlib.closing(TensorBoardLog(request.logdir, spec))))
        if request.mlflow:
            logs.append(stack.enter_context(contextlib.closing(MLflowLog(request.mlflow, spec))))
        trials = TrialTracker(spec, store, study, records, logs)
        if request.resume and not trials.open and not trials.unsampled:
            observer.notify(f"the search {spec.name} is complete; {MORE_TRIALS}")
            return SearchOutcome(spec.name, True, trials.all, spec.mode, spec.checkpoint_dir)
        slices = store.load_slices()
        policy = policy_of(spec, store, slices, resumed=request.resume, notify=observer.notify)
        stops = f"; --stop {spec.stop} stops trials early" if spec.stop else ""
        folder = posixpath.dirname(spec.checkpoint_dir.rstrip("/"))  # which trials may have to make
        container = task_container(request.mesos.image, request.volumes, folder)
        entry = spec.entry
        if not entry.script.is_file():
            raise BadInputError(
                f"The script {entry.script} does not exist any more, and the search {spec.name} is not complete."
            )
        facts = script_facts(entry)
        others = {"loss": "val_loss", "val_loss": "loss"} if facts.validates else {}
        instead = f"; judge by the other loss with --metric {others[spec.metric]}" if spec.metric in others else ""
        how = f"policy {spec.policy}, {describe_sampler(spec)}{stops}{instead}"
        observer.notify(f"search {spec.name}: {spec.trial_count} trials for the {spec.goal}, {how}")
        earlier = {EARLIER_RESULTS: json.dumps(spec.earlier_results).encode()} if spec.call else {}
        archive = bundle.pack(entry.script, entry.folder, exclude=database_files(request.storage), extra_files=earlier)
        if request.mesos.keeps_run_folders:
            _make_folder(spec.checkpoint_dir)
        master = stack.enter_context(request.mesos.connect())
        token = bundle.new_token()
        server = stack.enter_context(request.mesos.bundle_server({token: archive}.get, master))
        shared = stack.enter_context(request.mesos.run_folder(spec.checkpoint_dir))
        if request.resume:
            # Not before Mesos answers: otherwise the search keeps its former end and options.
            store.change_search(spec, request.options)
            store.reopen_search()
            _end_predecessor(store.framework_id(spec.name), master)
        launch = SlotLaunch(
            spec=spec,
            bundle_url=server.url(token),
            script=entry.path,
            preload=facts.preload,
            python=request.mesos.python(master),
            container=container,
            hand_out_gpus=master.is_here,
            folder=shared,
        )
        first_slot = max((time_slice.slot for time_slice in slices), default=-1) + 1
        agents = functools.partial(admitted_agents, master, request.constraints)
        elsewhere = "" if request.storage == default_storage() else f" --storage {shlex.quote(request.storage)}"
        job = StandaloneJob(
            job_id=spec.name,
            make=lambda _: SearchController(
                launch, policy, observer, trials, store, agents, first_slot, storage_option=elsewhere
            ),
            cancel_timeout_s=spec.suspend_timeout_s + CANCEL_MARGIN_S,
            subscribed=lambda framework_id: store.set_framework_id(spec.name, framework_id),
            interrupted=lambda: observer.notify("interrupted: suspending all trials (Ctrl-C again stops them)"),
            constraints=request.constraints,
            sizing=SearchSizing(spec),
        )
        search = run_standalone(job, request.mesos, master)
        store.finish_search(search.result.failure)
        return search.result


def _clear_trial_folder(folder: Path) -> None:
    """Removes a trial's record and checkpoints, so that another search can use its folder; outputs stay."""
    (folder / RECORD).unlink(missing_ok=True)
    for path in folder.glob(_CHECKPOINT_GLOB):
        shutil.rmtree(path, ignore_errors=True)


def _check_folder_unused(path: str) -> None:
    """Checks, as far as possible from this machine, that a new search does not adopt another's trials.

    Raises:
        BadInputError: if the folder has checkpoints of trials.
    """
    if next(Path(path).glob(f"trial-*/{_CHECKPOINT_GLOB}"), None) is not None:
        raise BadInputError(
            f"{path} holds trials of another search, which this one would overwrite; choose another --name or "
            "--checkpoint-dir, or remove that folder."
        )


def _make_folder(path: str) -> None:
    """Creates the folder for checkpoints, if trials run on this machine.

    Raises:
        BadInputError: if it is not writable.
    """
    if "://" in path:
        return
    try:
        make_private(path)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise BadInputError(
            f"Checkpoints cannot be written to {path}: {error.strerror}; name another folder with --checkpoint-dir."
        ) from error


def _end_predecessor(framework_id: str | None, master: LeadingMaster) -> None:
    """Ends the framework of a killed `dike tune`, whose slots would use GPUs until Mesos' failover timeout."""
    # A failure is harmless: runs never write to each other's files.
    if framework_id is not None:
        logger.info("the framework %s of the interrupted search: %s", framework_id, master.teardown(framework_id))
