"""Runs one training job from a script to its result: profile, Mesos, bundle, driver, events."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from dike import checkpoints
from dike.exceptions import InterruptedByUserError
from dike.profile import Api, ModelProfile
from framework import bundle
from framework.containers import Container, own_container
from framework.elastic.demand import demand_on
from framework.elastic.options import elastic_notes
from framework.job import JobResult, JobSpec, Stragglers
from framework.job_plan import no_agent_meets
from framework.master import LeadingMaster
from framework.observer import JobObserver
from framework.search.script_facts import script_facts
from framework.service.constraints import parse_constraints
from framework.service.private import PrivateJob, run_privately
from framework.service.seat import Seat
from framework.session import MesosAccess, is_on_this_machine, sigterm_as_interrupt
from framework.training import TrainingJob
from solver import NodeClass, Objective, Plan

CANCEL_TIMEOUT_S = 20.0
RUNS_FOLDER = "dike-runs"


@dataclass(frozen=True)
class RunRequest:
    """What `dike run` was asked to do.

    Attributes:
        script: the user's script.
        arguments: its arguments.
        profile: the model's numbers.
        mesos: where to run it.
        checkpoint_dir: where checkpoints go; None makes a new folder below `dike-runs`.
        checkpoint_interval_s, max_restarts, objective, max_workers, plan, plan_only, stream_all_logs, elastic,
            resize_interval_s, stragglers: see `JobSpec`.
        environment: variables for the script's processes.
        constraints: which agents it may use (`framework.service.constraints`).
        volumes: folders of the agents for its containers (`framework.containers.parse_volume`).
    """

    script: Path
    arguments: tuple[str, ...]
    profile: ModelProfile
    mesos: MesosAccess = field(default_factory=MesosAccess)
    checkpoint_dir: str | None = None
    checkpoint_interval_s: float = 60.0
    max_restarts: int = 3
    objective: Objective = "throughput"
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


def run_training(request: RunRequest, observer: JobObserver) -> JobResult:
    """Runs a training job to its end.

    Raises:
        BadInputError: if the input cannot be used; nothing has been launched.
        JobFailedError: if the master ended the framework.
        InterruptedByUserError: after Ctrl-C or SIGTERM, when everything launched has ended.
    """
    # The bundle is the folder the script really is in, wherever a link to it may be.
    request = dataclasses.replace(request, script=request.script.resolve())
    job_id = new_job_id(request.script)
    checkpoint_dir = absolute_folder(request.checkpoint_dir or f"{RUNS_FOLDER}/{job_id}")
    container = own_container(request.mesos.image, request.volumes, request.checkpoint_dir and checkpoint_dir)
    checkpoints.check_folder(checkpoint_dir, request.profile)
    archive = bundle.pack(request.script)
    with sigterm_as_interrupt():
        try:
            token = bundle.new_token()
            with (
                request.mesos.connect() as master,
                request.mesos.bundle_server({token: archive}.get, master) as server,
            ):
                spec = _job_spec(request, job_id, checkpoint_dir, container, server.url(token), master)
                return _run(request, spec, master, observer)
        except KeyboardInterrupt:
            raise InterruptedByUserError("Interrupted; everything that was started has been told to end.") from None


def new_job_id(script: Path) -> str:
    """A name for a job, unique without asking anyone: script, time and six random digits."""
    stem = "".join(c if c.isalnum() or c in "-_" else "-" for c in script.stem)
    return f"{stem}-{datetime.datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def absolute_folder(path: str) -> str:
    """A folder's path as any process understands it; URLs such as `gs://bucket/x` stay as they are."""
    return path if "://" in path else str(Path(path).absolute())


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
        script=request.script.name,
        arguments=request.arguments,
        profile=request.profile,
        checkpoint_dir=checkpoint_dir,
        bundle_url=bundle_url,
        python=request.mesos.python(master),
        checkpoint_interval_s=request.checkpoint_interval_s,
        max_restarts=request.max_restarts,
        objective=request.objective,
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
        preload=script_facts(request.script, ()).preload if request.elastic else None,
    )


def _run(request: RunRequest, spec: JobSpec, master: LeadingMaster, observer: JobObserver) -> JobResult:
    def make(seat: Seat) -> TrainingJob:
        all_agents = functools.partial(admitted_agents, master, request.constraints)
        demand = functools.partial(demand_on, master)
        return TrainingJob(spec, seat, observer, all_agents, demand=demand, background=seat.background)

    job = PrivateJob(
        job_id=spec.job_id,
        make=make,
        cancel_timeout_s=CANCEL_TIMEOUT_S,
        subscribed=lambda _: _tell_before_the_start(request, spec, observer),
        interrupted=lambda: observer.note("interrupted: ending all tasks (Ctrl-C again leaves that to Mesos)"),
        constraints=request.constraints,
    )
    tenant = run_privately(job, request.mesos, master)
    assert isinstance(tenant, TrainingJob)
    return tenant.result


def admitted_agents(master: LeadingMaster, constraints: tuple[str, ...]) -> list[NodeClass] | None:
    """Every registered agent that a job may use, with all its resources; None where the master does not tell.

    Raises:
        InfeasibleError: if there are agents, but none that meets the constraints.
    """
    nodes = master.agents(parse_constraints(constraints).admits)
    if nodes == [] and constraints and master.agents():
        raise no_agent_meets(constraints)
    return nodes


def _tell_before_the_start(request: RunRequest, spec: JobSpec, observer: JobObserver) -> None:
    if spec.plan_only:
        return
    if request.mesos.master is not None and request.checkpoint_dir is None:
        where = "on the chief's agent" if spec.container is None else "in the chief's container, and go with it"
        observer.note(
            f"checkpoints go to {spec.checkpoint_dir} {where}; name a folder that all agents share "
            "with --checkpoint-dir, so that a restart can find them anywhere"
        )
    if spec.profile.api is Api.COORDINATOR:
        observer.note(
            "the script's own coordinator loop saves and restores by itself, if at all; DIKE_CHECKPOINT_DIR in its "
            "environment names the folder"
        )
    if spec.elastic is not None:
        for text in elastic_notes(spec):
            observer.note(text)


def environment_for_tasks() -> dict[str, str]:
    """Variables of ours that the script's processes should see: what the user set for TensorFlow and Keras."""
    names = ("TF_USE_LEGACY_KERAS", "KERAS_BACKEND", "PYTHONHASHSEED")
    return {name: os.environ[name] for name in names if name in os.environ}
