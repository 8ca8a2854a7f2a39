"""With which tasks a script may train: by what it computes, the user's options and its checkpoints."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from dike.exceptions import BadInputError
from dike.profile import Api, ModelProfile
from solver.settings import PlanSettings
from solver.strategies import possible_strategies
from tests.solver.solver_cases import digits, machines

ONE, GANG, PS = frozenset({"one"}), frozenset({"allreduce"}), frozenset({"ps"})
LOOP_WHY = "It has a loop of its own."


def keras(**changes: Any) -> ModelProfile:
    return dataclasses.replace(digits(), **changes)


SHARED = keras(why_not_split="")
UNSHARED = keras(why_not_split="it has a mask")
LOOP = keras(api=Api.LOOP, why_alone=LOOP_WHY)
DDP = keras(api=Api.LOOP, why_alone=LOOP_WHY, own_distribution="torch.distributed")
TF_KERAS = keras(api=Api.TF_KERAS)
MIRRORED = keras(api=Api.TF_KERAS, own_distribution="MultiWorkerMirroredStrategy")
GRAPH = digits(Api.GRAPH)
SYNCHRONOUS = keras(api=Api.GRAPH, synchronous=True)
COUNTS = keras(api=Api.GRAPH, counts_own_steps=True)
COORDINATOR = digits(Api.COORDINATOR)
WAITS = keras(api=Api.GRAPH, needs_servers=True)
ALONE = keras(why_not_split="it has a step of its own", why_alone="Its train_step is its own.")


def chosen(model: ModelProfile, bounds: dict[str, Any], **options: Any) -> frozenset[str]:
    return PlanSettings(**options).strategies(model, **bounds)


@pytest.mark.parametrize(
    ("model", "bounds", "options", "expected"),
    [
        (SHARED, {}, {}, ONE | GANG),
        (SHARED, {"min_workers": 1}, {}, ONE | GANG),
        (SHARED, {"min_workers": 2}, {}, GANG),
        (SHARED, {"max_workers": 1}, {}, ONE),
        (SHARED, {"plain": True}, {}, ONE | GANG),
        (SHARED, {"plain": False}, {}, PS),
        (SHARED, {"plain": False, "min_workers": 2}, {}, PS),
        (SHARED, {}, {"rules": "paper"}, PS),
        (SHARED, {}, {"objective": "traffic"}, PS),
        (SHARED, {"plain": True}, {"objective": "traffic"}, ONE | GANG),
        (SHARED, {}, {"strategy": "one"}, ONE),
        (SHARED, {}, {"strategy": "allreduce"}, GANG),
        (SHARED, {"min_workers": 3}, {"strategy": "ps"}, PS),
        (SHARED, {"min_workers": 1}, {"strategy": "ps", "rules": "none"}, PS),
        (UNSHARED, {}, {}, ONE),
        (UNSHARED, {"min_workers": 1}, {}, ONE),
        (TF_KERAS, {}, {}, ONE),
        (TF_KERAS, {"plain": False}, {}, PS),
        (TF_KERAS, {"min_workers": 2}, {"strategy": "ps"}, PS),
        (MIRRORED, {}, {}, ONE | GANG),
        (MIRRORED, {"min_workers": 2}, {}, GANG),
        (MIRRORED, {}, {"strategy": "allreduce"}, GANG),
        (LOOP, {}, {}, ONE),
        (LOOP, {"max_workers": 4}, {}, ONE),
        (LOOP, {"min_workers": 1}, {}, ONE),
        (LOOP, {}, {"objective": "traffic"}, ONE),
        (LOOP, {}, {"strategy": "allreduce"}, GANG),
        (DDP, {}, {}, ONE | GANG),
        (DDP, {"min_workers": 2}, {}, GANG),
        (GRAPH, {}, {}, ONE | PS),
        (GRAPH, {"min_workers": 1}, {}, ONE | PS),
        (GRAPH, {"min_workers": 2}, {}, PS),
        (GRAPH, {"plain": True}, {}, ONE),
        (GRAPH, {"plain": False}, {}, PS),
        (GRAPH, {}, {"strategy": "one"}, ONE),
        (SYNCHRONOUS, {}, {}, PS),
        (COUNTS, {}, {}, ONE),
        (COUNTS, {"min_workers": 2}, {}, PS),
        (COORDINATOR, {}, {}, PS),
        (WAITS, {}, {}, PS),
        (ALONE, {}, {}, ONE),
    ],
)
def test_what_is_allowed(
    model: ModelProfile, bounds: dict[str, Any], options: dict[str, Any], expected: frozenset[str]
) -> None:
    assert chosen(model, bounds, **options) == expected


@pytest.mark.parametrize(
    ("model", "bounds", "options", "said"),
    [
        (UNSHARED, {"min_workers": 2}, {}, "2 workers cannot share .*: it has a mask; --strategy ps trains"),
        (UNSHARED, {}, {"strategy": "allreduce"}, "cannot train with --strategy allreduce: it has a mask"),
        (UNSHARED, {"min_workers": 2, "plain": True}, {}, r"it has a mask\.$"),
        (TF_KERAS, {"min_workers": 2}, {}, "tf_keras cannot share a batch.*--strategy ps"),
        (TF_KERAS, {}, {"strategy": "allreduce"}, "tf_keras cannot share a batch among tasks"),
        (SHARED, {"min_workers": 2}, {"strategy": "one"}, "--strategy one is a single task, but --min-workers is 2"),
        (SHARED, {"max_workers": 1}, {"strategy": "allreduce"}, "at least 2 workers, but --max-workers is 1"),
        (SHARED, {}, {"strategy": "allreduce", "rules": "paper"}, "--rules is for parameter servers"),
        (SHARED, {}, {"strategy": "one", "rules": "paper"}, "--rules is for parameter servers"),
        (SHARED, {"plain": True}, {"strategy": "ps"}, "checkpoints are of a job without parameter servers"),
        (SHARED, {"plain": False}, {"strategy": "one"}, "checkpoints are of a job with parameter servers"),
        (SHARED, {"plain": False}, {"strategy": "allreduce"}, "checkpoints are of a job with parameter servers"),
        (LOOP, {"min_workers": 2}, {}, f"only be one plain task. {LOOP_WHY}.*--strategy allreduce starts 2"),
        (LOOP, {"plain": False}, {}, f"{LOOP_WHY}$"),
        (LOOP, {}, {"rules": "none"}, "can only be one plain task"),
        (LOOP, {}, {"strategy": "ps"}, f"only train without parameter servers. {LOOP_WHY}"),
        (ALONE, {"min_workers": 2}, {}, "can only be one plain task. Its train_step"),
        (GRAPH, {}, {"strategy": "allreduce"}, "TensorFlow 1 sessions share gradients on parameter servers only"),
        (GRAPH, {"min_workers": 2, "plain": True}, {}, "without parameter servers; leave out --min-workers"),
        (SYNCHRONOUS, {}, {"strategy": "one"}, "aggregates the gradients"),
        (COORDINATOR, {}, {"strategy": "one"}, "ClusterCoordinator needs parameter servers"),
        (COORDINATOR, {}, {"strategy": "allreduce"}, "ClusterCoordinator needs parameter servers"),
        (WAITS, {"plain": True}, {}, "needs parameter servers"),
        (WAITS, {}, {"strategy": "one"}, "waits for parameter servers"),
    ],
)
def test_what_is_refused(model: ModelProfile, bounds: dict[str, Any], options: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInputError, match=said) as error:
        chosen(model, bounds, **options)
    assert str(error.value).endswith(".")


def test_what_a_script_could_use_includes_what_changes_its_result() -> None:
    assert possible_strategies(SHARED) == ONE | GANG | PS
    assert possible_strategies(UNSHARED) == ONE | PS
    assert possible_strategies(LOOP) == ONE
    assert possible_strategies(DDP) == ONE | GANG
    assert possible_strategies(GRAPH) == ONE | PS
    assert possible_strategies(COORDINATOR) == PS
    assert possible_strategies(SHARED, plain=True) == ONE | GANG
    assert possible_strategies(SHARED, plain=False) == PS


def test_the_fewest_workers_of_a_gang_are_two() -> None:
    assert PlanSettings().fewest_workers(None) == 1
    assert PlanSettings(strategy="allreduce").fewest_workers(None) == 2
    assert PlanSettings(strategy="allreduce").fewest_workers(3) == 3


def test_several_gpus_of_a_worker_are_for_parameter_servers() -> None:
    notes = {
        strategy: PlanSettings(strategy=strategy).request(SHARED, machines(1), gpus_per_worker=2).notes
        for strategy in ("auto", "allreduce", "ps")
    }
    assert notes["auto"] == notes["allreduce"] != notes["ps"]
    assert "give --strategy ps" in notes["auto"][0]
    assert "What if a worker could use 2 GPUs?" in notes["ps"][0]
