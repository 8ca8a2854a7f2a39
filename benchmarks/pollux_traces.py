"""Recorded step times of Pollux (OSDI 2021), and forms of the step time to fit to them."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from solver.calibration.nnls import Floats
from solver.calibration.relative_fit import Gradients, RelativeFit, fit_factors, predictions

FOLDER = Path(__file__).parent / "data" / "pollux"
MODELS = ("bert", "cifar10", "deepspeech2", "imagenet", "ncf", "yolov3")
GAMMAS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0)
"""Pollux limits gamma to 1 to 10."""


@dataclass(frozen=True)
class Trace:
    """Measurements of one model; arrays have one entry for each row.

    Attributes:
        batch: samples per GPU and step.
    """

    nodes: NDArray[np.int64]
    gpus: NDArray[np.int64]
    batch: NDArray[np.int64]
    seconds: Floats
    placement: NDArray[np.int64]

    def where(self, rows: NDArray[np.bool_]) -> Trace:
        return Trace(self.nodes[rows], self.gpus[rows], self.batch[rows], self.seconds[rows], self.placement[rows])


def small_placements(model: str) -> Trace:
    """Reads 1 to 4 machines, every way to use 1 to 4 GPUs of each."""
    rows = _rows(model, "placements.csv")
    texts = [row["placement"] for row in rows]
    return _trace(rows, [len(text) for text in texts], [sum(map(int, text)) for text in texts], texts)


def large_placements(model: str) -> Trace:
    """Reads 6 to 16 machines, 6 to 64 GPUs."""
    rows = _rows(model, "scalability.csv")
    nodes, gpus = [int(row["num_nodes"]) for row in rows], [int(row["num_replicas"]) for row in rows]
    return _trace(rows, nodes, gpus, [f"{row['num_nodes']}x{row['num_replicas']}" for row in rows])


def _rows(model: str, name: str) -> list[dict[str, str]]:
    with (FOLDER / model / name).open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def _trace(rows: list[dict[str, str]], nodes: list[int], gpus: list[int], placements: list[str]) -> Trace:
    numbers = {text: number for number, text in enumerate(dict.fromkeys(placements))}
    return Trace(
        np.array(nodes),
        np.array(gpus),
        np.array([int(row["local_bsz"]) for row in rows]),
        np.array([float(row["step_time"]) for row in rows]),
        np.array([numbers[text] for text in placements]),
    )


Combine = Callable[[Floats, Floats, Floats], Floats]
"""(computing rows x terms, network rows x terms, factors) -> derivatives of the step time."""


def _compute_only(computing: Floats, network: Floats, factors: Floats) -> Floats:
    return computing


def _sum(computing: Floats, network: Floats, factors: Floats) -> Floats:
    return computing + network


def _longer(computing: Floats, network: Floats, factors: Floats) -> Floats:
    return np.where((computing @ factors >= network @ factors)[:, None], computing, network)


def _norm(gamma: float) -> Combine:
    """Pollux' form, (T_grad^gamma + T_sync^gamma)^(1/gamma)."""

    def combine(computing: Floats, network: Floats, factors: Floats) -> Floats:
        grad, sync = (computing @ factors)[:, None], (network @ factors)[:, None]
        whole = (grad**gamma + sync**gamma) ** (1 / gamma)
        derivatives: Floats = (grad / whole) ** (gamma - 1) * computing + (sync / whole) ** (gamma - 1) * network
        return derivatives

    return combine


Terms = Callable[[Trace], tuple[Floats, Floats]]
"""Rows -> the network's terms inside one machine and between machines (rows x terms each), for factors in seconds."""


def _per_gpu(trace: Trace) -> tuple[Floats, Floats]:
    """Pollux (section 3.2): a constant, and a time for each GPU beyond two."""
    terms = np.stack([np.ones(len(trace.gpus)), np.maximum(trace.gpus - 2.0, 0)], axis=1)
    return terms, terms


def _per_byte(trace: Trace) -> tuple[Floats, Floats]:
    """Dike: bytes on the busiest link, here 2 (n - 1) / n of the model in a ring of n."""
    inside, between = ((2 * (count - 1) / count)[:, None] for count in (trace.gpus, trace.nodes))
    return inside, between


@dataclass(frozen=True)
class Form:
    """A step time made of computing (a constant and a time per sample) and the network.

    Attributes:
        shapes: ways to combine the two; the best fit is used.
    """

    name: str
    terms: Terms
    shapes: tuple[Combine, ...]

    def fit(self, trace: Trace) -> Callable[[Trace], Floats]:
        """Fits to a trace; returns a predictor for others."""
        unit_s, batch = float(np.median(trace.seconds)), float(np.median(trace.batch))
        computing, network = self._columns(trace, unit_s, batch)
        factors = np.ones(computing.shape[1])
        best: RelativeFit | None = None
        for shape in self.shapes:
            # Warm start from the previous shape.
            found = fit_factors(_gradients(computing, network, shape), trace.seconds, factors)
            factors = found.factors
            if best is None or found.squared_error < best.squared_error:
                best, combine = found, shape
        assert best is not None
        fitted = best.factors
        return lambda other: predictions(_gradients(*self._columns(other, unit_s, batch), combine), fitted)

    def _columns(self, trace: Trace, unit_s: float, batch: float) -> tuple[Floats, Floats]:
        """Computing and network in units in which factors are near 1."""
        computing = np.stack([np.ones(len(trace.batch)), trace.batch / batch], axis=1)
        inside, between = self.terms(trace)
        inside = inside * ((trace.nodes == 1) & (trace.gpus > 1))[:, None]
        between = between * (trace.nodes > 1)[:, None]
        network = np.concatenate([inside, between], axis=1)
        return (
            unit_s * np.concatenate([computing, np.zeros_like(network)], axis=1),
            unit_s * np.concatenate([np.zeros_like(computing), network], axis=1),
        )


def _gradients(computing: Floats, network: Floats, combine: Combine) -> Gradients:
    return lambda factors: combine(computing, network, factors)


FORMS = (
    Form("computing alone", _per_gpu, (_compute_only,)),
    Form("bytes, sum", _per_byte, (_sum,)),
    Form("bytes, longer", _per_byte, (_longer,)),
    Form("GPUs, sum", _per_gpu, (_sum,)),
    Form("GPUs, longer", _per_gpu, (_longer,)),
    Form("GPUs, norm (Pollux)", _per_gpu, tuple(_norm(gamma) for gamma in GAMMAS)),
)
