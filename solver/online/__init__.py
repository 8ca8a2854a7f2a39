"""Models learned from running jobs, and resource allocation by them (Optimus, EuroSys 2018)."""

from __future__ import annotations

from solver.online.allocation import OnlineJob, allocate
from solver.online.convergence import ConvergenceModel, LossCurve, StepsLeft
from solver.online.speed import SpeedModel, sample_sizes

__all__ = [
    "ConvergenceModel",
    "LossCurve",
    "OnlineJob",
    "SpeedModel",
    "StepsLeft",
    "allocate",
    "sample_sizes",
]
