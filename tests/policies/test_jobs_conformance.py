"""What every policy of jobs keeps to, and how users' weights bound what it gives."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulation.jobs.scheduler import scheduler_named
from framework.policies.jobs.interface import Allocate, Allocation, JobView, TaskNeeds, share_of
from framework.policies.jobs.registry import POLICIES
from framework.policies.jobs.rules import drop_unprofitable_changes
from framework.policies.jobs.users import user_limits
from framework.service.options import AllocationName
from solver.jobs.free_capacity import NOTHING, plus
from solver.resources import Amounts
from tests.properties import examples

each_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
weights = st.fixed_dictionaries({user: st.sampled_from([0.5, 1, 3]) for user in ("ada", "bob", "cyd")})
TOTAL: Amounts = (64_000, 65_536, 0, 8)


@st.composite
def job_views(draw: st.DrawFn, number: int) -> JobView:
    """Any job: waiting or not, of a fixed size or not, with parameter servers and a chief or without."""
    least = draw(st.integers(1, 3))
    most = draw(st.one_of(st.just(least), st.integers(least, 8)))
    max_ps = draw(st.sampled_from([0, 0, 1, 4]))
    min_ps = draw(st.integers(min(1, max_ps), max(1, max_ps)))
    gpus = draw(st.integers(0, 1))
    worker = (draw(st.integers(1, 6)) * 1000, draw(st.integers(1, 4)) * 1024, 0, gpus)
    ps = (1000, 1024, 0, 0) if max_ps else NOTHING
    speeds = draw(st.lists(st.floats(0.1, 100), min_size=max(1, max_ps) * most, max_size=max(1, max_ps) * most))
    table = np.array(speeds).reshape(max(1, max_ps), most)
    now = kept = (0, 0)
    state = draw(st.sampled_from(["waits", "can be stopped", "keeps its least", "keeps all"]))
    if state != "waits":
        now = (draw(st.integers(least, most)), min(max_ps, draw(st.integers(min_ps, max(min_ps, max_ps)))))
    if state == "keeps its least":
        kept = (least, min(min_ps, max_ps))
    elif state == "keeps all":
        kept = now
    return JobView(
        id=number,
        user=draw(st.sampled_from(["ada", "bob", "cyd"])),
        arrival_s=float(number),
        needs=TaskNeeds(worker, ps),
        chief=draw(st.sampled_from([NOTHING, (500, 512, 0, 0)])),
        requested=draw(st.integers(least, most)),
        min_workers=least,
        max_workers=most,
        min_ps=min_ps,
        max_ps=max_ps,
        now=now,
        kept=kept,
        samples_left=draw(st.one_of(st.just(0.0), st.floats(1, 1e6))),
        samples_per_s=table,
        young=draw(st.booleans()),
        waited=draw(st.integers(0, 3)),
        change_s=30.0,
    )


@st.composite
def rounds(draw: st.DrawFn) -> list[JobView]:
    """Jobs of which those that run fit the cluster."""
    jobs: list[JobView] = []
    used = NOTHING
    for number in range(draw(st.integers(1, 8))):
        job = draw(job_views(number))
        need = plus(used, job.need(job.now))
        if job.now[0] and any(wanted > there for wanted, there in zip(need, TOTAL, strict=True)):
            job = dataclasses.replace(job, now=(0, 0), kept=(0, 0))
            need = used
        used = need
        jobs.append(job)
    return jobs


def taken(jobs: list[JobView], counts: Allocation, user: str | None = None) -> Amounts:
    used = NOTHING
    for job in jobs:
        if user in (None, job.user):
            used = plus(used, job.need(counts.get(job.id, (0, 0))))
    return used


@each_policy
@given(jobs=rounds(), weights=weights)
@examples(200)
def test_a_round_keeps_to_the_rules(policy: Allocate, jobs: list[JobView], weights: dict[str, float]) -> None:
    limits = user_limits(jobs, TOTAL, weights.__getitem__)
    given_out = policy(jobs, TOTAL, limits)
    counts = drop_unprofitable_changes(jobs, given_out, TOTAL)
    for allocation in (given_out, counts):
        assert all(used <= there for used, there in zip(taken(jobs, allocation), TOTAL, strict=True))
        for job in jobs:
            workers, ps = allocation.get(job.id, (0, 0))
            if workers or job.kept[0]:
                assert max(job.min_workers, job.kept[0]) <= workers <= job.max_workers
                assert max(min(job.min_ps, job.max_ps), job.kept[1]) <= ps <= job.max_ps
            if job.kept[0] and job.kept == job.now and job.min_workers == job.max_workers:
                assert workers == job.now[0], "a job of a fixed size keeps it"


@each_policy
@given(jobs=rounds(), weights=weights)
@examples(200)
def test_no_user_gets_more_than_the_limit(policy: Allocate, jobs: list[JobView], weights: dict[str, float]) -> None:
    """But for what cannot be taken from a user, and for one job to begin with."""
    # A job may keep what no other job needs.
    jobs = [dataclasses.replace(job, now=job.kept) for job in jobs]
    limits = user_limits(jobs, TOTAL, weights.__getitem__)
    counts = policy(jobs, TOTAL, limits)
    for user, limit in limits.items():
        of_user = [job for job in jobs if job.user == user]
        began = max((share_of(job.need(counts[job.id]), TOTAL) for job in of_user if job.id in counts), default=0.0)
        kept = share_of(taken(jobs, {job.id: job.kept for job in jobs}, user), TOTAL)
        assert share_of(taken(jobs, counts, user), TOTAL) <= max(limit, began, kept) + 1e-9


@each_policy
@given(jobs=rounds(), seed=st.integers(0, 9))
@examples(50)
def test_the_same_jobs_get_the_same_in_whatever_order_they_are_listed(
    policy: Allocate, jobs: list[JobView], seed: int
) -> None:
    assert policy(jobs, TOTAL) == policy(jobs, TOTAL)
    if policy not in (POLICIES["dike"], POLICIES["optimus"]):
        # Those take the one listed first of two that gain alike.
        shuffled = random.Random(seed).sample(jobs, len(jobs))
        assert dict(policy(shuffled, TOTAL)) == dict(policy(jobs, TOTAL))


@each_policy
def test_without_jobs_nothing_is_allocated(policy: Allocate) -> None:
    assert policy([], TOTAL) == {}


def simple(number: int, user: str, **changes: object) -> JobView:
    """A job of one GPU for each worker, which twice as many make twice as fast."""
    job = JobView(
        id=number,
        user=user,
        arrival_s=float(number),
        needs=TaskNeeds((1000, 1024, 0, 1)),
        requested=8,
        max_workers=8,
        max_ps=0,
        samples_left=3600.0,
        samples_per_s=np.arange(1.0, 9.0)[None, :],
        young=False,
        waited=0,
        change_s=30.0,
    )
    return dataclasses.replace(job, **changes)  # type: ignore[arg-type]


def gpus(jobs: list[JobView], counts: Allocation) -> dict[str, int]:
    return {user: taken(jobs, counts, user)[3] for user in sorted({job.user for job in jobs})}


@pytest.mark.parametrize("name", sorted(POLICIES.keys() - {"fifo"}))
def test_a_user_with_three_times_the_weight_gets_three_times_as_much(name: str) -> None:
    jobs = [simple(0, "ada"), *(simple(number, "bob") for number in range(1, 4))]
    limits = user_limits(jobs, TOTAL, {"ada": 3.0, "bob": 1.0}.__getitem__)
    assert limits == {"ada": 0.75, "bob": 0.25}
    assert gpus(jobs, POLICIES[name](jobs, TOTAL, limits)) == {"ada": 6, "bob": 2}


def test_what_a_user_cannot_use_the_others_get() -> None:
    jobs = [simple(0, "ada", max_workers=1, requested=1), simple(1, "bob")]
    limits = user_limits(jobs, TOTAL, lambda user: 1.0)
    assert limits == {"ada": 0.125, "bob": 0.875}
    assert gpus(jobs, POLICIES["drf"](jobs, TOTAL, limits)) == {"ada": 1, "bob": 7}
    assert user_limits(jobs[1:], TOTAL, lambda user: 1.0) == {}, "there is no other user to share with"


def test_a_job_of_a_fixed_size_counts_to_its_user() -> None:
    fixed = simple(0, "ada", min_workers=4, max_workers=4, requested=4, now=(4, 0), kept=(4, 0))
    jobs = [fixed, simple(1, "ada"), simple(2, "bob")]
    limits = user_limits(jobs, TOTAL, lambda user: 1.0)
    assert gpus(jobs, POLICIES["optimus"](jobs, TOTAL, limits)) == {"ada": 4, "bob": 4}


def test_a_user_who_holds_nothing_begins_with_a_job_that_is_larger_than_the_limit() -> None:
    jobs = [simple(0, "ada", min_workers=5), simple(1, "bob")]
    limits = {"ada": 0.5, "bob": 0.375}
    for name in sorted(POLICIES.keys() - {"fifo"}):
        assert POLICIES[name](jobs, TOTAL, limits)[0] == (5, 0), name


def test_fifo_passes_over_who_is_at_the_limit_and_waits_for_who_does_not_fit() -> None:
    jobs = [simple(number, user, requested=3) for number, user in enumerate(["ada", "ada", "bob"])]
    assert POLICIES["fifo"](jobs, TOTAL, {"ada": 0.5, "bob": 0.5}) == {0: (3, 0), 2: (3, 0)}
    assert POLICIES["fifo"](jobs, (64_000, 65_536, 0, 5), {}) == {0: (3, 0)}


def test_a_change_is_worth_more_than_its_pause_under_each_policy() -> None:
    """36 s are left with two workers, 9 s with eight."""
    ending = simple(0, "ada", now=(2, 0), samples_left=72.0)
    for policy in POLICIES.values():
        assert drop_unprofitable_changes([ending], policy([ending], TOTAL), TOTAL) == {0: (2, 0)}
    longer = dataclasses.replace(ending, samples_left=math.ceil(72.0 * 1.2))
    assert drop_unprofitable_changes([longer], POLICIES["drf"]([longer], TOTAL), TOTAL) == {0: (8, 0)}


def test_the_simulator_plays_these_very_objects() -> None:
    assert get_args(AllocationName) == tuple(POLICIES), "what dike serve --allocation takes"
    assert {name: scheduler_named(name).allocate for name in POLICIES} == POLICIES
