"""Measures the errors of forms of the step-time model on recorded step times that they were not fitted to."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

from benchmarks.pollux_traces import FORMS, MODELS, Form, Trace, large_placements, small_placements
from dike.profile import ModelProfile
from solver import Cluster, NodeClass, make_plan
from solver.calibration.nnls import Floats
from solver.drawing.figure_files import new_figure, save_figure
from solver.hardware import known_hardware
from solver.settings import PlanSettings
from solver.units import GIB

TITLE = "Step times: predicted against recorded"
SEED = 7
PICTURE = Path(__file__).parent / "results" / "step_time.png"
RESNET50_STEP_FLOPS = 23.3e9
SHARING_GPUS = (1, 2, 4)
SHARED = ((81, 40, 20), (115, 57, 28), (163, 81, 40))
"""Samples of each of 1, 2 and 4 GPUs; each row is about one batch."""
RESNET50 = Path(__file__).parent / "data" / "throughput" / "resnet50.csv"
PROFILES = Path(__file__).parent / "data" / "profiles"
DRAWN = "bytes, sum"


@dataclass(frozen=True)
class Split:
    """Placements that a form is fitted to (`known`), and those to predict (`unknown`)."""

    name: str
    known: dict[str, Trace]
    unknown: dict[str, Trace]


@dataclass(frozen=True)
class Score:
    """Accuracy of predictions.

    Attributes:
        rank: Spearman's rank correlation of predicted and recorded step times.
        rank_of_placements: the same among placements with the same batch, mean over the batches.
    """

    mean: float
    median: float
    rank: float
    rank_of_placements: float


def measure() -> Iterator[str]:
    """Reports errors on placements that were left out of the fit, and draws a picture."""
    yield (
        "Data: `benchmarks/data/pollux`, six models on up to 16 machines of 4 T4, all-reduce. Computing is a constant "
        "and a time per sample. The network is either what the busiest link carries at a speed ('bytes', the way Dike "
        "counts), or a constant and a time per further GPU ('GPUs', Pollux); each inside one machine and between "
        "machines. The step is their sum, the longer of the two, or Pollux' norm between these. Fitted by "
        "`solver.calibration`, the fit behind `--measurements`; every figure is of placements not fitted to."
    )
    splits = _splits()
    predicted = {
        (split.name, form.name, model): _predict(form, split, model)
        for split in splits
        for form in FORMS
        for model in MODELS
    }
    for split in splits:
        rows = sum(len(trace.seconds) for trace in split.unknown.values())
        yield from ("", f"## {split.name} ({rows:,} rows to predict)", "")
        yield "Relative error, mean / median; rank correlation of all step times / of placements with the same batch."
        yield ""
        yield f"| model | {' | '.join(form.name for form in FORMS)} |"
        yield f"|---|{'---|' * len(FORMS)}"
        for model in MODELS:
            scores = [_score(split.unknown[model], predicted[split.name, form.name, model]) for form in FORMS]
            yield f"| {model} | {' | '.join(_cell(score) for score in scores)} |"
        all_scores = [
            [_score(split.unknown[model], predicted[split.name, form.name, model]) for model in MODELS]
            for form in FORMS
        ]
        yield f"| mean | {' | '.join(_cell(_mean(scores)) for scores in all_scores)} |"
    _draw(splits[-1], {model: predicted[splits[-1].name, DRAWN, model] for model in MODELS})
    yield from ("", f"![predicted and recorded step times]({PICTURE.name})", "")
    yield f"The picture: {splits[-1].name[0].lower()}{splits[-1].name[1:]}, form '{DRAWN}'."
    yield from ("", _two_machines(), "", "## Speeds of GPUs: the table against records", "")
    yield from _table_speeds()
    yield from ("", "## Several GPUs of one machine that share a batch", "")
    yield from _shared_batches()


def _splits() -> tuple[Split, ...]:
    small = {model: small_placements(model) for model in MODELS}
    large = {model: large_placements(model) for model in MODELS}
    random = np.random.default_rng(SEED)
    half = {
        model: np.isin(trace.placement, random.permutation(trace.placement.max() + 1)[: trace.placement.max() // 2])
        for model, trace in small.items()
    }
    return (
        Split(
            "Fitted to a random half of the placements on 1 to 4 machines, predicting the other half",
            {model: trace.where(half[model]) for model, trace in small.items()},
            {model: trace.where(~half[model]) for model, trace in small.items()},
        ),
        Split(
            "Fitted to 1 and 2 machines, predicting 3 and 4",
            {model: trace.where(trace.nodes <= 2) for model, trace in small.items()},
            {model: trace.where(trace.nodes > 2) for model, trace in small.items()},
        ),
        Split("Fitted to 1 to 4 machines, predicting 6 to 16", small, large),
    )


def _predict(form: Form, split: Split, model: str) -> Floats:
    return form.fit(split.known[model])(split.unknown[model])


def _score(trace: Trace, predicted: Floats) -> Score:
    errors = np.abs(predicted / trace.seconds - 1)
    same_batch = [
        _rank_correlation(predicted[trace.batch == batch], trace.seconds[trace.batch == batch])
        for batch in np.unique(trace.batch)
    ]
    whole = _rank_correlation(predicted, trace.seconds)
    return Score(float(errors.mean()), float(np.median(errors)), whole, float(np.mean(same_batch)))


def _rank_correlation(first: Floats, second: Floats) -> float:
    """Spearman's rank correlation; ties share their mean rank, constants correlate with nothing."""
    ranks = [_ranks(values) for values in (first, second)]
    if any(np.ptp(values) == 0 for values in ranks):
        return 0.0
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _ranks(values: Floats) -> Floats:
    # Values equal up to rounding tie.
    _, inverse, counts = np.unique(np.round(values, 12), return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    middle: Floats = ((last - counts + 1 + last) / 2)[inverse]
    return middle


def _mean(scores: list[Score]) -> Score:
    columns = zip(*((score.mean, score.median, score.rank, score.rank_of_placements) for score in scores), strict=True)
    return Score(*(float(np.mean(column)) for column in columns))


def _cell(score: Score) -> str:
    return f"{score.mean:.1%} / {score.median:.1%}; {score.rank:.2f} / {score.rank_of_placements:.2f}"


def _two_machines() -> str:
    """Reports step times on two machines relative to three with as many GPUs and the same batch."""
    ratios = []
    for model in MODELS:
        trace = small_placements(model)
        for gpus in np.unique(trace.gpus[trace.nodes == 3]):
            for batch in np.unique(trace.batch):
                alike = (trace.gpus == gpus) & (trace.batch == batch)
                two, three = (trace.seconds[alike & (trace.nodes == nodes)] for nodes in (2, 3))
                if len(two) and len(three):
                    ratios.append(float(np.median(two) / np.median(three)))
    return (
        f"The recorded steps on 2 machines are the longer ones: x {np.median(ratios):.2f} (median over models, GPUs "
        "and batches) of those on 3 with as many GPUs and the same batch. No form here can follow that, so those "
        "fitted to 1 and 2 machines predict too long steps on 3 and 4."
    )


def _table_speeds() -> Iterator[str]:
    """Compares the table of GPUs with published speeds of ResNet50 on one of them."""
    trace = small_placements("imagenet")
    alone = trace.where(trace.gpus == 1)
    slope_s, _ = np.polyfit(alone.batch, alone.seconds, 1)
    with RESNET50.open(encoding="utf-8", newline="") as file:
        recorded = list(csv.DictReader(file))
    t4 = {"gpu": "T4", "variant": "AWS g4dn", "batch": "slope", "fitted": "yes", "source": "Pollux (PyTorch)"}
    recorded.append(t4 | {"images_per_s": f"{1 / slope_s}"})
    yield "ResNet50 on one GPU, images/s in single precision (TF32 where the GPU has it), by `solver/hardware.yaml` and"
    yield "as others recorded it (`benchmarks/data/throughput/resnet50.csv`). *Fitted*: the table's figure is this one."
    yield "MLPerf's ResNet50 runs of A100 and H100 are in half precision, and not compared."
    yield ""
    yield "| GPU | | batch | recorded | by the table | error | source |"
    yield "|---|---|---|---|---|---|---|"
    errors: list[float] = []
    for row in recorded:
        images_per_s = float(row["images_per_s"])
        table = known_hardware().gpu(row["gpu"]).training_flops_per_s / RESNET50_STEP_FLOPS
        if not row["fitted"]:
            errors.append(abs(table / images_per_s - 1))
        error = "fitted" if row["fitted"] else f"{table / images_per_s - 1:+.0%}"
        speeds = f"{images_per_s:,.0f} | {table:,.0f} | {error}"
        yield f"| {row['gpu']} | {row['variant']} | {row['batch']} | {speeds} | {row['source']} |"
    yield ""
    mean, median = np.mean(errors), np.median(errors)
    yield f"Of the {len(errors)} not fitted to the mean error is {mean:.0%}, the median {median:.0%}."


def _shared_batches() -> Iterator[str]:
    """Compares predictions of one task, and of gangs on 2 and 4 GPUs, with recorded steps."""
    trace = small_placements("imagenet")
    profile = ModelProfile.loads((PROFILES / "resnet50.json").read_text(encoding="utf-8"))
    resnet50 = dataclasses.replace(profile, why_not_split="", sample_bytes=0)
    machine = NodeClass(name="t4", cpus=48, mem_bytes=192 * GIB, gpus=4, gpu_model="T4")
    yield "ResNet50 with one batch that 1, 2 and 4 T4 of one machine share (AWS g4dn; Pollux, PyTorch, all-reduce), and"
    yield "the planner's gang of as many workers (`dike plan keras:ResNet50 --strategy allreduce`, 64 Gb/s between the"
    yield "GPUs, input left out). Batches are those nearest to each other that were recorded."
    yield ""
    yield "| GPUs x samples | recorded images/s | predicted | error | recorded, to one GPU | predicted |"
    yield "|---|---|---|---|---|---|"
    errors: list[float] = []
    for row in SHARED:
        alone: tuple[float, float] | None = None
        for gpus, samples in zip(SHARING_GPUS, row, strict=True):
            is_case = (trace.nodes == 1) & (trace.gpus == gpus) & (trace.batch == samples)
            recorded = gpus * samples / float(np.mean(trace.seconds[is_case]))
            model = resnet50.with_batch_size(gpus * samples)
            request = PlanSettings(strategy="one" if gpus == 1 else "allreduce").request(
                model, Cluster((machine,)), min_workers=gpus, max_workers=gpus
            )
            plan = make_plan(request)
            assert [task.gpus for task in plan.tasks] == [1] * gpus, "the plan uses all of them"
            speeds = recorded, plan.samples_per_s
            alone = alone or speeds
            errors.append(abs(speeds[1] / speeds[0] - 1))
            ratios = " | ".join(f"{speed / first:.2f}" for speed, first in zip(speeds, alone, strict=True))
            error = f"{speeds[1] / speeds[0] - 1:+.0%}"
            yield f"| {gpus} x {samples} | {speeds[0]:,.0f} | {speeds[1]:,.0f} | {error} | {ratios} |"
    yield ""
    yield f"The mean error is {np.mean(errors):.0%}. A recorded step has a constant part that shrinks with no number of"
    yield "GPUs. The planner has one for the exchange only, measured for CPUs. No step of Keras on several GPUs has"
    yield "been measured."


def _draw(split: Split, predicted: dict[str, Floats]) -> None:
    figure = new_figure(10, 6.4)
    for index, model in enumerate(MODELS):
        axes = figure.add_subplot(2, 3, index + 1)
        trace = split.unknown[model]
        least, most = float(trace.seconds.min()) * 0.7, float(trace.seconds.max()) * 1.4
        axes.plot([least, most], [least, most], color="#888888", linewidth=0.8)
        for nodes, colour in ((6, "#5b8fd6"), (8, "#7ab37a"), (12, "#e8a33d"), (16, "#b05050")):
            here = trace.nodes == nodes
            axes.scatter(
                trace.seconds[here], predicted[model][here], s=5, color=colour, label=f"{nodes} machines", linewidths=0
            )
        axes.set(xscale="log", yscale="log", xlim=(least, most), ylim=(least, most), title=model)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(FormatStrFormatter("%g"))
            axis.set_minor_formatter(NullFormatter())
        if index % 3 == 0:
            axes.set_ylabel("predicted (s)")
        if index >= 3:
            axes.set_xlabel("recorded (s)")
        if index == 0:
            axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    save_figure(figure, PICTURE)
