"""A slot that is left empty so that its trial can go on in a faster one."""

from __future__ import annotations

from pathlib import Path

from framework.search.records import TrialState
from tests.search.search_stage import QUANTUM_S, SearchStage, search_spec


def test_a_trial_moves_to_a_faster_slot_that_becomes_free(tmp_path: Path, storage: str) -> None:
    stage = SearchStage(search_spec(tmp_path, trials=2, policy="hermes2"), storage)
    (fast,) = stage.offer(cpus=1, slot_kind="fast")
    (slow,) = stage.offer(cpus=1, first=1, slot_kind="slow")
    first, second = fast.train(), slow.train()
    for slot, steps in ((fast, 1000), (slow, 10)):
        slot.report(0, 1.0, train_s=0.0)
        slot.report(steps, 0.5, train_s=10.0)
    stage.tick(QUANTUM_S + 1)
    fast.end("finished")
    stage.tick(1)
    assert stage.trials[first[0]].state is TrialState.FINISHED
    assert slow.wanted.run is None, "its trial is to leave the slow slot"
    assert not slow.wanted.leave
    assert not fast.wanted.leave, "it waits for that trial"
    slow.end("suspended", checkpoint="/c/a", step=10)
    assert fast.train() == (second[0], second[1] + 1)
    assert slow.wanted.leave, "nobody needs the slow slot any more"
    fast.end("finished")
    stage.tick(1)
    assert stage.trials[second[0]].state is TrialState.FINISHED
