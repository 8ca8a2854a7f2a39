"""Corrects predictions by measurements."""

from __future__ import annotations

from solver.calibration.calibration import Calibration, fit
from solver.calibration.measured_rows import Measurement
from solver.calibration.measurements import read_measurements

__all__ = ["Calibration", "Measurement", "fit", "read_measurements"]
