"""How much each of many jobs gets and where it goes, on cases small enough to be done by hand."""

from __future__ import annotations

import pytest

from benchmarks.simulation.jobs.machines import Host, Machines, even_layout
from benchmarks.simulation.jobs.placement import best_fit, fewest_machines, spread
from benchmarks.simulation.jobs.scheduler import scheduler_named
from dike.exceptions import BadInputError
from framework.policies.jobs.interface import TaskNeeds
from framework.policies.jobs.rules import fair, first_come, marginal_gain, relative_gain, tetris
from tests.benchmarks.jobs_cases import view, with_hosts

TASK = TaskNeeds((1000, 1024, 0, 1))
WITH_PS = TaskNeeds((1000, 1024, 0, 1), (1000, 1024, 0, 0))
FOUR_GPUS = (8000, 8192, 0, 4)


def test_drf_gives_what_the_paper_gives() -> None:
    """Ghodsi et al., section 4.1: 9 CPUs and 18 GB; tasks of 1 CPU and 4 GB, and of 3 CPUs and 1 GB."""
    one, other = view(0, needs=(1000, 4, 0, 0)), view(1, needs=(3000, 1, 0, 0))
    assert fair([one, other], (9000, 18, 0, 0)) == {0: (3, 0), 1: (2, 0)}


def test_drf_gives_the_rest_to_those_who_can_use_it() -> None:
    small, large = view(0, max_workers=1), view(1)
    assert fair([small, large], (8000, 8192, 0, 6)) == {0: (1, 0), 1: (5, 0)}


def test_drf_adds_a_ps_with_each_worker() -> None:
    assert fair([view(0, ps=(1000, 1024, 0, 0))], (7000, 8192, 0, 6)) == {0: (3, 3)}


def test_fifo_lets_no_job_overtake() -> None:
    jobs = [view(0, requested=3), view(1, requested=2), view(2, requested=1)]
    assert first_come(jobs, FOUR_GPUS) == {0: (3, 0)}
    # Job 0 has ended.
    assert first_come(jobs[1:], FOUR_GPUS) == {1: (2, 0), 2: (1, 0)}


def test_fifo_keeps_what_runs() -> None:
    running = view(5, requested=2, hosts=(Host(0, 2, 0),))
    assert first_come([view(1, requested=4), running], FOUR_GPUS) == {5: (2, 0)}


def test_tetris_takes_the_shortest_first_and_then_grows_it() -> None:
    short, long = view(0, requested=2, samples_left=100), view(1, requested=3, samples_left=10_000)
    assert tetris([long, short], FOUR_GPUS) == {0: (2, 0), 1: (2, 0)}
    assert tetris([short], FOUR_GPUS) == {0: (4, 0)}
    # What was asked for it gets, but no more that would be of no use.
    flat = view(0, requested=2, speeds=[3.0, 2.0, 2.0, 5.0, 5.0, 5.0, 5.0, 5.0])
    assert tetris([flat], FOUR_GPUS) == {0: (2, 0)}


def test_tetris_prefers_what_fills_the_machines() -> None:
    """Of two with the same work left, the one whose tasks take more of what there is."""
    thin = view(0, needs=(1000, 1024, 0, 1), requested=4, samples_left=4000)
    thick = view(1, needs=(2000, 2048, 0, 1), requested=4, samples_left=4000)
    assert tetris([thin, thick], FOUR_GPUS) == {1: (4, 0)}


def test_gain_goes_where_it_saves_most() -> None:
    """The long job saves more by each worker; the other one does not get faster at all."""
    flat, steep = view(0, speeds=[1.0] * 8), view(1, samples_left=7200)
    assert marginal_gain([flat, steep], FOUR_GPUS) == {0: (1, 0), 1: (3, 0)}


def test_relative_gain_does_not_ask_for_the_length() -> None:
    """Twice as many workers are twice as fast for both, which saves the long one more seconds."""
    short, long = view(0, samples_left=100), view(1, samples_left=7200)
    assert marginal_gain([short, long], FOUR_GPUS) == {0: (1, 0), 1: (3, 0)}
    assert relative_gain([short, long], FOUR_GPUS) == {0: (2, 0), 1: (2, 0)}


def test_gain_keeps_a_size_that_is_not_worth_changing() -> None:
    running = view(0, samples_left=40, hosts=(Host(0, 2, 0),))
    # 20 s with two workers, 10 s with four: less than the change costs.
    assert marginal_gain([running], FOUR_GPUS) == {0: (2, 0)}
    quick = view(0, samples_left=40, hosts=(Host(0, 2, 0),), change_s=5)
    assert marginal_gain([quick], FOUR_GPUS) == {0: (4, 0)}


def test_gain_takes_from_the_large_when_others_come() -> None:
    running = view(0, hosts=(Host(0, 4, 0),))
    assert marginal_gain([running, view(1)], FOUR_GPUS) == {0: (2, 0), 1: (2, 0)}


def test_the_fewest_machines_hold_equal_parts() -> None:
    free = [FOUR_GPUS, (8000, 8192, 0, 2), (8000, 8192, 0, 3)]
    assert fewest_machines(TASK, (2, 0), free) == (Host(1, 2, 0),)
    assert fewest_machines(WITH_PS, (6, 2), free) == (Host(2, 3, 1), Host(0, 3, 1))
    assert fewest_machines(TASK, (8, 0), free) == (Host(2, 3, 0), Host(0, 3, 0), Host(1, 2, 0))
    # No equal parts: the emptiest machines are filled.
    assert fewest_machines(TASK, (9, 0), free) == (Host(0, 4, 0), Host(1, 2, 0), Host(2, 3, 0))
    assert fewest_machines(TASK, (10, 0), free) is None


def test_spread_goes_to_the_emptiest_and_best_fit_to_the_fullest() -> None:
    free = [FOUR_GPUS, (8000, 8192, 0, 2), (8000, 8192, 0, 3)]
    assert spread(TASK, (3, 0), free) == (Host(0, 2, 0), Host(2, 1, 0))
    assert best_fit(TASK, (3, 0), free) == (Host(1, 2, 0), Host(2, 1, 0))
    assert best_fit(TASK, (10, 0), free) is None


def test_an_even_layout_uses_as_few_machines_as_hold_it() -> None:
    assert even_layout(TASK, (4, 0), FOUR_GPUS) == ((4, 0),)
    assert even_layout(WITH_PS, (5, 1), FOUR_GPUS) == ((3, 0), (2, 1))
    assert even_layout(TaskNeeds((9000, 0, 0, 0)), (1, 0), FOUR_GPUS) is None


def test_a_job_that_fits_nowhere_whole_gets_less() -> None:
    machines = Machines(count=2, gpus=2, cpus=16)
    decided = scheduler_named("fifo").schedule([view(0, requested=2), view(1, requested=2)], machines)
    assert {number: sum(host.workers for host in hosts) for number, hosts in decided.items()} == {0: 2, 1: 2}


def test_jobs_of_the_same_size_stay_and_move_together_once_there_is_room() -> None:
    machines = Machines(count=2, gpus=2, cpus=16)
    apart = with_hosts(view(0, max_workers=2), (Host(0, 1, 0), Host(1, 1, 0)))
    assert scheduler_named("gain/spread/balanced").schedule([apart], machines) == {0: apart.hosts}
    (moved,) = scheduler_named("optimus").schedule([apart], machines).values()
    assert [host.workers for host in moved] == [2]
    # Too short to be worth it: 20 s are left, a move takes 30.
    ending = view(0, max_workers=2, samples_left=40, hosts=apart.hosts)
    assert scheduler_named("optimus").schedule([ending], machines) == {0: apart.hosts}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("optimal", "There is no policy 'optimal'; did you mean optimus? choose one of dike, optimus, drf"),
        ("gain/fewest", "There is no policy 'gain/fewest'"),
        ("gain/many/balanced", "'many' in the policy 'gain/many/balanced' is unknown; choose one of fewest, spread"),
    ],
)
def test_unknown_policies_are_refused(name: str, said: str) -> None:
    with pytest.raises(BadInputError) as error:
        scheduler_named(name)
    assert said in str(error.value)
