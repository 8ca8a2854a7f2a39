"""State of a search that a service hands to its successor: the slots, and the runs in them.

The trials' records, written before a slot is notified, say which run is in which slot; the slot itself reports its
progress (`Slot.adopt`). So this state is small, and changes only when slots are added or removed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from framework.mesos.tasks import TaskState
from framework.policies.trials.interface import Choice
from framework.search.optuna_study import Study
from framework.search.records import SearchSpec, SliceRecord, TrialRecord, TrialState, trials_to_resume
from framework.search.slots import ActiveRun, Slot
from framework.search.speeds import rate_of
from framework.search.store import Store
from framework.search.trials import TrialTracker, trial_run


@dataclass(frozen=True)
class SearchState:
    """Persistent state of a running search.

    Attributes:
        began_s: start of the search, seconds since the epoch.
        ending: why the search is being ended; None if it is not.
        cancelled: whether a user cancelled it.
        slots: slots that may still run.
        executors: executors with a GPU for several slots (`SlotPool.shared_executors`).
        first_slot_s: when it got its first slot since it began, seconds since the epoch; None before.
    """

    began_s: float
    next_slot: int
    ending: str | None
    cancelled: bool
    slots: tuple[Slot, ...]
    first_slot_s: float | None = None
    executors: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "began_s": self.began_s,
            "next_slot": self.next_slot,
            "ending": self.ending,
            "cancelled": self.cancelled,
            "slots": [{name: _plain(getattr(slot, name)) for name in _SLOT_FIELDS} for slot in self.slots],
            "first_slot_s": self.first_slot_s,
            "executors": dict(self.executors),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> SearchState:
        """Parses what `to_json` returned.

        Raises:
            KeyError, TypeError, ValueError: if it is malformed.
        """
        return cls(
            began_s=float(values["began_s"]),
            next_slot=int(values["next_slot"]),
            ending=values["ending"],
            cancelled=bool(values["cancelled"]),
            slots=tuple(_slot(each) for each in values["slots"]),
            first_slot_s=values["first_slot_s"],
            executors=dict(values["executors"]),
        )


_SLOT_FIELDS = (
    "id",
    "task_id",
    "agent_id",
    "node",
    "address",
    "gpu_devices",
    "kind",
    "state",
    "executor_seen",
    "leaving",
    "has_trained",
    "memory_bytes",
    "executor_id",
    "cpus",
    "mem_mib",
    "slots_per_gpu",
)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _slot(values: Mapping[str, Any]) -> Slot:
    known = {name: values[name] for name in _SLOT_FIELDS}
    devices = tuple(int(device) for device in known["gpu_devices"])
    return Slot(**{**known, "gpu_devices": devices, "state": TaskState(known["state"])}, inherited=True)


def load_trials_to_resume(store: Store, study: Study, live_slots: Collection[int] = ()) -> list[TrialRecord]:
    """Loads the trials of an interrupted search (`trials_to_resume`), and stores those that have changed by that."""
    stored = store.load_trials()
    before = {record.number: (record.state, record.slot) for record in stored}
    records = trials_to_resume(stored, study.asked(before), live_slots)
    for record in records:
        if before.get(record.number) != (record.state, record.slot):
            store.save_trial(record)
    return records


def close_open_slices(store: Store, last_heartbeat_s: float | None, live_slots: Collection[int] = ()) -> None:
    """Ends the time slices that a killed process left open, at its last heartbeat.

    Args:
        store: has the search open.
        last_heartbeat_s: the last heartbeat, seconds since the epoch; None if there was none.
        live_slots: slots that may still run; slices of their runs stay open.
    """
    trials = {record.number: record for record in store.load_trials(readings=False)}
    left_open = [
        time_slice
        for time_slice in store.load_slices()
        if time_slice.end_s is None and not _is_live(time_slice, trials, live_slots)
    ]
    if not left_open:
        return
    reports = store.load_losses()
    for time_slice in left_open:
        time_slice.end_s = max(time_slice.start_s, last_heartbeat_s or time_slice.start_s)
        time_slice.outcome = "lost"
        of_run = [report for report in reports.get(time_slice.trial, ()) if report["run"] == time_slice.run]
        rate = rate_of(of_run)
        if rate is not None:
            time_slice.to_step = of_run[-1]["step"]
            time_slice.samples_per_s = rate * trials[time_slice.trial].samples_per_step
        store.save_slice(time_slice)


def _is_live(time_slice: SliceRecord, trials: Mapping[int, TrialRecord], live_slots: Collection[int]) -> bool:
    trial = trials[time_slice.trial]
    holds = trial.state in (TrialState.RUNNING, TrialState.STOPPED)
    return (
        time_slice.slot in live_slots and holds and trial.slot == time_slice.slot and time_slice.run == trial.runs - 1
    )


def restore_runs(
    spec: SearchSpec,
    slots: Iterable[Slot],
    trials: TrialTracker,
    slices: Iterable[SliceRecord],
    now_s: float,
    wall_s: float,
) -> None:
    """Puts the runs named by the records back into inherited slots."""
    by_id = {slot.id: slot for slot in slots}
    # If the end of a run was only partly stored, its slice is closed already; the run ends once more.
    begun = {(time_slice.trial, time_slice.run): time_slice for time_slice in slices}
    for record in trials.all:
        slot = by_id.get(record.slot) if record.slot is not None else None
        if record.state not in (TrialState.RUNNING, TrialState.STOPPED) or slot is None:
            continue
        run = ActiveRun(record, trial_run(spec, record, record.runs - 1), Choice(record.number, "", record.convergence))
        run.stored_reports = record.reports
        run.stored_output_bytes = trials.output_received(record)
        run.slice = begun.get(run.key)
        trials.speeds.begin_run(*run.key, slot.kind)
        if run.slice is None:
            # Another run was still being suspended in the slot.
            slot.next = run
            continue
        record.current = run.slice
        run.since_s = now_s - (wall_s - (run.slice.first_step_s or run.slice.start_s))
        run.training = run.slice.first_step_s is not None
        slot.current = run
        if record.state is TrialState.STOPPED:
            slot.stop_run()
    for slot in by_id.values():
        if slot.current is None:
            slot.current, slot.next = slot.next, None
