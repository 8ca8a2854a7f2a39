"""Measures how evenly each method distributes the variables of well-known models over parameter servers."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator

from dike.keras3.model import named_variables
from dike.profile import ModelProfile
from framework.project.profiling import load_profile
from solver.shards import Shards, shard

TITLE = "Balance of the parameter servers by way of sharding"
MODELS = (
    "VGG16",
    "ResNet50",
    "ResNet152",
    "InceptionV3",
    "MobileNetV2",
    "DenseNet121",
    "EfficientNetB0",
    "NASNetMobile",
)
PS_COUNTS = (2, 3, 4, 5, 8, 10, 16)
METHODS: dict[str, Callable[[ModelProfile, int], Shards]] = {
    "greedy": lambda profile, count: shard(profile, count, "greedy"),
    "optimus, whole": lambda profile, count: shard(profile, count, "optimus"),
    "optimus, split": lambda profile, count: shard(profile, count, "optimus", split=True),
    "round robin": lambda profile, count: shard(profile, count, "round_robin"),
}


@dataclasses.dataclass(frozen=True)
class _Case:
    """One model on one number of parameter servers.

    Attributes:
        least_imbalance: lower bound of largest over mean bytes without splitting variables.
        shards: method -> its shards.
        seconds: method -> its duration.
    """

    model: str
    ps_count: int
    least_imbalance: float
    shards: dict[str, Shards]
    seconds: dict[str, float]


def measure() -> Iterator[str]:
    """Reports all cases together by method, and every case."""
    cases = [case for model in MODELS for case in _cases(_in_order_of_creation(model))]
    yield "Models of keras.applications. Round robin deals variables out in the order of creation, as TensorFlow does."
    yield "Imbalance: largest over mean of the parameter servers (ps). For each variable, or part of one, that it has,"
    yield "a ps gets one request per worker and step. The bound is the largest variable or the mean, whichever is more:"
    yield "only splitting can make the largest shard smaller than that. Milliseconds: median of all cases."
    yield ""
    yield "| method | imbalance of bytes: mean, worst | of requests: mean, worst | largest shard / bound: worst | ms |"
    yield "|---|---|---|---|---|"
    for method in METHODS:
        by_bytes = [case.shards[method].byte_imbalance for case in cases]
        by_requests = [case.shards[method].request_imbalance for case in cases]
        to_bound = max(case.shards[method].byte_imbalance / case.least_imbalance for case in cases)
        milliseconds = statistics.median(case.seconds[method] for case in cases) * 1000
        yield (
            f"| {method} | {statistics.mean(by_bytes):.2f}, {max(by_bytes):.2f} "
            f"| {statistics.mean(by_requests):.2f}, {max(by_requests):.2f} | {to_bound:.3f} | {milliseconds:.2f} |"
        )
    yield ""
    yield "Imbalance of bytes / of requests:"
    yield ""
    yield f"| model | ps | bound, whole | {' | '.join(METHODS)} |"
    yield "|---" * (3 + len(METHODS)) + "|"
    for case in cases:
        cells = [f"{shards.byte_imbalance:.3f} / {shards.request_imbalance:.2f}" for shards in case.shards.values()]
        yield f"| {case.model} | {case.ps_count} | {case.least_imbalance:.3f} | {' | '.join(cells)} |"


def _cases(profile: ModelProfile) -> Iterator[_Case]:
    largest = max(variable.size_bytes for variable in profile.variables)
    for ps_count in PS_COUNTS:
        shards, seconds = {}, {}
        for method, deal in METHODS.items():
            start = time.perf_counter()
            shards[method] = deal(profile, ps_count)
            seconds[method] = time.perf_counter() - start
        least = max(1.0, largest * ps_count / profile.variable_bytes)
        yield _Case(profile.name.removeprefix("keras:"), ps_count, least, shards, seconds)


def _in_order_of_creation(model: str) -> ModelProfile:
    """The model's profile, its variables in the order in which Keras creates them."""
    import keras

    profile = load_profile(f"keras:{model}", batch_size=32)
    # Resets Keras' counters of generated names.
    keras.utils.clear_session()
    created = named_variables(getattr(keras.applications, model)(weights=None))
    position = {name: index for index, (name, _) in enumerate(created)}
    return dataclasses.replace(
        profile, variables=tuple(sorted(profile.variables, key=lambda variable: position[variable.name]))
    )
