"""Compares forms of a job's speed fitted to few observations: Optimus', the solver's, and both together."""

from __future__ import annotations

import csv
import dataclasses
import functools
import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.many_jobs import random_model, uniform_cluster
from benchmarks.measured import CASES
from benchmarks.measured_layouts import SHAPE, Case, cluster, profile
from benchmarks.pollux_traces import FORMS, MODELS, Trace, large_placements, small_placements
from dike.profile import ModelProfile
from solver.calibration import fit
from solver.calibration.measured_rows import Measurement
from solver.calibration.nnls import Floats, nnls
from solver.cluster import Cluster
from solver.evaluation import evaluate
from solver.hardware import Hardware, known_hardware
from solver.jobs import PlanJob
from solver.jobs.forms import FormCatalogue
from solver.nodes import node_kinds
from solver.online import SpeedModel, sample_sizes
from solver.online.speed import seconds_per_sample_terms
from solver.placement.naming import Assignment
from solver.scenario import Scenario

TITLE = "Forms of the speed of a job"
DATA = Path(__file__).parent / "data" / "parameter_servers"
SEED = 3
OBSERVATIONS = (0, 1, 2, 3, 5)
DRAWS = 20
POLLUX_OBSERVATIONS = (3, 5, 8, 12, 20)
POLLUX_DRAWS = 5
POLLUX_FORM = "bytes, sum"
SYNTHETIC_JOBS = 40
SYNTHETIC_WORKERS = 16
MAX_HARDWARE_RATIO = 3.0
"""Maximum ratio, either way, of the true to the estimated speed of synthetic hardware."""

Counts = tuple[int, int]
Predict = Callable[[Sequence[Counts]], Mapping[Counts, float]]
"""Observed counts -> predicted speed of all counts."""


@dataclass(frozen=True)
class Point:
    """A measured layout.

    Attributes:
        predicted: steps of all workers per second, by the solver.
        measured: the same, measured.
    """

    assignment: Assignment
    predicted: float
    measured: float


def measure() -> Iterator[str]:
    yield (
        "*Optimus*: its form (section 3.2) fitted to the observations alone. *Solver*: the step-time model unchanged; "
        "*scaled*: times one factor, the median of the observations'; *calibrated*: each of its terms times a factor "
        "(`solver.calibration`). *Both*: `solver.online.SpeedModel`, the solver's predictions corrected by Optimus' "
        "form. Mean relative error of the speeds at counts that were not observed, by number of observations."
    )
    yield ""
    yield (
        "Measured training with parameter servers on shaped links (`benchmarks/data/parameter_servers`; of layouts with"
        f" the same counts the one predicted to be fastest), {DRAWS} random choices of observations:"
    )
    yield ""
    yield from _measured()
    yield ""
    yield (
        f"Synthetic jobs: {SYNTHETIC_JOBS} models (`many_jobs`), up to {SYNTHETIC_WORKERS} workers. The true speed is "
        f"the step-time model's; the solver gets GPUs, network cards and updates that are 1/{MAX_HARDWARE_RATIO:g} to "
        f"{MAX_HARDWARE_RATIO:g} times as fast. The structure is the truth's, so this favours the solver; "
        "observations have 5% noise. At random counts, "
        "and, *sample runs*, at those that `sample_sizes` chooses:"
    )
    yield ""
    yield from _synthetic_jobs()
    yield ""
    yield (
        "Recorded all-reduce training (`benchmarks/data/pollux`): fitted to some recorded steps on 1 to 4 machines, "
        "predicting 6 to 16. Optimus' form is a constant, a time per sample and a time per GPU, wherever they are; the "
        f"solver's ('{POLLUX_FORM}' of `step_time`) a constant, a time per sample and the bytes on the busiest link:"
    )
    yield ""
    yield from _pollux()


def _measured() -> Iterator[str]:
    methods = ("Optimus", "solver", "scaled", "calibrated", "both")
    yield f"| observations | {' | '.join(methods)} | predicted |"
    yield f"|---|{'---|' * len(methods)}---|"
    points = {case.name: (case, _points(case)) for case in CASES}
    for count in OBSERVATIONS:
        errors: dict[str, list[float]] = {name: [] for name in methods}
        random = np.random.default_rng(SEED)
        predicted = 0
        for case, known in points.values():
            if len(known) < count + 2:
                continue
            every = list(itertools.combinations(sorted(known), count))
            chosen = [every[at] for at in random.permutation(len(every))[:DRAWS]]
            of_case: dict[str, list[float]] = {name: [] for name in methods}
            for observed in chosen:
                others = [counts for counts in known if counts not in observed]
                predicted += len(others)
                for name, predict in _methods(case, known).items():
                    if count or name not in ("Optimus", "calibrated"):
                        speeds = predict(observed)
                        of_case[name] += [abs(speeds[at] / known[at].measured - 1) for at in others]
            for name in methods:
                if of_case[name]:
                    errors[name].append(statistics.mean(of_case[name]))
        cells = [f"{statistics.mean(errors[name]):.0%}" if errors[name] else "-" for name in methods]
        yield f"| {count} | {' | '.join(cells)} | {predicted:,} |"


def _methods(case: Case, points: Mapping[Counts, Point]) -> dict[str, Predict]:
    def speeds(predict: Callable[[Counts], float]) -> dict[Counts, float]:
        return {counts: predict(counts) for counts in points}

    def optimus(observed: Sequence[Counts]) -> Mapping[Counts, float]:
        factors = _optimus(observed, [points[at].measured for at in observed])
        return speeds(lambda at: 1 / float(_terms([at])[0] @ factors))

    def scaled(observed: Sequence[Counts]) -> Mapping[Counts, float]:
        ratios = [points[at].measured / points[at].predicted for at in observed]
        factor = statistics.median(ratios) if ratios else 1.0
        return speeds(lambda at: factor * points[at].predicted)

    def calibrated(observed: Sequence[Counts]) -> Mapping[Counts, float]:
        rows = [Measurement(SHAPE, points[at].assignment, at[0] / points[at].measured) for at in observed]
        found = fit(rows, profile(case), _cluster(case))
        hardware, known_cluster = found.apply(known_hardware(), _cluster(case))
        scenario = Scenario.of(profile(case), known_cluster, hardware)
        return speeds(lambda at: _predicted(scenario, points[at].assignment))

    def both(observed: Sequence[Counts]) -> Mapping[Counts, float]:
        most_workers, most_ps = (max(of_role) for of_role in zip(*points, strict=True))

        def prior(workers: int, ps: int) -> float:
            point = points.get((workers, ps))
            return 0.0 if point is None else point.predicted

        # With a constant batch per worker, synchronous training has the form of asynchronous training.
        model = SpeedModel(prior, synchronous=False, max_workers=most_workers, max_ps=most_ps)
        for at in observed:
            model.observe(*at, points[at].measured)
        return speeds(lambda at: model.samples_per_s(*at))

    return {
        "Optimus": optimus,
        "solver": lambda _: speeds(lambda at: points[at].predicted),
        "scaled": scaled,
        "calibrated": calibrated,
        "both": both,
    }


def _terms(counts: Sequence[Counts]) -> Floats:
    workers, ps = np.array(counts, dtype=np.float64).T
    return seconds_per_sample_terms(workers, ps, synchronous=False)


def _optimus(observed: Sequence[Counts], speeds: Sequence[float]) -> Floats:
    return nnls(_terms(observed) * np.array(speeds)[:, None], np.ones(len(speeds)))


@functools.cache
def _cluster(case: Case) -> Cluster:
    with (DATA / "links.csv").open(encoding="utf-8", newline="") as lines:
        payload = {float(row["nominal_mbps"]): float(row["payload_mbps"]) for row in csv.DictReader(lines)}
    return cluster(case, [payload[rate] for rate in case.rates_mbps])


def _points(case: Case) -> dict[Counts, Point]:
    """The measured layouts by numbers of workers and ps; of several, the one predicted to be fastest."""
    scenario = Scenario.of(profile(case), _cluster(case), known_hardware())
    points: dict[Counts, Point] = {}
    with (DATA / "steps.csv").open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            if row["case"] == case.name:
                assignment = _assignment(row["layout"])
                counts = len(assignment.workers), len(assignment.ps)
                point = Point(assignment, _predicted(scenario, assignment), counts[0] / float(row["seconds"]))
                if counts not in points or point.predicted > points[counts].predicted:
                    points[counts] = point
    return points


def _assignment(layout: str) -> Assignment:
    """Parses 'host-0:p0+1w host-1:1w'."""
    ps: dict[int, str] = {}
    workers: list[str] = []
    for host in layout.split():
        node, _, tasks = host.partition(":")
        for task in tasks.split("+"):
            if task.startswith("p"):
                ps[int(task[1:])] = node
            else:
                workers += [node] * int(task.removesuffix("w"))
    return Assignment(tuple(ps[index] for index in sorted(ps)), tuple(workers), None)


def _predicted(scenario: Scenario, assignment: Assignment) -> float:
    """Steps of all workers per second."""
    shards = scenario.shards(len(assignment.ps))
    return len(assignment.workers) / evaluate(scenario, SHAPE, shards, assignment).step_time.total


def _synthetic_jobs() -> Iterator[str]:
    methods = ("Optimus", "solver", "scaled", "both", "Optimus, sample runs", "both, sample runs")
    yield f"| observations | {' | '.join(methods)} |"
    yield f"|---|{'---|' * len(methods)}"
    random = np.random.default_rng(SEED)
    jobs = [_true_and_estimated(random) for _ in range(SYNTHETIC_JOBS)]
    for count in OBSERVATIONS:
        errors: dict[str, list[float]] = {name: [] for name in methods}
        for true, estimated in jobs:
            ps, workers = np.unravel_index(random.permutation(true.size)[:count], true.shape)
            model = _speed_model(estimated)
            for name, counts in (
                ("", [(int(w) + 1, int(p) + 1) for w, p in zip(workers, ps, strict=True)]),
                (", sample runs", sample_sizes(model, count)),
            ):
                learned = _speed_model(estimated)
                noisy = [true[p - 1, w - 1] * float(1 + 0.05 * random.standard_normal()) for w, p in counts]
                for at, speed in zip(counts, noisy, strict=True):
                    learned.observe(*at, speed)
                errors[f"both{name}"].append(_error(learned.table(), true))
                if count:
                    form = 1 / (model.terms @ _optimus(counts, noisy))
                    errors[f"Optimus{name}"].append(_error(form, true))
                if not name:
                    ratios = [speed / estimated[p - 1, w - 1] for (w, p), speed in zip(counts, noisy, strict=True)]
                    errors["solver"].append(_error(estimated, true))
                    errors["scaled"].append(_error(estimated * (statistics.median(ratios) if ratios else 1), true))
        cells = [f"{statistics.mean(errors[name]):.0%}" if errors[name] else "-" for name in methods]
        yield f"| {count} | {' | '.join(cells)} |"


def _speed_model(speeds: Floats) -> SpeedModel:
    most_ps, most_workers = speeds.shape
    return SpeedModel(
        lambda workers, ps: float(speeds[ps - 1, workers - 1]),
        synchronous=False,
        max_workers=most_workers,
        max_ps=most_ps,
    )


def _error(predicted: Floats, true: Floats) -> float:
    return float(np.abs(predicted / true - 1).mean())


def _true_and_estimated(random: np.random.Generator) -> tuple[Floats, Floats]:
    """Draws the true speeds of a synthetic job, and the solver's estimates."""
    model = random_model(random, synchronous=bool(random.integers(2)))
    gpu, card, update = MAX_HARDWARE_RATIO ** random.uniform(-1, 1, 3)
    hardware = known_hardware()
    gpus = {
        name: dataclasses.replace(one, training_flops_per_s=one.training_flops_per_s * gpu)
        for name, one in hardware.gpus.items()
    }
    true_hardware = dataclasses.replace(hardware, gpus=gpus, ps_bytes_per_s=hardware.ps_bytes_per_s * update)
    return _speeds(model, true_hardware, card), _speeds(model, hardware, 1.0)


def _speeds(model: ModelProfile, hardware: Hardware, card: float) -> Floats:
    nodes = uniform_cluster(SYNTHETIC_WORKERS).nodes
    known_cluster = Cluster(tuple(dataclasses.replace(node, network_gbps=node.network_gbps * card) for node in nodes))
    job = PlanJob("made up", model, max_workers=SYNTHETIC_WORKERS)
    table = FormCatalogue([job], known_cluster, node_kinds(known_cluster), hardware).forms(job)[0].table
    return 1 / np.array(
        [[table.s_per_sample(w, p) for w in range(1, SYNTHETIC_WORKERS + 1)] for p in range(1, table.max_ps + 1)]
    )


def _pollux() -> Iterator[str]:
    yield "| observations | Optimus | solver's form |"
    yield "|---|---|---|"
    form = next(form for form in FORMS if form.name == POLLUX_FORM)
    for count in POLLUX_OBSERVATIONS:
        random = np.random.default_rng(SEED)
        errors: dict[str, list[float]] = {"Optimus": [], "solver": []}
        for model in MODELS:
            small, large = small_placements(model), large_placements(model)
            for _ in range(POLLUX_DRAWS):
                rows = np.isin(np.arange(len(small.seconds)), random.permutation(len(small.seconds))[:count])
                seen = small.where(rows)
                unit = float(np.median(seen.batch))
                factors = nnls(_optimus_terms(seen, unit) / seen.seconds[:, None], np.ones(count))
                errors["Optimus"].append(_error(_optimus_terms(large, unit) @ factors, large.seconds))
                errors["solver"].append(_error(form.fit(seen)(large), large.seconds))
        yield f"| {count} | {statistics.mean(errors['Optimus']):.0%} | {statistics.mean(errors['solver']):.0%} |"


def _optimus_terms(trace: Trace, unit: float) -> Floats:
    """Optimus' form if every worker is also a ps: a constant, the batch, and the number of workers."""
    return np.stack([np.ones(len(trace.gpus)), trace.batch / unit, trace.gpus], axis=1)
