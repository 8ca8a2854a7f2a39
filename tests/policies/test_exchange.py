"""Which trials change places."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest

from framework.policies.trials.exchange import Exchange, Mover

KINDS = {0: "a", 1: "b", 2: "c"}


def exchange(assignment: Sequence[int], performances: Sequence[str], **changes: Mapping[int, object]) -> Exchange:
    """Trials numbered from 0, their slots of `KINDS`, and how good they are on a, b and c: "1 2 3".

    Args:
        assignment: the slot of each.
        performances: of each; those of "-" cannot move.
        changes: further attributes of movers, by trial.
    """
    movers = {}
    for trial, text in enumerate(performances):
        if text != "-":
            values = dict(zip("abc", map(float, text.split()), strict=True))
            movers[trial] = Mover(trial, values, **{name: by[trial] for name, by in changes.items() if trial in by})
    return Exchange(KINDS, dict(enumerate(assignment)), movers)


def total(
    performances: Sequence[Mapping[str, float]], assignment: Mapping[int, int], kinds: Mapping[int, str]
) -> float:
    return sum(performances[trial][kinds[slot]] for trial, slot in assignment.items())


def test_two_change_places_if_both_together_gain() -> None:
    pair = exchange([0, 1], ["1 5 1", "4 2 1"])
    pair.exchange_pairs()
    assert pair.assignment == {0: 1, 1: 0}
    none = exchange([0, 1], ["1 5 1", "1 6 1"])
    none.exchange_pairs()
    assert none.assignment == {0: 0, 1: 1}


def test_the_paper_takes_a_trial_of_the_slot_with_the_fewest_and_its_best_partner() -> None:
    # Trial 0 is alone; with 1 it gains 2, with 2 it gains 3. Trials 1 and 3 would gain 9, but are not its business.
    pairs = exchange([0, 1, 2, 2, 1], ["1 3 3", "1 1 9", "2 1 1", "1 9 1", "1 1 1"])
    pairs.exchange_pairs()
    assert pairs.assignment == {0: 2, 1: 1, 2: 0, 3: 2, 4: 1}


def test_three_change_places_where_no_two_gain() -> None:
    performances = ["1 2 0", "0 1 2", "2 0 1"]
    pairs = exchange([0, 1, 2], performances)
    pairs.exchange_pairs()
    assert pairs.assignment == {0: 0, 1: 1, 2: 2}
    ring = exchange([0, 1, 2], performances)
    ring.exchange_rings()
    assert ring.assignment == {0: 1, 1: 2, 2: 0}


def test_a_trial_moves_to_a_free_place() -> None:
    ring = exchange([0], ["1 2 3"])
    ring.exchange_rings()
    assert ring.assignment == {0: 2}


@pytest.mark.parametrize("cost", [1.9, 2.1])
def test_a_gain_has_to_be_worth_its_cost(cost: float) -> None:
    ring = exchange([0], ["1 2 3"], cost={0: cost})
    ring.exchange_rings()
    assert ring.assignment == {0: 2 if cost < 2 else 0}
    pair = exchange([0, 1], ["1 2 3", "2 1 3"], cost={0: cost})
    pair.exchange_pairs()
    assert pair.assignment == ({0: 1, 1: 0} if cost < 2 else {0: 0, 1: 1})


def test_no_trial_moves_where_it_may_not_run() -> None:
    for exchanged in (exchange([0, 1], ["1 5 1", "5 1 1"], refused={0: frozenset({1})}) for _ in range(2)):
        exchanged.exchange_pairs()
        assert exchanged.assignment == {0: 0, 1: 1}
        exchanged.exchange_rings()
        assert exchanged.assignment[0] != 1
    fixed = exchange([0, 1], ["1 5 1", "-"])
    fixed.exchange_rings()
    assert fixed.assignment[1] == 1


def test_counts_are_evened_out_by_those_who_can_move_at_once_and_gain_most() -> None:
    uneven = exchange([0, 0, 0, 0, 1], ["1 1 9", "1 1 5", "1 1 7", "1 1 1", "1 1 1"], is_ready={0: False})
    uneven.balance()
    assert uneven.assignment == {0: 0, 1: 1, 2: 2, 3: 0, 4: 1}


@pytest.mark.parametrize("seed", range(60))
def test_no_assignment_with_equal_counts_is_better(seed: int) -> None:
    rng = random.Random(seed)
    slots = rng.choice([3, 4])
    kinds = {slot: rng.choice("ab" if seed % 2 else "abc") for slot in range(slots)}
    count = rng.randint(1, 6)
    performances = [{kind: rng.random() for kind in "abc"} for _ in range(count)]
    assignment = {trial: rng.randrange(slots) for trial in range(count)}
    ring = Exchange(kinds, assignment, {trial: Mover(trial, values) for trial, values in enumerate(performances)})
    ring.balance()
    ring.exchange_rings()

    def is_even(assignment: Mapping[int, int]) -> bool:
        counts = Counter(dict.fromkeys(kinds, 0))
        counts.update(assignment.values())
        return max(counts.values()) - min(counts.values()) <= 1

    assert is_even(ring.assignment)
    every = (dict(enumerate(choice)) for choice in itertools.product(kinds, repeat=count))
    best = max(total(performances, assignment, kinds) for assignment in every if is_even(assignment))
    assert total(performances, ring.assignment, kinds) == pytest.approx(best)
