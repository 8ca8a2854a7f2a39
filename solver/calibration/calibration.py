"""Speeds corrected by measurements: each term of the step time gets the factor with which predictions come nearest."""

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

LEAVE_ONE_OUT_FROM = 4
"""With fewer rows than this, what is left says too little."""
BETTER = 1e-6
"""Overlap is assumed only where it makes the squared error smaller by more than rounding."""


@dataclass(frozen=True)
class Calibration:
    """What measurements say of the speeds in `hardware.yaml` and in the cluster file.

    Attributes:
        factors: term (`solver.step_terms.TERMS`) -> how many times as long it takes.
        not_identified: terms the measurements say nothing of, or that they cannot tell from others; their factor is 1.
        overlap: whether transfers run beside a synchronous step's work; the better of the two is kept.
        rows: how many measurements there were.
        error_before: mean relative error of the predictions without calibration, as a share of what was measured.
        mean_error: the same with it.
        worst_error: largest relative error with it.
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
        """The speeds with which the step-time model predicts what the fit does.

        All GPU models and the CPUs share the factor of `compute`: how they compare stays as the table has it. Network
        cards, uplinks and links inside machines share that of `network`.
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
        """What was found, for the user."""
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
            f"The measurements cannot tell the factors of {', '.join(self.not_identified)}; these stay 1.",
        )

    def to_json(self) -> dict[str, Any]:
        """The calibration as JSON values; `from_json` reads it back."""
        return {**dataclasses.asdict(self), "factors": dict(self.factors), "not_identified": list(self.not_identified)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Calibration:
        """Reads what `to_json` wrote.

        Raises:
            BadInputError: if a key is missing or unknown, or a value is not what it should be.
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
    """The factors with which the model's step times come nearest to the measurements.

    Least squares of the relative errors with factors of at least 0 (`relative_fit.py`), once with transfers that
    overlap the work and once without; the better is kept.

    Args:
        measurements: at least one, all of this model.
        profile: the model.
        cluster: the machines that were measured on.
        hardware: speeds to correct; by default those of `hardware.yaml`.
        leave_one_out: whether to say how well rows are foretold that are left out; takes a fit for each row.

    Raises:
        BadInputError: if there is no measurement, or one is of machines or of a model that this is not.
    """
    rows = MeasuredRows.of(measurements, profile, cluster, hardware or known_hardware())
    found, overlap = rows.fit(overlap=False), False
    if profile.synchronous:
        overlapped = rows.fit(overlap=True)
        if overlapped.squared_error < found.squared_error - BETTER:
            found, overlap = overlapped, True
    says_enough = leave_one_out and len(measurements) >= LEAVE_ONE_OUT_FROM
    left_out = rows.left_out_errors(found, overlap=overlap) if says_enough else None
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
