"""The table of a run's phases: complete, and what can be reached by it."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from executor.run_phases import IN_MEMORY, LEAVING, TRANSITIONS, WITH_PROCESS, Event, Phase, diagram

ARCHITECTURE = Path(__file__).parents[2] / "docs/architecture.md"
LAST = {Phase.PARKED, Phase.DONE}


def reachable(start: Phase) -> set[Phase]:
    found, left = {start}, [start]
    while left:
        phase = left.pop()
        after = {to for (before, _), to in TRANSITIONS.items() if before is phase} - found
        found |= after
        left += after
    return found


def test_all_phases_are_reached_and_all_lead_to_an_end() -> None:
    assert reachable(Phase.PREPARING) == set(Phase)
    for phase in Phase:
        assert reachable(phase) & LAST
    assert not any(before in LAST for before, _ in TRANSITIONS)


def test_a_process_may_die_in_every_phase() -> None:
    for phase in WITH_PROCESS:
        assert TRANSITIONS[phase, Event.EXIT] is Phase.EXITED
    # One that dies while it waits is evicted, like one that may not stay.
    for phase in IN_MEMORY - LAST:
        assert TRANSITIONS[phase, Event.EVICT] is Phase.STOPPING
    assert not WITH_PROCESS & LEAVING


def test_whatever_runs_can_be_stopped() -> None:
    for phase in WITH_PROCESS - {Phase.STOPPING}:
        assert TRANSITIONS[phase, Event.STOP] is Phase.STOPPING
    assert Phase.RUNNING not in reachable(Phase.STOPPING)
    assert not reachable(Phase.STOPPING) & IN_MEMORY


class Model:
    """A run in a few words: whether it has a process, whether that waits, and whether it was stopped."""

    def __init__(self) -> None:
        self.begun = self.has_process = self.waits = self.stopped = False

    def apply(self, event: Event) -> None:
        match event:
            case Event.FORKED:
                assert not self.begun
                self.begun = self.has_process = True
            case Event.CANCELLED:
                assert not self.begun
                self.begun = True
            case Event.WAITS:
                assert self.has_process
                assert not self.stopped
                self.waits = True
            case Event.STOP | Event.DEADLINE | Event.EVICT:
                assert self.has_process
                self.waits, self.stopped = False, True
            case Event.EXIT:
                assert self.has_process
                assert not self.waits
                self.has_process = False


@given(st.lists(st.sampled_from(list(Event)), max_size=30))
def test_any_order_of_events_leaves_what_the_model_says(events: list[Event]) -> None:
    phase, model = Phase.PREPARING, Model()
    for event in events:
        if (phase, event) not in TRANSITIONS:
            continue
        phase = TRANSITIONS[phase, event]
        model.apply(event)
        assert (phase in IN_MEMORY) == model.waits
        assert (phase in WITH_PROCESS) == (model.has_process and not model.waits)
        assert (phase is Phase.PREPARING) == (not model.begun)
        assert phase is not Phase.DONE or not model.has_process


def test_the_docs_show_the_table() -> None:
    assert f"```mermaid\n{diagram()}\n```" in ARCHITECTURE.read_text(encoding="utf-8")
