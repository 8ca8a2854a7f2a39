"""Creates the state machine of a job from its database record, for new and recovered jobs."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dike.exceptions import BadInputError, DikeError
from executor.mirror import RunFolder
from framework.mesos import events
from framework.mesos.containers import Volume
from framework.mesos.offers import AgentOffer
from framework.scheduler.agents import AllAgents
from framework.scheduler.demand import Demand
from framework.scheduler.job import Answer, Job, JobEntry
from framework.scheduler.journal import LeaseLostError, StorageUnavailableError
from framework.scheduler.lease import HEARTBEAT_S, STALE_S, Heartbeat
from framework.scheduler.records import JobKind, JobRecord
from framework.search.controller import SearchController
from framework.search.limits import FailureRule
from framework.search.optuna_study import Study
from framework.search.policy import policy_of
from framework.search.records import SearchSpec, TrialRecord, TrialState
from framework.search.recovery import SearchState, close_open_slices, load_trials_to_resume
from framework.search.slot_pool import SearchSizing, SlotLaunch
from framework.search.store import Store
from framework.search.trials import TrialTracker
from framework.service.mounts import Mounts
from framework.service.recorder import JobRecorder, SearchRecorder, TrainingRecorder
from framework.service.requests import SearchJobRequest, TrainingRequest, is_own_search, stored_request
from framework.service.store import ServiceStore
from framework.training.controller import TrainingJob
from framework.training.planning import TrainingSizing
from framework.training.state import stored_checkpoint_dir
from solver.network import Network


@dataclass(frozen=True)
class JobContext:
    """What a service provides to each of its jobs.

    Attributes:
        bundle_url: bundle token -> URL from which executors fetch that bundle.
        forget_bundle: called with the token of a job that has ended.
        image: container image for the tasks; None for the agent's own file system.
        hand_out_gpus: whether Dike assigns GPU devices itself, for agents that neither isolate nor announce them.
        checkpoint_root: for jobs that name no checkpoint folder; the same path on all agents.
        folder: how executors that do not see that folder reach it; None if all see it.
        agents: constraints -> lists the agents that meet them.
        demand: framework id -> what all other frameworks use and request, None if unknown; returns immediately.
        network: the known links between agents.
    """

    store: ServiceStore
    bundle_url: Callable[[str], str]
    python: str
    image: str | None
    hand_out_gpus: bool
    checkpoint_root: str
    agents: Callable[[tuple[str, ...]], AllAgents]
    demand: Callable[[str], Demand | None]
    allowed_volumes: tuple[Volume, ...] = ()
    network: Network | None = None
    forget_bundle: Callable[[str], None] = lambda _: None
    folder: RunFolder | None = None

    def folder_of(self, path: str) -> RunFolder | None:
        """How executors that do not see a run folder reach it."""
        return None if self.folder is None else self.folder.containing(path)

    @property
    def mounts(self) -> Mounts:
        return Mounts(self.image, self.checkpoint_root, self.allowed_volumes)


def make_job(record: JobRecord, entry: JobEntry, recorder: JobRecorder, context: JobContext) -> Job:
    """Creates a job's state machine, restored from `record.state_data`; raises `BadInputError` if the data are
    unusable.
    """
    if record.kind is JobKind.SEARCH:
        return make_search(record, entry, recorder, context)
    return _make_training(record, entry, recorder, context)


def _make_training(record: JobRecord, entry: JobEntry, recorder: JobRecorder, context: JobContext) -> TrainingJob:
    request = stored_request(record)
    assert isinstance(request, TrainingRequest)
    folder_name = record.folder_name
    # A recovered job keeps its folder, even if this service has another root.
    folder = request.checkpoint_dir or stored_checkpoint_dir(record.state_data)
    folder = folder or f"{context.checkpoint_root.rstrip('/')}/{folder_name}"
    with _stored_data_errors():
        spec = request.to_spec(
            context.network,
            job_id=record.id,
            checkpoint_owner=folder_name,
            checkpoint_dir=folder,
            bundle_url=context.bundle_url(record.bundle_token),
            python=context.python,
            container=context.mounts.container(request, folder),
            hand_out_gpus=context.hand_out_gpus,
            folder=context.folder_of(folder),
        )
    entry.sizing = TrainingSizing(spec)
    if spec.elastic is not None:
        # Starts the measurement in the background.
        context.demand("")
    observer = TrainingRecorder(recorder, spec.is_chief)
    state = record.state_data and {**record.state_data, "received": context.store.history.received(record.id)}
    job = TrainingJob(
        spec,
        observer,
        context.agents(record.constraints),
        demand=context.demand,
        state=state,
        launched=entry.tasks.keys(),
        patient=True,
        background=entry.background,
    )
    last = context.store.history.last_progress(record.id) if record.state_data is not None else None
    if last is not None and job.result.steps is None:
        job.result.steps, job.result.loss = last.step, last.loss
    return job


@contextlib.contextmanager
def _stored_data_errors() -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        reason = (str(error).splitlines() or [repr(error)])[0].rstrip(".")
        raise BadInputError(f"The stored data of the job cannot be parsed any more: {reason}.") from error


class ServiceSearch(SearchController):
    """A search that owns its lease; `resources` are closed with it, `records` stores its end."""

    def __init__(self, resources: contextlib.ExitStack, records: Store, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._resources = resources
        self._records = records
        self._error = ""

    def handle(self, event: events.Event) -> None:
        with self._recording_errors():
            super().handle(event)

    def tick(self) -> None:
        with self._recording_errors():
            super().tick()

    def match_offers(self, agents: Sequence[AgentOffer]) -> Answer:
        with self._recording_errors():
            return super().match_offers(agents)

    def close(self) -> None:
        """Records the search's end and releases its lease: `dike tune --resume` may resume it."""
        # After a lost lease, the new owner records how the search ends.
        with self._resources, contextlib.suppress(LeaseLostError):
            self._records.finish_search(self._error or self.result.failure)

    def release_leases(self) -> None:
        """Releases the lease for the next service, which resumes the search."""
        self._resources.close()

    @contextlib.contextmanager
    def _recording_errors(self) -> Iterator[None]:
        try:
            yield
        except DikeError as error:
            self._error = str(error)
            raise


def make_search(record: JobRecord, entry: JobEntry, recorder: JobRecorder, context: JobContext) -> ServiceSearch:
    """Creates a search's state machine, restored from `record.state_data` and the database of searches.

    Raises:
        BadInputError: if the request cannot be parsed any more, or the search's name is taken.
    """
    request = stored_request(record)
    assert isinstance(request, SearchJobRequest)
    with _stored_data_errors():
        spec = request.to_spec()
    folder = spec.checkpoint_dir or f"{context.checkpoint_root.rstrip('/')}/{record.folder_name}"
    spec = dataclasses.replace(spec, checkpoint_dir=folder)
    state = _restored_state(record, entry)
    live_slots = [] if state is None else [slot.id for slot in state.slots]
    database = context.store.database
    with contextlib.ExitStack() as undo:
        resources = undo.enter_context(contextlib.ExitStack())
        store = Store(database.url, engine=database.engine)
        is_new = _open(store, spec, record)
        # The stored spec: a recovered search keeps its folder, even if this service has another root.
        spec = store.spec
        last_heartbeat_s = store.last_heartbeat_s(spec.name)
        resources.enter_context(_locked(store, spec.name, database.shared.heartbeat))
        study = (Study.create if is_new else Study.open)(database.url, spec, database.shared.storage())
        resources.callback(study.close)
        store.reopen_search()
        close_open_slices(store, last_heartbeat_s, live_slots)
        records = load_trials_to_resume(store, study, live_slots)
        state = _apply_abort(spec, state, records)
        slices = store.load_slices()
        first_slot = max((one.slot for one in slices), default=-1) + 1
        if state is not None:
            # `dike tune --resume` may have used further slot numbers meanwhile.
            state = dataclasses.replace(state, next_slot=max(state.next_slot, first_slot))
        launch = SlotLaunch(
            spec=spec,
            bundle_url=context.bundle_url(record.bundle_token),
            script=spec.script,
            preload=tuple(request.preload),
            python=context.python,
            container=context.mounts.container(request, spec.checkpoint_dir),
            hand_out_gpus=context.hand_out_gpus,
            folder=context.folder_of(spec.checkpoint_dir),
        )
        entry.sizing = SearchSizing(spec)
        observer = SearchRecorder(recorder)
        search = ServiceSearch(
            resources,
            store,
            launch,
            policy_of(spec, store, slices, resumed=not is_new, notify=observer.notify),
            observer,
            TrialTracker(spec, store, study, records),
            store,
            context.agents(record.constraints),
            first_slot=first_slot,
            state=state,
            patient=True,
        )
        undo.pop_all()
        return search


def _restored_state(record: JobRecord, entry: JobEntry) -> SearchState | None:
    """The state that the previous service saved, without the slots that have ended since."""
    if record.state_data is None:
        return None
    state = SearchState.from_json(record.state_data)
    return dataclasses.replace(state, slots=tuple(slot for slot in state.slots if slot.task_id in entry.tasks))


def _apply_abort(spec: SearchSpec, state: SearchState | None, records: Iterable[TrialRecord]) -> SearchState | None:
    """Sets the search to end if a trial failed that should end it: the trial is saved before the search's state.

    Failures from before the search was resumed do not count: they have ended it once.
    """
    if not FailureRule.parse(spec.on_failure).aborts or state is None or state.ending is not None:
        return state
    since_s = state.began_s
    failed = next((one for one in records if one.state is TrialState.FAILED and (one.ended_s or 0.0) >= since_s), None)
    if failed is None:
        return state
    return dataclasses.replace(state, ending=f"trial {failed.number} failed")


def _open(store: Store, spec: SearchSpec, record: JobRecord) -> bool:
    """Opens the job's search, or creates it; returns whether it is new. Raises `BadInputError` if the name is taken."""
    try:
        store.create_search(spec)
    except StorageUnavailableError:
        raise
    except BadInputError:
        if not is_own_search(record, *store.searches(spec.name)):
            raise
        store.open_search(spec.name)
        return False
    return True


@contextlib.contextmanager
def _locked(store: Store, name: str, heartbeat: Heartbeat) -> Iterator[None]:
    """Locks the search; waits for the lease of a predecessor that died on another machine to expire."""
    deadline_s = time.monotonic() + STALE_S + HEARTBEAT_S
    while True:
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(store.lock(name, heartbeat))
            except StorageUnavailableError:
                raise
            except BadInputError:
                if time.monotonic() >= deadline_s:
                    raise
                time.sleep(HEARTBEAT_S)
                continue
            yield
            return
