"""A search of a service: opened in the service's database, with the slots that a service before this one has left."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterable, Iterator
from typing import Any

from dike.exceptions import BadInputError, DikeError
from framework import events
from framework.lease import HEARTBEAT_S, STALE_S, Heartbeat, LeaseLostError
from framework.policies.registry import make_policy
from framework.search.database import StorageUnavailableError
from framework.search.inheritance import SearchState, close_slices, prepared
from framework.search.launching import SlotLaunch
from framework.search.moves import with_measured_moves
from framework.search.records import SearchSpec, TrialRecord, TrialState
from framework.search.roster import Roster
from framework.search.search import Search
from framework.search.store import Store
from framework.search.study import Study
from framework.service.own_search import is_own
from framework.service.records import JobRecord
from framework.service.requests import SearchJobRequest, read_request
from framework.service.search_watcher import SearchWatcher
from framework.service.seat import Seat
from framework.service.sizing import SearchSizing
from framework.service.surroundings import Surroundings
from framework.service.watchers import Notebook


class ServiceSearch(Search):
    """A search that has its lease with it.

    Args:
        resources: closed with it.
        records: where its end is noted.
        arguments, more: of `framework.search.search.Search`.
    """

    def __init__(self, resources: contextlib.ExitStack, records: Store, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._resources = resources
        self._records = records
        self._error = ""

    def handle(self, event: events.Event) -> None:
        """See `Search.handle`."""
        with self._remembering():
            super().handle(event)

    def tick(self) -> None:
        """See `Search.tick`."""
        with self._remembering():
            super().tick()

    def close(self) -> None:
        """Notes that the search is over, and gives its lease back: `dike tune --resume` may go on with it."""
        # Whoever has taken the search over says how it ends.
        with self._resources, contextlib.suppress(LeaseLostError):
            self._records.finish_search(self._error or self.result.failure)

    def leave(self) -> None:
        """Gives the lease back, the search being gone on with by another service."""
        self._resources.close()

    @contextlib.contextmanager
    def _remembering(self) -> Iterator[None]:
        try:
            yield
        except DikeError as error:
            self._error = str(error)
            raise


def make_search(record: JobRecord, seat: Seat, notebook: Notebook, around: Surroundings) -> ServiceSearch:
    """A search's state machine; it goes on with what `record.state_data` and the database of searches have of it.

    Raises:
        BadInputError: if the request cannot be read any more, or there is a search of that name already.
    """
    request = read_request(record.request)
    assert isinstance(request, SearchJobRequest)
    spec = request.to_spec()
    folder = spec.checkpoint_dir or f"{around.checkpoint_root.rstrip('/')}/{record.id}"
    spec = dataclasses.replace(spec, checkpoint_dir=folder)
    state = _state(record, seat)
    living = [] if state is None else [slot.id for slot in state.slots]
    with contextlib.ExitStack() as undo:
        resources = undo.enter_context(contextlib.ExitStack())
        store = Store(around.store.url, engine=around.store.engine)
        is_new = _open(store, spec, record)
        # Where it keeps its checkpoints already it stays, should this service have another root.
        spec = store.spec
        last_sign_s = store.last_heartbeat_s(spec.name)
        resources.enter_context(_locked(store, spec.name, around.store.shared.heartbeat))
        study = (Study.create if is_new else Study.open)(around.store.url, spec, around.store.shared.storage())
        resources.callback(study.close)
        close_slices(store, last_sign_s, living)
        records = prepared(store.load_trials(), study.asked(), living)
        state = _ending_with(spec, state, records)
        for trial in records:
            store.save_trial(trial)
        slices = store.load_slices()
        first_slot = max((piece.slot for piece in slices), default=-1) + 1
        if state is not None:
            # `dike tune --resume` may have had slots of its own meanwhile.
            state = dataclasses.replace(state, next_slot=max(state.next_slot, first_slot))
        launch = SlotLaunch(
            spec=spec,
            bundle_url=around.bundle_url(record.bundle_token),
            script=spec.script,
            preload=tuple(request.preload),
            python=around.python,
            container=around.mounts.container(request, spec.checkpoint_dir),
            hand_out_gpus=around.hand_out_gpus,
        )
        seat.sizing = SearchSizing(spec)
        search = ServiceSearch(
            resources,
            store,
            launch,
            make_policy(spec.policy, with_measured_moves(spec.settings, slices)),
            seat,
            SearchWatcher(notebook),
            Roster(spec, store, study, records),
            store,
            around.agents(record.constraints),
            first_slot=first_slot,
            state=state,
            patient=True,
        )
        undo.pop_all()
        return search


def _state(record: JobRecord, seat: Seat) -> SearchState | None:
    """Where the service before this one has left the search, less the slots that have ended since."""
    if record.state_data is None:
        return None
    state = SearchState.from_json(record.state_data)
    return dataclasses.replace(state, slots=tuple(slot for slot in state.slots if slot.task_id in seat.tasks))


def _ending_with(spec: SearchSpec, state: SearchState | None, records: Iterable[TrialRecord]) -> SearchState | None:
    """The state, of a search that ends if a trial failed that should end it: the trial was written down before it.

    What failed before the search was gone on with has ended it once.
    """
    if spec.on_failure != "abort" or state is None or state.ending is not None:
        return state
    since_s = state.began_s
    failed = next((one for one in records if one.state is TrialState.FAILED and (one.ended_s or 0.0) >= since_s), None)
    if failed is None:
        return state
    reason, _, _ = failed.error.partition("\n")
    return dataclasses.replace(state, ending=f"trial {failed.number} failed: {reason}")


def _open(store: Store, spec: SearchSpec, record: JobRecord) -> bool:
    """Opens the job's search, or makes it; whether it is new.

    Raises:
        BadInputError: if there is one of that name that is not this job's.
    """
    try:
        store.create_search(spec)
    except StorageUnavailableError:
        raise
    except BadInputError:
        if not is_own(record, *store.searches(spec.name)):
            raise
        store.open_search(spec.name)
        return False
    return True


@contextlib.contextmanager
def _locked(store: Store, name: str, heartbeat: Heartbeat) -> Iterator[None]:
    """Holds the search's lease; a predecessor on another machine may seem to hold it for a while after its death."""
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
