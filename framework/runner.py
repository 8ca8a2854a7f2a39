"""Runs one training job from a script to its result: profile, Mesos, bundle, driver, events."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import getpass
import ipaddress
import os
import queue
import secrets
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from dike import checkpoints
from dike.exceptions import BadInputError, InterruptedByUserError, JobFailedError
from dike.profile import Api, ModelProfile
from framework import bundle, events
from framework import master as mesos_master
from framework.driver import Driver, FrameworkSettings, driver_failure
from framework.embedded import AgentSpec, EmbeddedCluster
from framework.job import JobResult, JobSpec
from framework.master import Master
from framework.observer import JobObserver
from framework.training import TrainingJob
from solver import Objective, Plan

EVENT_WAIT_S = 0.1
CANCEL_TIMEOUT_S = 20.0
SUBSCRIBE_TIMEOUT_S = 20.0
RUNS_FOLDER = "dike-runs"


@dataclass(frozen=True)
class RunRequest:
    """What `dike run` was asked to do.

    Attributes:
        script: the user's script.
        arguments: its arguments.
        profile: the model's numbers.
        master: `host:port` or `zk://...`; None starts a private Mesos on this machine.
        agents: the private Mesos' agents.
        connect_timeout_s: how long to wait for the master.
        role, principal, secret: how to subscribe.
        image: container image for the tasks; None for the agent's own file system.
        agent_python: interpreter on the agents; None takes ours for a Mesos on this machine and `python3` for another.
        checkpoint_dir: where checkpoints go; None makes a new folder below `dike-runs`.
        checkpoint_interval_s, max_restarts, objective, max_workers, plan, plan_only, stream_all_logs: see `JobSpec`.
    """

    script: Path
    arguments: tuple[str, ...]
    profile: ModelProfile
    master: str | None = None
    agents: Sequence[AgentSpec] = (AgentSpec(),)
    connect_timeout_s: float = 10.0
    role: str = "*"
    principal: str | None = None
    secret: str | None = None
    image: str | None = None
    agent_python: str | None = None
    checkpoint_dir: str | None = None
    checkpoint_interval_s: float = 60.0
    max_restarts: int = 3
    objective: Objective = "throughput"
    max_workers: int | None = None
    plan: Plan | None = None
    plan_only: bool = False
    stream_all_logs: bool = False
    environment: dict[str, str] = field(default_factory=dict)


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
    checkpoint_dir = request.checkpoint_dir or str(Path.cwd() / RUNS_FOLDER / job_id)
    if "://" not in checkpoint_dir:
        checkpoint_dir = str(Path(checkpoint_dir).absolute())
    checkpoints.check_folder(checkpoint_dir, request.profile)
    archive = bundle.pack(request.script)
    with _sigterm_as_interrupt(), contextlib.ExitStack() as stack:
        try:
            master = _master(request, stack)
            host = "127.0.0.1" if request.master is None else bundle.address_towards(master.host, master.port)
            server = stack.enter_context(bundle.BundleServer(archive, host))
            spec = _job_spec(request, job_id, checkpoint_dir, server.url, on_this_machine=_is_loopback(master.host))
            return _drive(spec, request, master, observer)
        except KeyboardInterrupt:
            raise InterruptedByUserError("Interrupted; everything that was started has been told to end.") from None


def new_job_id(script: Path) -> str:
    """A name for a job, unique without asking anyone: script, time and four random digits."""
    stem = "".join(c if c.isalnum() or c in "-_" else "-" for c in script.stem)
    return f"{stem}-{datetime.datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def _master(request: RunRequest, stack: contextlib.ExitStack) -> Master:
    if request.master is not None:
        return mesos_master.connect(request.master, request.connect_timeout_s)
    cluster = stack.enter_context(EmbeddedCluster(request.agents))
    return mesos_master.connect(cluster.master, request.connect_timeout_s)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    except (OSError, ValueError):
        return False


def _job_spec(
    request: RunRequest, job_id: str, checkpoint_dir: str, bundle_url: str, *, on_this_machine: bool
) -> JobSpec:
    return JobSpec(
        job_id=job_id,
        script=request.script.name,
        arguments=request.arguments,
        profile=request.profile,
        checkpoint_dir=checkpoint_dir,
        bundle_url=bundle_url,
        python=request.agent_python or (sys.executable if on_this_machine and not request.image else "python3"),
        checkpoint_interval_s=request.checkpoint_interval_s,
        max_restarts=request.max_restarts,
        objective=request.objective,
        max_workers=request.max_workers,
        plan=request.plan,
        image=request.image,
        plan_only=request.plan_only,
        hand_out_gpus=on_this_machine,
        stream_all_logs=request.stream_all_logs,
        environment=request.environment,
    )


def _drive(spec: JobSpec, request: RunRequest, master: Master, observer: JobObserver) -> JobResult:
    scheduler = events.EventScheduler()
    settings = FrameworkSettings(
        name=f"dike {spec.job_id}",
        user=_user_name(),
        role=request.role,
        principal=request.principal,
        secret=request.secret,
    )
    driver = Driver(settings, master.uri, scheduler)
    job = TrainingJob(spec, driver, observer, master.agents)
    driver.start()
    try:
        _subscribe(job, scheduler, master)
        if request.master is not None and request.checkpoint_dir is None and not spec.plan_only:
            observer.note(
                f"checkpoints go to {spec.checkpoint_dir} on the chief's agent; name a folder that all agents share "
                "with --checkpoint-dir, so that a restart can find them anywhere"
            )
        if spec.profile.api is Api.COORDINATOR and not spec.plan_only:
            observer.note(
                "the script's own coordinator loop saves and restores by itself, if at all; DIKE_CHECKPOINT_DIR in its "
                "environment names the folder"
            )
        try:
            _pump(job, scheduler, deadline=None)
        except KeyboardInterrupt:
            if reason := driver_failure():
                raise JobFailedError(f"The connection to the Mesos master broke down: {reason}.") from None
            observer.note("interrupted: ending all tasks (Ctrl-C again leaves that to Mesos)")
            job.cancel()
            _pump(job, scheduler, deadline=time.monotonic() + CANCEL_TIMEOUT_S)
            raise
    finally:
        # Also ends every task that might still run: Mesos kills what belongs to a framework that is torn down.
        driver.stop()
        driver.join()
    return job.result


def _subscribe(job: TrainingJob, scheduler: events.EventScheduler, master: Master) -> None:
    deadline = time.monotonic() + SUBSCRIBE_TIMEOUT_S
    while True:
        try:
            event = scheduler.events.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise BadInputError(
                f"The Mesos master at {master.address} did not take the framework in within {SUBSCRIBE_TIMEOUT_S:g} s."
            ) from None
        job.handle(event)
        if isinstance(event, events.Subscribed):
            return


def _pump(job: TrainingJob, scheduler: events.EventScheduler, deadline: float | None) -> None:
    while not job.done and (deadline is None or time.monotonic() < deadline):
        with contextlib.suppress(queue.Empty):
            job.handle(scheduler.events.get(timeout=EVENT_WAIT_S))
        job.tick()


def _user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # A container may run under a number that has no name.
        return "nobody"


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Makes SIGTERM end a run in the same orderly way as Ctrl-C."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def environment_for_tasks() -> dict[str, str]:
    """Variables of ours that the script's processes should see: what the user set for TensorFlow and Keras."""
    names = ("TF_USE_LEGACY_KERAS", "KERAS_BACKEND", "PYTHONHASHSEED")
    return {name: os.environ[name] for name in names if name in os.environ}
