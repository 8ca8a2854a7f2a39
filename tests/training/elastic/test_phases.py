"""The table of the phases of a job's size: complete, and what can be reached by it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework.training.elastic.phases import CHANGING, TRAINING, TRANSITIONS, Event, Phase, SizePhase, diagram

ARCHITECTURE = Path(__file__).parents[3] / "docs/architecture.md"


def reachable(start: Phase, without: frozenset[Event] = frozenset()) -> set[Phase]:
    found, left = {start}, [start]
    while left:
        phase = left.pop()
        after = {to for (before, event), to in TRANSITIONS.items() if before is phase and event not in without} - found
        found |= after
        left += after
    return found


def test_all_phases_are_reached_and_every_change_ends_in_a_steady_job() -> None:
    assert reachable(Phase.IDLE) == set(Phase)
    for phase in set(Phase) - {Phase.IDLE}:
        assert Phase.STEADY in reachable(phase, frozenset({Event.STOP, Event.BEGIN}))


def test_an_attempt_may_end_in_every_phase() -> None:
    for phase in Phase:
        assert TRANSITIONS[phase, Event.STOP] is Phase.IDLE


def test_once_others_than_the_chief_were_asked_to_end_there_is_no_way_back() -> None:
    for phase in (Phase.CLEARING, Phase.STARTING):
        assert (phase, Event.ABANDON) not in TRANSITIONS
    assert TRANSITIONS[Phase.WARMING, Event.ABANDON] is Phase.STEADY


class Model:
    """A job in a few words: whether it runs, whether its processes were asked to end, and what is awaited."""

    def __init__(self) -> None:
        self.runs = self.stopping = False
        self.awaits = ""

    def apply(self, event: Event) -> None:
        match event:
            case Event.BEGIN:
                assert not self.runs
                self.runs = True
            case Event.STOP:
                self.runs = self.stopping = False
                self.awaits = ""
            case Event.ADOPT | Event.GATHER | Event.LAUNCH | Event.CHANGE:
                assert self.runs
                assert not self.awaits
                self.awaits = {
                    Event.ADOPT: "slots", Event.GATHER: "offers", Event.LAUNCH: "master", Event.CHANGE: "tasks"
                }[event]  # fmt: skip
            case Event.LAUNCHED:
                assert self.awaits == "master"
                self.awaits = "tasks"
            case Event.READY:
                assert self.awaits == "tasks"
                self.stopping, self.awaits = True, "chief"
            case Event.SAVED:
                assert self.awaits == "chief"
                self.awaits = "others"
            case Event.CLEARED:
                assert self.awaits == "others"
                self.stopping, self.awaits = False, "step"
            case Event.ABANDON:
                assert self.awaits in ("tasks", "chief")
                self.stopping, self.awaits = False, ""
            case Event.ADOPTED | Event.DECIDE | Event.REFUSED | Event.STEP:
                assert self.awaits in ("slots", "offers", "master", "step")
                self.awaits = ""


@given(st.lists(st.sampled_from(list(Event)), max_size=40))
def test_any_order_of_events_leaves_what_the_model_says(events: list[Event]) -> None:
    size, model = SizePhase(), Model()
    for now_s, event in enumerate(events):
        if (size.phase, event) not in TRANSITIONS:
            before = size.phase
            with pytest.raises(RuntimeError, match=f"is {before}, and '{event}' has happened"):
                size.happened(event, now_s)
            assert size.phase is before
            continue
        size.happened(event, now_s)
        model.apply(event)
        assert size.since_s == now_s
        assert (size.phase is Phase.IDLE) == (not model.runs)
        assert (size.phase in (Phase.SAVING, Phase.CLEARING)) == model.stopping
        assert (size.phase in CHANGING) == (model.awaits in ("tasks", "chief", "others", "step"))
        assert (size.phase in TRAINING) == (model.runs and model.awaits in ("", "offers", "master", "tasks"))


def test_the_docs_show_the_table() -> None:
    assert f"```mermaid\n{diagram()}\n```" in ARCHITECTURE.read_text(encoding="utf-8")
