"""Calibration: each term of the step time gets the factor that brings predictions closest to the measurements."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dike.exceptions import BadInputError
from dike.profile import ModelProfile
from solver.calibration.measured_rows import MeasuredRows, Measurement
from solver.calibration.step_terms import TERMS
from solver.cluster import Cluster
from solver.hardware import Gpu, Hardware, known_hardware

MIN_LEAVE_ONE_OUT_ROWS = 4
"""Minimum rows for leave-one-out errors; with fewer they say too little."""
MIN_IMPROVEMENT = 1e-6
"""Minimum reduction of the squared error for which overlap is assumed; less is rounding."""


@dataclass(frozen=True)
class Calibration:
    """Corrections of the speeds in `hardware.yaml` and in the cluster file, fitted to measurements.

    Attributes:
        factors: term (`solver.calibration.step_terms.TERMS`) -> factor on its time.
        not_identified: terms that the measurements do not determine; their factor is 1.
        overlap: whether transfers overlap a synchronous step's work; the better fit of the two is kept.
        error_before: mean relative error of the predictions without calibration, as a share of the measured time.
        mean_error: the same with calibration.
        worst_error: largest relative error with calibration.
        left_out_error: mean relative error for each row with the factors fitted to the others; None below four rows.
        left_out_worst: the largest of these.
    """

    factors: Mapping[str, float] = field(hash=False)
    not_identified: tuple[str, ...]
    overlap: bool
    rows: int
    error_before: float
    mean_error: float
    worst_error: float
    left_out_error: float | None = None
    left_out_worst: float | None = None

    def apply(self, hardware: Hardware, cluster: Cluster) -> tuple[Hardware, Cluster]:
        """Applies the factors to hardware and cluster speeds.

        All GPU models and the CPUs share the factor of `compute`, so their ratios stay as in the table. Network cards,
        uplinks and links inside machines share that of `network`.
        """
        compute, link = self.factors["compute"], self.factors["network"]

        def slower(gpu: Gpu) -> Gpu:
            return dataclasses.replace(gpu, training_flops_per_s=gpu.training_flops_per_s / compute)

        apis = {
            api: dataclasses.replace(
                costs,
                latency_s=costs.latency_s * self.factors["latency"],
                dispatch_s=costs.dispatch_s * self.factors["dispatch"],
            )
            for api, costs in hardware.apis.items()
        }
        across = cluster.across_racks_gbps
        return (
            dataclasses.replace(
                hardware,
                gpus={name: slower(gpu) for name, gpu in hardware.gpus.items()},
                unknown_gpu=slower(hardware.unknown_gpu),
                core_training_flops_per_s=hardware.core_training_flops_per_s / compute,
                core_input_bytes_per_s=hardware.core_input_bytes_per_s / self.factors["input"],
                step_latency_s=hardware.step_latency_s * self.factors["latency"],
                apis=apis,
                ps_bytes_per_s=hardware.ps_bytes_per_s / self.factors["update"],
                overlap=self.overlap,
            ),
            dataclasses.replace(
                cluster,
                nodes=tuple(dataclasses.replace(node, network_gbps=node.network_gbps / link) for node in cluster.nodes),
                within_node_gbps=cluster.within_node_gbps / link,
                across_racks_gbps=None if across is None else across / link,
            ),
        )

    def sentences(self) -> tuple[str, ...]:
        found = [f"{term} x {self.factors[term]:.2g}" for term in TERMS if term not in self.not_identified]
        rows = f"{self.rows} measurement{'' if self.rows == 1 else 's'}"
        first = (
            f"Calibrated with {rows}: {', '.join(found) or 'nothing changed'}; mean error {self.mean_error:.1%}, worst "
            f"{self.worst_error:.1%}, before {self.error_before:.1%}"
        )
        if self.left_out_error is not None and self.left_out_worst is not None:
            first += f"; of rows left out of the fit {self.left_out_error:.1%}, worst {self.left_out_worst:.1%}"
        if not self.not_identified:
            return (f"{first}.",)
        return (
            f"{first}.",
            f"The measurements do not determine the factors of {', '.join(self.not_identified)}; these stay 1.",
        )

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "factors": dict(self.factors), "not_identified": list(self.not_identified)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Calibration:
        """Reads the output of `to_json`.

        Raises:
            BadInputError: if a key is missing or unknown, or a value is invalid.
        """
        try:
            values = dict(data)
            values["factors"] = {term: float(values["factors"][term]) for term in TERMS}
            values["not_identified"] = tuple(values["not_identified"])
            calibration = cls(**values)
            if not all(math.isfinite(factor) and factor > 0 for factor in calibration.factors.values()):
                raise ValueError("the factors must be above 0")
            for name in ("rows", "error_before", "mean_error", "worst_error", "left_out_error", "left_out_worst"):
                value = values.get(name)
                if value is not None and not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
                    raise ValueError(f"'{name}' must be a number of at least 0, not {value!r}")
            if unknown := set(calibration.not_identified) - set(TERMS):
                raise ValueError(f"'{unknown.pop()}' is not a term; terms are {', '.join(TERMS)}")
        except KeyError as error:
            raise BadInputError(f"This is not a calibration of Dike: key {error} is missing.") from error
        except (TypeError, ValueError) as error:
            raise BadInputError(
                f"This is not a calibration of Dike: {str(error).replace('.__init__()', '')}."
            ) from error
        return calibration


def fit(
    measurements: Sequence[Measurement],
    profile: ModelProfile,
    cluster: Cluster,
    hardware: Hardware | None = None,
    *,
    leave_one_out: bool = True,
) -> Calibration:
    """Fits the factors that bring the model's step times closest to the measurements.

    Least squares of the relative errors with factors of at least 0 (`relative_fit.py`), once with transfers that
    overlap the work and once without; the better is kept.

    Args:
        measurements: at least one, all of this model.
        profile: the model.
        cluster: the measured machines.
        hardware: speeds to correct; by default those of `hardware.yaml`.
        leave_one_out: whether to estimate the error for rows left out; takes a fit for each row.

    Raises:
        BadInputError: if there is no measurement, or one is of other machines or of another model.
    """
    rows = MeasuredRows.of(measurements, profile, cluster, hardware or known_hardware())
    found, overlap = rows.fit(overlap=False), False
    if profile.synchronous:
        overlapped = rows.fit(overlap=True)
        if overlapped.squared_error < found.squared_error - MIN_IMPROVEMENT:
            found, overlap = overlapped, True
    has_enough_rows = leave_one_out and len(measurements) >= MIN_LEAVE_ONE_OUT_ROWS
    left_out = rows.left_out_errors(found, overlap=overlap) if has_enough_rows else None
    table = rows.errors(np.ones(len(TERMS)), overlap=(hardware or known_hardware()).overlap)
    return Calibration(
        factors=dict(zip(TERMS, found.factors.tolist(), strict=True)),
        not_identified=tuple(term for term, known in zip(TERMS, found.identified, strict=True) if not known),
        overlap=overlap,
        rows=len(measurements),
        error_before=float(np.abs(table).mean()),
        mean_error=float(np.abs(found.errors).mean()),
        worst_error=float(np.abs(found.errors).max()),
        left_out_error=None if left_out is None else float(np.abs(left_out).mean()),
        left_out_worst=None if left_out is None else float(np.abs(left_out).max()),
    )
