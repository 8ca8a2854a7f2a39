"""Runs one training job in this process, from a script to its result."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from dike import checkpoints
from dike.described import values_of
from dike.exceptions import InterruptedByUserError, JobFailedError
from dike.profile import Api, ModelProfile
from executor.mirror import RunFolder
from framework.mesos.connection import FrameworkRemovedError, MesosLostError
from framework.mesos.containers import Container, task_container
from framework.mesos.master import LeadingMaster
from framework.project import bundle
from framework.project.entry_point import RUNS_FOLDER, EntryPoint
from framework.project.profile_cache import CachedProfile
from framework.project.run_folders import absolute_folder, mark_in_use, new_job_id
from framework.project.script_facts import script_facts
from framework.scheduler.agents import admitted_agents
from framework.scheduler.demand import query_demand
from framework.scheduler.job import JobEntry
from framework.scheduler.mesos_access import MesosAccess
from framework.scheduler.session import sigterm_as_interrupt
from framework.scheduler.standalone import StandaloneJob, run_standalone
from framework.training.controller import TrainingJob
from framework.training.elastic.options import elastic_notes
from framework.training.launch import kill_grace_s
from framework.training.observer import JobObserver
from framework.training.options import TrainingOptions
from framework.training.planning import TrainingSizing
from framework.training.spec import JobResult, JobSpec
from solver import Plan
from solver.settings import PlanSettings

CANCEL_MARGIN_S = 12.0
"""Additional time, beyond that of its processes, for a job to end after Ctrl-C."""


@dataclass(frozen=True, kw_only=True)
class RunRequest(TrainingOptions):
    """Input of `dike run`.

    Attributes:
        entry: the script and the folder of its bundle.
        archive: the bundle (`framework.project.bundle.pack`).
        cached_profile: the same, if it was read for an earlier command; None if for this one.
        checkpoint_dir: folder for checkpoints; None makes a new one below `dike-runs`.
        planning, plan, plan_only, stream_all_logs: see `JobSpec`.
    """

    entry: EntryPoint
    archive: bytes
    arguments: tuple[str, ...]
    profile: ModelProfile
    cached_profile: CachedProfile | None = None
    mesos: MesosAccess = field(default_factory=MesosAccess)
    planning: PlanSettings = field(default_factory=PlanSettings)
    plan: Plan | None = None
    plan_only: bool = False
    stream_all_logs: bool = False


def run_training(request: RunRequest, observer: JobObserver) -> JobResult:
    """Runs a training job to its end.

    Raises:
        BadInputError: the input is invalid; nothing was launched.
        JobFailedError: the master removed the framework, or the private Mesos failed.
        InterruptedByUserError: after Ctrl-C or SIGTERM, when all tasks have ended.
    """
    job_id = new_job_id(request.entry.script)
    checkpoint_dir = absolute_folder(request.checkpoint_dir or f"{RUNS_FOLDER}/{job_id}")
    container = task_container(request.mesos.image, request.volumes, request.checkpoint_dir and checkpoint_dir)
    checkpoints.check_folder(checkpoint_dir, request.profile)
    made: list[TrainingJob] = []
    with sigterm_as_interrupt():
        try:
            token = bundle.new_token()
            with (
                request.mesos.connect() as master,
                request.mesos.bundle_server({token: request.archive}.get, master) as server,
                _mark_folder(request, job_id, checkpoint_dir),
                _share_folder(request, checkpoint_dir) as folder,
            ):
                spec = _job_spec(request, job_id, checkpoint_dir, container, server.url(token), master)
                spec = dataclasses.replace(spec, folder=folder)
                spec.check_tasks()
                result = _run(request, spec, master, observer, made)
                if request.cached_profile is not None and result.profile is not None:
                    request.cached_profile.replace_with(result.profile)
                return result
        except KeyboardInterrupt:
            job = made[0] if made else None
            raise InterruptedByUserError(_after_interruption(request, checkpoint_dir, job)) from None
        except (MesosLostError, FrameworkRemovedError) as error:
            raise JobFailedError(f"{error} {_how_to_resume(request, checkpoint_dir, made[0])}") from error


def _after_interruption(request: RunRequest, checkpoint_dir: str, job: TrainingJob | None) -> str:
    if job is None:
        return "Interrupted; nothing was started."
    return f"Interrupted; all tasks were stopped. {_how_to_resume(request, checkpoint_dir, job)}"


def _how_to_resume(request: RunRequest, checkpoint_dir: str, job: TrainingJob) -> str:
    step = job.result.checkpoint_step
    if step is None and request.checkpoint_dir is None:
        return (
            "No checkpoint was saved yet, so the same command starts again from the beginning; "
            "--checkpoint-interval 10 saves every 10 seconds."
        )
    if request.checkpoint_dir is not None:
        saved = "No new checkpoint was saved" if step is None else f"The checkpoint of step {step} was saved"
        return f"{saved}; the same command resumes from the newest checkpoint in {checkpoint_dir}."
    return (
        f"The checkpoint of step {step} is in {checkpoint_dir}; the same command with "
        f"--checkpoint-dir {shlex.quote(checkpoint_dir)} resumes from it."
    )


def _mark_folder(request: RunRequest, job_id: str, checkpoint_dir: str) -> contextlib.AbstractContextManager[None]:
    """Marks the checkpoint folder as in use, if Dike has made it and tasks see the same path."""
    if request.plan_only or "://" in checkpoint_dir:
        return contextlib.nullcontext()
    return mark_in_use(
        Path(checkpoint_dir), job_id, make=request.checkpoint_dir is None and request.mesos.keeps_run_folders
    )


def _share_folder(request: RunRequest, checkpoint_dir: str) -> contextlib.AbstractContextManager[RunFolder | None]:
    return contextlib.nullcontext() if request.plan_only else request.mesos.run_folder(checkpoint_dir)


def _job_spec(
    request: RunRequest,
    job_id: str,
    checkpoint_dir: str,
    container: Container | None,
    bundle_url: str,
    master: LeadingMaster,
) -> JobSpec:
    return JobSpec(
        **{**values_of(TrainingOptions, request), "checkpoint_dir": checkpoint_dir},
        job_id=job_id,
        script=request.entry.path,
        arguments=request.arguments,
        profile=request.profile,
        profile_is_kept=request.cached_profile is not None,
        bundle_url=bundle_url,
        python=request.mesos.python(master),
        planning=request.planning,
        plan=request.plan,
        container=container,
        plan_only=request.plan_only,
        hand_out_gpus=master.is_here,
        stream_all_logs=request.stream_all_logs,
        preload=script_facts(request.entry).preload,
    )


def _run(
    request: RunRequest, spec: JobSpec, master: LeadingMaster, observer: JobObserver, made: list[TrainingJob]
) -> JobResult:
    """Runs the job; `made` receives its state machine as soon as it exists."""

    def make(entry: JobEntry) -> TrainingJob:
        all_agents = functools.partial(admitted_agents, master, request.constraints)
        demand = functools.partial(query_demand, master)
        made.append(TrainingJob(spec, observer, all_agents, demand=demand, background=entry.background))
        return made[0]

    job = StandaloneJob(
        job_id=spec.job_id,
        make=make,
        cancel_timeout_s=kill_grace_s(spec.environment) + CANCEL_MARGIN_S,
        subscribed=lambda _: _notify_before_start(request, spec, observer),
        interrupted=lambda: observer.notify("interrupted: stopping all tasks (Ctrl-C again leaves that to Mesos)"),
        constraints=request.constraints,
        sizing=TrainingSizing(spec),
    )
    training = run_standalone(job, request.mesos, master)
    assert isinstance(training, TrainingJob)
    return training.result


def _notify_before_start(request: RunRequest, spec: JobSpec, observer: JobObserver) -> None:
    if spec.plan_only:
        return
    if not request.mesos.keeps_run_folders and request.checkpoint_dir is None:
        where = "on the chief's agent" if spec.container is None else "in the chief's container, deleted with it"
        observer.notify(
            f"checkpoints are written to {spec.checkpoint_dir} {where}; name a folder that all agents share "
            "with --checkpoint-dir, so that a restart on another agent finds them"
        )
    if spec.profile.api in (Api.COORDINATOR, Api.LOOP):
        loop, means = "the script's own coordinator loop", "by itself"
        if spec.profile.api is Api.LOOP:
            # A `fit` of a model that cannot be profiled is saved as in any job.
            loop, means = "a training loop of the script's own", "by dike.checkpoint or by itself"
        observer.notify(
            f"{loop} saves and restores {means}, if at all; DIKE_CHECKPOINT_DIR in its environment names the folder"
        )
    if spec.elastic is not None:
        for text in elastic_notes(spec):
            observer.notify(text)
