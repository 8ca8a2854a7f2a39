"""Runs one training job from a script to its result: profile, Mesos, bundle, driver, events."""

from __future__ import annotations

import contextlib
import functools
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from dike import checkpoints
from dike.exceptions import InterruptedByUserError, JobFailedError
from dike.profile import Api, ModelProfile
from framework.mesos.connection import MesosLostError
from framework.mesos.containers import Container, task_container
from framework.mesos.master import LeadingMaster
from framework.project import bundle
from framework.project.entry_point import RUNS_FOLDER, EntryPoint
from framework.project.kept_profiles import KnownProfile
from framework.project.run_folders import absolute_folder, in_use, new_job_id
from framework.project.script_facts import script_facts
from framework.scheduler.agents import admitted_agents
from framework.scheduler.demand import query_demand
from framework.scheduler.job import JobEntry
from framework.scheduler.mesos_access import MesosAccess, is_on_this_machine
from framework.scheduler.session import sigterm_as_interrupt
from framework.scheduler.standalone import StandaloneJob, run_standalone
from framework.training.controller import TrainingJob
from framework.training.elastic.options import elastic_notes
from framework.training.launch import kill_grace_s
from framework.training.observer import JobObserver
from framework.training.spec import JobResult, JobSpec, Stragglers
from solver import Plan
from solver.settings import PlanSettings

CANCEL_MARGIN_S = 12.0
"""How much longer than its processes a job may take to end after Ctrl-C."""


@dataclass(frozen=True)
class RunRequest:
    """What `dike run` was asked to do.

    Attributes:
        entry: what is run, and the folder that travels.
        archive: that folder, packed (`framework.project.bundle.pack`).
        arguments: the script's own.
        profile: the model's numbers.
        kept_profile: the same, where they were read for an earlier command; None if they were read for this one.
        mesos: where to run it.
        checkpoint_dir: where checkpoints go; None makes a new folder below `dike-runs`.
        checkpoint_interval_s, max_restarts, planning, min_workers, max_workers, plan, plan_only, stream_all_logs,
            elastic, resize_interval_s, stragglers, isolate_tasks: see `JobSpec`.
        environment: variables for the script's processes.
        constraints: which agents it may use (`framework.scheduler.constraints`).
        volumes: folders of the agents for its containers (`framework.mesos.containers.parse_volume`).
    """

    entry: EntryPoint
    archive: bytes
    arguments: tuple[str, ...]
    profile: ModelProfile
    kept_profile: KnownProfile | None = None
    mesos: MesosAccess = field(default_factory=MesosAccess)
    checkpoint_dir: str | None = None
    checkpoint_interval_s: float = 60.0
    max_restarts: int = 3
    planning: PlanSettings = field(default_factory=PlanSettings)
    min_workers: int | None = None
    max_workers: int | None = None
    plan: Plan | None = None
    plan_only: bool = False
    stream_all_logs: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    elastic: tuple[int, int] | None = None
    resize_interval_s: float = 60.0
    stragglers: Stragglers = "report"
    constraints: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()
    isolate_tasks: bool = False


def run_training(request: RunRequest, observer: JobObserver) -> JobResult:
    """Runs a training job to its end.

    Raises:
        BadInputError: if the input cannot be used; nothing has been launched.
        JobFailedError: if the master ended the framework, or a private Mesos broke down.
        InterruptedByUserError: after Ctrl-C or SIGTERM, when everything launched has ended.
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
                _marked(request, job_id, checkpoint_dir),
            ):
                spec = _job_spec(request, job_id, checkpoint_dir, container, server.url(token), master)
                result = _run(request, spec, master, observer, made)
                if request.kept_profile is not None and result.profile is not None:
                    request.kept_profile.replaced_by(result.profile)
                return result
        except KeyboardInterrupt:
            job = made[0] if made else None
            raise InterruptedByUserError(_after_interruption(request, checkpoint_dir, job)) from None
        except MesosLostError as error:
            raise JobFailedError(f"{error} {_how_to_go_on(request, checkpoint_dir, made[0])}") from error


def _after_interruption(request: RunRequest, checkpoint_dir: str, job: TrainingJob | None) -> str:
    """What somebody who has pressed Ctrl-C may want to know: how the training goes on."""
    if job is None:
        return "Interrupted; nothing was started."
    return f"Interrupted; all tasks were told to end. {_how_to_go_on(request, checkpoint_dir, job)}"


def _how_to_go_on(request: RunRequest, checkpoint_dir: str, job: TrainingJob) -> str:
    """How a training goes on that was cut short."""
    step = job.result.checkpoint_step
    if step is None and request.checkpoint_dir is None:
        return (
            "No checkpoint was saved yet, so the same command starts again from the beginning; "
            "--checkpoint-interval 10 saves every 10 seconds."
        )
    if request.checkpoint_dir is not None:
        saved = "No new checkpoint was saved" if step is None else f"The checkpoint of step {step} was saved"
        return f"{saved}; the same command goes on from the newest checkpoint in {checkpoint_dir}."
    return (
        f"The checkpoint of step {step} is in {checkpoint_dir}; the same command with "
        f"--checkpoint-dir {shlex.quote(checkpoint_dir)} goes on from there."
    )


def _marked(request: RunRequest, job_id: str, checkpoint_dir: str) -> contextlib.AbstractContextManager[None]:
    """Says in the checkpoint folder that it is in use, where that is one of ours and tasks see it as we do."""
    if request.plan_only or "://" in checkpoint_dir:
        return contextlib.nullcontext()
    return in_use(Path(checkpoint_dir), job_id, make=request.checkpoint_dir is None and request.mesos.runs_here)


def _job_spec(
    request: RunRequest,
    job_id: str,
    checkpoint_dir: str,
    container: Container | None,
    bundle_url: str,
    master: LeadingMaster,
) -> JobSpec:
    return JobSpec(
        job_id=job_id,
        script=request.entry.path,
        arguments=request.arguments,
        profile=request.profile,
        profile_is_kept=request.kept_profile is not None,
        checkpoint_dir=checkpoint_dir,
        bundle_url=bundle_url,
        python=request.mesos.python(master),
        checkpoint_interval_s=request.checkpoint_interval_s,
        max_restarts=request.max_restarts,
        planning=request.planning,
        min_workers=request.min_workers,
        max_workers=request.max_workers,
        plan=request.plan,
        container=container,
        plan_only=request.plan_only,
        hand_out_gpus=is_on_this_machine(master),
        stream_all_logs=request.stream_all_logs,
        environment=request.environment,
        elastic=request.elastic,
        resize_interval_s=request.resize_interval_s,
        stragglers=request.stragglers,
        preload=script_facts(request.entry).preload,
        isolate_tasks=request.isolate_tasks,
    )


def _run(
    request: RunRequest, spec: JobSpec, master: LeadingMaster, observer: JobObserver, made: list[TrainingJob]
) -> JobResult:
    """Runs it; `made` has the job's state machine as soon as there is one."""

    def make(handle: JobEntry) -> TrainingJob:
        all_agents = functools.partial(admitted_agents, master, request.constraints)
        demand = functools.partial(query_demand, master)
        made.append(TrainingJob(spec, observer, all_agents, demand=demand, background=handle.background))
        return made[0]

    job = StandaloneJob(
        job_id=spec.job_id,
        make=make,
        cancel_timeout_s=kill_grace_s(spec.environment) + CANCEL_MARGIN_S,
        subscribed=lambda _: _notify_before_start(request, spec, observer),
        interrupted=lambda: observer.notify("interrupted: ending all tasks (Ctrl-C again leaves that to Mesos)"),
        constraints=request.constraints,
    )
    training = run_standalone(job, request.mesos, master)
    assert isinstance(training, TrainingJob)
    return training.result


def _notify_before_start(request: RunRequest, spec: JobSpec, observer: JobObserver) -> None:
    if spec.plan_only:
        return
    if request.mesos.master is not None and request.checkpoint_dir is None:
        where = "on the chief's agent" if spec.container is None else "in the chief's container, and go with it"
        observer.notify(
            f"checkpoints go to {spec.checkpoint_dir} {where}; name a folder that all agents share "
            "with --checkpoint-dir, so that a restart can find them anywhere"
        )
    if spec.profile.api in (Api.COORDINATOR, Api.LOOP):
        loop, means = "the script's own coordinator loop", "by itself"
        if spec.profile.api is Api.LOOP:
            # Or it calls `fit`, of a model that cannot be read: that is saved as in any job.
            loop, means = "a training loop of the script's own", "by dike.checkpoint or by itself"
        observer.notify(
            f"{loop} saves and restores {means}, if at all; DIKE_CHECKPOINT_DIR in its environment names the folder"
        )
    if spec.elastic is not None:
        for text in elastic_notes(spec):
            observer.notify(text)
